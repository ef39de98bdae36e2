"""Fused LM head against dense log-softmax: values, gradients through both outputs, blocks of any size."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dccot.kernels import lm_head
from dccot.kernels.lm_head import linear_logprob


def problem(rows: int, vocab: int, dim: int = 8, dtype=torch.float64, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(rows, dim, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    weight = (2 * torch.randn(vocab, dim, generator=generator, dtype=torch.float64)).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(vocab, (rows,), generator=generator)


def by_definition(hidden, weight, targets, temperature):
    distribution = torch.distributions.Categorical(logits=hidden @ weight.T / temperature)
    return distribution.log_prob(targets), distribution.entropy()


def gradients(outputs, upstream, inputs):
    return torch.autograd.grad(sum((out * g).sum() for out, g in zip(outputs, upstream, strict=True)), inputs)


@settings(deadline=None, max_examples=60)
@given(
    size=st.tuples(st.integers(1, 23), st.integers(1, 60)),
    temperature=st.sampled_from([1.0, 0.6, 1.7]),
    cut=st.tuples(st.integers(1, 30), st.integers(1, 400), st.integers(1, 200)),
    used=st.sampled_from([(1.0, 1.0), (1.0, 0.0), (0.0, 1.0)]),
    seed=st.integers(0, 9),
)
def test_equal_to_the_definition_in_fp64_for_blocks_and_strips_of_any_size(size, temperature, cut, used, seed):
    (rows, vocab), (chunk_rows, block, strip) = size, cut
    hidden, weight, targets = problem(rows, vocab, seed=seed)
    upstream = [scale * torch.linspace(-1, 2, rows, dtype=torch.float64) for scale in used]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lm_head, "BLOCK_ELEMENTS", block)
        patch.setattr(lm_head, "STRIP_ELEMENTS", strip)
        ours = linear_logprob(hidden, weight, targets, temperature, chunk_rows=chunk_rows)
        our_gradients = gradients(ours, upstream, (hidden, weight))
    expected = by_definition(hidden, weight, targets, temperature)
    expected += gradients(expected, upstream, (hidden, weight))
    for a, b in zip((*ours, *our_gradients), expected, strict=True):
        assert a.dtype == torch.float64
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("dtype", "values", "slopes"), [(torch.float32, 1e-5, 1e-5), (torch.bfloat16, 1e-5, 1e-2)])
def test_results_are_fp32_and_agree_with_fp64_without_bf16_logits(dtype, values, slopes):
    """Logits of size 50 rounded to bf16 would be wrong by 0.1."""
    hidden, weight, targets = problem(300, 2000, 64, dtype)
    ours = linear_logprob(hidden, weight, targets, 0.6)
    double = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    exact = by_definition(*double, targets, 0.6)
    assert exact[0].min() < -50 and all(x.dtype == torch.float32 for x in ours)
    upstream = [torch.ones(300), torch.full((300,), 0.3)]
    ours += gradients(ours, upstream, (hidden, weight))
    exact += gradients(exact, upstream, double)
    assert all(x.dtype == dtype for x in ours[2:])
    for a, b, error in zip(ours, exact, (values, values, slopes, slopes), strict=True):
        assert (a - b).abs().max() <= error * max(1, b.abs().max())


def test_very_peaked_distributions_have_finite_results():
    hidden, weight, targets = torch.full((1, 1), 300.0), torch.tensor([[1.0], [-1.0], [0.0]]), torch.tensor([1])
    hidden.requires_grad_()
    logprob, entropy = linear_logprob(hidden, weight, targets)
    assert (logprob.item(), entropy.item()) == (-600.0, 0.0)
    assert torch.autograd.grad(logprob + entropy, hidden)[0].item() == -2.0


BLOCKS = [(10_000, 151_936, 8192), (7, 151_936, 8192), (1_000_000, 100, 8192), (3, 5, 1)]


@pytest.mark.parametrize(("rows", "vocab", "chunk_rows"), BLOCKS)
def test_no_block_is_larger_than_its_limit_and_blocks_cover_everything(rows, vocab, chunk_rows):
    row_slices, vocab_slices = lm_head._blocks(rows, vocab, chunk_rows)
    tallest, widest = (max(s.stop - s.start for s in slices) for slices in (row_slices, vocab_slices))
    assert tallest <= chunk_rows and tallest * widest <= lm_head.BLOCK_ELEMENTS
    for slices, length in ((row_slices, rows), (vocab_slices, vocab)):
        assert [s.start for s in slices] == [0] + [s.stop for s in slices[:-1]] and slices[-1].stop == length


def test_no_rows_give_no_results_and_a_zero_gradient():
    hidden, weight, targets = problem(0, 5)
    logprob, entropy = linear_logprob(hidden, weight, targets)
    assert len(logprob) == len(entropy) == 0
    assert torch.autograd.grad(logprob.sum(), weight)[0].abs().sum() == 0


@pytest.mark.parametrize("options", [(4,), (2, 2)], ids=["computed again", "kept"])
def test_the_operator_keeps_torchs_contract_for_custom_operators(options):
    given = (*problem(6, 11, dtype=torch.float32), 0.6, *options)
    torch.library.opcheck(torch.ops.dccot.linear_logprob.default, given)


def test_blocks_that_were_kept_give_the_bits_of_blocks_computed_again(monkeypatch):
    """Three blocks: none, the last two and all kept."""
    hidden, weight, targets = problem(6, 11, dtype=torch.float32)
    found = []
    for kept in (0, 2, 3):
        monkeypatch.setattr(lm_head, "KEPT_BLOCKS", kept)
        ours = linear_logprob(hidden, weight, targets, 0.6, chunk_rows=2)
        found.append(gradients(ours, (1.0, 0.1), (hidden, weight)))
    assert all(map(torch.equal, found[0] + found[0], found[1] + found[2]))


def test_a_frozen_weight_gets_no_gradient_and_hidden_states_the_same_bits():
    hidden, weight, targets = problem(6, 11, dtype=torch.float32)
    both = gradients(linear_logprob(hidden, weight, targets, 0.6, chunk_rows=2), (1.0, 0.1), (hidden, weight))
    alone = linear_logprob(hidden, weight.detach(), targets, 0.6, chunk_rows=2)
    assert torch.equal(gradients(alone, (1.0, 0.1), (hidden,))[0], both[0])


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_ligers_head_is_the_definition_as_well(temperature):
    pytest.importorskip("liger_kernel")  # optional; on a CPU it runs without its kernels
    hidden, weight, targets = problem(700, 60, dtype=torch.float32)
    upstream = [torch.linspace(-1, 2, 700), torch.linspace(1, -1, 700)]
    found = linear_logprob(hidden, weight, targets, temperature, backend="liger")
    expected = by_definition(hidden, weight, targets, temperature)
    slopes = [gradients(outputs, upstream, (hidden, weight)) for outputs in (found, expected)]
    for ours, theirs in zip((*found, *slopes[0]), (*expected, *slopes[1]), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


SHAPES = r"hidden \[M, d\], weight \[V, d\] and targets \[M\], got \(4, 7\), \(5, 8\), \(4,\)"
DTYPES = "share one floating-point dtype, got torch.float64 and torch.float32"


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"hidden": torch.randn(4, 7)}, ValueError, SHAPES),
        ({"targets": torch.zeros(3, dtype=torch.int64)}, ValueError, r"got \(4, 8\), \(5, 8\), \(3,\)"),
        ({"hidden": torch.randn(4, 8).double()}, TypeError, DTYPES),
        ({"temperature": 0.0}, ValueError, "must be positive, got 0.0 and None"),
        ({"targets": torch.tensor([0, 5, 1, 2])}, ValueError, r"targets must lie in \[0, 5\), got 0 to 5"),
        ({"targets": torch.tensor([0, -100, 1, 2])}, ValueError, r"targets must lie in \[0, 5\), got -100 to 2"),
    ],
)
def test_errors_name_the_value_and_the_limit(change, error, message):
    given = {"hidden": torch.randn(4, 8), "weight": torch.randn(5, 8), "targets": torch.tensor([0, 1, 2, 3])}
    with pytest.raises(error, match=message):
        linear_logprob(**given | change)
