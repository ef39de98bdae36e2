"""What a training step really holds: bytes of one rank of two, by kind, and the allocator's peak. Printed as JSON.

python tests/train/memory_program.py FOLDER TOKENS CASES      (CASES: JSON, name → keys of ShardingConfig)

The other rank is torch's fake process group: FSDP allocates and frees as ever, and collectives end at once. Under gloo
the peak depends on when its threads let go of a buffer (50 to 92 MB for the same step on a busy machine); on a GPU the
stream decides, always alike.
"""

import json
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile
from torch.testing._internal.distributed.fake_pg import FakeStore

from dccot.core.runtime import Runtime
from dccot.model.config import read_config
from dccot.model.sharding import ShardingConfig, empty_model
from dccot.rollout.response import Segment
from dccot.train.forest import build_forest
from dccot.train.update import OptimizerConfig, accumulate, apply_gradients, compute_logprobs, make_optimizer
from tests.support.rounds import flat


def local_bytes(tensors) -> int:
    return sum((t.to_local() if isinstance(t, DTensor) else t).nbytes for t in tensors if t is not None)


def waiting_bytes(model: nn.Module) -> int:
    """Whole gradients that FSDP holds back for the last micro-batch."""
    groups = [
        module._get_fsdp_state()._fsdp_param_group for module in model.modules() if isinstance(module, FSDPModule)
    ]
    params = [param for group in groups for param in group.fsdp_params]
    return local_bytes(x for param in params for x in (param.unsharded_accumulated_grad, param._unsharded_param.grad))


def allocator_peak(prof) -> int:
    """Most bytes that were allocated at once since the profile began, over what there was before."""
    at = peak = 0
    for event in sorted(
        (e for e in prof.profiler.kineto_results.events() if e.name() == "[memory]"), key=lambda e: e.start_ns()
    ):
        at += event.nbytes()
        peak = max(peak, at)
    return peak


def measure(folder: str, tokens: int, runtime: Runtime, **sharding) -> dict[str, int]:
    config = ShardingConfig(**sharding)
    shape, cpu = read_config(folder), torch.device("cpu")
    model = empty_model(shape, config, cpu)
    model.init_weights(0)
    frozen = empty_model(
        shape, ShardingConfig(compute_dtype=config.compute_dtype, master_dtype=config.compute_dtype), cpu
    )
    optimizer = make_optimizer(model, OptimizerConfig())
    prompt = tokens // 8
    forests = [
        build_forest([[(0, flat(list(range(prompt)), final=Segment([], [1] * (tokens - prompt))))]]) for _ in range(2)
    ]
    loss = lambda number, forest, logprob, entropy: -logprob
    step = lambda: accumulate(model, forests, loss, 1.0, runtime, config.reduce_once)
    step()
    apply_gradients(model, optimizer, 0.0, 1e-6, 1.0)  # the moments are there from now on
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        step()
        gradients = local_bytes(p.grad for p in model.parameters())
        apply_gradients(model, optimizer, 0.0, 1e-6, 1.0)
    model.set_requires_gradient_sync(not config.reduce_once)  # once more, stopped before the last micro-batch
    (-compute_logprobs(model, forests[0], 1.0)[0].sum()).backward()
    return {
        "master weights": local_bytes(model.parameters()),
        "AdamW moments": local_bytes(
            value for state in optimizer.state.values() for name, value in state.items() if name != "step"
        ),
        "reference policy": local_bytes(frozen.parameters()),
        "gradients, sharded": gradients,
        "gradients, waiting": waiting_bytes(model),
        "step": allocator_peak(prof),
    }


if __name__ == "__main__":
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    runtime = Runtime(0, 2, torch.device("cpu"), owned=False)
    print(
        json.dumps(
            {
                name: measure(sys.argv[1], int(sys.argv[2]), runtime, **kind)
                for name, kind in json.loads(sys.argv[3]).items()
            }
        )
    )
