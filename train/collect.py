"""What a step trains on: groups of graded responses that the filter keeps, or a saved batch.

    problems → director and workers answer each `group_size` times → grade → reward → filter, until enough groups are kept → advantages

Every rank rolls out and grades its share; the batch is the same on all of them. A source reads its files on creation
and starts engine and judge in `start`, so that bad data is rejected before weights are loaded.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from dccot.core.config import named
from dccot.core.files import BadData, read_jsonl, write_jsonl_atomic
from dccot.core.runtime import Runtime
from dccot.core.signals import Stopped, asked
from dccot.data.judge import Judge, open_judge
from dccot.data.problems import Problem, load_problems
from dccot.data.prompts import prompts_of
from dccot.data.rollouts import Asked, grade, missing_pairs, roll_out
from dccot.data.stream import ProblemStream
from dccot.model.folder import step_of
from dccot.rollout.director import RolloutConfig
from dccot.rollout.engine import Engine, open_engine
from dccot.rollout.generate import Watch
from dccot.rollout.response import Rollout
from dccot.train.advantages import group_advantages
from dccot.train.filters import FILTERS, Group
from dccot.train.metrics import rollout_metrics, validation_metrics
from dccot.train.phases import Phases
from dccot.train.rewards import reward_of
from dccot.train.rl_config import RLConfig

log = logging.getLogger(__name__)


@dataclass
class Batch:
    """What a step trains on, and where it came from."""

    groups: list[Group]  # kept by the filter, `batch.prompts` of them
    rolled_out: list[Rollout]  # everything, for metrics
    batches: int = 0
    kept: int = 0  # groups that the filter would have kept

    def mini_batches(self, count: int) -> Iterator[list[Rollout]]:
        size = len(self.groups) // count
        for start in range(0, len(self.groups), size):
            yield [rollout for group in self.groups[start : start + size] for rollout in group]


class Heartbeat(Watch):
    """Tells the watchdog that the engine is making progress."""

    def __init__(self, phases: Phases):
        self.phases = phases

    def stepped(self, engine: Engine) -> None:
        self.phases.beat()


class CutShort(Exception):
    """A rollout that is not worth finishing: its step will be restarted."""


class Impatient(Heartbeat):
    """Ends the rollout if this rank was told to stop."""

    def stepped(self, engine: Engine) -> None:
        super().stepped(engine)
        if asked.stop:
            raise CutShort


class Collector:
    """Rolls out problems with the current policy."""

    engine: Engine
    judge: Judge
    phases: Phases

    def __init__(self, config: RLConfig, runtime: Runtime, tokenizer: PreTrainedTokenizerBase):
        self.config, self.runtime = config, runtime
        problems = self._asked(config.data.train, tokenizer)
        self.stream = ProblemStream([problem for problem, _ in problems], config.seed, config.batch.prompts_rolled_out)
        self.rows = self.stream.rows
        self.prompt_ids = {problem.id: ids for problem, ids in problems}
        held_out = self._asked(config.data.validation, tokenizer) if config.data.validation else []
        self.validation = held_out[: config.validation.problems]

    def _asked(self, path: str, tokenizer: PreTrainedTokenizerBase) -> list[Asked]:
        report = log.warning if self.runtime.is_main else lambda message: None
        problems = load_problems(path, preset=self.config.data.preset, report=report)
        return prompts_of(problems, tokenizer, self.config.prompt, report=report)

    def start(self, model: Path, phases: Phases, stack: ExitStack, engine: Engine | None) -> None:
        self.phases = phases
        self.judge = stack.enter_context(open_judge(self.config.grading))
        self.engine = stack.enter_context(
            open_engine(
                model, self.config.engine, engine, logs=Path(self.config.output) / self.config.name, sleeps=True
            )
        )
        phases.pending = lambda: list(self.engine.pending)

    def load(self, parameters: Iterable[tuple[str, Tensor]]) -> None:
        """Replace the engine's weights."""
        self.engine.wake()
        self.engine.load(parameters)

    def collect(self, step: int) -> Batch:
        """Roll out whole batches until the filter has kept enough prompts; then the engine releases its memory for
        training.
        """
        wanted, keep = self.config.batch.prompts, named(FILTERS, self.config.filter, "filter")
        batch = Batch([], [])
        while len(batch.groups) < wanted:
            if batch.batches == self.config.batch.max_rollout_batches:
                raise RuntimeError(
                    f"step {step}: {self.config.filter} kept only {batch.kept} of {wanted} prompts after {batch.batches} batches of "
                    f"{self.config.batch.prompts_rolled_out}; accuracy {rollout_metrics(batch.rolled_out)['reward/correct']:.1%}: "
                    "choose easier or harder problems, another filter, or raise batch.max_rollout_batches"
                )
            groups = self._groups(step, batch.batches)
            kept = [group for group in groups if keep(group)]
            batch.groups += kept[: wanted - len(batch.groups)]
            batch.rolled_out += [rollout for group in groups for rollout in group]
            batch.kept += len(kept)
            batch.batches += 1
        for group in batch.groups:
            for rollout, advantage in zip(group, group_advantages([r.reward for r in group], self.config.advantage)):
                rollout.advantage = advantage
        self.engine.sleep()
        return batch

    def _groups(self, step: int, number: int) -> list[Group]:
        """The next problems' groups, graded and rewarded, in the order in which the problems were drawn."""
        problems: dict[str, Problem] = {problem.id: problem for problem in self.stream.next_batch()}
        with self.phases("rollout"):
            chosen, samples = (
                [(problem, self.prompt_ids[problem.id]) for problem in problems.values()],
                range(self.config.batch.group_size),
            )
            seed = self.config.seed, step, number
            mine = self._unless_stopped(lambda watch: self._roll_out(chosen, samples, self.config.rollout, seed, watch))
        with self.phases("grade"):
            rollouts = self._graded(mine)
        groups: dict[str, list[Rollout]] = {id: [] for id in problems}
        for rollout in rollouts:
            rollout.reward, rollout.step = reward_of(rollout, self.config.reward, self.config.rollout.budget), step
            groups[rollout.problem].append(rollout)
        return list(groups.values())

    def validate(self, step: int) -> dict[str, float]:
        if not self.validation:
            return {}
        with self.phases("validate"):
            config = replace(self.config.rollout, top_p=self.config.validation.top_p)
            samples, seed = range(self.config.validation.samples), (self.config.seed, step, "validation")
            mine = self._roll_out(self.validation, samples, config, seed, Heartbeat(self.phases))
            return validation_metrics(self._graded(mine))

    def _unless_stopped(self, roll_out: Callable[[Watch], list[Rollout]]) -> list[Rollout]:
        """Until a step has changed a weight, the run can stop immediately. Every rank comes here, and all stop if one
        was told to.
        """
        alone = self.config.engine.tensor_parallel == 1  # the ranks of one replica must take the same steps
        try:
            found = roll_out(Impatient(self.phases) if alone else Heartbeat(self.phases))
        except CutShort:
            found = []
        if self.runtime.sum(torch.tensor([asked.stop], dtype=torch.int32)).item():
            raise Stopped
        return found

    def _roll_out(
        self, problems: Sequence[Asked], samples: Sequence[int], config: RolloutConfig, seed: tuple, watch: Watch
    ) -> list[Rollout]:
        """This replica's share of the rollouts."""
        problems = problems[self.engine.replica :: self.engine.replicas]
        self.engine.forget_prefixes()  # the cache must not depend on earlier work
        pairs = missing_pairs(problems, samples)
        return list(roll_out(self.engine, problems, pairs, self.config.prompt, config, seed=seed, watch=watch))

    def _graded(self, mine: list[Rollout]) -> list[Rollout]:
        """All ranks' rollouts, graded where they were generated, in an order that does not depend on which finished
        first.
        """
        if self.runtime.rank % self.config.engine.tensor_parallel:
            mine = []  # the ranks of one replica hold the same responses
        grade(mine, self.judge, thinking_counts=self.config.prompt.parallel)
        return sorted(
            (rollout for part in self.runtime.gather(mine) for rollout in part),
            key=lambda rollout: (rollout.problem, rollout.sample),
        )

    @property
    def epoch(self) -> int:
        return self.stream.epoch

    def state(self) -> dict[str, Any]:
        return {"stream": self.stream.state()}

    def restore(self, state: dict[str, Any]) -> None:
        if "stream" in state:
            self.stream.restore(state["stream"])


class Replay:
    """A batch saved by an earlier run, the same in every step; no engine is used."""

    epoch = 0
    rows: Sequence[tuple[str, str]] = ()

    def __init__(self, path: str, prompts: int):
        groups: dict[str, list[Rollout]] = {}
        for line, row in read_jsonl(path, strict=True):
            try:
                rollout = Rollout.from_json(row)
            except (KeyError, TypeError, ValueError) as error:
                raise BadData(f"{path}:{line}: not a rollout ({type(error).__name__}: {error})") from None
            if rollout.advantage is None:
                raise BadData(
                    f"{path}:{line}: the rollout has no advantage; replay a file that a training run wrote to its rollouts/"
                )
            groups.setdefault(rollout.problem, []).append(rollout)
        if len(groups) < prompts:
            raise BadData(
                f"{path} holds {len(groups)} prompts; batch.prompts is {prompts}: set batch.prompts={len(groups)} or less"
            )
        chosen = list(groups.values())[:prompts]
        self.batch = Batch(list(chosen), [rollout for group in chosen for rollout in group], kept=len(groups))

    def start(self, model: Path, phases: Phases, stack: ExitStack, engine: Engine | None) -> None: ...

    def load(self, parameters: Iterable[tuple[str, Tensor]]) -> None: ...

    def collect(self, step: int) -> Batch:
        return self.batch

    def validate(self, step: int) -> dict[str, float]:
        return {}

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: dict[str, Any]) -> None: ...


def save_rollouts(folder: Path, step: int, batch: Batch, keep: int) -> None:
    """Write what the step trains on, for inspection and for `replay`; keeps the newest `keep` files."""
    folder.mkdir(exist_ok=True)
    write_jsonl_atomic(
        folder / f"step_{step:06d}.jsonl", (rollout.to_json() for group in batch.groups for rollout in group)
    )
    for old in sorted(path for path in folder.glob("step_*.jsonl") if step_of(Path(path.stem)) is not None)[:-keep]:
        old.unlink()
