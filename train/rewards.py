"""What a response is worth, which prompts are trained on, and each response's advantage within its group.

    penalty  ℓ = C_L · (LPL − L_cutoff) / (L_max − L_cutoff)   above the cutoff, else 0

    reward.kind   correctness_format    max(0, f − ℓ);  f = 1, `correct_only` (0.5) if ill-formed, 0 if wrong
                  high_length_penalty   1 − ℓ, `correct_only` (0.01) if ill-formed, 0 if wrong
    filter        include_easy          at least one response is both correct and well-formed
                  remove_easy           neither all correct nor all wrong; format does not matter
                  none                  every prompt
    advantage     std                   (R − mean) / (std + 1e-6), unbiased std: the paper's
                  mean                  R − mean: a group's weight grows with the spread of its rewards

DeepScaleR's rule for the sequential baselines is `high_length_penalty` with `correct_only` = 0, where well-formed means
`<think>…</think>` with an answer after it. There, a response has two verdicts (data/rollouts.py): the reward goes by
what follows `</think>`, filters and metrics by the final answer wherever it is, as in the paper. A response that the
judge could not judge (timed out, crashed) has no reward, moves no other response's advantage, and has advantage 0. A
group with equal rewards carries no signal: zeros.

Each of the three is chosen from its registry, or is your own function, my_package.my_module:my_function:

    reward.kind   (rollout, config, budget) → float            for a rollout that was judged
    filter        (group: Sequence[Graded]) → bool             all responses to one prompt
    advantage     (rewards: Sequence[float]) → list[float]     of a group's judged responses; not all are equal
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated

from dccot.core.config import NonNegative, Probability, known, lookup
from dccot.rollout.response import Rollout
from dccot.rollout.tags import overshoots

EPSILON = 1e-6


@dataclass
class Graded(Rollout):
    """A rollout with what training makes of it: one line of a run's rollouts/step_*.jsonl.gz."""

    reward: float | None = None
    advantage: float | None = None


@dataclass
class Outline(Graded):
    """What every rank knows of a graded response: all but question, text and token ids, which one rank holds."""

    rank: int = 0  # which
    place: int = 0  # among those it holds
    sampled_by: Counter[int] = field(default_factory=Counter)  # version of the weights → tokens, if they have versions
    overshot: Counter[str] = field(default_factory=Counter)

    @classmethod
    def of(cls, whole: Graded, rank: int, place: int) -> Outline:
        known = {**vars(whole), "question": "", "gold": "", "text": "", "response": whole.response.outline()}
        told = overshoots(whole.text)
        return cls(**known, rank=rank, place=place, overshot=told, sampled_by=sampled_by(whole))


def sampled_by(rollout: Rollout) -> Counter[int]:
    """Version of the weights → tokens that they sampled; without tokens that have no version."""
    if isinstance(rollout, Outline):
        return rollout.sampled_by
    return Counter(version for segment in rollout.response.segments() for version in segment.versions)


Group = Sequence[Graded]


@dataclass
class RewardConfig:
    kind: Annotated[str, known(REWARDS)] = "correctness_format"  # high_length_penalty, or your own module:function
    correct_only: Probability = 0.5  # correct but ill-formed
    length_penalty: Probability = 0.1  # C_L
    cutoff: NonNegative = 2000  # L_cutoff


def length_penalty(longest_path: int, config: RewardConfig, budget: int) -> float:
    """ℓ of a response with this longest path; `budget` is L_max."""
    return config.length_penalty * max(0, longest_path - config.cutoff) / (budget - config.cutoff)


def correctness_format(rollout: Rollout, config: RewardConfig, budget: int) -> float:
    if not rollout.correct:
        return 0.0
    full = 1.0 if rollout.well_formed else config.correct_only
    return max(0.0, full - length_penalty(rollout.response.longest_path, config, budget))


def high_length_penalty(rollout: Rollout, config: RewardConfig, budget: int) -> float:
    if rollout.correct and rollout.well_formed:
        return 1.0 - length_penalty(rollout.response.longest_path, config, budget)
    return config.correct_only if rollout.correct else 0.0


Reward = Callable[[Rollout, RewardConfig, int], float]
REWARDS: dict[str, Reward] = {"correctness_format": correctness_format, "high_length_penalty": high_length_penalty}


def reward_of(rollout: Rollout, config: RewardConfig, budget: int, own: Reward | None = None) -> float | None:
    """The reward of a graded rollout; None if the judge could not judge it. `budget` is L_max; a task's `own` reward
    takes the place of `reward.kind`'s.
    """
    if rollout.verdict is None:
        raise ValueError(f"rollout {rollout.sample} of problem {rollout.problem} has not been graded")
    if rollout.answer_verdict is not None:
        rollout = replace(rollout, verdict=rollout.answer_verdict)
    chosen = own or lookup(REWARDS, config.kind, "reward.kind")
    return chosen(rollout, config, budget) if rollout.judged else None


def include_easy(group: Group) -> bool:
    return any(graded.correct and graded.well_formed for graded in group)


def remove_easy(group: Group) -> bool:
    return 0 < sum(graded.correct for graded in group) < sum(graded.judged for graded in group)


def keep_all(group: Group) -> bool:
    return len(group) > 0


FILTERS: dict[str, Callable[[Group], bool]] = {
    "include_easy": include_easy,
    "remove_easy": remove_easy,
    "none": keep_all,
}


def over_std(rewards: Sequence[float]) -> list[float]:
    mean, scale = statistics.fmean(rewards), statistics.stdev(rewards) + EPSILON
    return [(reward - mean) / scale for reward in rewards]


def centred(rewards: Sequence[float]) -> list[float]:
    mean = statistics.fmean(rewards)
    return [reward - mean for reward in rewards]


ADVANTAGES: dict[str, Callable[[Sequence[float]], list[float]]] = {"std": over_std, "mean": centred}


def advantages_of(rewards: Sequence[float | None], kind: str = "std") -> list[float]:
    """The advantage of each response of a group."""
    known = [reward for reward in rewards if reward is not None]
    if len(known) < 2 or statistics.stdev(known) == 0.0:
        return [0.0] * len(rewards)
    found = iter(lookup(ADVANTAGES, kind, "advantage")(known))
    return [0.0 if reward is None else next(found) for reward in rewards]
