"""The phases of a training step: timed, named in profiler traces, watched (watchdog.py).

    with phases("rollout"): …

An error that leaves a phase gets rank, step and phase as notes, so that a timed-out collective on one of many ranks can
be located.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from dccot.core.config import NonNegative
from dccot.core.run import step_name
from dccot.core.runtime import Runtime
from dccot.train.trace import merge

log = logging.getLogger(__name__)

PROFILED = ("rollout", "grade", "old_logprob", "reference", "pack", "update", "sync")
ACTIVITIES = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])


@dataclass
class ProfileConfig:
    steps: list[NonNegative] = field(default_factory=list)  # steps to trace, on every rank
    # phases to trace; a rollout produces millions of events
    phases: list[Literal[PROFILED]] = field(default_factory=lambda: ["update", "sync"])  # type: ignore[valid-type]
    shapes: bool = False
    memory: bool = False


class Phases:
    def __init__(self, runtime: Runtime):
        self.rank, self.step = runtime.rank, 0
        self.seconds: dict[str, float] = {}
        self.peaks: dict[str, int] = {}  # bytes of GPU memory; "" between phases
        self.profile: profile | None = None  # while a step is traced
        self.profiled: list[str] = []
        self.pending: Callable[[], Iterable[str]] = tuple  # ids of the engine's calls
        self._history: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=20))
        self._enter("start")

    def begin_step(self, step: int) -> None:
        self._note_peak("")
        self.step, self.seconds, self.peaks = step, {}, {}

    def beat(self) -> None:
        """Reports progress: long-running work calls this from time to time."""
        self.last_beat = time.monotonic()

    def _enter(self, name: str) -> None:
        self.name, self.since, self.last_beat = name, time.monotonic(), time.monotonic()
        self.usual = statistics.median(self._history[name]) if self._history[name] else None

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        self._enter(name)
        start = time.perf_counter()
        try:
            with self._observed(name), record_function(name):
                yield
        except BaseException as error:
            error.add_note(
                f"rank {self.rank}, step {self.step}, phase {name}, after {time.perf_counter() - start:.1f} s"
            )
            raise
        finally:
            self._enter("what comes between phases")
        took = time.perf_counter() - start
        self.seconds[name] = self.seconds.get(name, 0.0) + took
        self._history[name].append(took)

    @contextmanager
    def _observed(self, name: str) -> Iterator[None]:
        """With its own peak of GPU memory, and traced if this phase of this step was selected."""
        self._note_peak("")
        trace = self.profile if name in self.profiled else None
        if trace:
            trace.toggle_collection_dynamic(True, ACTIVITIES)
        try:
            yield
        finally:
            if trace:
                trace.toggle_collection_dynamic(False, ACTIVITIES)
            self._note_peak(name)

    def _note_peak(self, name: str) -> None:
        if torch.cuda.is_available():
            self.peaks[name] = max(self.peaks.get(name, 0), torch.cuda.max_memory_allocated())
            torch.cuda.reset_peak_memory_stats()


@contextmanager
def profiled(config: ProfileConfig, step: int, folder: Path, runtime: Runtime, phases: Phases) -> Iterator[None]:
    """If `step` is selected, one trace per rank and one of all ranks together (train/trace.py)."""
    if step not in config.steps:
        yield
        return
    folder = folder / step_name(step)
    folder.mkdir(parents=True, exist_ok=True)
    with profile(activities=ACTIVITIES, record_shapes=config.shapes, profile_memory=config.memory) as trace:
        trace.toggle_collection_dynamic(False, ACTIVITIES)
        phases.profile, phases.profiled = trace, config.phases
        try:
            yield
        finally:
            phases.profile, phases.profiled = None, []
    trace.export_chrome_trace(str(folder / f"rank{runtime.rank}.pt.trace.json"))
    runtime.barrier()  # every rank's trace is there
    if runtime.is_main:
        log.info("step %d, all ranks on one timeline: %s", step, merge(folder))
