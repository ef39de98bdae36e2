"""Supervised fine-tuning on parallel (or sequential) demonstrations.

    torchrun --nproc_per_node 8 -m dccot.train.sft configs/sft.yaml model.path=…   or   dccot sft configs/sft.yaml …

A demonstration is cut into segments as inference would have produced them, tokenised segment by segment, and laid out as a forest; the
loss is the mean negative log-prob of the sampled tokens, at temperature 1. Opening worker tags and `</spawn_workers>` carry no loss:
at inference they are inserted. Data: JSONL with `id`, `question`, `completion`.
"""
from __future__ import annotations

import logging
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoTokenizer

from dccot.config import at_least, require
from dccot.data.jsonl import BadData, read_jsonl
from dccot.data.prompting import PromptConfig
from dccot.data.stream import ProblemStream
from dccot.model.sharding import DTYPES, ShardingConfig, build_model
from dccot.rollout.protocol import THINK_OPEN, IllFormed, TagIds, parse
from dccot.rollout.response import Response, Round, Segment
from dccot.train.checkpoint import CheckpointConfig, Checkpointer, resolve_model
from dccot.train.flops import pair_cost, training_speed
from dccot.train.forest import Forest, forests_of_rank, pack
from dccot.train.metrics import Recorder, console_line, memory_metrics
from dccot.train.phases import Phases, ProfileConfig, profiled
from dccot.train.run import StepProgress, check_run, launch, open_run
from dccot.train.runtime import Runtime
from dccot.train.update import OptimizerConfig, make_optimizer, score, update

log = logging.getLogger(__name__)


@dataclass
class ModelPath:
    path: str = ""  # a Hugging Face folder, or a run whose newest checkpoint is meant

    def check(self) -> None:
        require(bool(self.path), "model.path is not set; name a Hugging Face folder or an earlier run, e.g. model.path=runs/sft")


@dataclass
class SFTData:
    train: str = ""
    validation: str | None = None
    max_tokens: int = 10_000  # prompt and every duplicate included; longer examples are dropped

    def check(self) -> None:
        require(bool(self.train), "data.train is not set; name a JSONL file with id, question and completion")
        at_least(1, self.max_tokens, "data.max_tokens")


@dataclass
class SFTConfig:
    name: str = "sft"
    output: str = "runs"
    seed: int = 0
    steps: int = 1800
    batch: int = 8  # examples per step, over all ranks
    token_budget: int = 16_384  # of one micro-batch on one rank
    workers: int = 3
    validate_every: int = 100
    model: ModelPath = field(default_factory=ModelPath)
    data: SFTData = field(default_factory=SFTData)
    prompt: PromptConfig = field(default_factory=lambda: PromptConfig(open_think=False))
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(5e-6, weight_decay=0.0, warmup_steps=105))
    sharding: ShardingConfig = field(default_factory=ShardingConfig)
    checkpoint: CheckpointConfig = field(default_factory=lambda: CheckpointConfig(every=100))
    profile: ProfileConfig = field(default_factory=ProfileConfig)

    def check(self) -> None:
        check_run(self)
        for name in ("batch", "token_budget", "workers", "validate_every"):
            at_least(1, getattr(self, name), name)


@dataclass(frozen=True)
class Example:
    id: str
    response: Response


def demonstration(completion: str, prompt: list[int], tokenizer, tags: TagIds, *, parallel: bool, open_think: bool) -> Response:
    """A completion as the response that inference would have given; raises IllFormed where a parallel one is not well-formed."""

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    def own(text: str) -> str:
        """Without the `<think>` that the prompt writes."""
        return text.removeprefix(THINK_OPEN).removeprefix("\n") if open_think else text

    if not parallel:
        return Response(prompt, [], Segment([], [*encode(own(completion.strip())), tags.eos]))
    parsed = parse(completion.strip(), tags.workers)
    rounds = []
    for number, round_ in enumerate(parsed.rounds):
        director = Segment(list(tags.spawn_close), encode(round_.director)) if number else Segment([], encode(own(round_.director)))
        workers = [Segment(list(tag), encode(text)) for tag, text in zip(tags.worker_open, round_.workers)]
        rounds.append(Round(director, workers))
    return Response(prompt, rounds, Segment(list(tags.spawn_close), [*encode(parsed.final), tags.eos]))


def load_examples(path: str | Path, config: SFTConfig, tokenizer) -> list[Example]:
    """Every usable demonstration of a file; what is left out is counted and said."""
    tags = TagIds.of(tokenizer, config.workers)
    examples, too_long, ill_formed = [], 0, 0
    for line, row in read_jsonl(path, report=log.warning):
        missing = [name for name in ("question", "completion") if not isinstance(row.get(name), str)]
        if missing:
            raise BadData(f"{path}:{line}: no text field {missing[0]!r}; an SFT row has id, question and completion")
        prompt = config.prompt.ids(tokenizer, row["question"])
        try:
            response = demonstration(
                row["completion"], prompt, tokenizer, tags, parallel=config.prompt.kind == "parallel", open_think=config.prompt.open_think
            )
        except IllFormed as error:
            ill_formed += 1
            log.warning("%s:%d left out: %s", path, line, error)
            continue
        duplicated = response.total_tokens + sum(map(sum, response.worker_lengths))
        if len(prompt) + duplicated > config.data.max_tokens:
            too_long += 1
        else:
            examples.append(Example(str(row.get("id", line)), response))
    log.info("%s: %d examples; dropped %d over %d tokens, %d ill-formed", path, len(examples), too_long, config.data.max_tokens, ill_formed)
    if not examples:
        limit = f"data.max_tokens={config.data.max_tokens}"
        raise BadData(f"{path}: no usable example (dropped: {too_long} over {limit}, {ill_formed} ill-formed)")
    return examples


def negative_logprob(number: int, forest: Forest, logprob: Tensor, entropy: Tensor) -> Tensor:
    return -logprob


@torch.no_grad()
def validation_loss(model, forests: Sequence[Forest], runtime: Runtime) -> float:
    """Token mean over all validation examples."""
    total = torch.zeros(2, dtype=torch.float64)
    for forest in forests:
        logprob, _ = score(model, forest.to(runtime.device), 1.0)
        total += torch.tensor([-float(logprob.double().sum()), len(logprob)], dtype=torch.float64)
    loss, tokens = runtime.sum(total).tolist()
    return loss / max(1, tokens)


def train(config: SFTConfig) -> None:
    runtime = Runtime.start()
    run = open_run(config, runtime)
    model_path = resolve_model(config.model.path)
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    examples = load_examples(config.data.train, config, tokenizer)
    held_out = load_examples(config.data.validation, config, tokenizer) if config.data.validation else []

    torch.manual_seed(config.seed)
    model = build_model(model_path, config.sharding, device=runtime.device)
    optimizer = make_optimizer(model, config.optimizer)
    stream = ProblemStream(examples, config.seed, config.batch)
    checkpointer = Checkpointer(run, config.checkpoint, runtime, source=model_path)
    state = checkpointer.resume(model, optimizer) or {"step": 0, "skipped": 0}
    if "stream" in state:
        stream.restore(state["stream"])
    first, skipped = state["step"], state["skipped"]

    def micro_batches(batch: Sequence[Example]) -> list[Forest]:
        responses = [example.response for example in batch]
        shape = model.config
        plan = pack(responses, config.token_budget, runtime.ranks, pair_cost=pair_cost(shape), max_positions=shape.max_position)
        return forests_of_rank(responses, plan, runtime.rank)

    held_out_forests = micro_batches(held_out) if held_out else []
    phases, recorder = Phases(runtime), Recorder(run, first, runtime.is_main)
    with StepProgress(config.name, first, config.steps, runtime.is_main) as progress:
        for step in range(first, config.steps):
            phases.begin_step(step)
            start = time.perf_counter()
            with profiled(config.profile, step, run / "profile", runtime):
                with phases("pack"):
                    forests = micro_batches(stream.next_batch())
                with phases("update"):
                    report = update(
                        model, optimizer, forests, negative_logprob, config.optimizer, step, 1.0, runtime, config.sharding.reduce_once
                    )
            skipped += not report.applied
            seconds = time.perf_counter() - start
            metrics = {
                "policy/loss": report.loss,
                "policy/grad_norm": report.grad_norm,
                "policy/learning_rate": config.optimizer.rate(step),
                "policy/skipped_steps": float(skipped),
                "speed/trained_tokens": sum(map(len, forests)) * runtime.ranks / seconds,
                **training_speed(model.config, forests, phases.seconds["update"], runtime.device, DTYPES[config.sharding.compute_dtype]),
                "time/step": seconds,
                **{f"time/{name}": took for name, took in phases.seconds.items()},
                **memory_metrics(),
            }
            last = step + 1 == config.steps
            if held_out_forests and (last or (step + 1) % config.validate_every == 0):
                metrics["validation/loss"] = validation_loss(model, held_out_forests, runtime)
            recorder.write(step, metrics)
            progress.step(step + 1, console_line(step + 1, config.steps, metrics))
            if last or (step + 1) % config.checkpoint.every == 0:
                checkpointer.save(step + 1, model, optimizer, {"skipped": skipped, "stream": stream.state()}, last=last)
    recorder.close()
    runtime.stop()


def main(argv: Sequence[str] | None = None) -> int:
    return launch(SFTConfig, train, argv, "Supervised fine-tuning.", "dccot sft configs/sft.yaml model.path=… data.train=sft.jsonl")


if __name__ == "__main__":
    sys.exit(main())
