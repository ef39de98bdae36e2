"""Prompts: exactly the interface that published weights were trained on.

    parallel         BOS User {question} {parallel instruction} {instruction} Assistant [<think>\\n]
    sequential       BOS User {question} {instruction} Assistant [<think>\\n]
    raw_sequential   {question} {instruction}[<think>\\n]         sequential rollouts for the SFT set, no chat tokens

`open_think` adds the part in brackets: on for RL, evaluation and everything sequential, off for SFT, where the model
learns to write it.

This is for models that know DeepSeek's three chat tokens (`chat_format: deepseek`). Others use the chat template of
their own tokenizer (`chat_format: chat`): the same question and instructions as one user message, after the `system`
message if there is one; a `<think>` that the template itself opens is not doubled, and is removed if `open_think` is
off. `auto` uses what the tokenizer has.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from pydantic import AfterValidator

from dccot.core.config import ConfigError, Positive, lookup, require
from dccot.core.files import BadData
from dccot.core.limits import exceeds
from dccot.data.problems import Problem
from dccot.rollout.tags import THINK_CLOSE, THINK_OPEN, Width

BOS, USER, ASSISTANT = "<｜begin▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"
CHAT_TOKENS = (BOS, USER, ASSISTANT)
Options = Mapping[str, Any]
NONE: Options = {}
TEMPLATE_SECONDS, TEMPLATE_MB = 4, 1024  # CPU seconds and memory of a chat template for one short question
# how templates end that open the thinking, or skip it by closing it empty
OPENED = re.compile(rf"{THINK_OPEN}\s*(?:{THINK_CLOSE}\s*)?\Z")
INSTRUCTION = r"Let's think step by step and output the final answer within \boxed{}."
PARALLEL_INSTRUCTION = (
    "You can spawn multiple workers to solve this problem in parallel. The workers' thoughts are enclosed within "
    "<spawn_workers></spawn_workers> tags, and each worker's thought is enclosed within <worker_i></worker_i> tags, "
    "where i is the worker number, i.e. <spawn_workers><worker_1>worker 1's thought</worker_1><worker_2>worker 2's "
    "thought</worker_2>...</spawn_workers>."
)


def spawning_rules(workers: Width, depth: int) -> str:
    """What the parallel instruction is followed by: nothing for the paper's, a fixed number on one level."""
    listed = (
        "Before you spawn workers, list their tasks within <task_i></task_i> tags, i.e. <task_1>task 1</task_1>"
        "<task_2>task 2</task_2>...: one worker starts for each task, "
    )
    rules = [] if isinstance(workers, int) else [f"{listed}from {workers[0]} to {workers[1]} at a time."]
    deep = f"A worker can spawn workers of its own in the same way, up to {depth} levels deep."
    return " ".join(rules + [deep] * (depth > 1))


@dataclass(frozen=True)
class PromptFormat:
    """The text around a question, and whether the model may spawn workers."""

    before: str
    after: str
    parallel: bool = False
    raw: bool = False  # starts the way the tokenizer starts plain text, instead of spelling out BOS

    def __call__(self, question: str) -> str:
        return self.before + question + self.after

    @property
    def is_chat(self) -> bool:
        return any(token in self("") for token in CHAT_TOKENS)

    def message(self, question: str) -> str:
        """The user message, without the chat tokens around it."""
        return self.before.removeprefix(f"{BOS}{USER}") + question + self.after.removesuffix(ASSISTANT)


PROMPTS = {
    "parallel": PromptFormat(f"{BOS}{USER}", f" {PARALLEL_INSTRUCTION} {INSTRUCTION}{ASSISTANT}", parallel=True),
    "sequential": PromptFormat(f"{BOS}{USER}", f" {INSTRUCTION}{ASSISTANT}"),
    "raw_sequential": PromptFormat("", f" {INSTRUCTION}", raw=True),
}
Prompted = tuple[Problem, list[int]]  # a problem and the ids of its prompt


class UnusablePrompt(BadData):
    """A question that cannot be asked; the message says why, in the style `prompt has 1,893 tokens; … is 1,024`."""


def format_of(kind: str, key: str = "prompt.kind") -> PromptFormat:
    found = lookup(PROMPTS, kind, key)
    is_format = isinstance(found, PromptFormat)
    require(is_format, f"{key} is {kind!r}, a {type(found).__name__}; it must be a PromptFormat")
    return found


def _known_format(kind: str) -> str:
    format_of(kind, "")
    return kind


@dataclass
class PromptConfig:
    # parallel, sequential, raw_sequential, or your own PromptFormat: my_package.my_module:MY_FORMAT
    kind: Annotated[str, AfterValidator(_known_format)] = "parallel"
    open_think: bool = True  # end the prompt with "<think>\n"
    max_prompt_tokens: Positive = 1024  # longer problems are left out, and counted
    # deepseek: the paper's chat tokens; chat: the tokenizer's chat template; auto: what the tokenizer has
    chat_format: Literal["auto", "deepseek", "chat"] = "auto"
    system: str = ""  # chat: the system message; empty: none, or the template's own default
    instruction: str | None = None  # what follows the question; None: the task's
    # what a parallel prompt says about how many workers there are and how deep; None: by rollout.workers, rollout.depth
    spawning: str | None = None

    def check(self) -> None:
        fits = not self.system or self.chat_format != "deepseek"
        require(fits, "prompt.system is set; prompt.chat_format=deepseek has no system message")

    @property
    def wording(self) -> PromptFormat:
        """What surrounds the question."""
        found = format_of(self.kind)
        after = found.after.replace(INSTRUCTION, self.instruction or INSTRUCTION)
        rules = f"{PARALLEL_INSTRUCTION} {self.spawning}" if self.spawning else PARALLEL_INSTRUCTION
        return replace(found, after=after.replace(PARALLEL_INSTRUCTION, rules))

    def allowing(self, workers: Width, depth: int) -> PromptConfig:
        """A prompt that says so, if it does not yet."""
        return replace(self, spawning=spawning_rules(workers, depth)) if self.spawning is None else self

    @property
    def parallel(self) -> bool:
        """Whether the prompt invites the model to spawn workers, and the engine allows it."""
        return self.wording.parallel

    def text(
        self, question: str, tokenizer: Any = None, earlier: Sequence[dict[str, str]] = (), options: Options = NONE
    ) -> str:
        """The prompt in the tokenizer's format, or in the paper's; a chat template also takes `earlier` turns."""
        text = self.wording(question)
        if tokenizer is not None and self.chat_format_for(tokenizer) == "chat":
            text = OPENED.sub("", rendered(tokenizer, self.wording.message(question), self.system, earlier, options))
        return text + self._opening

    def whole_text(self, response_text: str) -> str:
        """The response as the well-formedness rules see it: with the `<think>` that the prompt wrote for it."""
        return self._opening + response_text

    @property
    def _opening(self) -> str:
        return f"{THINK_OPEN}\n" if self.open_think else ""

    def chat_format_for(self, tokenizer: Any) -> str:
        """deepseek, chat, or plain for a prompt without chat tokens; ConfigError if the tokenizer lacks them."""
        if not self.wording.is_chat:
            return "plain"
        missing = missing_chat_tokens(tokenizer)
        if self.chat_format != "chat" and not missing:
            remedy = "remove it, or set prompt.chat_format=chat"
            require(not self.system, f"prompt.system is set, but DeepSeek's prompt has none: {remedy}")
            return "deepseek"
        if self.chat_format != "deepseek" and tokenizer.chat_template:
            return "chat"
        without = f"tokenizer {tokenizer.name_or_path!r} does not have"
        if self.chat_format == "chat":
            needed = "with which prompt.chat_format=chat is written"
            raise ConfigError(f"{without} a chat template, {needed}: use an instruction-tuned model's")
        also = " and no chat template either" if self.chat_format == "auto" else ""
        raise ConfigError(
            f"{without} {', '.join(missing)} as single tokens{also}; prompt.kind={self.kind} is written with them: use "
            "the model's own tokenizer or add them as special tokens"
        )

    def ids(self, tokenizer: Any, question: str) -> list[int]:
        """Token ids of the prompt. Chat prompts spell out BOS; the raw one starts as the tokenizer starts any text."""
        self.chat_format_for(tokenizer)
        smuggled = [token for token in (*CHAT_TOKENS, *special_tokens(tokenizer)) if token in question]
        if smuggled:
            raise UnusablePrompt(f"question holds the chat token {smuggled[0]!r}; remove it")
        ids = list(tokenizer.encode(self.text(question, tokenizer), add_special_tokens=self.wording.raw))
        if len(ids) > self.max_prompt_tokens:
            limit = f"prompt.max_prompt_tokens is {self.max_prompt_tokens:,}"
            raise UnusablePrompt(f"prompt has {len(ids):,} tokens; {limit}")
        return ids


@functools.lru_cache(maxsize=8)
def missing_chat_tokens(tokenizer: Any) -> tuple[str, ...]:
    """Which of DeepSeek's chat tokens the tokenizer does not know as single tokens."""
    ids = ((token, tokenizer.encode(token, add_special_tokens=False)) for token in CHAT_TOKENS)
    return tuple(token for token, found in ids if tokenizer.convert_ids_to_tokens(found) != [token])


@functools.lru_cache(maxsize=8)
def special_tokens(tokenizer: Any) -> tuple[str, ...]:
    """Texts that the tokenizer turns into control tokens, longest first: messages name the whole token."""
    added = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    return tuple(sorted(added | set(tokenizer.all_special_tokens), key=len, reverse=True))


@functools.lru_cache(maxsize=8)
def _template_fault(tokenizer: Any) -> str | None:
    """Templates come with models, and loop and multiply texts as they like."""
    turns = [{"role": "user", "content": "What is 1 + 1?"}]
    render = functools.partial(tokenizer.apply_chat_template, turns, tokenize=False, add_generation_prompt=True)
    return exceeds(render, TEMPLATE_SECONDS, TEMPLATE_MB)


def rendered(
    tokenizer: Any,
    message: str,
    system: str = "",
    earlier: Sequence[dict[str, str]] = (),
    options: Options = NONE,
) -> str:
    """The chat template with one user message, up to the assistant's; a system message of `earlier` comes first.

    `options` are variables of the template.
    """
    spoken = bool(earlier) and earlier[0]["role"] == "system"
    turns = [{"role": "system", "content": system}] if system and not spoken else []
    turns += [*earlier, {"role": "user", "content": message}]
    template = f"the chat template of {tokenizer.name_or_path!r}"
    if fault := _template_fault(tokenizer):
        raise ConfigError(f"{template} {fault} for one short question; use another tokenizer, or another template")
    try:
        text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True, **options)
    except Exception as error:  # a template's own refusals, and whatever its expressions raise
        raise ConfigError(f"{template} refuses the prompt: {error}; see prompt.system") from None
    if message.strip() not in text:
        raise UnusablePrompt(f"{template} changes the question: write a prompt.kind of your own")
    return text
