"""Many responses on one engine, each continuing as soon as its own part is finished: no barrier over the batch.

    for request, response in generate(engine, requests, config, seed=(run_seed, step)): …

    sampler = Sampler(engine)                                the same, in the caller's hands
    sampler.start(request, config, seed=(run_seed, step))    at any time
    sampler.step()                                           one step of the engine: [(request, response), …]

Responses arrive in the order in which they finish. The same seed gives the same tokens: every call has its own
seed, a hash of (seed, problem, sample, *path of the call in its tree). Between two steps the engine may take new
weights and keep its calls: unfinished responses continue with them.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Generator, Iterable
from dataclasses import dataclass, field
from itertools import count, islice

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
    group: int | None = None  # where a problem may be asked again while it is being answered: which time this is

    @property
    def name(self) -> str:
        return "/".join(str(part) for part in (self.group, self.problem, self.sample) if part is not None)


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


class Sampler:
    """Responses in the making. Nothing happens outside `step`; at most one sampler steps an engine."""

    def __init__(self, engine: Engine, watch: Watch | None = None):
        self.engine, self.watch = engine, watch or Watch()
        self._running: dict[str, tuple[_Started, Call]] = {}
        self._order = count()  # of responses: earlier ones go first
        self._tags: dict[str, TagIds] = {}  # by rollout.workers

    def __len__(self) -> int:
        """Calls that are running; 0: every response is finished."""
        return len(self._running)

    def start(self, request: Request, config: RolloutConfig, *, seed: tuple[int | str, ...]) -> None:
        """Begin a response; no other of the same name may be running."""
        if (width := repr(config.workers)) not in self._tags:
            self._tags[width] = TagIds.of(self.engine.tokenizer, config.workers)
        tags = self._tags[width]
        director = Director(request.prompt, config, tags, self.engine.context, request.parallel)
        started = _Started(next(self._order), request, director, (*seed, request.problem, request.sample))
        self._run(started, director.start())

    def step(self) -> list[tuple[Request, Response]]:
        """Advance all a little; returns the responses that are finished."""
        finished = self.engine.step()
        self.watch.stepped(self.engine)
        done = []
        for key, completion in finished:
            started, call = self._running.pop(key)
            self.watch.finished(started.request, call, completion)
            director = started.director
            self._run(started, director.finished(call, completion))
            if director.done:
                self.watch.answered(started.request, director.response)
                done.append((started.request, director.response))
        return done

    def abort(self) -> None:
        self.engine.abort(self._running)
        self._running.clear()

    def _run(self, started: _Started, calls: list[Call]) -> None:
        config = started.director.config
        for call in calls:
            key = f"{started.request.name}/{'.'.join(map(str, call.path))}"
            seed, heat, top_p = seed_of(*started.seed, *call.path), config.temperature, config.top_p
            self.engine.add(key, call, seed=seed, temperature=heat, top_p=top_p, priority=started.order)
            self._running[key] = started, call
            self.watch.started(started.request, call)


@dataclass(frozen=True)
class _Started:
    order: int
    request: Request
    director: Director
    seed: tuple[int | str, ...]


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
    sampler, waiting = Sampler(engine, watch), iter(requests)

    def begin(most: int | None) -> None:
        for request in islice(waiting, most):
            sampler.start(request, config, seed=seed)

    try:
        begin(concurrency)
        while sampler:
            for request, response in sampler.step():
                begin(1)
                yield request, response
    finally:
        sampler.abort()
