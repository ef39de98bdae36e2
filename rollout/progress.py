"""Progress of a rollout: finished responses, tokens per second, running sequences.

with RolloutProgress(total=len(requests)) as progress:
    for request, response in generate(engine, requests, config, seed=seed, watch=progress): …
"""

from __future__ import annotations

import time

from rich.console import Console

from dccot.core.progress import Progress
from dccot.rollout.engine import Engine
from dccot.rollout.generate import Request, Watch
from dccot.rollout.response import Response

REFRESH_SECONDS = 0.2


class RolloutProgress(Progress, Watch):
    def __init__(self, total: int, title: str = "rollout", console: Console | None = None):
        super().__init__(title, total, console=console or Console(stderr=True, highlight=False))
        self._refreshed = 0.0  # when the rate was last computed
        self._tokens: int | None = None  # tokens the engine had sampled by then

    def stepped(self, engine: Engine) -> None:
        now = time.monotonic()
        if self._tokens is None:  # the first step of this rollout, maybe not of the engine
            self._tokens, self._refreshed = engine.sampled_tokens, now
        elif now - self._refreshed > (REFRESH_SECONDS if self.console.is_terminal else self.pause):
            rate = (engine.sampled_tokens - self._tokens) / (now - self._refreshed)
            self.show(self.done, f"{rate:,.0f} tokens/s, {engine.running} running")
            self._tokens, self._refreshed = engine.sampled_tokens, now

    def answered(self, request: Request, response: Response) -> None:
        self.show(self.done + 1)
