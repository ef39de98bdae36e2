"""Supervised fine-tuning on parallel (or sequential) demonstrations.

    torchrun --nproc_per_node 8 -m dccot.train.sft configs/sft.yaml model.path=…   or   dccot sft configs/sft.yaml …

A demonstration is split into segments as inference would have produced them, tokenised segment by segment, and laid out
as a forest; the loss is the negative log-prob of the sampled tokens, at temperature 1: the mean of each example's own
mean, or the mean over all tokens of the batch (`loss_mean`). Opening worker tags and `</spawn_workers>` carry no loss:
at inference they are inserted. Data: JSONL with `id`, `question`, `completion`.
"""

from __future__ import annotations

import logging
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from dccot.core.files import BadData, read_jsonl, write_jsonl_atomic
from dccot.core.run import step_name
from dccot.core.runtime import Runtime
from dccot.data.problems import ProblemStream
from dccot.data.prompts import UnusablePrompt
from dccot.data.task import task_of
from dccot.rollout.response import Response, Segment
from dccot.rollout.tags import SPAWN_OPEN, THINK_OPEN, IllFormed, TagIds, parse
from dccot.rollout.thread import Thread
from dccot.train import launch
from dccot.train.config import SFTConfig, lacking, open_model
from dccot.train.flops import pair_cost
from dccot.train.forest import Forest, longest_position, pack
from dccot.train.trainer import Trainer
from dccot.train.update import TokenLoss, compute_logprobs

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Example:
    id: str
    response: Response
    line: int = field(default=0, repr=False)  # of the file it was read from


def demonstration(
    completion: str, prompt: list[int], tokenizer, tags: TagIds, *, parallel: bool, open_think: bool, depth: int = 1
) -> Response:
    """A completion as the response that inference would have produced; IllFormed if a parallel one is not."""

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    def own(text: str) -> str:
        """Without the `<think>` that the prompt writes."""
        return text.removeprefix(THINK_OPEN).removeprefix("\n") if open_think else text

    def spoken(thread: Thread[str], inserted: Sequence[int], end: Sequence[int] = ()) -> Thread[Segment]:
        """The thread's own text, after `inserted` at first and then each time after its workers, and `end`."""
        opening = [inserted, *[tags.spawn_close] * len(thread.forks)]
        trunk = [Segment(list(tag), encode(text)) for tag, text in zip(opening, thread.trunk)]
        trunk[-1].sampled += end
        return Thread(trunk, [list(map(spoken, fork, tags.worker_open)) for fork in thread.forks])

    text = completion.strip()
    parsed: Thread[str] = parse(text, tags.workers, depth=depth) if parallel else Thread([text])
    parsed.trunk[0] = own(parsed.trunk[0])
    thread = spoken(parsed, [], [tags.eos])
    return Response(thread.trunk, thread.forks, prompt=prompt)


Report = Callable[..., None]


def load_examples(
    path: str | Path, config: SFTConfig, tokenizer, max_positions: int | None = None, report: Report = log.warning
) -> list[Example]:
    """Every usable demonstration of a file; skipped rows are counted and reported."""
    tags = TagIds.of(tokenizer, config.rollout.workers)
    task, examples, left_out = task_of(config), list[Example](), Counter[object]()
    prompt = task.prompting
    for line, row in read_jsonl(path, report=report):
        if missing := lacking(row, config.data.named()):
            raise BadData(f"{path}:{line}: {missing}")
        question, completion = row[config.data.question], row[config.data.completion]
        try:
            asked = prompt.ids(tokenizer, question)
            alone = task.may_work_alone and SPAWN_OPEN not in completion
            form = {"parallel": prompt.parallel and not alone, "open_think": prompt.open_think}
            depth = config.rollout.depth
            response = demonstration(completion, asked, tokenizer, tags, **form, depth=depth)
        except (IllFormed, UnusablePrompt) as error:
            left_out[type(error)] += 1
            report("%s:%d left out: %s", path, line, error)
            continue
        duplicated = response.total_tokens + sum(worker.total() for worker in response.threads())
        if len(asked) + duplicated > config.data.max_tokens:
            left_out["long"] += 1
            continue
        if max_positions is not None and longest_position(response) > max_positions:
            reached = f"{path}:{line}: the example reaches position {longest_position(response):,}"
            raise BadData(f"{reached}; the model takes {max_positions:,}")
        examples.append(Example(str(row.get("id", line)), response, line))
    dropped = f"dropped {left_out['long']} over {config.data.max_tokens} tokens, {left_out[IllFormed]} ill-formed, "
    dropped += f"{left_out[UnusablePrompt]} with a prompt that cannot be used"
    log.info("%s: %d examples; %s", path, len(examples), dropped)
    if not examples:
        raise BadData(f"{path}: no usable example ({dropped}); see data.max_tokens and prompt.max_prompt_tokens")
    return examples


def negative_logprob(number: int, forest: Forest, logprob: Tensor, entropy: Tensor) -> Tensor:
    return -logprob


def sft_loss(responses: Sequence[Response], mean: str) -> TokenLoss:
    """For `examples`, tokens are weighted such that the token mean of the batch is the mean of the examples' means: it
    depends neither on packing nor on the number of ranks, since all ranks know the whole batch.
    """
    if mean == "tokens":
        return negative_logprob
    sampled = torch.tensor([response.sampled_tokens for response in responses], dtype=torch.float64)
    weights = sampled.sum() / (len(responses) * sampled.clamp(min=1))

    def weighted(number: int, forest: Forest, logprob: Tensor, entropy: Tensor) -> Tensor:
        weight = weights.to(logprob)[forest.response[forest.targets].long()]
        return weight * negative_logprob(number, forest, logprob, entropy)

    return weighted


class SFT(Trainer[SFTConfig]):
    """One run: its parts, and what a step does."""

    def __init__(self, config: SFTConfig, runtime: Runtime, stack: ExitStack):
        path, shape, tokenizer = open_model(config)
        report = log.warning if runtime.is_main else lambda *message: None
        files = config.replay or config.data.train, config.data.validation
        examples, held_out = (
            load_examples(file, config, tokenizer, shape.max_position, report) if file else [] for file in files
        )
        self.stream = ProblemStream(examples, config.seed, len(examples) if config.replay else config.batch.examples)
        super().__init__(config, runtime, path, self.stream.rows)
        self.held_out = self.forests(held_out) if held_out else []
        state = self.resume(stack)
        if "stream" in state:
            self.stream.restore(state["stream"])

    def forests(self, examples: Sequence[Example]) -> list[Forest]:
        """This rank's micro-batches, or its part of them."""
        responses = [example.response for example in examples]
        cost = pair_cost(self.model.config)
        return self.forests_of(pack(responses, self.config.batch.token_budget, self.groups, pair_cost=cost))

    def train_on(self, examples: Sequence[Example]) -> dict[str, float]:
        """One optimizer step and its metrics."""
        with self.phases("pack"):
            forests = self.forests(examples)
        loss = sft_loss([example.response for example in examples], self.config.loss_mean)
        report = self.optimizer_step(forests, loss, temperature=1.0)
        self.note_bad(self.phases.step, [report], lambda folder: self.save_rows(examples, folder))
        return self.update_metrics([report], forests)

    @torch.no_grad()
    def validation_loss(self) -> float:
        """Token mean over all validation examples."""
        total = torch.zeros(2, dtype=torch.float64)
        with self.phases("validate"):
            for forest in self.held_out:
                self.phases.beat()
                logprob, _ = compute_logprobs(self.model, forest.to(self.runtime.device), 1.0)
                total += torch.tensor([-float(logprob.double().sum()), len(logprob)], dtype=torch.float64)
            loss, tokens = self.runtime.sum(total).tolist()
        return loss / max(1, tokens)

    def save_rows(self, examples: Sequence[Example], folder: Path) -> None:
        """The rows of the data file that these examples came from."""
        if not self.runtime.is_main:
            return
        lines = {example.line for example in examples}
        rows = [row for line, row in read_jsonl(self.config.data.train, report=lambda message: None) if line in lines]
        write_jsonl_atomic(folder / f"{step_name(self.phases.step)}.jsonl", rows)


def train(config: SFTConfig) -> None:
    """Run to the end, from the newest checkpoint if there is one."""
    with Runtime.start(config.timeout_seconds) as runtime, ExitStack() as stack:
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(config.threads or torch.get_num_threads())
        sft = SFT(config, runtime, stack)
        for step in sft.steps():
            with sft.profiled(step):
                metrics = sft.train_on(sft.stream.next_batch())
            if sft.held_out and sft.due(step, config.validation.every):
                metrics["validation/loss"] = sft.validation_loss()
            sft.log(step, metrics)
            sft.checkpoint(step, {"stream": sft.stream.state()})


def main(argv: Sequence[str] | None = None) -> int:
    return launch.sft(argv, train)


if __name__ == "__main__":
    sys.exit(main())
