"""Countdown: what the judge accepts, by arithmetic done by hand, and what the generator promises, by brute force."""

from __future__ import annotations

import ast
import itertools
from fractions import Fraction
from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dccot.core.files import BadData
from dccot.data.countdown import (
    CountdownConfig,
    CountdownJudge,
    evaluate,
    moves,
    problem_stream,
    reachable,
    terms_of,
)
from dccot.rollout.response import Verdict

CORRECT, WRONG, UNPARSABLE = Verdict.CORRECT, Verdict.WRONG, Verdict.UNPARSABLE


@pytest.mark.parametrize(
    "answer, verdict",
    [
        ("(8-3)*4", CORRECT),
        ("4*(8-3) = 20", CORRECT),
        (r"\boxed{(8-3)\times 4}", CORRECT),
        (r"$\left(8 - 3\right) \cdot 4$", CORRECT),
        ("(8−3)×4", CORRECT),
        ("8+4*3", CORRECT),
        ("(8-3)*4 = 21", WRONG),  # claims another value
        ("(8-3)*4+0", WRONG),  # a number that was not given
        ("4*5", WRONG),  # not the numbers given
        ("8+3-4", WRONG),
        ("8*4/3", WRONG),  # 32/3 leaves a remainder
        ("8/(4-4)", WRONG),
        ("20", WRONG),
        ("none", UNPARSABLE),
        ("", UNPARSABLE),
        ("(8-3)4", UNPARSABLE),
        ("(8-3*4", UNPARSABLE),
        ("8-3)*4", UNPARSABLE),
        ("-(3-8)*4", UNPARSABLE),  # no signs
        ("__import__('os').system('true')", UNPARSABLE),
        ("8**3**4", UNPARSABLE),
        ("(" * 10_000 + "8", UNPARSABLE),
        ("9" * 10_000, UNPARSABLE),
        ("٨-3", UNPARSABLE),  # a digit, but not of these
    ],
)
def test_an_answer_is_right_if_it_uses_each_number_once_and_gives_the_target(answer, verdict):
    assert CountdownJudge().judge(f"<think>no</think><answer>{answer}</answer>", "20 from 3, 8, 4") is verdict


def test_a_gold_that_is_no_problem_is_named():
    with pytest.raises(BadData, match="gold '20' is no Countdown problem"):
        CountdownJudge().judge("<answer>20</answer>", "20")


def test_answers_are_equal_if_they_use_the_same_numbers_for_the_same_value():
    answers = ["(8-3)*4", "4*(8-3)", "8+4*3", "8+3-4", "none", "none", "4*5"]
    classes = CountdownJudge().equivalence_classes([f"<answer>{answer}</answer>" for answer in answers])
    assert classes == [0, 0, 0, 1, 2, 3, 4]


@settings(max_examples=300)
@given(
    st.recursive(
        st.integers(0, 30).map(str),
        lambda inner: st.tuples(inner, st.sampled_from("+-*/"), inner).map(lambda parts: f"({''.join(parts)})"),
        max_leaves=6,
    )
)
def test_an_expression_has_the_value_that_python_gives_it(expression):
    def value(node: ast.expr) -> Fraction | None:
        if isinstance(node, ast.Constant):
            return Fraction(node.value)
        left, right = value(node.left), value(node.right)
        if left is None or right is None:
            return None
        if isinstance(node.op, ast.Div):
            found = left / right if right else None
            return found if found is not None and found.denominator == 1 else None
        return {ast.Add: left + right, ast.Sub: left - right, ast.Mult: left * right}[type(node.op)]

    expected = value(ast.parse(expression, mode="eval").body)
    if expected is None:
        with pytest.raises(ValueError, match="whole number"):
            evaluate(expression)
    else:
        assert evaluate(expression)[0] == expected


def brute_force(numbers: tuple[int, ...]) -> set[int]:
    """Every positive integer that uses all numbers, with any signs and brackets, integers throughout."""
    if len(numbers) == 1:
        return {numbers[0]}
    found = set()
    for size in range(1, len(numbers)):
        for chosen in itertools.combinations(range(len(numbers)), size):
            left = brute_force(tuple(numbers[i] for i in chosen))
            right = brute_force(tuple(numbers[i] for i in range(len(numbers)) if i not in chosen))
            for a, b in itertools.product(left, right):
                found |= {a + b, a - b, b - a, a * b}
                found |= {a // b} if b and a % b == 0 else set()
    return found


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 12), min_size=2, max_size=4))
def test_the_moves_leave_out_nothing_that_can_be_reached(numbers):
    limit = 10**9
    assert reachable(terms_of(numbers), limit) == {value for value in brute_force(tuple(numbers)) if value >= 0}


@settings(max_examples=60)
@given(st.lists(st.integers(1, 20), min_size=3, max_size=4))
def test_every_expression_of_a_search_means_what_it_reached(numbers):
    terms = terms_of(numbers)
    while len(terms) > 1:
        terms = max(moves(terms, 10**9), key=lambda move: hash(move.result.text) % 97).remaining
    value, used = evaluate(terms[0].text)
    assert value == terms[0].value and sorted(used) == sorted(numbers)


def test_splits_share_no_numbers_and_only_the_test_split_asks_held_out_targets():
    config = CountdownConfig(smallest=3, largest=4)
    splits = {name: list(islice(problem_stream(0, name, config), 150)) for name in ("base", "train", "test")}
    sets = {name: {tuple(sorted(p.numbers)) for p in problems} for name, problems in splits.items()}
    assert not sets["test"] & (sets["train"] | sets["base"]) and not sets["train"] & sets["base"]
    asked = {name: {p.target for p in problems} for name, problems in splits.items()}
    assert asked["test"] - asked["train"] - asked["base"]
    for problem in splits["test"]:
        assert problem.target in brute_force(problem.numbers)
        assert problem.target <= config.limit and max(problem.numbers) <= config.highest


def test_the_id_tells_how_many_openings_can_still_reach_the_target():
    for problem in islice(problem_stream(1, "train", CountdownConfig(3, 3)), 20):
        good, every = problem.id.split("-")[2].split("of")
        openings = list(moves(terms_of(problem.numbers), 99))
        counted = [move for move in openings if problem.target in brute_force(tuple(t.value for t in move.remaining))]
        assert len(openings) == int(every) and len(counted) == int(good)
