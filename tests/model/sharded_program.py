"""What every rank does in the tests of sharding; rank 0 writes what came out to `out`.

torchrun --nproc_per_node 2 tests/model/sharded_program.py <checkpoint> <out>
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dccot.kernels.tree_attention import TreeMask
from dccot.model.sharding import ShardingConfig, build_model
from dccot.model.weights import full_parameters, save_checkpoint

CASES = {
    "fsdp": ShardingConfig(compute_dtype="float32"),
    "hsdp": ShardingConfig(compute_dtype="float32", replicate=2),
    "whole": ShardingConfig(compute_dtype="float32", whole=True),
    "compiled": ShardingConfig(compute_dtype="float32", compile=True),
    "bf16, kept gathered": ShardingConfig(
        compute_dtype="bfloat16", reshard_after_forward=False, activation_checkpointing=False
    ),
}


class LargestTensor(TorchDispatchMode):
    """The largest tensor for which an operation took memory. Views take none, nor do tensors in a mapped file."""

    elements = 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        result = op(*args, **(kwargs or {}))
        if not any(returned.alias_info for returned in op._schema.returns):
            tensors = [x for x in tree_leaves(result) if isinstance(x, torch.Tensor)]
            held = [x.to_local() if isinstance(x, DTensor) else x for x in tensors]
            self.elements = max([self.elements, *(x.numel() for x in held if x.device.type != "meta")])
        return result


class Gathered(TorchDispatchMode):
    """The precisions in which shards are gathered."""

    def __init__(self):
        super().__init__()
        self.dtypes = set()

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if "all_gather" in str(op):
            self.dtypes.add(str(args[0].dtype))
        return op(*args, **(kwargs or {}))


def evaluate(model) -> dict[str, torch.Tensor]:
    """Logits, the gradient of the mean log-prob over all ranks' rows, and the parameters after one more forward."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    tokens, mask = torch.arange(2, 122), TreeMask.causal([70, 50])
    rows = torch.arange(0, 69)
    mine = rows[rank::ranks]
    logprob, _ = model(tokens, mask.position, mask, mine, tokens[mine + 1], 0.6)
    (logprob.sum() / len(rows)).backward()
    gradients = {f"gradient/{name}": p.grad.full_tensor() for name, p in model.named_parameters()}
    with torch.no_grad():
        logits = model(tokens, mask.position, mask)
    parameters = {f"parameter/{name}": tensor.clone() for name, tensor in full_parameters(model)}
    return {"logits": logits} | gradients | parameters


def main(folder: Path, out: Path) -> None:
    dist.init_process_group("gloo")
    facts = {}
    for name, sharding in CASES.items():
        if name == ("hsdp" if dist.get_world_size() == 1 else "compiled"):  # two copies need two ranks
            continue
        with LargestTensor() as largest:
            model = build_model(folder, sharding)
        facts[name] = {"largest": largest.elements, "held": sum(p.to_local().numel() for p in model.parameters())}
        results = evaluate(model)
        if dist.get_rank() == 0:
            save_file(results, out / f"{name}.safetensors")
    with Gathered() as gathered:
        half = {name: tensor.clone() for name, tensor in full_parameters(model, torch.bfloat16)}
    facts["gathered for an engine in bfloat16"] = sorted(gathered.dtypes)
    save_checkpoint(model, out / "saved", source=folder, max_shard_bytes=300_000)
    model.init_weights(seed=4)
    random = {name: tensor.clone() for name, tensor in full_parameters(model)}
    if dist.get_rank() == 0:
        save_file(random, out / "random.safetensors")
        save_file(half, out / "half.safetensors")
        (out / "facts.json").write_text(json.dumps(facts))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
