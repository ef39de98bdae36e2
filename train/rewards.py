"""What a response is worth.

    penalty  ℓ = C_L · (LPL − L_cutoff) / (L_max − L_cutoff)   above the cutoff, else 0

    correctness-format    max(0, f − ℓ),  f = 1 correct and well-formed, `correct_only` (0.5) correct only, else 0
    high-length-penalty   1 − ℓ correct and well-formed, `correct_only` (0.01) correct only, else 0

DeepScaleR's rule for the sequential baselines is the second with `correct_only` = 0, where well-formed means `<think>…</think>` with
an answer behind it. An answer that the grader could not judge (timed out, crashed) has no reward at all: None.
"""

from __future__ import annotations

from dataclasses import dataclass

from dccot.config import one_of, require
from dccot.rollout.response import Rollout


@dataclass
class RewardConfig:
    kind: str = "correctness_format"  # or high_length_penalty
    correct_only: float = 0.5  # correct but ill-formed
    length_penalty: float = 0.1  # C_L
    cutoff: int = 2000  # L_cutoff

    def check(self) -> None:
        one_of(self.kind, ("correctness_format", "high_length_penalty"), "reward.kind")
        require(0 <= self.correct_only <= 1, f"reward.correct_only is {self.correct_only}; it must be in [0, 1]")
        require(0 <= self.length_penalty <= 1, f"reward.length_penalty is {self.length_penalty}; it must be in [0, 1]")
        require(self.cutoff >= 0, f"reward.cutoff is {self.cutoff}; it must not be negative")


def length_penalty(longest_path: int, config: RewardConfig, budget: int) -> float:
    """ℓ of a response with this longest path; `budget` is L_max."""
    return config.length_penalty * max(0, longest_path - config.cutoff) / (budget - config.cutoff)


def reward_of(rollout: Rollout, config: RewardConfig, budget: int) -> float | None:
    """The reward of a graded rollout; None where the grader could not judge it."""
    if rollout.verdict is None:
        raise ValueError(f"rollout {rollout.sample} of problem {rollout.problem} has not been graded")
    if not rollout.judged:
        return None
    if not rollout.correct:
        return 0.0
    penalty = length_penalty(rollout.response.longest_path, config, budget)
    if config.kind == "high_length_penalty":
        return 1.0 - penalty if rollout.well_formed else config.correct_only
    return max(0.0, (1.0 if rollout.well_formed else config.correct_only) - penalty)
