"""What is maximised: GRPO, DAPO and CISPO per token, KL to the reference, and the correction for the rollout gap.

Everything is [M], one entry per sampled token; the caller divides sums by the number of sampled tokens of the whole mini-batch
over all ranks (token mean). r = π_θ / π_old, A the group-normalised advantage of the token's response.

    GRPO    −min(r·A, clip(r, 1−ε, 1+ε)·A)
    DAPO    −min(r·A, clip(r, 1−ε_low, 1+ε_high)·A), optionally bounded from below by −c·A where A < 0 (dual clip)
    CISPO   −sg[min(r, cap)] · A · log π_θ
    KL      π_ref/π_θ − log(π_ref/π_θ) − 1      (k3)

>>> ratio, advantage = torch.tensor([0.5, 1.0, 2.0]), torch.tensor([1.0, 1.0, 1.0])
>>> dapo(ratio.log(), torch.zeros(3), advantage, clip_low=0.2, clip_high=0.28)  # a ratio of 2 is clipped at 1.28
tensor([-0.5000, -1.0000, -1.2800])
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from dccot.config import one_of, require

MAX_LOG_RATIO = 20.0  # exp of more than this says nothing and overflows in products


@dataclass
class ObjectiveConfig:
    kind: str = "dapo"  # grpo, dapo or cispo
    clip_low: float = 0.2
    clip_high: float = 0.28
    dual_clip: float | None = None  # c of the dual clip for negative advantages (DAPO); the paper has none
    ratio_cap: float = 5.0  # CISPO: absolute bound on the ratio
    kl_coefficient: float = 0.001
    rollout_ratio_cap: float | None = None  # truncated importance sampling for the rollout/trainer gap; the paper has none

    def check(self) -> None:
        one_of(self.kind, ("grpo", "dapo", "cispo"), "objective.kind")
        require(0 <= self.clip_low < 1, f"objective.clip_low is {self.clip_low}; it must be in [0, 1)")
        require(self.clip_high >= 0, f"objective.clip_high is {self.clip_high}; it must not be negative")
        require(self.dual_clip is None or self.dual_clip > 1, f"objective.dual_clip is {self.dual_clip}; it must be above 1, or null")
        alone = self.dual_clip is None or self.kind == "dapo"
        require(alone, f"objective.dual_clip does not go with objective.kind={self.kind}; set it to null or the kind to dapo")
        require(self.kl_coefficient >= 0, f"objective.kl_coefficient is {self.kl_coefficient}; it must not be negative")
        require(self.ratio_cap > 0, f"objective.ratio_cap is {self.ratio_cap}; it must be positive")
        cap = self.rollout_ratio_cap
        require(cap is None or cap > 0, f"objective.rollout_ratio_cap is {cap}; it must be positive, or null")


def ratio_of(logprob: Tensor, old_logprob: Tensor) -> Tensor:
    return (logprob - old_logprob).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def dapo(
    logprob: Tensor, old_logprob: Tensor, advantage: Tensor, *, clip_low: float, clip_high: float, dual_clip: float | None = None
) -> Tensor:
    """Per-token DAPO loss."""
    ratio = ratio_of(logprob, old_logprob)
    surrogate = torch.minimum(ratio * advantage, ratio.clamp(1 - clip_low, 1 + clip_high) * advantage)
    if dual_clip is not None:
        surrogate = torch.where(advantage < 0, torch.maximum(surrogate, dual_clip * advantage), surrogate)
    return -surrogate


def grpo(logprob: Tensor, old_logprob: Tensor, advantage: Tensor, *, clip: float) -> Tensor:
    """Per-token GRPO loss: the symmetric clip."""
    return dapo(logprob, old_logprob, advantage, clip_low=clip, clip_high=clip)


def cispo(logprob: Tensor, old_logprob: Tensor, advantage: Tensor, *, ratio_cap: float) -> Tensor:
    """Per-token CISPO loss. The ratio weighs the gradient and carries none itself."""
    ratio = ratio_of(logprob.detach(), old_logprob)
    return -ratio.clamp(max=ratio_cap) * advantage * logprob


def kl_k3(logprob: Tensor, reference_logprob: Tensor) -> Tensor:
    """Per-token estimate of KL(π_θ ‖ π_ref): never negative, zero where the two agree."""
    log_ratio = (reference_logprob - logprob).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return log_ratio.exp() - log_ratio - 1


def policy_loss(config: ObjectiveConfig, logprob: Tensor, old_logprob: Tensor, advantage: Tensor) -> Tensor:
    """Per-token loss of the chosen objective, without KL."""
    if config.kind == "cispo":
        return cispo(logprob, old_logprob, advantage, ratio_cap=config.ratio_cap)
    if config.kind == "grpo":
        return grpo(logprob, old_logprob, advantage, clip=config.clip_low)
    return dapo(logprob, old_logprob, advantage, clip_low=config.clip_low, clip_high=config.clip_high, dual_clip=config.dual_clip)


def objective_loss(
    config: ObjectiveConfig,
    logprob: Tensor,
    old_logprob: Tensor,
    advantage: Tensor,
    rollout_logprob: Tensor,
    reference_logprob: Tensor | None,
) -> Tensor:
    """Per-token loss in full: policy term (corrected for the rollout gap if asked for) plus KL to the reference."""
    loss = policy_loss(config, logprob, old_logprob, advantage)
    if config.rollout_ratio_cap is not None:
        loss = loss * ratio_of(old_logprob, rollout_logprob).clamp(max=config.rollout_ratio_cap)
    if reference_logprob is not None and config.kl_coefficient:
        loss = loss + config.kl_coefficient * kl_k3(logprob, reference_logprob)
    return loss


def clipped(config: ObjectiveConfig, logprob: Tensor, old_logprob: Tensor, advantage: Tensor) -> Tensor:
    """bool [M]: where the bound took the token's gradient away (GRPO, DAPO) or limited its weight (CISPO)."""
    ratio = ratio_of(logprob, old_logprob)
    if config.kind == "cispo":
        return ratio > config.ratio_cap
    high = config.clip_low if config.kind == "grpo" else config.clip_high
    too_high = math.inf if config.dual_clip is None else config.dual_clip
    return ((advantage > 0) & (ratio > 1 + high)) | ((advantage < 0) & ((ratio < 1 - config.clip_low) | (ratio > too_high)))
