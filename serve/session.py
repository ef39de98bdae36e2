"""One response on the server's asynchronous engine: every call of director and workers is a task, and all of them end
together.

    Session(engine, director, …).run(hear)      hear(piece) is called as text arrives; returning True ends the response

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
from dccot.rollout.engine import Sampling
from dccot.rollout.generate import seed_of
from dccot.rollout.tags import SPAWN_CLOSE, TagIds, Width, worker_open
from dccot.serve.stream import Piece

Hear = Callable[[Piece], bool]


class Vocabulary:
    """The tokenizer, its ids for the tags, and the rule for sampling with them."""

    def __init__(self, tokenizer: Any, workers: Width):
        self.tokenizer, self.sampling = tokenizer, Sampling(tokenizer)
        self.tags = TagIds.of(tokenizer, workers)
        self.eos = self.decode([self.tags.eos])

    def decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=False)


@dataclass
class Session:
    engine: EngineClient
    director: Director
    config: RolloutConfig
    vocabulary: Vocabulary
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
            hear(Piece(call.path, worker_open(call.path[-1]) if call.path[-1] else SPAWN_CLOSE, call.inserted))
        for following in await self._complete(call, hear):
            calls.create_task(self._call(following, hear, calls))

    async def _complete(self, call: Call, hear: Hear) -> list[Call]:
        """Run a call to its end; returns the calls that may run after it."""
        ids: list[int] = []
        name = f"{self.name}-{self.sample}-{'.'.join(map(str, call.path))}"
        seed = seed_of(self.seed, "problem", self.sample, *call.path)  # as in `dccot solve`
        sampling, config = self.vocabulary.sampling, self.config
        params = SamplingParams(
            **sampling.parameters(call, seed=seed, temperature=config.temperature, top_p=config.top_p),
            output_kind=RequestOutputKind.DELTA if self.piecewise else RequestOutputKind.FINAL_ONLY,
            skip_clone=True,
        )
        outputs = self.engine.generate(tokens_input(call.prompt), params, name, priority=self.priority)
        async with aclosing(outputs):
            async for output in outputs:
                result = output.outputs[0]
                ids += result.token_ids
                if self.first_token is None and output.metrics is not None:
                    self.first_token = output.metrics.first_token_latency
                stop = sampling.stop_of(call, result.finish_reason, result.stop_reason) if output.finished else None
                text = result.text.removesuffix(self.vocabulary.decode(ids[-1:])) if stop is Stop.EOS else result.text
                if stop is None:
                    if hear(Piece(call.path, text, list(result.token_ids))):
                        return self.director.finished(call, Completion(ids, [], Stop.EOS))
                    continue
                following = self.director.finished(call, Completion(ids, [], stop))
                paths = tuple(each.path for each in following)
                return [] if hear(Piece(call.path, text, list(result.token_ids), paths)) else following
        raise RuntimeError(f"call {name} ended without a result")
