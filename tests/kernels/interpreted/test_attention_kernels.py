"""The Triton attention kernels, run by Triton's interpreter, against an fp64 dense oracle.

The bound: at most twice (gradients three times) the error that dense PyTorch makes in the same precision, plus 1e-6 (a few units in the
last place in fp32) for trees so small that dense PyTorch makes no error at all.
"""

import pytest
import torch
from hypothesis import given, settings
from kernel_forests import SHAPES, forests

from dccot.kernels import attention_triton, tuning
from dccot.kernels.tree_attention import TreeMask, tree_attention
from dccot.kernels.tuning import Tile


def with_gradients(q, k, v, grad, mask, backend: str) -> list[torch.Tensor]:
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    out = tree_attention(q, k, v, mask, backend=backend)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), grad)]


def inputs(tokens: int, group: int, dim: int, dtype: torch.dtype, key_heads: int = 1) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * tokens + dim)
    heads = (group * key_heads, key_heads, key_heads, group * key_heads)
    return [torch.randn(tokens, h, dim, generator=generator, dtype=torch.float64).to(dtype) for h in heads]


def check(visible_until, tensors) -> None:
    mask, dtype = TreeMask(visible_until), tensors[0].dtype
    exact = with_gradients(*(x.double() for x in tensors), mask, "dense")
    ours, dense = (with_gradients(*tensors, mask, backend) for backend in ("triton", "dense"))
    for part, factor, a, b, truth in zip(("out", "dq", "dk", "dv"), (2, 3, 3, 3), ours, dense, exact, strict=True):
        error, allowed = ((x - truth).abs().max().item() for x in (a, b))
        assert a.dtype == dtype
        assert error <= factor * allowed + 1e-6, f"{part}: error {error:.2e}, dense {dtype} {allowed:.2e}"


COMBINATIONS = [
    (32, torch.float32, 6), (32, torch.bfloat16, 1), (32, torch.float16, 2),
    (64, torch.float32, 2), (64, torch.bfloat16, 6), (64, torch.float16, 1),
    (128, torch.float32, 1), (128, torch.bfloat16, 2), (128, torch.float16, 6),
]  # fmt: skip


@pytest.mark.parametrize(("dim", "dtype", "group"), COMBINATIONS)
def test_head_dims_dtypes_and_head_groups(dim, dtype, group):
    visible_until = torch.tensor([75] * 13 + [31] * 18 + [50] * 19 + [75] * 25)
    check(visible_until, inputs(75, group, dim, dtype))


@pytest.mark.parametrize("name", SHAPES)
def test_chosen_shapes(name):
    check(SHAPES[name], inputs(len(SHAPES[name]), 1, 32, torch.float32))


@settings(deadline=None, max_examples=30)
@given(forests(70))
def test_any_forest(visible_until):
    check(visible_until, inputs(len(visible_until), 2, 32, torch.float32))


@pytest.mark.parametrize("tile", [Tile(16, 64, 1, 1), Tile(64, 16, 1, 1)])
def test_tiles_of_any_proportion(tile, monkeypatch):
    monkeypatch.setattr(tuning, "INTERPRETER", (tile, tile, tile))
    check(SHAPES["forty branches"], inputs(98, 1, 32, torch.float32))


@pytest.mark.parametrize("parts", [1, 3, 6])
def test_the_heads_of_a_group_may_be_divided_among_programs(parts, monkeypatch):
    monkeypatch.setattr(attention_triton, "_parts", lambda *_: parts)
    check(SHAPES["a tile and one token"], inputs(33, 6, 32, torch.float32, key_heads=2))


def test_strided_views_and_a_broadcast_gradient():
    fused = torch.randn(40, 3, 2, 32)
    q, k, v = fused.unbind(1)
    check(SHAPES["one-token segments"], [*(x[:15] for x in (q, k, v)), torch.ones(15, 2, 32)])
    out = tree_attention(*(x.detach().requires_grad_() for x in (q, k, v)), TreeMask.causal([40]), backend="triton")
    out.sum().backward()


def test_nothing_behind_the_last_token_is_used():
    guarded = [torch.cat([x, torch.full_like(x, torch.nan)]) for x in inputs(33, 2, 32, torch.float32)]
    check(SHAPES["a tile and one token"], [x[:33] for x in guarded])


def test_the_same_inputs_give_the_same_bits():
    tensors, mask = inputs(77, 2, 32, torch.float32), TreeMask(SHAPES["plain causal"])
    first, second = (with_gradients(*tensors, mask, "triton") for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_large_scores_neither_overflow_nor_vanish():
    q, k, v, grad = inputs(75, 1, 32, torch.float32)
    check(torch.tensor([75] * 13 + [31] * 18 + [50] * 19 + [75] * 25), [q * 30, k * 30, v, grad])
