"""Being asked to stop: SIGTERM (pre-emption, a time limit), SIGINT (Ctrl-C), and SIGUSR1, which asks to save and continue.

    with listening(): …                  a command: SIGTERM ends it at once with Stopped, SIGINT with KeyboardInterrupt
        with listening(wait=True): …     training: both are noted in `asked`, and the loop stops where it can save; a second SIGINT ends it

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
    """The command was asked to stop and has stopped; the same command continues."""


@dataclass
class Asked:
    """What signals have asked of this process. All ranks must agree before they act on it."""

    wait: bool = False
    stop: bool = False
    save: bool = False

    def hear(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGUSR1:
            self.save = self.wait  # elsewhere there is nothing to save, and the default would be to die
        elif number == signal.SIGINT and (self.stop or not self.wait):
            raise KeyboardInterrupt
        elif not self.wait:
            raise Stopped
        else:
            self.stop = True
            if os.environ.get("RANK", "0") == "0":  # not print: the signal may have come in the middle of one
                os.write(2, b"\nstopping as soon as everything can be saved; a second Ctrl-C stops at once\n")


asked = Asked()  # signals belong to the process


@contextlib.contextmanager
def listening(wait: bool = False) -> Iterator[Asked]:
    """Handle SIGNALS; only a process's main thread can, and elsewhere nothing changes."""
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
    if unheeded and not outside:  # it came after the last look
        raise Stopped
