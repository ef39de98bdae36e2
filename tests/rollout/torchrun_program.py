"""What every rank does in the test of engines under torchrun; rank r writes what it saw to <out>/rank<r>.json.

torchrun --nproc_per_node 2 tests/rollout/torchrun_program.py <checkpoint> <out>

FSDP shards the model over the ranks, each rank has an engine of its own in the same process, and the ranks roll out
different numbers of responses of different lengths: nothing may wait for the other. Then the two ranks are one
tensor-parallel engine.
"""

import itertools
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from vllm.distributed.parallel_state import destroy_model_parallel

from dccot.lab.synced import verify
from dccot.model.sharding import ShardingConfig, build_model
from dccot.model.weights import full_parameters, save_checkpoint
from dccot.rollout.director import Call, RolloutConfig
from dccot.rollout.engine import EngineConfig
from dccot.rollout.generate import Request, Watch, generate
from dccot.rollout.response import Finish
from dccot.rollout.vllm_engine import VllmEngine


class Steps(Watch):
    count = 0

    def stepped(self, engine: VllmEngine) -> None:
        self.count += 1


def rolled_out(engine: VllmEngine, samples: range, watch: Watch | None = None, **settings) -> dict[int, list[int]]:
    requests = [Request("p", sample, [5, 6, 7]) for sample in samples]
    found = generate(engine, requests, RolloutConfig(**settings), seed=(0,), watch=watch)
    return {request.sample: response.as_read for request, response in found}


def soak(engine: VllmEngine, parameters: Callable[[], Iterator[tuple[str, torch.Tensor]]]) -> list:
    """Four times: other weights, calls with and without a stop, a third of them aborted on the way; what came out.
    Whatever is computed here must be the same on every rank of a replica, and in an engine of one process.
    """
    found = []
    for turn in range(4):
        engine.load(
            (name, (1 + 0.1 * turn) * tensor if ".layers." in name else tensor) for name, tensor in parameters()
        )
        for number in range(9):
            stops = ("</worker_1>",) if number % 2 else ()
            call = Call((), number, [5, 6, 7 + number], [], stops, 8 + 5 * number, Finish.BUDGET)
            engine.add(f"{turn}/{number}", call, seed=100 * turn + number, temperature=0.6)
        done: dict[str, list[int]] = {}
        for step in itertools.count():
            if step == 6 + 3 * turn:
                engine.abort(sorted(engine.pending)[::3])
            if not engine.pending:
                break
            done |= {key: completion.ids for key, completion in engine.step()}
        found.append(done)
    return found


def main(folder: Path, out: Path) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = build_model(folder, ShardingConfig(compute_dtype="float32"))
    engine = VllmEngine(folder, EngineConfig(dtype="float32", kv_cache_gb=0.125))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".layers." in name:
                parameter.mul_(1.2)
    engine.load(full_parameters(model))
    verify(engine, full_parameters(model))
    save_checkpoint(model, out / "synced", source=folder)
    steps = Steps()
    sampled = rolled_out(engine, range(3, 11) if rank else range(3), steps, budget=90 if rank else 40)
    greedy = rolled_out(engine, range(rank, rank + 1), budget=60, temperature=0.0)
    result = {"replica": engine.replica, "replicas": engine.replicas, "steps": steps.count}
    result |= {"sampled": sampled, "greedy": greedy}
    engine.shutdown()
    destroy_model_parallel()  # a process has one layout of engines in its life; only this test has two

    engine = VllmEngine(folder, EngineConfig(dtype="float32", kv_cache_gb=0.125, tensor_parallel=2))
    engine.load(full_parameters(model))
    together = rolled_out(engine, range(4), budget=60)
    result["tensor_parallel"] = {"replica": engine.replica, "replicas": engine.replicas, "sampled": together}
    result["soak"] = soak(engine, lambda: full_parameters(model))
    engine.shutdown()
    (out / f"rank{rank}.json").write_text(json.dumps(result))
    dist.barrier()  # the trainer's own process group is still there
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
