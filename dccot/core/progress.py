"""One progress bar for everything that takes a while, and one line for everything whose end is not known.

    with Progress("SFT", total=1800, first=200) as progress:
        progress.show(201, "loss 1.23")
    with waiting("loading torch"): …

On a terminal, a bar with the time left and the text next to it; elsewhere a line with both, at most one per `pause`
seconds, so that a log stays readable. With `lines` the texts are also printed above the bar. Only an `active` progress
(rank 0's) shows anything.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

HEARTBEAT_SECONDS = 15.0


def first_rank() -> bool:
    """Whether this process talks to the user: alone, or the first of torchrun's."""
    return os.environ.get("RANK", "0") == "0"


@contextlib.contextmanager
def waiting(what: str, seen: Callable[[], str] = str) -> Iterator[None]:
    """Says at once what is being done, then for how long and what is `seen` of it: on a terminal in place, elsewhere a
    line every HEARTBEAT_SECONDS. It reaches the terminal even if stderr is sent elsewhere meanwhile.
    """
    if not first_rank():
        yield
        return
    console, done, began = os.dup(2), threading.Event(), time.monotonic()
    terminal = os.isatty(console)

    def beat() -> None:
        while not done.wait(1.0 if terminal else HEARTBEAT_SECONDS):
            more = f"{what}: {time.monotonic() - began:.0f} s; {seen()}".rstrip("; ")
            os.write(console, f"\r{more[:76]}\x1b[K".encode() if terminal else f"{more}\n".encode())

    os.write(console, f"{what} …{'' if terminal else chr(10)}".encode())
    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        if terminal:
            os.write(console, b"\r\x1b[K")
        os.close(console)


class Progress:
    def __init__(
        self,
        title: str,
        total: int | None = None,
        *,
        first: int = 0,
        active: bool = True,
        lines: bool = False,
        pause: float = 30.0,
        console: Console | None = None,
    ):
        self.title, self.total, self.first, self.done = title, total, first, first
        self.active, self.lines, self.pause = active, lines, pause
        self.console = console or Console(highlight=False, soft_wrap=True)
        self._began = time.monotonic()
        self._next_line = self._began + (0.0 if lines else pause)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        left = (TextColumn("left"), TimeRemainingColumn())
        self._bar = Bar(
            *columns, *left, console=self.console, disable=not (active and self.console.is_terminal), transient=lines
        )
        self._task = self._bar.add_task(title, total=total, completed=first)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def show(self, done: int, text: str = "", *, total: int | None = None) -> None:
        """`done` so far; the time left is estimated from the progress since the start."""
        self.done, self.total = done, total if total is not None else self.total
        if not self.active:
            return
        beside = self.title if self.lines or not text else f"{self.title}  {text}"
        self._bar.update(self._task, completed=done, total=self.total, description=beside)
        terminal, now = self.console.is_terminal, time.monotonic()
        if (terminal and not self.lines) or (now < self._next_line and done != self.total):
            return
        self._next_line = now + self.pause
        line = text if self.lines else f"{self.title}: {self._count()}{', ' if text else ''}{text}"
        self.console.print(line if terminal else f"{line}  {self._left(now)}".rstrip())

    def _count(self) -> str:
        return f"{self.done:,} of {self.total:,}" if self.total is not None else f"{self.done:,}"

    def _left(self, now: float) -> str:
        if self.total is None or self.done <= self.first:
            return ""
        seconds = (now - self._began) / (self.done - self.first) * (self.total - self.done)
        return f"(left {int(seconds // 60)}:{int(seconds % 60):02d})"
