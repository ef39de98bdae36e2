"""Random tag soups, and a second opinion on what is well-formed: one regular expression, where tags.py uses a cursor.

    disagreements(100_000)      → (soup, K, what the oracle found, what tags.py found), and how many were well-formed

The expression is the definition read off the paper's rules: `<think>…</think><answer>…</answer>` once, white space
around; inside think blocks of exactly workers 1..K, white space between them, director text that is not blank before
each; no tag anywhere else.
"""

from __future__ import annotations

import random
import re
from functools import lru_cache

from dccot.rollout.tags import IllFormed, answer_block, parse, sequential_flaw_of
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
    return [(one.director, one.workers) for one in rounds_of(cut)], final_of(cut), cut.answer


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
