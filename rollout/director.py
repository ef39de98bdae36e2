"""Algorithm 1 of the paper as a state machine, one per response, independent of any engine.

    director ─<spawn_workers>─► workers 1..K side by side ─all done─► director, having read the workers ─► … EOS

`start()` gives the first call; pass every finished call to `finished()` and run the calls it returns, until `done`.
Every thread is the same machine: a worker may spawn workers of its own down to `depth`, and continues when it has read
them.

The budget L_max bounds the longest path, and inserted tags are charged to it. A thread has `left` tokens for itself and
what it spawns, the director L_max:

    a thread may sample    left − |</spawn_workers>|         (nothing is inserted before the director's first text)
    its worker i has       left − |</spawn_workers>| − r     of which |<worker_i>| are inserted

r is the least that the thread must be able to write after reading its workers: one token of the director, `</worker_i>`
of a worker. So a worker that closes its tag in time is always read, by every level above it, and the longest path never
exceeds L_max: nothing is ever cut off afterwards. With `total_tokens`, the workers of a fork share what their thread
has left of it equally, so that limit holds in the same way. How a response ends:

    the director writes EOS                                    answered
    a thread runs out of budget or of context                  budget, context  (the other workers of its fork finish)
    a thread spawns with too little left for any worker        budget, context  (its text is its last segment)
    the workers' texts together fill the model's context       context
    a thread spawns more often than allowed                    max_rounds       (its text is its last segment)
    a thread spawns without as many tasks as allowed           width            (its text is its last segment)

What ends a worker early ends the response, once the other workers of its fork have finished; of several such reasons
the first of `Finish` counts. A worker that writes EOS is finished like any other: the EOS stays in its tokens and no
closing tag is forced.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import takewhile

from dccot.core.config import NonNegative, NonNegativeFloat, Positive, Share
from dccot.rollout.response import Finish, Response, Segment, tokens_of
from dccot.rollout.tags import SPAWN_OPEN, TagIds, Width, worker_close
from dccot.rollout.thread import Thread


@dataclass
class RolloutConfig:
    workers: Width = 3  # per block; [1, 8]: as many as tasks are listed before it
    depth: Positive = 1  # levels of workers: above 1, workers may spawn workers
    budget: Positive = 7500  # L_max, tokens on the longest path
    total_tokens: Positive | None = None  # of director and workers with inserted tags; None: as the budget allows
    max_rounds: NonNegative | None = None  # how often a thread may spawn; None: as often as the budget allows
    temperature: NonNegativeFloat = 0.6  # 0: the likeliest token
    top_p: Share = 1.0  # sample from the likeliest tokens that hold this share


class Stop(StrEnum):
    """Why a call ended."""

    EOS = "eos"
    SPAWN = "spawn"  # <spawn_workers> was written
    CLOSE = "close"  # the worker's closing tag was written
    LENGTH = "length"  # max_tokens were sampled


@dataclass(frozen=True)
class Call:
    """One request to the engine: a segment of a thread."""

    thread: tuple[int, ...]  # (fork, worker) from the director, which is (), downwards
    number: int  # of the thread's segments
    prompt: list[int]  # everything the writer has read, ending with `inserted`
    inserted: list[int]
    stops: tuple[str, ...]  # tags that end it
    max_tokens: int
    limit: Finish  # what the response ends with if max_tokens are used up

    @property
    def path(self) -> tuple[int, ...]:
        """Its place in reading order, which decides its seed: of a worker's first segment that of the thread.

        >>> [Call(*place, [], [], (), 1, Finish.BUDGET).path for place in (((), 0), ((), 1), ((1, 2), 0), ((1, 2), 1))]
        [(0, 0), (1, 0), (1, 2), (1, 2, 1, 0)]
        """
        return self.thread if self.thread and not self.number else (*self.thread, self.number, 0)

    @property
    def writer(self) -> str:
        """For people: director, worker 2, worker 2.1, which is the first worker of worker 2."""
        return f"worker {'.'.join(map(str, self.thread[1::2]))}" if self.thread else "director"


@dataclass(frozen=True)
class Completion:
    """What the engine returns for a call."""

    ids: list[int]
    logprobs: list[float]
    stop: Stop
    cached: int = 0  # prompt tokens served from the prefix cache
    versions: list[int] = field(default_factory=list)  # of the weights, per id; empty if not numbered


@dataclass
class _Writer:
    """A thread that is being written."""

    thread: Thread[Segment]
    path: tuple[int, ...]  # (): the director
    left: int  # tokens of the longest path for it and what it spawns; what those above it need is set aside
    total: int  # of all tokens, in the same way
    above: _Writer | None = None
    read: list[int] = field(default_factory=list)  # up to its last fork
    fork: list[_Writer] = field(default_factory=list)  # the last one
    ended: bool = False
    cut_by: Finish | None = None  # what ended it early


@dataclass
class Director:
    prompt: list[int]
    config: RolloutConfig
    tags: TagIds
    context: int  # the model's context length
    parallel: bool = True  # False: one sequential call, for baselines
    response: Response = field(init=False)
    done: bool = field(init=False, default=False)

    def __post_init__(self):
        if len(self.prompt) >= self.context:
            limit = f"engine.context is {self.context:,}: shorten one or raise the other"
            raise ValueError(f"prompt has {len(self.prompt):,} tokens; {limit}")
        self.response = Response(prompt=list(self.prompt))
        director = _Writer(self.response, (), self.config.budget, self.config.total_tokens or sys.maxsize)
        self._writers = {director.path: director}

    def start(self) -> list[Call]:
        return [self._call(self._writers[()], self.prompt, [])]

    def finished(self, call: Call, completion: Completion) -> list[Call]:
        """The calls that may run after this one: none while others are still running, and when the response is done."""
        writer = self._writers[call.thread]
        segment = Segment(call.inserted, completion.ids, completion.logprobs, completion.versions)
        writer.thread.trunk.append(segment)
        writer.left -= len(segment)
        writer.total -= len(segment)
        if completion.stop is Stop.SPAWN:
            return self._fork(writer, call.prompt + completion.ids)
        return self._end(writer, call.limit if completion.stop is Stop.LENGTH else None)

    def read_so_far(self, call: Call, written: list[int]) -> list[list[int]]:
        """Of the fork that a worker's call belongs to, until all of it is written: what is read before it, the texts of
        the workers that are finished up to the first that is not, and if that one writes the call, its text so far."""
        worker = self._writers[call.thread]
        above = worker.above
        if above is None or all(each.ended for each in above.fork) or any(each.cut_by for each in above.fork):
            return []
        finished = takewhile(lambda each: each.ended, above.fork)
        texts = [above.read, *(tokens_of(each.thread) for each in finished)]
        if above.fork[len(texts) - 1] is worker:
            texts.append(tokens_of(worker.thread) + call.inserted + written)
        return texts

    def overdue(self, call: Call, written: int, factor: float) -> bool:
        """Whether a worker that has written so much in this call is the last one of its fork that writes, and `factor`
        times longer than the longest of the others."""
        worker = self._writers[call.thread]
        others = [each for each in worker.above.fork if each is not worker] if worker.above else []
        if not others or not all(each.ended for each in others):
            return False
        longest = max(each.thread.path() for each in others)
        return worker.thread.path() + len(call.inserted) + written > factor * longest

    def _fork(self, writer: _Writer, read: list[int]) -> list[Call]:
        number = len(writer.thread.forks)
        if number == self.config.max_rounds:
            return self._end(writer, Finish.MAX_ROUNDS)
        opening = self.tags.opening(writer.thread.trunk[-1].sampled)
        if opening is None:
            return self._end(writer, Finish.WIDTH)
        reserve = len(self.tags.spawn_close) + (self.tags.closing if writer.path else 1)
        share = (writer.total - sum(map(len, opening)) - reserve) // len(opening)
        workers, calls = [], []
        for i, tag in enumerate(opening, start=1):
            path = (*writer.path, number, i)
            workers.append(_Writer(Thread(), path, writer.left - reserve, share + len(tag), writer))
            calls.append(self._call(workers[-1], read, list(tag)))
        if cramped := next((call for call in calls if call.max_tokens < 1), None):
            return self._end(writer, cramped.limit)
        writer.thread.forks.append([worker.thread for worker in workers])
        writer.read, writer.fork = read, workers
        self._writers |= {worker.path: worker for worker in workers}
        return calls

    def _end(self, writer: _Writer, cut_by: Finish | None) -> list[Call]:
        """The thread is written; the one that spawned it continues when all of its fork are."""
        writer.ended, writer.cut_by, above = True, cut_by, writer.above
        if above is None:
            self.response.finish, self.done = cut_by or Finish.ANSWERED, True
            return []
        if not all(worker.ended for worker in above.fork):
            return []
        fork = above.thread.forks[-1]
        above.left -= max(worker.path() for worker in fork)
        above.total -= sum(worker.total() for worker in fork)
        if cuts := {worker.cut_by for worker in above.fork} - {None}:
            return self._end(above, next(reason for reason in Finish if reason in cuts))
        read = above.read + [token for worker in fork for token in tokens_of(worker)]
        following = self._call(above, read, list(self.tags.spawn_close))
        return [following] if following.max_tokens >= 1 else self._end(above, following.limit)

    def _call(self, writer: _Writer, read: list[int], inserted: list[int]) -> Call:
        """The next segment of a thread."""
        closing = (worker_close(writer.path[-1]),) if writer.path else ()
        spawning = (SPAWN_OPEN,) if self.parallel and len(writer.path) < 2 * self.config.depth else ()
        budget = min(writer.left, writer.total) - len(inserted)
        context = self.context - len(read) - len(inserted)
        limit = Finish.BUDGET if budget <= context else Finish.CONTEXT
        number, stops = len(writer.thread.trunk), closing + spawning
        return Call(writer.path, number, read + inserted, inserted, stops, min(budget, context), limit)
