"""Many responses on one engine, each continuing as soon as its own part is finished: no barrier over the batch.

    for request, response in generate(engine, requests, config, seed=(run_seed, step)): …

Responses arrive in the order in which they finish. The same seed gives the same tokens: every call has its own
seed, a hash of (seed, problem, sample, *path of the call in its tree).
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Generator, Iterable
from dataclasses import dataclass, field
from itertools import islice

from rich.console import Console

from dccot.core.config import check
from dccot.core.progress import Progress
from dccot.rollout.director import Call, Completion, Director, RolloutConfig
from dccot.rollout.engine import Engine
from dccot.rollout.response import Response
from dccot.rollout.tags import TagIds


@dataclass(frozen=True)
class Request:
    """A request for one response."""

    problem: str  # id
    sample: int
    prompt: list[int] = field(repr=False)
    parallel: bool = True  # may spawn workers; False: one sequential call


class Watch:
    """Callbacks for a live view, a trace or a progress bar; override any of them, by default they do nothing."""

    def started(self, request: Request, call: Call) -> None: ...

    def finished(self, request: Request, call: Call, completion: Completion) -> None: ...

    def stepped(self, engine: Engine) -> None: ...

    def answered(self, request: Request, response: Response) -> None: ...


class RolloutProgress(Progress, Watch):
    """Finished responses, tokens per second, running sequences."""

    def __init__(self, total: int, title: str = "rollout", console: Console | None = None):
        super().__init__(title, total, console=console or Console(stderr=True, highlight=False))
        self.refresh = 0.2 if self.console.is_terminal else self.pause  # seconds
        self._refreshed = 0.0  # when the rate was last computed
        self._tokens: int | None = None  # tokens the engine had sampled by then

    def stepped(self, engine: Engine) -> None:
        now = time.monotonic()
        if self._tokens is None:  # the first step of this rollout, maybe not of the engine
            self._tokens, self._refreshed = engine.sampled_tokens, now
        elif now - self._refreshed > self.refresh:
            rate = (engine.sampled_tokens - self._tokens) / (now - self._refreshed)
            self.show(self.done, f"{rate:,.0f} tokens/s, {engine.running} running")
            self._tokens, self._refreshed = engine.sampled_tokens, now

    def answered(self, request: Request, response: Response) -> None:
        self.show(self.done + 1)


def seed_of(*key: int | str) -> int:
    """63 bits that depend on every part of the key, the same on every machine."""
    return int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=8).digest(), "big") >> 1


def generate(
    engine: Engine,
    requests: Iterable[Request],
    config: RolloutConfig,
    *,
    seed: tuple[int | str, ...],
    watch: Watch | None = None,
    concurrency: int | None = None,
) -> Generator[tuple[Request, Response]]:
    """Yield each response as soon as it is finished. A caller that stops early leaves the engine empty.

    All responses start at once, or at most `concurrency`: then each one that finishes makes room for the next.
    """
    check(config, "rollout")
    watch = watch or Watch()
    tags = TagIds.of(engine.tokenizer, config.workers)
    running: dict[str, tuple[int, Request, Director, Call]] = {}

    def run(order: int, request: Request, director: Director, calls: list[Call]) -> None:
        for call in calls:
            key = f"{request.problem}/{request.sample}/{'.'.join(map(str, call.path))}"
            call_seed = seed_of(*seed, request.problem, request.sample, *call.path)
            engine.add(key, call, seed=call_seed, temperature=config.temperature, top_p=config.top_p, priority=order)
            running[key] = order, request, director, call
            watch.started(request, call)

    waiting = enumerate(requests)

    def begin(count: int | None) -> None:
        for order, request in islice(waiting, count):
            director = Director(request.prompt, config, tags, engine.context, request.parallel)
            run(order, request, director, director.start())

    try:
        begin(concurrency)
        while running:
            finished = engine.step()
            watch.stepped(engine)
            for key, completion in finished:
                order, request, director, call = running.pop(key)
                watch.finished(request, call, completion)
                run(order, request, director, director.finished(call, completion))
                if director.done:
                    watch.answered(request, director.response)
                    begin(1)
                    yield request, director.response
    finally:
        engine.abort(running)
