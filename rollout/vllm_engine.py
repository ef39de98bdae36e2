"""The co-located engine: vLLM in the trainer's own process, as the `TrainingEngine` of engine.py.

    add(key, call, …) ─► step() ─► [(key, Completion), …]    no call waits for another: the caller drives the steps
    load(named parameters)                                   weights streamed in, prefix cache reset
    load(named parameters, version)                          the same under pending calls, which continue afterwards
    sleep() / wake()                                         GPU only: memory is lent to training

Under torchrun every rank builds its own engine at the same time (vLLM's external launcher). With tensor_parallel = 1
the ranks then generate independently, each its share, in any number of steps. With tensor_parallel = T, T neighbouring
ranks are one replica: they must add the same calls in the same order. `replica` of `replicas` identifies the share.
"""

# ruff: noqa: E402 (settings that vLLM reads at import come first)
from __future__ import annotations

import contextlib
import logging
import os

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # in this process, where the trainer's tensors are
os.environ["VLLM_CONFIGURE_LOGGING"] = "0"  # its messages go to the engine's log, not to the console
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
logging.getLogger("vllm").setLevel(os.environ.get("VLLM_LOGGING_LEVEL", "INFO"))
logging.getLogger("vllm").propagate = False
logging.getLogger("vllm").addHandler(logging.NullHandler())

import gc
import json
import random
import sys
import tempfile
import time
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.inputs import tokens_input
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.llm_engine import LLMEngine

from dccot.core.progress import waiting
from dccot.core.runtime import PATIENCE, Runtime, fixed_segments, free_memory, keep_freed_memory
from dccot.model.tokenizer import open_tokenizer, tokenizer_folder
from dccot.model.weights import open_tensors
from dccot.rollout.director import Call, Completion
from dccot.rollout.engine import EngineConfig, Pending, Sampling, choose_switches, engine_options, versions_of
from dccot.rollout.tags import check_same_ids

if TYPE_CHECKING:
    from dccot.rollout.engine import Parameters

LINES_OF_A_FAILURE = 60
ON_GPU = torch.cuda.is_available()


class VllmEngine:
    def __init__(
        self, model: str | Path, config: EngineConfig | None = None, *, logs: Path | None = None, sleeps: bool = False
    ):
        """`logs`: folder of the file with vLLM's messages. At most one engine per process `sleeps`."""
        self.config = config = config or EngineConfig()
        self._sleeps = sleeps and ON_GPU
        self.model = str(model)
        with open_tensors(model) as tensors:  # damaged weights cost one line, before vLLM takes its time
            self._checkpoint_names = set(tensors)
        if not ON_GPU:
            keep_freed_memory()
        world = int(os.environ.get("WORLD_SIZE", "1"))
        if world % config.tensor_parallel:
            raise ValueError(f"engine.tensor_parallel is {config.tensor_parallel}; it must divide the {world} ranks")
        if world > 1 and not dist.is_initialized():
            Runtime.start(PATIENCE)
        choose_switches(config, world, on_gpu=ON_GPU)
        self.replicas = world // config.tensor_parallel
        self.replica = int(os.environ.get("RANK", "0")) // config.tensor_parallel
        self._made_the_group = not dist.is_initialized()
        fixed = fixed_segments() if self._sleeps and config.sleep_level == 2 else contextlib.nullcontext()
        with undisturbed(), fixed, logged(logs) as self._log, tokenizer_folder(self.model) as tokenizer:
            arguments = engine_arguments(self.model, tokenizer, config, world > 1, sleeps)
            self._engine = LLMEngine.from_engine_args(arguments)
        # it would destroy the trainer's process group when this object is collected
        self._engine.engine_core._finalizer.detach()
        self.context: int = self._engine.model_config.max_model_len
        self.dtype: torch.dtype = self._engine.model_config.dtype
        self.tokenizer = self._engine.get_tokenizer()
        check_same_ids(open_tokenizer(self.model), self.tokenizer, self.model)
        self._sampling = Sampling(self.tokenizer)
        self.network = self._engine.model_executor.driver_worker.worker.get_model()
        self.pending, self.sampled_tokens = Pending(config), 0
        self._tied = bool(json.loads((Path(self.model) / "config.json").read_text()).get("tie_word_embeddings"))
        self._whole, self._asleep = True, False  # weights consistent; memory released

    def add(
        self, key: str, call: Call, *, seed: int, temperature: float, top_p: float = 1.0, priority: int = 0
    ) -> None:
        if not self._whole:
            state = "the engine's weights are gone or mixed (it slept, or a load failed)"
            raise RuntimeError(f"{state}: load all of them before generating")
        self.pending.begin(key, call)
        rule = self._sampling.parameters(call, seed=seed, temperature=temperature, top_p=top_p)
        params = SamplingParams(
            **rule,
            detokenize=rule["stop"] is not None,  # saves an eighth of a small model's time if a tag is one token
            logprobs=0,  # of the sampled token alone
            flat_logprobs=True,
            output_kind=RequestOutputKind.FINAL_ONLY,
            skip_clone=True,
        )
        try:
            self._engine.add_request(key, tokens_input(call.prompt), params, priority=priority)
        except Exception:
            del self.pending[key]
            raise

    def step(self) -> list[tuple[str, Completion]]:
        """One forward pass over all running calls."""
        state = torch.get_rng_state()  # vLLM draws from torch's global generator even when every request has its own
        outputs = self._engine.step()
        torch.set_rng_state(state)
        finished = [(output.request_id, self._completion(output)) for output in outputs]
        self.sampled_tokens += self.running + len(finished)
        self.pending.after_step((key for key, _ in finished), self._progress)
        return finished

    @property
    def running(self) -> int:
        return len(self._core.scheduler.running)

    def written(self) -> dict[str, list[int]]:
        states = self._engine.output_processor.request_states.values()
        return {state.external_req_id: list(state.detokenizer.output_token_ids) for state in states}

    def abort(self, keys: Iterable[str]) -> None:
        keys = [key for key in keys if key in self.pending]
        self._engine.abort_request(keys)
        for key in keys:
            del self.pending[key]

    def load(self, parameters: Parameters, version: int | None = None) -> None:
        """Replace the weights by `parameters`, consumed one at a time. Pending calls read their text again with the new
        weights before they continue.
        """
        if self.pending and version is None:
            calls = f"{len(self.pending)} running calls; finish or abort {_some(self.pending)}"
            raise RuntimeError(f"weights cannot change under {calls}")
        seen: set[str] = set()
        faults: list[Exception] = []

        def watched() -> Iterator[tuple[str, Tensor]]:
            try:
                for name, tensor in self.with_head(parameters, wanted="lm_head.weight" in self._checkpoint_names):
                    if not tensor.isfinite().all():
                        raise ValueError(f"{name} holds {int((~tensor.isfinite()).sum()):,} values that are not finite")
                    seen.add(name)
                    yield name, tensor.detach()
            except Exception as fault:  # vLLM must finish its reload, or it could never load again
                faults.append(fault)

        self._whole = False
        if self.pending and not self._asleep:  # their KV cache goes, and they wait
            self._core.pause_scheduler(mode="keep", clear_cache=True)
        with torch.no_grad():
            self._engine.collective_rpc("reload_weights", kwargs={"weights_iterator": watched()})
            if self._tied and not ON_GPU:  # vLLM repacks weights for its CPU kernels, and a tied head is not loaded
                self.network.lm_head.quant_method.process_weights_after_loading(self.network.lm_head)
        if faults:
            raise faults[0]
        if missing := self._checkpoint_names - seen:
            raise ValueError(f"{len(missing)} weights of {self.model} were not given: {_some(sorted(missing))}")
        self._whole = True
        if self._asleep:
            self._engine.wake_up(tags=["kv_cache"])
            self._asleep = False
        if version is not None:
            self._engine.set_weight_version(str(version))
        self._core.resume_scheduler()
        if not self.pending:  # else it was reset when they were paused
            self.forget_prefixes()

    @property
    def _core(self) -> Any:
        return self._engine.engine_core.engine_core

    def with_head(self, parameters: Parameters, wanted: bool) -> Iterator[tuple[str, Tensor]]:
        """A tied head is not a parameter of the trainer; vLLM has one, and loads it if the checkpoint contains it."""
        for name, tensor in parameters:
            yield name, tensor
            if self._tied and wanted and name == "model.embed_tokens.weight":
                yield "lm_head.weight", tensor

    def forget_prefixes(self) -> None:
        if self.pending:
            calls = f"{len(self.pending)} running calls: {_some(self.pending)}"
            raise RuntimeError(f"the prefix cache is in use by {calls}")
        if not self._engine.reset_prefix_cache():
            self._engine.step()  # an asynchronous scheduler still holds blocks of calls that have just ended
            if not self._engine.reset_prefix_cache():
                raise RuntimeError("the prefix cache could not be reset: blocks are held although no call is running")

    def sleep(self) -> None:
        """Release GPU memory: weights, KV cache and, at level 2, CUDA graphs; `wake` and `load` restore them. Does
        nothing on a CPU.
        """
        if self._sleeps and not self._asleep:
            self._engine.sleep(level=self.config.sleep_level, mode="keep")
            self._asleep, self._whole = True, False

    def wake(self) -> None:
        """Allocate memory for the weights, which `load` must provide next; the KV cache follows after that."""
        if self._asleep:
            self._engine.wake_up(tags=["weights"])

    def shutdown(self) -> None:
        """Release everything except a process group that existed before the engine. All weights are freed."""
        self.abort(list(self.pending))
        core = self._core
        # before vLLM releases the memory that sleeps: a tensor still in it would be freed too late
        del self.network, self._engine
        if self._made_the_group:
            core.shutdown()
        else:  # the same without its last step, which destroys every process group
            core.model_executor.shutdown()
            core.scheduler.shutdown()
            gc.unfreeze()
        del core
        free_memory()
        close_log(self._log)

    def _completion(self, output: Any) -> Completion:
        result = output.outputs[0]
        stop = self._sampling.stop_of(self.pending[output.request_id], result.finish_reason, result.stop_reason)
        ids, cached = list(result.token_ids), output.num_cached_tokens or 0
        return Completion(ids, result.logprobs.logprobs, stop, cached, versions_of(result.weight_versions))

    def _progress(self) -> str:
        written = {key: len(ids) for key, ids in self.written().items()}
        return _some([f"{key} ({written.get(key, 0)}/{call.max_tokens} tokens)" for key, call in self.pending.items()])


def engine_arguments(model: str, tokenizer: str, config: EngineConfig, distributed: bool, sleeps: bool) -> EngineArgs:
    return EngineArgs(
        **engine_options(config, ON_GPU),
        model=model,
        tokenizer=tokenizer,
        distributed_executor_backend="external_launcher" if distributed else None,
        enable_prefix_caching=True,
        enable_sleep_mode=sleeps and ON_GPU,
        sleep_mode_offload_cudagraph=sleeps and ON_GPU and config.sleep_level == 2,
        disable_log_stats=True,
        trust_remote_code=False,
    )


def _some(names: Iterable[str], limit: int = 20) -> str:
    names = list(names)
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")


# ---- startup: minutes on a GPU, and the cause of a failure is usually logged long before the exception ----


@contextlib.contextmanager
def logged(folder: Path | None) -> Iterator[logging.Handler]:
    """Append stderr and vLLM's messages to a file in `folder`, or to a temporary one, while an engine starts.

    The console shows that it is alive and, if it fails, the end of the log. vLLM's messages continue to go to the file
    in `folder` until `close_log`.
    """
    if folder:
        folder.mkdir(parents=True, exist_ok=True)
    log = folder / f"engine.rank{os.environ.get('RANK', '0')}.log" if folder else None
    with open(log, "ab") if log else tempfile.NamedTemporaryFile() as file:
        handler = logging.FileHandler(file.name)
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        logging.getLogger("vllm").addHandler(handler)
        sys.stderr.flush()
        console, began, failed = os.dup(2), time.monotonic(), True

        def last_line() -> str:
            said = [line.strip() for line in Path(file.name).read_text(errors="replace").splitlines() if line.strip()]
            return said[-1][:160] if said else "no output yet"

        try:
            with waiting("starting the engine", last_line):
                os.dup2(file.fileno(), 2)
                yield handler
            failed = False
        finally:
            sys.stderr.flush()
            if failed:
                lines = Path(file.name).read_text(errors="replace").splitlines()[-LINES_OF_A_FAILURE:]
                where = f"; the end of {log}:" if log else ":"
                heading = f"the engine did not start ({time.monotonic() - began:.0f} s){where}"
                os.write(console, "\n".join([heading, *lines, ""]).encode())
            if failed or log is None:
                close_log(handler)
            os.dup2(console, 2)
            os.close(console)


def close_log(handler: logging.Handler) -> None:
    logging.getLogger("vllm").removeHandler(handler)
    handler.close()


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """vLLM seeds every global generator, edits the environment and replaces torch.set_num_threads: all undone."""
    environment, set_num_threads = dict(os.environ), torch.set_num_threads
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.set_num_threads = set_num_threads
        torch.set_rng_state(states[0])
        np.random.set_state(states[1])
        random.setstate(states[2])
        restore_environment(environment)


def restore_environment(before: dict[str, str]) -> None:
    """Undo changes one by one: other threads may read the environment meanwhile and must never find it empty."""
    for name in set(os.environ) - set(before):
        del os.environ[name]
    for name, value in before.items():
        if os.environ.get(name) != value:
            os.environ[name] = value
