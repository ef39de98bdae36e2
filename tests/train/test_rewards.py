"""What responses are worth, which groups are kept and how advantages follow: the rules of the paper, by hand."""

import math
import statistics
from dataclasses import replace
from threading import Event
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dccot.core.config import ConfigError, load_config, lookup
from dccot.core.plugins import PluginError
from dccot.core.runtime import Runtime
from dccot.data.judge import Grader, GradingConfig, Judge
from dccot.data.rollouts import grade
from dccot.data.task import Task
from dccot.rollout.response import Response, Rollout, Segment
from dccot.rollout.tags import sequential_flaw_of
from dccot.rollout.thread import Thread
from dccot.train.batch import Batch
from dccot.train.config import RLConfig
from dccot.train.rewards import (
    FILTERS,
    Graded,
    Group,
    RewardConfig,
    advantages_of,
    keeps,
    response_credit,
    reward_of,
    set_advantages,
    worker_credit,
)
from dccot.train.rl import RL
from dccot.train.saver import RolloutSaver, write_step
from tests.support.rounds import flat

PAPER = RewardConfig("correctness_format", correct_only=0.5, length_penalty=0.1, cutoff=2000)
HARSH = RewardConfig("correctness_format", correct_only=0.5, length_penalty=0.9, cutoff=0)
HLP = RewardConfig("high_length_penalty", correct_only=0.01, length_penalty=0.9, cutoff=2000)


def rollout(verdict: str | None = "correct", flaw: str | None = None, length: int = 1000) -> Graded:
    return Graded("417", 0, "1+1?", "2", "…", flat([1], [], Segment([], [5] * length)), flaw, verdict)


@pytest.mark.parametrize(
    ("config", "budget", "verdict", "flaw", "length", "expected"),
    [
        (PAPER, 7500, "correct", None, 2000, 1.0),  # no penalty up to the cutoff
        (PAPER, 7500, "correct", None, 4750, 1.0 - 0.1 * 2750 / 5500),  # half of it half-way
        (PAPER, 7500, "correct", None, 7500, 0.9),
        (PAPER, 7500, "correct", "no_spawn", 2000, 0.5),
        (PAPER, 7500, "correct", "no_spawn", 7500, 0.4),
        (PAPER, 7500, "wrong", None, 100, 0.0),
        (PAPER, 7500, "wrong", None, 7500, 0.0),  # never below 0
        (PAPER, 7500, "unparsable", "open_think", 7500, 0.0),
        (HARSH, 7500, "correct", "no_spawn", 7500, 0.0),
        (HLP, 12000, "correct", None, 1500, 1.0),
        (HLP, 12000, "correct", None, 7000, 1.0 - 0.9 * 5000 / 10000),
        (HLP, 12000, "correct", None, 12000, 0.1),
        (HLP, 12000, "correct", "no_spawn", 100, 0.01),
        (HLP, 12000, "correct", "no_spawn", 12000, 0.01),  # what is ill-formed is not penalised further
        (HLP, 12000, "wrong", None, 100, 0.0),
        (PAPER, 7500, "timed_out", None, 100, None),  # what could not be judged has no reward
        (PAPER, 7500, "crashed", None, 100, None),
    ],
)
def test_rewards_by_hand(config, budget, verdict, flaw, length, expected):
    assert reward_of(rollout(verdict, flaw, length), config, budget) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(("flaw", "expected"), [(None, 1.0 - 0.9 * 5000 / 10000), ("no_answer", 0.0)])
def test_deepscaler_baselines_earn_nothing_for_a_wrong_form(flaw, expected):
    config = load_config(RLConfig, "configs/rl/dsr_hlp_12k.yaml", ["model.path=m", "data.train=d"])
    assert reward_of(rollout(flaw=flaw, length=7000), config.reward, config.rollout.budget) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("prompt", "text", "expected"),
    [
        ("sequential", r"<think>so \boxed{45}</think>I am done.", 0.0),  # the answer is in the thinking
        ("sequential", r"<think>so \boxed{45}</think>It is \boxed{44}.", 0.0),
        ("sequential", r"<think>so \boxed{45}", 0.0),
        ("sequential", r"<think>or \boxed{44}</think>It is \boxed{45}.", 1.0),
        (
            "parallel",
            r"<think>so \boxed{45}</think>I am done.",
            1.0,
        ),  # the paper's method is graded on the whole response
    ],
)
def test_a_sequential_baseline_is_graded_on_what_follows_its_thinking(prompt, text, expected):
    config = load_config(
        RLConfig, "configs/rl/dsr_hlp_12k.yaml", ["model.path=m", "data.train=d", f"prompt.kind={prompt}"]
    )
    asked = Rollout("417", 0, "?", "45", text, flat([1], [], Segment([], [5])), sequential_flaw_of(text))
    with Grader(GradingConfig(workers=1)) as judge:
        grade([asked], judge=judge, thinking_counts=config.prompt.parallel, part=True)
    assert reward_of(asked, config.reward, config.rollout.budget) == expected


@pytest.mark.parametrize(
    ("texts", "rewards", "kept"),
    [
        ([r"<think>so \boxed{45}</think>I am done.", r"<think>so</think>\boxed{44}"], [0.0, 0.0], True),
        ([r"<think>so \boxed{45}</think>I am done.", r"<think>so</think>\boxed{45}"], [0.0, 1.0], False),
    ],
)
def test_remove_easy_goes_by_the_final_answer_alone_where_the_reward_wants_it_after_the_thinking(texts, rewards, kept):
    """The paper, appendix: the DSR-HLP baselines filter "based solely on the correctness of the final answer"."""
    config = load_config(RLConfig, "configs/rl/dsr_hlp_12k.yaml", ["model.path=m", "data.train=d"])
    response = flat([1], [], Segment([], [5]))
    rollouts = [Rollout("1", n, "?", "45", text, response, sequential_flaw_of(text)) for n, text in enumerate(texts)]
    with Grader(GradingConfig(workers=1)) as judge:
        grade(rollouts, judge, thinking_counts=config.prompt.parallel)
    found = [Graded(**vars(each), reward=reward_of(each, config.reward, config.rollout.budget)) for each in rollouts]
    assert [each.reward for each in found] == rewards
    assert FILTERS[config.filter](found) is kept


def test_an_ungraded_rollout_is_an_error_and_not_a_zero():
    with pytest.raises(ValueError, match="rollout 0 of problem 417 has not been graded"):
        reward_of(rollout(verdict=None), PAPER, budget=7500)


def brevity(rollout: Rollout, config: RewardConfig, budget: int) -> float:
    return 1 - rollout.response.longest_path / budget


def test_a_reward_of_ones_own_sees_what_was_judged_right_or_wrong_and_nothing_else():
    config = load_config(RewardConfig, None, [f"kind={__name__}:brevity"])
    assert reward_of(rollout("wrong", length=2500), config, budget=10000) == 0.75
    assert reward_of(rollout("crashed", length=2500), config, budget=10000) is None


def forgetful(rollout: Rollout, config: RewardConfig, budget: int) -> None: ...


def tidying(rollout: Rollout, config: RewardConfig, budget: int) -> float:
    rollout.response.prompt.clear()
    return 1.0


@pytest.mark.parametrize(
    ("name", "said"),
    [("forgetful", "returned None for problem '417', sample 0"), ("tidying", "failed on problem '417', sample 0")],
)
def test_a_reward_that_returns_no_number_or_changes_a_response_ends_the_run_and_changes_nothing(name, said):
    judged = rollout()
    with pytest.raises(PluginError, match=f"reward {__name__}:{name} {said}"):
        reward_of(judged, RewardConfig(f"{__name__}:{name}"), budget=10000)
    assert judged.response.prompt == [1]


def test_an_unknown_reward_is_an_error_and_never_another_one():
    with pytest.raises(
        ConfigError, match=r"reward.kind is 'correct'; it must be one of correctness_format, high_length_penalty"
    ):
        reward_of(rollout(), RewardConfig("correct"), budget=7500)


GOOD, ILL_FORMED, WRONG, UNJUDGED = rollout(), rollout(flaw="no_spawn"), rollout("wrong"), rollout("timed_out")


@pytest.mark.parametrize(
    ("group", "include_easy", "remove_easy"),
    [
        ([GOOD, GOOD], True, False),
        ([GOOD, WRONG], True, True),
        ([ILL_FORMED, WRONG], False, True),  # form does not matter to Remove-Easy
        ([ILL_FORMED, ILL_FORMED], False, False),
        ([GOOD, ILL_FORMED], True, False),
        ([WRONG, WRONG], False, False),
        ([GOOD, UNJUDGED], True, False),  # unjudged is not wrong: all that were judged are correct
        ([WRONG, UNJUDGED], False, False),
        ([GOOD, WRONG, UNJUDGED], True, True),
        ([UNJUDGED, UNJUDGED], False, False),
    ],
)
def test_which_groups_the_filters_keep(group, include_easy, remove_easy):
    assert FILTERS["include_easy"](group) is include_easy
    assert FILTERS["remove_easy"](group) is remove_easy
    assert FILTERS["none"](group) is True


def at_least_two_right(group: Group) -> bool:
    return sum(rollout.correct for rollout in group) >= 2


def test_a_filter_of_ones_own_is_named_by_module_and_function():
    config = load_config(RLConfig, None, ["model.path=m", "data.train=d", f"filter={__name__}:at_least_two_right"])
    keep = lookup(FILTERS, config.filter, "filter")
    assert (keep([GOOD, GOOD, WRONG]), keep([GOOD, WRONG])) == (True, False)


def undecided(group: Group) -> int:
    return len(group)


def test_a_filter_that_does_not_decide_ends_the_run():
    with pytest.raises(PluginError, match=f"filter {__name__}:undecided returned 1 for the group of problem '417'; "):
        keeps([GOOD], f"{__name__}:undecided")


def too_few(rewards):
    return rewards[1:]


def infinite(rewards):
    return [math.inf for _ in rewards]


@pytest.mark.parametrize(("name", "said"), [("too_few", "a list of 2 numbers"), ("infinite", "a finite number")])
def test_an_advantage_must_be_one_finite_number_per_reward(name, said):
    with pytest.raises(PluginError, match=rf"{name} returned .* for the rewards \[1.0, 0.5\] of problem '7'; .*{said}"):
        advantages_of([1.0, None, 0.5], f"{__name__}:{name}", "7")


class Complaining(Judge):
    def report(self, verdicts) -> None:
        raise SystemExit(f"{len(verdicts)} verdicts")


def test_a_judge_of_ones_own_that_fails_on_a_whole_batch_is_named():
    trainer = RL.__new__(RL)
    trainer.runtime, trainer.replayed, trainer.judge = Runtime.alone(), None, Complaining()
    trainer.phases = SimpleNamespace(step=4)
    with pytest.raises(PluginError, match=f"judge {__name__}:Complaining.report failed on step 4: SystemExit: 2 verd"):
        trainer.report(Batch(1, rolled_out=[GOOD, WRONG]))


def test_ten_steps_in_a_row_whose_rewards_are_all_equal_are_warned_of(caplog):
    trainer = RL.__new__(RL)
    trainer.config = load_config(RLConfig, None, ["model.path=m", "data.train=d"])
    trainer.task, trainer.runtime, trainer.equal_steps = Task(), Runtime.alone(), 0
    equal, different = [Graded(**vars(GOOD) | {"reward": 0.5})] * 3, [Graded(**vars(GOOD) | {"reward": 0.25})]
    for batch in [equal] * 9 + [equal + different] + [equal] * 10:
        trainer.warn_of_equal_rewards(Batch(1, rolled_out=batch))
    [said] = caplog.messages
    assert said.startswith("in each of the last 10 steps all rewards were equal (0.5)")


def test_advantages_by_hand():
    """Rewards 1, 0, 0.5: mean 0.5, unbiased standard deviation 0.5."""
    assert advantages_of([1.0, 0.0, 0.5]) == pytest.approx([0.5 / (0.5 + 1e-6), -0.5 / (0.5 + 1e-6), 0.0], abs=1e-15)


def test_advantages_without_the_standard_deviation_are_distances_from_the_mean():
    assert advantages_of([1.0, 0.0, 0.5, 0.5], "mean") == [0.5, -0.5, 0.0, 0.0]
    assert advantages_of([1.0, None, 0.0, 0.5], "mean") == [0.5, 0.0, -0.5, 0.0]
    assert advantages_of([0.75, 0.75], "mean") == [0.0, 0.0]


@pytest.mark.parametrize("reward", [0.0, 0.1, 1.0 - 0.1 * 1234 / 5500])
def test_a_group_without_spread_gives_zeros(reward):
    assert advantages_of([reward] * 7) == [0.0] * 7


def test_unjudged_responses_get_zero_and_do_not_move_the_others():
    half = 0.5 / (math.sqrt(0.5) + 1e-6)
    assert advantages_of([1.0, None, 0.0]) == pytest.approx([half, 0.0, -half], abs=1e-12)
    assert advantages_of([1.0, None, None]) == [0.0, 0.0, 0.0]
    assert advantages_of([None, None]) == [0.0, 0.0]


@given(st.lists(st.floats(0, 1), min_size=2, max_size=16))
def test_advantages_are_finite_centred_and_scaled(rewards):
    advantages = advantages_of(rewards)
    assert all(map(math.isfinite, advantages))
    assert sum(advantages) == pytest.approx(0, abs=1e-6)
    spread = statistics.stdev(rewards)
    if spread > 1e-3:
        assert statistics.stdev(advantages) == pytest.approx(spread / (spread + 1e-6), rel=1e-6)


def test_only_the_newest_rollouts_stay_and_what_people_put_beside_them(tmp_path):
    (tmp_path / "step_000000_good.jsonl").write_text("mine")
    (tmp_path / "step_000001.jsonl").write_text("of a version that did not compress")
    for step in range(4):
        write_step(tmp_path, step, [], keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "step_000000_good.jsonl",
        "step_000002.jsonl.gz",
        "step_000003.jsonl.gz",
    ]


def test_rollouts_are_written_while_their_step_is_trained_on(tmp_path):
    trained = Event()

    class Slow(Graded):
        def to_json(self) -> dict:
            assert trained.wait(60)
            return super().to_json()

    saver = RolloutSaver(Runtime.alone())
    saver.save(Batch(1, [[Slow(**vars(rollout()))]]), tmp_path, 0, keep=1)
    assert not list(tmp_path.iterdir())
    trained.set()
    saver.close()
    assert [path.name for path in tmp_path.iterdir()] == ["step_000000.jsonl.gz"]


def test_rollouts_that_could_not_be_written_are_an_error_where_they_are_waited_for(tmp_path):
    (tmp_path / "rollouts").write_text("not a folder")
    saver, batch = RolloutSaver(Runtime.alone()), Batch(1, [[Graded(**vars(rollout()))]])
    saver.save(batch, tmp_path / "rollouts", 0, keep=1)
    with pytest.raises(OSError, match="rollouts"):
        saver.wait()
    saver.save(batch, tmp_path / "elsewhere", 0, keep=1)
    saver.close()
    assert [path.name for path in (tmp_path / "elsewhere").iterdir()] == ["step_000000.jsonl.gz"]


def test_a_batch_keeps_as_many_groups_as_it_wants_over_all_its_rollouts():
    batch = Batch(3)
    for groups in ([["a"], ["b"]], [["c"], ["d"]]):
        assert not batch.full
        batch.add(groups, groups)
    assert batch.full and batch.groups == [["a"], ["b"], ["c"]]
    assert (batch.rolled_out, batch.kept, batch.considered) == (["a", "b", "c", "d"], 4, 4)


def spawning(number: int, reward: float, worker_rewards: list[float | None]) -> Graded:
    """A director of 2 + 1 tokens and two workers of 3 and 4, of which the second spawned one of 5."""
    tokens = lambda count: Segment([], list(range(count)))
    inner = Thread([tokens(4), tokens(1)], [[Thread([tokens(5)])]])
    response = Response([tokens(2), tokens(1)], [[Thread([tokens(3)]), inner]], prompt=[1])
    return Graded("1", number, "?", "2", "…", response, None, "correct", reward=reward, worker_rewards=worker_rewards)


def test_a_worker_that_the_task_judges_has_its_own_advantage_and_others_the_responses():
    """R − mean. Responses: 1 and 0. Judged workers: 1, 0, 1 of the first, 0 of the second, mean 1/2."""
    first, second = spawning(0, 1.0, [1.0, 0.0, 1.0]), spawning(1, 0.0, [None, 0.0, None])
    worker_credit([first, second], "mean")
    assert (first.advantage, second.advantage) == (0.5, -0.5)
    assert (first.worker_advantages, second.worker_advantages) == ([0.5, -0.5, 0.5], [-0.5, -0.5, -0.5])
    second.worker_rewards = [1.0, 1.0, None]  # now 4 of 5 are right
    worker_credit([first, second], "mean")
    assert first.worker_advantages == pytest.approx([0.2, -0.8, 0.2])
    assert second.worker_advantages == pytest.approx([0.2, 0.2, -0.5])
    by_segment = second.segment_advantages()
    written = [(len(segment), by_segment[id(segment)]) for segment in second.response.segments()]
    own = pytest.approx(0.2)
    assert written == [(2, -0.5), (3, own), (4, own), (5, -0.5), (1, own), (1, -0.5)]
    assert Graded.from_json(second.to_json()) == second
    response_credit([first, second], "mean")
    assert "worker_advantages" not in replace(first, worker_advantages=None).to_json()


def negligent(group, advantage):
    response_credit(group[1:], advantage)


def endless(group, advantage):
    response_credit(group, advantage)
    group[0].worker_advantages = [math.inf] * 3


def short(group, advantage):
    response_credit(group, advantage)
    group[0].worker_advantages = [0.0]


def clearing(group, advantage):
    group[0].response.trunk.clear()


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("negligent", "returned None for problem '1', sample 0; it must return a number"),
        ("endless", "returned inf for problem '1', sample 0; it must return a finite number"),
        ("short", r"returned \[0.0\] for problem '1', sample 0; it must return a list of 3 worker_advantages"),
        ("clearing", "failed on the group of problem '1': AttributeError"),
    ],
)
def test_a_credit_of_ones_own_sets_finite_advantages_and_nothing_else(name, said):
    group = [spawning(0, 1.0, [1.0, 0.0, 1.0]), spawning(1, 0.0, [0.0, 0.0, 1.0])]
    before = [graded.response.to_json() for graded in group]
    with pytest.raises(PluginError, match=f"credit {__name__}:{name} {said}"):
        set_advantages(group, f"{__name__}:{name}", "std")
    assert [graded.response.to_json() for graded in group] == before
    for credit in (response_credit, worker_credit):  # ours, called by name
        alike = [spawning(0, 1.0, [1.0, 0.0, 1.0]), spawning(1, 0.0, [0.0, 0.0, 1.0])]
        credit(alike, "std")
        set_advantages(group, credit.__name__.removesuffix("_credit"), "std")
        assert group == alike
        group[0].worker_advantages = group[1].worker_advantages = None


def test_every_worker_costs_its_price():
    graded = spawning(0, 0.0, [])
    for kind, expected in (("correctness_format", 1 - 3 * 0.05), ("high_length_penalty", 1 - 3 * 0.05)):
        config = RewardConfig(kind, cutoff=2000, worker_cost=0.05)
        assert reward_of(graded, config, 7500) == pytest.approx(expected)
    assert reward_of(graded, RewardConfig(cutoff=2000, worker_cost=0.5), 7500) == 0.0  # never below 0
    assert reward_of(graded, RewardConfig(cutoff=2000), 7500) == 1.0
