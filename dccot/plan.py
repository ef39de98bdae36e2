"""`dccot plan MODEL --gpus 8`: memory and time of a run before it is launched.

    dccot plan runs/sft --gpus 8                       a checkpoint's own config.json
    dccot plan 7B --gpus 8 --gpu H100                  a model family's shape by size: 1.5B, 7B, 32B
    dccot plan 32B --gpus 64 --context-parallel 4 --tensor-parallel 4 configs/rl/stage4.yaml

Memory is arithmetic on shapes, per rank (P parameters, S ranks that share one copy of the model):

    always           (4 + 8) P/S master weights and AdamW;  2 P/S reference
    while training   4 P gradients waiting for the last micro-batch (4 P/S if not reduce_once);  gathered blocks;
                     activations of the largest micro-batch;  what one block or the LM head needs (memory.py)
                     of which each of C ranks that share a micro-batch (context parallel) has its part
    while sampling   2 P/T engine weights (T: tensor parallel);  the rest of engine.gpu_memory is KV cache

`dccot rehearse` checks this against the training step itself: steady memory is exact, the peak of a step within 10%.

Speeds are estimates: sampling is bound by reading weights and KV cache, training by matrix products at the assumed
utilisation. Exits with 1 if the run does not fit.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dccot.core.command import Parser, positive
from dccot.core.config import ConfigError, load_config, require
from dccot.core.run import Run
from dccot.core.runtime import gpus
from dccot.memory import TrainingMemory, largest_batch, outside_torch, parameters
from dccot.model.config import ModelConfig, parse_config, read_config
from dccot.model.folder import find_model
from dccot.model.settings import BYTES
from dccot.rollout.engine import EngineConfig
from dccot.train.config import RLConfig, SFTConfig

GB = 1e9
WRITTEN_TOKEN, COMPRESSED_TOKEN = 33.0, 13.0  # bytes of a sampled token in a file of rollouts


_DISTILLED = {  # the DeepSeek-R1-Distill-Qwen family
    "model_type": "qwen2",
    "tie_word_embeddings": False,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
}
_COUNTS = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size")
_SIZES = ("hidden_size", "intermediate_size", *_COUNTS)
SHAPES: dict[str, dict[str, Any]] = {
    "1.5B": _DISTILLED | dict(zip(_SIZES, (1536, 8960, 28, 12, 2, 151936))),
    "7B": _DISTILLED | dict(zip(_SIZES, (3584, 18944, 28, 28, 4, 152064))),
    "32B": _DISTILLED | dict(zip(_SIZES, (5120, 27648, 64, 40, 8, 152064))),
}


@dataclass(frozen=True)
class Gpu:
    """A vendor's figures."""

    arch: str
    memory: int  # GB
    bandwidth: int  # GB/s
    tflops: float  # bf16, dense
    multiprocessors: int


GPUS = {
    "A100": Gpu("sm_80", 80, 2039, 312, 108),
    "A6000": Gpu("sm_86", 48, 768, 155, 84),
    "H100": Gpu("sm_90", 80, 3350, 989, 132),
    "H200": Gpu("sm_90", 141, 4800, 989, 132),
    "B200": Gpu("sm_100", 180, 8000, 2250, 148),
    "MI300X": Gpu("gfx942", 192, 5300, 1307, 304),
}
ASSUMED_MFU = 0.4
ASSUMED_BANDWIDTH_SHARE = 0.6
LITTLE_CACHE = 100_000  # tokens


@dataclass(frozen=True)
class Plan:
    """Bytes per rank, and what fits in the rest."""

    parameters: int
    tokens: int  # of the largest micro-batch: the token budget, or a response that is larger than it
    outside: dict[str, float]  # of torch's allocator; assumed
    persistent: dict[str, int]  # present while training and while sampling
    moment: str  # the moment of a training step that needs most
    training: dict[str, float]  # at that moment
    sampling: dict[str, float]
    kv_cache_tokens: int
    rollout_tokens_per_second: float
    train_tokens_per_second: float

    @property
    def training_peak(self) -> float:
        return sum(self.outside.values()) + sum(self.persistent.values()) + sum(self.training.values())

    @property
    def sampling_peak(self) -> float:
        return sum(self.outside.values()) + sum(self.persistent.values()) + sum(self.sampling.values())


def make_plan(model: ModelConfig, config: RLConfig, gpus: int, gpu: Gpu) -> Plan:
    config.sharding.check_ranks(gpus)
    parallel = config.engine.tensor_parallel
    require(gpus % parallel == 0, f"engine.tensor_parallel is {parallel}; it must divide the {gpus:,} ranks")
    total, shards = parameters(model), gpus // config.sharding.copies(gpus)
    largest = largest_batch(config, model.max_position)
    reference = bool(config.objective.kl_coefficient)
    lora = config.model.lora
    memory = TrainingMemory(model, config.sharding, shards, largest.tokens, largest.rows, reference, lora)
    persistent, (moment, training) = memory.persistent, memory.peak
    kv_bytes = 1 if config.engine.kv_cache_dtype == "fp8" else 2
    kv_per_token = 2 * model.layers * model.kv_heads * model.head_dim * kv_bytes / parallel
    weights = 2 * total / parallel
    working = engine_at_work(model, config.engine)
    # vLLM takes its share whatever the trainer holds
    room = config.engine.gpu_memory * gpu.memory * GB - weights - working
    kv_tokens = max(0, int(room / kv_per_token))
    sampling = {"engine weights": weights, "engine workspace": working, "KV cache": max(0.0, room)}
    typical = config.prompt.max_prompt_tokens / 4 + config.rollout.budget / 2
    sequences = max(1, min(config.engine.max_sequences, int(kv_tokens / typical)))
    step = (weights + sequences * typical * kv_per_token) / (gpu.bandwidth * GB * ASSUMED_BANDWIDTH_SHARE)
    passes = 3 - bool(lora.rank) + config.sharding.activation_checkpointing  # frozen weights need no gradient
    flops_per_token = 2 * passes * total
    sampled, trained = sequences / step * (gpus / parallel), gpus * gpu.tflops * 1e12 * ASSUMED_MFU / flops_per_token
    outside = outside_torch(config, gpus)
    return Plan(total, largest.tokens, outside, persistent, moment, training, sampling, kv_tokens, sampled, trained)


def fed(config: RLConfig | SFTConfig) -> tuple[int, str]:
    """How many ranks an update can give a response of their own, and what says so."""
    if isinstance(config, SFTConfig):
        return config.batch.examples, "batch.examples"
    batch = config.batch
    responses = batch.prompts * batch.group_size // batch.optimizer_steps
    return responses, "batch.prompts × batch.group_size / batch.optimizer_steps"


def idle(config: RLConfig | SFTConfig, ranks: int) -> str | None:
    """That ranks train nothing, if so: fewer responses than groups of ranks with micro-batches of their own."""
    context, (responses, why) = config.sharding.context_parallel, fed(config)
    without = ranks - responses * context
    if without <= 0:
        return None
    return f"{without:,} of {ranks:,} ranks would train nothing: an update has {responses:,} responses ({why})"


def remedy_for_idle(model: ModelConfig, config: RLConfig | SFTConfig, ranks: int, gpu: Gpu) -> str:
    layout = propose(model, config, ranks, gpu)
    return f"set {layout}, or raise the batch" if layout else "use fewer ranks, or raise the batch"


def propose(model: ModelConfig, config: RLConfig | SFTConfig, ranks: int, gpu: Gpu) -> str | None:
    """Settings that give every rank work and fit: as little context and tensor parallelism as possible, as many copies
    of the model as leave at least 8 ranks to each. None if there are none.
    """
    powers = [2**n for n in range(ranks.bit_length()) if ranks % 2**n == 0]
    for context in (each for each in powers if ranks <= fed(config)[0] * each):
        sharding = replace(config.sharding, context_parallel=context)
        if isinstance(config, SFTConfig):
            return f"sharding.context_parallel={context}"
        for tensor in (each for each in powers[:4] if model.kv_heads % each == 0):
            for copies in reversed([each for each in powers if ranks // each >= min(ranks, 8)]):
                copied = replace(sharding, replicate=1 if sharding.whole else copies)
                tried = replace(config, sharding=copied, engine=replace(config.engine, tensor_parallel=tensor))
                if fits(make_plan(model, tried, ranks, gpu), gpu):
                    layout = f"sharding.replicate={copied.replicate} sharding.context_parallel={context}"
                    return f"{layout} engine.tensor_parallel={tensor}"
    return None


def fits(plan: Plan, gpu: Gpu) -> bool:
    return max(plan.training_peak, plan.sampling_peak) <= gpu.memory * GB and plan.kv_cache_tokens >= LITTLE_CACHE


def engine_at_work(model: ModelConfig, engine: EngineConfig) -> float:
    """Bytes of the engine's largest forward pass: in an MLP, or its fp32 logits and their sampling."""
    hidden, inside = 2 * model.hidden_size, 3 * model.intermediate_size / engine.tensor_parallel
    return max(2 * engine.batched_tokens * (hidden + inside), 3 * 4 * engine.max_sequences * model.vocab_size)


def training_peak(model: ModelConfig, config: RLConfig, ranks: int) -> float:
    """Bytes per rank while training, independent of the GPU, if there is one."""
    plan = make_plan(model, config, ranks, GPUS["H100"])
    return plan.training_peak - (0 if gpus() else sum(plan.outside.values()))


def checkpoint_bytes(total: int, config: Any) -> float:
    """Disk space of a run's checkpoints at the end: fp32 weights and moments of the kept ones, hf/ folders in the
    precision of inference, and the last one's in fp32.
    """
    keep, every, width = config.checkpoint.keep, config.checkpoint.keep_hf_every, config.sharding.compute_dtype
    folders = (config.steps - 1) // every if every else keep - 1
    return total * (12.0 * keep + BYTES[width] * folders + 4)


def rollout_bytes(responses: int, budget: int, compressed: bool) -> float:
    """Disk space of responses with ids, log-probs and text, half as long as they may be."""
    return responses * budget / 2 * (COMPRESSED_TOKEN if compressed else WRITTEN_TOKEN)


def run_bytes(total: int, config: RLConfig | SFTConfig) -> float:
    """Disk space of a training run at the end: its checkpoints and, of RL, the newest steps' rollouts."""
    found = checkpoint_bytes(total, config)
    if isinstance(config, RLConfig):
        trained = min(config.keep_rollouts, config.steps) * config.batch.prompts * config.batch.group_size
        found += rollout_bytes(trained, config.rollout.total_tokens or config.rollout.budget, compressed=True)
    return found


def advice(plan: Plan, gpu: Gpu, token_budget: int) -> list[str]:
    always = sum(plan.outside.values()) + sum(plan.persistent.values())
    room, found = gpu.memory * GB, list[str]()
    tree = f"a tree of {plan.tokens:,} tokens, more than batch.token_budget {token_budget:,}"
    whole, sharded = plan.training["gradients"] >= 4 * plan.parameters, plan.persistent["master weights"]
    if plan.training_peak > room:
        remedy = "lower batch.token_budget or use more GPUs"
        if whole and sharded < 4 * plan.parameters:
            remedy = "set sharding.reduce_once=false (one reduction per micro-batch, no gradients waiting)"
        elif plan.tokens > token_budget:
            remedy = f"a single response can be {tree}: raise sharding.context_parallel, or lower rollout.budget"
        found.append(f"training does not fit: {remedy}")
    if always < room < plan.sampling_peak:
        share = int(100 * (1 - always / room)) / 100
        found.append(f"sampling does not fit next to the trainer's weights: set engine.gpu_memory={share:g} or less")
    if plan.kv_cache_tokens < LITTLE_CACHE:
        remedy = "raise engine.tensor_parallel, engine.gpu_memory or the number of GPUs"
        found.append(f"little room for the KV cache: {remedy}")
    found = found or ["fits"]
    if plan.training_peak <= room and plan.tokens > token_budget:
        found.append(f"one response can be {tree}: it is planned for")
    return found


def read_shape(name: str) -> ModelConfig:
    if known := {size.upper(): shape for size, shape in SHAPES.items()}.get(name.upper()):
        return parse_config(known, name)
    if not (Path(name) / "config.json").is_file() and not Run(name).latest.is_file():
        hint = f"; a recipe comes first: `dccot plan {name} …`" if name.endswith(".yaml") else ""
        raise ConfigError(f"{name!r} is neither one of {', '.join(SHAPES)} nor a folder with a config.json{hint}")
    return read_config(find_model(name))


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser("Memory per rank and expected speed of an RL run.", "dccot plan 7B --gpus 8 --gpu H100")
    default = "configs/rl/stage4.yaml"
    parser.add_argument("model", help=f"a checkpoint, a run, or one of {', '.join(SHAPES)}")
    parser.add_argument("config", nargs="?", default=default, help=f"RL configuration (default: {default})")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--gpus", type=positive, default=8)
    parser.add_argument("--gpu", choices=GPUS, default="H100")
    parser.add_argument("--tensor-parallel", type=int, help="GPUs of one engine (default: as configured)")
    copies = "copies of the model (HSDP), usually one per machine (default: as configured)"
    parser.add_argument("--replicate", type=int, help=copies)
    parser.add_argument("--context-parallel", type=int, help="GPUs that share a micro-batch (default: as configured)")
    parser.add_argument("--json", action="store_true")
    arguments = parser.read(argv)
    given = {"engine.tensor_parallel": arguments.tensor_parallel, "sharding.replicate": arguments.replicate}
    given["sharding.context_parallel"] = arguments.context_parallel
    settings = [f"{key}={value}" for key, value in given.items() if value is not None] + arguments.overrides
    gpu = GPUS[arguments.gpu]
    if arguments.config and "=" in arguments.config:  # the first of the settings
        settings, arguments.config = [arguments.config, *settings], default
    try:
        config = load_config(RLConfig, arguments.config, ["model.path=unused", "data.train=unused", *settings])
        model = read_shape(arguments.model)
        plan = make_plan(model, config, arguments.gpus, gpu)
        hints = advice(plan, gpu, config.batch.token_budget)
        if found := idle(config, arguments.gpus):
            hints.append(f"{found}: {remedy_for_idle(model, config, arguments.gpus, gpu)}")
        elif not fits(plan, gpu) and (layout := propose(model, config, arguments.gpus, gpu)):
            hints.append(f"this would fit: {layout}")
    except (ConfigError, ValueError, OSError) as error:
        print(f"dccot: {error}", file=sys.stderr)
        return 2
    if arguments.json:
        peaks = {"training_peak": plan.training_peak, "sampling_peak": plan.sampling_peak}
        print(json.dumps(plan.__dict__ | peaks, indent=1))
    else:
        print(f"{plan.parameters / 1e9:.2f}B parameters on {arguments.gpus} × {arguments.gpu} ", end="")
        show(plan, gpu, config.batch.token_budget)
        print("→ " + "\n→ ".join(hints))
    return 0 if fits(plan, gpu) else 1


def show(plan: Plan, gpu: Gpu, token_budget: int) -> None:
    print(f"({gpu.memory} GB), per rank in GB:")
    groups: list[Mapping[str, float]] = [plan.outside, plan.persistent, plan.training, plan.sampling]
    for title, parts in zip(("assumed", "always", "while training", "while sampling"), groups):
        print(f"  {title}: " + ", ".join(f"{name} {size / GB:.1f}" for name, size in parts.items() if size))
    print(f"  the training peak is {plan.moment}, with {plan.tokens:,} tokens in the largest micro-batch")
    print(f"  peak: training {plan.training_peak / GB:.1f}, sampling {plan.sampling_peak / GB:.1f}")
    print(f"  KV cache: {plan.kv_cache_tokens:,} tokens per engine; token budget {token_budget:,} per micro-batch")
    sampled, trained = plan.rollout_tokens_per_second, plan.train_tokens_per_second
    print(f"expected, not measured: {sampled:,.0f} sampled and {trained:,.0f} trained tokens/s")


if __name__ == "__main__":
    sys.exit(main())
