"""Rotary position embedding with the scalings that qwen2, qwen3 and llama checkpoints use.

Pair i of a head (elements i and i + D/2) turns by the angle position · ω_i, with ω_i = θ^(−2i/D). To extend the context
beyond pre-training, checkpoints slow some pairs down:

    linear    ω_i / s
    llama3    ω_i / s where a wave is longer than L/low, ω_i where it is shorter than L/high, a blend of both in between
    yarn      the same idea, a ramp over i between `beta_fast` and `beta_slow` turns within L; cos and sin grow by
              `attention_factor`

Frequencies are computed, never loaded, on the CPU in fp32: a difference in the last bit of ω is a visible angle at
position 30,000, and this is how transformers and vLLM compute them. They are not a module buffer, so neither
`.to(bfloat16)` nor `to_empty` can spoil them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch
from torch import Tensor

from dccot.model.config import RopeConfig


@functools.cache
def inverse_frequencies(rope: RopeConfig, head_dim: int, device: torch.device) -> Tensor:
    """fp32 [D/2]: the angle by which each pair of a head turns per position."""
    period = rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim)
    return SCALINGS[rope.type](period, rope).to(device)


def _llama3(period: Tensor, rope: RopeConfig) -> Tensor:
    frequency = 1.0 / period
    turns = rope.original_max_position / (2 * math.pi / frequency)  # of the pair within the original length
    fast = ((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0, 1)
    return (1 - fast) * frequency / rope.factor + fast * frequency


def _yarn(period: Tensor, rope: RopeConfig) -> Tensor:
    pairs = len(period)

    def pair_that_turns(times: float) -> float:
        return pairs * math.log(rope.original_max_position / (times * 2 * math.pi)) / math.log(rope.theta)

    low, high = pair_that_turns(rope.beta_fast), pair_that_turns(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * pairs - 1)
    ramp = (torch.arange(pairs, dtype=torch.float32, device="cpu") - low) / ((high - low) or 0.001)
    fast = 1 - ramp.clamp(0, 1)
    return 1.0 / (rope.factor * period) * (1 - fast) + 1.0 / period * fast


SCALINGS: dict[str, Callable[[Tensor, RopeConfig], Tensor]] = {
    "default": lambda period, rope: 1.0 / period,
    "linear": lambda period, rope: 1.0 / period / rope.factor,
    "llama3": _llama3,
    "yarn": _yarn,
}


@torch.no_grad()
def cos_sin(
    position: Tensor, rope: RopeConfig, head_dim: int, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """fp32 [N, 1, D/2] each, rounded to `dtype`: vLLM and transformers keep theirs in the model's precision.

    Computed once per forward, shared by all layers and heads.
    """
    angle = position[:, None, None].float() * inverse_frequencies(rope, head_dim, position.device)
    cos, sin = angle.cos() * rope.attention_factor, angle.sin() * rope.attention_factor
    return cos.to(dtype).float(), sin.to(dtype).float()
