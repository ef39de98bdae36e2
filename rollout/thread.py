"""Thread: text that may fork into threads and join them again. A response is one, and so is a parsed demonstration.

    trunk[0] ─┬─ thread ─┬─ trunk[1] ─┬─ thread ─┬─ … trunk[-1]    forks[i]: the threads that trunk[i] spawned, in order
              └─ thread ─┘            └─ thread ─┘

    longest path = Σ |trunk| + Σ over forks of the longest of its threads

A thread that ended while those of its last fork were writing has as many forks as pieces of text, any other one fewer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

P = TypeVar("P")  # a piece of text: a segment of tokens, a string, a length
Q = TypeVar("Q")


@dataclass
class Thread(Generic[P]):
    """
    >>> inner = Thread(["I ask two: ", "so"], [[Thread(["three"]), Thread(["four"])]])
    >>> thread = Thread(["Split. ", "Done."], [[Thread(["one"]), inner]])
    >>> list(thread.segments())
    ['Split. ', 'one', 'I ask two: ', 'three', 'four', 'so', 'Done.']
    >>> thread.path(), thread.total()  # 7 + (11 + 5 + 2) + 5; and with 3 + 4 more
    (30, 37)
    >>> thread.depth, len(list(thread.all_forks())), [thread.total() for thread in thread.threads()]
    (2, 2, [3, 22, 5, 4])
    """

    trunk: list[P] = field(default_factory=list)
    forks: list[list[Thread[P]]] = field(default_factory=list)

    def parts(self) -> Iterator[tuple[P, list[Thread[P]]]]:
        """Each piece of its own text with the fork that follows it."""
        return zip(self.trunk, [*self.forks, []])

    def segments(self) -> Iterator[P]:
        """Every piece of text in reading order, those of the threads that it spawned included."""
        for piece, fork in self.parts():
            yield piece
            for thread in fork:
                yield from thread.segments()

    def all_forks(self) -> Iterator[list[Thread[P]]]:
        """Every fork at any depth, outer ones first."""
        for fork in self.forks:
            yield fork
            for thread in fork:
                yield from thread.all_forks()

    def threads(self) -> Iterator[Thread[P]]:
        """Every thread that was spawned, at any depth."""
        return (thread for fork in self.all_forks() for thread in fork)

    @property
    def depth(self) -> int:
        """0 without a fork."""
        return max((1 + thread.depth for fork in self.forks for thread in fork), default=0)

    def path(self, size: Callable[[P], int] = len) -> int:  # type: ignore[assignment]
        """The longest path."""
        return sum(size(piece) + max((t.path(size) for t in fork), default=0) for piece, fork in self.parts())

    def total(self, size: Callable[[P], int] = len) -> int:  # type: ignore[assignment]
        return sum(map(size, self.segments()))

    def map(self, change: Callable[[P], Q]) -> Thread[Q]:
        """The same tree with every piece of text changed."""
        return Thread(list(map(change, self.trunk)), [[thread.map(change) for thread in fork] for fork in self.forks])
