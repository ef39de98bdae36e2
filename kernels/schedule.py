"""Which tiles of the attention matrix the Triton kernels visit, in which order, and how a GPU shares the work.

Queries are cut into tiles of at most block_q, keys into tiles of at most block_k tokens. A new tile starts where one
long branch ends and another begins, so no tile straddles two branches that cannot see each other, at the cost of one
shorter tile before it. The smallest and largest `visible_until` in a key tile determine, exactly and for every query
tile at once, whether the pair is
    empty   largest ≤ first query, or all keys come after all queries: never visited
    full    smallest > last query, all keys come before all queries, and the streamed tile is whole: no mask arithmetic
    edge    anything else: visited with the mask
This takes O(N + tiles²) and nothing N×N ever exists. A schedule (`build`) is a list of tiles per query tile (for the
forward and dQ) and per key tile (for dK/dV), full ones first, the longest lists first. With the ranges of a rank's
share of the queries, only their tiles are listed; a key tile that none of them sees has an empty list, and gradient 0.

A key tile of a prompt that many responses share is visited by every one of their query tiles: its list can be longer
than all the work a multiprocessor should get. `plan` splits such lists into pieces, each a separate program that writes
fp32 partial results to a slot; a small kernel then adds the slots of a list in a fixed order, so results need no
atomics and are bit-reproducible. The piece size is decided by simulation: programs start in the order given here, each
on the first free multiprocessor. The unit of cost is a visit of an unmasked tile. Candidates split what is longer than
some fraction of a multiprocessor's share of the work, or what runs in the last, incomplete wave; the first that keeps
the GPU busy wins, otherwise the fastest.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dccot.kernels.mask import moved

LONG_BRANCH_TILES = 2  # a new tile starts between branches of at least this many tiles each
EDGE_COST = 1.25  # a visit with the mask; `dccot inspect` counts the instructions
PROGRAM_COST = 1.5  # loading what a program owns, filling the pipeline, storing the result
SLOT_COST = 1.0  # storing a piece in fp32 and adding it
SHARES = (1, 2, 3, 4, 6, 8, 12, 16, 24)  # a piece may take 1/SHARES of a multiprocessor's share of the work
LAST_WAVE = (2, 3, 4)  # pieces of a list in the last wave
BUSY = 0.97  # share of time spent on work of the unsplit schedule that ends the search


class Lists(NamedTuple):
    """Tokens start[p]:stop[p] visit the tiles [first[p], middle[p]) without, [middle[p], last[p]) with the mask.

    Tokens are numbered within the forest; tensors of queries may hold a share of them, where token start[p] is in row
    row[p], and token tile_start[t] in row tile_row[t].
    """

    start: np.ndarray
    stop: np.ndarray
    first: np.ndarray
    middle: np.ndarray
    last: np.ndarray
    tile_start: np.ndarray
    tile_stop: np.ndarray
    row: np.ndarray
    tile_row: np.ndarray


@dataclass(frozen=True)
class Schedule:
    by_query: Lists
    by_key: Lists
    visited: int
    edges: tuple[int, int]  # by query, by key


class Tiles(NamedTuple):
    start: np.ndarray
    stop: np.ndarray
    row: np.ndarray


def build(visible_until: Tensor, block_q: int, block_k: int, ranges: np.ndarray | None = None) -> Schedule:
    """`ranges` [R, 2] are the queries, ascending; None: all."""
    ends = visible_until.cpu().numpy()
    whole = np.array([[0, len(ends)]])
    queries, keys = _tiles(ends, block_q, whole if ranges is None else ranges), _tiles(ends, block_k, whole)
    visited, unmasked = classify(ends, queries.start, queries.stop, np.append(keys.start, len(ends)))
    by_query = visited, unmasked & (keys.stop - keys.start == block_k)
    by_key = visited.T, (unmasked & (queries.stop - queries.start == block_q)[:, None]).T
    visits = int(visited.sum())
    edges = visits - int(by_query[1].sum()), visits - int(by_key[1].sum())
    return Schedule(_lists(*by_query, queries, keys), _lists(*by_key, keys, queries), visits, edges)


def _tiles(ends: np.ndarray, block: int, ranges: np.ndarray) -> Tiles:
    """Each range cut for itself."""
    bounds = [start + cut(np.minimum(ends[start:stop], stop) - start, block) for start, stop in ranges]
    start, stop = (np.concatenate([each[part] for each in bounds]) for part in (slice(-1), slice(1, None)))
    return Tiles(start, stop, np.cumsum(stop - start) - (stop - start))


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


def classify(
    ends: np.ndarray, first_query: np.ndarray, past_query: np.ndarray, keys: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """bool [query tiles, key tiles]: where any pair is visible, and where all are; `keys` are boundaries."""
    first_query, past_query = first_query[:, None], past_query[:, None]
    first_key, past_key = keys[:-1], keys[1:]
    smallest, largest = np.minimum.reduceat(ends, first_key), np.maximum.reduceat(ends, first_key)
    visited = (first_key < past_query) & (first_query < largest)
    return visited, visited & (past_key <= first_query + 1) & (past_query <= smallest)


def _lists(visited: np.ndarray, full: np.ndarray, own: Tiles, streamed: Tiles) -> Lists:
    """One list per row of the tile matrix."""
    visited, full = np.ascontiguousarray(visited), np.ascontiguousarray(full)
    counts, fulls = np.count_nonzero(visited, axis=1), np.count_nonzero(full, axis=1)
    order = np.argsort(-counts, kind="stable")
    full_then_edge = np.concatenate([full, visited ^ full], axis=1)[order]
    tiles = np.nonzero(full_then_edge)[1] % visited.shape[1]
    last = np.cumsum(counts[order])
    first = last - counts[order]
    tiles = np.append(tiles, 0)  # kernels read one tile ahead
    begin, end, row = (np.append(each, 0)[tiles] for each in streamed)  # one more: a share may have no tile at all
    listed = first, first + fulls[order], last, begin, end
    return Lists(own.start[order], own.stop[order], *listed, own.row[order], row)


class Programs(NamedTuple):
    """Program p owns tokens start[p]:stop[p] and visits [first[p], middle[p]) without, [middle[p], last[p]) with the
    mask; a visit is tile visit // repeat and head visit % repeat. It writes to slot[p], or to the result if that is −1.
    Rows are those of `Lists`.
    """

    start: Tensor
    stop: Tensor
    slot: Tensor
    first: Tensor
    middle: Tensor
    last: Tensor
    tile_start: Tensor
    tile_stop: Tensor
    row: Tensor
    tile_row: Tensor


@dataclass(frozen=True)
class Plan:
    programs: Programs
    merges: tuple[Tensor, ...]  # start, stop, first, last: rows start[m]:stop[m] come from slots first[m]:last[m]
    slots: int
    busy: float  # simulated share of busy multiprocessors


def plan(lists: Lists, processors: int, copies: int, repeat: int, device: torch.device | str = "cpu") -> Plan:
    """`copies` programs (heads) run each list, and each program walks it with `repeat` heads."""
    first, middle, last = (repeat * column.astype(np.int64) for column in (lists.first, lists.middle, lists.last))
    work = (middle - first) + EDGE_COST * (last - middle)
    share = copies * (work + PROGRAM_COST).sum() / processors
    fastest = 0.0, np.inf, np.ones_like(first)
    for wanted in _wanted(work, share, copies, processors):
        parts = np.minimum(wanted, last - first).clip(1).astype(np.int64)
        costs = np.repeat(work / parts + PROGRAM_COST + SLOT_COST * (parts > 1), parts)
        busy, makespan = simulate(costs, processors, copies)
        fastest = min(fastest, (busy, makespan, parts), key=lambda candidate: (round(candidate[1], 6), -candidate[0]))
        if share >= BUSY * makespan:
            break
    busy, _, parts = fastest
    programs, merges = _split(lists._replace(first=first, middle=middle, last=last), parts, torch.device(device))
    return Plan(programs, merges, int(parts[parts > 1].sum()), busy)


def _wanted(work: np.ndarray, share: float, copies: int, processors: int) -> Iterator[np.ndarray]:
    """Into how many pieces each list would be split; lists are sorted longest first."""
    yield from (np.ceil(work * n / share) for n in SHARES)
    in_last_wave = np.arange(len(work)) >= len(work) * copies // processors * processors // copies
    yield from (np.where(in_last_wave, n, 1) for n in LAST_WAVE)


def simulate(costs: np.ndarray, processors: int, copies: int) -> tuple[float, float]:
    """Share of busy processors, and when the last one stops."""
    free, jobs = np.zeros(processors), np.repeat(np.sort(costs)[::-1], copies)
    for first in range(0, len(jobs), processors):
        wave = jobs[first : first + processors]
        free.sort()
        after = free[: len(wave)] + wave
        if after.min() >= free[len(wave) - 1]:  # nobody is done with the wave before all have their part of it
            free[: len(wave)] = after
        else:
            heap = free.tolist()
            for cost in wave.tolist():
                heapq.heapreplace(heap, heap[0] + cost)
            free = np.array(heap)
    makespan = free.max()
    return float(copies * costs.sum() / (processors * makespan)), float(makespan)


def _split(lists: Lists, parts: np.ndarray, device: torch.device) -> tuple[Programs, tuple[Tensor, ...]]:
    owner = np.repeat(np.arange(len(parts)), parts)
    piece = np.arange(len(owner)) - np.repeat(np.cumsum(parts) - parts, parts)
    bound = lambda number: lists.first[owner] + (lists.last - lists.first)[owner] * number // parts[owner]
    begin, end = bound(piece), bound(piece + 1)
    several = parts > 1
    slot = np.where(several[owner], np.cumsum(several[owner]) - 1, -1)
    switch = np.clip(lists.middle[owner], begin, end)
    order = np.argsort(-(switch - begin + EDGE_COST * (end - switch)), kind="stable")
    columns = lists.start[owner], lists.stop[owner], slot, begin, switch, end
    past = np.cumsum(parts[several])
    arrays = [*(column[order] for column in columns), lists.tile_start, lists.tile_stop]
    arrays += [lists.row[owner][order], lists.tile_row]
    rows, height = lists.row[several], (lists.stop - lists.start)[several]
    arrays += [rows, rows + height, past - parts[several], past]
    packed = moved(torch.from_numpy(np.concatenate(arrays).astype(np.int32)), device)
    tensors = packed.split([len(array) for array in arrays])
    return Programs(*tensors[:10]), tensors[10:]
