"""A hundred answers made to hang, starve, crash or deceive the grader: each gets its verdict, and nothing is left
running.
"""

from pathlib import Path

import pytest

from dccot.data.judge import Grader, GradingConfig, Verdict
from tests.support.hostile_answers import CALCULUS, EVALUATED, HOSTILE, HUGE, TOWERS, endure, storm

pytestmark = pytest.mark.slow

LIMITS = GradingConfig(workers=2, seconds=0.25, memory_mb=128)
# Right underneath, such as a tower minus itself plus the gold: saying so is fine, running out of time over it too.
RIGHT_AFTER_ALL = {rf"\boxed{{{text}}}" for text in (TOWERS[18], CALCULUS[10], EVALUATED[3], EVALUATED[5], "7919\x00")}


@pytest.fixture(scope="module")
def hostile():
    """All hundred, and as many good answers among them."""
    return endure(200, hostile_share=0.5, config=LIMITS)


def test_there_are_a_hundred_of_them():
    assert len(set(HOSTILE)) == 100


def test_every_hostile_answer_gets_a_verdict_and_none_is_taken_for_correct(hostile):
    assert set(hostile.hostile) == set(HOSTILE) and set(hostile.hostile.values()) <= set(Verdict)
    assert {text for text, verdict in hostile.hostile.items() if verdict == Verdict.CORRECT} <= RIGHT_AFTER_ALL


def test_time_limit_is_what_ends_the_endless_ones(hostile):
    endless = [rf"\boxed{{{text}}}" for text in (TOWERS[0], TOWERS[1], CALCULUS[0], CALCULUS[1], HUGE[2])]
    assert [hostile.hostile[text] for text in endless] == [Verdict.TIMED_OUT] * 5


def test_good_answers_are_right_the_pool_is_whole_and_its_memory_is_back(hostile):
    assert hostile.good == {Verdict.CORRECT: 100}
    assert hostile.processes == (4, 4)
    assert hostile.faults(LIMITS) == []


def test_nothing_was_executed(hostile):
    assert not Path("OWNED").exists()


def test_monsters_all_at_once_cost_no_other_answer_its_verdict_and_stay_within_their_memory():
    seen = storm(monsters=12, good=12, config=LIMITS)
    assert seen.good == {Verdict.CORRECT: 12} and seen.monsters.total() == 12
    assert Verdict.CORRECT not in seen.monsters
    assert seen.peak_mb < 2 * 2 * (LIMITS.memory_mb + 150)  # two keepers and two workers; sympy itself takes 100


def test_memory_limit_ends_an_answer_that_the_clock_would_let_go_on():
    greedy = r"\boxed{" + "1+" * 100_000 + "1}"
    with Grader(GradingConfig(workers=1, seconds=60, memory_mb=64)) as grader:
        assert grader.grade([(greedy, "1"), (r"\boxed{1}", "1")]) == [Verdict.CRASHED, Verdict.CORRECT]


def test_equivalence_classes_survive_hostile_answers():
    texts = [r"\boxed{2}", r"\boxed{9^{9^{9^{9}}}}", r"\boxed{2.0}", r"\boxed{9^{9^{9^{9}}}} again", r"\boxed{3}"]
    with Grader(LIMITS) as grader:
        assert grader.equivalence_classes(texts) == [0, 1, 0, 1, 2]  # the same tower twice is one answer
