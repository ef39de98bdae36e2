"""The Triton kernels of tree attention: forward, dQ and dK/dV.  FlashAttention-2 over the tiles of a schedule (schedule.py).

    S = scale·QKᵀ   P = exp(S − lse)   O = P V
    dP = dO Vᵀ   Δ = rowsum(dO∘O)   dS = P∘(dP − Δ)   dQ = scale·dS K   dK = scale·dSᵀ Q   dV = Pᵀ dO

Softmax runs in base 2 and log-sum-exps are stored in base 2. One program owns one query tile and query head (forward, dQ) or one key
tile and some query heads of one key head (dK/dV), so results need no atomics; the longest tiles start first. Masked scores are a large
negative number, not −inf: a row that has seen nothing yet then carries a finite maximum, and what it summed up is wiped out by its
first visible key. Loops carry the next tile's bounds along instead of loading their own: an address that comes from a load in the
same iteration would cost keys and values a stage of the pipeline.
Legend: N tokens, H heads, D head dim; `*_n` and `*_h` are strides over tokens and heads, the last one is 1; LSE and Δ are [H, N].
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dccot.kernels.mask import TreeMask
from dccot.kernels.schedule import Schedule, build
from dccot.kernels.tuning import Tile, architecture, tile_for

LOG2_E = tl.constexpr(1.4426950408889634)
MASKED = tl.constexpr(-1.0e30)
# What changes with the tree is no part of a kernel's identity: neither values nor alignment may compile it again.
DYNAMIC = ["N", "starts", "stops", "firsts", "middles", "lasts", "tile_start", "tile_stop"]


@triton.jit
def _dot(a, b, acc, UPCAST: tl.constexpr):
    """a b + acc in fp32.  Triton's interpreter cannot multiply bf16: there, operands are widened first, which changes no result."""
    if UPCAST:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def _rows(base, stride, start, N, ROWS: tl.constexpr, D: tl.constexpr, CLAMPED: tl.constexpr):
    """Pointers to `ROWS` rows of one head.  Rows past the end are clamped to the last one: whoever loads them masks what follows.

    Only the offset of the whole tile can grow past 32 bits.
    """
    rows = tl.arange(0, ROWS)
    if CLAMPED:
        rows = tl.minimum(rows, N - 1 - start)
    return base + start.to(tl.int64) * stride + (rows[:, None] * stride + tl.arange(0, D)[None, :])


@triton.jit
def _store(base, stride, start, stop, N, value, ROWS: tl.constexpr, D: tl.constexpr):
    inside = start + tl.arange(0, ROWS) < stop
    tl.store(_rows(base, stride, start, N, ROWS, D, False), value.to(base.dtype.element_ty), mask=inside[:, None])


@triton.jit
def _visible_until(visible_until, start, stop, BLOCK_K: tl.constexpr):
    """Keys of a tile and until when they are visible; those that belong to the next tile until 0, that is never."""
    keys = start + tl.arange(0, BLOCK_K)
    return keys, tl.load(visible_until + keys, mask=keys < stop, other=0)


@triton.jit
def _attend(
    best, total, acc, q, k_base, v_base, k_n, v_n, visible_until, tile_start, tile_stop, first, last, queries, N, scale,
    BLOCK_K: tl.constexpr, D: tl.constexpr, EDGE: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    start, stop = tl.load(tile_start + first), tl.load(tile_stop + first)
    for index in tl.range(first, last):
        next_start, next_stop = tl.load(tile_start + index + 1), tl.load(tile_stop + index + 1)
        k = tl.load(_rows(k_base, k_n, start, N, BLOCK_K, D, EDGE))
        scores = _dot(q, k.T, None, UPCAST)
        if EDGE:
            keys, until = _visible_until(visible_until, start, stop, BLOCK_K)
            scores = tl.where((keys[None, :] <= queries[:, None]) & (queries[:, None] < until[None, :]), scores, MASKED / scale)
        higher = tl.maximum(best, tl.max(scores, 1) * scale)
        p = tl.math.exp2(scores * scale - higher[:, None])
        shrink = tl.math.exp2(best - higher)
        total = total * shrink + tl.sum(p, 1)
        v = tl.load(_rows(v_base, v_n, start, N, BLOCK_K, D, EDGE))
        acc = _dot(p.to(v.dtype), v, acc * shrink[:, None], UPCAST)
        best, start, stop = higher, next_start, next_stop
    return best, total, acc


@triton.jit(do_not_specialize=DYNAMIC)
def forward_kernel(
    Q, K, V, OUT, LSE, visible_until, starts, stops, firsts, middles, lasts, tile_start, tile_stop, N, scale,
    q_n, q_h, k_n, k_h, v_n, v_h, o_n, o_h,
    GROUP: tl.constexpr, D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    head, program = tl.program_id(0), tl.program_id(1)
    start, stop = tl.load(starts + program), tl.load(stops + program)
    first, middle, last = tl.load(firsts + program), tl.load(middles + program), tl.load(lasts + program)
    queries = start + tl.arange(0, BLOCK_Q)
    q = tl.load(_rows(Q + head * q_h, q_n, start, N, BLOCK_Q, D, True))
    k_base, v_base = K + head // GROUP * k_h, V + head // GROUP * v_h
    scale *= LOG2_E
    best = tl.full([BLOCK_Q], MASKED, tl.float32)
    total = tl.zeros([BLOCK_Q], tl.float32)
    acc = tl.zeros([BLOCK_Q, D], tl.float32)
    best, total, acc = _attend(
        best, total, acc, q, k_base, v_base, k_n, v_n, visible_until, tile_start, tile_stop, first, middle, queries, N, scale,
        BLOCK_K, D, False, UPCAST,
    )  # fmt: skip
    best, total, acc = _attend(
        best, total, acc, q, k_base, v_base, k_n, v_n, visible_until, tile_start, tile_stop, middle, last, queries, N, scale,
        BLOCK_K, D, True, UPCAST,
    )  # fmt: skip
    tl.store(LSE + head * N + queries, best + tl.math.log2(total), mask=queries < stop)
    _store(OUT + head * o_h, o_n, start, stop, N, acc / total[:, None], BLOCK_Q, D)


@triton.jit
def _grad_query(
    dq, q, grad, lse, delta, k_base, v_base, k_n, v_n, visible_until, tile_start, tile_stop, first, last, queries, N, scale,
    BLOCK_K: tl.constexpr, D: tl.constexpr, EDGE: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    start, stop = tl.load(tile_start + first), tl.load(tile_stop + first)
    for index in tl.range(first, last):
        next_start, next_stop = tl.load(tile_start + index + 1), tl.load(tile_stop + index + 1)
        k = tl.load(_rows(k_base, k_n, start, N, BLOCK_K, D, EDGE))
        v = tl.load(_rows(v_base, v_n, start, N, BLOCK_K, D, EDGE))
        p = tl.math.exp2(_dot(q, k.T, None, UPCAST) * scale - lse[:, None])
        if EDGE:
            keys, until = _visible_until(visible_until, start, stop, BLOCK_K)
            p = tl.where((keys[None, :] <= queries[:, None]) & (queries[:, None] < until[None, :]), p, 0.0)
        ds = p * (_dot(grad, v.T, None, UPCAST) - delta[:, None])
        dq = _dot(ds.to(k.dtype), k, dq, UPCAST)
        start, stop = next_start, next_stop
    return dq


@triton.jit(do_not_specialize=DYNAMIC)
def grad_query_kernel(
    Q, K, V, OUT, GRAD, LSE, DELTA, DQ, visible_until, starts, stops, firsts, middles, lasts, tile_start, tile_stop, N, scale,
    q_n, q_h, k_n, k_h, v_n, v_h, o_n, o_h, g_n, g_h, dq_n, dq_h,
    GROUP: tl.constexpr, D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """dQ, and Δ on the way, which the dK/dV kernel reads."""
    head, program = tl.program_id(0), tl.program_id(1)
    start, stop = tl.load(starts + program), tl.load(stops + program)
    first, middle, last = tl.load(firsts + program), tl.load(middles + program), tl.load(lasts + program)
    queries = start + tl.arange(0, BLOCK_Q)
    q = tl.load(_rows(Q + head * q_h, q_n, start, N, BLOCK_Q, D, True))
    grad = tl.load(_rows(GRAD + head * g_h, g_n, start, N, BLOCK_Q, D, True))
    out = tl.load(_rows(OUT + head * o_h, o_n, start, N, BLOCK_Q, D, True))
    delta = tl.sum(out.to(tl.float32) * grad.to(tl.float32), 1)
    tl.store(DELTA + head * N + queries, delta, mask=queries < stop)
    lse = tl.load(LSE + head * N + tl.minimum(queries, N - 1))
    k_base, v_base = K + head // GROUP * k_h, V + head // GROUP * v_h
    dq = tl.zeros([BLOCK_Q, D], tl.float32)
    dq = _grad_query(
        dq, q, grad, lse, delta, k_base, v_base, k_n, v_n, visible_until, tile_start, tile_stop, first, middle, queries, N, scale * LOG2_E,
        BLOCK_K, D, False, UPCAST,
    )  # fmt: skip
    dq = _grad_query(
        dq, q, grad, lse, delta, k_base, v_base, k_n, v_n, visible_until, tile_start, tile_stop, middle, last, queries, N, scale * LOG2_E,
        BLOCK_K, D, True, UPCAST,
    )  # fmt: skip
    _store(DQ + head * dq_h, dq_n, start, stop, N, dq * scale, BLOCK_Q, D)


@triton.jit
def _grad_key(
    dk, dv, k, v, Q, GRAD, LSE, DELTA, q_n, q_h, g_n, g_h, tile_start, tile_stop, first, last, head, keys, until, N, scale,
    HEADS: tl.constexpr, BLOCK_Q: tl.constexpr, D: tl.constexpr, EDGE: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    # One loop over tiles and heads: nested ones would drain the pipeline, and empty the accumulators, once per head.
    start = tl.load(tile_start + first)
    for index in tl.range(first * HEADS, last * HEADS):
        next_start = tl.load(tile_start + (index + 1) // HEADS)
        h = head + index % HEADS
        queries = start + tl.arange(0, BLOCK_Q)
        rows = h * N + (tl.minimum(queries, N - 1) if EDGE else queries)
        q = tl.load(_rows(Q + h * q_h, q_n, start, N, BLOCK_Q, D, EDGE))
        scores = _dot(k, q.T, None, UPCAST)
        # Row statistics are loaded as late as possible: in this orientation each thread holds one for every column.
        lse = tl.load(LSE + rows)
        p = tl.math.exp2(scores * scale - lse[None, :])
        if EDGE:
            within = tl.minimum(until, tl.load(tile_stop + index // HEADS))  # later queries belong to the next tile
            p = tl.where((keys[:, None] <= queries[None, :]) & (queries[None, :] < within[:, None]), p, 0.0)
        grad = tl.load(_rows(GRAD + h * g_h, g_n, start, N, BLOCK_Q, D, EDGE))
        dv = _dot(p.to(grad.dtype), grad, dv, UPCAST)
        dp = _dot(v, grad.T, None, UPCAST)
        delta = tl.load(DELTA + rows)
        ds = p * (dp - delta[None, :])
        dk = _dot(ds.to(q.dtype), q, dk, UPCAST)
        start = next_start
    return dk, dv


@triton.jit(do_not_specialize=DYNAMIC)
def grad_key_kernel(
    Q, K, V, GRAD, LSE, DELTA, DK, DV, visible_until, starts, stops, firsts, middles, lasts, tile_start, tile_stop, N, scale,
    q_n, q_h, k_n, k_h, v_n, v_h, g_n, g_h, dk_n, dk_h, dv_n, dv_h,
    GROUP: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """dK and dV of one key tile, summed over HEADS of the GROUP query heads that share a key head."""
    part, program = tl.program_id(0), tl.program_id(1)
    start, stop = tl.load(starts + program), tl.load(stops + program)
    first, middle, last = tl.load(firsts + program), tl.load(middles + program), tl.load(lasts + program)
    keys, until = _visible_until(visible_until, start, stop, BLOCK_K)
    head = part * HEADS
    k = tl.load(_rows(K + head // GROUP * k_h, k_n, start, N, BLOCK_K, D, True))
    v = tl.load(_rows(V + head // GROUP * v_h, v_n, start, N, BLOCK_K, D, True))
    dk = tl.zeros([BLOCK_K, D], tl.float32)
    dv = tl.zeros([BLOCK_K, D], tl.float32)
    dk, dv = _grad_key(
        dk, dv, k, v, Q, GRAD, LSE, DELTA, q_n, q_h, g_n, g_h, tile_start, tile_stop, first, middle, head, keys, until, N, scale * LOG2_E,
        HEADS, BLOCK_Q, D, False, UPCAST,
    )  # fmt: skip
    dk, dv = _grad_key(
        dk, dv, k, v, Q, GRAD, LSE, DELTA, q_n, q_h, g_n, g_h, tile_start, tile_stop, middle, last, head, keys, until, N, scale * LOG2_E,
        HEADS, BLOCK_Q, D, True, UPCAST,
    )  # fmt: skip
    _store(DK + part * dk_h, dk_n, start, stop, N, dk * scale, BLOCK_K, D)
    _store(DV + part * dv_h, dv_n, start, stop, N, dv, BLOCK_K, D)


def forward(q: Tensor, k: Tensor, v: Tensor, mask: TreeMask, scale: float) -> tuple[Tensor, Tensor]:
    """q [N, Hq, D], k and v [N, Hk, D] → output [N, Hq, D] and log-sum-exp [Hq, N] in base 2."""
    tile, (tokens, heads, dim) = _tile_for("forward", q), q.shape
    out, lse = q.new_empty(q.shape), q.new_empty(heads, tokens, dtype=torch.float32)
    lists = _schedule(mask, tile).by_query
    forward_kernel[heads, len(lists.start)](
        q, k, v, out, lse, mask.visible_until, *lists, tokens, scale, *_strides(q, k, v, out),
        heads // k.shape[1], dim, tile.block_q, tile.block_k, _upcast(q), num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out, lse


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: TreeMask, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    grad = grad.contiguous()
    (tokens, heads, dim), key_heads = q.shape, k.shape[1]
    group = heads // key_heads
    dq, delta = q.new_empty(q.shape), torch.empty_like(lse)
    tile = _tile_for("grad_query", q)
    lists = _schedule(mask, tile).by_query
    grad_query_kernel[heads, len(lists.start)](
        q, k, v, out, grad, lse, delta, dq, mask.visible_until, *lists, tokens, scale, *_strides(q, k, v, out, grad, dq),
        group, dim, tile.block_q, tile.block_k, _upcast(q), num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    tile = _tile_for("grad_key", q)
    lists = _schedule(mask, tile).by_key
    parts = _parts(len(lists.start) * key_heads, group, q.device)
    dk, dv = (x.new_empty(tokens, key_heads * parts, dim, dtype=torch.float32 if parts > 1 else x.dtype) for x in (k, v))
    grad_key_kernel[key_heads * parts, len(lists.start)](
        q, k, v, grad, lse, delta, dk, dv, mask.visible_until, *lists, tokens, scale, *_strides(q, k, v, grad, dk, dv),
        group, group // parts, dim, tile.block_q, tile.block_k, _upcast(q), num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    if parts > 1:
        dk, dv = (x.view(tokens, key_heads, parts, dim).sum(2).to(q.dtype) for x in (dk, dv))
    return dq, dk, dv


def _strides(*tensors: Tensor) -> list[int]:
    return [stride for x in tensors for stride in x.stride()[:2]]


def _schedule(mask: TreeMask, tile: Tile) -> Schedule:
    return mask.derive((tile.block_q, tile.block_k), lambda: build(mask.visible_until, tile.block_q, tile.block_k))


def _tile_for(kernel: str, q: Tensor) -> Tile:
    return tile_for(kernel, architecture(q.device), q.shape[-1], q.dtype)


def _upcast(q: Tensor) -> bool:
    return q.device.type == "cpu" and q.dtype == torch.bfloat16


def _parts(programs: int, group: int, device: torch.device) -> int:
    """Into how many programs the query heads of a key head are divided: the fewest that give every multiprocessor two."""
    wanted = 2 * torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
    return next((parts for parts in range(1, group) if group % parts == 0 and programs * parts >= wanted), group)
