"""Fast tree attention on a CPU: the forest is cut into pieces of ordinary attention, none of which needs a mask.

Everything below a token is one contiguous range after it. So a run of tokens without a branch is seen by two ranges of
queries, itself (causally) and everything below it (fully), and all of that is plain slices:

    prompt S1 | W2 | W3 | W1 W2' W3' S2       prompt S1:  causal on itself, full for all that follows
                                              W2, W3, W1…S2:  causal on themselves

Causal calls reach half the speed of full ones, so a run of medium length is cut again, into triangles along its
diagonal (a batched causal call) and for each of them the rectangle of the run's earlier keys. Pieces of one row are
merged by their log-sum-exps. In the backward each piece gets the row's final output and log-sum-exp, so that gradients
of pieces simply add up.

In subtrees that are too small for their own calls (a forest of hundreds of short responses) call overhead dominates
instead. These are cut into chains: a branch with everything it sees inside the small subtree, gathered. Chains of
similar length run as one batched causal call, padded on the right, where causality hides the padding; rows that belong
to another chain are dropped.

Rows may be a rank's share of the tokens, a few ranges of them: a run that such a range begins inside of is a rectangle
of the run's earlier keys and a causal rest, and rows of a chain that are another rank's are dropped as well.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

# A run becomes a slice once it and everything below it have this many query-key pairs: half as many made the forests of
# the miniature's RL 20% slower, twice as many gained nothing.
LONG_RUN_PAIRS = 65_536
# Tokens of a triangle; the last one of a run has up to twice as many. From UNCUT tokens on, torch's kernel uses larger
# tiles, and cutting costs more than it saves.
TRIANGLE, UNCUT = 128, 768
PADDING_FACTOR = 1.125  # chains whose lengths differ by at most this factor share a call

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


@dataclass(frozen=True)
class Chains:
    """B chains of L tokens; the entries `slots` of the flattened batch are the results of `rows`."""

    tokens: Tensor  # [B·L], each chain padded with its own last token
    queries: Tensor  # [B·L], their rows; any row where a token has none
    shape: tuple[int, int]
    slots: Tensor
    rows: Tensor


@dataclass(frozen=True)
class Paths:
    chains: list[Chains]
    causal: list[tuple[slice, slice, int]]  # rows, keys, and into how many triangles of one size they are cut
    full: list[tuple[slice, slice]]  # rows, keys


def cut(visible_until: Tensor, ranges: np.ndarray) -> Paths:
    """Pieces that cover every visible pair of the queries in `ranges` once; each is a row of exactly one chain or
    causal slice.
    """
    ends = visible_until.cpu().numpy().astype(np.int64)
    starts = np.flatnonzero(np.diff(ends, prepend=-1))
    stops = np.append(starts[1:], len(ends))
    long = _above_any((stops - starts) * (ends[starts] - starts) >= LONG_RUN_PAIRS, starts, ends[starts])
    runs = [bounds[long].tolist() for bounds in (starts, stops, ends[starts])]
    causal: list[tuple[slice, slice, int]] = []
    full: list[tuple[slice, slice]] = []
    row, at = np.full(len(ends), -1), 0
    for low, high in ranges.tolist():
        row[low:high] = np.arange(at, at + high - low)
        for start, stop, end in zip(*runs, strict=True):
            _cut_run(start, stop, end, low, high, at - low, causal, full)
        at += high - low
    return Paths(_chains(ends, np.repeat(~long, stops - starts), row), causal, full)


def _cut_run(start: int, stop: int, end: int, low: int, high: int, to_row: int, causal: list, full: list) -> None:
    """Add the pieces of the queries low:high that see the run start:stop, below which is stop:end."""

    def add(first: int, last: int, key: int, past: int, triangles: int = 0) -> None:
        if first < last and key < past:
            pieces, counted = (causal, (triangles,)) if triangles else (full, ())
            pieces.append((slice(first + to_row, last + to_row), slice(key, past), *counted))

    first, last = max(start, low), min(stop, high)
    if first < last:
        step = TRIANGLE if last - first < UNCUT else last - first
        corners = [*range(first, max(first, last - TRIANGLE) + 1, step), last]
        add(first, corners[-2], first, corners[-2], len(corners) - 2)
        add(corners[-2], last, corners[-2], last, 1)
        add(first, last, start, first)
        for corner, next_corner in itertools.pairwise(corners[1:]):
            add(corner, next_corner, first, corner)
    add(max(stop, low), min(end, high), start, stop)


def _above_any(marked: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Runs that are marked or have a marked run below them."""
    so_far = np.concatenate([[0], np.cumsum(marked)])
    return so_far[np.searchsorted(starts, ends)] > so_far[:-1]


def _chains(ends: np.ndarray, small: np.ndarray, row: np.ndarray) -> list[Chains]:
    """One chain per set of small tokens with equal `ends`: a branch with everything its trunk continues with; up to
    the last token that has a row.
    """
    tokens = np.flatnonzero(small)
    if not len(tokens):
        return []
    order = tokens[np.argsort(ends[tokens], kind="stable")]
    chains = []
    reach, index = np.maximum.accumulate(np.where(small, ends, 0)), np.arange(len(ends))
    is_root = small & (np.concatenate([[0], reach[:-1]]) <= index)  # sees no other small token
    roots = np.maximum.accumulate(np.where(is_root, index, 0))
    for alike in np.split(order, np.flatnonzero(np.diff(ends[order])) + 1):
        rows = alike[: np.max(np.flatnonzero(row[alike] >= 0), initial=-1) + 1]
        if not len(rows):
            continue
        first, root = rows[0], roots[rows[0]]
        seen = root + np.flatnonzero(ends[root:first] > first)
        chains.append((np.concatenate([seen, rows]), len(seen)))
    chains.sort(key=lambda chain: -len(chain[0]))
    return [_pad(batch, row) for batch in _similar(chains) if batch]


def _similar(chains: list[tuple[np.ndarray, int]]) -> Iterator[list[tuple[np.ndarray, int]]]:
    first = 0
    for i in range(1, len(chains) + 1):
        if i == len(chains) or len(chains[first][0]) > PADDING_FACTOR * len(chains[i][0]):
            yield chains[first:i]
            first = i


def _pad(batch: list[tuple[np.ndarray, int]], row: np.ndarray) -> Chains:
    lengths = np.array([len(chain) for chain, _ in batch])[:, None]
    seen = np.array([seen for _, seen in batch])[:, None]
    column = np.arange(lengths.max())
    first = np.cumsum(lengths, axis=0) - lengths
    tokens = np.concatenate([chain for chain, _ in batch])[first + np.minimum(column, lengths - 1)]
    slots = np.flatnonzero((seen <= column) & (column < lengths) & (row[tokens] >= 0))
    at = row[tokens.ravel()]
    flat, queries, own, rows = map(torch.from_numpy, (tokens.ravel(), at.clip(0), slots, at[slots]))
    return Chains(flat, queries, tokens.shape, own, rows)


def _gather(x: Tensor, index: Tensor, shape: tuple[int, int]) -> Tensor:
    """[N, H, D] → [B, H, L, D]."""
    return x.index_select(0, index).unflatten(0, shape).transpose(1, 2)


def _gather_all(of_queries: tuple[Tensor, ...], of_keys: tuple[Tensor, ...], chains: Chains) -> list[Tensor]:
    gathered = [_gather(x, chains.queries, chains.shape) for x in of_queries]
    return gathered + [_gather(x, chains.tokens, chains.shape) for x in of_keys]


def _heads_first(x: Tensor, count: int = 1) -> Tensor:
    """[B·L, H, D] → [B, H, L, D], as the CPU kernel expects it; a view."""
    return x.unflatten(0, (count, -1)).transpose(1, 2)


def _rows_first(x: Tensor) -> Tensor:
    """[B, H, L, D] → [B·L, H, D]."""
    return x.transpose(1, 2).flatten(0, 1)


def forward(q: Tensor, k: Tensor, v: Tensor, paths: Paths, scale: float) -> tuple[Tensor, Tensor]:
    """q [M, Hq, D], k and v [N, Hk, D] → output [M, Hq, D] and log-sum-exp [Hq, M]."""
    precise = torch.promote_types(q.dtype, torch.float32)
    out, lse = q.new_empty(q.shape, dtype=precise), q.new_empty(q.shape[1::-1], dtype=precise)
    for chains in paths.chains:
        part, part_lse = _flash(*_gather_all((q,), (k, v), chains), 0.0, True, scale=scale)
        out.index_copy_(0, chains.rows, _rows_first(part).index_select(0, chains.slots).to(precise))
        lse.index_copy_(1, chains.rows, part_lse.transpose(0, 1).flatten(1).index_select(1, chains.slots))
    for rows, keys, count in paths.causal:
        slices = (_heads_first(x, count) for x in (q[rows], k[keys], v[keys]))
        part, part_lse = _flash(*slices, 0.0, True, scale=scale)
        out[rows], lse[:, rows] = _rows_first(part), part_lse.transpose(0, 1).flatten(1)
    for rows, keys in paths.full:
        part, part_lse = _flash(*(_heads_first(x) for x in (q[rows], k[keys], v[keys])), 0.0, False, scale=scale)
        so_far, part_lse = lse[:, rows], part_lse[0]
        out[rows].lerp_(_rows_first(part).to(precise), torch.sigmoid(part_lse - so_far).t()[..., None])
        lse[:, rows] = torch.logaddexp(so_far, part_lse)
    return out.to(q.dtype), lse


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, paths: Paths, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, summed over the pieces in fp32 or better."""
    dq, dk, dv = (torch.zeros(x.shape, dtype=lse.dtype) for x in (q, k, v))
    for chains in paths.chains:
        # Rows of other chains, and padding, get no gradient here.
        own = grad.new_zeros(chains.tokens.shape + grad.shape[1:])
        own.index_copy_(0, chains.slots, grad.index_select(0, chains.rows))
        own = own.unflatten(0, chains.shape).transpose(1, 2)
        # and no weight: their log-sum-exp may be unknown
        chain_lse = lse.new_full((len(lse), len(chains.tokens)), torch.inf)
        chain_lse.index_copy_(1, chains.slots, lse.index_select(1, chains.rows))
        chain_lse = chain_lse.unflatten(1, chains.shape).transpose(0, 1)
        gathered_q, gathered_out, *gathered = _gather_all((q, out), (k, v), chains)
        parts = _flash_backward(own, gathered_q, *gathered, gathered_out, chain_lse, 0.0, True, scale=scale)
        for total, part, index in zip((dq, dk, dv), parts, (chains.queries, chains.tokens, chains.tokens), strict=True):
            total.index_add_(0, index, _rows_first(part).to(total.dtype))
    for rows, keys, count in [*paths.causal, *((*piece, 0) for piece in paths.full)]:
        slices = (_heads_first(x, max(1, count)) for x in (grad[rows], q[rows], k[keys], v[keys], out[rows]))
        row_lse = lse[:, rows].unflatten(1, (max(1, count), -1)).transpose(0, 1)
        parts = _flash_backward(*slices, row_lse, 0.0, count > 0, scale=scale)
        for total, part in zip((dq[rows], dk[keys], dv[keys]), parts, strict=True):
            total += _rows_first(part)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)
