"""What a response is worth, which prompts are trained on, and each response's advantage within its group.

    penalty  ℓ = C_L · (LPL − L_cutoff) / (L_max − L_cutoff)   above the cutoff, else 0
             and `worker_cost` for every worker that was spawned, at any depth (0: the paper's)

    reward.kind   correctness_format    max(0, f − ℓ);  f = 1, `correct_only` (0.5) if ill-formed, 0 if wrong
                  high_length_penalty   1 − ℓ, `correct_only` (0.01) if ill-formed, 0 if wrong
    filter        include_easy          at least one response is both correct and well-formed
                  remove_easy           neither all correct nor all wrong; format does not matter
                  none                  every prompt
    advantage     std                   (R − mean) / (std + 1e-6), unbiased std: the paper's
                  mean                  R − mean: a group's weight grows with the spread of its rewards
    credit        response              all tokens of a response have its advantage: the paper's
                  worker                a worker that the task can judge (`Task.worker_rewards`) has its own, among all
                                        judged workers of the group; the director and the other workers the response's

DeepScaleR's rule for the sequential baselines is `high_length_penalty` with `correct_only` = 0, where well-formed means
`<think>…</think>` with an answer after it. There, a response has two verdicts (data/rollouts.py): the reward goes by
what follows `</think>`, filters and metrics by the final answer wherever it is, as in the paper. A response that the
judge could not judge (timed out, crashed) has no reward, moves no other response's advantage, and has advantage 0. A
group with equal rewards carries no signal: zeros.

Each of the four is chosen from its registry, or is your own function, my_package.my_module:my_function:

    reward.kind   (rollout, config, budget) → float            for a rollout that was judged
    filter        (group: Sequence[Graded]) → bool             all responses to one prompt
    advantage     (rewards: Sequence[float]) → list[float]     of a group's judged responses; not all are equal
    credit        (group: Sequence[Graded], advantage: str)    sets `advantage` and perhaps `worker_advantages`

It must decide by its arguments alone, which it cannot change (credit sets advantages). A response is rewarded once, by
the rank that holds it; your own filter runs on rank 0; advantages are every rank's own, and ranks that find different
ones end the run. Rewards and advantages are finite, at most a million.
"""

from __future__ import annotations

import dataclasses
import hashlib
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np

from dccot.core.config import NonNegative, Probability, known, lookup
from dccot.core.plugins import Plugin, PluginError, shown
from dccot.core.runtime import Runtime
from dccot.data.problems import Problem
from dccot.rollout.response import Response, Rollout, Segment, Verdict
from dccot.rollout.tags import overshoots

if TYPE_CHECKING:
    from dccot.train.config import RLConfig

EPSILON = 1e-6


@dataclass
class Graded(Rollout):
    """A rollout with what training makes of it: one line of a run's rollouts/step_*.jsonl.gz."""

    reward: float | None = None
    advantage: float | None = None
    # of its workers, in the order of `response.threads()`; None: not judged each for itself
    worker_rewards: list[float | None] | None = None
    worker_advantages: list[float] | None = None

    def to_json(self) -> dict:
        unset = [name for name in ("worker_rewards", "worker_advantages") if getattr(self, name) is None]
        return {name: value for name, value in super().to_json().items() if name not in unset}

    def segment_advantages(self) -> dict[int, float]:
        """By the id() of each of its segments."""
        assert self.advantage is not None
        found = dict.fromkeys(map(id, self.response.segments()), self.advantage)
        for worker, advantage in zip(self.response.threads(), self.worker_advantages or ()):
            found |= dict.fromkeys(map(id, worker.trunk), advantage)
        return found


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
    worker_cost: Probability = 0.0  # taken off for every worker spawned: a price on needless width

    def penalty(self, response: Response, budget: int) -> float:
        """What a response's length and its workers cost; `budget` is L_max."""
        workers = sum(1 for _ in response.threads()) if self.worker_cost else 0
        return length_penalty(response.longest_path, self, budget) + self.worker_cost * workers


def length_penalty(longest_path: int, config: RewardConfig, budget: int) -> float:
    """ℓ of a response with this longest path; `budget` is L_max."""
    return config.length_penalty * max(0, longest_path - config.cutoff) / (budget - config.cutoff)


def correctness_format(rollout: Rollout, config: RewardConfig, budget: int) -> float:
    if not rollout.correct:
        return 0.0
    full = 1.0 if rollout.well_formed else config.correct_only
    return max(0.0, full - config.penalty(rollout.response, budget))


def high_length_penalty(rollout: Rollout, config: RewardConfig, budget: int) -> float:
    if rollout.correct and rollout.well_formed:
        return 1.0 - config.penalty(rollout.response, budget)
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
    if not rollout.judged:
        return None
    reward = Plugin("reward", own or lookup(REWARDS, config.kind, "reward.kind"))
    on = f"problem {rollout.problem!r}, sample {rollout.sample}"
    return reward.number(reward(reward.view(rollout), reward.view(config), budget, on=on), on)


def worker_rewards_of(rollout: Rollout, own: Callable[..., Any] | None) -> list[float | None] | None:
    """What a task's own function says of each worker, None where it cannot judge one; None: it has no such function, or
    nobody was spawned.
    """
    if own is None or not rollout.response.forks:
        return None
    plugin, workers = Plugin("worker_rewards", own), sum(1 for _ in rollout.response.threads())
    on = f"problem {rollout.problem!r}, sample {rollout.sample}"
    found = plugin(plugin.view(rollout), on=on)
    if not isinstance(found, Sequence) or len(found) != workers:
        raise plugin.refused(found, f"a list of {workers} numbers or None", on)
    return [None if reward is None else plugin.number(reward, on) for reward in found]


def try_own(config: RLConfig, problem: Problem, own: Reward | None) -> None:
    """Call the user's own reward, filter and advantage once, on a right and a wrong answer that are made up: a slip in
    them should not wait for an engine. What may be due to the answers is left to the training.
    """
    golds = [problem.gold] if isinstance(problem.gold, str) else problem.gold
    text = f"<think>\nsum</think><answer>\\boxed{{{golds[0]}}}</answer>"
    response = Response([Segment([], [0], [-0.5])], [], prompt=[0])
    group = [
        Graded(problem.id, sample, problem.question, problem.gold, text, response, verdict=verdict, step=0)
        for sample, verdict in enumerate((Verdict.CORRECT, Verdict.WRONG))
    ]

    def rewarded() -> None:
        for graded in group:
            graded.reward = reward_of(graded, config.reward, config.rollout.budget, own)

    for use in (rewarded, lambda: keeps(group, config.filter), lambda: advantages_of([1.0, 0.0], config.advantage)):
        try:
            use()
        except PluginError as error:
            if is_slip(error.__context__):
                raise


def is_slip(error: BaseException | None) -> bool:
    """A name that is not there, of ours, of a module, or at all: whatever the answer, it would fail."""
    of = getattr(error, "obj", None)
    named = isinstance(error, AttributeError) and (isinstance(of, ModuleType) or dataclasses.is_dataclass(of))
    return named or isinstance(error, NameError | ImportError)


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


def keeps(group: Group, kind: str) -> bool:
    """Whether the filter of this name keeps a group."""
    chosen = Plugin("filter", lookup(FILTERS, kind, "filter"))
    on = f"the group of problem {group[0].problem!r}" if group else "an empty group"
    kept = chosen(chosen.view(group), on=on)
    if not isinstance(kept, bool | np.bool_):
        raise chosen.refused(kept, "True or False", on)
    return bool(kept)


def over_std(rewards: Sequence[float]) -> list[float]:
    mean, scale = statistics.fmean(rewards), statistics.stdev(rewards) + EPSILON
    return [(reward - mean) / scale for reward in rewards]


def centred(rewards: Sequence[float]) -> list[float]:
    mean = statistics.fmean(rewards)
    return [reward - mean for reward in rewards]


ADVANTAGES: dict[str, Callable[[Sequence[float]], list[float]]] = {"std": over_std, "mean": centred}


def advantages_of(rewards: Sequence[float | None], kind: str = "std", problem: str = "") -> list[float]:
    """The advantage of each response of a group, the answers to `problem`."""
    known = [reward for reward in rewards if reward is not None]
    if len(known) < 2 or statistics.stdev(known) == 0.0:
        return [0.0] * len(rewards)
    chosen = Plugin("advantage", lookup(ADVANTAGES, kind, "advantage"))
    on = f"the rewards {shown(known)} of problem {problem!r}"
    returned = chosen(chosen.view(known), on=on)
    values = list(returned) if isinstance(returned, Iterable) else []
    if len(values) != len(known):
        raise chosen.refused(returned, f"a list of {len(known)} numbers", on)
    found = iter([chosen.number(value, on) for value in values])
    return [0.0 if reward is None else next(found) for reward in rewards]


def response_credit(group: Group, advantage: str = "std") -> None:
    rewards = [graded.reward for graded in group]
    for graded, value in zip(group, advantages_of(rewards, advantage, group[0].problem)):
        graded.advantage = value


def worker_credit(group: Group, advantage: str = "std") -> None:
    response_credit(group, advantage)
    rewards = [reward for graded in group for reward in graded.worker_rewards or ()]
    found = iter(zip(rewards, advantages_of(rewards, advantage, group[0].problem)))
    for graded in (graded for graded in group if graded.worker_rewards):
        own = islice(found, len(graded.worker_rewards or ()))
        graded.worker_advantages = [graded.advantage or 0.0 if reward is None else value for reward, value in own]


CREDITS: dict[str, Callable[[Group, str], None]] = {"response": response_credit, "worker": worker_credit}


def set_advantages(group: Group, credit: str, advantage: str) -> None:
    """By the rule of this name, which gets copies: it can set advantages, and nothing else."""
    chosen = Plugin("credit", lookup(CREDITS, credit, "credit"))
    copies = [replace(graded, response=chosen.view(graded.response)) for graded in group]
    chosen(copies, advantage, on=f"the group of problem {group[0].problem!r}")
    for graded, copy in zip(group, copies):
        on = f"problem {graded.problem!r}, sample {graded.sample}"
        graded.advantage = chosen.number(copy.advantage, on)
        if (found := copy.worker_advantages) is not None:
            count = sum(1 for _ in graded.response.threads())
            if not isinstance(found, Sequence) or len(found) != count:
                raise chosen.refused(found, f"a list of {count} worker_advantages, or None", on)
            graded.worker_advantages = [chosen.number(value, on) for value in found]


def require_agreement(
    groups: Sequence[Group], kept: Sequence[Group], runtime: Runtime, names: Mapping[str, str]
) -> None:
    """Reject rewards, filters and advantages that differ between ranks. `names` of all, for the error."""
    if runtime.ranks == 1:
        return
    pairs = {(graded.problem, graded.sample): graded for group in groups for graded in group}
    chosen = {graded.problem for group in kept for graded in group}
    decisions: dict[str, list[Any]] = {
        "reward": [graded.reward for graded in pairs.values()],
        "filter": [problem in chosen for problem, _ in pairs],
        "advantage": [graded.advantage for graded in pairs.values()],
        "credit": [graded.worker_advantages for graded in pairs.values()],
    }
    digest = hashlib.sha256(repr(decisions).encode()).hexdigest()
    if len({theirs for [theirs] in runtime.gather([digest])}) == 1:
        return
    first, *others = (decided for [decided] in runtime.gather([decisions]))
    for kind, values in first.items():
        for rank, other in enumerate(others, start=1):
            for (problem, sample), mine, theirs in zip(pairs, values, other[kind]):
                if mine != theirs:
                    where = f"problem {problem!r}, sample {sample}: {mine} on rank 0 and {theirs} on rank {rank}"
                    remedy = "it must depend on its arguments alone: seed what is random with their ids"
                    raise PluginError(f"{kind} {names[kind]} differs between ranks, {where}; {remedy}")
