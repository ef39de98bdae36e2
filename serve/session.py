"""One response on the server's asynchronous engine: every call of director and workers is a task, and all of them end
together.

    Session(engine, director, …).run(hear)      hear(piece) is called as text arrives; returning True ends the response

The calls of all requests share the engine's batches; when a worker starts is up to `admission`. While slower workers
write, what will be read of the finished ones is put into the prefix cache. Cancelling the run, or an error in any call,
cancels the other calls of this response immediately, and vLLM aborts their requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from typing import Any

from vllm import SamplingParams
from vllm.engine.protocol import EngineClient
from vllm.inputs import tokens_input
from vllm.sampling_params import RequestOutputKind

from dccot.rollout.director import Call, Completion, Director, RolloutConfig, Stop
from dccot.rollout.engine import Sampling
from dccot.rollout.generate import seed_of
from dccot.rollout.tags import SPAWN_CLOSE, TagIds, Width, worker_open
from dccot.serve.admission import JOINS_FIRST, Admission, Branching, Start, place
from dccot.serve.stream import Piece

LOOK = 16  # tokens after which a worker's text is looked at again
Hear = Callable[[Piece], bool]


class Vocabulary:
    """The tokenizer, its ids for the tags, and the rule for sampling with them."""

    def __init__(self, tokenizer: Any, workers: Width):
        self.tokenizer, self.sampling = tokenizer, Sampling(tokenizer)
        self.tags = TagIds.of(tokenizer, workers)
        self.eos = self.decode([self.tags.eos])

    def decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=False)


@dataclass(frozen=True)
class Manner:
    """How the workers of a response run."""

    branching: Branching
    prefill_joins: int  # tokens of finished workers that are prefilled while others write; 0: never
    max_worker_tokens: int | None = None  # that a worker may sample at a stretch
    straggler_factor: float | None = None  # the last worker of a fork is cut when it is so much longer than the others


@dataclass
class Session:
    engine: EngineClient
    director: Director
    config: RolloutConfig
    vocabulary: Vocabulary
    name: str  # of the request, for the engine's log
    seed: int
    sample: int
    admission: Admission
    manner: Manner
    order: int | None = None  # among all responses, for the engine's queue; None: it has no priorities
    piecewise: bool = True  # False: report a call only when it has ended
    filters: dict[str, Any] = field(default_factory=dict)  # further sampling parameters, by vLLM's names
    first_token: float | None = field(init=False, default=None)  # seconds since the engine got the first call
    cached: int = field(init=False, default=0)  # tokens of the prompt that were in the prefix cache
    joins: list[float] = field(init=False, default_factory=list)  # seconds from a fork's end to the next token
    cut: list[str] = field(init=False, default_factory=list)  # workers that were, as `Call.writer` has them
    _read: dict[tuple[int, ...], tuple[int, asyncio.Task]] = field(init=False, default_factory=dict)  # tokens, by fork

    @property
    def _key(self) -> str:
        return f"{self.name}-{self.sample}"

    async def run(self, hear: Hear) -> None:
        self.admission.begin(self._key, self.manner.branching)
        try:
            async with asyncio.TaskGroup() as calls:
                for call in self.director.start():
                    calls.create_task(self._call(call, hear, calls))
        finally:
            self.admission.leave(self._key)
            for _, reading in self._read.values():
                reading.cancel()

    async def _call(self, call: Call, hear: Hear, calls: asyncio.TaskGroup, turn: asyncio.Event | None = None) -> None:
        if turn is not None:
            await turn.wait()
        if call.inserted:
            hear(Piece(call.path, worker_open(call.path[-1]) if call.path[-1] else SPAWN_CLOSE, call.inserted))
        turns: list[Start] = []
        for following in await self._complete(call, hear):
            turn = asyncio.Event()
            turns.append((following.path, turn.set))
            calls.create_task(self._call(following, hear, calls, turn))
        self.admission.ended(self._key, turns)
        if not turns:
            self._prefill(call, [])

    def _prefill(self, call: Call, written: list[int]) -> None:
        """The first worker's text is cached as it was written; the others' are read at other positions."""
        if not self.manner.prefill_joins:
            return
        before, *texts = self.director.read_so_far(call, written) or [[]]
        fork, tokens = call.thread[:-1], sum(map(len, texts[1:]))
        done, reading = self._read.get(fork, (0, None))
        if tokens - done >= self.manner.prefill_joins:
            if reading is not None:
                reading.cancel()
            name = f"{self._key}-{'.'.join(map(str, fork))}-{tokens}"
            self._read[fork] = tokens, asyncio.create_task(self._compute(sum(texts, before), name))

    async def _compute(self, prompt: list[int], name: str) -> None:
        params = SamplingParams(max_tokens=1, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY)
        last = 0 if self.order is None else self.order + JOINS_FIRST  # in what time is left
        with suppress(Exception):  # the director reads it in any case
            async for _ in self.engine.generate(tokens_input(prompt), params, name, priority=last):
                pass

    async def _complete(self, call: Call, hear: Hear) -> list[Call]:
        """Run a call to its end; returns the calls that may run after it."""
        ids: list[int] = []
        logprobs: list[float] = []
        name = f"{self._key}-{'.'.join(map(str, call.path))}"
        seed = seed_of(self.seed, "problem", self.sample, *call.path)  # as in `dccot solve`
        sampling, config, manner = self.vocabulary.sampling, self.config, self.manner
        joins, worker, factor = call.number > 0, bool(call.thread), manner.straggler_factor
        if joins and (read := self._read.get((*call.thread, call.number - 1))):
            read[1].cancel()  # nobody needs it any more
        priority = 0 if self.order is None else place(self.order, manner.branching, worker=worker, joins=joins)
        most = min(call.max_tokens, manner.max_worker_tokens or call.max_tokens) if worker else call.max_tokens
        params = SamplingParams(
            **sampling.parameters(call, seed=seed, temperature=config.temperature, top_p=config.top_p)
            | {"max_tokens": most}
            | self.filters,
            output_kind=RequestOutputKind.DELTA if self.piecewise else RequestOutputKind.FINAL_ONLY,
            skip_clone=True,
        )
        outputs = self.engine.generate(tokens_input(call.prompt), params, name, priority=priority)
        told = 0  # characters
        async with aclosing(outputs):
            async for output in outputs:
                result = output.outputs[0]
                ids += result.token_ids
                logprobs += (scores[id].logprob for id, scores in zip(result.token_ids, result.logprobs or ()))
                if self.first_token is None and output.metrics is not None:
                    self.first_token = output.metrics.first_token_latency
                    self.cached = output.num_cached_tokens or 0
                if joins and output.metrics is not None:
                    self.joins.append(output.metrics.first_token_latency)
                    joins = False
                stop = sampling.stop_of(call, result.finish_reason, result.stop_reason) if output.finished else None
                text = result.text.removesuffix(self.vocabulary.decode(ids[-1:])) if stop is Stop.EOS else result.text
                if stop is Stop.LENGTH and len(ids) < call.max_tokens:
                    stop = self._cut(call)
                elif stop is None and worker and factor and self.director.overdue(call, len(ids), factor):
                    stop, text = self._cut(call), self.vocabulary.decode(ids)[told:]
                told += len(text)
                if stop is None:
                    if hear(Piece(call.path, text, list(result.token_ids))):
                        return self.director.finished(call, Completion(ids, logprobs, Stop.EOS))
                    if len(ids) // LOOK > (len(ids) - len(result.token_ids)) // LOOK:
                        self._prefill(call, ids)
                    continue
                following = self.director.finished(call, Completion(ids, logprobs, stop))
                paths = tuple(each.path for each in following)
                stopped = hear(Piece(call.path, text, list(result.token_ids), paths))
                if stopped and following:  # just before the tag that spawned: these workers never write
                    self.director.response.forks.pop()
                return [] if stopped else following
        raise RuntimeError(f"call {name} ended without a result")

    def _cut(self, call: Call) -> Stop:
        """A worker that is read as far as it got: as if it had ended itself."""
        self.cut.append(call.writer)
        return Stop.EOS
