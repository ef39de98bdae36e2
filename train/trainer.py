"""What SFT and RL share: model and optimizer in a run folder, and the code around the steps.

trainer = Trainer(config, runtime, folder, rows)   opens the run folder, loads the model
state = trainer.resume(stack)                      continues from the newest checkpoint, if there is one
for step in trainer.steps():
    with trainer.profiled(step): …
    trainer.note_bad(step, reports, save)
    trainer.log(step, metrics)
    trainer.checkpoint(step, state)                saves if due, or on a signal; a stopped run ends here
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from dccot.core.command import Stopped, asked, listening
from dccot.core.config import flat
from dccot.core.files import checksum
from dccot.core.progress import Progress, waiting
from dccot.core.provenance import Checksums
from dccot.core.run import Run, steps_until
from dccot.core.runtime import Runtime, inherit_timeout, on_rank_zero, require_shared
from dccot.kernels.tree_attention import prepare
from dccot.model.context import ContextGroup
from dccot.model.folder import model_checksums
from dccot.model.lora import Base
from dccot.model.sharding import DTYPES, build_model
from dccot.train.checkpoint import Checkpointer
from dccot.train.config import RLConfig, SFTConfig
from dccot.train.flops import training_speed
from dccot.train.forest import Forest, Packing
from dccot.train.metrics import memory_metrics
from dccot.train.phases import Phases, Watchdog, profiled
from dccot.train.recorder import Recorder, console_line
from dccot.train.update import StepReport, TokenLoss, make_optimizer, update

log = logging.getLogger(__name__)
C = TypeVar("C", bound="RLConfig | SFTConfig")


class Trainer(Generic[C]):
    def __init__(self, config: C, runtime: Runtime, source: Path, rows: Sequence[tuple[str, str]]):
        self.config, self.runtime, self.source = config, runtime, source
        self.weights = model_checksums(source, runtime)
        self.run = open_run(config, runtime, self.weights, rows)
        self.phases = Phases(runtime)
        torch.manual_seed(config.seed)
        with waiting(f"loading {source}"):
            self.model = build_model(source, config.sharding, device=runtime.device, lora=config.model.lora)
        self.group = ContextGroup.join(config.sharding.context_parallel, runtime.device)
        self.optimizer = make_optimizer(self.model, config.optimizer)

    def resume(self, stack: ExitStack) -> dict[str, Any]:
        """Restore the newest checkpoint and open what the run writes to; returns the state saved with the weights."""
        config, main = self.config, self.runtime.is_main
        written = self.run, config.checkpoint, self.runtime, self.source
        dtype = DTYPES[config.sharding.compute_dtype]
        base = Base(str(self.source.absolute()), self.weights, self.model.lora) if self.model.lora else None
        self.checkpointer = Checkpointer(*written, steps=config.steps, dtype=dtype, base=base)
        stack.callback(self.checkpointer.close)
        state = self.checkpointer.resume(self.model, self.optimizer) or {}
        self.first_step: int = state.get("step", 0)
        self.updates: int = state.get("updates", self.first_step)
        self.skipped: int = state.get("skipped", 0)
        self.bad_in_a_row: int = state.get("bad_in_a_row", 0)
        on_rank_zero(lambda: self.run.keep_metrics_before(self.first_step))
        before = steps_until(config.model.path, rl=hasattr(config, "reward")) if main else 0
        self.recorder = Recorder(self.run, self.first_step, main, config.wandb, flat(config), before)
        stack.callback(self.recorder.close)
        select = partial(torch.cuda.set_device, self.runtime.device) if self.runtime.device.type == "cuda" else None
        self._preparing = ThreadPoolExecutor(1, "forests", initializer=select)
        stack.callback(self._preparing.shutdown, cancel_futures=True)
        progress = Progress(config.name, config.steps, first=self.first_step, active=main, lines=True, pause=3.0)
        self.progress = stack.enter_context(progress)
        # the last whole step since the start, as a checkpoint would store it
        self._finished: tuple[int, dict[str, Any]] | None = None
        self._saved, self._saved_at = self.first_step, time.monotonic()
        inherit_timeout(dist.distributed_c10d._world.pg_map)  # the engine has its own groups
        stack.enter_context(Watchdog(self.phases, config.stall_seconds))
        stack.enter_context(listening(wait=True))
        stack.push(self._save_before_stopping)
        return state

    def steps(self) -> Iterator[int]:
        for step in range(self.first_step, self.config.steps):
            self.phases.begin_step(step)
            self._start = time.perf_counter()
            yield step

    def profiled(self, step: int) -> AbstractContextManager[None]:
        return profiled(self.config.profile, step, self.run.profile, self.runtime, self.phases)

    def prepare(self, forests: Iterable[Forest]) -> None:
        """Move forests to the device and derive what attention needs, in this order and in a thread: the step's passes
        find it done, or wait for it.
        """
        shape, sharding, device = self.model.config, self.config.sharding, self.runtime.device
        heads = shape.heads, shape.kv_heads, shape.head_dim

        def ready(forest: Forest) -> None:
            mask = forest.to(device).mask
            prepare(mask, *heads, DTYPES[sharding.compute_dtype], sharding.attention)
            _ = mask.position, forest.rows

        for forest in forests:
            self._preparing.submit(ready, forest)

    @property
    def groups(self) -> int:
        """Groups of ranks with micro-batches of their own."""
        return self.runtime.ranks // self.group.ranks

    def forests_of(self, packing: Packing) -> list[Forest]:
        """This rank's micro-batches, or its part of them; packed for `groups`."""
        return [forest.shared(self.group) for forest in packing.forests(self.group.data)]

    def optimizer_step(self, forests: Sequence[Forest], token_loss: TokenLoss, temperature: float) -> StepReport:
        def beating(number: int, *more: Any) -> Tensor:
            self.phases.beat()
            return token_loss(number, *more)

        optimizer, once = self.config.optimizer, self.config.sharding.reduce_once
        with self.phases("update"):
            made = self.model, self.optimizer, forests, beating
            report = update(*made, optimizer, self.updates, temperature, self.runtime, once)
        self.updates += 1
        self.skipped += not report.applied
        return report

    def update_metrics(self, reports: Sequence[StepReport], forests: Sequence[Forest]) -> dict[str, float]:
        """What a step's updates did, and how fast."""
        config, model, seconds = self.config, self.model, self.phases.seconds["update"]
        dtype = DTYPES[config.sharding.compute_dtype]
        return {
            "policy/loss": sum(report.loss for report in reports) / len(reports),
            "policy/grad_norm": max(report.grad_norm for report in reports),
            "policy/learning_rate": config.optimizer.rate(self.updates - 1),
            "policy/skipped_updates": float(self.skipped),
            "speed/trained_tokens": sum(map(len, forests)) * self.groups / seconds,
            **training_speed(model.config, forests, seconds, self.runtime.device, dtype, bool(model.lora)),
        }

    def due(self, step: int, every: int) -> bool:
        """Whether something due `every` N steps, and after the last, is due after this one; 0: never."""
        return every > 0 and (step + 1 == self.config.steps or (step + 1) % every == 0)

    def log(self, step: int, metrics: dict[str, float], texts: dict[str, str] | None = None) -> None:
        """Write the step's metrics, with times and memory."""
        metrics |= {f"time/{name}": took for name, took in self.phases.seconds.items()}
        metrics |= self.checkpointer.costs() | memory_metrics(self.phases.peaks)
        metrics["time/step"] = time.perf_counter() - self._start
        self.recorder.write(step, metrics, texts)
        self.progress.show(step + 1, console_line(step, self.config.steps, metrics))

    def note_bad(self, step: int, reports: Sequence[StepReport], save: Callable[[Path], None]) -> None:
        """Save the batch of skipped updates in bad/, for replay; stop after too many such steps in a row. Every rank
        calls `save`.
        """
        bad, folder, limit = [each for each in reports if not each.applied], self.run.bad, self.config.max_bad_steps
        self.bad_in_a_row = self.bad_in_a_row + 1 if bad else 0
        if bad and self.config.replay is None:
            save(folder)
        if bad:
            why = f"loss {bad[0].loss}, gradient norm {bad[0].grad_norm}"
            where = f"the batch is in {self.config.replay or folder}"
            log.error("step %d: %d of %d updates skipped (%s); %s", step, len(bad), len(reports), why, where)
        if self.bad_in_a_row > limit:
            raise RuntimeError(
                f"{self.bad_in_a_row} steps in a row had a loss or gradient that is not finite (max_bad_steps is "
                f"{limit}); their batches are in {folder}: replay one with replay=FILE, "
                "lower optimizer.learning_rate, or go back a checkpoint"
            )

    def checkpoint(self, step: int, state: dict[str, Any]) -> None:
        """Save what a run needs to continue after `step`, if due or requested; end the run if requested."""
        counters = {"updates": self.updates, "skipped": self.skipped, "bad_in_a_row": self.bad_in_a_row}
        self._finished = step + 1, counters | state
        stop, save = self._agreed()
        if self.due(step, self.config.checkpoint.every) or save:
            self._save(last=step + 1 == self.config.steps)
        if stop:
            raise Stopped

    def flush(self) -> None:
        """Everything a checkpoint covers must be on disk before it."""
        self.recorder.flush()

    def _agreed(self) -> tuple[bool, bool]:
        """Whether any rank was told to stop, and to save; `checkpoint.minutes` also triggers a save."""
        minutes = self.config.checkpoint.minutes
        late = minutes is not None and time.monotonic() - self._saved_at > 60 * minutes
        stop, save = asked.stop, asked.save
        asked.save = asked.save and not save  # a signal that arrives meanwhile is for the next step
        stops, saves = self.runtime.sum(torch.tensor([stop, save or late], dtype=torch.int32)).tolist()
        return stops > 0, saves > 0

    def _save(self, last: bool) -> None:
        assert self._finished is not None
        step, state = self._finished
        self.flush()
        with self.phases("checkpoint"):
            self.checkpointer.save(step, self.model, self.optimizer, state, last=last)
        self._saved, self._saved_at = step, time.monotonic()

    def _save_before_stopping(self, kind: object, error: BaseException | None, trace: object) -> None:
        """On every rank, when all have agreed to stop: nothing since the last whole step has changed the weights."""
        if not isinstance(error, Stopped):
            return
        finished = self._finished[0] if self._finished else self.first_step
        if self._finished is not None and (finished != self._saved or not self.checkpointer.finish()):
            self._save(last=True)
        log.info("stopped after %d of %d steps", finished, self.config.steps)


def open_run(
    config: RLConfig | SFTConfig, runtime: Runtime, weights: Checksums, rows: Sequence[tuple[str, str]]
) -> Run:
    """The run's folder, locked, with settings and provenance. `rows` are (id, checksum) of its data: a run that has a
    checkpoint resumes only with the same rows.
    """
    run = Run(Path(config.output) / config.name)
    on_rank_zero(run.claim)
    require_shared(run.folder, runtime)
    on_rank_zero(lambda: run.keep_rows(rows))
    data = {"data.train": config.data.train, "data.validation": config.data.validation}
    read = {"replay": config.replay} if config.replay else data
    inputs = {key: {Path(file).name: checksum(file)} for key, file in read.items() if file}
    run.record(config, {"model.path": weights, **inputs}, runtime)
    return run
