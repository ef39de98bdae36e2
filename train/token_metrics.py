"""Per-token metrics of the policy over a step, as sums, maxima and a histogram: no per-token data leaves its device.

    tokens = TokenMetrics(config.objective, runtime)
    tokens.add(logprob, entropy, old, advantage, rollout, reference)     every micro-batch; [M] each, no synchronisation with the device
    tokens.reduce()                                                      once per step: one all-reduce, one copy to the host

Percentiles of the entropy come from a histogram whose bins are the 65,536 bfloat16 numbers: a float32 belongs to the
bin of its upper 16 bits. So there is no range to choose, zeros and rounding noise below zero are covered, and a bin's
middle is within 0.4% of its values.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dccot.core.runtime import Runtime
from dccot.core.statistics import PERCENTILES
from dccot.train.objectives import ObjectiveConfig, kl_k3, objective_of, ratio_of

MAX_LOG_GAP = 20.0  # beyond this, exp is meaningless
MEANS = (
    "policy/clip_fraction",
    "policy/ratio_mean",
    "policy/logprob",
    "policy/entropy",
    "gap/kl",
    "gap/fraction_over_2",
    "policy/kl",
)
MAXIMA = ("policy/ratio_max", "gap/max_abs_logprob", "gap/max_ratio", "entropy", "-entropy")
BINS = 2**16


class TokenMetrics:
    """Of all tokens trained on in a step, over all ranks."""

    def __init__(self, config: ObjectiveConfig, runtime: Runtime):
        self.config, self.objective, self.runtime = config, objective_of(config), runtime
        self.with_reference = False
        self.sums = torch.zeros(1 + len(MEANS), dtype=torch.float64, device=runtime.device)  # the first counts tokens
        self.maxima = torch.full((len(MAXIMA),), -math.inf, dtype=torch.float64, device=runtime.device)
        self.histogram = torch.zeros(BINS, dtype=torch.int64, device=runtime.device)

    @torch.no_grad()
    def add(
        self,
        logprob: Tensor,
        entropy: Tensor,
        old: Tensor,
        advantage: Tensor,
        rollout: Tensor,
        reference: Tensor | None,
    ) -> None:
        self.with_reference = reference is not None
        if not len(logprob):
            return
        logprob, entropy, old = logprob.float(), entropy.float(), old.float()
        ratio, log_gap = ratio_of(logprob, old), (old - rollout).double()
        gap = log_gap.clamp(-MAX_LOG_GAP, MAX_LOG_GAP).exp()
        kl = kl_k3(logprob, reference.float()) if reference is not None else torch.zeros_like(logprob)
        clipped = self.objective.clipped(self.config, logprob, old, advantage)
        averaged = (
            torch.ones_like(ratio),
            clipped,
            ratio,
            logprob,
            entropy,
            gap - 1 - log_gap,
            (gap > 2) | (gap < 0.5),
            kl,
        )
        self.sums += torch.stack([values.double().sum() for values in averaged])
        bounded = (ratio, log_gap.abs(), gap, entropy, -entropy)
        self.maxima = torch.maximum(self.maxima, torch.stack([values.double().max() for values in bounded]))
        count_bins(self.histogram, entropy)

    def reduce(self) -> dict[str, float]:
        """The step's metrics, the same on every rank; empty if no token was trained on."""
        by_rank = self.maxima.new_zeros(self.runtime.ranks, len(MAXIMA))
        by_rank[self.runtime.rank] = self.maxima  # others add zeros, so a sum also merges maxima
        together = self.runtime.sum(torch.cat([self.sums, self.histogram.double(), by_rank.flatten()])).cpu()
        sums, counts, flat = together.split([len(self.sums), BINS, by_rank.numel()])
        tokens, *totals = sums.tolist()
        if not tokens:
            return {}
        largest = dict(zip(MAXIMA, flat.view_as(by_rank).max(0).values.tolist()))
        metrics = {
            name: total / tokens for name, total in zip(MEANS, totals) if name != "policy/kl" or self.with_reference
        }
        metrics |= {name: value for name, value in largest.items() if "/" in name}
        least, most = -largest["-entropy"], largest["entropy"]
        return metrics | {f"policy/entropy_p{p}": percentile(counts, p, least, most) for p in PERCENTILES}


def count_bins(histogram: Tensor, values: Tensor) -> None:
    """Add float32 values [M] to the histogram, on its device."""
    bins = (values.contiguous().view(torch.int32).long() >> 16) & (BINS - 1)
    histogram.index_add_(0, bins, torch.ones_like(bins))


def percentile(counts: Tensor, percent: float, least: float, most: float) -> float:
    """The smallest value that at least `percent`% of the values do not exceed, to 0.4%; exact at both ends."""
    half = BINS // 2  # from here on the sign bit is set: the larger the bin's number, the smaller its values
    ascending = torch.cat([torch.arange(BINS - 1, half - 1, -1), torch.arange(half)])
    below = counts[ascending].cumsum(0)
    wanted = math.ceil(percent / 100 * float(below[-1]))
    if wanted >= below[-1]:
        return most
    number = int(ascending[int(torch.searchsorted(below, wanted))])
    middle = (
        torch.tensor([number << 16 | 2**15 * (number % half > 0)], dtype=torch.int64)
        .to(torch.int32)
        .view(torch.float32)
    )
    return min(max(float(middle), least), most)
