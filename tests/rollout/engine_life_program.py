"""Engines one after another in one process: one that cannot start, one that is shut down, one after it. Prints what was
found as JSON.
"""

import gc
import json
import sys
import weakref
from pathlib import Path

from dccot.core import progress
from dccot.rollout.director import RolloutConfig
from dccot.rollout.engine import EngineConfig
from dccot.rollout.generate import Request, generate
from dccot.rollout.vllm_engine import VllmEngine

GREEDY = RolloutConfig(budget=40, temperature=0.0)


def greedy(engine: VllmEngine) -> list[int]:
    [(_, response)] = generate(engine, [Request("p", 0, [5, 6, 7])], GREEDY, seed=(0,))
    return response.as_read


def main(folder: Path, out: Path) -> None:
    progress.HEARTBEAT_SECONDS = 0.1
    found: dict = {}
    try:
        VllmEngine(folder, EngineConfig(dtype="float32", kv_cache_gb=1e-6), logs=out / "failed")
    except ValueError as error:
        found["error"] = str(error)
    print("--- and now one that starts", file=sys.stderr, flush=True)
    config = EngineConfig(dtype="float32", kv_cache_gb=0.125)
    engine = VllmEngine(folder, config, logs=out / "first")
    found["first"] = greedy(engine)
    runner = engine._engine.model_executor.driver_worker.worker.model_runner
    held = [
        weakref.ref(tensor) for tensor in [*engine.network.parameters(), *engine.network.buffers(), *runner.kv_caches]
    ]
    del runner
    gc.disable()  # what the shutdown does not free by itself stays
    engine.shutdown()
    found["held"], found["alive"] = len(held), sum(ref() is not None for ref in held)
    gc.enable()
    second = VllmEngine(folder, config)
    found["second"] = greedy(second)
    second.shutdown()
    (out / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
