"""Closed-form maj@3 equals the paper's definition, subset by subset."""

from fractions import Fraction
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dccot.eval.majority import majority_of_three


def by_definition(classes, correct, paths) -> tuple[Fraction, Fraction]:
    """The appendix, word by word, in exact arithmetic."""
    accuracies, lengths = [], []
    for subset in combinations(range(len(classes)), 3):
        groups = {}
        for i in subset:
            groups.setdefault(classes[i], []).append(i)
        if len(groups) == 2:
            voters = max(groups.values(), key=len)  # the class with two elements
        else:
            voters = list(subset)  # one class or three: all of them
        accuracies.append(Fraction(sum(correct[i] for i in voters), len(voters)))
        lengths.append(max(paths[i] for i in subset))
    return sum(accuracies) / len(accuracies), Fraction(sum(lengths), len(lengths))


responses = st.lists(st.tuples(st.integers(0, 5), st.booleans(), st.integers(0, 30_000)), min_size=3, max_size=14)


SAME_CLASSES = st.lists(st.tuples(st.integers(0, 9), st.integers(1, 12_000)), min_size=40, max_size=40)


def agrees(classes, correct, paths) -> bool:
    vote, (accuracy, length) = majority_of_three(classes, correct, paths), by_definition(classes, correct, paths)
    return abs(vote.accuracy - accuracy) < 1e-12 and abs(vote.longest_path - length) <= 1e-12 * max(1, length)


@given(responses)
@settings(max_examples=400, deadline=None)
def test_closed_form_equals_enumeration(rows):
    assert agrees(*map(list, zip(*rows)))


@given(SAME_CLASSES)
@settings(max_examples=10, deadline=None)
def test_closed_form_equals_enumeration_with_consistent_classes_at_forty_responses(rows):
    classes, paths = map(list, zip(*rows))
    assert agrees(classes, [name == 0 for name in classes], paths)


def test_worked_out_by_hand():
    # Responses A A B C, the A's right: AAB, AAC → 1; ABC twice → 1/3. Lengths 10 20 30 40: max is 30 once (1,2,3) and
    # 40 three times.
    vote = majority_of_three([0, 0, 1, 2], [True, True, False, False], [10, 20, 30, 40])
    assert vote.accuracy == pytest.approx((1 + 1 + 1 / 3 + 1 / 3) / 4, abs=1e-15)
    assert vote.longest_path == (30 + 3 * 40) / 4


def test_order_of_responses_does_not_matter():
    rows = [(0, True, 5), (1, False, 9), (0, True, 7), (2, False, 1), (1, False, 9)]
    votes = {majority_of_three(*map(list, zip(*shuffled))) for shuffled in (rows, rows[::-1], rows[2:] + rows[:2])}
    assert len(votes) == 1


@pytest.mark.parametrize("arguments", [([0, 0], [1, 1], [3, 3]), ([0, 0, 0], [1, 1], [3, 3, 3])])
def test_too_few_or_unequal_inputs_are_refused(arguments):
    with pytest.raises(ValueError, match=r"3 responses|one of each"):
        majority_of_three(*arguments)
