"""What a run measures: numbers of a step's rollouts, of validation, of the trained tokens, and of memory.

    tokens = TokenMetrics(config.objective, runtime)
    tokens.add(logprob, entropy, old, advantage, rollout, reference)     every micro-batch; [M] each, no waiting
    tokens.reduce()                                                      once per step: one all-reduce, one copy

Token metrics are sums, maxima and a histogram: no per-token data leaves its device. Percentiles of the entropy come
from a histogram whose bins are the 65,536 bfloat16 numbers: a float32 belongs to the bin of its upper 16 bits. So there
is no range to choose, zeros and rounding noise below zero are covered, and a bin's middle is within 0.4% of its values.
"""

from __future__ import annotations

import math
import os
import statistics
from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from dccot.core.runtime import Runtime
from dccot.core.statistics import PERCENTILES, clustered_error, mean
from dccot.rollout.response import Finish, Rollout
from dccot.rollout.tags import OVERSHOOTS, Flaw, overshoots
from dccot.train.objectives import ObjectiveConfig, kl_k3, objective_of, ratio_of
from dccot.train.rewards import Graded

MAX_LOG_GAP = 20.0  # beyond this, exp is meaningless
_POLICY = ("policy/clip_fraction", "policy/ratio_mean", "policy/logprob", "policy/entropy")
MEANS = (*_POLICY, "gap/kl", "gap/fraction_over_2", "policy/kl")
MAXIMA = ("policy/ratio_max", "gap/max_abs_logprob", "gap/max_ratio", "entropy", "-entropy")
BINS = 2**16


def rollout_metrics(rollouts: Sequence[Graded]) -> dict[str, float]:
    """Reward, format, length and parallelism over all responses of a step."""
    responses = [r.response for r in rollouts]
    spawning = [r for r in responses if r.forks]
    workers = [length for r in spawning for lengths in r.worker_lengths for length in lengths]
    flaws = {f"format/{flaw.value}": mean([r.flaw == flaw for r in rollouts]) for flaw in Flaw}
    overshot = sum((overshoots(r.text) for r in rollouts), Counter())
    return {
        "reward/mean": mean([r.reward for r in rollouts if r.reward is not None]),
        "reward/correct": mean([r.correct for r in rollouts]),
        "reward/well_formed": mean([r.well_formed for r in rollouts]),
        "reward/unjudged": mean([not r.judged for r in rollouts]),
        "reward/unparsable": mean([r.verdict == "unparsable" for r in rollouts]),
        **flaws,
        **{f"format/overshoot_{kind}": overshot[kind] / max(1, len(rollouts)) for kind in OVERSHOOTS},
        "length/longest_path": mean([r.longest_path for r in responses]),
        "length/longest_path_correct": mean([r.response.longest_path for r in rollouts if r.correct]),
        "length/longest_path_incorrect": mean([r.response.longest_path for r in rollouts if not r.correct]),
        "length/total_tokens": mean([r.total_tokens for r in responses]),
        "length/truncated": mean([r.finish != Finish.ANSWERED for r in responses]),
        "parallel/degree": mean([r.parallelism for r in responses]),
        "parallel/rounds": mean([len(r.forks) for r in responses]),
        "parallel/spawn_rate": len(spawning) / max(1, len(responses)),
        "parallel/worker_length": mean(workers),
        "parallel/worker_length_max": float(max(workers, default=0)),
    }


def validation_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    by_problem: dict[str, list[Rollout]] = {}
    for rollout in rollouts:
        by_problem.setdefault(rollout.problem, []).append(rollout)
    correct = [[float(r.correct) for r in group] for group in by_problem.values()]
    length = [[float(r.response.longest_path) for r in group] for group in by_problem.values()]
    return {
        "validation/accuracy": mean([statistics.fmean(c) for c in correct]),
        "validation/accuracy_stderr": clustered_error(correct),
        "validation/longest_path": mean([statistics.fmean(n) for n in length]),
        "validation/longest_path_stderr": clustered_error(length),
        "validation/well_formed": mean([r.well_formed for r in rollouts]),
        "validation/parallelism": mean([r.response.parallelism for r in rollouts]),
        "validation/spawn_rate": mean([bool(r.response.forks) for r in rollouts]),
        "validation/truncated": mean([r.response.finish != Finish.ANSWERED for r in rollouts]),
    }


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
        far = (gap > 2) | (gap < 0.5)
        averaged = (torch.ones_like(ratio), clipped, ratio, logprob, entropy, gap - 1 - log_gap, far, kl)
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
        averaged = MEANS if self.with_reference else MEANS[:-1]
        metrics = {name: total / tokens for name, total in zip(averaged, totals)}
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
    middle = torch.tensor([number << 16 | 2**15 * (number % half > 0)], dtype=torch.int64)
    return min(max(float(middle.to(torch.int32).view(torch.float32)), least), most)


def memory_metrics(peaks: dict[str, int]) -> dict[str, float]:
    """Peak GPU memory of the step and of each phase; without a GPU, the process's current memory."""
    if peaks:
        by_phase = {f"memory/peak_{name}_gb": peak / 1e9 for name, peak in peaks.items() if name}
        return {"memory/peak_gb": max(peaks.values()) / 1e9, **by_phase}
    with open(f"/proc/{os.getpid()}/statm") as statm:
        return {"memory/resident_gb": int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e9}
