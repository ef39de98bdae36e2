"""The phases of a training step: timed, named in profiler traces, watched.

    with phases("rollout"): …

A phase that takes far longer than it ever did says so while it is still running. An error leaves a phase with rank, step and phase
in its notes, so that a collective that timed out on one rank of many can be placed.
"""

from __future__ import annotations

import logging
import statistics
import threading
import time
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from dccot.config import one_of, require
from dccot.runtime import Runtime
from dccot.train.timeline import merge

log = logging.getLogger(__name__)

PROFILED = ("rollout", "grade", "old_logprob", "reference", "pack", "update", "sync")
ACTIVITIES = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])


@dataclass
class ProfileConfig:
    steps: list[int] = field(default_factory=list)  # which steps leave a trace, on every rank
    phases: list[str] = field(default_factory=lambda: ["update", "sync"])  # of these steps; a rollout makes millions of events
    shapes: bool = False
    memory: bool = False

    def check(self) -> None:
        require(min(self.steps, default=0) >= 0, f"profile.steps is {self.steps}; steps are counted from 0")
        for name in self.phases:
            one_of(name, PROFILED, "profile.phases")


class Phases:
    PATIENCE = 5.0  # times the median of the last runs
    LEAST_SECONDS = 60.0

    def __init__(self, runtime: Runtime):
        self.rank, self.step = runtime.rank, 0
        self.seconds: dict[str, float] = {}
        self.peaks: dict[str, int] = {}  # bytes of GPU memory; "" for what comes between phases
        self.profile: profile | None = None  # while a step is traced
        self.profiled: list[str] = []
        self._history: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=20))

    def begin_step(self, step: int) -> None:
        self._note_peak("")
        self.step, self.seconds, self.peaks = step, {}, {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        usual = statistics.median(self._history[name]) if self._history[name] else None
        watchdog = None
        if usual is not None:
            watchdog = threading.Timer(max(self.LEAST_SECONDS, self.PATIENCE * usual), self._complain, (name, usual, time.monotonic()))
            watchdog.daemon = True
            watchdog.start()
        start = time.perf_counter()
        try:
            with self._observed(name), record_function(name):
                yield
        except BaseException as error:
            error.add_note(f"rank {self.rank}, step {self.step}, phase {name}, after {time.perf_counter() - start:.1f} s")
            raise
        finally:
            if watchdog:
                watchdog.cancel()
        took = time.perf_counter() - start
        self.seconds[name] = self.seconds.get(name, 0.0) + took
        self._history[name].append(took)

    def _complain(self, name: str, usual: float, since: float) -> None:
        running = time.monotonic() - since
        log.warning("rank %d, step %d: %s has been running for %.0f s, usually %.1f s", self.rank, self.step, name, running, usual)

    @contextmanager
    def _observed(self, name: str) -> Iterator[None]:
        """With a peak of GPU memory of its own, and traced if this phase of this step is to be."""
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
    """If `step` is one of the chosen, a trace of each rank and one of all ranks together (train/timeline.py)."""
    if step not in config.steps:
        yield
        return
    folder = folder / f"step_{step:06d}"
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
