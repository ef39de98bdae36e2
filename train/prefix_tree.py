"""Rows of tokens that share prefixes → one prefix tree in depth-first order, and where each row's tokens are in it.

    rows      5 6 7 8 · 5 6 9 · 5 6 7 4 4            tokens          5 6 7 4 4 8 9
                                                     visible_until   7 7 6 5 5 6 7

In lexicographic order rows with a common prefix are neighbours, so a row adds only the tokens after what it shares with
the previous row, and a token ends where the next row that does not share it begins. Sorting compares rows as bytes;
everything else touches each token once, in NumPy. Python works row by row, never token by token.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

MAX_TOKEN = 2**31


@dataclass(frozen=True)
class PrefixTree:
    """N distinct tokens of R rows."""

    tokens: np.ndarray  # int64 [N]
    visible_until: np.ndarray  # int32 [N]
    first_row: np.ndarray  # int32 [N]: the first row, in the order given, that holds the token
    where: list[np.ndarray]  # R arrays, int64 [length of the row]: the token's index in `tokens`


def prefix_tree(rows: Sequence[Sequence[int] | np.ndarray | Tensor]) -> PrefixTree:
    """The prefix tree of `rows`; `tokens[where[i]]` is row i again.

    >>> tree = prefix_tree([[5, 6, 7, 8], [5, 6, 9], [5, 6, 7, 4, 4]])
    >>> tree.tokens.tolist(), tree.visible_until.tolist()
    ([5, 6, 7, 4, 4, 8, 9], [7, 7, 6, 5, 5, 6, 7])
    >>> [at.tolist() for at in tree.where]
    [[0, 1, 2, 5], [0, 1, 6], [0, 1, 2, 3, 4]]
    """
    arrays = [_ids(number, row) for number, row in enumerate(rows)]
    keys = [array.astype(">u4").tobytes() for array in arrays]  # big-endian: bytes sort like the numbers
    order = sorted(range(len(keys)), key=keys.__getitem__)
    ordered = [arrays[i] for i in order]
    shared = [0, *(_common(before, row) for before, row in itertools.pairwise(ordered))][: len(ordered)]
    added = np.array([len(row) - common for row, common in zip(ordered, shared)], np.int64)
    starts = np.cumsum(added) - added
    where: list[np.ndarray] = [np.empty(0, np.int64)] * len(arrays)
    above = where[0] if where else np.empty(0, np.int64)
    for i, start, count, common in zip(order, starts.tolist(), added.tolist(), shared):
        above = where[i] = np.concatenate([above[:common], np.arange(start, start + count)])
    tokens = np.concatenate([np.empty(0, np.int64), *(row[common:] for row, common in zip(ordered, shared))])
    ends = _ends([len(row) for row in ordered], shared, starts.tolist(), len(tokens))
    first = np.full(len(tokens), len(arrays), np.int32)
    for i in reversed(range(len(arrays))):
        first[where[i]] = i
    return PrefixTree(tokens, ends, first, where)


def _ids(number: int, row: Sequence[int] | np.ndarray | Tensor) -> np.ndarray:
    array = row.cpu().numpy() if isinstance(row, Tensor) else np.asarray(row, None if len(row) else np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise TypeError(f"row {number} must be one-dimensional integers, got {array.dtype} of shape {array.shape}")
    if len(array) and not 0 <= int(array.min()) <= int(array.max()) < MAX_TOKEN:
        raise ValueError(
            f"row {number} holds ids from {array.min()} to {array.max()}; token ids are at least 0 and below 2³¹"
        )
    return array.astype(np.int64, copy=False)


def _common(a: np.ndarray, b: np.ndarray) -> int:
    """How many leading tokens are the same."""
    length = min(len(a), len(b))
    unlike = a[:length] != b[:length]
    first = int(unlike.argmax()) if length else 0
    return first if length and unlike[first] else length


def _ends(lengths: list[int], shared: list[int], starts: list[int], total: int) -> np.ndarray:
    """`visible_until`: a token at depth d of row i ends where the next row that shares at most d tokens begins.

    From the last row to the first, `open` holds the rows after it that share less and less: a row permanently removes
    those that share more than itself, so there are at most two pieces of equal ends per row.
    """
    values: list[int] = []
    counts: list[int] = []
    open_rows: list[tuple[int, int]] = [(-1, total)]  # (tokens shared with the row before it, where it starts)
    for length, common, start in zip(reversed(lengths), reversed(shared), reversed(starts)):
        depth = length
        while open_rows[-1][0] > common:
            shares, begins = open_rows.pop()
            values.append(begins)
            counts.append(depth - shares)
            depth = shares
        values.append(open_rows[-1][1])
        counts.append(depth - common)
        if open_rows[-1][0] == common:
            open_rows.pop()
        open_rows.append((common, start))
    return np.repeat(np.array(values[::-1], np.int32), counts[::-1])
