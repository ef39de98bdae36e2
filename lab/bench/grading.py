"""Benchmarks of evaluation: closed-form maj@3 vs. enumeration, and how grading scales with processes.

dccot bench eval
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from itertools import combinations

from dccot.data.judge import Grader, GradingConfig
from dccot.eval.majority import MajorityVote, majority_of_three


def enumerated(classes: list[int], correct: list[bool], longest_paths: list[int]) -> MajorityVote:
    """maj@3 as a user would write it: vote in every subset."""
    accuracy, length, subsets = 0.0, 0, 0
    for trio in combinations(range(len(classes)), 3):
        i, j, k = trio
        a, b, c = classes[i], classes[j], classes[k]
        if a == b != c:
            accuracy += (correct[i] + correct[j]) / 2
        elif a == c != b:
            accuracy += (correct[i] + correct[k]) / 2
        elif b == c != a:
            accuracy += (correct[j] + correct[k]) / 2
        else:
            accuracy += (correct[i] + correct[j] + correct[k]) / 3
        length += max(longest_paths[i], longest_paths[j], longest_paths[k])
        subsets += 1
    return MajorityVote(accuracy / subsets, length / subsets)


def answers(count: int) -> list[tuple[str, str]]:
    """Responses as long as a benchmark's (about 3,000 words), each with its own answer."""
    rng = random.Random(0)
    filler = "Let me check that $x^2 + 3x = 4$ holds, so \\(x = 1\\) and the sum is 17. " * 300
    pairs = []
    for n in range(count):
        a, b = rng.randint(2, 50), rng.randint(2, 50)
        pairs.append((f"{filler}{n}\nThus the result is $\\boxed{{x^2+{a + b}x+{a * b}}}$.", f"(x+{a})(x+{b})"))
    return pairs


def run(quick: bool = False) -> list[dict]:
    rng = random.Random(0)
    count = 60 if quick else 200
    classes, paths = ([rng.randint(0, most) for _ in range(count)] for most in (8, 9999))
    case = classes, [name == 0 for name in classes], paths
    repeats = 100
    closed = _seconds(lambda: [majority_of_three(*case) for _ in range(repeats)]) / repeats
    brute = _seconds(lambda: enumerated(*case))
    rates = {workers: _answers_per_second(workers, answers(40 if quick else 200)) for workers in (1, 2)}
    votes = f"maj@3 of {count} responses"
    return [
        _row(f"{votes}, closed form", closed * 1e3, "ms", None, "lower"),
        _row(f"{votes}, speed-up over enumeration", brute / closed, "×", 1000),
        _row("grading, 1 process", rates[1], "answers/s", None),
        _row("grading, 2 processes over 1", rates[2] / rates[1], "×", 1.6),
    ]


def _row(name: str, value: float, unit: str, target: float | None, better: str = "higher") -> dict:
    return {"name": name, "value": value, "unit": unit, "target": target, "better": better}


def _answers_per_second(workers: int, pairs: list[tuple[str, str]]) -> float:
    with Grader(GradingConfig(workers=workers)) as grader:
        grader.grade(pairs[: 4 * workers])  # processes are running and sympy's caches are warm
        return len(pairs) / _seconds(lambda: grader.grade(pairs))


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start
