"""The Triton kernels of the fused LM head: what happens to a block of logits between two matrix products (lm_head.py).

    statistics_kernel   folds a block into the running softmax statistics; one program per row
    gradient_kernel     writes a block's gradient in the precision of the products; one program per row and HEAD_COLUMNS

Both stream memory once, so they are bandwidth-bound. Statistics and row values are [4, M], one plane after the other; a
target outside the block is just a column that never comes up.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dccot.kernels.tuning import HEAD_COLUMNS, HEAD_WARPS

# Arguments that change with the number of rows must not trigger recompilation, neither by value nor by alignment. The
# width of a block follows from the vocabulary, and knowing that it is divisible by 16 allows vector loads.
DYNAMIC = ["targets", "STATISTICS", "ROW_VALUES", "plane"]


@triton.jit(do_not_specialize=DYNAMIC)
def statistics_kernel(LOGITS, targets, STATISTICS, width, row_stride, plane, inverse_temperature, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    logits = LOGITS + row.to(tl.int64) * row_stride
    statistics = STATISTICS + row
    target = tl.load(targets + row)
    largest = tl.load(statistics)
    total = tl.load(statistics + plane)
    weighted = tl.load(statistics + 2 * plane)
    for first in tl.range(0, width, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        z = tl.load(logits + columns, mask=columns < width, other=-float("inf")) * inverse_temperature
        higher = tl.maximum(largest, tl.max(z, 0))
        # Before the first block the largest is −inf, and everything weighted by it is 0.
        gap = tl.where(total > 0, largest - higher, 0.0)
        shrink = tl.exp(gap)
        p = tl.exp(z - higher)
        weighted = shrink * (weighted + gap * total) + tl.sum(tl.where(p > 0, p * (z - higher), 0.0), 0)
        total = total * shrink + tl.sum(p, 0)
        largest = higher
    tl.store(statistics, largest)
    tl.store(statistics + plane, total)
    tl.store(statistics + 2 * plane, weighted)
    here = (target >= 0) & (target < width)
    tl.store(statistics + 3 * plane, tl.load(logits + target, mask=here, other=0.0) * inverse_temperature, mask=here)


@triton.jit(do_not_specialize=DYNAMIC)
def gradient_kernel(
    LOGITS, GRADIENT, targets, ROW_VALUES, width, row_stride, plane, inverse_temperature, BLOCK: tl.constexpr
):
    row = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    block = row.to(tl.int64) * row_stride + columns
    values = ROW_VALUES + row
    lse, entropy = tl.load(values), tl.load(values + plane)
    grad_logprob, grad_entropy = tl.load(values + 2 * plane), tl.load(values + 3 * plane)
    logprob = tl.load(LOGITS + block, mask=columns < width, other=-float("inf")) * inverse_temperature - lse
    p = tl.exp(logprob)
    gradient = tl.where(p > 0, -p * (grad_logprob + grad_entropy * (logprob + entropy)), 0.0)
    gradient += tl.where(columns == tl.load(targets + row), grad_logprob, 0.0)
    tl.store(GRADIENT + block, gradient * inverse_temperature, mask=columns < width)


def update_statistics(logits: Tensor, targets: Tensor, statistics: Tensor, inverse_temperature: float) -> None:
    (rows, width), strides = logits.shape, (logits.stride(0), statistics.stride(0))
    launch = statistics_kernel[rows,]
    launch(logits, targets, statistics, width, *strides, inverse_temperature, HEAD_COLUMNS, num_warps=HEAD_WARPS)


def logits_to_gradient(
    logits: Tensor, targets: Tensor, row_values: Tensor, inverse_temperature: float, dtype: torch.dtype | None = None
) -> Tensor:
    """In place where precisions agree."""
    (rows, width), logits = logits.shape, logits.contiguous()
    gradient = logits if dtype in (None, logits.dtype) else torch.empty_like(logits, dtype=dtype)
    given, strides = (logits, gradient, targets, row_values), (logits.stride(0), row_values.stride(0))
    launch = gradient_kernel[rows, triton.cdiv(width, HEAD_COLUMNS)]
    launch(*given, width, *strides, inverse_temperature, HEAD_COLUMNS, num_warps=HEAD_WARPS)
    return gradient
