"""Means with standard errors over the right unit, paired comparison, a straight line, the Pareto front.

Responses to one problem are correlated, so the problem is the independent unit (a cluster), however many responses it
has:

    mean      x̄ = mean of the problems' means            standard error   s(problem means) / √P
    change    d = mean of (ours − theirs), by problem      standard error   s(differences) / √P
    ratio     r = Σ ours / Σ theirs                       standard error   s(ours − r·theirs) / (√P · mean theirs)

A standard error of fewer than two problems is nan.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

PERCENTILES = (60, 70, 80, 90, 100)  # of the entropy of sampled tokens, in metrics and reports
ByProblem = Mapping[str, float]  # problem id → mean over its responses


@dataclass(frozen=True)
class Estimate:
    value: float
    stderr: float = math.nan

    def to_json(self) -> dict[str, float | None]:
        return {"value": plain(self.value), "stderr": plain(self.stderr)}

    @property
    def clear(self) -> bool:
        """Whether it is more than two standard errors from zero."""
        return abs(self.value) > 2 * self.stderr


def plain(number: float) -> float | None:
    """For JSON, which has no nan."""
    return None if math.isnan(number) else number


def mean(values: Sequence[float]) -> float:
    return statistics.fmean(values) if values else math.nan


def standard_error(values: Sequence[float]) -> float:
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan


def over_problems(means: ByProblem) -> Estimate:
    values = list(means.values())
    return Estimate(mean(values), standard_error(values))


def clustered_error(values: Sequence[Sequence[float]]) -> float:
    """Standard error of the mean over problems, each of which has several samples."""
    return standard_error([statistics.fmean(samples) for samples in values if samples])


def difference(ours: ByProblem, theirs: ByProblem) -> Estimate:
    """ours − theirs, paired when both sides have the same problems; else as if they were independent."""
    if ours.keys() == theirs.keys():
        return over_problems({problem: ours[problem] - theirs[problem] for problem in ours})
    a, b = over_problems(ours), over_problems(theirs)
    return Estimate(a.value - b.value, math.hypot(a.stderr, b.stderr))


def relative_change(ours: ByProblem, theirs: ByProblem) -> Estimate:
    """ours / theirs − 1 of the means, paired in the same way."""
    a, b = over_problems(ours), over_problems(theirs)
    if not b.value:
        return Estimate(math.nan)
    ratio = a.value / b.value
    if ours.keys() == theirs.keys():
        rest = [ours[problem] - ratio * theirs[problem] for problem in ours]
        return Estimate(ratio - 1, standard_error(rest) / b.value)
    return Estimate(ratio - 1, math.hypot(a.stderr, ratio * b.stderr) / b.value)


@dataclass(frozen=True)
class Line:
    """Least squares y = intercept + slope · x, and the share r² of y's variance that it explains."""

    slope: float
    intercept: float
    r2: float


def fit_line(x: Sequence[float], y: Sequence[float]) -> Line:
    if len(x) < 2 or min(x) == max(x) or min(y) == max(y):  # a point, or nothing to explain
        return Line(math.nan, math.nan, math.nan)
    slope, intercept = statistics.linear_regression(x, y)
    return Line(slope, intercept, statistics.correlation(x, y) ** 2)


def pareto_front(points: Sequence[tuple[float, float]]) -> list[int]:
    """Indices of the (length, accuracy) points that no other beats by being shorter and more accurate."""
    front: list[int] = []
    best = -math.inf
    for index in sorted(range(len(points)), key=lambda i: (points[i][0], -points[i][1])):
        if points[index][1] > best:
            front.append(index)
            best = points[index][1]
    return front
