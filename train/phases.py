"""The phases of a training step: timed, named in profiler traces, and watched by a thread that notices a hang.

    with Watchdog(phases, stall_seconds):
        with phases("rollout"): …

An error that leaves a phase gets rank, step and phase as notes, so that a timed-out collective on one of many ranks can
be located. A rank may hang in the engine, in a collective, on a disk. A phase that takes far longer than ever before,
or a rank that makes no progress, is reported while it hangs, with the code location and the pending calls; again after
twice the time, and so on. After `stall_seconds` without progress the rank is ended, so that `torchrun --max-restarts`
or the next job can resume from the newest checkpoint. A call that never returns to Python is ended by faulthandler,
which needs no Python.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import statistics
import sys
import threading
import time
import traceback
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from dccot.core.run import step_name
from dccot.core.runtime import Runtime
from dccot.train.config import ProfileConfig
from dccot.train.trace import merge

log = logging.getLogger(__name__)
ACTIVITIES = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])
STALLED = 70  # exit code of a rank that was ended: EX_SOFTWARE of sysexits.h
SHOWN_CALLS = 20


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
            took = time.perf_counter() - start
            error.add_note(f"rank {self.rank}, step {self.step}, phase {name}, after {took:.1f} s")
            raise
        finally:
            self._enter("the code between phases")
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


class Watchdog:
    PATIENCE = 5.0  # times the median of a phase's last runs
    LEAST_SECONDS = 60.0  # that a phase may always take
    SILENCE_SECONDS = 300.0  # without progress until the first report

    def __init__(self, phases: Phases, stall_seconds: float):
        self.phases, self.stall_seconds = phases, stall_seconds
        self.silence = min(self.SILENCE_SECONDS, stall_seconds / 4)
        self.every = min(10.0, self.silence / 4, self.LEAST_SECONDS / 4)
        self._report = (0.0, 0.0)  # when the current phase began, after how many seconds to report it next
        self._ended = threading.Event()
        self._watched = threading.get_ident()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> Self:
        self.phases.beat()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        faulthandler.cancel_dump_traceback_later()

    def _watch(self) -> None:
        while not self._ended.wait(self.every):
            faulthandler.dump_traceback_later(self.stall_seconds + 10 * self.every, exit=True, file=2)
            self._look(time.monotonic())

    def _look(self, now: float) -> None:
        phases = self.phases
        silent, running, usual = now - phases.last_beat, now - phases.since, phases.usual
        late = usual is not None and running > max(self.LEAST_SECONDS, self.PATIENCE * usual)
        if not late and silent <= self.silence:
            return
        story = self._story(silent, running, usual)
        if silent > self.stall_seconds:
            log.error("%s\nended after stall_seconds=%g without progress", story, self.stall_seconds)
            logging.shutdown()
            faulthandler.dump_traceback(file=2)  # of every thread: a judge or the asynchronous mode's may be what hangs
            os._exit(STALLED)
        began, after = self._report if self._report[0] == phases.since else (phases.since, 0.0)
        if running >= after:
            self._report = began, 2 * running
            log.warning("%s", story)

    def _story(self, silent: float, running: float, usual: float | None) -> str:
        phases = self.phases
        usually = f", usually {usual:.1f} s" if usual is not None else ""
        calls = list(phases.pending())
        pending = f"; {len(calls)} pending: {', '.join(calls[:SHOWN_CALLS])}" if calls else ""
        frame = sys._current_frames().get(self._watched)
        stack = "".join(traceback.format_stack(frame)) if frame else ""
        where = f"rank {phases.rank}, step {phases.step}: {phases.name} has been running for {running:.0f} s{usually}"
        return f"{where}; last progress {silent:.0f} s ago{pending}\n{stack.rstrip()}"
