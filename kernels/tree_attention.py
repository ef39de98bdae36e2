"""Attention over a packed forest: query q sees key k ⇔ k ≤ q < visible_until[k].  One entry point, three backends.

    triton   GPU; on a CPU only in Triton's interpreter (TRITON_INTERPRET=1), which is for tests
    paths    CPU at speed: the tree cut into strips of ordinary attention (paths.py)
    dense    the whole N×N matrix: the oracle

    mask = TreeMask(visible_until)                   # once per forest, shared by all layers and the backward
    out = tree_attention(q, k, v, mask)              # q [N, Hq, D], k and v [N, Hk, D] → [N, Hq, D]

Forward and backward are custom operators, so torch.compile and FSDP treat them as one opaque step. No atomics anywhere: the same
inputs give the same bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import paths
from .mask import TreeMask
from .reference import dense_attention

__all__ = ["TreeMask", "tree_attention"]


def tree_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: TreeMask, *, scale: float | None = None, backend: str | None = None
) -> Tensor:
    """q [N, Hq, D], k and v [N, Hk, D] → [N, Hq, D].  `scale` is 1/√D unless given; `backend` follows the device unless given."""
    _check(q, k, v, mask)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    backend = backend or ("triton" if q.is_cuda else "paths")
    if backend == "dense":
        return dense_attention(q, k, v, mask.visible_until, scale)
    return _forward(q, k, v, mask.visible_until, mask.handle, scale, backend)[0]


def _check(q: Tensor, k: Tensor, v: Tensor, mask: TreeMask) -> None:
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if q.ndim != 3 or k.ndim != 3 or k.shape != v.shape or q.shape[0] != k.shape[0] or q.shape[2] != k.shape[2]:
        raise ValueError(f"expected q [N, Hq, D] and k, v [N, Hk, D], got {shapes}")
    if q.shape[1] % k.shape[1]:
        raise ValueError(f"the number of query heads must be a multiple of the number of key heads, got {shapes}")
    if len(mask) != q.shape[0]:
        raise ValueError(f"the mask is for {len(mask)} tokens, but {shapes}")


@torch.library.custom_op("dccot::tree_attention", mutates_args=())
def _forward(
    q: Tensor, k: Tensor, v: Tensor, visible_until: Tensor, handle: Tensor, scale: float, backend: str
) -> tuple[Tensor, Tensor]:
    mask = TreeMask.from_handle(handle, visible_until)
    return paths.forward(q, k, v, mask.derive("paths", lambda: paths.cut(visible_until)), scale)


@_forward.register_fake
def _(q, k, v, visible_until, handle, scale, backend):
    return torch.empty_like(q), q.new_empty(q.shape[:2], dtype=torch.promote_types(q.dtype, torch.float32))


@torch.library.custom_op("dccot::tree_attention_backward", mutates_args=())
def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, visible_until: Tensor, handle: Tensor, scale: float,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    mask = TreeMask.from_handle(handle, visible_until)
    return paths.backward(grad, q, k, v, out, lse, mask.derive("paths", lambda: paths.cut(visible_until)), scale)


@_backward.register_fake
def _(grad, q, k, v, out, lse, visible_until, handle, scale, backend):
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _save(ctx, inputs, output) -> None:
    q, k, v, visible_until, handle, ctx.scale, ctx.backend = inputs
    ctx.save_for_backward(q, k, v, *output, visible_until, handle)
    ctx.mark_non_differentiable(output[1])


def _gradients(ctx, grad: Tensor, _):
    return *_backward(grad, *ctx.saved_tensors, ctx.scale, ctx.backend), None, None, None, None


_forward.register_autograd(_gradients, setup_context=_save)
