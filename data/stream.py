"""An endless shuffled stream of problems that can be stopped and resumed anywhere.

Epoch e is a permutation drawn from (seed, e) alone, so the state is two integers and the order does not depend on how
many ranks read it: every rank draws the same batch and takes its own part, e.g. `batch[rank::ranks]`. Batches can cross
epoch boundaries.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

from dccot.core.files import BadData


class HasId(Protocol):
    @property
    def id(self) -> str: ...


P = TypeVar("P", bound=HasId)


class ProblemStream(Generic[P]):
    """Problems, or anything else with an id."""

    def __init__(self, problems: Sequence[P], seed: int, batch: int):
        if not problems:
            raise ValueError("the stream has no problems")
        if batch < 1:
            raise ValueError(f"batch is {batch}; it must be at least 1")
        self.problems, self.seed, self.batch = list(problems), seed, batch
        self.epoch, self.position = 0, 0
        self._order = self._shuffled()
        ids = "\n".join(problem.id for problem in self.problems)
        self._fingerprint = hashlib.sha256(ids.encode()).hexdigest()[:16]
        content, self.rows = hashlib.sha256(), list[tuple[str, str]]()  # id and checksum of each
        for problem in self.problems:
            row = repr(problem).encode("utf-8", "backslashreplace")
            content.update(row)
            self.rows.append((problem.id, hashlib.sha256(row).hexdigest()[:16]))
        self._content = content.hexdigest()[:16]

    def _shuffled(self) -> list[int]:
        order = list(range(len(self.problems)))
        random.Random(f"{self.seed}/{self.epoch}").shuffle(order)
        return order

    def next_batch(self) -> list[P]:
        """The next `batch` problems. A problem can occur twice in a batch only across an epoch boundary."""
        return [self._next() for _ in range(self.batch)]

    def _next(self) -> P:
        if self.position == len(self._order):
            self.epoch, self.position = self.epoch + 1, 0
            self._order = self._shuffled()
        self.position += 1
        return self.problems[self._order[self.position - 1]]

    def state(self) -> dict:
        return {
            "seed": self.seed,
            "problems": self._fingerprint,
            "content": self._content,
            "epoch": self.epoch,
            "position": self.position,
        }

    def restore(self, state: dict) -> None:
        """Continue right after the last problem drawn when `state` was taken."""
        for name, ours in (("seed", self.seed), ("problems", self._fingerprint), ("content", self._content)):
            if state.get(name, ours) != ours:  # states from older versions have no content
                raise BadData(
                    f"the saved stream position belongs to {name} {state[name]}, this run has {ours}; "
                    "resume with the same problem file and seed, or start a new run"
                )
        self.epoch, self.position = state["epoch"], state["position"]
        self._order = self._shuffled()
