"""Turns the parallel output of director and workers into the text that a plain client reads.

    pieces as they arrive ─ReadingOrder─► in the order in which the director reads them ─Channels─► reasoning, content

A worker's pieces wait until the workers before it have finished, with all that those spawned, so that a plain client's
text is complete and in order. The answer is what the director writes after its first `</think>`, without the `<answer>`
tags; a `</think>` in a worker's text means nothing.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from dccot.rollout.response import Response
from dccot.rollout.tags import ANSWER_CLOSE, ANSWER_OPEN, THINK_CLOSE, THINK_OPEN


@dataclass(frozen=True, slots=True)
class Piece:
    """What a call has written since its last piece; the first one is the tag that was inserted for it, if any."""

    path: tuple[int, ...]  # as in Call
    text: str
    ids: list[int]
    following: tuple[tuple[int, ...], ...] | None = None  # its call has ended, and these start now; None: it goes on

    @property
    def ended(self) -> bool:
        """Whether it is its call's last piece."""
        return self.following is not None

    @property
    def by_director(self) -> bool:
        return len(self.path) == 2 and self.path[1] == 0


class ReadingOrder:
    """Calls are read in the order of their paths: a piece waits while a call that comes before it is open."""

    def __init__(self) -> None:
        self._open: set[tuple[int, ...]] = {(0, 0)}
        self._waiting: dict[tuple[int, ...], list[Piece]] = {}

    def take(self, piece: Piece) -> list[Piece]:
        """The pieces that may be read now; this one is the first of them."""
        self._waiting.setdefault(piece.path, []).append(piece)
        if piece.following is not None:
            self._open = self._open - {piece.path} | set(piece.following)
        first = min(self._open, default=None)
        ready = sorted(path for path in self._waiting if first is None or path <= first)
        return [waiting for path in ready for waiting in self._waiting.pop(path)]


class Channels:
    """Splits text in reading order into reasoning and content; `stopped` is the stop string that ended the content."""

    def __init__(self, stop: Iterable[str] = ()):
        self._stops = frozenset(stop)
        self._markers = [ANSWER_OPEN, ANSWER_CLOSE, *self._stops]
        self._pattern = re.compile("|".join(map(re.escape, self._markers)))
        self._fresh, self._answering, self._begun = True, False, False
        self._held, self._space = "", ""  # possibly the start of a marker; white space that may turn out to be trailing
        self.stopped: str | None = None

    def take(self, piece: Piece) -> tuple[str, str]:
        """(reasoning, content) that this piece adds."""
        if self.stopped is not None:
            return "", ""
        if not piece.by_director:
            return piece.text, ""
        text, self._held = self._held + piece.text, ""
        if self._answering:
            return "", self._answer(text, piece.ended)
        if self._fresh:
            opening = text.lstrip()
            if not piece.ended and (
                THINK_OPEN.startswith(opening) or opening.rstrip("\n") == THINK_OPEN
            ):  # more may belong to the tag
                self._held = text
                return "", ""
            self._fresh = False
            text = opening.removeprefix(THINK_OPEN).lstrip("\n") if opening.startswith(THINK_OPEN) else text
        thought, found, rest = text.partition(THINK_CLOSE)
        if not found:
            return self._hold(thought, [THINK_CLOSE], piece.ended), ""
        self._answering = True
        return thought, self._answer(rest, piece.ended)

    def _answer(self, text: str, ended: bool) -> str:
        parts: list[str] = []
        while True:
            if not (self._begun or any(parts)):
                text = text.lstrip()
            found = self._pattern.search(text)
            if not found:
                parts.append(self._hold(text, self._markers, ended))
                break
            parts.append(text[: found.start()])
            if found[0] in self._stops:
                self.stopped = found[0]
                break
            text = text[found.end() :]
        content = self._space + "".join(parts)
        trimmed = content.rstrip()
        self._space = content[len(trimmed) :] if self._begun or trimmed else ""
        self._begun = self._begun or bool(trimmed)
        return trimmed

    def _hold(self, text: str, markers: list[str], ended: bool) -> str:
        """`text` without a suffix that may be the start of a marker, which is kept for the next piece."""
        if ended:
            return text
        longest = min(len(text), max(map(len, markers)) - 1)
        held = next((size for size in range(longest, 0, -1) if any(m.startswith(text[-size:]) for m in markers)), 0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]


def answer_tokens(response: Response, decode: Callable[[list[int]], str]) -> int:
    """How many sampled tokens the director wrote after its first `</think>`."""
    directors = [segment.sampled for segment in response.trunk]
    for at, ids in enumerate(directors):
        if THINK_CLOSE in decode(ids):
            needed = bisect_left(range(len(ids) + 1), True, key=lambda count: THINK_CLOSE in decode(ids[:count]))
            return len(ids) - needed + sum(map(len, directors[at + 1 :]))
    return 0
