"""Which tiles of the attention matrix the Triton kernels visit, and in which order.

Queries are cut into tiles of at most block_q, keys into tiles of at most block_k tokens. A new tile starts where one
long branch ends and another begins, so no tile straddles two branches that cannot see each other, at the cost of one
shorter tile before it. The smallest and largest `visible_until` in a key tile determine, exactly and for every query
tile at once, whether the pair is
    empty   largest ≤ first query, or all keys come after all queries: never visited
    full    smallest > last query, all keys come before all queries, and the streamed tile is whole: no mask arithmetic
    edge    anything else: visited with the mask
This takes O(N + tiles²) and nothing N×N ever exists. A schedule is a list of tiles per query tile (for the forward and
dQ) and per key tile (for dK/dV), full ones first, the longest lists first; balance.py splits it to fit a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from torch import Tensor

# A new tile starts between branches of at least this many tiles each.
LONG_BRANCH_TILES = 2


class Lists(NamedTuple):
    """Tokens start[p]:stop[p] visit the tiles [first[p], middle[p]) without, [middle[p], last[p]) with the mask."""

    start: np.ndarray
    stop: np.ndarray
    first: np.ndarray
    middle: np.ndarray
    last: np.ndarray
    tile_start: np.ndarray
    tile_stop: np.ndarray


@dataclass(frozen=True)
class Schedule:
    by_query: Lists
    by_key: Lists
    visited: int
    edges: tuple[int, int]  # by query, by key


def build(visible_until: Tensor, block_q: int, block_k: int) -> Schedule:
    ends = visible_until.cpu().numpy()
    queries, keys = cut(ends, block_q), cut(ends, block_k)
    visited, unmasked = classify(ends, queries, keys)
    by_query = visited, unmasked & (np.diff(keys) == block_k)
    by_key = visited.T, (unmasked & (np.diff(queries) == block_q)[:, None]).T
    visits = int(visited.sum())
    edges = visits - int(by_query[1].sum()), visits - int(by_key[1].sum())
    return Schedule(_lists(*by_query, queries, keys), _lists(*by_key, keys, queries), visits, edges)


def cut(ends: np.ndarray, block: int) -> np.ndarray:
    """Boundaries 0 = b₀ < b₁ < … < N of tiles, none longer than `block`."""
    tokens = len(ends)
    runs = np.flatnonzero(np.diff(ends, prepend=-1))
    closing, oldest = np.unique(ends[runs], return_index=True)  # where subtrees end, and the largest that ends there
    ended, closing = (closing - runs[oldest])[:-1], closing[:-1]  # the last one ends at N
    long = LONG_BRANCH_TILES * block
    anew = np.concatenate([[0], closing[(ended >= long) & (ends[closing] - closing >= long)], [tokens]])
    tiles = -(np.diff(anew) // -block)
    within = np.arange(tiles.sum()) - np.repeat(np.cumsum(tiles) - tiles, tiles)
    return np.append(np.repeat(anew[:-1], tiles) + within * block, tokens)


def classify(ends: np.ndarray, queries: np.ndarray, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """bool [query tiles, key tiles]: where any pair is visible, and where all are."""
    first_query, past_query = queries[:-1, None], queries[1:, None]
    first_key, past_key = keys[:-1], keys[1:]
    smallest, largest = np.minimum.reduceat(ends, first_key), np.maximum.reduceat(ends, first_key)
    visited = (first_key < past_query) & (first_query < largest)
    return visited, visited & (past_key <= first_query + 1) & (past_query <= smallest)


def _lists(visited: np.ndarray, full: np.ndarray, own: np.ndarray, streamed: np.ndarray) -> Lists:
    """One list per row of the tile matrix."""
    visited, full = np.ascontiguousarray(visited), np.ascontiguousarray(full)
    counts, fulls = np.count_nonzero(visited, axis=1), np.count_nonzero(full, axis=1)
    order = np.argsort(-counts, kind="stable")
    full_then_edge = np.concatenate([full, visited ^ full], axis=1)[order]
    tiles = np.nonzero(full_then_edge)[1] % visited.shape[1]
    last = np.cumsum(counts[order])
    first = last - counts[order]
    tiles = np.append(tiles, 0)  # kernels read one tile ahead
    return Lists(own[order], own[order + 1], first, first + fulls[order], last, streamed[tiles], streamed[tiles + 1])
