"""The Triton attention kernels, run by Triton's interpreter, against an fp64 dense oracle.
The bound is that of `dccot gpu-check`, which makes the same comparison on a GPU (lab/gpu_check/kernels.py).
"""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from kernel_forests import SHAPES, forests

from dccot.kernels import attention_triton, tuning
from dccot.kernels.mask import Share, split
from dccot.kernels.reference import with_gradients
from dccot.kernels.schedule import Plan
from dccot.kernels.tree_attention import TreeMask, tree_attention
from dccot.kernels.tuning import Tile
from dccot.lab.gpu_check.kernels import check_attention as check
from dccot.lab.gpu_check.kernels import own_attention

BRANCHES = torch.tensor([75] * 13 + [31] * 18 + [50] * 19 + [75] * 25)
SHARED_PROMPT = torch.tensor([113] * 33 + [73] * 40 + [113] * 40)
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16


def thorough(*values):
    return pytest.param(*values, marks=pytest.mark.thorough)


def inputs(tokens: int, group: int, dim: int, dtype: torch.dtype, key_heads: int = 1) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * tokens + dim)
    heads = (group * key_heads, key_heads, key_heads, group * key_heads)
    return [torch.randn(tokens, h, dim, generator=generator, dtype=torch.float64).to(dtype) for h in heads]


@pytest.mark.parametrize(
    ("dim", "dtype", "group"),
    [
        *((32, FP16, 2), (64, BF16, 3), (128, FP32, 1)),
        *(thorough(*case) for case in ((32, FP32, 3), (32, BF16, 1), (64, FP32, 2), (64, FP16, 1))),
        *(thorough(*case) for case in ((128, BF16, 2), (128, FP16, 3))),
    ],
)
def test_head_dims_dtypes_and_head_groups(dim, dtype, group):
    check(BRANCHES, inputs(75, group, dim, dtype))


LARGE = ("long branches", "plain causal", "exactly one tile")


@pytest.mark.parametrize("name", [thorough(name) if name in LARGE else name for name in SHAPES])
def test_chosen_shapes(name):
    check(SHAPES[name], inputs(len(SHAPES[name]), 1, 32, FP32))


@pytest.mark.thorough
@settings(deadline=None, max_examples=16)
@given(forests(70))
def test_any_forest(visible_until):
    check(visible_until, inputs(len(visible_until), 2, 32, FP32))


@pytest.mark.parametrize("tile", [Tile(16, 64, 1, 1), Tile(64, 16, 1, 1)])
def test_tiles_of_any_proportion(tile, monkeypatch):
    monkeypatch.setattr(tuning, "INTERPRETER", (tile, tile, tile))
    check(SHAPES["forty branches"], inputs(98, 1, 32, FP32))


@pytest.mark.parametrize(("processors", "dtype"), [(50, BF16), *(thorough(*case) for case in ((3, FP32), (3, BF16)))])
def test_split_lists_give_the_same_results(processors, dtype, monkeypatch):
    monkeypatch.setattr(attention_triton, "_processors", lambda _: processors)
    check(SHARED_PROMPT, inputs(113, 2, 32, dtype, key_heads=2))


def test_a_gpu_larger_than_the_forest_splits_all_three_kernels_and_gives_the_same_bits_twice(monkeypatch):
    monkeypatch.setattr(attention_triton, "_processors", lambda _: 50)
    mask, tensors = TreeMask(SHAPES["plain causal"]), inputs(77, 2, 32, FP32)
    first, second = (with_gradients(own_attention(mask), tensors) for _ in range(2))
    plans = [plan for plan in mask._derived.values() if isinstance(plan, Plan)]
    assert len(plans) == 3 and all(plan.slots > 1 for plan in plans)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("dtype", [BF16, thorough(FP32)])
def test_tensor_descriptors_give_the_same_results(dtype, monkeypatch):
    described, made = attention_triton._descriptor, []
    monkeypatch.setattr(tuning, "INTERPRETER", tuple(replace(tile, tma=True) for tile in tuning.INTERPRETER))
    monkeypatch.setattr(attention_triton, "_descriptor", lambda x, block: made.append(block) or described(x, block))
    check(BRANCHES, inputs(75, 2, 32, dtype, key_heads=2))
    assert len(made) == 3 + 4 + 4, "forward describes q, k, v; each backward kernel the gradient as well"


def test_layouts_that_descriptors_cannot_express_fall_back_to_pointers(monkeypatch):
    monkeypatch.setattr(tuning, "INTERPRETER", tuple(replace(tile, tma=True) for tile in tuning.INTERPRETER))
    monkeypatch.setattr(attention_triton, "_descriptor", None)
    heads_first = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in inputs(40, 2, 32, FP32, key_heads=2)]
    check(torch.full((40,), 40), heads_first)


def test_strided_views_and_a_broadcast_gradient():
    fused = torch.randn(40, 3, 2, 32)
    q, k, v = fused.unbind(1)
    check(SHAPES["one-token segments"], [*(x[:15] for x in (q, k, v)), torch.ones(15, 2, 32)])
    out = tree_attention(*(x.detach().requires_grad_() for x in (q, k, v)), TreeMask.causal([40]), backend="triton")
    out.sum().backward()


def test_nothing_after_the_last_token_is_used():
    guarded = [torch.cat([x, torch.full_like(x, torch.nan)]) for x in inputs(33, 2, 32, FP32)]
    check(SHAPES["a tile and one token"], [x[:33] for x in guarded])


def test_large_scores_neither_overflow_nor_vanish():
    q, k, v, grad = inputs(75, 1, 32, FP32)
    largest = float((900 * q[:, 0] @ k[:, 0].T).abs().max()) / 32**0.5
    # of a score, times the scale of q and k: which of two is luckier is chance
    rounding = 30 * torch.finfo(FP32).eps * largest
    assert 1e-3 < rounding < 0.1
    check(BRANCHES, [q * 30, k * 30, v, grad], rounding)


@pytest.mark.parametrize("tma", [False, True])
def test_the_shares_of_two_ranks_add_up_to_the_whole(tma, monkeypatch):
    """Each rank's queries against all keys, with split lists: its rows of the output and of dQ, and a part of dK/dV."""
    monkeypatch.setattr(attention_triton, "_processors", lambda _: 20)
    monkeypatch.setattr(tuning, "INTERPRETER", tuple(replace(tile, tma=tma) for tile in tuning.INTERPRETER))
    q, k, v, grad = inputs(75, 2, 32, FP32)
    whole, ranges, slots = with_gradients(own_attention(TreeMask(BRANCHES)), [q, k, v, grad]), split(BRANCHES, 2), 0
    keys = [torch.zeros_like(k), torch.zeros_like(v)]
    for rank in range(2):
        mask = TreeMask(BRANCHES, share=Share(ranges, rank))
        own = mask.row >= 0
        *rows, dk, dv = with_gradients(own_attention(mask), [q[own], k, v, grad[own]])
        for part, expected in zip(rows, whole[:2], strict=True):
            torch.testing.assert_close(part, expected[own], rtol=1e-5, atol=1e-5)
        keys = [keys[0] + dk, keys[1] + dv]
        slots += sum(plan.slots for plan in mask._derived.values() if isinstance(plan, Plan))
    assert len(ranges[0]) > 1 and slots
    for total, expected in zip(keys, whole[2:], strict=True):
        torch.testing.assert_close(total, expected, rtol=1e-5, atol=1e-5)
