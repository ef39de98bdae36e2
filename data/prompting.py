"""Prompts: the interface that published weights were trained on, to the letter.

    parallel         BOS User {question} {parallel instruction} {instruction} Assistant [<think>\\n]
    sequential       BOS User {question} {instruction} Assistant [<think>\\n]
    raw_sequential   {question} {instruction}[<think>\\n]                       sequential rollouts for the SFT set, no chat tokens

`open_think` adds the bracket: on for RL, evaluation and everything sequential, off for SFT, where the model learns to write it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from dccot.config import named, require
from dccot.data.problems import Problem
from dccot.files import BadData
from dccot.rollout.protocol import THINK_OPEN

BOS, USER, ASSISTANT = "<｜begin▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"
CHAT_TOKENS = (BOS, USER, ASSISTANT)
INSTRUCTION = r"Let's think step by step and output the final answer within \boxed{}."
PARALLEL_INSTRUCTION = (
    "You can spawn multiple workers to solve this problem in parallel. The workers' thoughts are enclosed within "
    "<spawn_workers></spawn_workers> tags, and each worker's thought is enclosed within <worker_i></worker_i> tags, where i is the "
    "worker number, i.e. <spawn_workers><worker_1>worker 1's thought</worker_1><worker_2>worker 2's thought</worker_2>..."
    "</spawn_workers>."
)


@dataclass(frozen=True)
class PromptFormat:
    """What is written around a question, and whether the model that reads it may spawn workers."""

    before: str
    after: str
    parallel: bool = False
    raw: bool = False  # begins as the tokenizer begins a plain text, instead of spelling its own BOS

    def __call__(self, question: str) -> str:
        return self.before + question + self.after


PROMPTS = {
    "parallel": PromptFormat(f"{BOS}{USER}", f" {PARALLEL_INSTRUCTION} {INSTRUCTION}{ASSISTANT}", parallel=True),
    "sequential": PromptFormat(f"{BOS}{USER}", f" {INSTRUCTION}{ASSISTANT}"),
    "raw_sequential": PromptFormat("", f" {INSTRUCTION}", raw=True),
}


class UnusablePrompt(BadData):
    """A question that cannot be asked; the message says why, in the style `prompt has 1,893 tokens; … is 1,024`."""


@dataclass
class PromptConfig:
    kind: str = "parallel"  # parallel, sequential, raw_sequential, or your own PromptFormat: my_package.my_module:MY_FORMAT
    open_think: bool = True  # end the prompt with "<think>\n"
    max_prompt_tokens: int = 1024

    def check(self) -> None:
        format_of(self.kind)
        require(self.max_prompt_tokens > 0, f"prompt.max_prompt_tokens is {self.max_prompt_tokens}; it must be at least 1")

    def text(self, question: str) -> str:
        return format_of(self.kind)(question) + (f"{THINK_OPEN}\n" if self.open_think else "")

    @property
    def parallel(self) -> bool:
        """Whether the model is asked to spawn workers, and the engine lets it."""
        return format_of(self.kind).parallel

    def ids(self, tokenizer, question: str) -> list[int]:
        """Token ids of the prompt. Chat prompts spell their own BOS; the raw one gets whatever the tokenizer begins a plain text with."""
        check_tokenizer(tokenizer, self.kind)
        smuggled = [token for token in CHAT_TOKENS if token in question]
        if smuggled:
            raise UnusablePrompt(f"question holds the chat token {smuggled[0]!r}; remove it")
        ids = list(tokenizer.encode(self.text(question), add_special_tokens=format_of(self.kind).raw))
        if len(ids) > self.max_prompt_tokens:
            raise UnusablePrompt(f"prompt has {len(ids):,} tokens; prompt.max_prompt_tokens is {self.max_prompt_tokens:,}")
        return ids

    def whole_text(self, response_text: str) -> str:
        """The response as the well-formedness rules see it: with the `<think>` that the prompt wrote for it."""
        return f"{THINK_OPEN}\n{response_text}" if self.open_think else response_text


def format_of(kind: str) -> PromptFormat:
    found = named(PROMPTS, kind, "prompt.kind")
    require(isinstance(found, PromptFormat), f"prompt.kind is {kind!r}, a {type(found).__name__}; it must be a PromptFormat")
    return found


def check_tokenizer(tokenizer, kind: str = "parallel") -> None:
    """Refuse a tokenizer that does not know the chat tokens of this kind of prompt as single tokens."""
    needed = [token for token in CHAT_TOKENS if token in format_of(kind)("")]
    missing = [token for token in needed if tokenizer.convert_ids_to_tokens(tokenizer.encode(token, add_special_tokens=False)) != [token]]
    require(
        not missing,
        f"tokenizer {tokenizer.name_or_path!r} does not have {', '.join(missing)} as single tokens; "
        f"prompt.kind={kind} is written with them: use the model's own tokenizer or add them as special tokens",
    )


def prompts_of(
    problems: Iterable[Problem], tokenizer, config: PromptConfig, *, strict: bool = False, report: Callable[[str], None] = print
) -> list[tuple[Problem, list[int]]]:
    """Every problem with its prompt ids. Questions that cannot be asked are reported and left out; `strict` raises."""
    check_tokenizer(tokenizer, config.kind)
    kept, left_out = [], 0
    for problem in problems:
        try:
            kept.append((problem, config.ids(tokenizer, problem.question)))
        except UnusablePrompt as error:
            if strict:
                raise UnusablePrompt(f"{error} (problem id {problem.id})") from None
            left_out += 1
            if left_out <= 20:
                report(f"{error} (problem id {problem.id}); problem left out")
    if left_out:
        report(f"{left_out:,} of {left_out + len(kept):,} problems left out: their prompts cannot be used")
    if not kept:
        raise UnusablePrompt(f"no problem is left: all {left_out:,} prompts are unusable; raise prompt.max_prompt_tokens")
    return kept
