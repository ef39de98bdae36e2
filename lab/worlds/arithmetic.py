"""The miniature world: arithmetic whose reasoning splits, a tokenizer made for it, and solutions in both formats, all
from a seed.

A problem lists labelled digits and asks for the last digit of a result:

    sum          Add a to l and keep the last digit: a: 4, b: 7, c: 5, … .
    products     Add a to l and keep the last digit: a: 6*b: 9, c: 7*d: 8, … .
    expressions  Add a to l and keep the last digit: a: 3*b: 4+c: 6, d: 5*e: 2+f: 7, … .
    chain        Multiply 7 and add in turn a to l and keep the last digit: a: 3, b: 5, … .     ((7*a+b)*c+d)…

A sequential solution splits the list into three parts, carries a running total through each, reports each part's total
under its number, and adds up the reports. Its first word names the style. `rewrite_parallel` gives each part to a
worker; the parts are independent and come in any order.

    <think>                                              <think>
    Plainly.                                             Plainly.
    a to f, g to l, m to r.                              a to f, g to l, m to r.
    1) a to f                                            <spawn_workers>
    a: 3*b: 4=2               the first product          <worker_1>1) a to f … 1: 8</worker_1>
    c: 6*d: 9=4, so 4+2=6     a product, then the total  <worker_2>2) g to l … 2: 8</worker_2>
    e: 6*f: 7=2, so 2+6=8                                <worker_3>3) m to r … 3: 7</worker_3>
    1: 8                                                 </spawn_workers>
    2) g to l …                                          2: 8+8=6
    2: 8+8=6                                             3: 7+6=3
    3: 7+6=3                                             </think><answer>\\boxed{3}</answer>
    </think><answer>\\boxed{3}</answer>

Carefully, it says everything twice, `c: 6*d: 9=4, so 4+2=6, yes 6*d: 9=4, so 4+2=6`: words that a length penalty can
remove. Quickly, it works out a product together with what is added to it, `c: 6*d: 9+2=6`, which is shorter and harder
to get right. So length and accuracy trade off as in real reasoning.

Nothing in a chain is independent except double-checking. Most sequential solutions of chains walk to the end, note it,
check three steps, one per part, and return to the end; those become the director's walk and one worker per check. The
others have no use for workers and are not rewritten.

Unmarked, a solution has no parts at all: one running total through the whole list, and a chain is never checked.
Rewritten it looks the same as above, but the rule has to find the parts, start a new total in each, and add the plan,
the reports and their sum (in a chain, the checks): things that the base has never written.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice, pairwise
from string import ascii_letters as LABELS
from typing import TYPE_CHECKING

from dccot.data.problems import Problem
from dccot.data.prompts import CHAT_TOKENS, INSTRUCTION, PARALLEL_INSTRUCTION
from dccot.data.task import Task
from dccot.rollout import tags

if TYPE_CHECKING:
    from transformers import Qwen2Tokenizer

WORKERS = 3
EOS = "<｜end▁of▁sentence｜>"
TO, RULE = " to ", " and keep the last digit: "
SO, YES, END = "so ", ", yes ", "end: "
CAREFULLY, PLAINLY, QUICKLY = "Carefully.\n", "Plainly.\n", "Quickly.\n"


# ---- problems ----


@dataclass(frozen=True)
class Family:
    """The question, how a step's digits are combined, and a problem's steps: in training, in the larger split."""

    opening: str
    operators: str
    sizes: range
    larger: range
    weight: float

    @property
    def width(self) -> int:
        """Digits per step."""
        return len(self.operators) + 1


FAMILIES = {
    "sum": Family("Add ", "", range(10, 17), range(18, 23), 0.34),
    "products": Family("Add ", "*", range(6, 11), range(13, 17), 0.28),
    "expressions": Family("Add ", "*+", range(5, 9), range(10, 13), 0.26),
    "chain": Family("Multiply {} and add in turn ", "", range(6, 11), range(12, 16), 0.12),
}
CHECKED = 0.8  # share of chain solutions that check some steps
MANNERS = {CAREFULLY: 0.42, PLAINLY: 0.22, QUICKLY: 0.36}  # how solutions are written, and how often
SMALLEST = 3  # problems for the base model start here, and small ones are frequent, as a curriculum

# A problem's split is a hash of its question, so two splits never share one, whatever their sizes and seeds.
SPLIT_BUCKETS = {"base": range(8), "train": range(8, 14), "validation": range(14, 15), "test": range(15, 16)}
BUCKETS = 16
LARGER = "larger"


@dataclass(frozen=True)
class ArithmeticProblem(Problem):
    """A problem with its parts. Its id is `split-family-number`, so results can be grouped by family."""

    family: str
    labels: str
    digits: tuple[int, ...]
    start: int = 0  # the start of a chain

    def steps(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Labels and digits of each step."""
        width = FAMILIES[self.family].width
        for i in range(0, len(self.labels), width):
            yield self.labels[i : i + width], self.digits[i : i + width]


def make_splits(seed: int, sizes: Mapping[str, int]) -> dict[str, list[ArithmeticProblem]]:
    """`sizes` problems of each split: base, train, validation, test, and `larger`, which exceed all others."""
    return {split: list(islice(problem_stream(seed, split), count)) for split, count in sizes.items()}


def problem_stream(seed: int, split: str) -> Iterator[ArithmeticProblem]:
    """Endless problems of one split, no question twice."""
    if split != LARGER and split not in SPLIT_BUCKETS:
        raise ValueError(f"unknown split {split!r}; the arithmetic world has {', '.join([*SPLIT_BUCKETS, LARGER])}")
    rng = random.Random(f"{seed}/{split}")
    seen: set[str] = set()
    while True:
        family = rng.choices(list(FAMILIES), [f.weight for f in FAMILIES.values()])[0]
        problem = _draw(rng, family, split, f"{split}-{family}-{len(seen):06d}")
        if problem.question not in seen and (split == LARGER or _bucket(problem.question) in SPLIT_BUCKETS[split]):
            seen.add(problem.question)
            yield problem


def _bucket(question: str) -> int:
    return hashlib.sha256(question.encode()).digest()[0] % BUCKETS


def _draw(rng: random.Random, family: str, split: str, id: str) -> ArithmeticProblem:
    of = FAMILIES[family]
    sizes = of.larger if split == LARGER else range(SMALLEST, of.sizes.stop) if split == "base" else of.sizes
    size = of.width * rng.choices(sizes, [1 / size if split == "base" else 1 for size in sizes])[0]
    first = rng.randrange(len(LABELS) - size + 1)  # any letter may come first, so larger problems hold no unseen label
    labels, digits = LABELS[first : first + size], tuple(rng.randint(2, 9) for _ in range(size))
    start = rng.randint(2, 9) if family == "chain" else 0
    signs = (of.operators + ",") * size
    items = "".join(f"{label}: {digit}{sign}" for label, digit, sign in zip(labels, digits, signs))
    items = items.replace(",", ", ")[:-2]
    question = f"{of.opening.format(start)}{labels[0]}{TO}{labels[-1]}{RULE}{items}."
    problem = ArithmeticProblem(id, question, "", family, labels, digits, start)
    gold = _walk(problem)[1] if family == "chain" else sum(_worth(digits) for _, digits in problem.steps()) % 10
    return replace(problem, gold=str(gold))


# ---- arithmetic written down ----


def _worth(digits: Sequence[int]) -> int:
    """The last digit of a, a*b or a*b+c."""
    a, b, c = *digits, *(1, 0)[len(digits) - 1 :]
    return (a * b + c) % 10


@dataclass(frozen=True)
class Step:
    """One step of a running total."""

    labels: str  # of its digits, or the number of a report
    adds: int
    working: str = ""  # how it is computed; a plain number needs no working
    in_one_go: bool = False  # together with the total


def _line(step: Step, total: int | None) -> tuple[str, int]:
    """The line of one step and the running total after it; the first step of a run has no total to add to."""
    if total is None:
        return f"{step.labels[0]}: {step.working or step.adds}\n", step.adds
    now = (total + step.adds) % 10
    if step.in_one_go:
        return f"{step.labels[0]}: {step.working.partition('=')[0]}+{total}={now}\n", now
    added = f"{step.adds}+{total}={now}"
    return f"{step.labels[0]}: {f'{step.working}, {SO}' if step.working else ''}{added}\n", now


def _run(steps: Iterable[Step], total: int | None = None) -> tuple[str, int]:
    """Lines of consecutive steps and the running total after them; one that starts from nothing has no total yet."""
    text = ""
    for step in steps:
        line, total = _line(step, total)
        text += line
    return text, total or 0


def sequential_solution(problem: ArithmeticProblem, *, seed: int = 0, marked: bool = True) -> str:
    """A correct sequential solution as the base model should write it, with `marked` parts or without any."""
    rng = random.Random(f"{seed}/{problem.question}")
    manner = rng.choices(list(MANNERS), list(MANNERS.values()))[0]
    if problem.family == "chain":
        walk, total = _walk(problem)
        text = _said("".join(walk), manner)
        plan, checks = _checks(walk, rng)
        if marked and rng.random() < CHECKED:
            text += f"{END}{total}\n{plan}{_in_any_order(checks, rng)}{END}{total}\n"
    else:
        steps = [_step(labels, digits, manner == QUICKLY) for labels, digits in problem.steps()]
        if marked:
            plan, parts, combined, total = _divided(steps, manner, rng)
            text = f"{plan}{_in_any_order(parts, rng)}{combined}"
        else:
            lines, total = _run(steps)
            text = _said(lines, manner)
    return f"{tags.THINK_OPEN}\n{manner}{text}{answered(total)}"


def _divided(steps: Sequence[Step], manner: str, rng: random.Random) -> tuple[str, list[str], str, int]:
    """A list in three parts: what they are, each one's text, the reports added up, and the total."""
    cuts = (0, *_cuts(len(steps), rng), len(steps))
    parts = [steps[begin:end] for begin, end in pairwise(cuts)]
    worked = [(f"{part[0].labels[0]}{TO}{part[-1].labels[-1]}", *_run(part)) for part in parts]
    plan, texts = _parts([(labels, _said(lines, manner), total) for labels, lines, total in worked])
    reports = [Step(str(number), total) for number, (_, _, total) in enumerate(worked, 1)]
    combined, total = _run(reports[1:], reports[0].adds)
    return plan, texts, combined, total


def _checks(lines: Sequence[str], rng: random.Random) -> tuple[str, list[str]]:
    """Three steps of a chain to check: which they are, and each one's text."""
    checked = sorted(rng.sample(range(len(lines)), WORKERS))
    return _parts([(f"{lines[i][0]}{TO}{lines[i][0]}", lines[i], lines[i][-2]) for i in checked])


def _said(lines: str, manner: str) -> str:
    return re.sub(r"(?m)^(\w: )(.+)$", rf"\1\2{YES}\2", lines) if manner == CAREFULLY else lines


def _parts(parts: Sequence[tuple[str, str, int | str]]) -> tuple[str, list[str]]:
    """What the parts are, and for each what it is, its lines, and its result under its number."""
    plan = ", ".join(labels for labels, _, _ in parts) + ".\n"
    return plan, [f"{n}) {labels}\n{lines}{n}: {result}\n" for n, (labels, lines, result) in enumerate(parts, 1)]


def _in_any_order(parts: Sequence[str], rng: random.Random) -> str:
    return "".join(rng.sample(parts, len(parts)))


def _cuts(count: int, rng: random.Random) -> tuple[int, int]:
    """Where parts 2 and 3 begin: near thirds, no part without a step. The best division is for a policy to learn."""
    slack = count // 6
    second = max(1, round(count / 3) + rng.randint(-slack, slack))
    third = min(count - 1, max(second + 1, round(count * 2 / 3) + rng.randint(-slack, slack)))
    return second, third


def _step(labels: str, digits: Sequence[int], in_one_go: bool) -> Step:
    worth = _worth(digits)
    if len(digits) == 1:
        return Step(labels, worth)
    working = f"{digits[0]}*{labels[1]}: {digits[1]}"
    if len(digits) == 2:
        return Step(labels, worth, f"{working}={worth}", in_one_go)
    between = "" if in_one_go else f"={_worth(digits[:2])}+{digits[2]}"
    return Step(labels, worth, f"{working}+{labels[2]}: {digits[2]}{between}={worth}", in_one_go)


def _walk(problem: ArithmeticProblem) -> tuple[list[str], int]:
    """The lines of a chain and where it ends."""
    lines, x = [], problem.start
    for i, (label, digit) in enumerate(zip(problem.labels, problem.digits)):
        step, x = f"{digit}{'*+'[i % 2]}{x}", (digit * x if i % 2 == 0 else digit + x) % 10
        lines.append(f"{label}: {step}={x}\n")
    return lines, x


def answered(value: int | str) -> str:
    """The end of a solution."""
    return f"{tags.THINK_CLOSE}{tags.ANSWER_OPEN}\\boxed{{{value}}}{tags.ANSWER_CLOSE}"


# ---- the rewriting rule ----


def rewrite_parallel(problem: Problem, sequential_text: str, *, attempt: int = 0) -> str:
    """The same words in the parallel format, for every attempt alike. A text that it cannot parse stays as it is."""
    text = sequential_text
    parts = sorted(re.finditer(r"(\d)\) \w to \w\n(?:[a-zA-Z]: .+\n)+\1: \d\n", text), key=lambda part: part[1])
    workers = [part[0] for part in parts]
    begin, end = min((part.start() for part in parts), default=0), max((part.end() for part in parts), default=0)
    if [part[1] for part in parts] != [str(i) for i in range(1, WORKERS + 1)] or end - begin != len("".join(workers)):
        return text
    return f"{text[:begin]}{spawned(workers)}{text[end:]}"


def rewrite_unmarked(problem: Problem, sequential_text: str, *, attempt: int = 0) -> str:
    """A running total, cut into three that start from nothing; a chain, walked by the director and checked by workers.

    Cuts and checks are drawn anew for every attempt. Any other text is returned unchanged.
    """
    text, rng = sequential_text, random.Random(f"{attempt}/{problem.question}")
    manners = "|".join(map(re.escape, MANNERS))
    whole = re.fullmatch(
        rf"({tags.THINK_OPEN}\n)?({manners})((?:[a-zA-Z]: .+\n)+)({tags.THINK_CLOSE}.*)", text, re.DOTALL
    )
    if whole is None:
        return text
    opening, manner, lines, answer = whole[1] or "", whole[2], whole[3], whole[4]
    once = [line.partition(YES)[0].rstrip("\n") + "\n" for line in lines.splitlines()]
    if problem.question.startswith(FAMILIES["chain"].opening.partition("{}")[0]):
        end = f"{END}{once[-1][-2]}\n"
        if len(once) < WORKERS:
            return text
        plan, checks = _checks(once, rng)
        return f"{opening}{manner}{lines}{end}{plan}{spawned(checks)}{end}{answer}"
    steps = [_read_step(line, manner == QUICKLY) for line in once]
    if len(steps) < WORKERS or None in steps:
        return text
    plan, parts, combined, _ = _divided([step for step in steps if step], manner, rng)
    return f"{opening}{manner}{plan}{spawned(parts)}{combined}{answer}"


def _read_step(line: str, in_one_go: bool) -> Step | None:
    """The step that `_line` wrote: its own value and working, without the running total."""
    labels = "".join(re.findall(r"([a-zA-Z]): ", line))
    plain = re.fullmatch(r"\w: (\d)(?:\+\d=\d)?\n", line)
    if plain:
        return Step(labels, int(plain[1]))
    worked = re.fullmatch(rf"\w: (\d\*\w: \d(?:\+\w: \d)?)(?:(=\d\+\d)?=(\d)(?:, {SO}.+)?|\+\d=\d)\n", line)
    if not worked:
        return None
    expression, between, value = worked[1], worked[2] or "", worked[3]
    worth = int(value) if value else _worth([int(digit) for digit in re.findall(r"\d", expression)])
    return Step(labels, worth, f"{expression}{between}={worth}", in_one_go)


def spawned(workers: Sequence[str]) -> str:
    """The block of workers with these texts."""
    inside = "".join(f"{tags.worker_open(i)}{text}{tags.worker_close(i)}" for i, text in enumerate(workers, 1))
    return f"{tags.SPAWN_OPEN}{inside}{tags.SPAWN_CLOSE}"


class Arithmetic(Task):
    """The task of the miniature; its solutions mark their parts."""

    rewrite = staticmethod(rewrite_parallel)


class UnmarkedArithmetic(Task):
    """The same with solutions that mark no parts."""

    rewrite = staticmethod(rewrite_unmarked)


# ---- the tokenizer ----

# An instruction of the prompts is one token, so that a prompt is little longer than its question.
SENTENCES = (f" {PARALLEL_INSTRUCTION}", f" {INSTRUCTION}")
OPENINGS = dict.fromkeys(part for family in FAMILIES.values() for part in family.opening.split("{}"))
PHRASES = (*OPENINGS, TO, RULE, *MANNERS, f", {SO}", YES, END, ", ", ".\n", "\\boxed{")
TAG_PIECES = ("</", ">\n", "think", "answer", "spawn_workers", "worker_")


def make_tokenizer(
    single_token_tags: bool = True,
    *,
    workers: tags.Width = WORKERS,
    phrases: Sequence[str] = PHRASES,
    sentences: Sequence[str] = SENTENCES,
) -> Qwen2Tokenizer:
    """Bytes, with one token for each label, phrase and prompt sentence; decode(encode(text)) is the text (in NFC).

    With `single_token_tags` off a tag is a few ordinary tokens, and its `>` may be merged with a newline, as in the
    tokenizers of real models. It is a Qwen2Tokenizer because that is what transformers loads for a qwen2 model,
    whatever was saved.
    """
    from tokenizers import AddedToken, pre_tokenizers
    from transformers import Qwen2Tokenizer

    alphabet = {byte: i for i, byte in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    roles = {"bos_token": CHAT_TOKENS[0], "eos_token": EOS, "pad_token": EOS, "unk_token": EOS}
    tokenizer = Qwen2Tokenizer(vocab=alphabet, merges=[], clean_up_tokenization_spaces=False, **roles)
    tokenizer.add_tokens([AddedToken(text, special=True, normalized=False) for text in CHAT_TOKENS])
    numbers = range(1, WORKERS + 1)
    labels = [f"{label}: " for label in (*LABELS, *numbers)] + [f"{number}) " for number in numbers]
    spelled = tags.all_tags(workers) if single_token_tags else TAG_PIECES
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in (*spelled, *labels, *phrases, *sentences)])
    return tokenizer
