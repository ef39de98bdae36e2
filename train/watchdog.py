"""A thread on every rank that notices when the rank hangs: in the engine, in a collective, on a disk.

    with Watchdog(phases, stall_seconds): …

A phase that takes far longer than ever before, or a rank that makes no progress, is reported while it hangs, with the
code location and the pending calls; again after twice the time, and so on. After `stall_seconds` without progress the
rank is ended, so that `torchrun --max-restarts` or the next job can resume from the newest checkpoint. A call that
never returns to Python is ended by faulthandler, which needs no Python.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import sys
import threading
import time
import traceback
from typing import Self

from dccot.train.phases import Phases

log = logging.getLogger(__name__)
STALLED = 70  # exit code of a rank that was ended: EX_SOFTWARE of sysexits.h
SHOWN_CALLS = 20


class Watchdog:
    PATIENCE = 5.0  # times the median of a phase's last runs
    LEAST_SECONDS = 60.0  # that a phase may always take
    SILENCE_SECONDS = 300.0  # without progress until the first report

    def __init__(self, phases: Phases, stall_seconds: float):
        self.phases, self.stall_seconds = phases, stall_seconds
        self.silence = min(self.SILENCE_SECONDS, stall_seconds / 4)
        self.every = min(10.0, self.silence / 4, self.LEAST_SECONDS / 4)
        self._report: tuple[float, float] = (
            0.0,
            0.0,
        )  # when the current phase began, after how many seconds to report it next
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
        if silent > self.stall_seconds:
            log.error(
                "%s\nended after stall_seconds=%g without a sign of life",
                self._story(silent, running, usual),
                self.stall_seconds,
            )
            logging.shutdown()
            os._exit(STALLED)
        began, after = self._report if self._report[0] == phases.since else (phases.since, 0.0)
        if running >= after:
            self._report = began, 2 * running
            log.warning("%s", self._story(silent, running, usual))

    def _story(self, silent: float, running: float, usual: float | None) -> str:
        phases = self.phases
        usually = f", usually {usual:.1f} s" if usual is not None else ""
        calls = list(phases.pending())
        pending = f"; {len(calls)} pending: {', '.join(calls[:SHOWN_CALLS])}" if calls else ""
        frame = sys._current_frames().get(self._watched)
        stack = "".join(traceback.format_stack(frame)) if frame else ""
        return (
            f"rank {phases.rank}, step {phases.step}: {phases.name} has been running for {running:.0f} s{usually}; "
            f"last sign of life {silent:.0f} s ago{pending}\n{stack.rstrip()}"
        )
