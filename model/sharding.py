"""Builds a model sharded over the ranks: FSDP2 or HSDP, mixed precision, recomputation, torch.compile.

    model = build_model(folder, ShardingConfig())        # under torchrun, after init_process_group

The model is built on the meta device, sharded per block and at the root, and only then given memory and weights, so no
rank ever holds all of it. Master weights and gradients are `master_dtype`, gathered weights and activations
`compute_dtype`, reductions fp32.

Gradients are SUMMED over the ranks, not averaged: the loss divides by a token count over all ranks, so that ranks with
more tokens count more, and one process gives the same gradient as many.

With `replicate` = R of W ranks, each group of W/R shards one copy of the model and the R copies reduce their gradients
(HSDP): set R to the number of machines to keep the weight all-gather within each. A model so small that collectives
take longer than they save memory can stay `whole`: a copy on every rank, and one reduction of all gradients per step.
Groups of `context_parallel` ranks share their micro-batches; the weights are sharded the same, whatever the groups.
"""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from dccot.core.config import ConfigError, one_of
from dccot.core.runtime import inherit_timeout
from dccot.model.config import ModelConfig, read_config
from dccot.model.lora import add_adapters, init_adapters
from dccot.model.settings import BYTES, LoraConfig, ShardingConfig
from dccot.model.transformer import Block, Transformer
from dccot.model.weights import load_weights

log = logging.getLogger(__name__)

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in BYTES}


def build_model(
    folder: str | Path,
    sharding: ShardingConfig,
    *,
    device: torch.device | str | None = None,
    lora: LoraConfig | None = None,
) -> Transformer:
    """The checkpoint in `folder`, sharded over the process group if there is one.

    With `lora`, it is frozen and has new adapters, which follow from torch's seed.
    """
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    model = empty_model(read_config(folder), sharding, device, lora)
    if model.lora:
        init_adapters(model, torch.initial_seed())
    load_weights(model, folder)
    return model


def empty_model(
    config: ModelConfig, sharding: ShardingConfig, device: torch.device, lora: LoraConfig | None = None
) -> Transformer:
    """A model of this shape with uninitialised memory for its weights and, with `lora`, its adapters."""
    master, compute = _dtype("master_dtype", sharding.master_dtype), _dtype("compute_dtype", sharding.compute_dtype)
    model = meta_model(config, master, compute, lora)
    model.head_backend = sharding.lm_head
    compiled = sharding.compile and _can_compile(device)
    for block in model.model.layers:
        assert isinstance(block, Block)
        block.recompute, block.self_attn.backend = sharding.activation_checkpointing, sharding.attention
        if compiled:
            block.compile(dynamic=True)  # one kernel for every number of tokens, instead of one more for the first
    sharding.check_ranks(dist.get_world_size() if dist.is_initialized() else 1)
    if dist.is_initialized():
        _shard(model, _mesh(device, sharding.copies(dist.get_world_size())), sharding, compute)
    elif master != compute:
        raise ConfigError(
            f"compute_dtype {sharding.compute_dtype} over master_dtype {sharding.master_dtype} needs FSDP, which needs "
            "a process group: launch with torchrun (one process will do), or set both to the same"
        )
    model.to_empty(device=device)
    return model


def meta_model(
    config: ModelConfig, master: torch.dtype, compute: torch.dtype, lora: LoraConfig | None = None
) -> Transformer:
    """Shapes and dtypes alone: what is trained in `master`, what is frozen in `compute` precision."""
    with torch.device("meta"):
        model = Transformer(config)
    if lora is None or not lora.rank:
        return model.to(master)
    add_adapters(model.to(compute), lora, master)
    return model


def _can_compile(device: torch.device) -> bool:
    if device.type != "cpu" or shutil.which(os.environ.get("CXX", "g++")) or shutil.which("clang++"):
        return True
    log.warning("sharding.compile needs a C++ compiler on a CPU; neither g++ nor clang++ was found: running without it")
    return False


def _shard(model: Transformer, mesh: DeviceMesh, sharding: ShardingConfig, compute: torch.dtype) -> None:
    # Inputs are not cast: the blocks' are already in compute precision, except the rotation's angles, which stay fp32.
    reduce = torch.promote_types(compute, torch.float32)
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=reduce, cast_forward_inputs=False)
    modules: list[nn.Module] = [model] if sharding.whole else [*model.model.layers, model]
    again = sharding.reshard_after_forward and not sharding.whole
    for module in modules:
        fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=again)
        assert isinstance(module, FSDPModule)
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)


def _mesh(device: torch.device, replicate: int) -> DeviceMesh:
    ranks = dist.get_world_size()
    if replicate == 1:
        return init_device_mesh(device.type, (ranks,), mesh_dim_names=("shard",))
    mesh = init_device_mesh(device.type, (replicate, ranks // replicate), mesh_dim_names=("replicate", "shard"))
    inherit_timeout(mesh.get_all_groups())
    return mesh


def _dtype(key: str, name: str) -> torch.dtype:
    one_of(name, DTYPES, key)
    return DTYPES[name]
