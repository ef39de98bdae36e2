"""A response on the terminal while it is being written: director above, workers side by side.

Finished parts scroll up in full; the current part stays live below, showing at least its last lines. If the output is
not a terminal, every part is printed as plain text when it is finished.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from itertools import groupby

from rich.console import Console, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from dccot.eval.timeline import Lane, Timeline
from dccot.rollout.director import Stop

DIRECTOR_COLOUR, WORKER_COLOURS = "cyan", ("green", "yellow", "magenta", "blue", "red")
REFRESH_SECONDS = 0.1
TAIL_TOKENS = 1200  # a screen shows no more, and decoding everything ten times per second would slow down the engine
NARROWEST_COLUMN = 24
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # escapes in a model's text are shown, not interpreted

Decode = Callable[[list[int]], str]
Lines = Sequence[tuple[str, str]]  # (label, text)


def printable(text: str) -> str:
    return CONTROL.sub("\N{REPLACEMENT CHARACTER}", text)


def parts(timeline: Timeline) -> list[list[Lane]]:
    """The response so far in reading order: a director alone, or all that it spawned at one point."""
    lanes = sorted(timeline.lanes, key=lambda lane: lane.call.path)
    return [list(part) for _, part in groupby(lanes, key=lambda lane: (lane.call.path[0], lane.worker > 0))]


def is_finished(part: list[Lane]) -> bool:
    """Whether everything in it is written; a worker that has spawned continues after its workers."""
    last = {lane.call.thread: lane for lane in part}.values()
    return all(lane.completion and not (lane.worker and lane.completion.stop is Stop.SPAWN) for lane in last)


def title(lane: Lane) -> str:
    return f"{lane.call.writer} · {len(lane.ids):,} token{'' if len(lane.ids) == 1 else 's'}"


class View:
    """Prints every part when it is finished; a terminal also shows it while it is being written, after the problem."""

    def __init__(self, problem: str, decode: Decode, console: Console | None = None):
        self._problem, self._decode, self._console = problem, decode, console or Console(highlight=False)
        self._parts, self._done, self._drawn = list[list[Lane]](), 0, 0.0
        self._live = Live(console=self._console, auto_refresh=False, transient=True, vertical_overflow="crop")

    def __enter__(self) -> View:
        if self._console.is_terminal:
            self._console.print(Text(printable(self._problem.strip()), "bold"))
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._console.is_terminal:
            self._live.stop()

    def show(self, timeline: Timeline) -> None:
        self._parts = parts(timeline)
        finished = [part for part in self._parts[self._done :] if is_finished(part)]
        self._done += len(finished)
        if self._console.is_terminal and (finished or time.monotonic() - self._drawn >= REFRESH_SECONDS):
            running = self._parts[self._done :]
            current = self._part(running[0], height=max(3, self._console.height - 4)) if running else Text()
            self._live.update(current, refresh=True)
            self._drawn = time.monotonic()
        self._print(finished)

    def _print(self, finished: list[list[Lane]]) -> None:
        for part in finished:
            if self._console.is_terminal:
                self._console.print(self._part(part, height=None))
                continue
            for lane in part:
                self._write(f"── {title(lane)} ──\n{printable(self._decode(lane.ids)).strip()}\n")

    def conclude(self, lines: Lines) -> None:
        self._print(self._parts[self._done :])  # cut off where a worker could not spawn
        for label, text in lines:
            style = {"answer": "bold green", "": "dim"}.get(label, "")
            if self._console.is_terminal:
                self._console.print(Text.assemble((f"{label:<8}", "dim"), (printable(text), style)))
            else:
                self._write(f"{label:<8}{printable(text)}")

    def _write(self, text: str) -> None:
        print(text, file=self._console.file, flush=True)

    def _part(self, lanes: list[Lane], height: int | None) -> RenderableType:
        """A panel per writer, as high as the longest text but at most `height`, which keeps the last lines."""
        across = len(lanes) if self._console.width // len(lanes) >= NARROWEST_COLUMN else 1
        width = self._console.width // across
        room = None if height is None else max(1, height // (len(lanes) // across) - 2)
        texts = [self._lines(lane, width - 4, room) for lane in lanes]
        tallest = max(len(lines) for lines in texts)
        panels = []
        for lane, lines in zip(lanes, texts):
            panel = Panel(Text("\n").join(lines), title=title(lane), title_align="left", subtitle_align="right")
            panel.width, panel.height = width, 2 + (tallest if across > 1 else len(lines))
            panel.subtitle, panel.border_style = "" if lane.completion else "…", self._colour(lane)
            panels.append(panel)
        grid = Table.grid(expand=False)
        for start in range(0, len(panels), across):
            grid.add_row(*panels[start : start + across])
        return grid

    def _lines(self, lane: Lane, width: int, room: int | None) -> list[Text]:
        ids = lane.ids if room is None else lane.ids[-TAIL_TOKENS:]
        lines = Text(printable(self._decode(ids)).strip()).wrap(self._console, width)
        return list(lines if room is None else lines[-room:]) or [Text()]

    @staticmethod
    def _colour(lane: Lane) -> str:
        return WORKER_COLOURS[(lane.worker - 1) % len(WORKER_COLOURS)] if lane.worker else DIRECTOR_COLOUR
