"""Standard errors over problems, paired comparisons, the line and the Pareto front, against numpy and by hand."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dccot.core.statistics import clustered_error, difference, fit_line, over_problems, pareto_front, relative_change

numbers = st.floats(0.1, 100)


def test_mean_and_error_by_hand():
    found = over_problems({"a": 0.25, "b": 0.75, "c": 0.5})
    assert found.value == 0.5
    assert found.stderr == pytest.approx(0.25 / math.sqrt(3))


def test_one_problem_has_no_standard_error():
    assert math.isnan(over_problems({"a": 0.25}).stderr)
    assert over_problems({"a": 0.25}).to_json() == {"value": 0.25, "stderr": None}


@given(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=5), min_size=2, max_size=6), st.integers(2, 10))
def test_copies_of_every_response_do_not_make_the_error_smaller(problems, copies):
    assert clustered_error([samples * copies for samples in problems]) == pytest.approx(clustered_error(problems))


@given(st.dictionaries(st.text("abc", min_size=1), st.tuples(numbers, numbers), min_size=2))
def test_a_paired_difference_is_the_mean_of_the_differences(pairs):
    found = difference({k: a for k, (a, _) in pairs.items()}, {k: b for k, (_, b) in pairs.items()})
    apart = np.array([a - b for a, b in pairs.values()])
    assert found.value == pytest.approx(apart.mean(), abs=1e-9)
    assert found.stderr == pytest.approx(apart.std(ddof=1) / math.sqrt(len(apart)), abs=1e-9)


def test_different_problems_are_compared_as_independent():
    found = difference({"a": 1.0, "b": 3.0}, {"c": 0.0, "d": 4.0})
    assert found.value == 0
    assert found.stderr == pytest.approx(math.hypot(1, 2))


def test_relative_change_has_the_error_that_resampling_problems_gives():
    rng = np.random.default_rng(0)
    theirs = rng.uniform(500, 1500, 200)
    ours = 0.6 * theirs + rng.normal(0, 100, 200)
    found = relative_change(dict(enumerate(ours)), dict(enumerate(theirs)))
    drawn = rng.integers(0, 200, (4000, 200))
    resampled = ours[drawn].sum(1) / theirs[drawn].sum(1)
    assert found.value == pytest.approx(ours.sum() / theirs.sum() - 1)
    assert found.stderr == pytest.approx(resampled.std(), rel=0.05)


def test_line_agrees_with_numpy():
    x = [100, 250, 300, 800]
    y = [1.2, 2.4, 3.5, 7.9]
    line = fit_line(x, y)
    assert (line.slope, line.intercept) == pytest.approx(tuple(np.polyfit(x, y, 1)))
    assert line.r2 == pytest.approx(np.corrcoef(x, y)[0, 1] ** 2)


@given(st.lists(st.tuples(st.integers(0, 8), st.integers(0, 8)), max_size=12))
def test_the_front_is_what_nothing_dominates(points):
    front = {points[i] for i in pareto_front(points)}

    def beaten(length, accuracy):
        return any(l <= length and a >= accuracy and (l, a) != (length, accuracy) for l, a in points)

    assert front == {point for point in points if not beaten(*point)}
