"""A GPU that computes nothing: its tensors have shape, dtype and size, and memory is counted by kind and phase.

    with FakeGpu() as gpu:
        with gpu.phase("update"): …    any code that uses device "cuda"
    gpu.peaks                          phase → (most bytes at once, the same by kind)
    gpu.syncs                          phase → location in our code → how often the host waited for the GPU there

The CPU side is real: tensors on the CPU have values, so that masks, schedules and metrics are computed as usual.
Crossing over loses them: a tensor moved to the GPU becomes a fake one, one moved back holds zeros. The bodies of our
own operators also run, except their Triton kernels, so their temporary allocations are counted, which their declared
outputs would not show.

A blocking copy, `.item()`, `float(…)` and the like make the host wait for everything enqueued on the GPU: these are
counted. An operation whose shape depends on GPU values (`nonzero`, a boolean index) cannot be rehearsed and does not
belong in a training step: it is an error.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch._library.custom_ops import OPDEFS
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.distributed.fsdp._fully_shard import _fsdp_param_group as fsdp
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten
PINNING = (aten._pin_memory.default, aten.pin_memory.default)
PACKAGE = Path(__file__).resolve().parents[2]
OURSELVES = {"fake_gpu.py", "fake_cuda.py", "step.py"}


class FakeGpu(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.entered = Counter[str]()  # phase → micro-batches that went forward in it
        self.total, self.by_kind = 0, Counter[str]()
        self.peaks: dict[str, tuple[int, dict[str, int]]] = {}
        self.syncs: dict[str, Counter[str]] = defaultdict(Counter)
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._phase, self._kinds, self._stepping = "", ["other"], False
        self._counting = True
        self._held: dict[int, tuple[int, str]] = {}  # storage → bytes, kind
        self._pinned: weakref.WeakSet = weakref.WeakSet()
        self._stack: ExitStack | None = None

    # what runs where

    def __enter__(self) -> FakeGpu:
        if self._stack is None:
            self._stack = ExitStack()
            self._stack.enter_context(self._fake)
            torch._C._set_only_lift_cpu_tensors(
                True
            )  # torch.tensor(…, device="cuda") makes one on the CPU and moves it
            self._watch_fsdp(self._stack)
        super().__enter__()
        return self

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # it comes back here as operations on its shards
        if func.namespace == "prim":  # a question about a tensor
            return func(*args, **kwargs)
        leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if func.namespace == "dccot":
            self.entered[self._phase] += func._schema.name == "dccot::linear_logprob"
            with self, self.kind("LM head" if "logprob" in func._schema.name else None):
                return OPDEFS[func._schema.name]._init_fn(*args, **kwargs)
        if not any(isinstance(leaf, FakeTensor) for leaf in leaves) and not _wants_cuda(kwargs):
            return self._on_the_cpu(func, args, kwargs)
        if _made_of_others(func):  # inside an operator's body it has not been decomposed yet
            with self:
                return func.decompose(*args, **kwargs)
        special = self._SPECIAL.get(func)
        result = special(self, func, args, kwargs) if special else self._run(func, args, kwargs)
        for leaf in tree_leaves(result) if self._counting else ():
            if isinstance(leaf, FakeTensor) and leaf.device.type == "cuda":
                self._hold(leaf)
        return result

    def _on_the_cpu(self, func: Any, args: tuple, kwargs: dict) -> Any:
        with no_dispatch():
            if func in PINNING:  # needs a driver; recording the request is enough
                copy = args[0].clone()
                self._pinned.add(copy.untyped_storage())
                return copy
            if func is aten.is_pinned.default:
                return args[0].untyped_storage() in self._pinned
            return func(*args, **kwargs)

    def _run(self, func: Any, args: tuple, kwargs: dict) -> Any:
        try:
            return func(*args, **kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            needs = "needs numbers that are on the GPU; compute it on the CPU beforehand"
            raise RuntimeError(f"{_place()}: {func} {needs}") from error

    def _copy(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """Between CPU and GPU, or from one dtype to another on the GPU."""
        in_place = func is aten.copy_.default
        source = args[1] if in_place else args[0]
        target = args[0].device if in_place else torch.device(kwargs.get("device") or source.device)
        if {source.device.type, target.type} != {"cpu", "cuda"}:
            return self._run(func, args, kwargs)
        asked_not_to_wait = kwargs.get("non_blocking") or (in_place and len(args) > 2 and args[2])
        pageable = source.device.type == "cpu" and source.numel() > 1 and source.untyped_storage() not in self._pinned
        if pageable or not asked_not_to_wait:
            self.synchronised("a copy to the GPU that blocks" if target.type == "cuda" else "a copy from the GPU")
        if in_place:
            return args[0]
        dtype = kwargs.get("dtype") or source.dtype
        if target.type == "cuda":
            return torch.empty_strided(source.size(), source.stride(), dtype=dtype, device=target)
        with no_dispatch():
            return torch.zeros(source.shape, dtype=dtype)

    def _number(self, func: Any, args: tuple, kwargs: dict) -> float | int | bool:
        self.synchronised("a number is read from the GPU")
        dtype = args[0].dtype
        return True if dtype == torch.bool else 1.0 if dtype.is_floating_point else 1

    def _nothing(self, func: Any, args: tuple, kwargs: dict) -> None:
        """In-place kernels that need no memory; torch's stand-ins for them would allocate some."""

    def _same(self, func: Any, args: tuple, kwargs: dict) -> Tensor:
        return args[0]

    _SPECIAL: dict[Any, Callable] = {  # noqa: RUF012
        aten._to_copy.default: _copy,
        aten.copy_.default: _copy,
        aten._local_scalar_dense.default: _number,
        aten._fused_adamw_.default: _nothing,
        aten._fused_adamw_.tensor_lr: _nothing,
        aten.record_stream.default: _nothing,
        torch.ops._c10d_functional.wait_tensor.default: _same,
    }

    # the host waits

    def synchronised(self, what: str) -> None:
        self.syncs[self._phase][f"{_place()}: {what}"] += 1

    # memory

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        before, self._phase = self._phase, name
        self._note_peak()
        try:
            yield
        finally:
            self._phase = before

    @contextmanager
    def kind(self, name: str | None) -> Iterator[None]:
        """The kind of everything allocated here, unless overridden inside."""
        self._kinds.append(name or self._kinds[-1])
        try:
            yield
        finally:
            self._kinds.pop()

    def relabel(self, tensors: Iterable[Tensor | None], kind: str) -> None:
        local = (tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors)
        for key in (tensor.untyped_storage()._cdata for tensor in local if tensor is not None):
            if key in self._held:
                size, before = self._held[key]
                self._held[key] = size, kind
                self.by_kind[before] -= size
                self.by_kind[kind] += size

    @property
    def phase_peak(self) -> int:
        peaks = [total for name, (total, _) in self.peaks.items() if name.startswith(self._phase)]
        return max(peaks, default=self.total)

    def _hold(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._held:
            self._held[key] = 0, self._kind()
            weakref.finalize(storage, self._release, key)
            self._resized(key, storage.nbytes())

    def _kind(self) -> str:
        if self._kinds[-1] != "other":
            return self._kinds[-1]
        if self._stepping:
            return "AdamW moments"
        return "backward" if _in_backward() else "activations"

    def _resized(self, key: int, size: int) -> None:
        before, kind = self._held[key]
        self._held[key] = size, kind
        self.total += size - before
        self.by_kind[kind] += size - before
        if size > before:
            self._note_peak()

    def _note_peak(self) -> None:
        name = self._phase
        if name == "update":
            name += ": optimizer" if self._stepping else ": backward" if _in_backward() else ": forward"
        if self.total > self.peaks.get(name, (-1, {}))[0]:
            self.peaks[name] = self.total, {kind: size for kind, size in self.by_kind.items() if size}

    def _release(self, key: int) -> None:
        self._resized(key, 0)
        del self._held[key]

    def _watch_fsdp(self, stack: ExitStack) -> None:
        """FSDP frees what it gathered by shrinking its storage, and allocates in a few known places."""

        def replace(owner: Any, name: str, wrapper: Callable) -> None:
            original = getattr(owner, name)
            setattr(owner, name, lambda *args, **kwargs: wrapper(original, *args, **kwargs))
            stack.callback(setattr, owner, name, original)

        def resize(original: Callable, storage: torch.UntypedStorage, size: int) -> Any:
            result = original(storage, size)
            if storage._cdata in self._held:
                self._resized(storage._cdata, size)
            return result

        def labelled(kind: str) -> Callable:
            def wrapper(original: Callable, *args: Any, **kwargs: Any) -> Any:
                with self.kind(kind):
                    return original(*args, **kwargs)

            return wrapper

        def reduce(original: Callable, params: Any, *args: Any, **kwargs: Any) -> Any:
            with self.kind("gradients on their way"):
                result = original(params, *args, **kwargs)
            self.relabel((param.sharded_param.grad for param in params), "gradients")
            return result

        def uncounted(original: Callable, *args: Any, **kwargs: Any) -> Any:
            self._counting = False
            try:
                return original(*args, **kwargs)
            finally:
                self._counting = True

        replace(torch.UntypedStorage, "resize_", resize)
        replace(ShardingPropagator, "_propagate_tensor_meta_non_cached", uncounted)  # DTensor tries out shapes
        replace(fsdp.FSDPParamGroup, "unshard", labelled("gathered weights"))
        replace(fsdp.FSDPParamGroup, "wait_for_unshard", labelled("gathered weights"))
        replace(fsdp.FSDPParamGroup, "post_backward", labelled("gradients"))
        replace(fsdp, "foreach_reduce", reduce)
        hooks = {register_optimizer_step_pre_hook: True, register_optimizer_step_post_hook: False}
        for register, stepping in hooks.items():
            stack.callback(register(lambda *_, now=stepping: setattr(self, "_stepping", now)).remove)


@functools.cache
def _made_of_others(func: Any) -> bool:
    """Neither device has a kernel for it; a torch without CUDA knows only the kernels that fake_cuda.py registered."""
    key = torch._C.DispatchKey
    has = func.has_kernel_for_dispatch_key if func.namespace == "aten" else lambda key: False
    return has(key.CompositeImplicitAutograd) and not has(key.CPU) and not has(key.CUDA)


def _wants_cuda(kwargs: dict) -> bool:
    device = kwargs.get("device")
    return device is not None and torch.device(device).type == "cuda"


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _place() -> str:
    """file:line of our own code that is running."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.name not in OURSELVES and PACKAGE in path.resolve().parents and "site-packages" not in path.parts:
            return f"{path.resolve().relative_to(PACKAGE)}:{frame.f_lineno}"
        frame = frame.f_back
    return "outside the project"
