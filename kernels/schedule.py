"""Which tiles of the attention matrix the Triton kernels visit, and in which order.

The N×N matrix is cut into tiles of block_q queries × block_k keys. From the smallest and largest `visible_until` of a key tile follows,
exactly and for every query tile at once, whether the tile is
    empty   largest ≤ first query, or all keys lie behind all queries: never visited
    full    smallest > last query, and all keys lie before all queries: no mask arithmetic
    edge    anything else: visited with the mask
This takes O(N + tiles²) and nothing N×N ever exists. A schedule is a list of tiles per row (query tile, for the forward and dQ) or per
column (key tile, for dK/dV), full ones first, and rows sorted so that the longest start first and short ones fill up the end.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor


class Lists(NamedTuple):
    """Program p works on tile `order[p]`, which visits `tiles[first[p]:middle[p]]` without and `tiles[middle[p]:last[p]]` with the mask."""

    order: Tensor
    first: Tensor
    middle: Tensor
    last: Tensor
    tiles: Tensor


@dataclass(frozen=True)
class Schedule:
    by_query: Lists
    by_key: Lists
    visited: int
    edges: int


def build(visible_until: Tensor, block_q: int, block_k: int) -> Schedule:
    full, edge = classify(visible_until.cpu().numpy(), block_q, block_k)
    device = visible_until.device
    return Schedule(_lists(full, edge, device), _lists(full.T, edge.T, device), int(full.sum() + edge.sum()), int(edge.sum()))


def classify(visible_until: np.ndarray, block_q: int, block_k: int) -> tuple[np.ndarray, np.ndarray]:
    """bool [query tiles, key tiles]: which tiles are full and which are edges."""
    tokens = len(visible_until)
    first_key = np.arange(0, tokens, block_k)
    first_query = np.arange(0, tokens, block_q)[:, None]
    smallest = np.minimum.reduceat(visible_until, first_key)
    largest = np.maximum.reduceat(visible_until, first_key)
    visited = (first_key < first_query + block_q) & (first_query < largest)
    # A tile that reaches past the last token is never full: `visible_until` is at most N.
    full = visited & (first_key + block_k <= first_query + 1) & (first_query + block_q <= smallest)
    return full, visited & ~full


def _lists(full: np.ndarray, edge: np.ndarray, device: torch.device) -> Lists:
    """One list per row of the tile matrix."""
    fulls, edges = full.sum(1), edge.sum(1)
    order = np.argsort(-(fulls + edges), kind="stable")
    kinds = np.stack([full[order], edge[order]], axis=1)
    tiles = np.nonzero(kinds)[2]
    counts = (fulls + edges)[order]
    last = np.cumsum(counts)
    first = last - counts
    arrays = (order, first, first + fulls[order], last, tiles)
    packed = torch.from_numpy(np.concatenate(arrays).astype(np.int32)).to(device, non_blocking=True)
    return Lists(*packed.split([len(array) for array in arrays]))
