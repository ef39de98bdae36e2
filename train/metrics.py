"""What a run measures: numbers of a step's rollouts, of validation, of the trained tokens, and of memory.

    tokens = TokenMetrics(objective, runtime)
    tokens.add(logprob, entropy, proximal, advantage, rollout, …)     every micro-batch; [M] each, no waiting
    tokens.reduce()                                                   once per step: one all-reduce, one copy

Token metrics are sums, maxima and a histogram: no per-token data leaves its device. Percentiles of the entropy come
from a histogram whose bins are the 65,536 bfloat16 numbers: a float32 belongs to the bin of its upper 16 bits. So there
is no range to choose, zeros and rounding noise below zero are covered, and a bin's middle is within 0.4% of its values.

How far trainer and rollout are apart, with w = π_prox/π_rollout at tokens that the rollout sampled; in brackets verl's
names (rollout_corr/…) for the same:

    gap/mean_abs_logprob, max_abs_logprob, max_ratio   |log w|, w
    gap/kl_k1 [kl], gap/kl [k3_kl]                     KL(rollout ‖ trainer):  −log w,    w − 1 − log w
    gap/reverse_kl_k1, gap/reverse_kl                  KL(trainer ‖ rollout):  w log w,   w log w − w + 1
    gap/perplexity_ratio [ppl_ratio]                   trainer's perplexity over the rollout's
    gap/effective_sample_size [rollout_is_eff_…]       (Σw)² / (M Σw²) of the weights as used: capped, 0 if masked
    gap/truncated, gap/masked                          share of tokens whose w is capped; in masked responses
    gap/lag_3_tokens, gap/lag_3_kl, …                  of tokens sampled 3 versions ago: share, and the above

With `objective.old: engine`, π_prox of the second and later updates of a step is not computed: the updated policy takes
its place in these metrics and in `rollout_correction`.
"""

from __future__ import annotations

import math
import os
import statistics
from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from dccot.core.plugins import Plugin
from dccot.core.runtime import Runtime
from dccot.core.statistics import PERCENTILES, clustered_error, mean
from dccot.rollout.response import Finish, Rollout
from dccot.rollout.tags import OVERSHOOTS, Flaw, overshoots
from dccot.train.objectives import ObjectiveConfig, RolloutCorrection, kl_k3, objective_of, ratio_of
from dccot.train.rewards import Graded, Group, Outline, sampled_by

MAX_LOG_GAP = 20.0  # beyond this, exp is meaningless
_POLICY = ("policy/clip_fraction", "policy/ratio_mean", "policy/logprob", "policy/entropy")
_GAP = ("gap/kl", "gap/fraction_over_2", "gap/mean_abs_logprob", "gap/kl_k1", "gap/reverse_kl", "gap/reverse_kl_k1")
MEANS = (*_POLICY, *_GAP, "gap/truncated", "gap/masked", "policy/kl", "weight", "weight²")
MAXIMA = ("policy/ratio_max", "gap/max_abs_logprob", "gap/max_ratio", "entropy", "-entropy")
LAGS = 8  # tokens at least this many versions old, less one, are counted together
BINS = 2**16


def rollout_metrics(rollouts: Sequence[Graded]) -> dict[str, float]:
    """Reward, format, length and parallelism over all responses of a step."""
    responses = [r.response for r in rollouts]
    spawning = [r for r in responses if r.forks]
    forks = [lengths for r in spawning for lengths in r.worker_lengths]
    workers, savings = [length for fork in forks for length in fork], [each for r in spawning for each in r.savings()]
    flaws = {f"format/{flaw.value}": mean([r.flaw == flaw for r in rollouts]) for flaw in Flaw}
    overshot = sum((r.overshot if isinstance(r, Outline) else overshoots(r.text) for r in rollouts), Counter())
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
        "parallel/width": mean([len(fork) for fork in forks]),
        "parallel/width_max": float(max(map(len, forks), default=0)),
        "parallel/depth": mean([r.depth for r in responses]),
        "parallel/paid_off": mean([saved > 0 for saved in savings]),
        "parallel/saved": mean(savings),
        "parallel/worker_length": mean(workers),
        "parallel/worker_length_max": float(max(workers, default=0)),
    }


def staleness_metrics(groups: Sequence[Group], step: int, most: int) -> dict[str, float]:
    """How many versions old the tokens are that a step trains on, none more than `most`."""
    lags: Counter[int] = Counter()
    for graded in (graded for group in groups for graded in group):
        versions = sampled_by(graded)
        lags.update({step - version: count for version, count in versions.items()})
        lags[0] += graded.response.sampled_tokens - versions.total()
    tokens = max(1, lags.total())
    return {
        "staleness/mean": sum(lag * count for lag, count in lags.items()) / tokens,
        "staleness/max": float(max((lag for lag, count in lags.items() if count), default=0)),
        **{f"staleness/tokens_{lag}_old": lags[lag] / tokens for lag in range(most + 1)},
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
        self.absent = {"weight", "weight²"}  # means that are not metrics of their own
        self.absent |= {"gap/truncated"} if config.rollout_ratio_cap is None else set()
        self.absent |= {"gap/masked"} if config.rollout_correction == RolloutCorrection() else set()
        # by how many versions ago tokens were sampled, the last row unknown; the first column counts tokens
        self.sums = torch.zeros(LAGS + 1, 1 + len(MEANS), dtype=torch.float64, device=runtime.device)
        self.maxima = torch.full((len(MAXIMA),), -math.inf, dtype=torch.float64, device=runtime.device)
        self.histogram = torch.zeros(BINS, dtype=torch.int64, device=runtime.device)
        self.lag_maxima = torch.zeros(LAGS + 1, dtype=torch.float64, device=runtime.device)

    @torch.no_grad()
    def add(
        self,
        logprob: Tensor,
        entropy: Tensor,
        proximal: Tensor,
        advantage: Tensor,
        rollout: Tensor,
        reference: Tensor | None,
        trained: Tensor | None = None,
        lag: Tensor | None = None,
    ) -> None:
        if reference is None:
            self.absent.add("policy/kl")
        if not len(logprob):
            return
        logprob, entropy, proximal = logprob.float(), entropy.float(), proximal.float()
        old, log_gap = rollout if self.config.old == "engine" else proximal, (proximal - rollout).double()
        ratio, gap = ratio_of(logprob, old), log_gap.clamp(-MAX_LOG_GAP, MAX_LOG_GAP).exp()
        kl = kl_k3(logprob, reference.float()) if reference is not None else torch.zeros_like(logprob)
        plugin, on = Plugin("objective", self.objective.clipped), f"{len(logprob):,} tokens"
        clipped = plugin(self.config, logprob, old, advantage, on=on)
        far, gap_kl, reverse = (gap > 2) | (gap < 0.5), gap - 1 - log_gap, gap * log_gap
        cap, masked = self.config.rollout_ratio_cap or math.inf, torch.zeros_like(far) if trained is None else ~trained
        weight = torch.where(masked, 0.0, gap.clamp(max=cap))
        averaged = [torch.ones_like(ratio), clipped, ratio, logprob, entropy]
        averaged += [gap_kl, far, log_gap.abs(), -log_gap, reverse - gap + 1, reverse]
        averaged += [gap > cap, masked, kl, weight, weight.square()]
        lag = torch.full_like(far, -1, dtype=torch.int32) if lag is None else lag
        row = torch.where(lag < 0, LAGS, lag.clamp(max=LAGS - 1)).long()
        self.sums.index_add_(0, row, torch.stack([values.double() for values in averaged], 1))
        self.lag_maxima.scatter_reduce_(0, row, log_gap.abs(), "amax")
        bounded = (ratio, log_gap.abs(), gap, entropy, -entropy)
        self.maxima = torch.maximum(self.maxima, torch.stack([values.double().max() for values in bounded]))
        count_bins(self.histogram, entropy)

    def reduce(self) -> dict[str, float]:
        """The step's metrics, the same on every rank; empty if no token was trained on."""
        maxima = torch.cat([self.maxima, self.lag_maxima])
        by_rank = maxima.new_zeros(self.runtime.ranks, len(maxima))
        by_rank[self.runtime.rank] = maxima  # others add zeros, so a sum also merges maxima
        parts = [self.sums.flatten(), self.histogram.double(), by_rank.flatten()]
        together = self.runtime.sum(torch.cat(parts)).cpu()
        sums, counts, flat = together.split([len(part) for part in parts])
        by_lag = sums.view_as(self.sums)
        if not (tokens := float(by_lag[:, 0].sum())):
            return {}
        most_of = flat.view_as(by_rank).max(0).values.tolist()
        largest = dict(zip(MAXIMA, most_of))
        metrics = self._means(by_lag.sum(0))
        metrics |= {name: value for name, value in largest.items() if "/" in name}
        for lag in by_lag[:LAGS, 0].nonzero().flatten().tolist():
            found = {name: value for name, value in self._means(by_lag[lag]).items() if name.startswith("gap/")}
            found |= {"gap/tokens": float(by_lag[lag, 0]) / tokens, "gap/max_abs_logprob": most_of[len(MAXIMA) + lag]}
            metrics |= {name.replace("/", f"/lag_{lag}_"): value for name, value in found.items()}
        least, most = -largest["-entropy"], largest["entropy"]
        return metrics | {f"policy/entropy_p{p}": percentile(counts, p, least, most) for p in PERCENTILES}

    def _means(self, sums: Tensor) -> dict[str, float]:
        tokens, *totals = sums.tolist()
        means = {name: total / tokens for name, total in zip(MEANS, totals)}
        metrics = {name: value for name, value in means.items() if name not in self.absent}
        metrics["gap/perplexity_ratio"] = math.exp(min(means["gap/kl_k1"], MAX_LOG_GAP))
        metrics["gap/effective_sample_size"] = means["weight"] ** 2 / means["weight²"] if means["weight²"] else 0.0
        return metrics


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
