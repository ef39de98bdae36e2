"""When a worker may start: at once, one after another, or by the engine's load.

    eager      every worker at once
    never      the workers of a response one after another
    adaptive   worker 1 at once, the others while there is room, and none before a director that has just arrived

Room: a step of the engine takes `base + per_sequence · n` seconds for n sequences. One more makes it longer by
`per_sequence` for each of them, so the share `per_sequence · n / step` of what the new one gains is lost by the others:
nearly nothing in a small batch, all of it where the step grows as the batch does. A worker waits while that share is
above `CROWDED`, while sequences queue in the engine, or while its batch (but for one place) or its KV cache is full.
The line is fitted to the latest steps.

Nothing starves: a response always has a call that runs or is next in the engine's queue, and its next worker starts
when none does. Of the responses with waiting workers the one with the fewest running calls goes first, then the oldest;
within a response, workers start in the order in which they are read. What a call samples depends on its own seed and
text, not on when it ran.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Literal

Branching = Literal["eager", "never", "adaptive"]
Start = tuple[tuple[int, ...], Callable[[], object]]  # a call's path, and what starts it

CROWDED = 0.6  # of what one more sequence gains, at most this share may be lost by the others
SPARE = 1  # places in the batch that stay free for a director that arrives
GIVES_WAY = 128  # an adaptive worker lets the directors of so many later responses go first
JOINS_FIRST = 2**40  # more than there are responses
FULL = 0.9  # of the KV cache: beyond it running sequences are soon preempted, and computed again
RECENT, MEMORY = 0.05, 0.995  # weight of a new step in the means; what the slope keeps of earlier ones


@dataclass
class StepTime:
    """Seconds of a step against its number of sequences: a line through the latest steps. Its slope is that of changes
    within a few steps: over longer times a machine that becomes slower has more to do as well."""

    sequences: float = 0.0  # means of the latest steps
    seconds: float = 0.0
    _steps: int = 0
    _variance: float = 0.0
    _covariance: float = 0.0

    def learn(self, sequences: int, seconds: float) -> None:
        if self._steps > 20:
            seconds = min(seconds, 3 * (self.base + self.per_sequence * sequences))  # something else took the machine
        self._steps += 1
        recent, share = max(RECENT, 1 / self._steps), max(1 - MEMORY, 1 / self._steps)
        more, longer = sequences - self.sequences, seconds - self.seconds
        self.sequences += recent * more
        self.seconds += recent * longer
        if self._steps > 1:
            self._variance += share * (more * more - self._variance)
            self._covariance += share * (more * longer - self._covariance)

    @property
    def per_sequence(self) -> float:
        """Where batches have hardly varied, a tenth of the step is taken to grow with them."""
        if not self._steps:
            return 0.0
        doubt = 0.5
        slope = (self._covariance + doubt * 0.1 * self.seconds / self.sequences) / (self._variance + doubt)
        return min(max(slope, 0.0), self.seconds / self.sequences)

    @property
    def base(self) -> float:
        return self.seconds - self.per_sequence * self.sequences

    def crowding(self, sequences: float) -> float:
        """The share of what one more sequence gains that the others lose."""
        growing = self.per_sequence * sequences
        return growing / (self.base + growing) if growing else 0.0


def place(order: int, branching: Branching, *, worker: bool, joins: bool) -> int:
    """Of a call of response number `order` in the engine's queue; the lowest goes first. A thread that has read its
    workers (`joins`) goes before all that is new: it holds the most cache, and is the nearest to its answer."""
    if joins:
        return order - JOINS_FIRST
    return order + GIVES_WAY * (worker and branching == "adaptive")


@dataclass
class _Branches:
    """The calls of one response."""

    policy: Branching
    running: int = 1
    waiting: list[Start] = field(default_factory=list)


class Admission:
    """Who may start, for all responses of a server; `crowded(n)`: whether n running calls are enough for the engine."""

    def __init__(self, crowded: Callable[[int], bool]):
        self._crowded = crowded
        self._responses: dict[Hashable, _Branches] = {}  # the oldest first
        self.running, self.waiting = 0, 0  # calls

    def begin(self, response: Hashable, policy: Branching) -> None:
        """The director of a new response runs."""
        self._responses[response] = _Branches(policy)
        self.running += 1

    def ended(self, response: Hashable, following: list[Start]) -> None:
        """A call has ended. Of those that follow, the first starts at once in its place, the others in their turn."""
        branches = self._responses[response]
        branches.running -= 1
        self.running -= 1
        branches.waiting += following
        self.waiting += len(following)
        if following:
            self._start(branches, following[0])
        self.admit()

    def leave(self, response: Hashable) -> None:
        branches = self._responses.pop(response)
        self.running -= branches.running
        self.waiting -= len(branches.waiting)
        self.admit()

    def admit(self) -> None:
        """Start what may start now."""
        if not self.waiting:
            return
        held = [branches for branches in self._responses.values() if branches.waiting]
        for branches in held:
            while branches.waiting and (branches.policy == "eager" or not branches.running):
                self._start(branches, min(branches.waiting))
        while held := [branches for branches in held if branches.waiting and branches.policy == "adaptive"]:
            if self._crowded(self.running):
                return
            fewest = min(held, key=lambda branches: branches.running)
            self._start(fewest, min(fewest.waiting))

    def _start(self, branches: _Branches, first: Start) -> None:
        branches.waiting.remove(first)
        branches.running += 1
        self.waiting -= 1
        self.running += 1
        first[1]()
