"""The reward of a response.

    penalty  ℓ = C_L · (LPL − L_cutoff) / (L_max − L_cutoff)   above the cutoff, else 0

    correctness-format    max(0, f − ℓ),  f = 1 correct and well-formed, `correct_only` (0.5) correct only, else 0
    high-length-penalty   1 − ℓ correct and well-formed, `correct_only` (0.01) correct only, else 0

DeepScaleR's rule for the sequential baselines is the second with `correct_only` = 0, where well-formed means
`<think>…</think>` with an answer after it; there, only what follows `</think>` is graded (collect.py). An answer that
the grader could not judge (timed out, crashed) has no reward at all: None.

Another reward is one entry of REWARDS, or your own function: reward.kind=my_package.my_module:my_reward with the
arguments (rollout, config, budget), called for rollouts that were judged.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dccot.core.config import named, require
from dccot.rollout.response import Rollout


@dataclass
class RewardConfig:
    kind: str = "correctness_format"  # high_length_penalty, or your own module:function
    correct_only: float = 0.5  # correct but ill-formed
    length_penalty: float = 0.1  # C_L
    cutoff: int = 2000  # L_cutoff

    def check(self) -> None:
        named(REWARDS, self.kind, "reward.kind")
        require(0 <= self.correct_only <= 1, f"reward.correct_only is {self.correct_only}; it must be in [0, 1]")
        require(0 <= self.length_penalty <= 1, f"reward.length_penalty is {self.length_penalty}; it must be in [0, 1]")
        require(self.cutoff >= 0, f"reward.cutoff is {self.cutoff}; it must not be negative")


def length_penalty(longest_path: int, config: RewardConfig, budget: int) -> float:
    """ℓ of a response with this longest path; `budget` is L_max."""
    return config.length_penalty * max(0, longest_path - config.cutoff) / (budget - config.cutoff)


def correctness_format(rollout: Rollout, config: RewardConfig, budget: int) -> float:
    if not rollout.correct:
        return 0.0
    return max(
        0.0,
        (1.0 if rollout.well_formed else config.correct_only)
        - length_penalty(rollout.response.longest_path, config, budget),
    )


def high_length_penalty(rollout: Rollout, config: RewardConfig, budget: int) -> float:
    if not rollout.correct:
        return 0.0
    return (
        1.0 - length_penalty(rollout.response.longest_path, config, budget)
        if rollout.well_formed
        else config.correct_only
    )


REWARDS: dict[str, Callable[[Rollout, RewardConfig, int], float]] = {
    "correctness_format": correctness_format,
    "high_length_penalty": high_length_penalty,
}


def reward_of(rollout: Rollout, config: RewardConfig, budget: int) -> float | None:
    """The reward of a graded rollout; None if the grader could not judge it. `budget` is L_max."""
    if rollout.verdict is None:
        raise ValueError(f"rollout {rollout.sample} of problem {rollout.problem} has not been graded")
    return named(REWARDS, config.kind, "reward.kind")(rollout, config, budget) if rollout.judged else None
