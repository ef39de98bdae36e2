"""Plain dense PyTorch of both kernels: the oracle for tests (in fp64) and the baseline for benchmarks.

attention   softmax(scale · q kᵀ + mask) v        with the whole N×N score matrix
log-prob    log_softmax(h Wᵀ / T)                 with the whole M×V logit matrix
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]  # q, k, v → output


def dense_mask(visible_until: Tensor) -> Tensor:
    """bool [N, N]: True where query (row) sees key (column)."""
    index = torch.arange(len(visible_until), device=visible_until.device)
    return (index[None, :] <= index[:, None]) & (index[:, None] < visible_until[None, :])


def dense_attention(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float) -> Tensor:
    """q [M, Hq, D], k and v [N, Hk, D], visible bool [M, N] → [M, Hq, D], in the inputs' own precision."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    weights = scores.masked_fill(~visible, -torch.inf).softmax(dim=-1)
    return torch.einsum("hqk,khd->qhd", weights, v)


def with_gradients(attend: Attend, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Output and gradients of q, k and v, for q, k, v and a gradient of the output."""
    given = [x.detach().requires_grad_() for x in tensors[:3]]
    with torch.enable_grad():
        out = attend(*given)
        return [out.detach(), *torch.autograd.grad(out, given, tensors[3])]


def attention_errors(
    visible_until: Tensor, tensors: Sequence[Tensor], scale: float, rounding: float = 1e-6
) -> Callable[[Attend], dict[str, float]]:
    """A function that tells how far attention over these tensors is from dense fp64, as shares of what is allowed:
    twice the error of dense PyTorch in the same precision, for gradients three times, plus `rounding` for trees so
    small that dense PyTorch makes none.
    """
    visible = dense_mask(visible_until)
    dense = lambda q, k, v: dense_attention(q, k, v, visible, scale)
    exact, rounded = with_gradients(dense, [x.double() for x in tensors]), with_gradients(dense, tensors)
    errors = lambda found: [float((a - x).abs().max()) for a, x in zip(found, exact, strict=True)]
    allowed = [factor * error + rounding for factor, error in zip((2, 3, 3, 3), errors(rounded), strict=True)]

    def shares(attend: Attend) -> dict[str, float]:
        found = errors(with_gradients(attend, tensors))
        return {part: a / b for part, a, b in zip(("out", "dq", "dk", "dv"), found, allowed, strict=True)}

    return shares


def dense_logprob(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """hidden [M, d], weight [V, d], targets [M] → log-prob and entropy [M], softmax in fp32 or better."""
    logits = hidden @ weight.T
    logprobs = (logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature).log_softmax(dim=-1)
    return logprobs.gather(-1, targets[:, None])[:, 0], -(logprobs.exp() * logprobs).sum(dim=-1)
