"""Countdown: reach a target from given numbers with + - * /, each number used exactly once.

    Reach 20 with 3, 8, 4: use each number exactly once, with +, -, * and /.        gold: 20 from 3, 8, 4

An answer is an expression, `(8-3)*4`, in the answer block, with or without \\boxed{}, LaTeX signs, and `= 20` at its
end. It is evaluated by a parser of its own, exactly and in integers: a division that leaves a remainder is wrong. Any
expression that uses the numbers and gives the target is right, so the gold is the problem itself.

`openings` are the moves that a search can begin with; how many of them can still reach the target is a problem's
difficulty. A problem's split is a hash of its numbers, so no split shares a set of numbers with another, and every
eighth target is asked in the test split only.
"""

from __future__ import annotations

import functools
import hashlib
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from dccot.core.config import Positive, require
from dccot.core.files import BadData
from dccot.data.judge import Gold, GradingConfig, Judge, Verdict
from dccot.data.problems import Problem
from dccot.data.task import Task
from dccot.rollout.response import Rollout
from dccot.rollout.tags import Flaw, answer_block

QUESTION = "Reach {target} with {numbers}: use each number exactly once, with +, -, * and /."
LONGEST = 200  # characters of an expression; a longer one is not parsed
SPLIT_BUCKETS = {"base": range(8), "train": range(8, 13), "validation": range(13, 14), "test": range(14, 16)}
BUCKETS, HELD_OUT_TARGETS = 16, 8
ENOUGH = 20_000  # draws without a new problem

# ---- the search space ----


@dataclass(frozen=True)
class Term:
    """A number, given or reached, and the expression that reached it."""

    value: int
    text: str
    operator: str = ""  # of the last operation; empty: a given number


@dataclass(frozen=True)
class Move:
    """Two terms combined into one; the other terms remain."""

    left: Term
    operator: str
    right: Term
    result: Term
    remaining: tuple[Term, ...]  # the result first


def terms_of(numbers: Sequence[int]) -> tuple[Term, ...]:
    return tuple(Term(number, str(number)) for number in numbers)


def moves(terms: tuple[Term, ...], limit: int) -> Iterator[Move]:
    """Every move from here: pairs in reading order, each with + - * /, the larger number first.

    Nothing that could be reached is left out: a negative difference reaches nothing that its opposite does not, and
    dividing by 1 is multiplying by it. Results above `limit` are.
    """
    for i, first in enumerate(terms):
        for j in range(i + 1, len(terms)):
            large, small = (first, terms[j]) if first.value >= terms[j].value else (terms[j], first)
            others = (*terms[:i], *terms[i + 1 : j], *terms[j + 1 :])
            values = {
                "+": large.value + small.value,
                "-": large.value - small.value,
                "*": large.value * small.value,
            }
            if small.value > 1 and large.value % small.value == 0:
                values["/"] = large.value // small.value
            for operator, value in values.items():
                if value <= limit:
                    result = Term(value, _joined(large, operator, small), operator)
                    yield Move(large, operator, small, result, (result, *others))


def _joined(left: Term, operator: str, right: Term) -> str:
    """The expression, with brackets where they are needed.

    >>> _joined(Term(5, "8-3", "-"), "*", Term(4, "4")), _joined(Term(9, "9"), "-", Term(5, "8-3", "-"))
    ('(8-3)*4', '9-(8-3)')
    """
    loose = ("+", "-")
    bracket_left = left.operator in loose and operator not in loose
    bracket_right = right.operator and (operator in "-/" or (right.operator in loose and operator == "*"))
    first, second = (
        f"({term.text})" if bracketed else term.text
        for term, bracketed in ((left, bracket_left), (right, bracket_right))
    )
    return f"{first}{operator}{second}"


def reachable(terms: tuple[Term, ...], limit: int) -> frozenset[int]:
    """Every number that uses all terms."""
    return _reachable(tuple(sorted(term.value for term in terms)), limit)


@functools.lru_cache(maxsize=200_000)
def _reachable(values: tuple[int, ...], limit: int) -> frozenset[int]:
    if len(values) == 1:
        return frozenset(values)
    return frozenset().union(*(reachable(move.remaining, limit) for move in moves(terms_of(values), limit)))


# ---- problems ----


@dataclass
class CountdownConfig:
    smallest: Positive = 3  # numbers of a problem, from so many
    largest: Positive = 4  # to so many
    highest: Positive = 20  # of a given number
    lowest: Positive = 10  # target
    limit: Positive = 99  # of targets and of every result on the way

    def check(self) -> None:
        fits = 2 <= self.smallest <= self.largest <= 5
        require(
            fits, f"a problem has {self.smallest} to {self.largest} numbers; set smallest and largest within 2 to 5"
        )
        reachable = (
            f"limit is {self.limit} and highest {self.highest}: results must be able to exceed the given numbers"
        )
        require(self.highest < self.limit, f"{reachable}; raise limit")


@dataclass(frozen=True)
class CountdownProblem(Problem):
    """Its id is `split-n<numbers>-<openings that reach the target>of<openings>-<number>`."""

    numbers: tuple[int, ...]
    target: int


def problem_stream(seed: int, split: str, config: CountdownConfig) -> Iterator[CountdownProblem]:
    """Endless problems of one split, none twice: random numbers, and one of the targets that they reach."""
    if split not in SPLIT_BUCKETS:
        raise ValueError(f"unknown split {split!r}; Countdown has {', '.join(SPLIT_BUCKETS)}")
    rng = random.Random(f"{seed}/{split}")
    seen: set[tuple] = set()
    drawn_since = 0
    while True:
        drawn_since += 1
        if drawn_since > ENOUGH:
            raise ValueError(
                f"no more problems after {len(seen):,} of split {split!r}: raise largest, highest or limit"
            )
        count = rng.randint(config.smallest, config.largest)
        numbers = tuple(rng.randint(1, config.highest) for _ in range(count))
        if _bucket(sorted(numbers), BUCKETS) not in SPLIT_BUCKETS[split]:
            continue
        targets = [target for target in reachable(terms_of(numbers), config.limit) if target >= config.lowest]
        if not targets:
            continue
        target = rng.choice(sorted(targets))
        asked = (*numbers, target)
        if asked in seen or (split != "test" and _bucket([target], HELD_OUT_TARGETS) == 0):
            continue
        seen.add(asked)
        drawn_since = 0
        openings = list(moves(terms_of(numbers), config.limit))
        good = sum(target in reachable(move.remaining, config.limit) for move in openings)
        id = f"{split}-n{count}-{good}of{len(openings)}-{len(seen):06d}"
        listed = ", ".join(map(str, numbers))
        question = QUESTION.format(target=target, numbers=listed)
        yield CountdownProblem(id, question, f"{target} from {listed}", numbers, target)


def _bucket(values: Sequence[int], buckets: int) -> int:
    return hashlib.sha256(" ".join(map(str, values)).encode()).digest()[0] % buckets


# ---- the judge ----

SIGNS = {"×": "*", "·": "*", "\\times": "*", "\\cdot": "*", "÷": "/", "\\div": "/", "−": "-", "–": "-"}
SIGNS |= dict.fromkeys(("\\left", "\\right", "\\,", "\\!", "$"), "")
PRECEDENCE = {"+": 1, "-": 1, "*": 2, "/": 2}


class NotExact(ValueError):
    """A division by zero, or one with a remainder."""


def evaluate(expression: str) -> tuple[int, list[int]]:
    """The value of an expression and the numbers it uses; a ValueError if it is none or not exact in integers.

    >>> evaluate("(8-3)*4")
    (20, [8, 3, 4])
    """
    if len(expression) > LONGEST:
        raise ValueError(f"an expression of {len(expression):,} characters; at most {LONGEST} are read")
    words = re.findall(r"[0-9]+|\S", expression)
    values, operators, numbers = list[int](), list[str](), list[int]()
    operand_next = True

    def apply() -> None:
        right, left = values.pop(), values.pop()
        operator = operators.pop()
        if operator == "/" and (right == 0 or left % right):
            raise NotExact(f"{left}/{right} is not a whole number")
        results = {"+": lambda: left + right, "-": lambda: left - right, "*": lambda: left * right}
        values.append(results[operator]() if operator != "/" else left // right)

    for word in words:
        if operand_next and word.isascii() and word.isdigit():
            values.append(int(word))
            numbers.append(int(word))
            operand_next = False
        elif operand_next and word == "(":
            operators.append(word)
        elif not operand_next and word in PRECEDENCE:
            while operators and PRECEDENCE.get(operators[-1], 0) >= PRECEDENCE[word]:
                apply()
            operators.append(word)
            operand_next = True
        elif not operand_next and word == ")" and "(" in operators:
            while operators[-1] != "(":
                apply()
            operators.pop()
        else:
            raise ValueError(f"{word!r} is not expected here")
    if operand_next or "(" in operators:
        raise ValueError("the expression is incomplete")
    while operators:
        apply()
    return values[0], numbers


def answer_of(text: str) -> str:
    """The expression that a response answers with: its answer block, or the last box of a response without one."""
    answer = (answer_block(text) or text)[-4 * LONGEST :]
    _, box, boxed = answer.rpartition("\\boxed{")
    answer = boxed.rpartition("}")[0] or boxed if box else answer
    for sign, plain in SIGNS.items():
        answer = answer.replace(sign, plain)
    return answer.strip()


class CountdownJudge(Judge):
    """Exact, in this process: an expression is at most a few operations."""

    def __init__(self, config: GradingConfig | None = None): ...

    def grade(self, pairs: Sequence[tuple[str, Gold]]) -> list[Verdict]:
        return [self._verdict(text, gold if isinstance(gold, str) else gold[0]) for text, gold in pairs]

    def _verdict(self, text: str, gold: str) -> Verdict:
        known = re.fullmatch(r"(\d+) from (\d+(?:, \d+)*)", gold)
        if known is None:
            raise BadData(f"gold {gold!r} is no Countdown problem; write it as `20 from 3, 8, 4`")
        target, numbers = int(known[1]), sorted(map(int, known[2].split(", ")))
        expression, equals, claimed = answer_of(text).partition("=")
        try:
            value, used = evaluate(expression)
        except NotExact:
            return Verdict.WRONG
        except ValueError:
            return Verdict.UNPARSABLE
        right = value == target and sorted(used) == numbers and (not equals or claimed.strip() == str(target))
        return Verdict.CORRECT if right else Verdict.WRONG

    def equivalence_classes(self, texts: Sequence[str]) -> list[int]:
        """Answers with the same numbers and the same value are equal; one that is no expression equals none."""
        numbers: dict[object, int] = {}
        return [numbers.setdefault(self._meaning(text, place), len(numbers)) for place, text in enumerate(texts)]

    def _meaning(self, text: str, place: int) -> object:
        try:
            value, used = evaluate(answer_of(text).partition("=")[0])
        except ValueError:
            return place
        return value, tuple(sorted(used))


# ---- the task ----


def without_duty_to_spawn(rollout: Rollout, config: Any, budget: int) -> float:
    """correctness_format (train/rewards.py), where a response that needed no workers is not ill-formed for it."""
    if not rollout.correct:
        return 0.0
    full = 1.0 if rollout.flaw in (None, Flaw.NO_SPAWN) else config.correct_only
    return max(0.0, full - config.penalty(rollout.response, budget))


class Countdown(Task):
    """`task: dccot.data.countdown:Countdown`. Problems are rows with the question and the gold above."""

    instruction = "Write the expression within <answer></answer>."
    reward = staticmethod(without_duty_to_spawn)
    may_work_alone = True

    def open_judge(self) -> Judge:
        return CountdownJudge(self.grading)
