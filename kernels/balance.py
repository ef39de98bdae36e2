"""Splits a schedule's longest lists so that every multiprocessor stays busy until the end.

A key tile of a prompt that many responses share is visited by every one of their query tiles: its list can be longer
than all the work a multiprocessor should get. Such lists are split into pieces, each a separate program that writes
fp32 partial results to a slot; a small kernel then adds the slots of a list in a fixed order, so results need no
atomics and are bit-reproducible.

The piece size is decided by simulation: programs start in the order given here, each on the first free multiprocessor.
The unit of cost is a visit of an unmasked tile. Candidates split what is longer than some fraction of a
multiprocessor's share of the work, or what runs in the last, incomplete wave; the first that keeps the GPU busy wins,
otherwise the fastest.
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
from dccot.kernels.schedule import Lists

EDGE_COST = 1.25  # a visit with the mask; `dccot inspect` counts the instructions
PROGRAM_COST = 1.5  # loading what a program owns, filling the pipeline, storing the result
SLOT_COST = 1.0  # storing a piece in fp32 and adding it
SHARES = (1, 2, 3, 4, 6, 8, 12, 16, 24)  # a piece may take 1/SHARES of a multiprocessor's share of the work
LAST_WAVE = (2, 3, 4)  # pieces of a list in the last wave
BUSY = 0.97  # share of time spent on work of the unsplit schedule that ends the search


class Programs(NamedTuple):
    """Program p owns tokens start[p]:stop[p], visits [first[p], middle[p]) without, [middle[p], last[p]) with the mask,
    and writes to slot[p], or directly to the result if that is −1.  A visit means tile visit // repeat and head visit %
    repeat."""

    start: Tensor
    stop: Tensor
    slot: Tensor
    first: Tensor
    middle: Tensor
    last: Tensor
    tile_start: Tensor
    tile_stop: Tensor


class Merges(NamedTuple):
    """Tokens start[m]:stop[m] are merged from slots first[m]:last[m]."""

    start: Tensor
    stop: Tensor
    first: Tensor
    last: Tensor


@dataclass(frozen=True)
class Plan:
    programs: Programs
    merges: Merges
    slots: int
    busy: float  # simulated share of busy multiprocessors
    makespan: float  # simulated, in visits of an unmasked tile


def plan(lists: Lists, processors: int, copies: int, repeat: int, device: torch.device | str = "cpu") -> Plan:
    """`copies` programs (heads) run each list, and each program walks it with `repeat` heads."""
    first, middle, last = (repeat * column.astype(np.int64) for column in (lists.first, lists.middle, lists.last))
    work = (middle - first) + EDGE_COST * (last - middle)
    share = copies * (work + PROGRAM_COST).sum() / processors
    fastest = 0.0, np.inf, np.ones_like(first)
    for parts in _candidates(work, last - first, share, copies, processors):
        busy, makespan = simulate(_costs(work, parts), processors, copies)
        fastest = min(fastest, (busy, makespan, parts), key=lambda candidate: (round(candidate[1], 6), -candidate[0]))
        if share >= BUSY * makespan:
            break
    return _cut(lists, first, middle, last, *fastest, device)


def _candidates(
    work: np.ndarray, visits: np.ndarray, share: float, copies: int, processors: int
) -> Iterator[np.ndarray]:
    """How many pieces each list is split into; lists are sorted longest first."""
    in_last_wave = np.arange(len(work)) >= len(work) * copies // processors * processors // copies
    for wanted in [np.ceil(work * n / share) for n in SHARES] + [np.where(in_last_wave, n, 1) for n in LAST_WAVE]:
        yield np.minimum(wanted, visits).clip(1).astype(np.int64)


def simulate(costs: np.ndarray, processors: int, copies: int) -> tuple[float, float]:
    """Share of busy processors, and when the last one stops."""
    free = [0.0] * processors
    for cost in np.sort(costs)[::-1].tolist():
        for _ in range(copies):
            heapq.heapreplace(free, free[0] + cost)
    makespan = max(free)
    return float(copies * costs.sum() / (processors * makespan)), float(makespan)


def _costs(work: np.ndarray, parts: np.ndarray) -> np.ndarray:
    return np.repeat(work / parts + PROGRAM_COST + SLOT_COST * (parts > 1), parts)


def _cut(
    lists: Lists, first: np.ndarray, middle: np.ndarray, last: np.ndarray, busy: float, makespan: float, parts: np.ndarray,
    device: torch.device | str,
) -> Plan:  # fmt: skip
    owner = np.repeat(np.arange(len(parts)), parts)
    piece = np.arange(len(owner)) - np.repeat(np.cumsum(parts) - parts, parts)
    bound = lambda number: first[owner] + (last - first)[owner] * number // parts[owner]
    begin, end = bound(piece), bound(piece + 1)
    cut = parts > 1
    slot = np.where(cut[owner], np.cumsum(cut[owner]) - 1, -1)
    switch = np.clip(middle[owner], begin, end)
    order = np.argsort(-(switch - begin + EDGE_COST * (end - switch)), kind="stable")
    columns = lists.start[owner], lists.stop[owner], slot, begin, switch, end
    past = np.cumsum(parts[cut])
    arrays = [*(column[order] for column in columns), lists.tile_start, lists.tile_stop]
    arrays += [lists.start[cut], lists.stop[cut], past - parts[cut], past]
    packed = moved(torch.from_numpy(np.concatenate(arrays).astype(np.int32)), torch.device(device))
    tensors = packed.split([len(array) for array in arrays])
    return Plan(Programs(*tensors[:8]), Merges(*tensors[8:]), int(parts[cut].sum()), busy, makespan)
