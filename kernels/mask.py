"""One integer per token describes the whole attention mask of a depth-first forest.

    query q sees key k   ⇔   k ≤ q < visible_until[k]

Tokens are the nodes of a forest in preorder, and `visible_until[k]` is the index just after the last descendant of k:

    index           0  1  2  3  4  5  6  7          0─1─2─3        branch (2, 3)
    visible_until   8  8  4  4  8  8  8  8            └─4─5─6─7    trunk continues
    position        0  1  2  3  2  3  4  5
    parent         -1  0  1  2  1  4  5  6

The keys that q sees are its ancestors, so `position` (how many it sees before itself) is its depth. A forest has few
runs of tokens: within a run every token is the child of the previous one and ends where it ends, so only the first
token of a run needs a search. `TreeMask` is built once per forest; all layers and the backward share it and what the
backends derive from it. All of that is computed on the CPU and then moved, so that the host never waits for a GPU to
return its own numbers.

Ranks of a context-parallel group split one forest: each computes attention for its own `Share` of the queries, against
all keys. `split` cuts the depth-first order into equal chunks, a few per rank, and deals them out by what they see.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch
from torch import Tensor

from dccot.kernels.sizes import chunk

T = TypeVar("T")


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """Moves a CPU tensor to `device`; to a GPU from pinned memory, so that the host does not wait for its queue."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def positions(visible_until: Tensor) -> Tensor:
    """int64 [N]: how many keys each query sees before itself, q − #{k : visible_until[k] ≤ q}."""
    ends = torch.as_tensor(visible_until).long()
    closed = torch.bincount(ends, minlength=len(ends) + 1).cumsum(0)
    return torch.arange(len(ends), device=ends.device) - closed[: len(ends)]


def parents(visible_until: Tensor) -> Tensor:
    """int64 [N]: the nearest key each query sees before itself, −1 at roots."""
    # The token before; for the first token of a run, the last token of the innermost run that is still open there.
    given = torch.as_tensor(visible_until)
    ends, index = given.cpu().numpy(), np.arange(len(given))
    continues = (ends[1:] == ends[:-1]) & (ends[:-1] > index[1:])
    starts = np.flatnonzero(np.concatenate([[True], ~continues])[: len(ends)])
    parent = index - 1
    open_runs: list[tuple[int, int]] = []  # (where it ends, its last token)
    after = np.append(starts[1:], len(ends))
    for start, stop, end in zip(starts.tolist(), after.tolist(), ends[starts].tolist()):
        while open_runs and open_runs[-1][0] <= start:
            open_runs.pop()
        parent[start] = open_runs[-1][1] if open_runs else -1
        open_runs.append((end, stop - 1))
    return torch.from_numpy(parent).to(given.device)


def validate(visible_until: Tensor) -> None:
    """Raises ValueError unless it is a depth-first forest: k < visible_until[k] ≤ N, intervals nested or disjoint."""
    ends = torch.as_tensor(visible_until)
    if ends.ndim != 1 or ends.is_floating_point() or ends.dtype == torch.bool:
        found = f"{ends.dtype} of shape {tuple(ends.shape)}"
        raise ValueError(f"visible_until must be a one-dimensional integer tensor, got {found}")
    tokens, index = len(ends), torch.arange(len(ends), device=ends.device)
    _require((index < ends) & (ends <= tokens), ends, f"must lie after the token itself and at most at N = {tokens}")
    above = parents(ends)
    _require((above < 0) | (ends <= ends[above]), ends, "outlives the token's parent: subtrees must be nested")


def _require(holds: Tensor, ends: Tensor, what: str) -> None:
    if not bool(holds.all()):
        first = int((~holds).nonzero()[0])
        raise ValueError(f"not a depth-first forest: visible_until[{first}] = {int(ends[first])} {what}")


@dataclass(frozen=True)
class Share:
    """The queries of one rank of a group: tokens start:stop of each row of ranges[rank], one after another."""

    ranges: Sequence[np.ndarray]  # of every rank, int64 [ranges, 2], ascending
    rank: int
    group: str = ""  # name of the process group

    @property
    def own(self) -> np.ndarray:
        return self.ranges[self.rank]


def split(visible_until: Tensor, ranks: int) -> list[np.ndarray]:
    """The ranges of each rank: as many tokens for each, give or take a chunk, and about as many query–key pairs.

    Chunks, sorted by their pairs, are dealt out forth and back: 0, 1, …, R − 1, R − 1, …, 1, 0, 0, 1, …

    >>> [ranges.tolist() for ranges in split(torch.full((16,), 16), 2)]  # causal: the later, the more each token sees
    [[[0, 1], [3, 5], [7, 9], [11, 13], [15, 16]], [[1, 3], [5, 7], [9, 11], [13, 15]]]
    """
    tokens = len(visible_until)
    size = chunk(tokens, ranks)
    starts = np.arange(0, tokens, size)
    pairs = np.add.reduceat(positions(visible_until).cpu().numpy(), starts) if tokens else starts
    rounds, place = np.divmod(np.arange(len(starts)), ranks)
    owner = np.empty_like(place)
    owner[np.argsort(-pairs, kind="stable")] = np.where(rounds % 2, ranks - 1 - place, place)
    return [_merged(starts[owner == rank], size, tokens) for rank in range(ranks)]


def _merged(starts: np.ndarray, size: int, tokens: int) -> np.ndarray:
    """Chunks as ranges, neighbours as one."""
    if not len(starts):
        return np.zeros((1, 2), np.int64)
    first = np.flatnonzero(np.diff(starts, prepend=-size - 1) != size)
    last = np.append(first[1:] - 1, len(starts) - 1)
    return np.stack([starts[first], np.minimum(starts[last] + size, tokens)], axis=1)


class TreeMask:
    """The mask of one packed forest, with everything derived from it computed at most once.

    >>> mask = TreeMask(torch.tensor([6, 6, 4, 4, 6, 6]))  # a trunk of two tokens, a branch (2, 3), the trunk again
    >>> mask.position.tolist(), mask.parent.tolist()
    ([0, 1, 2, 3, 2, 3], [-1, 0, 1, 2, 1, 4])
    >>> TreeMask.causal([2, 3]).visible_until.tolist()
    [2, 2, 5, 5, 5]

    With a `share`, the queries are those of one rank, and the keys still all tokens; `own` picks their rows.

    >>> part = TreeMask(torch.full((6,), 6), share=Share([np.array([[0, 1], [4, 6]])], 0))
    >>> part.queries, part.own(part.position).tolist(), part.row.tolist()
    (3, [0, 4, 5], [0, -1, -1, -1, 1, 2])

    Custom operators take tensors, not objects, so the mask also travels as `handle`, a small CPU tensor (its number and
    its ranges) that `from_handle` turns back into this object, or into an equal one, if this one is gone by the time
    the backward runs.
    """

    _numbers = itertools.count()
    _alive: ClassVar[weakref.WeakValueDictionary[int, TreeMask]] = weakref.WeakValueDictionary()

    def __init__(self, visible_until: Tensor, device: torch.device | str | None = None, share: Share | None = None):
        ends = torch.as_tensor(visible_until)
        self.device = torch.device(device or ends.device)
        host = ends.cpu()
        validate(host)
        self.host = host.to(torch.int32).contiguous()
        self.visible_until = moved(self.host, self.device)
        self.share, number = share, next(self._numbers)
        self.ranges = np.array([[0, len(host)]]) if share is None else share.own  # of the queries
        self.handle = torch.tensor([number, *(self.ranges.ravel() if share else ())])
        self._derived: dict[object, Any] = {}
        self._deriving = threading.RLock()
        self._alive[number] = self
        # torch.compile takes the length of a tensor for a variable, so that other shares need no new graph
        self._index = None if share is None else moved(self.at, self.device)
        self.order: tuple[Tensor, Tensor] | None = None  # of gathered keys (model/context.py)

    @classmethod
    def causal(cls, lengths: Sequence[int], device: torch.device | str | None = None) -> TreeMask:
        """Plain causal sequences of the given lengths, packed one after the other."""
        each = torch.as_tensor(lengths, dtype=torch.int64)
        return cls(each.cumsum(0).repeat_interleave(each), device)

    @classmethod
    def from_handle(cls, handle: Tensor, visible_until: Tensor) -> TreeMask:
        number, *bounds = handle.tolist()
        share = Share([np.array(bounds).reshape(-1, 2)], 0) if bounds else None
        alive = cls._alive.get(number)
        return cls(visible_until, share=share) if alive is None else alive

    def __len__(self) -> int:
        return len(self.visible_until)

    @property
    def queries(self) -> int:
        return len(self.visible_until) if self._index is None else len(self._index)

    @property
    def at(self) -> Tensor:
        """int64 [queries], on the CPU: which token each query is."""
        return self.derive("at", lambda: torch.from_numpy(np.concatenate([np.arange(*each) for each in self.ranges])))

    @property
    def row(self) -> Tensor:
        """int64 [N], on the CPU: which query a token is; −1 for one of another rank's."""
        other = lambda: torch.full((len(self),), -1)
        return self.derive("row", lambda: other().index_copy_(0, self.at, torch.arange(self.queries)))

    def own(self, values: Tensor) -> Tensor:
        """The rows of `values` [N, …] that belong to the queries."""
        return values if self._index is None else values[self._index]

    @property
    def position(self) -> Tensor:
        return self.derive("position", lambda: moved(positions(self.host), self.device))

    @property
    def parent(self) -> Tensor:
        return self.derive("parent", lambda: moved(parents(self.host), self.device))

    @property
    def subtree(self) -> Tensor:
        """int32 [N]: how many queries see each key, its own among them: q sees k ⇔ 0 ≤ q − k < subtree[k]."""
        own = lambda: self.host - torch.arange(len(self.host), dtype=torch.int32)
        return self.derive("subtree", lambda: moved(own(), self.device))

    @property
    def is_causal(self) -> bool:
        """One sequence, in which every token sees all before it."""
        return self.derive("causal", lambda: bool((self.host == len(self.host)).all()))

    def to(self, device: torch.device | str) -> TreeMask:
        return self if torch.device(device) == self.device else TreeMask(self.host, device, self.share)

    def derive(self, name: object, build: Callable[[], T]) -> T:
        """What `build` returned when `name` was first requested; another thread's request waits for it."""
        with self._deriving:
            if name not in self._derived:
                self._derived[name] = build()
            return self._derived[name]
