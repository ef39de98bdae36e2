"""Advantage of a response within its group.

    std    (R − mean) / (std + 1e-6), unbiased std: the paper's
    none   R − mean: a group's weight grows with the spread of its rewards

A group with equal rewards carries no signal: zeros. A response without a reward (the grader could not judge it) gets
zero and is excluded from mean and std.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from dccot.core.config import one_of

EPSILON = 1e-6


@dataclass
class AdvantageConfig:
    normalise: str = "std"  # what the centred reward is divided by: std or none

    def check(self) -> None:
        one_of(self.normalise, ("std", "none"), "advantage.normalise")


def group_advantages(rewards: Sequence[float | None], config: AdvantageConfig | None = None) -> list[float]:
    known = [reward for reward in rewards if reward is not None]
    spread = statistics.stdev(known) if len(known) > 1 else 0.0
    if spread == 0.0:
        return [0.0] * len(rewards)
    mean = statistics.fmean(known)
    scale = spread + EPSILON if (config or AdvantageConfig()).normalise == "std" else 1.0
    return [0.0 if reward is None else (reward - mean) / scale for reward in rewards]
