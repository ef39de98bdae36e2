"""What is maximised: GRPO, DAPO and CISPO per token, KL to the reference, and the correction for the rollout gap.

Everything is [M], one entry per sampled token; the caller divides sums by the number of sampled tokens of the whole
mini-batch over all ranks (token mean). r = π_θ / π_old, A the group-normalised advantage of the token's response.

    GRPO        −min(r·A, clip(r, 1−ε, 1+ε)·A)
    DAPO        −min(r·A, clip(r, 1−ε_low, 1+ε_high)·A), optionally bounded from below by −c·A where A < 0 (dual clip)
    CISPO       −sg[min(r, cap)] · A · log π_θ
    decoupled   sg[min(π_prox/π_rollout, cap)] · any of the above with π_old = π_prox
    KL          π_ref/π_θ − log(π_ref/π_θ) − 1      (k3)

π_prox are the weights that the step starts with, recomputed by the trainer; π_rollout is the policy that sampled the
token, as the engine reported it. Synchronous, the two differ by rounding; otherwise also by the steps between them.
`objective.old` chooses π_old: `recomputed` (π_prox) or `engine` (π_rollout). `rollout_correction` masks whole responses
whose ratio π_prox/π_rollout is off: no loss, but they count in the divisor, like responses of advantage 0.

Another objective is one entry of OBJECTIVES, or your own function: objective.kind=my_package.my_module:my_loss with the
arguments (config, logprob, old_logprob, advantage), or an `Objective` that also reports which tokens it clips.

>>> ratio, advantage = torch.tensor([0.5, 1.0, 2.0]), torch.tensor([1.0, 1.0, 1.0])
>>> dapo(ratio.log(), torch.zeros(3), advantage, clip_low=0.2, clip_high=0.28)  # a ratio of 2 is clipped at 1.28
tensor([-0.5000, -1.0000, -1.2800])
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from dccot.core.config import Fraction, NonNegativeFloat, PositiveFloat, known, lookup, require
from dccot.core.lazy import Lazy
from dccot.core.plugins import Plugin

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    torch = Lazy("torch")

MAX_LOG_RATIO = 20.0  # beyond this, exp is meaningless and overflows in products


Bound = Annotated[float, Field(gt=1)]


@dataclass
class RolloutCorrection:
    """Which responses carry no loss because trainer and engine disagree too much; None: not by this bound."""

    # mask a response if the geometric mean of its tokens' π_prox/π_rollout is outside [1/b, b]
    mean_ratio: Bound | None = None
    max_ratio: Bound | None = None  # mask a response if π_prox/π_rollout of any of its tokens is outside [1/b, b]


@dataclass
class ObjectiveConfig:
    kind: Annotated[str, known(OBJECTIVES)] = "dapo"  # grpo, dapo, cispo, or your own module:function
    clip_low: Fraction = 0.2  # ε_low: the ratio is clipped below 1 − clip_low
    clip_high: NonNegativeFloat = 0.28  # ε_high (DAPO): above 1 + clip_high
    # c of the dual clip for negative advantages (DAPO); the paper has none
    dual_clip: Bound | None = None
    ratio_cap: PositiveFloat = 5.0  # CISPO: absolute bound on the ratio
    # of the KL to the model that the stage started from; 0: no reference model
    kl_coefficient: NonNegativeFloat = 0.001
    # the ratio's denominator: recomputed by the trainer, or as the engine sampled; None: rollout.mode decides
    old: Literal["recomputed", "engine"] | None = None
    # truncated importance sampling for the rollout/trainer gap; the paper has none. None, if `old` is too: by mode
    rollout_ratio_cap: PositiveFloat | None = None
    rollout_correction: RolloutCorrection = field(default_factory=RolloutCorrection)

    def check(self) -> None:
        once = self.old != "engine" or self.rollout_ratio_cap is None
        remedy = "its ratio corrects for the rollout already: set one of them to null"
        require(once, f"objective.rollout_ratio_cap does not go with objective.old=engine; {remedy}")
        alone = self.dual_clip is None or self.kind == "dapo" or self.kind not in OBJECTIVES
        remedy = "set it to null or the kind to dapo"
        require(alone, f"objective.dual_clip does not go with objective.kind={self.kind}; {remedy}")


# rollout.mode → objective.old and rollout_ratio_cap, if neither is set; docs/method.md says why
BY_MODE: dict[str, tuple[Literal["recomputed", "engine"], float | None]] = {
    "synchronous": ("recomputed", None),
    "partial": ("recomputed", 2.0),
    "asynchronous": ("recomputed", 2.0),
}


def in_mode(config: ObjectiveConfig, mode: str) -> ObjectiveConfig:
    """The settings with what is left to `rollout.mode` filled in."""
    if config.old is not None:
        return config
    old, cap = BY_MODE[mode]
    return replace(config, old=old, rollout_ratio_cap=config.rollout_ratio_cap or cap)


def ratio_of(logprob: Tensor, old_logprob: Tensor) -> Tensor:
    return (logprob - old_logprob).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def dapo(
    logprob: Tensor,
    old_logprob: Tensor,
    advantage: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
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
    """Per-token CISPO loss. The ratio weights the gradient and carries none itself."""
    ratio = ratio_of(logprob.detach(), old_logprob)
    return -ratio.clamp(max=ratio_cap) * advantage * logprob


def decoupled(loss: Tensor, proximal_logprob: Tensor, rollout_logprob: Tensor, *, cap: float) -> Tensor:
    """A per-token loss around the proximal policy, weighted for having been sampled by another one."""
    return loss * ratio_of(proximal_logprob, rollout_logprob).clamp(max=cap).detach()


def trained_on(config: RolloutCorrection, log_ratio: Tensor, response: Tensor, responses: int) -> Tensor | None:
    """bool [M]: whether the token's response carries loss, given log(π_prox/π_rollout) and the response's index below
    `responses`; None: all do.
    """
    if config.mean_ratio is None and config.max_ratio is None:
        return None
    log_ratio, response = log_ratio.detach().double(), response.long()
    zeros = torch.zeros(responses, dtype=torch.float64, device=log_ratio.device)
    near = torch.ones_like(zeros, dtype=torch.bool)
    if config.mean_ratio is not None:
        tokens = zeros.index_add(0, response, torch.ones_like(log_ratio)).clamp(min=1)
        near &= (zeros.index_add(0, response, log_ratio) / tokens).abs() <= math.log(config.mean_ratio)
    if config.max_ratio is not None:
        near &= zeros.scatter_reduce(0, response, log_ratio.abs(), "amax") <= math.log(config.max_ratio)
    return near[response]


def kl_k3(logprob: Tensor, reference_logprob: Tensor) -> Tensor:
    """Per-token estimate of KL(π_θ ‖ π_ref): never negative, zero where the two agree."""
    log_ratio = (reference_logprob - logprob).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return log_ratio.exp() - log_ratio - 1


def outside(
    logprob: Tensor,
    old_logprob: Tensor,
    advantage: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> Tensor:
    """bool [M]: where the clip of GRPO and DAPO zeroed the token's gradient."""
    ratio, too_high = ratio_of(logprob, old_logprob), math.inf if dual_clip is None else dual_clip
    lowered = (ratio < 1 - clip_low) | (ratio > too_high)
    return ((advantage > 0) & (ratio > 1 + clip_high)) | ((advantage < 0) & lowered)


def nowhere(config: ObjectiveConfig, logprob: Tensor, old_logprob: Tensor, advantage: Tensor) -> Tensor:
    return torch.zeros_like(logprob, dtype=torch.bool)


# (config, logprob, old logprob, advantage) → [M]
OfTokens = Callable[[ObjectiveConfig, "Tensor", "Tensor", "Tensor"], "Tensor"]


@dataclass(frozen=True)
class Objective:
    loss: OfTokens
    clipped: OfTokens = nowhere  # bool: where a bound zeroed the token's gradient or limited its weight

    def __call__(self, config: ObjectiveConfig, logprob: Tensor, old_logprob: Tensor, advantage: Tensor) -> Tensor:
        return self.loss(config, logprob, old_logprob, advantage)


def _clips(config: ObjectiveConfig) -> dict[str, Any]:
    return {"clip_low": config.clip_low, "clip_high": config.clip_high, "dual_clip": config.dual_clip}


OBJECTIVES: dict[str, OfTokens] = {
    "grpo": Objective(
        lambda config, *tokens: grpo(*tokens, clip=config.clip_low),
        lambda config, *tokens: outside(*tokens, clip_low=config.clip_low, clip_high=config.clip_low),
    ),
    "dapo": Objective(
        lambda config, *tokens: dapo(*tokens, **_clips(config)),
        lambda config, *tokens: outside(*tokens, **_clips(config)),
    ),
    "cispo": Objective(
        lambda config, *tokens: cispo(*tokens, ratio_cap=config.ratio_cap),
        lambda config, logprob, old_logprob, _: ratio_of(logprob, old_logprob) > config.ratio_cap,
    ),
}


def objective_of(config: ObjectiveConfig) -> Objective:
    found = lookup(OBJECTIVES, config.kind, "objective.kind")
    return found if isinstance(found, Objective) else Objective(found)


def objective_loss(
    config: ObjectiveConfig,
    logprob: Tensor,
    proximal_logprob: Tensor,
    advantage: Tensor,
    rollout_logprob: Tensor,
    reference_logprob: Tensor | None,
    trained: Tensor | None = None,
) -> Tensor:
    """Per-token loss in full: policy term, corrected for the rollout gap if so configured, plus KL to the reference;
    0 where not `trained`.
    """
    old = rollout_logprob if config.old == "engine" else proximal_logprob
    objective, on = Plugin("objective", objective_of(config).loss), f"{len(logprob):,} tokens"
    loss = objective(config, logprob, old, advantage, on=on)
    if not isinstance(loss, torch.Tensor) or loss.shape != logprob.shape:
        raise objective.refused(getattr(loss, "shape", loss), f"one loss per token, {tuple(logprob.shape)}", on)
    if config.rollout_ratio_cap is not None:
        loss = decoupled(loss, proximal_logprob, rollout_logprob, cap=config.rollout_ratio_cap)
    if reference_logprob is not None and config.kl_coefficient:
        loss = loss + config.kl_coefficient * kl_k3(logprob, reference_logprob)
    return loss if trained is None else torch.where(trained, loss, 0.0)
