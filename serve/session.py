"""One response on the server's asynchronous engine: every call of director and workers is a task, all of them end
together.

    Thinking(engine, director, …).run(hear)          hear(piece) is called as text arrives; returning True ends the response there

The calls of all requests share the engine's batches. Cancelling the run, or an error in any call, cancels the other
calls of this response immediately, and vLLM aborts their requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from vllm import SamplingParams
from vllm.engine.protocol import EngineClient
from vllm.inputs import tokens_input
from vllm.sampling_params import RequestOutputKind

from dccot.rollout.director import Call, Completion, Director, RolloutConfig, Stop
from dccot.rollout.generate import seed_of
from dccot.rollout.tags import SPAWN_CLOSE, SPAWN_OPEN, TagIds, worker_close, worker_open
from dccot.serve.stream import Piece

Hear = Callable[[Piece], bool]


class Words:
    """The tokenizer and its ids for the protocol's tags."""

    def __init__(self, tokenizer: Any, workers: int):
        self.tokenizer = tokenizer
        self.tags = TagIds.of(tokenizer, workers)
        self.eos: str = tokenizer.decode([self.tags.eos], skip_special_tokens=False)
        stops = [SPAWN_OPEN, *map(worker_close, range(1, workers + 1))]
        self._encoded = {tag: tokenizer.encode(tag, add_special_tokens=False) for tag in stops}

    def single_token(self, tag: str | None) -> int | None:
        """The token that is this tag; None if the tokenizer spells it with several."""
        ids = self._encoded[tag] if tag else []
        return ids[0] if len(ids) == 1 else None

    def decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=False)


@dataclass
class Thinking:
    engine: EngineClient
    director: Director
    config: RolloutConfig
    words: Words
    name: str  # of the request, for the engine's log
    seed: int
    sample: int
    priority: int = 0
    piecewise: bool = True  # False: report a call only when it has ended
    first_token: float | None = field(init=False, default=None)  # seconds since the engine got the first call

    async def run(self, hear: Hear) -> None:
        async with asyncio.TaskGroup() as calls:
            for call in self.director.start():
                calls.create_task(self._call(call, hear, calls))

    async def _call(self, call: Call, hear: Hear, calls: asyncio.TaskGroup) -> None:
        if call.inserted:
            hear(Piece(call.path, worker_open(call.path[1]) if call.path[1] else SPAWN_CLOSE, call.inserted))
        completion = await self._complete(call, hear)
        for following in self.director.finished(call, completion):
            calls.create_task(self._call(following, hear, calls))

    async def _complete(self, call: Call, hear: Hear) -> Completion:
        ids: list[int] = []
        name = f"{self.name}-{self.sample}-{call.path[0]}.{call.path[1]}"
        outputs = self.engine.generate(tokens_input(call.prompt), self._params(call), name, priority=self.priority)
        async with aclosing(outputs):
            async for output in outputs:
                result = output.outputs[0]
                ids += result.token_ids
                if self.first_token is None and output.metrics is not None:
                    self.first_token = output.metrics.first_token_latency
                stop = self._stop(call, result) if output.finished else None
                text = result.text.removesuffix(self.words.decode(ids[-1:])) if stop is Stop.EOS else result.text
                if hear(Piece(call.path, text, list(result.token_ids), ended=stop is not None)):
                    return Completion(ids, [], Stop.EOS)
                if stop is not None:
                    return Completion(ids, [], stop)
        raise RuntimeError(f"call {name} ended without a result")

    def _params(self, call: Call) -> SamplingParams:
        token = self.words.single_token(call.stop)
        return SamplingParams(
            temperature=self.config.temperature,
            top_p=self.config.top_p,
            seed=seed_of(self.seed, "problem", self.sample, *call.path),  # as in `dccot solve`
            max_tokens=call.max_tokens,
            stop=[call.stop] if call.stop and token is None else None,
            stop_token_ids=[token] if token is not None else None,
            include_stop_str_in_output=True,
            skip_special_tokens=False,  # pieces of the tags may be special tokens
            output_kind=RequestOutputKind.DELTA if self.piecewise else RequestOutputKind.FINAL_ONLY,
            skip_clone=True,
        )

    def _stop(self, call: Call, result: Any) -> Stop:
        if result.finish_reason == "length":
            return Stop.LENGTH
        if result.finish_reason != "stop":
            raise RuntimeError(
                f"the engine ended call {call.path} with {result.finish_reason!r}; expected 'stop' or 'length'"
            )
        reason = result.stop_reason  # None: the tokenizer's EOS; a model may have other end tokens
        return (
            Stop.TAG if reason is not None and reason in (call.stop, self.words.single_token(call.stop)) else Stop.EOS
        )
