"""What Triton takes for the identity of a kernel: another length or tree must not compile again, another layout may."""

import pytest
import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import create_function_from_signature

from dccot.kernels import attention_triton, lm_head_triton

ATTENTION = ("forward", "grad_query", "grad_key", "merge", "sum")
KERNELS = [getattr(attention_triton, f"{name}_kernel") for name in ATTENTION]
KERNELS += [lm_head_triton.statistics_kernel, lm_head_triton.gradient_kernel]
LISTS = ("starts", "stops", "slots", "firsts", "middles", "lasts", "tile_start", "tile_stop", "rows", "tile_rows")


def identity(kernel, length: int, aligned: bool, stride: int = 128) -> list:
    """Types and specialisations, computed by Triton's own launcher code for arguments of this kind."""
    integers, numbers = torch.zeros(64, dtype=torch.int32), torch.zeros(64)
    slices = dict.fromkeys(LISTS, integers[0 if aligned else 1 :])
    slices |= dict.fromkeys(("STATISTICS", "ROW_VALUES"), numbers[0 if aligned else 1 :])
    lengths = {"M": length, "N": length, "width": 8192, "plane": length, "scale": 0.125, "inverse_temperature": 1.5}
    values = slices | {"targets": integers.long()[0 if aligned else 1 :], "visible_until": integers} | lengths
    default = lambda p: 128 if p.is_constexpr else stride if p.name.endswith(("_n", "_h", "_stride")) else numbers
    bind = create_function_from_signature(kernel.signature, kernel.params, make_backend(GPUTarget("cuda", 90, 32)))
    return bind(*(values.get(p.name, default(p)) for p in kernel.params))[1]


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.__name__)
def test_lengths_and_trees_share_one_kernel(kernel):
    first = identity(kernel, 1024, aligned=True)
    assert all(identity(kernel, length, aligned) == first for length in (1, 16, 77, 4096) for aligned in (True, False))


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.__name__)
def test_a_layout_with_odd_strides_is_another_kernel(kernel):
    assert identity(kernel, 1024, True, stride=129) != identity(kernel, 1024, True)
