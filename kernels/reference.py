"""Plain dense PyTorch of both kernels: the oracle for tests (in fp64) and the baseline for benchmarks.

attention   softmax(scale · q kᵀ + mask) v        with the whole N×N score matrix
log-prob    log_softmax(h Wᵀ / T)                 with the whole M×V logit matrix
"""

from __future__ import annotations

import torch
from torch import Tensor


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


def dense_logprob(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """hidden [M, d], weight [V, d], targets [M] → log-prob and entropy [M], softmax in fp32 or better."""
    logits = hidden @ weight.T
    logprobs = (logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature).log_softmax(dim=-1)
    return logprobs.gather(-1, targets[:, None])[:, 0], -(logprobs.exp() * logprobs).sum(dim=-1)
