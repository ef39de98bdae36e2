"""Tree attention on a CPU: `cpu` against the dense oracle in fp64, and how the entry point behaves."""

import gc

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_forests import SHAPES, forests, from_depths, visible_pairs
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.checkpoint import checkpoint

from dccot.kernels import attention_cpu, attention_flex
from dccot.kernels.mask import Share, split
from dccot.kernels.reference import attention_errors
from dccot.kernels.tree_attention import TreeMask, tree_attention


def tensors(tokens: int, query_heads: int = 6, key_heads: int = 2, dim: int = 16, dtype=torch.float64):
    """q, k, v and a gradient of the output."""
    generator = torch.Generator().manual_seed(tokens)
    sizes = ((tokens, heads, dim) for heads in (query_heads, key_heads, key_heads, query_heads))
    q, k, v, grad = (torch.randn(size, generator=generator, dtype=torch.float64).to(dtype) for size in sizes)
    return [q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), grad]


def with_gradients(q, k, v, grad, mask, **options) -> list[torch.Tensor]:
    out = tree_attention(q, k, v, mask, **options)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), grad)]


def largest_difference(a, b) -> float:
    return max(((x - y).abs().max().item() for x, y in zip(a, b, strict=True) if x.numel()), default=0.0)


def assert_as_the_oracle(visible_until, inputs=None) -> None:
    mask, inputs = TreeMask(visible_until), inputs or tensors(len(visible_until))
    assert largest_difference(with_gradients(*inputs, mask), with_gradients(*inputs, mask, backend="dense")) < 1e-9


def test_the_oracle_is_softmax_over_visible_keys():
    """Row by row over the keys that the definition lets a query see."""
    visible_until = from_depths([0, 1, 2, 2, 3, 1, 2, 0, 1])
    (q, k, v, _), rows = tensors(len(visible_until)), []
    for row, seen in enumerate(visible_pairs(visible_until)):
        keys, values = (x[seen].repeat_interleave(3, dim=1) for x in (k, v))
        weights = ((q[row] * keys).sum(-1) / 4).softmax(0)
        rows.append((weights[..., None] * values).sum(0))
    out = tree_attention(q, k, v, TreeMask(visible_until), backend="dense")
    assert largest_difference([out], [torch.stack(rows)]) < 1e-12


@settings(deadline=None, max_examples=80)
@given(forests(90), st.sampled_from([0, 60, 400, attention_cpu.LONG_RUN_PAIRS]), st.sampled_from([1, 4, 7, 16]))
def test_paths_equal_the_oracle_in_fp64_however_the_tree_is_cut(visible_until, long_run_pairs, triangle):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention_cpu, "LONG_RUN_PAIRS", long_run_pairs)
        patch.setattr(attention_cpu, "TRIANGLE", triangle)
        assert_as_the_oracle(visible_until)


@pytest.mark.parametrize("name", SHAPES)
def test_paths_equal_the_oracle_in_fp64_on_chosen_shapes(name):
    assert_as_the_oracle(SHAPES[name])


def test_paths_equal_the_oracle_in_fp64_on_a_tree_long_enough_for_slices():
    visible_until = torch.tensor([1500] * 400 + [700] * 300 + [1000] * 300 + [1500] * 500)
    pieces = attention_cpu.cut(visible_until, TreeMask(visible_until).ranges)
    triangles = [(rows.stop - rows.start, count) for rows, _, count in pieces.causal]
    assert triangles == [(256, 2), (144, 1), *[(128, 1), (172, 1)] * 2, (256, 2), (244, 1)] and not pieces.chains
    assert len(pieces.full) == 6 + 1, "one rectangle per triangle but the first of a run, and what is below the trunk"
    assert_as_the_oracle(visible_until, tensors(1500, 2, 1, 8))


def shares(visible_until, ranks: int) -> list[TreeMask]:
    ranges = split(visible_until, ranks)
    return [TreeMask(visible_until, share=Share(ranges, rank)) for rank in range(ranks)]


def assert_shares_add_up_to_the_oracle(visible_until, ranks: int, backend: str, inputs=None) -> None:
    """Each rank's output and dQ are its rows of the whole; dK and dV of all ranks add up."""
    q, k, v, grad = inputs or tensors(len(visible_until))
    whole = with_gradients(q, k, v, grad, TreeMask(visible_until), backend="dense")
    *rows, _, _ = map(torch.zeros_like, whole)
    keys = [torch.zeros_like(x) for x in whole[2:]]
    for mask in shares(visible_until, ranks):
        own = mask.row >= 0
        rows[0][own], rows[1][own], *of_keys = with_gradients(q[own], k, v, grad[own], mask, backend=backend)
        keys = [total + part for total, part in zip(keys, of_keys, strict=True)]
    assert largest_difference([*rows, *keys], whole) < 1e-9


@settings(deadline=None, max_examples=80)
@given(forests(90), st.integers(1, 5), st.sampled_from([0, 60, 400, attention_cpu.LONG_RUN_PAIRS]))
def test_the_shares_of_ranks_add_up_to_the_oracle_in_fp64(visible_until, ranks, long_run_pairs):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention_cpu, "LONG_RUN_PAIRS", long_run_pairs)
        patch.setattr(attention_cpu, "TRIANGLE", 4)
        assert_shares_add_up_to_the_oracle(visible_until, ranks, "cpu")


@pytest.mark.parametrize("name", SHAPES)
def test_the_dense_backend_takes_shares_too(name):
    assert_shares_add_up_to_the_oracle(SHAPES[name], 3, "dense")


def test_shares_of_a_tree_long_enough_for_slices_add_up_to_the_oracle():
    visible_until = torch.tensor([3000] * 1400 + [1700] * 300 + [2000] * 300 + [3000] * 1000)
    assert_shares_add_up_to_the_oracle(visible_until, 2, "cpu", tensors(3000, 2, 1, 8))


def test_a_share_survives_its_mask():
    q, k, v, grad = tensors(33)
    [_, mask] = shares(SHAPES["a tile and one token"], 2)
    own = mask.row >= 0
    expected = with_gradients(q[own], k, v, grad[own], mask, backend="dense")
    queries = q[own]
    out = tree_attention(queries, k, v, mask)
    del mask
    gc.collect()
    assert largest_difference(torch.autograd.grad(out, (queries, k, v), grad[own]), expected[1:]) < 1e-9


@settings(deadline=None, max_examples=60)
@given(forests(90), st.sampled_from([4, 16, 128]), st.integers(1, 3))
def test_the_block_mask_of_the_flash_backend_shows_what_the_oracle_shows(visible_until, block, ranks):
    for mask in [TreeMask(visible_until)] if ranks == 1 else shares(visible_until, ranks):
        if mask.queries:
            assert torch.equal(shown_blocks(mask, block), visible_pairs(visible_until)[mask.row >= 0])


def shown_blocks(mask: TreeMask, block: int) -> torch.Tensor:
    made, tokens = attention_flex.block_mask(mask, block), len(mask)
    index, shown = torch.arange(tokens), torch.zeros(mask.queries, tokens, dtype=torch.bool)
    edge, full = (made.kv_num_blocks, made.kv_indices, True), (made.full_kv_num_blocks, made.full_kv_indices, False)
    for count, tiles, masked in (edge, full):
        for row, (length, columns) in enumerate(zip(count[0, 0].tolist(), tiles[0, 0].tolist(), strict=True)):
            for column in columns[:length]:
                q, k = (index[number * block : (number + 1) * block] for number in (row, column))
                q = q[q < mask.queries]
                assert not shown[q[0], k[0]], "a tile is listed twice"
                assert masked or len(k) == block, "a tile without mask must be whole"
                shown[q[:, None], k[None]] = made.mask_mod(0, 0, q[:, None], k[None]) if masked else True
    return shown


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_flash_equals_the_oracle(compiled):
    """FlexAttention's compiled CPU kernel walks the lists; it has no backward there."""
    visible_until = torch.tensor([400] * 140 + [240] * 100 + [300] * 60 + [400] * 100)
    mask, (q, k, v, _) = TreeMask(visible_until), tensors(400, 4, 2, 16, dtype=torch.float32)
    q, k, v = (x.detach() for x in (q, k, v))
    if compiled:
        blocks, heads_first = attention_flex.block_mask(mask), [x.transpose(0, 1)[None] for x in (q, k, v)]
        out = torch.compile(flex_attention)(*heads_first, block_mask=blocks, enable_gqa=True)[0].transpose(0, 1)
    else:
        out = tree_attention(q, k, v, mask, backend="flash")
    assert largest_difference([out], [tree_attention(q, k, v, mask, backend="dense")]) < 1e-5
    for share in [] if compiled else shares(visible_until, 3):
        part = tree_attention(q[share.row >= 0], k, v, share, backend="flash")
        assert largest_difference([part], [out[share.row >= 0]]) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["forty branches", "long branches"])
def test_paths_are_as_exact_as_dense_attention_in_the_same_precision(name, dtype, monkeypatch):
    monkeypatch.setattr(attention_cpu, "LONG_RUN_PAIRS", 500)
    mask = TreeMask(SHAPES[name])
    errors = attention_errors(SHAPES[name], tensors(len(mask), dtype=dtype), 0.25, rounding=0.0)
    assert max(errors(lambda q, k, v: tree_attention(q, k, v, mask)).values()) <= 1


def test_the_same_inputs_give_the_same_bits_with_activation_checkpointing_and_without():
    mask, (q, k, v, grad) = TreeMask(SHAPES["long branches"]), tensors(len(SHAPES["long branches"]))
    first, second = (with_gradients(q, k, v, grad, mask) for _ in range(2))
    out = checkpoint(tree_attention, q, k, v, mask, use_reentrant=False)
    third = [out.detach(), *torch.autograd.grad(out, (q, k, v), grad)]
    assert all(map(torch.equal, first + first, second + third))


def test_scale_replaces_one_over_root_head_dim():
    mask, (q, k, v, _) = TreeMask.causal([20]), tensors(20)
    assert largest_difference([tree_attention(q, k, v, mask, scale=0.5)], [tree_attention(q * 2, k, v, mask)]) < 1e-12


def test_no_tokens_give_no_output():
    found = with_gradients(*tensors(0), TreeMask(torch.empty(0, dtype=torch.int64)))
    assert [x.shape[0] for x in found] == [0] * 4


def test_views_with_other_strides_are_welcome_if_the_last_dimension_is_contiguous():
    views, mask = torch.randn(30, 3, 4, 16, dtype=torch.float64).unbind(1), TreeMask.causal([30])
    assert torch.equal(tree_attention(*views, mask), tree_attention(*(x.contiguous() for x in views), mask))


def test_backward_works_after_the_mask_is_gone():
    q, k, v, grad = tensors(33)
    mask = TreeMask(SHAPES["a tile and one token"])
    expected = with_gradients(q, k, v, grad, mask, backend="dense")
    out = tree_attention(q, k, v, mask)
    del mask
    gc.collect()
    assert largest_difference(torch.autograd.grad(out, (q, k, v), grad), expected[1:]) < 1e-9


def test_the_operator_keeps_torchs_contract_for_custom_operators():
    mask, (q, k, v, _) = TreeMask(SHAPES["one-token segments"]), tensors(15, dtype=torch.float32)
    given = (q, k, v, mask.visible_until, mask.handle, 0.25, "cpu")
    torch.library.opcheck(torch.ops.dccot.tree_attention.default, given)


def test_torch_compile_takes_it_as_one_step_and_other_trees_need_no_new_graph():
    graphs = []

    def count(graph, _):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    step = lambda q, k, v, mask: tree_attention(q * 2, k, v, mask) + 1
    compiled = torch.compile(step, backend=count, fullgraph=True, dynamic=True)
    for name in ("long branches", "forty branches", "plain causal"):
        mask, (q, k, v, _) = TreeMask(SHAPES[name]), tensors(len(SHAPES[name]))
        assert torch.equal(compiled(q, k, v, mask), step(q, k, v, mask))
    assert len(graphs) == 1


DTYPES = "one floating-point dtype, got torch.float32, torch.float16, torch.float32: cast"
BACKWARD = {"backend": "flash", "q": torch.randn(9, 4, 16, requires_grad=True)}
FAR_APART = torch.empty(2**30 + 32, dtype=torch.float16).as_strided((9, 2, 32), (0, 2**30, 1))  # touched by nobody
WIDE, HALF = torch.randn(9, 2, 32), torch.randn(9, 2, 32).half()
TRITON = {"backend": "triton", "k": WIDE, "v": WIDE, "q": WIDE}


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"q": torch.randn(9, 4)}, ValueError, r"takes q \[N, Hq, D\] and k, v \[N, Hk, D\], got q \(9, 4\)"),
        ({"v": torch.randn(9, 2, 8)}, ValueError, r"k \(9, 2, 16\), v \(9, 2, 8\)"),
        ({"q": torch.randn(9, 5, 16)}, ValueError, "query heads must be a multiple of key heads, got 5 and 2"),
        ({"mask": TreeMask.causal([8])}, ValueError, "the mask describes 8 tokens"),
        ({"q": torch.randn(8, 4, 16)}, ValueError, "the mask has 9 queries"),
        ({"k": torch.randn(9, 2, 16).half()}, TypeError, DTYPES),
        ({"q": torch.randn(9, 16, 4).mT}, ValueError, r"last dimension must be contiguous.*call \.contiguous\(\)"),
        ({"scale": 0.0}, ValueError, "scale must be positive, got 0.0"),
        ({"backend": "fast"}, ValueError, "unknown backend 'fast': use 'triton', 'cpu', 'flash', 'sdpa' or 'dense'"),
        (BACKWARD, ValueError, "has no backward on a CPU: use 'cpu'"),
        ({"backend": "triton"}, ValueError, "head_dim .32, 64, 128., got 16"),
        (TRITON, ValueError, "needs TRITON_INTERPRET=1"),
        (TRITON | {"q": FAR_APART, "k": HALF, "v": HALF}, ValueError, "more than 2³¹ elements apart"),
        (TRITON | dict.fromkeys("qkv", WIDE.double()), TypeError, r"got torch\.float64: cast"),
    ],
)
def test_errors_name_the_value_and_the_remedy(change, error, message):
    given = {"q": torch.randn(9, 4, 16), "k": torch.randn(9, 2, 16), "v": torch.randn(9, 2, 16)}
    with pytest.raises(error, match=message):
        tree_attention(**{**given, "mask": TreeMask.causal([9]), **change})
