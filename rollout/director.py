"""Algorithm 1 of the paper as a state machine, one per response, independent of any engine.

    director ─<spawn_workers>─► workers 1..K side by side ─all done─► director, having read the workers ─► … EOS

`start()` gives the first call; pass every finished call to `finished()` and run the calls it returns, until `done`.

The budget L_max bounds the longest path, and inserted tags are charged to it:

    director may sample   left − |</spawn_workers>|                (nothing is inserted before its first segment)
    worker i may sample   left − |<worker_i>| − reserve            reserve = |</spawn_workers>| + 1

The reserve lets the director continue with a single token. So a worker that closes its tag in time is always read,
and the longest path never exceeds L_max: nothing is ever cut off afterwards. With `total_tokens`, the workers
of a round share what is left of it equally, so that limit holds in the same way. How a response ends:

    the director writes EOS                                    answered
    a director or a worker runs out of budget or of context    budget, context  (the round's other workers finish)
    the director spawns with too little left for any worker    budget, context  (its text is the final segment)
    the workers' texts together fill the model's context       context
    the director spawns more often than allowed                max_rounds       (its text is the final segment)

A worker that writes EOS is finished like any other: the EOS stays in its tokens and no closing tag is forced.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from enum import StrEnum

from dccot.core.config import NonNegative, NonNegativeFloat, Positive, Share
from dccot.rollout.response import Finish, Response, Round, Segment
from dccot.rollout.tags import SPAWN_OPEN, TagIds, worker_close


@dataclass
class RolloutConfig:
    workers: Positive = 3  # K
    budget: Positive = 7500  # L_max, tokens on the longest path
    total_tokens: Positive | None = None  # of director and workers with inserted tags; None: as the budget allows
    max_rounds: NonNegative | None = None  # how often the director may spawn; None: as often as the budget allows
    temperature: NonNegativeFloat = 0.6
    top_p: Share = 1.0


class Stop(StrEnum):
    """Why a call ended."""

    EOS = "eos"
    TAG = "tag"  # the stop string was written
    LENGTH = "length"  # max_tokens were sampled


@dataclass(frozen=True)
class Call:
    """One request to the engine."""

    path: tuple[int, int]  # (round, worker), both within this response; worker 0 is the director
    prompt: list[int]  # everything the writer has read, ending with `inserted`
    inserted: list[int]
    stop: str | None
    max_tokens: int
    limit: Finish  # what the response ends with if max_tokens are used up


@dataclass(frozen=True)
class Completion:
    """What the engine returns for a call."""

    ids: list[int]
    logprobs: list[float]
    stop: Stop
    cached: int = 0  # prompt tokens served from the prefix cache


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
        self.response = Response(list(self.prompt))
        self._read = list(self.prompt)  # everything so far, as the director reads it
        self._left = self.config.budget
        self._total_left = self.config.total_tokens or sys.maxsize
        self._closing = list(self.tags.spawn_close)

    def start(self) -> list[Call]:
        return [self._call(0, [], SPAWN_OPEN if self.parallel else None)]

    def finished(self, call: Call, completion: Completion) -> list[Call]:
        """The calls that may run after this one: none while others are still running, and when the response is done."""
        segment = Segment(call.inserted, completion.ids, completion.logprobs)
        if call.path[1] == 0:
            return self._director_finished(call, segment, completion.stop)
        return self._worker_finished(call, segment, completion.stop)

    def _director_finished(self, call: Call, segment: Segment, stop: Stop) -> list[Call]:
        self._read += segment.tokens
        self._left -= len(segment)
        self._total_left -= len(segment)
        if stop is not Stop.TAG:
            return self._end(segment, Finish.ANSWERED if stop is Stop.EOS else call.limit)
        if len(self.response.rounds) == self.config.max_rounds:
            return self._end(segment, Finish.MAX_ROUNDS)
        reserve = len(self._closing) + 1
        opening = enumerate(self.tags.worker_open, start=1)
        calls = [self._call(i, list(tag), worker_close(i), reserve) for i, tag in opening]
        cramped = [c for c in calls if c.max_tokens < 1]
        if cramped:
            return self._end(segment, cramped[0].limit)
        self.response.rounds.append(Round(segment, [Segment() for _ in calls]))
        self._running = len(calls)
        self._cut_by: Finish | None = None
        return calls

    def _worker_finished(self, call: Call, segment: Segment, stop: Stop) -> list[Call]:
        round_ = self.response.rounds[-1]
        round_.workers[call.path[1] - 1] = segment
        self._running -= 1
        if stop is Stop.LENGTH and self._cut_by is not Finish.BUDGET:
            self._cut_by = call.limit
        if self._running:
            return []
        self._read += [token for worker in round_.workers for token in worker.tokens]
        self._left -= max(map(len, round_.workers))
        self._total_left -= sum(map(len, round_.workers))
        if self._cut_by is not None:
            return self._end(None, self._cut_by)
        following = self._call(0, self._closing, SPAWN_OPEN)
        return [following] if following.max_tokens >= 1 else self._end(None, following.limit)

    def _call(self, worker: int, inserted: list[int], stop: str | None, reserve: int = 0) -> Call:
        share = self._total_left - len(inserted)
        if worker:  # the round's workers share what is left of all tokens
            opening = self.tags.worker_open
            share = (self._total_left - sum(map(len, opening)) - reserve) // len(opening)
        budget = min(self._left - len(inserted) - reserve, share)
        context = self.context - len(self._read) - len(inserted)
        path = (len(self.response.rounds), worker)
        limit = Finish.BUDGET if budget <= context else Finish.CONTEXT
        return Call(path, self._read + inserted, list(inserted), stop, min(budget, context), limit)

    def _end(self, final: Segment | None, finish: Finish) -> list[Call]:
        self.response.final, self.response.finish, self.done = final, finish, True
        return []
