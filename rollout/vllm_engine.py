"""The co-located engine: vLLM in the trainer's own process, as the `Engine` of interface.py. The only file that imports
vLLM.

    add(key, call, …) ─► step() ─► [(key, Completion), …]           no call waits for another: the caller drives the steps
    load(named parameters)                                          weights streamed in, prefix cache reset; no disk, no rebuild
    sleep() / wake()                                                GPU only: memory is lent to training

Under torchrun every rank builds its own engine at the same time (vLLM's external launcher). With tensor_parallel = 1
the ranks then generate independently, each its share, in any number of steps. With tensor_parallel = T, T neighbouring
ranks are one replica: they must add the same calls in the same order. `replica` of `replicas` identifies the share.
"""

# ruff: noqa: E402 (settings that vLLM reads at import come first)
from __future__ import annotations

import logging
import os

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # in this process, where the trainer's tensors are
os.environ["VLLM_CONFIGURE_LOGGING"] = "0"  # its messages go to the engine's log (engine_start.py), not to the console
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
logging.getLogger("vllm").setLevel(os.environ.get("VLLM_LOGGING_LEVEL", "INFO"))
logging.getLogger("vllm").propagate = False
logging.getLogger("vllm").addHandler(logging.NullHandler())

import gc
import json
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.inputs import tokens_input
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.llm_engine import LLMEngine

from dccot.core.runtime import PATIENCE, Runtime, free_memory, keep_freed_memory
from dccot.model.tokenizer import open_tokenizer, tokenizer_folder
from dccot.model.weights import open_tensors
from dccot.rollout.director import Call, Completion, Stop
from dccot.rollout.engine import EngineStalled
from dccot.rollout.settings import EngineConfig
from dccot.rollout.sync import differing
from dccot.rollout.tags import check_same_ids
from dccot.rollout.vllm_start import end_log, logged, undisturbed

ON_GPU = torch.cuda.is_available()
if ON_GPU:
    # all its process groups in a few calls instead of one by one: thousands of ranks
    os.environ["VLLM_DISTRIBUTED_USE_SPLIT_GROUP"] = "1"
    # registered graphs could not be moved to the host while the engine sleeps
    os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")


class VllmEngine:
    def __init__(
        self, model: str | Path, config: EngineConfig | None = None, *, log: Path | None = None, sleeps: bool = False
    ):
        """`log` receives vLLM's messages; an engine that `sleeps` can lend its memory to training, at most one per
        process.
        """
        self.config = config = config or EngineConfig()
        self._log, self._sleeps = log, sleeps and ON_GPU
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
        self.replicas = world // config.tensor_parallel
        self.replica = int(os.environ.get("RANK", "0")) // config.tensor_parallel
        self._made_the_group = not dist.is_initialized()
        with undisturbed(), logged(log), tokenizer_folder(self.model) as tokenizer:
            self._engine = LLMEngine.from_engine_args(
                engine_arguments(self.model, tokenizer, config, world > 1, sleeps)
            )
        # it would destroy the trainer's process group when this object is collected
        self._engine.engine_core._finalizer.detach()
        self.context: int = self._engine.model_config.max_model_len
        self.tokenizer = self._engine.get_tokenizer()
        check_same_ids(open_tokenizer(self.model), self.tokenizer, self.model)
        self._network = self._engine.model_executor.driver_worker.worker.get_model()
        self._pending: dict[str, Call] = {}
        self.sampled_tokens = 0  # since the engine was built
        self._tag_tokens: dict[str, int | None] = {}
        self._tied = bool(json.loads((Path(self.model) / "config.json").read_text()).get("tie_word_embeddings"))
        self._whole, self._asleep = True, False  # weights consistent; memory released
        self._last_finished = time.monotonic()

    def add(
        self, key: str, call: Call, *, seed: int, temperature: float, top_p: float = 1.0, priority: int = 0
    ) -> None:
        """Queue a call; lower priority runs first. `key` names it in step()'s results and in errors."""
        if not self._whole:
            raise RuntimeError(
                "the engine's weights are gone or mixed (it slept, or a load failed): load all of them before generating"
            )
        if key in self._pending:
            raise ValueError(f"call {key!r} is already running; keys must be unique among pending calls")
        if not self._pending:
            self._last_finished = time.monotonic()
        token = self._single_token(call.stop) if call.stop else None
        as_text = call.stop is not None and token is None
        params = SamplingParams(
            temperature=temperature,
            top_p=top_p,
            seed=seed,
            max_tokens=call.max_tokens,
            stop=[call.stop] if as_text else None,
            stop_token_ids=[token] if token is not None else None,
            include_stop_str_in_output=True,
            detokenize=as_text,  # saves an eighth of a small model's time if a tag is one token
            skip_special_tokens=False,  # pieces of the tags may be special tokens
            logprobs=0,  # of the sampled token alone
            flat_logprobs=True,
            output_kind=RequestOutputKind.FINAL_ONLY,
            skip_clone=True,
        )
        self._engine.add_request(key, tokens_input(call.prompt), params, priority=priority)
        self._pending[key] = call

    def step(self) -> list[tuple[str, Completion]]:
        """One forward pass over all running calls; returns those it finished."""
        state = torch.get_rng_state()  # vLLM draws from torch's global generator even when every request has its own
        outputs = self._engine.step()
        torch.set_rng_state(state)
        finished = [(output.request_id, self._completion(output)) for output in outputs]
        for key, _ in finished:
            del self._pending[key]
        self.sampled_tokens += self.running + len(finished)
        now = time.monotonic()
        if finished:
            self._last_finished = now
        elif self._pending and now - self._last_finished > self.config.stall_seconds:
            raise EngineStalled(self._stall_report(now - self._last_finished))
        return finished

    @property
    def running(self) -> int:
        """Sequences in the next step; the other pending calls are queued."""
        return len(self._engine.engine_core.engine_core.scheduler.running)

    @property
    def pending(self) -> dict[str, Call]:
        return self._pending

    def written(self) -> dict[str, list[int]]:
        """What every pending call has sampled so far, for live views."""
        states = self._engine.output_processor.request_states.values()
        return {state.external_req_id: list(state.detokenizer.output_token_ids) for state in states}

    def abort(self, keys: Iterable[str]) -> None:
        keys = [key for key in keys if key in self._pending]
        self._engine.abort_request(keys)
        for key in keys:
            del self._pending[key]

    def load(self, parameters: Iterable[tuple[str, Tensor]]) -> None:
        """Replace the weights by `parameters` (Hugging Face names), consumed one at a time; nothing may be running.

        On several ranks the iterable may be collective (each item gathered from all of them): every rank must call
        this.
        """
        if self._pending:
            raise RuntimeError(
                f"weights cannot change under {len(self._pending)} running calls; finish or abort {_some(self._pending)}"
            )
        seen: set[str] = set()
        faults: list[Exception] = []

        def watched() -> Iterator[tuple[str, Tensor]]:
            try:
                for name, tensor in self._with_head(parameters, wanted="lm_head.weight" in self._checkpoint_names):
                    if not tensor.isfinite().all():
                        raise ValueError(f"{name} holds {int((~tensor.isfinite()).sum()):,} values that are not finite")
                    seen.add(name)
                    yield name, tensor.detach()
            except Exception as fault:  # vLLM must finish its reload, or it could never load again
                faults.append(fault)

        self._whole = False
        with torch.no_grad():
            self._engine.collective_rpc("reload_weights", kwargs={"weights_iterator": watched()})
            if self._tied and not ON_GPU:  # vLLM repacks weights for its CPU kernels, and a tied head is not loaded
                self._network.lm_head.quant_method.process_weights_after_loading(self._network.lm_head)
        if faults:
            raise faults[0]
        if missing := self._checkpoint_names - seen:
            raise ValueError(f"{len(missing)} weights of {self.model} were not given: {_some(sorted(missing))}")
        self._whole = True
        if self._asleep:
            self._engine.wake_up(tags=["kv_cache"])
            self._asleep = False
        self.forget_prefixes()

    def verify(self, parameters: Iterable[tuple[str, Tensor]]) -> None:
        """Raise if the engine's weights differ from these; collective if `parameters` is."""
        if self.config.tensor_parallel > 1:
            raise ValueError(
                f"verify compares whole weights; engine.tensor_parallel is {self.config.tensor_parallel}, which splits them"
            )
        whole = self._with_head(parameters, wanted=True)
        wrong = differing(self._network, whole, self._network.packed_modules_mapping, self._engine.model_config.dtype)
        if wrong:
            raise ValueError(
                f"the engine computes with other weights than the given ones: {_some(wrong)}; load them again"
            )

    def _with_head(self, parameters: Iterable[tuple[str, Tensor]], wanted: bool) -> Iterator[tuple[str, Tensor]]:
        """A tied head is not a parameter of the trainer; vLLM still has it, and loads it if the checkpoint contains
        it.
        """
        for name, tensor in parameters:
            yield name, tensor
            if self._tied and wanted and name == "model.embed_tokens.weight":
                yield "lm_head.weight", tensor

    def forget_prefixes(self) -> None:
        """Empty the prefix cache, so that what follows does not depend on what ran before; nothing may be running."""
        if self._pending:
            raise RuntimeError(
                f"the prefix cache is in use by {len(self._pending)} running calls: {_some(self._pending)}"
            )
        if not self._engine.reset_prefix_cache():
            self._engine.step()  # an asynchronous scheduler still holds blocks of calls that have just ended
            if not self._engine.reset_prefix_cache():
                raise RuntimeError("the prefix cache could not be reset: blocks are held although no call is running")

    def sleep(self) -> None:
        """Release GPU memory: weights, KV cache, CUDA graphs; `wake` and `load` restore them. Does nothing on a CPU."""
        if self._sleeps and not self._asleep:
            self._engine.sleep(level=2)
            self._asleep, self._whole = True, False

    def wake(self) -> None:
        """Allocate memory for the weights, which `load` must provide next; the KV cache follows after that."""
        if self._asleep:
            self._engine.wake_up(tags=["weights"])

    def shutdown(self) -> None:
        """Release everything except a process group that existed before the engine. All weights are freed."""
        self.abort(list(self._pending))
        core = self._engine.engine_core.engine_core
        del (
            self._network,
            self._engine,
        )  # before vLLM releases the memory that sleeps: a tensor still in it would be freed too late
        if self._made_the_group:
            core.shutdown()
        else:  # the same without its last step, which destroys every process group
            core.model_executor.shutdown()
            core.scheduler.shutdown()
            gc.unfreeze()
        del core
        free_memory()
        if self._log:
            end_log(self._log)

    def _completion(self, output) -> Completion:
        result, tag = output.outputs[0], self._pending[output.request_id].stop
        if result.finish_reason not in ("stop", "length"):
            raise RuntimeError(
                f"call {output.request_id!r} ended with {result.finish_reason!r}; expected 'stop' or 'length'"
            )
        # None: the tokenizer's EOS; the model's folder may name other tokens that end its text, too
        reason = result.stop_reason
        tagged = tag is not None and reason is not None and reason in (tag, self._single_token(tag))
        stop = Stop.LENGTH if result.finish_reason == "length" else Stop.TAG if tagged else Stop.EOS
        return Completion(list(result.token_ids), result.logprobs.logprobs, stop, output.num_cached_tokens or 0)

    def _single_token(self, tag: str) -> int | None:
        """The token that is this tag; None if the tokenizer spells it with several."""
        if tag not in self._tag_tokens:
            ids = self.tokenizer.encode(tag, add_special_tokens=False)
            self._tag_tokens[tag] = ids[0] if len(ids) == 1 else None
        return self._tag_tokens[tag]

    def _stall_report(self, seconds: float) -> str:
        written = {key: len(ids) for key, ids in self.written().items()}
        calls = [f"{key} ({written.get(key, 0)}/{call.max_tokens} tokens)" for key, call in self._pending.items()]
        rank = os.environ.get("RANK", "0")
        return (
            f"rank {rank}: no call finished for {seconds:.0f} s (engine.stall_seconds is {self.config.stall_seconds:g}); "
            f"{len(calls)} pending: {_some(calls)}"
        )


def engine_arguments(model: str, tokenizer: str, config: EngineConfig, distributed: bool, sleeps: bool) -> EngineArgs:
    kv_cache_gb = config.kv_cache_gb if config.kv_cache_gb or ON_GPU else 1.0
    return EngineArgs(
        model=model,
        tokenizer=tokenizer,
        dtype=config.dtype,
        hf_overrides={
            "head_dtype": "float32"
        },  # logits in the trainer's precision: rounding to bf16 would distort log-probs
        max_model_len=config.context,
        max_num_seqs=config.max_sequences,
        max_num_batched_tokens=config.batched_tokens if ON_GPU else None,
        tensor_parallel_size=config.tensor_parallel,
        distributed_executor_backend="external_launcher" if distributed else None,
        gpu_memory_utilization=config.gpu_memory,
        kv_cache_memory_bytes=int(kv_cache_gb * 2**30) if kv_cache_gb else None,
        block_size=config.block_size or (None if ON_GPU else 32),
        enforce_eager=not (ON_GPU if config.compile is None else config.compile),
        enable_prefix_caching=True,
        # a CPU generator cannot be rewound, which a seeded prompt in several chunks needs
        enable_chunked_prefill=ON_GPU,
        enable_sleep_mode=sleeps and ON_GPU,
        sleep_mode_offload_cudagraph=sleeps and ON_GPU,
        scheduling_policy="priority",  # started responses go before new ones
        logprobs_mode="processed_logprobs",  # at the sampling temperature, as the trainer computes them
        generation_config="vllm",  # sampling settings come from us, not from the model's folder
        disable_log_stats=True,
        use_tqdm_on_load=False,
        trust_remote_code=False,
    )


def _some(names: Iterable[str], limit: int = 20) -> str:
    names = list(names)
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")
