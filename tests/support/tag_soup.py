"""Random tag soups, and a second opinion on what is well-formed: one regular expression, where tags.py uses a cursor.

    disagreements(100_000)      → (soup, K, what the oracle found, what tags.py found), and how many were well-formed

The expression is the definition read off the paper's rules: `<think>…</think><answer>…</answer>` once, white space
around; inside think blocks of exactly workers 1..K, white space between them, director text that is not blank before
each; no tag anywhere else.

With other limits (workers from … to, by the tasks listed before a block; workers of workers) the language is no longer
regular. There the second opinion reads character by character and works from the inside out: it replaces blocks that
hold no other block until none is left, where tags.py descends from the director.
"""

from __future__ import annotations

import random
import re
from functools import lru_cache

from dccot.rollout.tags import IllFormed, answer_block, parse, sequential_flaw_of
from dccot.rollout.thread import Thread
from tests.support.rounds import final_of, rounds_of

TAG = r"</?(?:think|answer|spawn_workers|worker_\d+)>"
TEXT = rf"(?:(?!{TAG}).)*"
BLANKS = ["", "", " ", "\n", "\t\n ", "\u00a0", "\u2003", "\x1c", "\x85"]
WORDS = ["a", "x y", "\n so ", "<", ">", "</", "3 < 4", "\\boxed{3}", "é∑", "<b>", "\x00"]
WORDS += ["worker_1", "<worker_", "_1>", "\u200b"]
NEARLY = ["<Think>", "< think>", "<think >", "<think/>", "</worker_>", "<worker_>", "<worker_-1>", "<spawn_worker>"]
NEARLY += ["<answer", "/answer>"]
ODD_TAGS = ["<worker_0>", "<worker_01>", "</worker_99>", "<worker_١>"]  # the last one's digit is one, in Arabic

Cut = tuple[list[tuple[str, list[str]]], str, str]  # rounds (director, workers), final, answer


@lru_cache
def grammar(workers: int) -> tuple[re.Pattern, re.Pattern]:
    """The whole text, and one round of it (director text, then a block)."""
    inside = r"\s*".join(rf"<worker_{i}>{TEXT}</worker_{i}>" for i in range(1, workers + 1))
    spoken = rf"(?=\s*(?!{TAG})\S){TEXT}"
    turn = rf"{spoken}<spawn_workers>\s*{inside}\s*</spawn_workers>"
    whole = rf"\s*<think>(?P<rounds>(?:{turn})+)(?P<final>{TEXT}</think>\s*<answer>(?P<answer>{TEXT})</answer>)\s*"
    return re.compile(whole, re.S), re.compile(turn, re.S)


def oracle(text: str, workers: int) -> Cut | None:
    """The parts of a well-formed text; None of any other."""
    whole, turn = grammar(workers)
    found = whole.fullmatch(text)
    if not found:
        return None
    rounds = []
    for number, said in enumerate(turn.finditer(found["rounds"])):
        director, _, block = said[0].partition("<spawn_workers>")
        before = text[: found.start("rounds")] if number == 0 else ""
        texts = [re.search(rf"<worker_{i}>(.*?</worker_{i}>)", block, re.S)[1] for i in range(1, workers + 1)]
        rounds.append((before + director + "<spawn_workers>", texts))
    return rounds, found["final"], found["answer"].strip()


def parsed(text: str, workers: int) -> Cut | None:
    """What tags.py makes of it, in the oracle's terms."""
    try:
        cut = parse(text, workers)
    except IllFormed:
        return None
    return [(one.director, one.workers) for one in rounds_of(cut)], final_of(cut), (answer_block(text) or "").strip()


Node = tuple[str, str, int, int]  # kind (text, tag, task, block), text, from, to
Tree = tuple[list[str], list[list]]  # texts of a thread, and after each but the last the threads of a block
Limits = tuple[int | list[int], int]  # workers, depth


def nodes_of(text: str, tasks: bool) -> list[Node]:
    """Texts and tags, found by looking at every `<`; tasks are tags only where they mean something."""

    def kind(name: str) -> str | None:
        word, _, number = name.removeprefix("/").partition("_")
        if name.removeprefix("/") in ("think", "answer", "spawn_workers"):
            return "tag"
        return {"worker": "tag", "task": "task" if tasks else None}.get(word) if number.isdecimal() else None

    found: list[Node] = []
    begun = at = 0
    while at <= len(text):
        end = text.find(">", at) + 1 if text[at : at + 1] == "<" else 0
        what = kind(text[at + 1 : end - 1]) if end else None
        if (what or at == len(text)) and begun < at:
            found.append(("text", text[begun:at], begun, at))
        if what:
            found.append((what, text[at:end], at, end))
            begun = end
        at = end if what else at + 1
    return found


class LimitedOracle:
    """`read()`: the threads of a well-formed text, and its answer; None of any other text."""

    def __init__(self, text: str, workers: int | list[int], depth: int):
        self.text, self.depth, self.chosen = text, depth, not isinstance(workers, int)
        self.least, self.most = workers if isinstance(workers, list) else (workers, workers)
        self.nodes = nodes_of(text, self.chosen)
        self.blocks: dict[int, tuple[list[Tree], int, int]] = {}  # where it begins → threads, levels, end of its tag

    def read(self) -> tuple[Tree, str] | None:
        while close := self.find("</spawn_workers>"):
            opened = next((i for i in range(close, -1, -1) if self.nodes[i][1] == "<spawn_workers>"), None)
            found = None if opened is None else self.block(self.nodes[opened + 1 : close])
            if found is None:
                return None
            _, _, start, inside = self.nodes[opened]
            self.blocks[start] = (*found, inside)
            self.nodes[opened : close + 1] = [("block", "", start, self.nodes[close][3])]
        opened, closed = self.find("<think>"), self.find("</think>")
        if opened is None or closed is None or self.spoken(self.nodes[:opened]):
            return None
        found = self.thread(self.nodes[opened + 1 : closed], 0, len(self.text.rstrip()))
        after = self.spoken(self.nodes[closed + 1 :])
        tags, said = [node[1] for node in (*after[:1], *after[-1:])], after[1:-1]
        form = tags == ["<answer>", "</answer>"] and all(node[0] == "text" for node in said) and len(said) < 2
        if not form or found is None or not 1 <= found[1] <= self.depth:
            return None
        return found[0], "".join(node[1] for node in said).strip()

    def find(self, tag: str) -> int | None:
        return next((i for i, node in enumerate(self.nodes) if node[1] == tag and node[0] == "tag"), None)

    @staticmethod
    def spoken(nodes: list[Node]) -> list[Node]:
        """All but white space."""
        return [node for node in nodes if node[0] != "text" or node[1].strip()]

    def thread(self, body: list[Node], start: int, end: int) -> tuple[Tree, int] | None:
        """Texts, blocks and levels of what lies between two tags, if it is a thread's."""
        texts, forks, levels, said, listed = [], [], 0, "", []
        for kind, inside, opened, closed in body:
            if kind == "tag":
                return None
            if kind != "block":
                said += inside
                listed += [inside] if kind == "task" else []
                continue
            fork, below, spawned = self.blocks[opened]
            wanted = [f"<{slash}task_{i}>" for i in range(1, len(fork) + 1) for slash in ("", "/")]
            if not said.strip() or (self.chosen and listed != wanted) or not self.least <= len(fork) <= self.most:
                return None
            texts.append(self.text[start:spawned])
            forks.append(fork)
            levels, start, said, listed = max(levels, below + 1), closed, "", []
        return None if listed else (([*texts, self.text[start:end]], forks), levels)

    def block(self, inside: list[Node]) -> tuple[list[Tree], int] | None:
        threads, levels, rest = [], 0, self.spoken(inside)
        while rest:
            tags = [f"<{slash}worker_{len(threads) + 1}>" for slash in ("", "/")]
            close = next((i for i, node in enumerate(rest) if node[1] == tags[1]), None)
            if rest[0][1] != tags[0] or close is None:
                return None
            bounds = rest[0][3], rest[close][2]
            body = [node for node in inside if bounds[0] <= node[2] and node[3] <= bounds[1]]
            found = self.thread(body, bounds[0], rest[close][3])
            if found is None:
                return None
            threads.append(found[0])
            levels, rest = max(levels, found[1]), rest[close + 1 :]
        return (threads, levels) if threads else None


def limited_parse(text: str, workers: int | list[int], depth: int) -> tuple[Tree, str] | None:
    """What tags.py makes of it, in the oracle's terms."""

    def tree(thread: Thread[str]) -> Tree:
        return thread.trunk, [[tree(worker) for worker in fork] for fork in thread.forks]

    try:
        cut = parse(text, workers, depth=depth)
    except IllFormed:
        return None
    return tree(cut), (answer_block(text) or "").strip()


def limited_soup(rng: random.Random, workers: int | list[int], depth: int) -> str:
    """As `soup`, with blocks inside workers and lists of tasks, most often as the limits allow."""
    text = lambda: rng.choice(rng.choice((WORDS, BLANKS, NEARLY)))
    least, most = workers if isinstance(workers, list) else (workers, workers)

    def body(levels: int, blocks: int) -> list[str]:
        found: list[str] = []
        for _ in range(blocks):
            count = rng.randint(least, most) if rng.random() < 0.97 else rng.randint(1, most + 1)
            listed = count if rng.random() < 0.98 else rng.randint(0, most)
            found += [rng.choice(WORDS), text()]
            for i in range(1, listed + 1) if isinstance(workers, list) or rng.random() < 0.03 else ():
                found += [f"<task_{i}>", text(), f"</task_{i}>", text()]
            found.append("<spawn_workers>")
            for i in range(1, count + 1):
                inner = rng.choice((0, 0, 1, 2)) if levels > 1 or rng.random() < 0.01 else 0
                found += [rng.choice(BLANKS), f"<worker_{i}>", *body(levels - 1, inner), f"</worker_{i}>"]
            found += [rng.choice(BLANKS), "</spawn_workers>"]
        return [*found, text()]

    pieces = [rng.choice(BLANKS), "<think>", *body(depth, rng.choice((0, 1, 1, 1, 2))), "</think>", rng.choice(BLANKS)]
    pieces += ["<answer>", text(), "</answer>", rng.choice(BLANKS)]
    odd = ["<task_1>", "</task_2>", "<worker_1>", "</worker_1>", "<spawn_workers>", "</spawn_workers>", "</think>", " "]
    for _ in range(rng.choice((0, 0, 0, 1, 2))):
        at, other = rng.randrange(len(pieces)), rng.randrange(len(pieces))
        change = rng.randrange(4)
        if change == 0:
            pieces[at] = ""
        elif change == 1:
            pieces.insert(other, pieces[at])
        elif change == 2:
            pieces[at], pieces[other] = pieces[other], pieces[at]
        else:
            pieces.insert(at, rng.choice(odd))
    return "".join(pieces)


def limited_disagreements(count: int, seed: int = 0) -> tuple[list[tuple], dict[tuple[bool, int], float]]:
    """Soups that tags.py and the oracle cut differently; and the share of well-formed ones, by the kind of limits."""
    rng, found, well_formed = random.Random(seed), [], {}
    for _ in range(count):
        limits: Limits = rng.choice((2, 3, [1, 3], [2, 5])), rng.choice((1, 2, 3))
        text = limited_soup(rng, *limits)
        expected, got = LimitedOracle(text, *limits).read(), limited_parse(text, *limits)
        well_formed.setdefault((isinstance(limits[0], int), limits[1]), []).append(expected is not None)
        found += [(text, limits, expected, got)] if expected != got else []
    return found, {kind: sum(judged) / len(judged) for kind, judged in well_formed.items()}


def sequential_oracle(text: str) -> bool:
    return re.fullmatch(r"\s*<think>(?:(?!</?think>).)*</think>(?=.*\S)(?:(?!</?think>).)*", text, re.S) is not None


def answer_oracle(text: str) -> str | None:
    found = re.fullmatch(r".*<answer>(.*?)(?:</answer>.*)?", text, re.S)
    return found and found[1]


def soup(rng: random.Random, workers: int) -> str:
    """A well-formed text, most often with a few pieces lost, doubled, swapped or thrown in; or pieces at random."""
    numbered = [f"<{slash}worker_{i}>" for i in range(1, workers + 2) for slash in ("", "/")]
    tags = ["<think>", "</think>", "<answer>", "</answer>", "<spawn_workers>", "</spawn_workers>", *numbered]
    anything = lambda: rng.choice(rng.choice((tags, tags, tags, WORDS, BLANKS, NEARLY, ODD_TAGS)))
    text = lambda: rng.choice(rng.choice((WORDS, BLANKS, NEARLY)))
    if rng.random() < 0.15:
        return "".join(anything() for _ in range(rng.randrange(25)))
    pieces = [rng.choice(BLANKS), "<think>"]
    for _ in range(rng.choice((0, 1, 1, 1, 2, 3))):
        pieces += [rng.choice(WORDS), text(), "<spawn_workers>"]
        for i in range(1, workers + 1):
            pieces += [rng.choice(BLANKS), f"<worker_{i}>", text(), text(), f"</worker_{i}>"]
        pieces += [rng.choice(BLANKS), "</spawn_workers>"]
    pieces += [text(), "</think>", rng.choice(BLANKS), "<answer>", text(), "</answer>", rng.choice(BLANKS)]
    for _ in range(rng.choice((0, 0, 1, 1, 2, 4))):
        at, other = rng.randrange(len(pieces)), rng.randrange(len(pieces))
        change = rng.randrange(5)
        if change == 0:
            pieces[at] = ""
        elif change == 1:
            pieces.insert(other, pieces[at])
        elif change == 2:
            pieces[at], pieces[other] = pieces[other], pieces[at]
        elif change == 3:
            pieces.insert(at, anything())
        else:
            pieces = pieces[: at + 1]
    return "".join(pieces)


def disagreements(count: int, seed: int = 0) -> tuple[list[tuple], int]:
    """Soups that tags.py and the oracles judge differently, and how many of all were well-formed."""
    rng, found, well_formed = random.Random(seed), [], 0
    for _ in range(count):
        workers = rng.choice((1, 2, 3, 3, 3, 11))
        text = soup(rng, workers)
        pairs = [
            (oracle(text, workers), parsed(text, workers)),
            (sequential_oracle(text), sequential_flaw_of(text) is None),
            (answer_oracle(text), answer_block(text)),
        ]
        well_formed += pairs[0][0] is not None
        found += [(text, workers, expected, got) for expected, got in pairs if expected != got]
    return found, well_formed
