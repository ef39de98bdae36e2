"""Countdown solved by a search that is written down, alone or by workers, for models that learn to search.

    Reach 20 with 3, 8, 4: use each number exactly once, with +, -, * and /.

A sequential solution tries one opening after another, each to its end, and stops at the first success. A line says the
opening, what is left, and every result that the last operation can have. The first line names the order: sums and
differences of every pair of numbers first, or products and quotients. Some overlook a success and search on; a search
that fails says `none`.

    <think>                                     <think>
    Sums first.                                 Sums first.
    8+3=11, 4: +15 -7 *44                       <spawn_workers>
    8-3=5, 4: +9 -1 *20 yes                     <worker_1>8+3=11, 4: +15 -7 *44
    </think><answer>(8-3)*4</answer>            none</worker_1>
                                                <worker_2>8-3=5, 4: +9 -1 *20 yes
                                                (8-3)*4</worker_2> … <worker_8>none</worker_8> …
                                                </spawn_workers>
                                                </think><answer>(8-3)*4</answer>

`rewrite_parallel` deals the openings to the workers: with three numbers each has one, an operation on a pair, or none
if it is not possible. Each worker stops at its own first success and reports it. A search that succeeded with its first
opening, and one of two numbers, is left as it is. The solutions mark no parts: the rule searches again, in the order
that the first line names.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from dccot.core.config import Positive, Seed
from dccot.core.files import write_jsonl_atomic
from dccot.data.countdown import Countdown, CountdownConfig, Move, moves, problem_stream, terms_of
from dccot.data.problems import Problem
from dccot.data.prompts import PARALLEL_INSTRUCTION
from dccot.lab.worlds.arithmetic import make_tokenizer, spawned
from dccot.lab.worlds.world import TinyModel, checkpoint_config
from dccot.rollout import tags

if TYPE_CHECKING:
    from dccot.model.transformer import Transformer

WORKERS = 12
SUMS, PRODUCTS = "Sums first.\n", "Products first.\n"
OVERLOOKED = 0.03  # share of successes that a demonstration does not notice
YES, NONE = " yes", "none"
SPLITS = ("base", "train", "validation", "test")


def openings(problem: Problem, order: str, limit: int) -> list[Move | None]:
    """The first moves in this order: of each kind of operation on each pair; None where one is not possible."""
    terms = terms_of(read_question(problem.question)[0])
    pairs = [(i, j) for i in range(len(terms)) for j in range(i + 1, len(terms))]
    found: dict[tuple[int, str], Move] = {}
    for number, (i, j) in enumerate(pairs):
        others = (*terms[:i], *terms[i + 1 : j], *terms[j + 1 :])
        for move in moves((terms[i], terms[j]), limit):
            found[number, move.operator] = replace(move, remaining=(move.result, *others))
    kinds = ("+-", "*/") if order == SUMS else ("*/", "+-")
    slots = ((number, operator) for kind in kinds for number in range(len(pairs)) for operator in kind)
    return [found.get(slot) for slot in slots]


def read_question(question: str) -> tuple[list[int], int]:
    known = re.match(r"Reach (\d+) with (\d+(?:, \d+)*):", question)
    if known is None:
        raise ValueError(f"{question[:80]!r} is no Countdown problem; one begins `Reach 20 with 3, 8, 4:`")
    return [int(number) for number in known[2].split(", ")], int(known[1])


@dataclass
class Search:
    """A depth-first search as text; `found` is the expression that ended it."""

    target: int
    limit: int
    overlooks: Callable[[], bool] = lambda: False
    text: str = ""
    found: str | None = None

    def explore(self, tried: Iterable[Move | None], indent: str = "") -> None:
        for move in tried:
            if move is not None and self.found is None:
                self._try(move, indent)

    def _try(self, move: Move, indent: str) -> None:
        if len(move.remaining) == 1:
            hit = move.result.value == self.target and not self.overlooks()
            self.text += f" {move.operator}{move.result.value}{YES if hit else ''}"
            self.found = move.result.text if hit else None
            return
        others = ", ".join(str(term.value) for term in move.remaining[1:])
        step = f"{move.left.value}{move.operator}{move.right.value}={move.result.value}"
        last = len(move.remaining) == 2
        self.text += f"{indent}{step}, {others}:{'' if last else chr(10)}"
        self.explore(moves(move.remaining, self.limit), f"{indent} ")
        self.text += "\n" if last else ""


def sequential_solution(problem: Problem, limit: int, rng: random.Random) -> str:
    numbers, target = read_question(problem.question)
    order = rng.choice([SUMS, PRODUCTS])
    search = Search(target, limit, lambda: rng.random() < OVERLOOKED)
    search.explore(openings(problem, order, limit))
    text = search.text if len(numbers) > 2 else f"{search.text.lstrip()}\n"
    return f"{tags.THINK_OPEN}\n{order}{text}{_answered(search.found)}"


def rewrite_parallel(problem: Problem, sequential_text: str, *, attempt: int = 0, limit: int = 99) -> str:
    """The same search by workers; a text that succeeds at once, or names no order, stays as it is."""
    begin = re.match(rf"(?:{tags.THINK_OPEN}\n)?({SUMS}|{PRODUCTS})", sequential_text)
    numbers, target = read_question(problem.question)
    slots = openings(problem, begin[1], limit) if begin else []
    at_once = Search(target, limit)
    at_once.explore(list(filter(None, slots))[:1])
    if begin is None or at_once.found or len(numbers) == 2:
        return sequential_text
    shares = [Search(target, limit) for _ in range(WORKERS)]
    for place, share in enumerate(shares):
        share.explore(slots[place::WORKERS])
    found = next((share.found for share in shares if share.found), None)
    workers = [f"{share.text}{share.found or NONE}" for share in shares]
    return f"{sequential_text[: begin.end()]}{spawned(workers)}\n{_answered(found)}"


def _answered(expression: str | None) -> str:
    return f"{tags.THINK_CLOSE}{tags.ANSWER_OPEN}{expression or NONE}{tags.ANSWER_CLOSE}"


class CountdownSearch(Countdown):
    """Countdown whose solutions are written searches, rewritten by the rule above."""

    rewrite = staticmethod(rewrite_parallel)


# ---- the world on disk ----


@dataclass
class CountdownWorld:
    seed: Seed = 0
    base: Positive = 20_000  # problems with solutions, for the sequential model to learn from
    train: Positive = 4_000
    validation: Positive = 60
    test: Positive = 200
    problems: CountdownConfig = field(default_factory=CountdownConfig)
    model: TinyModel | None = None  # its shape; None: only the problems, for a pretrained model


def make_countdown(config: CountdownWorld, folder: Path) -> None:
    """Write every split, and an untrained model if one is configured; the same configuration gives the same bytes."""
    from dccot.model.weights import create_checkpoint

    (folder / "problems").mkdir(parents=True, exist_ok=True)
    for split in SPLITS:
        rng, rows = random.Random(f"{config.seed}/solutions"), []
        for problem in islice(problem_stream(config.seed, split, config.problems), getattr(config, split)):
            row = {"id": problem.id, "question": problem.question, "gold": problem.gold}
            if split == "base":
                row["solution"] = sequential_solution(problem, config.problems.limit, rng)
            rows.append(row)
        write_jsonl_atomic(folder / "base.jsonl" if split == "base" else folder / "problems" / f"{split}.jsonl", rows)
    if config.model is not None:
        words = [str(number) for number in range(10, config.problems.limit + 1)]
        words += [f" {operator}" for operator in "+-*/"]
        words += ["Reach ", " with ", ", ", ": use each number exactly once, with +, -, * and /.", SUMS, PRODUCTS]
        sentences = [f" {CountdownSearch.instruction}", f" {PARALLEL_INSTRUCTION}"]
        tokenizer = make_tokenizer(workers=WORKERS, phrases=[*words, YES, NONE], sentences=sentences)
        shape = checkpoint_config(config.model, tokenizer)
        create_checkpoint(shape, folder / "init", tokenizer=tokenizer, seed=config.seed, prepare=louder)


def louder(model: Transformer) -> None:
    """Initialised like a wide model, a small one's embeddings are drowned out by its layers: what reads the residual
    stream starts larger than what writes to it.
    """
    import torch

    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 2 and not name.endswith(("o_proj.weight", "down_proj.weight")):
                weight.mul_(5 if "embed" in name else 2)
