"""A decoder's row-wise operations between matrix products: RMS norm and rotation.

    rms_norm(x, weight, eps)    x / sqrt(mean x² + eps) · weight
    rotate(x, cos, sin)         elements i and i + D/2 of a head turned by the angle of pair i

On a CPU these are memory-bound: torch's own operations and their autograd pass over the whole tensor a dozen times.
Here a few rows at a time go through everything while they are in cache, with an explicit gradient, which halves the
time of both. (SwiGLU gains nothing, bound by its exponentials.) GPUs and torch.compile see plain torch. Sums are in
fp32 or better, in a fixed order.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

STRIP_ELEMENTS = 2**17  # 512 KB in fp32: a few such tensors fit a core's second-level cache


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return _Norm.apply(x, weight, eps) if _on_cpu(x) else F.rms_norm(x, weight.shape, weight, eps)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [N, H, D] turned by angles [N, 1, D/2], at fp32 or better, in x's dtype."""
    if _on_cpu(x):
        return _Rotation.apply(x, cos, sin)
    left, right = x.chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1).to(x.dtype)


def _on_cpu(x: Tensor) -> bool:
    return x.device.type == "cpu" and not torch.compiler.is_compiling()


def _strips(*tensors: Tensor) -> Iterator[list[Tensor]]:
    """The tensors a few rows at a time."""
    rows = max(1, STRIP_ELEMENTS * len(tensors[0]) // max(1, tensors[0].numel()))
    return (list(strip) for strip in zip(*(x.split(rows) for x in tensors), strict=True))


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        flat, wide = x.reshape(-1, x.shape[-1]), torch.promote_types(x.dtype, torch.float32)
        out, inverse = torch.empty_like(flat), flat.new_empty(len(flat), 1, dtype=wide)
        for given, result, scale in _strips(flat, out, inverse):
            given = given.to(wide)
            torch.linalg.vector_norm(given, dim=-1, keepdim=True, out=scale)
            scale.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
            given = given * scale
            torch.mul(given, weight, out=result) if wide == x.dtype else result.copy_(given * weight)
        ctx.save_for_backward(x, weight, inverse)
        return out.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, inverse = ctx.saved_tensors
        flat, of_x = x.reshape(-1, x.shape[-1]), torch.empty_like(x).view(-1, x.shape[-1])
        of_weight, wide_weight = torch.zeros_like(weight, dtype=inverse.dtype), weight.to(inverse.dtype)
        for given, result, scale, upstream in _strips(flat, of_x, inverse, grad.reshape(flat.shape)):
            upstream, unit = upstream.to(inverse.dtype), given * scale
            product = unit * upstream
            of_weight += product.sum(0)
            along = torch.mv(product, wide_weight).div_(len(weight))[:, None]
            slope = torch.mul(upstream, wide_weight).addcmul_(unit, along, value=-1)
            torch.mul(slope, scale, out=result) if slope.dtype == x.dtype else result.copy_(slope * scale)
        return of_x.view_as(x), of_weight.to(weight.dtype), None


class _Rotation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turn(x, cos, sin)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _turn(grad, cos, -sin), None, None


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half, wide = x.shape[-1] // 2, torch.promote_types(x.dtype, cos.dtype)
    out, across = torch.empty(x.shape, dtype=x.dtype), torch.cat((cos, cos), dim=-1)
    for given, result, c, s in _strips(x, out, across, sin):
        given = given.to(wide)
        turned = torch.mul(given, c, out=result if wide == x.dtype else None)
        turned[..., :half].addcmul_(given[..., half:], s, value=-1)
        turned[..., half:].addcmul_(given[..., :half], s)
        if turned is not result:
            result.copy_(turned)
    return out
