"""Norm and rotation on a CPU against torch's own operations in fp64, values and gradients, for strips of any size."""

import pytest
import torch
import torch.nn.functional as F

from dccot.kernels import norm_rotate
from dccot.kernels.norm_rotate import rms_norm, rotate


def with_gradients(function, *inputs):
    out = function(*inputs)
    upstream = torch.linspace(-1, 2, out.numel(), dtype=torch.float64).view(out.shape).to(out.dtype)
    return [out, *torch.autograd.grad(out, inputs, upstream)]


def plain_rotation(x, cos, sin):
    turned = torch.complex(*x.chunk(2, dim=-1)) * torch.complex(cos, sin)
    return torch.cat((turned.real, turned.imag), dim=-1)


@pytest.mark.parametrize("strip", [1, 50, 10_000])
@pytest.mark.parametrize(("dtype", "error"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 0.05)])
def test_equal_to_torch_in_fp64_for_strips_of_any_size(monkeypatch, strip, dtype, error):
    monkeypatch.setattr(norm_rotate, "STRIP_ELEMENTS", strip)
    torch.manual_seed(0)
    x, weight = torch.randn(23, 3, 16).to(dtype).requires_grad_(), torch.rand(16).to(dtype).requires_grad_()
    angle = torch.rand(23, 1, 8).double()
    cos, sin = (part.to(torch.promote_types(dtype, torch.float32)) for part in (angle.cos(), angle.sin()))
    exact = [each.detach().double().requires_grad_() for each in (x, weight)]
    found = with_gradients(lambda x, w: rms_norm(x, w, 1e-6), x, weight)
    found += with_gradients(lambda x: rotate(x, cos, sin), x)
    expected = with_gradients(lambda x, w: F.rms_norm(x, (16,), w, 1e-6), *exact)
    expected += with_gradients(lambda x: plain_rotation(x, cos.double(), sin.double()), exact[0])
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == dtype
        assert (ours - theirs).abs().max() <= error * max(1, theirs.abs().max())


def test_no_rows_are_no_error():
    nothing, angles = torch.zeros(0, 2, 16, requires_grad=True), torch.zeros(0, 1, 8)
    assert len(rms_norm(nothing, torch.ones(16, requires_grad=True), 1e-6)) == len(rotate(nothing, angles, angles)) == 0
