"""The protocol between director and workers: the tags, what well-formed means, and how a text splits into segments.

    <think> director text <spawn_workers><worker_1> … </worker_1> … <worker_K> … </worker_K></spawn_workers>
            director text … </think> <answer> … </answer>

A response is well-formed when `<think>…</think><answer>…</answer>` is the whole text except for white space, at least
one `<spawn_workers>` block is inside think, every block holds exactly workers 1..K in order with only white space
between them, non-empty director text comes before every block, and there is no other tag. `flaw_of` says which rule is
broken. The reward may go by another rule (`format.rule`, RULES); a text is split into segments by this one only. Two
limits widen it:

    workers: [1, 8]   whoever spawns chooses K: the text before a block, and no other, lists the tasks
                      <task_1> … </task_1> … <task_K> … </task_K>, and K is from 1 to 8
    depth: 2          workers write blocks of their own, by the same rules, so many levels deep
"""

from __future__ import annotations

import json
import re
from argparse import ArgumentTypeError
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from pydantic import PlainValidator

from dccot.core.config import known
from dccot.core.files import BadData
from dccot.model.tokenizer import SPACED
from dccot.rollout.thread import Thread

THINK_OPEN, THINK_CLOSE = "<think>", "</think>"
ANSWER_OPEN, ANSWER_CLOSE = "<answer>", "</answer>"
SPAWN_OPEN, SPAWN_CLOSE = "<spawn_workers>", "</spawn_workers>"
OVERSHOOTS = ("newline", "space", "tag", "text")
_ENDING, _INSERTED = r"<spawn_workers>|</worker_\d+>", r"<worker_\d+>|</spawn_workers>"
_OVERSHOT = re.compile(rf"(?:{_ENDING})((?:(?!{_ENDING}|{_INSERTED}).){{1,40}})(?={_INSERTED})", re.S)
TAG_PATTERN = re.compile(r"</?(?:think|answer|spawn_workers|worker_\d+)>")
TASK_PATTERN = re.compile(r"</?task_\d+>")


def check_width(value: Any) -> int | list[int]:
    ends = value if isinstance(value, list | tuple) else [value, value]
    if len(ends) != 2 or any(type(end) is not int for end in ends) or not 1 <= ends[0] <= ends[1]:
        raise ValueError(f"is {value!r}; it must be at least 1, or a range such as [1, 8]")
    return list(ends) if ends is value else value


def width(text: str) -> int | list[int]:
    """A width on the command line: 3, or [1,8]."""
    try:
        return check_width(json.loads(text))
    except ValueError:
        raise ArgumentTypeError(f"is {text!r}; write 3, or [1,8] for a range") from None


# Workers of a block: exactly so many, or [from, to], as many as tasks are listed before it
Width = Annotated[int | list[int], PlainValidator(check_width)]


def most_workers(workers: Width) -> int:
    return workers if isinstance(workers, int) else workers[1]


def in_words(workers: Width, depth: int = 1) -> str:
    """3 workers; 1 to 8 workers, 2 levels deep."""
    count = str(workers) if isinstance(workers, int) else f"{workers[0]} to {workers[1]}"
    return f"{count} workers" + (f", {depth} levels deep" if depth > 1 else "")


def width_of(text: str, workers: Width) -> int | None:
    """How many workers a text that ends by spawning starts; None if it lists no tasks, too many, or out of order.

    >>> listed = "<task_1>count</task_1> and <task_2>check</task_2><spawn_workers>"
    >>> width_of(listed, [1, 8]), width_of(listed, [3, 8]), width_of(listed[8:], [1, 8]), width_of(listed, 3)
    (2, None, None, 3)
    """
    if isinstance(workers, int):
        return workers
    found = TASK_PATTERN.findall(text)
    count = len(found) // 2
    return count if found == task_tags(count) and workers[0] <= count <= workers[1] else None


def task_tags(count: int) -> list[str]:
    return [f"<{slash}task_{i}>" for i in range(1, count + 1) for slash in ("", "/")]


def worker_open(index: int) -> str:
    """Opening tag of worker `index`, counted from 1."""
    return f"<worker_{index}>"


def worker_close(index: int) -> str:
    return f"</worker_{index}>"


def all_tags(workers: Width) -> list[str]:
    """Every tag of the protocol with `workers` workers."""
    most = most_workers(workers)
    numbered = [tag(i) for i in range(1, most + 1) for tag in (worker_open, worker_close)]
    numbered += [] if isinstance(workers, int) else task_tags(most)
    return [THINK_OPEN, THINK_CLOSE, ANSWER_OPEN, ANSWER_CLOSE, SPAWN_OPEN, SPAWN_CLOSE, *numbered]


class Flaw(StrEnum):
    """Why a text is not well-formed: the first rule that it breaks, reading from the left."""

    NO_THINK = "no_think"  # does not begin with <think>
    NO_SPAWN = "no_spawn"  # thinks without a single block of workers
    EMPTY_DIRECTOR = "empty_director"  # nothing written before a block
    TASKS = "tasks"  # a block without tasks 1..K before it, K outside rollout.workers, or tasks without a block
    WORKER_ORDER = "worker_order"  # a block without exactly workers 1..K in order
    TEXT_BETWEEN_WORKERS = "text_between_workers"
    TAG_IN_WORKER = "tag_in_worker"
    OPEN_WORKER = "open_worker"  # text ends inside a worker
    OPEN_SPAWN = "open_spawn"  # text ends inside a block
    STRAY_TAG = "stray_tag"  # a tag in the director's text that means nothing there
    OPEN_THINK = "open_think"  # text ends before </think>
    NO_ANSWER = "no_answer"  # </think> is not followed by <answer>
    TAG_IN_ANSWER = "tag_in_answer"
    OPEN_ANSWER = "open_answer"
    TEXT_AFTER_ANSWER = "text_after_answer"


class IllFormed(ValueError):
    """Raised by `parse`; `flaw` is the broken rule."""

    def __init__(self, flaw: Flaw, where: str):
        super().__init__(f"{flaw.value} at …{where[-60:]!r}")
        self.flaw = flaw


def parse(text: str, workers: Width = 3, *, depth: int = 1) -> Thread[str]:
    """Split a well-formed text into the threads that wrote it; raise `IllFormed` with the broken rule otherwise.

    A piece ends with the tag that ended it, a worker's begins after its opening tag. White space between the tags of a
    block is dropped.
    """
    parser = _Parser(text, workers)
    before, tag = parser.take()
    if before.strip() or tag != THINK_OPEN:
        raise parser.error(Flaw.NO_THINK)
    thread = parser.thread(0, depth, THINK_CLOSE, (Flaw.OPEN_THINK, Flaw.STRAY_TAG))
    if not thread.forks:
        raise parser.error(Flaw.NO_SPAWN)
    thought = parser.at
    between, tag = parser.take()
    if between.strip() or tag != ANSWER_OPEN:
        raise parser.error(Flaw.NO_ANSWER)
    answer, tag = parser.take()
    if tag != ANSWER_CLOSE or parser.lists_tasks(answer):
        raise parser.error(Flaw.OPEN_ANSWER if tag is None else Flaw.TAG_IN_ANSWER)
    after, tag = parser.take()
    if after.strip() or tag is not None:
        raise parser.error(Flaw.TEXT_AFTER_ANSWER)
    thread.trunk[-1] += text[thought:].rstrip()
    return thread


def flaw_of(text: str, workers: Width = 3, *, depth: int = 1) -> Flaw | None:
    """The first rule that `text` breaks, or None if it is well-formed."""
    try:
        parse(text, workers, depth=depth)
    except IllFormed as ill:
        return ill.flaw
    return None


def release_flaw_of(text: str, workers: int = 3) -> Flaw | None:
    """The rule of the authors' release: each tag is the first of its kind after the one before it, and what is between
    them is not read. So workers and the answer may hold other tags, and director text tags that open no block.
    """
    before, _, rest = text.partition(THINK_OPEN)
    if before.strip() or THINK_OPEN not in text:
        return Flaw.NO_THINK
    thought, closed, rest = rest.partition(THINK_CLOSE)
    if not closed:
        return Flaw.OPEN_THINK
    between, opened, rest = rest.partition(ANSWER_OPEN)
    if between.strip() or not opened:
        return Flaw.NO_ANSWER
    _, closed, after = rest.partition(ANSWER_CLOSE)
    if not closed or after.strip():
        return Flaw.TEXT_AFTER_ANSWER if closed else Flaw.OPEN_ANSWER
    if SPAWN_OPEN not in thought:
        return Flaw.NO_SPAWN
    while SPAWN_OPEN in thought:
        director, _, rest = thought.partition(SPAWN_OPEN)
        block, closed, thought = rest.partition(SPAWN_CLOSE)
        if not director.strip() or not closed:
            return Flaw.OPEN_SPAWN if director.strip() else Flaw.EMPTY_DIRECTOR
        for index in range(1, workers + 1):
            between, opened, rest = block.partition(worker_open(index))
            _, closed, block = rest.partition(worker_close(index))
            if between.strip() or not opened or not closed:
                return Flaw.OPEN_WORKER if opened and not between.strip() else Flaw.WORKER_ORDER
        if block.strip():
            return Flaw.TEXT_BETWEEN_WORKERS
    return None


RULES: dict[str, Callable[[str, Any], Flaw | None]] = {"strict": flaw_of, "release": release_flaw_of}


@dataclass
class FormatConfig:
    # what counts as well-formed: strict, release (the authors' code), or your own module:function (text, workers)
    rule: Annotated[str, known(RULES)] = "strict"


def overshoots(text: str) -> Counter[str]:
    """How often the token that ended a segment ran on after the tag, by what it wrote: newline, space, tag (`><`) or
    text (`>The`). An inserted tag follows; whatever is between them was sampled in one token with the `>`.
    """

    def kind(over: str) -> str:
        return "tag" if over[0] == "<" else "text" if over.strip() else "newline" if "\n" in over else "space"

    return Counter(kind(found[1]) for found in _OVERSHOT.finditer(text))


def sequential_flaw_of(text: str) -> Flaw | None:
    """The rule for sequential responses: `<think>…</think>` once, and something after it."""
    before, _, rest = text.partition(THINK_OPEN)
    thought, closed, answer = rest.partition(THINK_CLOSE)
    if before.strip() or THINK_OPEN not in text:
        return Flaw.NO_THINK
    if not closed:
        return Flaw.OPEN_THINK
    if THINK_OPEN in thought or THINK_OPEN in answer or THINK_CLOSE in answer:
        return Flaw.STRAY_TAG
    return None if answer.strip() else Flaw.NO_ANSWER


def after_think(text: str) -> str:
    """What follows the thinking: where a sequential response must give its answer. Empty if the thinking never ends."""
    return text.partition(THINK_CLOSE)[2]


def answer_block(text: str) -> str | None:
    """What is inside the last `<answer>` block, closed or not; None if there is none."""
    _, found, rest = text.rpartition(ANSWER_OPEN)
    return rest.split(ANSWER_CLOSE)[0] if found else None


class _Parser:
    """Reads a text as an alternation of plain text and tags; `at` is after the last tag taken."""

    def __init__(self, text: str, workers: Width):
        self.text, self.workers, self.at, self._tags = text, workers, 0, TAG_PATTERN.finditer(text)

    def take(self) -> tuple[str, str | None]:
        """The text up to the next tag, and the tag; None at the end of the text."""
        start, found = self.at, next(self._tags, None)
        self.at = found.end() if found else len(self.text)
        return (self.text[start : found.start()], found[0]) if found else (self.text[start:], None)

    def error(self, flaw: Flaw) -> IllFormed:
        return IllFormed(flaw, self.text[: self.at])

    def lists_tasks(self, text: str) -> bool:
        return not isinstance(self.workers, int) and TASK_PATTERN.search(text) is not None

    def thread(self, start: int, depth: int, close: str, flaws: tuple[Flaw, Flaw]) -> Thread[str]:
        """A thread from `start` to its closing tag. `flaws`: the text ends before it; a tag means nothing there."""
        thread: Thread[str] = Thread()
        while True:
            thought, tag = self.take()
            if tag != close and not (tag == SPAWN_OPEN and depth):
                raise self.error(flaws[tag is not None])
            thread.trunk.append(self.text[start : self.at])
            if tag == close:
                if self.lists_tasks(thought):
                    raise self.error(Flaw.TASKS)
                return thread
            if not thought.strip():
                raise self.error(Flaw.EMPTY_DIRECTOR)
            count = width_of(thought, self.workers)
            if count is None:
                raise self.error(Flaw.TASKS)
            thread.forks.append(self.block(count, depth - 1))
            start = self.at

    def block(self, count: int, depth: int) -> list[Thread[str]]:
        """`count` workers, from after <spawn_workers> to after </spawn_workers>."""
        fork: list[Thread[str]] = []
        for index, expected in enumerate([*map(worker_open, range(1, count + 1)), SPAWN_CLOSE], start=1):
            between, tag = self.take()
            if between.strip():
                raise self.error(Flaw.TEXT_BETWEEN_WORKERS)
            if tag != expected:
                raise self.error(Flaw.OPEN_SPAWN if tag is None else Flaw.WORKER_ORDER)
            if tag != SPAWN_CLOSE:
                flaws = Flaw.OPEN_WORKER, Flaw.TAG_IN_WORKER
                fork.append(self.thread(self.at, depth, worker_close(index), flaws))
        return fork


PROBE = SPACED + (
    "<spawn_workers>\n<worker_1>I'll try.</worker_1><worker_2>\n\nNo</worker_2></spawn_workers> Ünï cöde, 数学, ≤ 5\n"
)


def check_same_ids(tokenizer, other, folder: str | Path) -> None:
    """Reject an engine whose tokenizer splits text or tags differently from the trainer's."""
    if tokenizer.encode(PROBE, add_special_tokens=False) != other.encode(PROBE, add_special_tokens=False):
        kind = f"the engine's tokenizer ({type(other).__name__})"
        remedy = "`dccot serve` gives vLLM a repaired one"
        raise BadData(f"{kind} splits text differently from the tokenizer of {folder}; {remedy}")


@dataclass(frozen=True)
class TagIds:
    """Token ids of the tags that the director loop inserts. A tag is encoded on its own, with nothing around it."""

    workers: Width
    spawn_close: tuple[int, ...]
    worker_open: tuple[tuple[int, ...], ...]  # worker i at index i - 1
    eos: int
    closing: int = 1  # tokens of the longest </worker_i>
    decode: Callable[[list[int]], str] | None = None  # counts the tasks if `workers` is a range

    @classmethod
    def of(cls, tokenizer, workers: Width = 3) -> TagIds:
        name = f"tokenizer {tokenizer.name_or_path!r}"
        if tokenizer.eos_token_id is None:
            raise ValueError(f"{name} has no eos token; set eos_token in its tokenizer_config.json")

        def encode(tag: str) -> tuple[int, ...]:
            ids = tuple(tokenizer.encode(tag, add_special_tokens=False))
            if tokenizer.decode(list(ids), skip_special_tokens=False) != tag:
                fault = f"{name} does not give {tag!r} back after encoding it ({list(ids)})"
                raise ValueError(f"{fault}; use a tokenizer that can spell the tags, or add them to it")
            return ids

        ids = {tag: encode(tag) for tag in all_tags(workers)}
        numbers = range(1, most_workers(workers) + 1)
        opening = tuple(ids[worker_open(i)] for i in numbers)
        closing = max(len(ids[worker_close(i)]) for i in numbers)
        decode = None if isinstance(workers, int) else partial(tokenizer.decode, skip_special_tokens=False)
        return cls(workers, ids[SPAWN_CLOSE], opening, tokenizer.eos_token_id, closing, decode)

    def opening(self, spawning: list[int]) -> tuple[tuple[int, ...], ...] | None:
        """Of the workers that start after these ids, which end by spawning; None if their tasks are ill-formed."""
        count = width_of(self.decode(spawning) if self.decode else "", self.workers)
        return None if count is None else self.worker_open[:count]
