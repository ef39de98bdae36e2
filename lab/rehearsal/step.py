"""One training step on a fake GPU, in its own process: what `dccot rehearse` starts for every configuration.

    python -m dccot.lab.rehearsal.step <<< '{"config": "configs/rl/stage1.yaml", "overrides": [], "shape": {…},
                                             "ranks": 8, "gpu": "H100"}'

Reads one JSON object, prints one. The step is the project's own, of RL or SFT: forests of the largest micro-batch that
the configuration allows, two of them per mini-batch, so that one waits for the other; then weights are gathered as the
engine gets them, and a checkpoint is planned. There is one rank, the first of a process group that pretends to have
them all.
"""

# ruff: noqa: E402 (the fake device comes before torch)
from __future__ import annotations

from dccot.lab.rehearsal import fake_cuda

fake_cuda.load()  # before anything that imports torch

import json
import sys
import time
import traceback
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from dccot.core.run import Run
from dccot.core.runtime import Runtime
from dccot.lab.rehearsal.fake_gpu import FakeGpu
from dccot.lab.rehearsal.inputs import load_training, response_of
from dccot.memory import largest_batch
from dccot.model.config import ModelConfig, parse_config
from dccot.model.context import ContextGroup
from dccot.model.lora import LoraConfig
from dccot.model.sharding import DTYPES, ShardingConfig, empty_model
from dccot.model.transformer import Transformer
from dccot.model.weights import full_parameters
from dccot.plan import GPUS
from dccot.rollout.response import Response
from dccot.train.batch import Batch
from dccot.train.checkpoint import TRAINED
from dccot.train.config import RLConfig, SFTConfig
from dccot.train.metrics import TokenMetrics
from dccot.train.phases import Phases
from dccot.train.rewards import Graded, Group
from dccot.train.rl import RL
from dccot.train.sft import SFT, Example
from dccot.train.update import make_optimizer

MICRO_BATCHES = 2  # per mini-batch
T = TypeVar("T", RL, SFT)


class FirstRank(Runtime):
    """The first of many ranks that do not exist: they are assumed to report what this one reports."""

    def gather(self, mine: list[Any]) -> list[list[Any]]:
        return [mine]

    def broadcast(self, value: Any) -> Any:
        return value

    def barrier(self) -> None:
        pass


class FakePhases(Phases):
    def __init__(self, runtime: Runtime, gpu: FakeGpu):
        super().__init__(runtime)
        self.gpu = gpu

    @contextmanager
    def __call__(self, name: str):
        with super().__call__(name), self.gpu.phase(name):
            yield


def build(
    gpu: FakeGpu,
    kind: str,
    shape: ModelConfig,
    sharding: ShardingConfig,
    device: torch.device,
    lora: LoraConfig | None = None,
) -> Transformer:
    with gpu.phase("build"), gpu.kind(kind):
        return empty_model(shape, sharding, device, lora)


def trainer(kind: type[T], config: Any, gpu: FakeGpu, shape: ModelConfig, runtime: Runtime) -> T:
    """An RL or SFT trainer without the parts that do not involve a GPU: run folder, tokenizer, engine, grader."""
    made = object.__new__(kind)
    made.config, made.runtime, made.phases = config, runtime, FakePhases(runtime, gpu)
    made.run, made.updates, made.skipped, made.bad_in_a_row = Run("rehearsed"), 0, 0, 0
    made.model = build(gpu, "master weights", shape, config.sharding, runtime.device, config.model.lora)
    made.group = ContextGroup.join(config.sharding.context_parallel, runtime.device)
    made.optimizer = make_optimizer(made.model, config.optimizer)
    return made


def rl_step(config: RLConfig, gpu: FakeGpu, shape: ModelConfig, runtime: Runtime) -> RL:
    """One step of RL with two or more updates: from the second on, moments exist."""
    updates = max(2, config.batch.optimizer_steps)
    config = replace(config, batch=replace(config.batch, optimizer_steps=updates))
    rl = trainer(RL, config, gpu, shape, runtime)
    rl.reference = rl.model if config.objective.kl_coefficient and rl.model.lora else None
    if config.objective.kl_coefficient and rl.reference is None:
        frozen = replace(config.sharding, master_dtype=config.sharding.compute_dtype, activation_checkpointing=False)
        rl.reference = build(gpu, "reference policy", shape, frozen, runtime.device).requires_grad_(False).eval()
    responses = micro_batches(config, shape, updates * rl.groups)
    groups: list[Group] = [[Graded("", n, "", "", "", each, advantage=1.0)] for n, each in enumerate(responses)]
    mini_batches, tokens = rl.pack(Batch(len(groups), groups)), TokenMetrics(rl.objective, runtime)
    rl.old_logprobs(mini_batches)
    rl.reference_logprobs(mini_batches)
    for mini_batch in mini_batches:
        rl.update(mini_batch, tokens)
    tokens.reduce()
    return rl


def sft_step(config: SFTConfig, gpu: FakeGpu, shape: ModelConfig, runtime: Runtime) -> SFT:
    """Two steps of SFT: in the second, moments exist."""
    sft = trainer(SFT, config, gpu, shape, runtime)
    for _ in range(2):
        sft.train_on([Example("", response) for response in micro_batches(config, shape, sft.groups)])
    return sft


def micro_batches(config: RLConfig | SFTConfig, shape: ModelConfig, number: int) -> list[Response]:
    """Responses that fill MICRO_BATCHES of the largest micro-batches this many times."""
    largest = largest_batch(config, shape.max_position)
    return [response_of(largest, n) for n in range(largest.copies * MICRO_BATCHES * number)]


def gather(model: Transformer, dtype: torch.dtype) -> None:
    """The engine must get whole tensors, on its own device."""
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    for name, tensor in full_parameters(model, dtype):
        if isinstance(tensor, DTensor) or tensor.shape != shapes[name] or tensor.device.type != "cuda":
            have = f"{type(tensor).__name__} {tuple(tensor.shape)} on {tensor.device}"
            needs = f"a whole tensor {tuple(shapes[name])} on the GPU"
            raise ValueError(f"{name} reaches the engine as {have}; it must be {needs}: gather it")


def plan_checkpoint(model: Transformer, optimizer: torch.optim.Optimizer) -> None:
    model_state, optimizer_state = get_state_dict(model, optimizer, options=TRAINED)
    planner = DefaultSavePlanner()
    planner.set_up_planner({"model": model_state, "optimizer": optimizer_state}, is_coordinator=True)
    planner.create_global_plan([planner.create_local_plan()])


def rehearse(spec: dict) -> dict:
    began = time.perf_counter()
    gpu, shape = FakeGpu(), parse_config(spec["shape"], "the model")
    fake_cuda.stand_in(spec["gpu"], GPUS[spec["gpu"]], gpu)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=spec["ranks"])
    runtime = FirstRank(0, spec["ranks"], torch.device("cuda", 0))
    config = load_training(spec["config"], spec["overrides"])
    with gpu:
        on = (gpu, shape, runtime)
        step: RL | SFT = rl_step(config, *on) if isinstance(config, RLConfig) else sft_step(config, *on)
        gpu.relabel((value for state in step.optimizer.state.values() for value in state.values()), "AdamW moments")
        steady = {kind: size for kind, size in gpu.by_kind.items() if size}
        with gpu.phase("sync"), gpu.kind("gathered weights"):
            gather(step.model, DTYPES[config.sharding.compute_dtype])
        with gpu.phase("checkpoint"), gpu.kind("checkpoint"):
            plan_checkpoint(step.model, step.optimizer)
    largest = largest_batch(config, shape.max_position)
    return {
        "tokens": largest.tokens,
        "rows": largest.rows,
        "steady": steady,
        "peaks": {phase: {"total": total, "kinds": kinds} for phase, (total, kinds) in gpu.peaks.items()},
        "syncs": {phase: dict(places) for phase, places in gpu.syncs.items()},
        "micro_batches": gpu.entered,
        "seconds": time.perf_counter() - began,
    }


def main() -> int:
    spec = json.load(sys.stdin)
    try:
        found = rehearse(spec)
    except Exception as error:
        traceback.print_exc()
        found = {"error": f"{type(error).__name__}: {error}"}
    print(json.dumps(found))
    return "error" in found


if __name__ == "__main__":
    sys.exit(main())
