"""A progress bar over a rollout: finished responses, tokens per second, running sequences.

    with Progress(total=len(requests)) as progress:
        for request, response in generate(engine, requests, config, seed=seed, watch=progress): …

On a terminal a bar; elsewhere a line every half minute, so that a log stays readable.
"""
from __future__ import annotations

import time
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from dccot.rollout.generate import Request, Watch
from dccot.rollout.response import Response

if TYPE_CHECKING:
    from dccot.rollout.engine import Engine

REFRESH_SECONDS, LINE_SECONDS = 0.2, 30.0


class Progress(Watch):
    def __init__(self, total: int, title: str = "rollout", console: Console | None = None):
        self.title, self.total, self.finished_responses = title, total, 0
        self.console = console or Console(stderr=True, highlight=False)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
        self._bar = Bar(*columns, console=self.console, disable=not self.console.is_terminal)
        self._task = self._bar.add_task(title, total=total)
        self._shown = time.monotonic()
        self._tokens: int | None = None  # that the engine had sampled when it was last shown

    def __enter__(self) -> Progress:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def stepped(self, engine: Engine) -> None:
        now = time.monotonic()
        if self._tokens is None:  # the first step of this rollout, maybe not of the engine
            self._tokens, self._shown = engine.sampled_tokens, now
        elif now - self._shown > (REFRESH_SECONDS if self.console.is_terminal else LINE_SECONDS):
            rate = (engine.sampled_tokens - self._tokens) / (now - self._shown)
            self._show(f"{self.title}  {rate:,.0f} tokens/s, {engine.running} running")
            self._tokens, self._shown = engine.sampled_tokens, now

    def done(self, request: Request, response: Response) -> None:
        self.finished_responses += 1
        self._bar.update(self._task, completed=self.finished_responses)

    def _show(self, text: str) -> None:
        self._bar.update(self._task, description=text)
        if not self.console.is_terminal:
            self.console.print(f"{text}, {self.finished_responses:,} of {self.total:,} responses")
