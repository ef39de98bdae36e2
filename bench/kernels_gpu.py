"""The part of kernels.py that needs a GPU: Triton kernels against dense-mask SDPA, FlexAttention and FlashAttention.

TFLOP/s count unmasked pairs only (4·D flops per pair and head forward, 2.5 times that backward), so that work on masked pairs lowers them.
Thin on purpose: it only prepares inputs and hands functions to triton.testing.do_bench. It has not been run where there is no GPU.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from dccot.bench.kernels import attention_inputs, dense_sdpa, forward_backward, row
from dccot.kernels import linear_logprob as fused
from dccot.kernels import trees
from dccot.kernels.gpus import of_architecture
from dccot.kernels.mask import TreeMask, positions
from dccot.kernels.reference import dense_logprob
from dccot.kernels.tree_attention import tree_attention
from dccot.kernels.tuning import architecture

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def attention_rows(tree: str, tokens: int, query_heads: int, key_heads: int, dim: int) -> list[dict]:
    visible_until = trees.tree(tree, tokens).cuda()
    causal = TreeMask.causal([len(visible_until)], device="cuda")
    mask = TreeMask(visible_until)
    inputs = attention_inputs(len(visible_until), query_heads, key_heads, dim, device="cuda", dtype=torch.bfloat16)
    candidates = {
        "tree": lambda q, k, v: tree_attention(q, k, v, mask),
        "own kernel, plain causal": lambda q, k, v: tree_attention(q, k, v, causal),
        "SDPA with a dense mask": dense_sdpa(visible_until),
        "FlexAttention with a block mask": flex_attention(visible_until),
        "FlashAttention varlen, prefixes gathered": flash_attention(visible_until),
    }
    rows, speed = [], {}
    for name, attention in candidates.items():
        if attention is None:
            continue
        pairs = int((positions(causal.visible_until if "causal" in name else visible_until) + 1).sum())
        for what, factor, function in (
            ("forward", 1.0, lambda attention=attention: attention(*inputs[:3])),
            ("forward + backward", 3.5, forward_backward(attention, *inputs)),
        ):
            speed[name, what] = factor * 4 * dim * query_heads * pairs / (_milliseconds(function) * 1e9)
            rows.append(row(f"attention: {name}, {what}", speed[name, what], "TFLOP/s"))
    peak = of_architecture(architecture(inputs[0].device)).tflops
    for what in ("forward", "forward + backward"):
        rows.append(row(f"attention: tree, {what}, share of peak", speed["tree", what] / peak, "share"))
        own = speed["own kernel, plain causal", what]
        rows.append(row(f"attention: tree, {what}, share of own causal kernel", speed["tree", what] / own, "share"))
    return rows


def flex_attention(visible_until: Tensor) -> Attention:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    tokens = len(visible_until)
    block_mask = create_block_mask(lambda b, h, q, k: (k <= q) & (q < visible_until[k]), None, None, tokens, tokens, device="cuda")
    compiled = torch.compile(flex_attention)
    heads_first = lambda x: x.transpose(0, 1)[None]
    return lambda q, k, v: compiled(heads_first(q), heads_first(k), heads_first(v), block_mask=block_mask, enable_gqa=True)[0].transpose(
        0, 1
    )


def flash_attention(visible_until: Tensor) -> Attention | None:
    """Every strip of tokens with equal visible_until is one sequence whose keys are its prefix and itself; None if not installed."""
    if not importlib.util.find_spec("flash_attn"):
        return None
    flash_attn_varlen_func = importlib.import_module("flash_attn").flash_attn_varlen_func
    ends = visible_until.cpu().numpy()
    strips = [np.flatnonzero(ends == end) for end in np.unique(ends)]
    seen = [np.concatenate([np.flatnonzero(ends[: strip[0]] > strip[0]), strip]) for strip in strips]
    rows, keys = (torch.from_numpy(np.concatenate(parts)).cuda() for parts in (strips, seen))
    bounds = [torch.tensor(np.cumsum([0, *map(len, parts)]), dtype=torch.int32, device="cuda") for parts in (strips, seen)]
    longest = [max(map(len, parts)) for parts in (strips, seen)]
    back = rows.argsort()
    return lambda q, k, v: flash_attn_varlen_func(q[rows], k[keys], v[keys], *bounds, *longest, causal=True)[back]


def logprob_rows(rows: int, vocabulary: int, dim: int) -> list[dict]:
    hidden = torch.randn(rows, dim, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(vocabulary, dim, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    targets = torch.randint(vocabulary, (rows,), device="cuda")
    found = []
    for name, head in (("fused", fused.linear_logprob), ("plain PyTorch", dense_logprob)):
        function = lambda head=head: torch.autograd.grad(head(hidden, weight, targets, 0.6)[0].sum(), (hidden, weight))
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        function()
        peak = torch.cuda.max_memory_allocated() - before
        found.append(row(f"logprob: {name}, forward + backward", _milliseconds(function), "ms", better="lower"))
        found.append(row(f"logprob: {name}, extra memory", peak / 2**20, "MB", better="lower"))
    return found


def _milliseconds(function: Callable[[], object]) -> float:
    from triton.testing import do_bench

    return do_bench(function, return_mode="median")
