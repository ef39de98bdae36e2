"""LM head fused with the log-prob and entropy of the chosen tokens: logits never exist as a whole.

    z = h Wᵀ / T        lse = log Σ exp z        log p(t) = z_t − lse        H = lse − Σ p z
    ∂/∂z of g·log p(t) + e·H   =   g·1_t − p·(g + e·(z − lse + H))

The M×V matrix is visited block by block, vocabulary first. The forward keeps running softmax statistics per row, the
backward computes every block again and turns it into its gradient in place; each block yields finished rows of dW.
Extra memory is one block, regardless of M and V, at the cost of one more matrix product. On a CPU the last blocks of
few (all of a small head) are kept for the backward and not computed again. Matrix products are torch's; between them
runs a Triton kernel on a GPU (lm_head_triton.py) and cache-sized strips of torch operations on a CPU. Legend: M rows, V
vocabulary, d hidden size.
"""

from __future__ import annotations

import itertools
import math
import os

import torch
from torch import Tensor

from dccot.kernels.sizes import BLOCK_ELEMENTS, DEFAULT_CHUNK_ROWS

ALIGNED_VOCAB = 128  # blocks are a multiple of this wide, so that every row of a block starts on a boundary
KEPT_BLOCKS = 2  # on a CPU, of at most twice as many: two of more would not be worth their memory
STRIP_ELEMENTS = 2**17  # of logits: fits a CPU core's cache


def linear_logprob(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float = 1.0,
    *,
    chunk_rows: int | None = None,
    backend: str = "own",
) -> tuple[Tensor, Tensor]:
    """hidden [M, d], weight [V, d], targets int [M] → log-prob and entropy [M] under softmax(hidden weightᵀ / T).

    Results are fp32 (fp64 for fp64 inputs) and carry gradients to both. `chunk_rows` limits the rows of a block. The
    backend `liger` is Liger-Kernel's fused product, if installed: CuTe kernels on an H100, plain PyTorch elsewhere.

    >>> hidden, weight = torch.tensor([[0.0, 1.0]]), torch.tensor([[1.0, 0.0], [2.0, 0.0], [3.0, 0.0], [4.0, 0.0]])
    >>> logprob, entropy = linear_logprob(hidden, weight, torch.tensor([2]))  # four equal logits: log 1/4 and log 4
    >>> round(logprob.item(), 4), round(entropy.item(), 4)
    (-1.3863, 1.3863)
    """
    if hidden.ndim != 2 or weight.ndim != 2 or hidden.shape[1] != weight.shape[1] or targets.shape != hidden.shape[:1]:
        shapes = f"{tuple(hidden.shape)}, {tuple(weight.shape)}, {tuple(targets.shape)}"
        raise ValueError(f"linear_logprob takes hidden [M, d], weight [V, d] and targets [M], got {shapes}")
    if hidden.dtype != weight.dtype or not hidden.is_floating_point():
        both = f"{hidden.dtype} and {weight.dtype}"
        raise TypeError(f"hidden and weight must share one floating-point dtype, got {both}: cast one of them")
    if temperature <= 0 or (chunk_rows is not None and chunk_rows < 1):
        raise ValueError(f"temperature and chunk_rows must be positive, got {temperature} and {chunk_rows}")
    if backend == "liger" and len(hidden):
        from liger_kernel.ops import LigerFusedLinearScaledCrossEntropyFunction as Liger

        loss, entropy = Liger.apply(hidden, weight, targets.long(), temperature, -100, 1, True)
        return -loss.to(_wide(hidden)), entropy.to(_wide(hidden))
    chunk_rows = chunk_rows or DEFAULT_CHUNK_ROWS
    differentiated = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    blocks = math.prod(map(len, _blocks(len(hidden), len(weight), chunk_rows)))
    keep = differentiated and blocks <= 2 * KEPT_BLOCKS and _kernels(hidden) is Strips
    return _forward(hidden, weight, targets, temperature, chunk_rows, min(blocks, KEPT_BLOCKS) if keep else 0)[:2]


@torch.library.custom_op("dccot::linear_logprob", mutates_args=())
def _forward(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, chunk_rows: int, keep: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """log-prob, entropy and log-sum-exp of every row; z of the last `keep` blocks, block i in row i % keep."""
    if targets.device.type == "cpu" and len(targets):
        lowest, highest = int(targets.min()), int(targets.max())
        if not 0 <= lowest <= highest < len(weight):
            raise ValueError(f"targets must lie in [0, {len(weight)}), got {lowest} to {highest}")
    update = _kernels(hidden).update_statistics
    # Per row: the largest z so far, Σ exp(z − largest), Σ exp(z − largest)·(z − largest), the target's z.
    statistics = hidden.new_zeros(4, len(hidden), dtype=_wide(hidden))
    statistics[0], statistics[3] = -torch.inf, torch.nan
    row_slices, vocab_slices = _blocks(len(hidden), len(weight), chunk_rows)
    buffers = _buffers(hidden, row_slices, vocab_slices, max(keep, 1))
    for number, (vocab, rows) in enumerate(itertools.product(vocab_slices, row_slices)):
        logits = _logits(hidden[rows], weight[vocab], buffers, number)
        update(logits, targets[rows] - vocab.start, statistics[:, rows], 1 / temperature)
        del logits  # before the next ones come, unless they share a buffer
    largest, total, weighted, chosen = statistics
    lse = largest + total.log()
    kept = buffers if keep and buffers is not None else lse.new_empty(0, 0)
    return chosen - lse, total.log() - weighted / total, lse, kept


@_forward.register_fake
def _(hidden, weight, targets, temperature, chunk_rows, keep=0):
    rows = [hidden.new_empty(len(hidden), dtype=_wide(hidden)) for _ in range(3)]
    kept = _buffers(hidden, *_blocks(len(hidden), len(weight), chunk_rows), keep) if keep else rows[0].new_empty(0, 0)
    return *rows, kept


@torch.library.custom_op("dccot::linear_logprob_backward", mutates_args=())
def _backward(
    row_values: Tensor,
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    kept: Tensor,
    temperature: float,
    chunk_rows: int,
    weight_needs_grad: bool,
) -> tuple[Tensor, Tensor]:
    """`row_values`: log-sum-exp, entropy, gradients of log-prob and entropy, [4, M]; `kept`: by the forward.

    A frozen weight gets an empty gradient.
    """
    to_gradient = _kernels(hidden).logits_to_gradient
    hidden_grad = torch.zeros_like(hidden, dtype=_wide(hidden))
    weight_grad = torch.empty_like(weight) if weight_needs_grad else weight.new_empty(0)
    row_slices, vocab_slices = _blocks(len(hidden), len(weight), chunk_rows)
    first_kept = len(row_slices) * len(vocab_slices) - len(kept)
    buffers = _buffers(hidden, row_slices, vocab_slices)
    dtype = hidden.dtype if buffers is None else buffers.dtype
    numbers = itertools.count()
    for vocab in vocab_slices:
        vocab_grad = torch.zeros_like(weight[vocab], dtype=_wide(weight)) if weight_needs_grad else None
        for rows, number in zip(row_slices, numbers):
            chosen, values = targets[rows] - vocab.start, row_values[:, rows]
            if number >= first_kept and buffers is not None:
                z, out = (_block(memory, number, hidden[rows], weight[vocab]) for memory in (kept, buffers))
                gradient = to_gradient(z, chosen, values, 1 / temperature, dtype, scaled_into=out)
            else:
                logits = _logits(hidden[rows], weight[vocab], buffers, number)
                gradient = to_gradient(logits, chosen, values, 1 / temperature, dtype)
                del logits  # before the next ones come, unless they share a buffer
            _add_product(hidden_grad[rows], gradient, weight[vocab])
            if vocab_grad is not None:
                _add_product(vocab_grad, gradient.t(), hidden[rows])
            del gradient
        if vocab_grad is not None:
            weight_grad[vocab] = vocab_grad
    return hidden_grad.to(hidden.dtype), weight_grad


@_backward.register_fake
def _(row_values, hidden, weight, targets, kept, temperature, chunk_rows, weight_needs_grad):
    return torch.empty_like(hidden), torch.empty_like(weight) if weight_needs_grad else weight.new_empty(0)


def _save(ctx, inputs, output) -> None:
    hidden, weight, targets, ctx.temperature, ctx.chunk_rows, _ = inputs
    _, entropy, lse, kept = output
    ctx.save_for_backward(hidden, weight, targets, kept, lse, entropy)
    ctx.mark_non_differentiable(lse, kept)


def _gradients(ctx, grad_logprob: Tensor, grad_entropy: Tensor, *_):
    *saved, lse, entropy = ctx.saved_tensors
    row_values = torch.stack([lse, entropy, grad_logprob, grad_entropy])
    needed = ctx.needs_input_grad[1]
    of_hidden, of_weight = _backward(row_values, *saved, ctx.temperature, ctx.chunk_rows, needed)
    return of_hidden, of_weight if needed else None, *[None] * 4


_forward.register_autograd(_gradients, setup_context=_save)


def _blocks(rows: int, vocab: int, chunk_rows: int) -> tuple[list[slice], list[slice]]:
    """How the M×V matrix is cut into blocks: slices of rows and of the vocabulary."""
    height = max(1, min(rows, chunk_rows))
    width = max(1, BLOCK_ELEMENTS // height)
    if width > ALIGNED_VOCAB:
        width -= width % ALIGNED_VOCAB
    return _slices(rows, height), _slices(vocab, width)


def _slices(length: int, step: int) -> list[slice]:
    return [slice(first, min(first + step, length)) for first in range(0, length, step)]


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _buffers(hidden: Tensor, row_slices: list[slice], vocab_slices: list[slice], count: int = 1) -> Tensor | None:
    """Memory for `count` blocks; torch's GPU product of half-precision numbers into fp32 allocates its own."""
    if hidden.is_cuda and hidden.dtype != _wide(hidden):
        return None
    tallest, widest = (max((s.stop - s.start for s in slices), default=0) for slices in (row_slices, vocab_slices))
    return hidden.new_empty(count, tallest * widest, dtype=_wide(hidden))


def _logits(hidden: Tensor, weight: Tensor, buffers: Tensor | None, number: int) -> Tensor:
    """One block in fp32 or better: logits rounded to bf16 would spoil log-probs."""
    if buffers is None:
        return torch.mm(hidden, weight.t(), out_dtype=torch.float32)
    return torch.mm(hidden.to(buffers.dtype), weight.t().to(buffers.dtype), out=_block(buffers, number, hidden, weight))


def _block(buffers: Tensor, number: int, hidden: Tensor, weight: Tensor) -> Tensor:
    return buffers[number % len(buffers), : len(hidden) * len(weight)].view(len(hidden), len(weight))


def _add_product(total: Tensor, gradient: Tensor, factor: Tensor) -> None:
    """total += gradient factor, summed inside the product, in the precision of `total`."""
    if gradient.dtype != total.dtype:
        torch.addmm(total, gradient, factor, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(gradient, factor.to(total.dtype))


def _kernels(x: Tensor):
    if x.is_cuda or os.environ.get("TRITON_INTERPRET") == "1":
        from dccot.kernels import lm_head_triton

        return lm_head_triton
    return Strips


class Strips:
    """The two steps between matrix products on a CPU, a few rows at a time: they stay in cache between passes."""

    @staticmethod
    def update_statistics(logits: Tensor, targets: Tensor, statistics: Tensor, inverse_temperature: float) -> None:
        largest, total, weighted, chosen = statistics
        here = (targets >= 0) & (targets < logits.shape[1])
        picked = logits.gather(1, targets.clamp(0, logits.shape[1] - 1)[:, None])[:, 0]
        torch.where(here, picked * inverse_temperature, chosen, out=chosen)
        for rows in _slices(len(logits), max(1, STRIP_ELEMENTS // logits.shape[1])):
            z = logits[rows].mul_(inverse_temperature)
            higher = torch.maximum(largest[rows], z.amax(1))
            gap = largest[rows] - higher
            shrink = gap.exp()
            # Before the first block the largest is −inf, and everything weighted by it is 0.
            weighted[rows] = shrink * (weighted[rows] + torch.where(shrink > 0, gap, 0.0) * total[rows])
            total[rows] *= shrink
            below = z - higher[:, None]
            p = below.exp()
            total[rows] += p.sum(1)
            weighted[rows] += p.mul_(below).sum(1)
            largest[rows] = higher

    @staticmethod
    def logits_to_gradient(
        logits: Tensor, targets: Tensor, row_values: Tensor, inverse_temperature: float, _=None, scaled_into=None
    ) -> Tensor:
        """In place, or of logits that are divided by the temperature already, into `scaled_into`."""
        lse, entropy, grad_logprob, grad_entropy = (value[:, None] for value in row_values)
        with_entropy = bool(grad_entropy.any())
        for rows in _slices(len(logits), max(1, STRIP_ELEMENTS // max(1, logits.shape[1]))):
            given = logits[rows] if scaled_into is not None else logits[rows].mul_(inverse_temperature)
            logprob = torch.sub(given, lse[rows], out=given if scaled_into is None else scaled_into[rows])
            factor = -inverse_temperature * grad_logprob[rows]
            if with_entropy:
                slope = -inverse_temperature * grad_entropy[rows]
                factor = torch.addcmul(factor + slope * entropy[rows], slope, logprob)
            logprob.exp_().mul_(factor)
        logits = logits if scaled_into is None else scaled_into
        here = (targets >= 0) & (targets < logits.shape[1])
        own = torch.where(here, grad_logprob[:, 0] * inverse_temperature, 0.0)
        return logits.scatter_add_(1, targets.clamp(0, logits.shape[1] - 1)[:, None], own[:, None])
