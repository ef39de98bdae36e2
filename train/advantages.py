"""Advantage of a response within its group: (R − mean) / (std + 1e-6), unbiased std.

A group whose rewards do not differ teaches nothing: zeros. A response without a reward (the grader could not judge it) gets zero and
is left out of mean and std.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

EPSILON = 1e-6


def group_advantages(rewards: Sequence[float | None]) -> list[float]:
    known = [reward for reward in rewards if reward is not None]
    spread = statistics.stdev(known) if len(known) > 1 else 0.0
    if spread == 0.0:
        return [0.0] * len(rewards)
    mean = statistics.fmean(known)
    return [0.0 if reward is None else (reward - mean) / (spread + EPSILON) for reward in rewards]
