"""Attention over a packed forest: query q sees key k ⇔ k ≤ q < visible_until[k].  One entry point, five backends.

    triton   GPU; on a CPU only in Triton's interpreter (TRITON_INTERPRET=1), which is for tests
    cpu      fast on a CPU: the tree cut into strips of ordinary attention (attention_cpu.py)
    flash    torch's FlexAttention with the same tiles (attention_flex.py), whose FLASH kernels may be faster
    sdpa     torch's own attention, for a forest that is one plain causal sequence
    dense    the whole N×N matrix: the oracle

    mask = TreeMask(visible_until)                   # once per forest, shared by all layers and the backward
    out = tree_attention(q, k, v, mask)              # q [N, Hq, D], k and v [N, Hk, D] → [N, Hq, D]

A mask with a share has fewer queries than keys: q and the result then are those of the share, one row per query.

Forward and backward are custom operators, so torch.compile and FSDP treat them as one opaque step. No atomics anywhere:
the same inputs give the same bits.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dccot.kernels import attention_cpu, autotune
from dccot.kernels.mask import TreeMask
from dccot.kernels.reference import dense_attention, dense_mask

TRITON_HEAD_DIMS = (32, 64, 128)
TRITON_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def tree_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: TreeMask, *, scale: float | None = None, backend: str | None = None
) -> Tensor:
    """q [N, Hq, D], k and v [N, Hk, D] → [N, Hq, D].  `scale` defaults to 1/√D, `backend` to the device's.

    >>> mask = TreeMask(torch.tensor([4, 2, 4, 4]))  # token 1 is a branch: tokens 2 and 3 do not see it
    >>> q, k, v = torch.zeros(4, 2, 32), torch.zeros(4, 1, 32), torch.arange(4.0)[:, None, None].repeat(1, 1, 32)
    >>> tree_attention(q, k, v, mask)[:, 0, 0]  # equal scores: the mean of what each token sees
    tensor([0.0000, 0.5000, 1.0000, 1.6667])
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if backend is None:
        backend = autotune.backend_for(q, k, v, mask, scale) if q.is_cuda else "cpu"
    _check(q, k, v, mask, scale, backend)
    if backend == "dense":
        return dense_attention(q, k, v, mask.own(dense_mask(mask.visible_until)), scale)
    if backend == "flash":
        from dccot.kernels import attention_flex  # takes a second to import, and nothing else needs it

        return attention_flex.attend(q, k, v, mask, scale)
    if backend == "sdpa":
        return autotune.attend_causally(q, k, v, mask, scale)
    return _forward(q, k, v, mask.visible_until, mask.handle, scale, backend)[0]


def prepare(
    mask: TreeMask, heads: int, key_heads: int, head_dim: int, dtype: torch.dtype, backend: str | None = None
) -> None:
    """Derive what attention with this mask needs ahead of time, in a thread for example."""
    backend = backend or ("triton" if mask.device.type == "cuda" else "cpu")
    if backend == "triton":
        _triton(mask)[0].prepare(mask, heads, key_heads, head_dim, dtype)
    elif backend == "cpu":
        _cpu(mask)


def _check(q: Tensor, k: Tensor, v: Tensor, mask: TreeMask, scale: float, backend: str) -> None:
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if q.ndim != 3 or k.ndim != 3 or k.shape != v.shape or q.shape[2] != k.shape[2]:
        raise ValueError(f"tree attention takes q [N, Hq, D] and k, v [N, Hk, D], got {shapes}")
    if q.shape[1] % k.shape[1]:
        raise ValueError(f"query heads must be a multiple of key heads, got {q.shape[1]} and {k.shape[1]} ({shapes})")
    if len(mask) != k.shape[0]:
        raise ValueError(f"the mask describes {len(mask)} tokens, but {shapes}")
    if mask.queries != q.shape[0]:
        raise ValueError(f"the mask has {mask.queries} queries, but {shapes}")
    if not q.dtype == k.dtype == v.dtype or not q.is_floating_point():
        found = f"{q.dtype}, {k.dtype}, {v.dtype}"
        raise TypeError(f"q, k and v must share one floating-point dtype, got {found}: cast them first")
    if not q.device == k.device == v.device == mask.visible_until.device:
        found = f"{q.device}, {k.device}, {v.device}, {mask.visible_until.device}"
        raise ValueError(f"q, k, v and the mask must be on one device, got {found}")
    if any(x.stride(-1) != 1 for x in (q, k, v)):
        strides = [x.stride() for x in (q, k, v)]
        raise ValueError(f"the last dimension must be contiguous, got strides {strides}: call .contiguous() first")
    if scale <= 0:
        raise ValueError(f"scale must be positive, got {scale}")
    if backend == "triton":
        _check_triton(q, k, v)
    elif backend == "cpu" and q.device.type != "cpu":
        raise ValueError(f"backend 'cpu' is for tensors on a CPU, got {q.device}: use 'triton'")
    elif backend == "flash" and q.device.type == "cpu" and any(x.requires_grad for x in (q, k, v)):
        raise ValueError("backend 'flash' has no backward on a CPU: use 'cpu'")
    elif backend == "sdpa" and not mask.is_causal:
        raise ValueError("backend 'sdpa' is for one plain causal sequence, and the mask is a tree: use 'triton'")
    elif backend not in (*BACKENDS, "flash", "sdpa", "dense"):
        named = ", ".join(map(repr, BACKENDS))
        raise ValueError(f"unknown backend {backend!r}: use {named}, 'flash', 'sdpa' or 'dense'")


def _check_triton(q: Tensor, k: Tensor, v: Tensor) -> None:
    ours, remedy = "the Triton kernels", "use backend 'cpu' or 'dense'"
    if q.shape[-1] not in TRITON_HEAD_DIMS:
        raise ValueError(f"{ours} take head_dim {TRITON_HEAD_DIMS}, got {q.shape[-1]}: {remedy}")
    if q.dtype not in TRITON_DTYPES:
        raise TypeError(f"{ours} take {TRITON_DTYPES}, got {q.dtype}: cast, or {remedy}")
    if max(x.shape[1] * x.stride(1) for x in (q, k, v)) >= 2**31:
        raise ValueError(
            f"heads lie more than 2³¹ elements apart: {ours} cannot address that, call .contiguous() first"
        )
    if q.device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError("backend 'triton' on a CPU needs TRITON_INTERPRET=1 before Python starts: use 'cpu'")


def _triton(mask: TreeMask) -> tuple[Any, Any]:
    from dccot.kernels import attention_triton  # imported late: the import decides whether kernels are interpreted

    return attention_triton, mask


def _cpu(mask: TreeMask) -> tuple[Any, Any]:
    return attention_cpu, mask.derive("cpu", lambda: attention_cpu.cut(mask.visible_until, mask.ranges))


# mask → (module with forward(q, k, v, layout, scale) and backward(grad, q, k, v, out, lse, layout, scale), that layout)
BACKENDS: dict[str, Callable[[TreeMask], tuple[Any, Any]]] = {"triton": _triton, "cpu": _cpu}


@torch.library.custom_op("dccot::tree_attention", mutates_args=())
def _forward(
    q: Tensor, k: Tensor, v: Tensor, visible_until: Tensor, handle: Tensor, scale: float, backend: str
) -> tuple[Tensor, Tensor]:
    module, layout = BACKENDS[backend](TreeMask.from_handle(handle, visible_until))
    return module.forward(q, k, v, layout, scale)


@_forward.register_fake
def _(q, k, v, visible_until, handle, scale, backend):
    return q.new_empty(q.shape), q.new_empty(q.shape[1], q.shape[0], dtype=torch.promote_types(q.dtype, torch.float32))


@torch.library.custom_op("dccot::tree_attention_backward", mutates_args=())
def _backward(
    tensors: list[Tensor], visible_until: Tensor, handle: Tensor, scale: float, backend: str
) -> tuple[Tensor, Tensor, Tensor]:
    """`tensors` are the output's gradient, q, k, v, the output and its log-sum-exp."""
    module, layout = BACKENDS[backend](TreeMask.from_handle(handle, visible_until))
    return module.backward(*tensors, layout, scale)


@_backward.register_fake
def _(tensors, visible_until, handle, scale, backend):
    _, q, k, v, *_ = tensors
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _save(ctx, inputs, output) -> None:
    q, k, v, visible_until, handle, ctx.scale, ctx.backend = inputs
    ctx.save_for_backward(q, k, v, *output, visible_until, handle)
    ctx.mark_non_differentiable(output[1])


def _gradients(ctx, grad: Tensor, _):
    *tensors, visible_until, handle = ctx.saved_tensors
    return *_backward([grad, *tensors], visible_until, handle, ctx.scale, ctx.backend), None, None, None, None


_forward.register_autograd(_gradients, setup_context=_save)
