"""Two worlds for the shape of a tree: lists of 2 to 12 parts, where width matters, and sums of sums, where depth does.

    lists   Add A: 3 1 4; B: 2 7; C: 5 9 9. Last digit?            as many parts as it has
    sums    Add A: 3 1; B: 2 7; C: 5 9 | D: … | G: … Last digit?   three groups of three parts

A sequential solution adds part after part, keeping last digits, then the sums; of sums of sums each group first:

    <think>
    A: 3 + 1 = 4, 4 + 4 = 8.
    B: 2 + 7 = 9.
    C: 5 + 9 = 4, 4 + 9 = 3.
    8 + 9 = 7, 7 + 3 = 0.
    </think><answer>\\boxed{0}</answer>

The same words for workers, by three rules:

    fixed    three workers, each with a third of the parts; each group of a sum of sums is one
    chosen   as many workers as there are parts, listed as tasks
    nested   three workers for the groups, each with three workers of its own for its parts

    <folder>/problems/{train,validation,test}.jsonl  id, question, gold    <folder>/base.jsonl    <folder>/init/
"""

from __future__ import annotations

import random
import string
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice, pairwise
from pathlib import Path
from typing import Literal

from dccot.core.config import Positive, Seed
from dccot.core.files import write_jsonl_atomic
from dccot.data.problems import Problem
from dccot.data.prompts import INSTRUCTION, PARALLEL_INSTRUCTION, spawning_rules
from dccot.data.task import Task
from dccot.lab.worlds.arithmetic import answered, make_tokenizer, spawned
from dccot.lab.worlds.world import TinyModel, checkpoint_config, look_back
from dccot.rollout.tags import THINK_OPEN

WIDTH = [2, 12]  # parts of a list, and workers to choose from
GROUPS = 3  # of a sum of sums, and parts of each
SIZES = range(2, 5)  # digits of a part
SPLITS = ("base", "train", "validation", "test")
Part = tuple[str, list[int]]  # label, digits


@dataclass
class PartsConfig:
    seed: Seed = 0
    family: Literal["lists", "sums"] = "lists"
    base: Positive = 20_000  # problems with sequential solutions, for the base model
    train: Positive = 4_000
    validation: Positive = 60
    test: Positive = 200
    model: TinyModel = field(default_factory=TinyModel)


def problem_stream(seed: int, family: str, split: str, taken: set[str]) -> Iterator[Problem]:
    """Endless problems of one split; `taken` are questions that no split may ask again. A list's id names its size."""
    rng = random.Random(f"{seed}/{family}/{split}")
    while True:
        count = GROUPS**2 if family == "sums" else rng.randint(*WIDTH)
        parts = [(label, rng.choices(range(10), k=rng.choice(SIZES))) for label in string.ascii_uppercase[:count]]
        groups = [parts[i : i + GROUPS] for i in range(0, count, GROUPS)] if family == "sums" else [parts]
        asked = " | ".join("; ".join(f"{label}: {' '.join(map(str, digits))}" for label, digits in g) for g in groups)
        if asked not in taken:
            taken.add(asked)
            gold = sum(sum(digits) for _, digits in parts) % 10
            yield Problem(f"{split}-{count}-{len(taken):06d}", f"Add {asked}. Last digit?", str(gold))


def groups_of(problem: Problem) -> list[list[Part]]:
    """Read off the question."""
    asked = problem.question.removeprefix("Add ").removesuffix(". Last digit?")
    part = lambda text: (text.split(": ")[0], [int(digit) for digit in text.split(": ")[1].split()])
    return [[part(each) for each in group.split("; ")] for group in asked.split(" | ")]


def added(numbers: Sequence[int]) -> tuple[str, int]:
    """`3 + 1 = 4, 4 + 4 = 8`, always the last digit, and the sum."""
    steps, total = [], numbers[0]
    for number in numbers[1:]:
        steps.append(f"{total} + {number} = {(total + number) % 10}")
        total = (total + number) % 10
    return ", ".join(steps) or str(total), total


def line(part: Part) -> str:
    return f"{part[0]}: {added(part[1])[0]}.\n"


def joined(parts: Sequence[Part]) -> tuple[str, int]:
    """The sum of parts that have been added."""
    text, total = added([added(digits)[1] for _, digits in parts])
    return f"{text}.\n", total


def solution(problem: Problem, thinking: str, sums: Sequence[int]) -> str:
    text, total = added(sums)
    return f"{THINK_OPEN}\n{thinking}{text}.\n{answered(str(total))}"


def sequential_solution(problem: Problem) -> str:
    groups = groups_of(problem)
    if len(groups) == 1:
        return solution(problem, "".join(map(line, groups[0])), [added(digits)[1] for _, digits in groups[0]])
    thinking = "".join("".join(map(line, group)) + joined(group)[0] for group in groups)
    return solution(problem, thinking, [joined(group)[1] for group in groups])


def rewrite_fixed(problem: Problem, text: str, *, attempt: int = 0) -> str:
    groups = groups_of(problem)
    if len(groups) == 1:
        parts = groups[0]
        cuts = [len(parts) * i // 3 for i in range(4)]
        groups = [parts[begin:end] for begin, end in pairwise(cuts)]
    workers = ["".join(map(line, group)) + joined(group)[0] if group else "none.\n" for group in groups]
    return solution(problem, f"Three.\n{spawned(workers)}\n", [joined(group)[1] for group in groups if group])


def rewrite_chosen(problem: Problem, text: str, *, attempt: int = 0) -> str:
    parts = [part for group in groups_of(problem) for part in group]
    tasks = "".join(f"<task_{i}>{label}</task_{i}>" for i, (label, _) in enumerate(parts, start=1))
    thinking = f"{tasks}{spawned([line(part) for part in parts])}\n"
    return solution(problem, thinking, [added(digits)[1] for _, digits in parts])


def rewrite_nested(problem: Problem, text: str, *, attempt: int = 0) -> str:
    groups = groups_of(problem)
    workers = [f"Three.\n{spawned([line(part) for part in group])}\n{joined(group)[0]}" for group in groups]
    return solution(problem, f"Three.\n{spawned(workers)}\n", [joined(group)[1] for group in groups])


class Parts(Task):
    """The task of configs/mini/width.yaml and depth.yaml; their rewriting stages name the rule."""

    rewrite = staticmethod(rewrite_fixed)


def make_parts(config: PartsConfig, folder: Path) -> None:
    """Write everything; the same configuration gives the same bytes."""
    from dccot.model.weights import create_checkpoint

    taken: set[str] = set()
    (folder / "problems").mkdir(parents=True, exist_ok=True)
    for split in SPLITS:
        rows = []
        for problem in islice(problem_stream(config.seed, config.family, split, taken), getattr(config, split)):
            solved = sequential_solution(problem)
            more = {"completion": solved, "solution": solved} if split == "base" else {}
            rows.append({"id": problem.id, "question": problem.question, "gold": problem.gold, **more})
        write_jsonl_atomic(folder / "base.jsonl" if split == "base" else folder / "problems" / f"{split}.jsonl", rows)
    limits = ((WIDTH, 1), (3, 2))
    sentences = [f" {PARALLEL_INSTRUCTION}", f" {INSTRUCTION}", *(f" {spawning_rules(*each)}" for each in limits)]
    phrases = ("Add ", "Last digit?", "Three", "none", ".\n", ", ", "; ", " | ", " = ", " + ", "\\boxed{")
    tokenizer = make_tokenizer(workers=WIDTH, phrases=phrases, sentences=sentences)
    shape = checkpoint_config(config.model, tokenizer)
    create_checkpoint(shape, folder / "init", tokenizer=tokenizer, seed=config.seed, prepare=look_back)
