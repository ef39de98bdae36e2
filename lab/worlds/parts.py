"""Two worlds for the shape of a tree: lists of 2 to 12 parts, where width matters, and sums of sums, where depth does.

    lists   7 parts, in each multiply and add in turn: 1a: 3, 1b: 7, 1c: 2. 2a: 4, … Add them up. Last digit?
    sums    3 sums of 3 parts, in each multiply and add in turn: 1a: 3, … | 4a: 5, … | 7a: … Add them up. Last digit?

Each step of a part needs the one before it; the parts need nothing of each other. Only last digits are kept. A
sequential solution works out part after part, reports each result, and adds them up, those of a sum first:

    <think>
    1a: 3, 3
    1b: 7, 3*7=1
    1c: 2. 1+2=3
    1: 3                   the result of part 1
    2a: …
    1: 3>3                 a result, and the total with it
    2: 8>1
    …
    </think><answer>\\boxed{1}</answer>

The same words for workers, by three rules; `1, 4, 7. ` says with which part each worker begins:

    fixed    three workers, each with a third of the parts; each group of a sum of sums is one
    chosen   as many workers as there are parts, listed as tasks
    nested   three workers for the groups, each with three workers of its own for its parts

    <folder>/problems/{train,validation,test}.jsonl  id, question, gold    <folder>/base.jsonl    <folder>/init/
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, islice, pairwise
from pathlib import Path
from typing import Literal

from dccot.core.config import Positive, Seed
from dccot.core.files import write_jsonl_atomic
from dccot.data.problems import Problem
from dccot.data.prompts import INSTRUCTION, PARALLEL_INSTRUCTION, spawning_rules
from dccot.data.task import Task
from dccot.lab.worlds.arithmetic import answered, make_tokenizer, spawned
from dccot.lab.worlds.world import TinyModel, checkpoint_config, look_back
from dccot.rollout.response import Rollout
from dccot.rollout.tags import THINK_OPEN, IllFormed, parse
from dccot.rollout.thread import Thread

WIDTH = [2, 12]  # parts of a list, and workers to choose from
GROUPS = 3  # of a sum of sums, and parts of each
SIZES = range(3, 6)  # digits of a part
LETTERS, NAMES = "abcde", "ABC"  # of the digits of a part, of groups
SPLITS = ("base", "train", "validation", "test")
HOW, END = ", in each multiply and add in turn: ", "Add them up. Last digit?"
SUMS = {GROUPS * each: f"{GROUPS} sums of {each} parts" for each in range(1, GROUPS + 1)}  # by parts in all
Part = tuple[int, list[int]]  # its number and its digits


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
    """Endless problems of one split; `taken` are questions that no split may ask again. An id names how many parts the
    problem has. The base learns from short lists more often, as a curriculum; where it is to learn sums of sums, from
    lists and from groups of one and two parts as well.
    """
    rng, learning = random.Random(f"{seed}/{family}/{split}"), split == "base"
    while True:
        shape = rng.choice(["lists", "sums"]) if learning and family == "sums" else family
        if shape == "lists":
            sizes = list(range(WIDTH[0], WIDTH[1] + 1))
            [count] = rng.choices(sizes, [1 / size if learning else 1 for size in sizes])
        else:
            count = rng.choice(list(SUMS)) if learning else GROUPS**2
        parts = [(i, [rng.randint(2, 9) for _ in range(rng.choice(SIZES))]) for i in range(1, count + 1)]
        each = count // GROUPS if shape == "sums" else count
        groups = [parts[i : i + each] for i in range(0, count, each)]
        asked = "| ".join("".join(map(_asked, group)) for group in groups)
        if asked not in taken:
            taken.add(asked)
            what = SUMS[count] if shape == "sums" else f"{count} parts"
            gold = sum(result_of(part) for part in parts) % 10
            yield Problem(f"{split}-{count}-{len(taken):06d}", f"{what}{HOW}{asked}{END}", str(gold))


def _asked(part: Part) -> str:
    number, digits = part
    return ", ".join(f"{number}{letter}: {digit}" for letter, digit in zip(LETTERS, digits)) + ". "


def groups_of(question: str) -> list[list[Part]]:
    """Read off the question."""
    groups: list[list[Part]] = []
    for group in question.split("| "):
        digits: dict[int, list[int]] = {}
        for number, digit in re.findall(r"(\d+)[a-e]: (\d)", group):
            digits.setdefault(int(number), []).append(int(digit))
        groups.append(list(digits.items()))
    return groups


def worked(part: Part) -> tuple[str, int]:
    """Every step of a part, and its result."""
    number, digits = part
    text, total = "", digits[0]
    for i, (letter, digit) in enumerate(zip(LETTERS, digits)):
        mark = "," if i < len(digits) - 1 else "."
        step = f"{total}{'+*'[i % 2]}{digit}="
        if i:
            total = (total * digit if i % 2 else total + digit) % 10
        text += f"{number}{letter}: {digit}{mark} {step if i else ''}{total}\n"
    return f"{text}{number}: {total}\n", total


def result_of(part: Part) -> int:
    return worked(part)[1]


def added(results: Iterable[tuple[int | str, int]]) -> tuple[str, int]:
    """Results under their names with the running total, and the total."""
    text, total = "", 0
    for name, result in results:
        total = (total + result) % 10
        text += f"{name}: {result}>{total}\n"
    return text, total


def summed(groups: Iterable[Sequence[Part]]) -> list[tuple[str, int]]:
    """Of each group, its results added up and reported, and the total."""
    sums = []
    for name, group in zip(NAMES, groups):
        text, total = added((part[0], result_of(part)) for part in group)
        sums.append((f"{text}{name}: {total}\n", total))
    return sums


def solution(thinking: str, names: Iterable[int | str], results: Iterable[int]) -> str:
    text, total = added(zip(names, results))
    return f"{THINK_OPEN}\n{thinking}{text}{answered(total)}"


def sequential_solution(problem: Problem) -> str:
    groups = groups_of(problem.question)
    steps = ["".join(worked(part)[0] for part in group) for group in groups]
    if len(groups) == 1:
        return solution(steps[0], range(1, len(groups[0]) + 1), map(result_of, groups[0]))
    sums = summed(groups)
    texts = (part for both in zip(steps, [text for text, _ in sums]) for part in both)
    return solution("".join(texts), NAMES, [total for _, total in sums])


def rewrite_fixed(problem: Problem, text: str, *, attempt: int = 0) -> str:
    groups = groups_of(problem.question)
    if len(groups) == 1:
        cuts = [-(-len(groups[0]) * i // 3) for i in range(4)]
        groups = [groups[0][begin:end] for begin, end in pairwise(cuts)]
    return _grouped(groups, ["".join(worked(part)[0] for part in group) for group in groups])


def rewrite_nested(problem: Problem, text: str, *, attempt: int = 0) -> str:
    groups = groups_of(problem.question)
    return _grouped(
        groups, [_divided([[part] for part in group], [worked(part)[0] for part in group]) for group in groups]
    )


def _grouped(groups: Sequence[Sequence[Part]], steps: Sequence[str]) -> str:
    """A worker for each group, which takes these steps and reports the sum."""
    sums = summed(groups)
    divided = _divided(groups, [each + adding for each, (adding, _) in zip(steps, sums)])
    return solution(divided, NAMES, [total for _, total in sums])


def _divided(groups: Sequence[Sequence[Part]], workers: Sequence[str]) -> str:
    """The number of the first part of each group, and the workers."""
    first = groups[0][0][0]
    starts = accumulate(map(len, groups[:-1]), initial=first)
    return f"{', '.join(map(str, starts))}. {spawned(workers)}\n"


def rewrite_chosen(problem: Problem, text: str, *, attempt: int = 0) -> str:
    [parts] = groups_of(problem.question)
    tasks = "".join(f"<task_{i}>{i}</task_{i}>" for i, _ in parts)
    workers = spawned([worked(part)[0] for part in parts])
    return solution(f"{tasks}{workers}\n", [i for i, _ in parts], map(result_of, parts))


class Parts(Task):
    """The task of configs/mini/width.yaml and depth.yaml; their rewriting stages name the rule."""

    rewrite = staticmethod(rewrite_fixed)

    @staticmethod
    def worker_rewards(rollout: Rollout) -> list[float | None]:
        """1.0 for a worker whose last line reports the sum of the parts it was given, 0.0 for any other; None where the
        text before the workers does not say who begins with which part.
        """
        unknown: list[float | None] = [None for _ in rollout.response.threads()]
        try:
            limits = WIDTH if "<task_1>" in rollout.text else 3
            thread = parse(rollout.text, limits, depth=rollout.response.depth)
        except IllFormed:
            return unknown
        results = [result_of(part) for group in groups_of(rollout.question) for part in group]
        found = dict(_judged(thread, results, len(results) + 1))
        return [found.get(id(worker)) for worker in thread.threads()]


def _judged(thread: Thread[str], results: Sequence[int], after: int) -> Iterator[tuple[int, float]]:
    """The id() of every worker below a thread, and its reward; the thread's own parts end before `after`."""
    for text, fork in thread.parts():
        begin = [int(number) for number in re.findall(r"(\d+)(?:[,.] |</task)", text)][-len(fork) :]
        if len(begin) < len(fork):
            continue
        for worker, (first, end) in zip(fork, pairwise([*begin, after])):
            reported = re.search(r"\w: (\d)\n</worker_\d+>$", worker.trunk[-1])
            right = reported is not None and int(reported[1]) == sum(results[first - 1 : end - 1]) % 10
            yield id(worker), float(right)
            yield from _judged(worker, results, end)


def make_parts(config: PartsConfig, folder: Path) -> None:
    """Write everything; the same configuration gives the same bytes."""
    from dccot.model.weights import create_checkpoint

    taken: set[str] = set()
    (folder / "problems").mkdir(parents=True, exist_ok=True)
    for split in SPLITS:
        rows = []
        for problem in islice(problem_stream(config.seed, config.family, split, taken), getattr(config, split)):
            solved = sequential_solution(problem)
            more = {"completion": solved} if split == "base" else {}
            rows.append({"id": problem.id, "question": problem.question, "gold": problem.gold, **more})
        write_jsonl_atomic(folder / "base.jsonl" if split == "base" else folder / "problems" / f"{split}.jsonl", rows)
    limits = ((WIDTH, 1), (3, 2))
    sentences = [f" {PARALLEL_INSTRUCTION}", f" {INSTRUCTION}", *(f" {spawning_rules(*each)}" for each in limits)]
    numbers = range(1, WIDTH[1] + 1)
    phrases = [f"{i}{letter}: " for i in numbers for letter in LETTERS]
    phrases += [text for i in numbers for text in (f"{i}: ", f"{i}, ", f"{i}. ", f"{i} parts")]
    known = SUMS.values() if config.family == "sums" else [SUMS[GROUPS**2]]  # the model of width.yaml stays the same
    phrases += [str(i) for i in numbers if i > 9] + [*known, HOW, END, "| ", "\\boxed{"]
    tokenizer = make_tokenizer(workers=WIDTH, phrases=phrases, sentences=sentences)
    shape = checkpoint_config(config.model, tokenizer)
    create_checkpoint(shape, folder / "init", tokenizer=tokenizer, seed=config.seed, prepare=look_back)
