"""Stop signals: SIGTERM (pre-emption, a time limit), SIGINT (Ctrl-C), and SIGUSR1, which saves and continues.

    with listening(): …                  a command: SIGTERM ends it immediately with Stopped, SIGINT with KeyboardInterrupt
        with listening(wait=True): …     training: both are recorded in `asked`; the loop stops where it can save; a second SIGINT ends it

A command that was stopped exits with CONTINUE: nothing is wrong, run it again.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType

CONTINUE = 75  # EX_TEMPFAIL of sysexits.h
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class Stopped(BaseException):
    """The command was told to stop and has stopped; the same command resumes."""


@dataclass
class Asked:
    """Signals received by this process. All ranks must agree before they act on them."""

    wait: bool = False
    stop: bool = False
    save: bool = False

    def hear(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGUSR1:
            self.save = self.wait  # otherwise there is nothing to save, and the default would kill the process
        elif number == signal.SIGINT and (self.stop or not self.wait):
            raise KeyboardInterrupt
        elif not self.wait:
            raise Stopped
        else:
            self.stop = True
            if os.environ.get("RANK", "0") == "0":  # not print: the signal may have interrupted one
                os.write(2, b"\nstopping as soon as everything can be saved; a second Ctrl-C stops at once\n")


asked = Asked()  # signals belong to the process


@contextlib.contextmanager
def listening(wait: bool = False) -> Iterator[Asked]:
    """Handle SIGNALS; only a process's main thread can, so elsewhere this does nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return
    outside = asked.wait
    handlers = {number: signal.signal(number, asked.hear) for number in SIGNALS}
    asked.wait, asked.stop, asked.save = wait, False, False
    try:
        yield asked
    finally:
        unheeded = asked.stop
        asked.wait, asked.stop, asked.save = outside, False, False
        for number, handler in handlers.items():
            signal.signal(number, handler)
    if unheeded and not outside:  # it arrived after the last check
        raise Stopped
