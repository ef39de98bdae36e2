"""The Triton kernels of the fused LM head, run by Triton's interpreter, against the definition in fp64."""

import pytest
import torch

from dccot.kernels import lm_head, lm_head_triton


@pytest.mark.parametrize(("rows", "vocab", "block"), [(5, 40, 10_000), (13, 150, 13 * 64), (9, 100, 3 * 33)])
@pytest.mark.parametrize("upstream", [(1.0, 0.5), (0.0, 1.0)])
def test_values_and_gradients_equal_the_definition(rows, vocab, block, upstream, monkeypatch):
    monkeypatch.setattr(lm_head, "BLOCK_ELEMENTS", block)
    monkeypatch.setattr(lm_head_triton, "HEAD_COLUMNS", 32)
    generator = torch.Generator().manual_seed(vocab)
    hidden, weight = (torch.randn(n, 16, generator=generator).requires_grad_() for n in (rows, vocab))
    targets = torch.randint(vocab, (rows,), generator=generator)
    double = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    distribution = torch.distributions.Categorical(logits=double[0] @ double[1].T / 0.6)
    expected = distribution.log_prob(targets), distribution.entropy()
    ours = lm_head.linear_logprob(hidden, weight, targets, 0.6, chunk_rows=rows // 2)
    steps = torch.linspace(-1, 2, rows)
    for outputs in (ours, expected):
        sum((scale * steps * out).sum() for scale, out in zip(upstream, outputs, strict=True)).backward()
    for a, b in zip((*ours, hidden.grad, weight.grad), (*expected, double[0].grad, double[1].grad), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=2e-5, atol=2e-5)


def test_very_peaked_distributions_have_finite_results(monkeypatch):
    monkeypatch.setattr(lm_head_triton, "HEAD_COLUMNS", 16)
    hidden, weight = torch.full((1, 1), 300.0, requires_grad=True), torch.tensor([[1.0], [-1.0], [0.0]])
    logprob, entropy = lm_head.linear_logprob(hidden, weight, torch.tensor([1]))
    assert (logprob.item(), entropy.item()) == (-600.0, 0.0)
    assert torch.autograd.grad(logprob + entropy, hidden)[0].item() == -2.0


def test_a_target_out_of_range_is_an_error_not_a_wrong_number():
    logits, statistics = torch.zeros(2, 8), torch.zeros(4, 2)
    statistics[0], statistics[3] = -torch.inf, torch.nan
    lm_head_triton.update_statistics(logits, torch.tensor([3, -100]), statistics, 1.0)
    assert statistics[3, 0] == 0 and statistics[3, 1].isnan()


def test_gradients_are_written_in_the_precision_of_the_products(monkeypatch):
    monkeypatch.setattr(lm_head_triton, "HEAD_COLUMNS", 16)
    torch.manual_seed(0)
    logits, targets, values = torch.randn(5, 40), torch.randint(40, (5,)), torch.rand(4, 5)
    exact = lm_head.Strips.logits_to_gradient(logits.clone(), targets, values, 1.5)
    found = lm_head_triton.logits_to_gradient(logits.clone(), targets, values, 1.5, torch.bfloat16)
    assert found.dtype == torch.bfloat16
    # the interpreter cuts off, where a GPU rounds
    torch.testing.assert_close(found.float(), exact, rtol=2**-7, atol=1e-6)
