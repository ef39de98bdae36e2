"""An endpoint plugin for tests: the real engine, but calls with certain request seeds fail, or wait forever."""

from __future__ import annotations

import asyncio

from vllm.exceptions import QueueOverflowError

from dccot.rollout.generate import seed_of

# as `seed` of a chat completion: its second worker fails; nothing of it ever comes; nothing of its first choice; the
# engine is full; from the second time on, its first call waits until the server is told to end
FAILING, STALLED, HALF_STALLED, OVERFLOWING, SLOW = 672, 667, 668, 669, 670


class Plugin:
    name = "dccot_faults"
    required_tasks = ("generate",)

    def attach_router(self, app) -> None:
        def routes() -> list:
            """Every path of the server, with its methods: of all plugins, mounted applications and pages."""
            return sorted((route.path, sorted(getattr(route, "methods", None) or ["GET"])) for route in app.routes)

        app.add_api_route("/routes", routes, methods=["GET"])

    async def init_state(self, engine_client, state, args) -> None:
        generate = engine_client.generate
        failing = seed_of(FAILING, "problem", 0, 0, 2)
        stalled = {seed_of(STALLED, "problem", sample, 0, 0) for sample in range(16)}
        stalled |= {seed_of(HALF_STALLED, "problem", 0, 0, 0)}
        slow, seen = seed_of(SLOW, "problem", 0, 0, 0), set()
        overflowing = seed_of(OVERFLOWING, "problem", 0, 0, 0)

        async def faulty(prompt, params, request_id, **more):
            if params.seed == failing:
                raise RuntimeError("a worker failed, as it was told to")
            if params.seed == overflowing:
                raise QueueOverflowError
            while params.seed == slow and slow in seen and not state.dccot.leaving:
                await asyncio.sleep(0.05)
            seen.add(params.seed)
            if params.seed in stalled:
                await asyncio.sleep(3600)
            async for output in generate(prompt, params, request_id, **more):
                yield output

        engine_client.generate = faulty
