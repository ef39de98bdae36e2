"""Reinforcement learning, readable top to bottom as the algorithm.

    torchrun --nproc_per_node 8 -m dccot.train.rl configs/rl/stage1.yaml model.path=runs/sft      or   dccot rl configs/rl/stage1.yaml …

One step: draw problems → director and workers answer each `samples` times → grade → reward → keep the groups that the filter wants,
rolling out whole batches until there are enough → advantages → old and reference log-probs → `optimizer_steps` updates, one
mini-batch each → weights into the engine → log, validate, checkpoint.

The reference policy is the model that the stage started from. The first mini-batch needs no old log-probs: its ratio is 1.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from dccot.data.grading import open_judge
from dccot.data.problems import load_problems
from dccot.data.prompting import prompts_of
from dccot.data.rollouts import Asked, grade, missing_pairs, roll_out
from dccot.data.stream import ProblemStream
from dccot.files import BadData, read_jsonl, write_jsonl_atomic
from dccot.model.checkpoint_io import full_parameters
from dccot.model.sharding import DTYPES, build_model
from dccot.rollout.director import RolloutConfig
from dccot.rollout.interface import Engine, open_engine
from dccot.rollout.response import Rollout
from dccot.runtime import Runtime
from dccot.train.advantages import group_advantages
from dccot.train.checkpoint import Checkpointer
from dccot.train.filters import FILTERS
from dccot.train.flops import pair_cost, training_speed
from dccot.train.forest import Forest, forests_of_rank, pack
from dccot.train.metrics import (
    Recorder,
    console_line,
    entropy_metrics,
    gap_metrics,
    memory_metrics,
    rollout_metrics,
    sample_text,
    validation_metrics,
)
from dccot.train.objectives import ObjectiveConfig, clipped, kl_k3, objective_loss, ratio_of
from dccot.train.phases import Phases, profiled
from dccot.train.rewards import reward_of
from dccot.train.rl_config import RLConfig, check_model
from dccot.train.run import launch, open_run, step_progress
from dccot.train.update import StepReport, compute_logprobs, make_optimizer, update

log = logging.getLogger(__name__)


Group = list[Rollout]


@dataclass
class Batch:
    """What a step trains on, and where it came from."""

    groups: list[Group]  # kept by the filter, `batch.prompts` of them
    rolled_out: list[Rollout]  # everything, for metrics
    batches: int
    kept: int  # groups that the filter would have kept


class RL:
    """One stage: what it is made of, and one method per arrow of the algorithm."""

    def __init__(self, config: RLConfig, runtime: Runtime, stack: ExitStack, engine: Engine | None = None):
        self.config, self.runtime = config, runtime
        model_path, self.tokenizer = check_model(config)
        self.stream, self.validation, self.prompt_ids = None, [], {}
        if config.replay is None:
            problems = self._asked(config.data.train)
            self.stream = ProblemStream([problem for problem, _ in problems], config.seed, config.batch.prompts_rolled_out)
            self.prompt_ids = {problem.id: ids for problem, ids in problems}
            if config.data.validation:
                self.validation = self._asked(config.data.validation)[: config.validation.problems]
        self.run = open_run(config, runtime)
        self.phases = Phases(runtime)
        torch.manual_seed(config.seed)
        self.model = build_model(model_path, config.sharding, device=runtime.device)
        self.reference = self._frozen(model_path) if config.objective.kl_coefficient else None
        self.optimizer = make_optimizer(self.model, config.optimizer)
        self.engine = self.judge = None
        if config.replay is None:
            self.judge = stack.enter_context(open_judge(config.grading))
            self.engine = stack.enter_context(open_engine(model_path, config.engine, engine))
        self.checkpointer = Checkpointer(self.run, config.checkpoint, runtime, source=model_path)
        state = self.checkpointer.resume(self.model, self.optimizer) or {}
        self.first_step: int = state.get("step", 0)
        self.updates: int = state.get("updates", 0)
        self.skipped: int = state.get("skipped", 0)
        self.bad_in_a_row: int = state.get("bad_in_a_row", 0)
        if self.stream and "stream" in state:
            self.stream.restore(state["stream"])

    def _frozen(self, path: Path) -> nn.Module:
        sharding = replace(self.config.sharding, master_dtype=self.config.sharding.compute_dtype, activation_checkpointing=False)
        return build_model(path, sharding, device=self.runtime.device).requires_grad_(False).eval()

    def _asked(self, path: str) -> list[Asked]:
        report = log.warning if self.runtime.is_main else lambda message: None
        problems = load_problems(path, preset=self.config.data.preset, report=report)
        return prompts_of(problems, self.tokenizer, self.config.prompt, report=report)

    # rollout → grade → reward → filter

    def collect(self, step: int) -> Batch:
        """Roll out whole batches until the filter has kept enough prompts. The same result on every rank."""
        if self.config.replay is not None:
            return self._replayed(self.config.replay)
        wanted, keep = self.config.batch.prompts, FILTERS[self.config.filter]
        batch = Batch([], [], 0, 0)
        while len(batch.groups) < wanted:
            if batch.batches == self.config.batch.max_rollout_batches:
                raise RuntimeError(
                    f"step {step}: {self.config.filter} kept only {batch.kept} of {wanted} prompts after {batch.batches} batches of "
                    f"{self.config.batch.prompts_rolled_out}; accuracy {rollout_metrics(batch.rolled_out)['reward/correct']:.1%}: "
                    "choose easier or harder problems, another filter, or raise batch.max_rollout_batches"
                )
            problems = self.stream.next_batch()
            with self.phases("rollout"):
                seed = (self.config.seed, step, batch.batches)
                asked = [(problem, self.prompt_ids[problem.id]) for problem in {problem.id: problem for problem in problems}.values()]
                mine = self._roll_out(asked, range(self.config.batch.group_size), self.config.rollout, seed)
            with self.phases("grade"):
                rollouts = self._graded(mine)
            for rollout in rollouts:
                rollout.reward, rollout.step = reward_of(rollout, self.config.reward, self.config.rollout.budget), step
            by_problem: dict[str, Group] = {}
            for rollout in rollouts:
                by_problem.setdefault(rollout.problem, []).append(rollout)
            groups = [by_problem[problem_id] for problem_id in dict.fromkeys(problem.id for problem in problems)]
            kept = [group for group in groups if keep(group)]
            batch.groups += kept[: wanted - len(batch.groups)]
            batch.rolled_out += rollouts
            batch.kept += len(kept)
            batch.batches += 1
        for group in batch.groups:
            for rollout, advantage in zip(group, group_advantages([r.reward for r in group])):
                rollout.advantage = advantage
        return batch

    def _roll_out(self, asked: Sequence[Asked], samples: Sequence[int], config: RolloutConfig, seed: tuple) -> list[Rollout]:
        """This replica's share of the rollouts."""
        asked = asked[self.engine.replica :: self.engine.replicas]
        self.engine.forget_prefixes()  # what is cached must not depend on what ran before
        pairs = missing_pairs(asked, samples)
        return list(roll_out(self.engine, asked, pairs, self.config.prompt, config, seed=seed))

    def _graded(self, mine: list[Rollout]) -> list[Rollout]:
        """Everybody's rollouts, graded where they were made, in an order that does not depend on which finished first."""
        if self.runtime.rank % self.config.engine.tensor_parallel:
            mine = []  # the ranks of one replica hold the same responses
        grade(mine, self.judge)
        together = [rollout for part in self.runtime.gather(mine) for rollout in part]
        return sorted(together, key=lambda rollout: (rollout.problem, rollout.sample))

    def _replayed(self, path: str) -> Batch:
        groups: dict[str, Group] = {}
        for line, row in read_jsonl(path, strict=True):
            try:
                rollout = Rollout.from_json(row)
            except (KeyError, TypeError, ValueError) as error:
                raise BadData(f"{path}:{line}: not a rollout ({type(error).__name__}: {error})") from None
            if rollout.advantage is None:
                raise BadData(f"{path}:{line}: the rollout has no advantage; replay a file that a training run wrote to its rollouts/")
            groups.setdefault(rollout.problem, []).append(rollout)
        wanted = self.config.batch.prompts
        if len(groups) < wanted:
            raise BadData(f"{path} holds {len(groups)} prompts; batch.prompts is {wanted}: set batch.prompts={len(groups)} or less")
        chosen = list(groups.values())[:wanted]
        return Batch(chosen, [rollout for group in chosen for rollout in group], 0, len(groups))

    # advantages → forests → log-probs → updates

    def mini_batches(self, batch: Batch) -> Iterator[list[Rollout]]:
        size = self.config.batch.prompts // self.config.batch.optimizer_steps
        for start in range(0, self.config.batch.prompts, size):
            yield [rollout for group in batch.groups[start : start + size] for rollout in group]

    def forests(self, rollouts: Sequence[Rollout]) -> list[Forest]:
        responses = [rollout.response for rollout in rollouts]
        plan = pack(
            responses,
            self.config.batch.token_budget,
            self.runtime.ranks,
            share_prompts=self.config.batch.share_prompts,
            pair_cost=pair_cost(self.model.config),
            max_positions=self.model.config.max_position,
        )
        return forests_of_rank(responses, plan, self.runtime.rank)

    @torch.no_grad()
    def score_all(self, model: nn.Module, forests: Sequence[Forest]) -> list[Tensor]:
        return [compute_logprobs(model, forest.to(self.runtime.device), self.config.rollout.temperature)[0].cpu() for forest in forests]

    def train_on(self, batch: Batch) -> tuple[list[StepReport], dict[str, float]]:
        """All updates of one step and what they say about the policy."""
        rollouts = list(self.mini_batches(batch))
        forests = [self.forests(mini_batch) for mini_batch in rollouts]
        with self.phases("old_logprob"):
            old = [None] + [self.score_all(self.model, mini_batch) for mini_batch in forests[1:]]
        with self.phases("reference"):
            reference = [self.score_all(self.reference, mini_batch) if self.reference else None for mini_batch in forests]
        record = TokenRecord(self.config.objective)
        reports = []
        for number, mini_batch in enumerate(forests):
            advantages = torch.tensor([rollout.advantage for rollout in rollouts[number]])
            with self.phases("update"):
                token_loss = self._token_loss(advantages, old[number], reference[number], record)
                arguments = (self.config.optimizer, self.updates, self.config.rollout.temperature, self.runtime)
                once = self.config.sharding.reduce_once
                reports.append(update(self.model, self.optimizer, mini_batch, token_loss, *arguments, once))
            self.updates += 1
        metrics = record.metrics(self.runtime)
        trained, seconds = [forest for mini_batch in forests for forest in mini_batch], self.phases.seconds["update"]
        metrics |= training_speed(self.model.config, trained, seconds, self.runtime.device, DTYPES[self.config.sharding.compute_dtype])
        metrics["speed/trained_tokens"] = sum(map(len, trained)) * self.runtime.ranks / seconds
        return reports, metrics

    def _token_loss(self, advantages: Tensor, old: list[Tensor] | None, reference: list[Tensor] | None, record: TokenRecord):
        device = self.runtime.device

        def token_loss(number: int, forest: Forest, logprob: Tensor, entropy: Tensor) -> Tensor:
            advantage = advantages.to(device)[forest.response[forest.targets].long()]
            rollout_logprob = forest.logprob[forest.targets]
            old_logprob = old[number].to(device) if old is not None else logprob.detach()
            reference_logprob = reference[number].to(device) if reference is not None else None
            record.add(logprob.detach(), entropy.detach(), old_logprob, advantage, rollout_logprob, reference_logprob)
            return objective_loss(self.config.objective, logprob, old_logprob, advantage, rollout_logprob, reference_logprob)

        return token_loss

    # weights → engine, validation, what is written

    def sync(self) -> None:
        if self.engine is not None:
            self.engine.wake()
            self.engine.load(full_parameters(self.model))

    def validate(self, step: int) -> dict[str, float]:
        if not self.validation:
            return {}
        with self.phases("validate"):
            config = replace(self.config.rollout, top_p=self.config.validation.top_p)
            mine = self._roll_out(self.validation, range(self.config.validation.samples), config, (self.config.seed, step, "validation"))
            return validation_metrics(self._graded(mine))

    def save_rollouts(self, step: int, batch: Batch, folder: str = "rollouts") -> None:
        if not self.runtime.is_main or self.config.replay is not None:
            return
        path = self.run / folder / f"step_{step:06d}.jsonl"
        path.parent.mkdir(exist_ok=True)
        write_jsonl_atomic(path, (rollout.to_json() for group in batch.groups for rollout in group))
        for old in sorted(path.parent.glob("step_*.jsonl"))[: -self.config.keep_rollouts]:
            old.unlink()

    def note_bad(self, step: int, batch: Batch, reports: Sequence[StepReport]) -> None:
        """Count skipped updates, keep the batch for replay, and stop when it goes on."""
        bad = [report for report in reports if not report.applied]
        self.skipped += len(bad)
        self.bad_in_a_row = self.bad_in_a_row + 1 if bad else 0
        if bad:
            self.save_rollouts(step, batch, "bad")
            log.error("step %d: %d of %d updates skipped (loss %s, gradient norm %s); the batch is in %s", step, len(bad), len(reports),
                      bad[0].loss, bad[0].grad_norm, self.run / "bad")  # fmt: skip
        if self.bad_in_a_row > self.config.max_bad_steps:
            raise RuntimeError(
                f"{self.bad_in_a_row} steps in a row had a loss or gradient that is not finite (max_bad_steps is "
                f"{self.config.max_bad_steps}); their batches are in {self.run / 'bad'}: replay one with replay=FILE, "
                "lower optimizer.learning_rate, or go back a checkpoint"
            )

    def state(self) -> dict:
        stream = {"stream": self.stream.state()} if self.stream else {}
        return {"updates": self.updates, "skipped": self.skipped, "bad_in_a_row": self.bad_in_a_row, **stream}


class TokenRecord:
    """Log-probs and the like of all tokens trained on in a step, for metrics only."""

    NAMES = ("logprob", "entropy", "old", "advantage", "rollout", "reference")

    def __init__(self, objective: ObjectiveConfig):
        self.objective = objective
        self.parts: dict[str, list[Tensor]] = {name: [] for name in self.NAMES}

    def add(self, *values: Tensor | None) -> None:
        for name, value in zip(self.NAMES, values):
            if value is not None:
                self.parts[name].append(value.float().cpu())

    def metrics(self, runtime: Runtime) -> dict[str, float]:
        token = {name: runtime.concatenated(torch.cat(parts)) for name, parts in self.parts.items() if parts}
        logprob, old = token["logprob"], token["old"]
        ratio = ratio_of(logprob, old)
        metrics = {
            "policy/clip_fraction": float(clipped(self.objective, logprob, old, token["advantage"]).float().mean()),
            "policy/ratio_mean": float(ratio.mean()),
            "policy/ratio_max": float(ratio.max()),
            "policy/logprob": float(logprob.mean()),
            **entropy_metrics(token["entropy"]),
            **gap_metrics(old, token["rollout"]),
        }
        if "reference" in token:
            metrics["policy/kl"] = float(kl_k3(logprob, token["reference"]).mean())
        return metrics


def train(config: RLConfig, engine: Engine | None = None) -> None:
    """Run the stage to its end. An engine given is used (its weights are replaced) and stays; otherwise the stage has its own."""
    with ExitStack() as stack:
        runtime = Runtime.start(config.timeout_seconds)
        stack.callback(runtime.stop)
        rl = RL(config, runtime, stack, engine)
        stack.callback(rl.checkpointer.close)
        phases, first = rl.phases, rl.first_step
        recorder = Recorder(rl.run, first, runtime.is_main)
        stack.callback(recorder.close)
        progress = stack.enter_context(step_progress(config, first, runtime))
        rl.sync()
        for step in range(first, config.steps):
            phases.begin_step(step)
            start = time.perf_counter()
            metrics = rl.validate(step) if step == 0 and config.validation.every else {}
            with profiled(config.profile, step, rl.run / "profile", runtime):
                batch = rl.collect(step)
                if rl.engine is not None:
                    rl.engine.sleep()
                reports, policy = rl.train_on(batch)
                with phases("sync"):
                    rl.sync()
            rl.note_bad(step, batch, reports)
            rl.save_rollouts(step, batch)
            last = step + 1 == config.steps
            if config.validation.every and (last or (step + 1) % config.validation.every == 0):
                metrics |= rl.validate(step + 1)
            metrics |= rollout_metrics(batch.rolled_out) | policy | step_metrics(rl, batch, reports)
            metrics["time/step"] = time.perf_counter() - start
            recorder.write(step, metrics, {"sample": sample_text(batch.groups[0][0])} if step % 10 == 0 else None)
            progress.show(step + 1, console_line(step + 1, config.steps, metrics))
            if last or (step + 1) % config.checkpoint.every == 0:
                with phases("checkpoint"):
                    rl.checkpointer.save(step + 1, rl.model, rl.optimizer, rl.state(), last=last)


def step_metrics(rl: RL, batch: Batch, reports: Sequence[StepReport]) -> dict[str, float]:
    """Data, updates, time and memory of one step."""
    trained = [rollout for group in batch.groups for rollout in group]
    sampled = sum(rollout.response.sampled_tokens for rollout in batch.rolled_out)
    seconds = rl.phases.seconds
    return {
        "policy/loss": sum(report.loss for report in reports) / len(reports),
        "policy/grad_norm": max(report.grad_norm for report in reports),
        "policy/learning_rate": rl.config.optimizer.rate(rl.updates - 1),
        "policy/skipped_updates": float(rl.skipped),
        "data/rollout_batches": float(batch.batches),
        "data/kept": float(batch.kept),
        "data/surplus": float(batch.kept - len(batch.groups)),
        "data/epoch": float(rl.stream.epoch) if rl.stream else 0.0,
        "data/trained_reward": sum(r.reward or 0.0 for r in trained) / len(trained),
        "speed/rollout_tokens": sampled / seconds["rollout"] if "rollout" in seconds else 0.0,
        **{f"time/{name}": took for name, took in seconds.items()},
        **rl.checkpointer.costs(),
        **memory_metrics(),
    }


def main(argv: Sequence[str] | None = None) -> int:
    example = "dccot rl configs/rl/stage1.yaml model.path=runs/sft data.train=deepscaler.jsonl"
    return launch(RLConfig, train, argv, "Reinforcement learning, one stage.", example)


if __name__ == "__main__":
    sys.exit(main())
