"""The miniature world: arithmetic whose reasoning splits, a tokenizer made for it, and solutions in both formats, all from a seed.

    sum          Add a: 4, b: 7, c: 5, … .                           many one-digit terms
    products     Add a: 34*7, b: 12*8, … .                           each term takes a few steps
    expressions  Add a: (3+4)*6, b: 9*7-5, … .                       each term takes a few steps
    chain        Start with 7. Keep the last digit after a: *3+5, b: *8+2, … .     every step needs the one before: nothing splits

A sequential solution goes through the labels and carries a running total. Each step is either written out or done in the head;
written out is longer and easier to get right, so length and accuracy pull against each other as they do in real reasoning:

    <think>
    a: 30*7=210, 4*7=28, 210+28=238                                   written out
    b: 12*8=96, 238+96=334                                            in the head
    </think><answer>\\boxed{334}</answer>

`rewrite_parallel` turns such a text into the parallel format with the text's own steps. The workers of a sum, of products or of
expressions take consecutive labels and report under their number; the director adds the reports up as it would add terms:

    <think>
    Split at c, e.
    <spawn_workers><worker_1>a: …, b: …, 1: 334</worker_1><worker_2>c: …, d: …, 2: 95</worker_2><worker_3>…</worker_3></spawn_workers>
    1: 334, 2: 334+95=429, 3: …
    </think><answer>\\boxed{…}</answer>

In a chain the director does every step itself and the workers only check one step each: the format demands workers, and checking
is all that is independent there.
"""
from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from string import ascii_lowercase
from typing import TYPE_CHECKING

from dccot.data.problems import Problem
from dccot.data.prompting import CHAT_TOKENS, INSTRUCTION, PARALLEL_INSTRUCTION
from dccot.rollout.protocol import (
    ANSWER_CLOSE,
    ANSWER_OPEN,
    SPAWN_CLOSE,
    SPAWN_OPEN,
    THINK_CLOSE,
    THINK_OPEN,
    all_tags,
    worker_close,
    worker_open,
)

if TYPE_CHECKING:
    from transformers import Qwen2Tokenizer

WORKERS = 3
EOS = "<｜end▁of▁sentence｜>"
CHAIN_OPENING, SPLIT, CHECK = "Start with ", "Split at ", "Check "

Tree = int | tuple[str, "Tree", "Tree"]  # an expression: a number or (operator, left, right)


# ---- problems ------------------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Family:
    """How many terms a problem has, in training and in the held-out larger split, and how often the family is drawn."""

    sizes: range
    larger: range
    weight: float


FAMILIES = {
    "sum": Family(range(12, 22), range(23, 27), 0.25),
    "products": Family(range(4, 9), range(9, 12), 0.3),
    "expressions": Family(range(4, 9), range(9, 12), 0.3),
    "chain": Family(range(5, 10), range(10, 13), 0.15),
}

# A problem's split is a hash of its question, so two splits never share one, whatever their sizes and seeds.
SPLIT_BUCKETS = {"base": range(8), "train": range(8, 14), "validation": range(14, 15), "test": range(15, 16)}
BUCKETS = 16
LARGER = "larger"


@dataclass(frozen=True)
class ArithmeticProblem(Problem):
    """A problem that knows what it is made of. Its id reads `split-family-number`, so results can be told apart by family."""

    family: str
    labels: str  # one letter per term or step
    terms: tuple  # an expression each; in a chain (multiplier, summand) of each step
    start: int | None = None  # what a chain starts with


def make_splits(seed: int, sizes: Mapping[str, int]) -> dict[str, list[ArithmeticProblem]]:
    """`sizes` problems for each named split: base, train, validation, test, and `larger`, whose problems are larger than all others."""
    return {split: _take(problem_stream(seed, split), count) for split, count in sizes.items()}


def problem_stream(seed: int, split: str) -> Iterator[ArithmeticProblem]:
    """Endless problems of one split, no question twice."""
    if split != LARGER and split not in SPLIT_BUCKETS:
        raise ValueError(f"unknown split {split!r}; the arithmetic world has {', '.join([*SPLIT_BUCKETS, LARGER])}")
    rng = random.Random(f"{seed}/{split}")
    seen: set[str] = set()
    while True:
        family = rng.choices(list(FAMILIES), [f.weight for f in FAMILIES.values()])[0]
        problem = _draw(rng, family, larger=split == LARGER, id=f"{split}-{family}-{len(seen):06d}")
        if problem.question not in seen and (split == LARGER or _bucket(problem.question) in SPLIT_BUCKETS[split]):
            seen.add(problem.question)
            yield problem


def _take(stream: Iterator[ArithmeticProblem], count: int) -> list[ArithmeticProblem]:
    return [problem for problem, _ in zip(stream, range(count))]


def _bucket(question: str) -> int:
    return hashlib.sha256(question.encode()).digest()[0] % BUCKETS


def _draw(rng: random.Random, family: str, *, larger: bool, id: str) -> ArithmeticProblem:
    size = rng.choice(FAMILIES[family].larger if larger else FAMILIES[family].sizes)
    first = rng.randrange(len(ascii_lowercase) - size + 1)  # any letter may come first, so larger problems hold no unseen label
    labels = ascii_lowercase[first : first + size]
    if family == "chain":
        start, terms = rng.randint(2, 9), tuple((rng.randint(2, 9), rng.randint(1, 9)) for _ in labels)
        listed = ", ".join(f"{label}: *{times}+{plus}" for label, (times, plus) in zip(labels, terms))
        state = start
        for times, plus in terms:
            state = (state * times + plus) % 10
        question = f"{CHAIN_OPENING}{start}. Keep the last digit after {listed}."
        return ArithmeticProblem(id, question, str(state), family, labels, terms, start)
    terms = tuple(_TERMS[family](rng) for _ in labels)
    listed = ", ".join(f"{label}: {_text(term)}" for label, term in zip(labels, terms))
    return ArithmeticProblem(id, f"Add {listed}.", str(sum(map(_value, terms))), family, labels, terms)


def _expression(rng: random.Random) -> Tree:
    """(a+b)*c+d and the like; the bracket is one digit, the whole is positive."""
    total, times = rng.randint(2, 9), rng.randint(2, 9)
    part = rng.randint(1, total - 1)
    bracket = rng.choice([("+", part, total - part), ("-", total + part, part) if total + part < 10 else ("+", part, total - part)])
    operator = rng.choice("+-")
    return (operator, ("*", bracket, times), rng.randint(1, 9 if operator == "+" else min(9, total * times - 1)))


_TERMS = {
    "sum": lambda rng: rng.randint(2, 9),
    "products": lambda rng: ("*", rng.randint(11, 49), rng.randint(3, 9)),
    "expressions": _expression,
}


# ---- arithmetic written out ----------------------------------------------------------------------------------------------

def _value(tree: Tree) -> int:
    if isinstance(tree, int):
        return tree
    operator, left, right = tree[0], _value(tree[1]), _value(tree[2])
    return {"+": left + right, "-": left - right, "*": left * right}[operator]


def _text(tree: Tree) -> str:
    if isinstance(tree, int):
        return str(tree)
    operator, left, right = tree
    bracketed = operator == "*" and not isinstance(left, int) and left[0] != "*"
    return f"({_text(left)}){operator}{_text(right)}" if bracketed else f"{_text(left)}{operator}{_text(right)}"


def _equations(tree: Tree, *, written_out: bool) -> list[str]:
    """`34*7=238` in the head; `30*7=210`, `4*7=28`, `210+28=238` written out. A bare number needs no equation."""
    if isinstance(tree, int):
        return []
    if not written_out:
        return [f"{_text(tree)}={_value(tree)}"]
    operator, left, right = tree[0], _value(tree[1]), _value(tree[2])
    if operator == "*" and left >= 10:
        tens, units = left // 10 * 10, left % 10
        parts = [(number, number * right) for number in (tens, units) if number]
        spelled = [f"{number}*{right}={product}" for number, product in parts]
        return spelled + ([f"{parts[0][1]}+{parts[1][1]}={left * right}"] if len(parts) == 2 else [])
    return [*_equations(tree[1], written_out=True), *_equations(tree[2], written_out=True), f"{left}{operator}{right}={_value(tree)}"]


def sequential_solution(problem: ArithmeticProblem, *, seed: int = 0, written_out: float = 0.5) -> str:
    """A correct sequential solution as the base model should write it; every step is written out with that probability."""
    rng = random.Random(f"{seed}/{problem.question}")
    lines, total = [], problem.start
    for label, term in zip(problem.labels, problem.terms):
        long = rng.random() < written_out
        if problem.family == "chain":
            step: Tree = ("+", ("*", total, term[0]), term[1])
            lines.append(f"{label}: {', '.join(_equations(step, written_out=long))}\n")
            total = _value(step) % 10
        else:
            line, total = _line(label, _equations(term, written_out=long), _value(term), total)
            lines.append(line)
    if problem.family == "chain" and rng.random() < 0.5:
        checked = sorted(rng.sample(range(len(lines)), WORKERS))
        lines += [f"{CHECK}{', '.join(problem.labels[i] for i in checked)}.\n", *(lines[i] for i in checked)]
    return f"{THINK_OPEN}\n{''.join(lines)}{_answer(total)}"


def _line(label: str, evaluation: list[str], value: int, total: int | None) -> tuple[str, int]:
    """The line of one term and the running total behind it; the first term of a run has no total to be added to."""
    if total is None:
        return f"{label}: {', '.join(evaluation) or value}\n", value
    return f"{label}: {', '.join([*evaluation, f'{total}+{value}={total + value}'])}\n", total + value


def _answer(value: int | str) -> str:
    return f"{THINK_CLOSE}{ANSWER_OPEN}\\boxed{{{value}}}{ANSWER_CLOSE}"


# ---- the rewriting rule --------------------------------------------------------------------------------------------------

def rewrite_parallel(problem: Problem, sequential_text: str, *, attempt: int = 0) -> str:
    """The same reasoning in the parallel format. A text that the rule cannot read comes back as it is: acceptance refuses it.

    The steps are the text's own, mistakes included; only running totals are new, because a worker starts from nothing.
    Where to split is drawn at random near thirds: what a good division is, is left for the policy to learn.
    """
    rng = random.Random(f"{attempt}/{problem.question}/{sequential_text}")
    thought = sequential_text.partition(THINK_CLOSE)[0]
    if problem.question.startswith(CHAIN_OPENING):
        return _chain_with_checks(thought, sequential_text)
    lines = re.findall(r"^([a-z]): (.+)\n", thought, re.MULTILINE)
    if [label for label, _ in lines] != re.findall(r"([a-z]): ", problem.question):
        return sequential_text
    try:
        steps = [(label, *_own_step(work.split(", "), first=i == 0)) for i, (label, work) in enumerate(lines)]
    except ValueError:
        return sequential_text
    cuts = _cuts(len(steps), rng)
    workers, reports = [], []
    for number, part in enumerate((steps[: cuts[0]], steps[cuts[0] : cuts[1]], steps[cuts[1] :]), 1):
        text, total = _run(part)
        workers.append(f"{text}{number}: {total}\n")
        reports.append((str(number), [], total))
    combined, total = _run(reports[1:], reports[0][2])
    plan = f"{SPLIT}{steps[cuts[0]][0]}, {steps[cuts[1]][0]}.\n"
    return f"{THINK_OPEN}\n{plan}{_block(workers)}{combined}{_answer(total)}"


def _chain_with_checks(thought: str, sequential_text: str) -> str:
    """The director walks the chain; the steps that the text checks afterwards are checked by a worker each."""
    walk, _, checks = thought.partition(CHECK)
    plan, *checked = checks.splitlines(keepends=True) or [""]
    if len(checked) != WORKERS:
        return sequential_text
    return f"{walk}{CHECK}{plan}{_block(checked)}{sequential_text[len(thought) :]}"


def _own_step(parts: list[str], *, first: bool) -> tuple[list[str], int]:
    """A line's own equations without the running total, and the term's value as the text has it."""
    if first:
        return (parts if "=" in parts[-1] else []), int(parts[-1].rpartition("=")[2])
    *evaluation, addition = parts
    found = re.fullmatch(r"\d+\+(\d+)=\d+", addition)
    if found is None:
        raise ValueError(f"{addition!r} does not add to a running total")
    return evaluation, int(found.group(1))


def _run(steps: list[tuple[str, list[str], int]], total: int | None = None) -> tuple[str, int]:
    """Lines of consecutive steps and the running total behind them; a run that starts from nothing has no total to begin with."""
    text = ""
    for label, evaluation, value in steps:
        line, total = _line(label, evaluation, value, total)
        text += line
    return text, total


def _cuts(count: int, rng: random.Random) -> tuple[int, int]:
    """Where workers 2 and 3 begin: thirds, each cut moved by up to a sixth of the steps, no worker without a step."""
    slack = count // 6
    second = max(1, round(count / 3) + rng.randint(-slack, slack))
    third = min(count - 1, max(second + 1, round(count * 2 / 3) + rng.randint(-slack, slack)))
    return second, third


def _block(workers: list[str]) -> str:
    inside = "".join(f"{worker_open(i)}{text}{worker_close(i)}" for i, text in enumerate(workers, 1))
    return f"{SPAWN_OPEN}{inside}{SPAWN_CLOSE}"


# ---- the tokenizer -------------------------------------------------------------------------------------------------------

# An instruction of the prompts is one token, so that a prompt costs little more than its question.
SENTENCES = (f" {PARALLEL_INSTRUCTION}", f" {INSTRUCTION}")
PHRASES = ("Add ", CHAIN_OPENING, ". Keep the last digit after ", SPLIT, CHECK, ", ", ".\n", "\\boxed{")
TAG_PIECES = ("</", ">\n", "think", "answer", "spawn_workers", "worker_")


def make_tokenizer(single_token_tags: bool = True) -> Qwen2Tokenizer:
    """Bytes, with one token for each label, phrase and prompt sentence; any text comes back from decode(encode(text)) (in NFC).

    With `single_token_tags` off a tag is a few ordinary tokens, and its `>` may be merged with a newline, as in the tokenizers of
    real models. It is a Qwen2Tokenizer because that is what transformers opens beside a qwen2 model, whatever was saved.
    """
    from tokenizers import AddedToken, pre_tokenizers
    from transformers import Qwen2Tokenizer

    alphabet = {byte: i for i, byte in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    roles = {"bos_token": CHAT_TOKENS[0], "eos_token": EOS, "pad_token": EOS, "unk_token": EOS}
    tokenizer = Qwen2Tokenizer(vocab=alphabet, merges=[], clean_up_tokenization_spaces=False, **roles)
    tokenizer.add_tokens([AddedToken(text, special=True, normalized=False) for text in CHAT_TOKENS])
    labels = [f"{label}: " for label in (*ascii_lowercase, *map(str, range(1, WORKERS + 1)))]
    tags = all_tags(WORKERS) if single_token_tags else TAG_PIECES
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in (*tags, *labels, *PHRASES, *SENTENCES)])
    return tokenizer
