"""The Triton kernels of tree attention: forward, dQ and dK/dV.  FlashAttention-2 over the tiles of a schedule.

    S = scale·QKᵀ   P = exp(S − lse)   O = P V
    dP = dO Vᵀ   Δ = rowsum(dO∘O)   dS = P∘(dP − Δ)   dQ = scale·dS K   dK = scale·dSᵀ Q   dV = Pᵀ dO

Softmax runs in base 2 and log-sum-exps are stored in base 2. One program owns one query tile and query head (forward,
dQ) or one key tile and key head (dK/dV), or a piece of its list: then it writes fp32 to a slot, and the slots of a list
are merged in a fixed order. Results need no atomics. Masked scores are a large negative number, not −inf: a row that
has seen nothing yet then carries a finite maximum, and its sum so far is wiped out by its first visible key. It is
added after scaling, so that no product ever rounds it; scores are too small to change it. Loops carry the next tile's
bounds along instead of loading their own: an address that comes from a load in the same iteration would cost keys and
values a stage of the pipeline. With TMA, tensors arrive as descriptors over [N, row], where row is all heads of a
token. Queries may be a rank's share of the tokens: masks compare places in the forest (`starts`, `tile_start`),
addresses of queries are rows (`rows`, `tile_rows`). Legend: N keys, M queries, H heads, D head dim; `*_n` and `*_h` are
strides over tokens and heads, the last one is 1; LSE and Δ are [H, M].
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr
from triton.tools.tensor_descriptor import TensorDescriptor

from dccot.kernels import schedule
from dccot.kernels.mask import TreeMask
from dccot.kernels.schedule import Plan
from dccot.kernels.tuning import CHOSEN, Tile, architecture, shape_key, tile_for

LOG2_E = constexpr(1.4426950408889634)
MASKED = constexpr(-1.0e30)
# Arguments that change with the tree must not trigger recompilation, neither by value nor by alignment.
DYNAMIC = ["M", "N", "starts", "stops", "slots", "firsts", "middles", "lasts", "tile_start", "tile_stop"]
DYNAMIC += ["rows", "tile_rows"]


@triton.jit
def _dot(a, b, acc, UPCAST: constexpr):
    """a b + acc in fp32.  Triton's interpreter cannot multiply bf16: UPCAST widens first, which changes no result."""
    if UPCAST:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def _rows(base, stride, start, N, ROWS: constexpr, D: constexpr, CLAMPED: constexpr):
    """Pointers to `ROWS` rows of one head.  Rows past the end are clamped to the last one; the caller masks them."""
    rows = tl.arange(0, ROWS)
    if CLAMPED:
        rows = tl.minimum(rows, N - 1 - start)
    # Only the offset of the whole tile can grow past 32 bits.
    return base + start.to(tl.int64) * stride + (rows[:, None] * stride + tl.arange(0, D)[None, :])


@triton.jit
def _load(source, n, h, head, start, N, ROWS: constexpr, D: constexpr, CLAMPED: constexpr, TMA: constexpr):
    """`ROWS` rows of one head, from a descriptor (rows past the end are 0) or from a tensor with these strides."""
    if TMA:
        rows = source.load([start, head * h])
    else:
        rows = tl.load(_rows(source + head * h, n, start, N, ROWS, D, CLAMPED))
    return rows


@triton.jit
def _store(base, stride, start, stop, N, value, ROWS: constexpr, D: constexpr):
    inside = start + tl.arange(0, ROWS) < stop
    tl.store(_rows(base, stride, start, N, ROWS, D, False), value.to(base.dtype.element_ty), mask=inside[:, None])


@triton.jit
def _slot(base, slot, head, ROWS: constexpr, D: constexpr):
    """Pointers to one head of a slot, [ROWS, D]; slots are [slots, heads, ROWS, D]."""
    tile = (slot * tl.num_programs(0) + head).to(tl.int64) * ROWS * D
    return base + tile + (tl.arange(0, ROWS)[:, None] * D + tl.arange(0, D)[None, :])


@triton.jit
def _per_key(values, start, stop, BLOCK_K: constexpr):
    """Keys of a tile and their `visible_until` or `subtree`; 0 (never visible) for those of the next tile."""
    keys = start + tl.arange(0, BLOCK_K)
    return keys, tl.load(values + keys, mask=keys < stop, other=0)


@triton.jit(do_not_specialize=DYNAMIC)
def forward_kernel(
    Q, K, V, OUT, LSE, PART, PART_LSE, subtree, starts, stops, slots, firsts, middles, lasts, tile_start, tile_stop,
    rows, M, N, scale, q_n, q_h, k_n, k_h, v_n, v_h, o_n, o_h,
    GROUP: constexpr, D: constexpr, BLOCK_Q: constexpr, BLOCK_K: constexpr, UPCAST: constexpr, TMA: constexpr,
):  # fmt: skip
    head, program = tl.program_id(0), tl.program_id(1)
    start, stop = tl.load(starts + program), tl.load(stops + program)
    first, middle, last = tl.load(firsts + program), tl.load(middles + program), tl.load(lasts + program)
    queries, row = start + tl.arange(0, BLOCK_Q), tl.load(rows + program)
    q = _load(Q, q_n, q_h, head, row, M, BLOCK_Q, D, True, TMA)
    scale *= LOG2_E
    best = tl.full([BLOCK_Q], MASKED, tl.float32)
    total = tl.zeros([BLOCK_Q], tl.float32)
    acc = tl.zeros([BLOCK_Q, D], tl.float32)
    key_head = head // GROUP
    for EDGE in tl.static_range(2):
        visit, past = (middle, last) if EDGE else (first, middle)
        at, to = tl.load(tile_start + visit), tl.load(tile_stop + visit)
        for index in tl.range(visit, past):
            next_at, next_to = tl.load(tile_start + index + 1), tl.load(tile_stop + index + 1)
            k = _load(K, k_n, k_h, key_head, at, N, BLOCK_K, D, EDGE, TMA)
            scores = _dot(q, k.T, None, UPCAST)
            if EDGE:
                # 0 ≤ query − key < subtree is one unsigned comparison. It becomes a number before the scores are there:
                # kept as 64 predicates, which an sm_100 packs into bits and unpacks, the mask costs more than the rest
                # of the tile.
                _, subtrees = _per_key(subtree, at, to, BLOCK_K)
                after = (queries - at)[:, None] - tl.arange(0, BLOCK_K)[None, :]
                visible = after.to(tl.uint32) < subtrees.to(tl.uint32)[None, :]
                scores = scores * scale + tl.where(visible, 0.0, MASKED)
                higher = tl.maximum(best, tl.max(scores, 1))
                p = tl.math.exp2(scores - higher[:, None])
            else:
                higher = tl.maximum(best, tl.max(scores, 1) * scale)
                p = tl.math.exp2(scores * scale - higher[:, None])
            shrink = tl.math.exp2(best - higher)
            total = total * shrink + tl.sum(p, 1)
            v = _load(V, v_n, v_h, key_head, at, N, BLOCK_K, D, EDGE, TMA)
            acc = _dot(p.to(v.dtype), v, acc * shrink[:, None], UPCAST)
            best, at, to = higher, next_at, next_to
    lse, out, slot = best + tl.math.log2(total), acc / total[:, None], tl.load(slots + program)
    if slot < 0:
        tl.store(LSE + head * M + row + tl.arange(0, BLOCK_Q), lse, mask=queries < stop)
        _store(OUT + head * o_h, o_n, row, row + stop - start, M, out, BLOCK_Q, D)
    else:
        tl.store(PART_LSE + (slot * tl.num_programs(0) + head) * BLOCK_Q + tl.arange(0, BLOCK_Q), lse)
        tl.store(_slot(PART, slot, head, BLOCK_Q, D), out)


@triton.jit(do_not_specialize=DYNAMIC)
def merge_kernel(PART, PART_LSE, OUT, LSE, starts, stops, firsts, lasts, M, o_n, o_h, D: constexpr, BLOCK: constexpr):
    """Output and log-sum-exp of one query tile from those of the pieces of its list."""
    head, program = tl.program_id(0), tl.program_id(1)
    start, stop = tl.load(starts + program), tl.load(stops + program)
    best = tl.full([BLOCK], MASKED, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    acc = tl.zeros([BLOCK, D], tl.float32)
    for slot in tl.range(tl.load(firsts + program), tl.load(lasts + program)):
        lse = tl.load(PART_LSE + (slot * tl.num_programs(0) + head) * BLOCK + tl.arange(0, BLOCK))
        higher = tl.maximum(best, lse)
        shrink, weight = tl.math.exp2(best - higher), tl.math.exp2(lse - higher)
        total = total * shrink + weight
        acc = acc * shrink[:, None] + tl.load(_slot(PART, slot, head, BLOCK, D)) * weight[:, None]
        best = higher
    queries = start + tl.arange(0, BLOCK)
    tl.store(LSE + head * M + queries, best + tl.math.log2(total), mask=queries < stop)
    _store(OUT + head * o_h, o_n, start, stop, M, acc / total[:, None], BLOCK, D)


@triton.jit(do_not_specialize=DYNAMIC)
def sum_kernel(PART, OUT, starts, stops, firsts, lasts, N, o_n, o_h, D: constexpr, BLOCK: constexpr):
    """One tile of a gradient from the pieces of its list, added in a fixed order."""
    head, program = tl.program_id(0), tl.program_id(1)
    start, stop = tl.load(starts + program), tl.load(stops + program)
    total = tl.zeros([BLOCK, D], tl.float32)
    for slot in tl.range(tl.load(firsts + program), tl.load(lasts + program)):
        total += tl.load(_slot(PART, slot, head, BLOCK, D))
    _store(OUT + head * o_h, o_n, start, stop, N, total, BLOCK, D)


@triton.jit(do_not_specialize=DYNAMIC)
def grad_query_kernel(
    Q, K, V, OUT, GRAD, LSE, DELTA, DQ, PART, visible_until, starts, stops, slots, firsts, middles, lasts, tile_start,
    tile_stop, rows, M, N, scale, q_n, q_h, k_n, k_h, v_n, v_h, o_n, o_h, g_n, g_h, dq_n, dq_h,
    GROUP: constexpr, D: constexpr, BLOCK_Q: constexpr, BLOCK_K: constexpr, UPCAST: constexpr, TMA: constexpr,
):  # fmt: skip
    """dQ, and Δ along the way, which the dK/dV kernel reads."""
    head, program = tl.program_id(0), tl.program_id(1)
    start, stop = tl.load(starts + program), tl.load(stops + program)
    first, middle, last = tl.load(firsts + program), tl.load(middles + program), tl.load(lasts + program)
    queries, row = start + tl.arange(0, BLOCK_Q), tl.load(rows + program)
    q = _load(Q, q_n, q_h, head, row, M, BLOCK_Q, D, True, TMA)
    grad = _load(GRAD, g_n, g_h, head, row, M, BLOCK_Q, D, True, TMA)
    out = tl.load(_rows(OUT + head * o_h, o_n, row, M, BLOCK_Q, D, True))
    delta = tl.sum(out.to(tl.float32) * grad.to(tl.float32), 1)
    tl.store(DELTA + head * M + row + tl.arange(0, BLOCK_Q), delta, mask=queries < stop)
    lse = tl.load(LSE + head * M + tl.minimum(row + tl.arange(0, BLOCK_Q), M - 1))
    dq = tl.zeros([BLOCK_Q, D], tl.float32)
    key_head, scale_2 = head // GROUP, scale * LOG2_E
    for EDGE in tl.static_range(2):
        visit, past = (middle, last) if EDGE else (first, middle)
        at, to = tl.load(tile_start + visit), tl.load(tile_stop + visit)
        for index in tl.range(visit, past):
            next_at, next_to = tl.load(tile_start + index + 1), tl.load(tile_stop + index + 1)
            k = _load(K, k_n, k_h, key_head, at, N, BLOCK_K, D, EDGE, TMA)
            v = _load(V, v_n, v_h, key_head, at, N, BLOCK_K, D, EDGE, TMA)
            p = tl.math.exp2(_dot(q, k.T, None, UPCAST) * scale_2 - lse[:, None])
            if EDGE:
                keys, until = _per_key(visible_until, at, to, BLOCK_K)
                p = tl.where((keys[None, :] <= queries[:, None]) & (queries[:, None] < until[None, :]), p, 0.0)
            ds = p * (_dot(grad, v.T, None, UPCAST) - delta[:, None])
            dq = _dot(ds.to(k.dtype), k, dq, UPCAST)
            at, to = next_at, next_to
    slot = tl.load(slots + program)
    if slot < 0:
        _store(DQ + head * dq_h, dq_n, row, row + stop - start, M, dq * scale, BLOCK_Q, D)
    else:
        tl.store(_slot(PART, slot, head, BLOCK_Q, D), dq * scale)


@triton.jit(do_not_specialize=DYNAMIC)
def grad_key_kernel(
    Q, K, V, GRAD, LSE, DELTA, DK, DV, PART_K, PART_V, visible_until, starts, stops, slots, firsts, middles, lasts,
    tile_start, tile_stop, tile_rows, M, N, scale, q_n, q_h, k_n, k_h, v_n, v_h, g_n, g_h, dk_n, dk_h, dv_n, dv_h,
    GROUP: constexpr, D: constexpr, BLOCK_Q: constexpr, BLOCK_K: constexpr, UPCAST: constexpr, TMA: constexpr,
):  # fmt: skip
    """dK and dV of one key tile, summed over the GROUP query heads of its key head: a visit is a query tile and one.

    One loop over tiles and heads: nested loops would drain the pipeline and flush the accumulators once per head.
    """
    key_head, program = tl.program_id(0), tl.program_id(1)
    start, stop = tl.load(starts + program), tl.load(stops + program)
    first, middle, last = tl.load(firsts + program), tl.load(middles + program), tl.load(lasts + program)
    keys, until = _per_key(visible_until, start, stop, BLOCK_K)
    first_head = key_head * GROUP
    k = _load(K, k_n, k_h, key_head, start, N, BLOCK_K, D, True, TMA)
    v = _load(V, v_n, v_h, key_head, start, N, BLOCK_K, D, True, TMA)
    dk = tl.zeros([BLOCK_K, D], tl.float32)
    dv = tl.zeros([BLOCK_K, D], tl.float32)
    scale_2 = scale * LOG2_E
    for EDGE in tl.static_range(2):
        visit, past = (middle, last) if EDGE else (first, middle)
        at = tl.load(tile_rows + visit // GROUP)
        for index in tl.range(visit, past):
            next_at = tl.load(tile_rows + (index + 1) // GROUP)
            head = first_head + index % GROUP
            rows = at + tl.arange(0, BLOCK_Q)
            rows = head * M + (tl.minimum(rows, M - 1) if EDGE else rows)
            q = _load(Q, q_n, q_h, head, at, M, BLOCK_Q, D, EDGE, TMA)
            scores = _dot(k, q.T, None, UPCAST)
            # Row statistics are loaded as late as possible: in this orientation each thread holds one for every column.
            lse = tl.load(LSE + rows)
            p = tl.math.exp2(scores * scale_2 - lse[None, :])
            if EDGE:
                queries = tl.load(tile_start + index // GROUP) + tl.arange(0, BLOCK_Q)
                within = tl.minimum(until, tl.load(tile_stop + index // GROUP))  # later queries belong to the next tile
                p = tl.where((keys[:, None] <= queries[None, :]) & (queries[None, :] < within[:, None]), p, 0.0)
            grad = _load(GRAD, g_n, g_h, head, at, M, BLOCK_Q, D, EDGE, TMA)
            dv = _dot(p.to(grad.dtype), grad, dv, UPCAST)
            dp = _dot(v, grad.T, None, UPCAST)
            delta = tl.load(DELTA + rows)
            ds = p * (dp - delta[None, :])
            dk = _dot(ds.to(q.dtype), q, dk, UPCAST)
            at = next_at
    slot = tl.load(slots + program)
    if slot < 0:
        _store(DK + key_head * dk_h, dk_n, start, stop, N, dk * scale, BLOCK_K, D)
        _store(DV + key_head * dv_h, dv_n, start, stop, N, dv, BLOCK_K, D)
    else:
        tl.store(_slot(PART_K, slot, key_head, BLOCK_K, D), dk * scale)
        tl.store(_slot(PART_V, slot, key_head, BLOCK_K, D), dv)


def forward(q: Tensor, k: Tensor, v: Tensor, mask: TreeMask, scale: float) -> tuple[Tensor, Tensor]:
    """q [M, Hq, D], k and v [N, Hk, D] → output [M, Hq, D] and log-sum-exp [Hq, M] in base 2."""
    heads, dim = q.shape[1:]
    out, lse = q.new_empty(q.shape), q.new_empty(heads, len(q), dtype=torch.float32)
    if not len(q):
        return out, lse
    tile, plan = _planned("forward", mask, *_heads(q, k), q.dtype)
    part, part_lse = (lse.new_empty(plan.slots, heads, tile.block_q, *inner) for inner in ((dim,), ()))
    forward_kernel[heads, len(plan.programs.start)](
        *_sources(tile, (q,), (k, v)), out, lse, part, part_lse, mask.subtree, *_of_queries(plan), len(q), len(k),
        scale, *_strides(q, k, v, out), *_constants(tile, q, k, v), num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    if plan.slots:
        merge = merge_kernel[heads, len(plan.merges[0])]
        merge(part, part_lse, out, lse, *plan.merges, len(out), *_strides(out), dim, tile.block_q)
    return out, lse


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: TreeMask, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    grad, (heads, dim), key_heads = grad.contiguous(), q.shape[1:], k.shape[1]
    if not len(q):
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    dq, dk, dv, delta = q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), torch.empty_like(lse)
    tile, plan = _planned("grad_query", mask, *_heads(q, k), q.dtype)
    part = lse.new_empty(plan.slots, heads, tile.block_q, dim)
    described_q, described_grad, *described_kv = _sources(tile, (q, grad), (k, v))
    grad_query_kernel[heads, len(plan.programs.start)](
        described_q, *described_kv, out, described_grad, lse, delta, dq, part, mask.visible_until, *_of_queries(plan),
        len(q), len(k), scale, *_strides(q, k, v, out, grad, dq), *_constants(tile, q, k, v, grad),
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    _sum_slots(plan, part, dq, tile.block_q)
    tile, plan = _planned("grad_key", mask, *_heads(q, k), q.dtype)
    part_k, part_v = (lse.new_empty(plan.slots, key_heads, tile.block_k, dim) for _ in range(2))
    described_q, described_grad, *described_kv = _sources(tile, (q, grad), (k, v))
    grad_key_kernel[key_heads, len(plan.programs.start)](
        described_q, *described_kv, described_grad, lse, delta, dk, dv, part_k, part_v, mask.visible_until,
        *_of_keys(plan), len(q), len(k), scale, *_strides(q, k, v, grad, dk, dv), *_constants(tile, q, k, v, grad),
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    _sum_slots(plan, part_k, dk, tile.block_k)
    _sum_slots(plan, part_v, dv, tile.block_k)
    return dq, dk, dv


def prepare(mask: TreeMask, heads: int, key_heads: int, head_dim: int, dtype: torch.dtype) -> None:
    """Schedules and plans of all kernels."""
    for kernel in ("forward", "grad_query", "grad_key"):
        _planned(kernel, mask, heads, key_heads, head_dim, dtype)


def _heads(q: Tensor, k: Tensor) -> tuple[int, int, int]:
    return q.shape[1], k.shape[1], q.shape[2]


def _planned(
    kernel: str, mask: TreeMask, heads: int, key_heads: int, head_dim: int, dtype: torch.dtype
) -> tuple[Tile, Plan]:
    """The kernel's tile, and the plan of its programs on the mask's device."""
    device = mask.visible_until.device
    shape = shape_key(mask, heads, key_heads, head_dim, dtype)
    tile = CHOSEN.get(shape, {}).get(kernel) or tile_for(kernel, architecture(device), head_dim, dtype)
    side, copies, repeat = ("by_key", key_heads, heads // key_heads) if kernel == "grad_key" else ("by_query", heads, 1)
    blocks = tile.block_q, tile.block_k
    built = mask.derive(blocks, lambda: schedule.build(mask.host, *blocks, mask.ranges))
    make = lambda: schedule.plan(getattr(built, side), _processors(device), copies, repeat, device)
    return tile, mask.derive((*blocks, side, copies, repeat), make)


def _of_queries(plan: Plan) -> list[Tensor]:
    """What the kernels that own query tiles read of their programs."""
    *lists, rows, _ = plan.programs
    return [*lists, rows]


def _of_keys(plan: Plan) -> list[Tensor]:
    *lists, _, tile_rows = plan.programs
    return [*lists, tile_rows]


def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def _sum_slots(plan: Plan, part: Tensor, out: Tensor, block: int) -> None:
    if plan.slots:
        sum_up = sum_kernel[out.shape[1], len(plan.merges[0])]
        sum_up(part, out, *plan.merges, len(out), *_strides(out), out.shape[2], block)


def _strides(*tensors: Tensor) -> list[int]:
    return [stride for x in tensors for stride in x.stride()[:2]]


def _constants(tile: Tile, *described: Tensor) -> tuple[int, int, int, int, bool, bool]:
    """GROUP, D, BLOCK_Q, BLOCK_K, UPCAST and TMA; `described` begins with q and k."""
    q, k, *_ = described
    upcast = q.device.type == "cpu" and q.dtype == torch.bfloat16
    return q.shape[1] // k.shape[1], q.shape[2], tile.block_q, tile.block_k, upcast, _use_tma(tile, described)


def _sources(tile: Tile, q: tuple[Tensor, ...], k: tuple[Tensor, ...]) -> list:
    """Where the kernels read tiles of queries and keys from: descriptors or the tensors themselves."""
    if not _use_tma(tile, q + k):
        return [*q, *k]
    return [*(_descriptor(x, tile.block_q) for x in q), *(_descriptor(x, tile.block_k) for x in k)]


def _use_tma(tile: Tile, tensors: Sequence[Tensor]) -> bool:
    """TMA needs rows that hold all heads of a token and are 16-byte aligned; other layouts use plain pointers."""
    row = lambda x: (x.shape[1] - 1) * x.stride(1) + x.shape[2]
    aligned = lambda x: x.stride(0) * x.itemsize % 16 == x.data_ptr() % 16 == 0
    return tile.tma and all(row(x) <= x.stride(0) and aligned(x) for x in tensors)


def _descriptor(x: Tensor, block: int) -> TensorDescriptor:
    tokens, heads, dim = x.shape
    return TensorDescriptor(x, [tokens, (heads - 1) * x.stride(1) + dim], [x.stride(0), 1], [block, dim])
