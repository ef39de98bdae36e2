"""Warp-specialised kernels: which warps do what with how many registers, and that dQ compiles as one."""

import re
from dataclasses import replace

import pytest
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget

from dccot.kernels.tuning import TABLE, Tile
from dccot.lab.critic import assembly, inspect
from dccot.lab.critic.compiling import Configuration, compile_kernel
from dccot.lab.critic.inspect import Workload

pytestmark = pytest.mark.slow  # compiles


@triton.jit
def product_kernel(A, B, OUT, tiles, SPECIALIZE: tl.constexpr):
    """One 128×128 tile of a matrix product: the loop that Triton's warp specialisation is made for."""
    total = tl.zeros([128, 128], tl.float32)
    for index in tl.range(0, tiles, warp_specialize=SPECIALIZE):
        total = tl.dot(A.load([0, index * 64]), B.load([0, index * 64]).T, total)
    tl.store(OUT + tl.arange(0, 128)[:, None] * 128 + tl.arange(0, 128)[None, :], total)


def product(specialize: bool):
    tile = "tensordesc<bf16[128, 64]>"
    signature = {"A": tile, "B": tile, "OUT": "*fp32", "tiles": "i32", "SPECIALIZE": "constexpr"}
    source = triton.compiler.ASTSource(
        product_kernel, signature, {"SPECIALIZE": specialize}, {(2,): [["tt.divisibility", 16]]}
    )
    return triton.compile(source, target=GPUTarget("cuda", 100, 32), options={"num_warps": 4, "num_stages": 3})


def assigned_in_machine_code(compiled) -> set[int]:
    """Registers that any warp is set to."""
    stream = assembly.nvidia_stream(assembly.disassemble(compiled.asm["cubin"]))
    moves = [item.operands for item in stream if not isinstance(item, str) and item.mnemonic.startswith("USETMAXREG")]
    return {int(re.findall(r"0x[0-9a-f]+", operands)[-1], 16) for operands in moves}


def test_partitions_of_a_matrix_product_are_read_with_their_warps_and_registers():
    compiled = product(specialize=True)
    (loop,) = assembly.read(compiled).partitions
    assert sorted(each.work for each in loop[1:]) == ["loads", "products"] and loop[0].warps == 4
    assert {each.registers for each in loop} <= assigned_in_machine_code(compiled)
    threads = int(re.search(r"\.reqntid (\d+)", compiled.asm["ptx"]).group(1))
    assert threads // 32 - 3 <= sum(each.warps for each in loop) <= threads // 32, (
        "launched are whole groups of four warps"
    )


TTGIR = """module attributes {"ttg.num-warps" = 4 : i32} {
    ttg.warp_specialize(%a)
    default {
      math.exp2
    }
    partition0(%b) num_warps(1) {
      ttng.tc_gen5_mma
    }
    partition1(%c) num_warps(2) {
      ttng.async_tma_copy_global_to_local
    } : (i32) -> ()
}"""
PTX = """
    barrier.sync 1;
    setmaxnreg.inc.sync.aligned.u32 200;
    barrier.sync 1;
    $L_brx_0: .branchtargets
        $second, $first, $filler, $end;
$first:
    setmaxnreg.dec.sync.aligned.u32 40;
    barrier.sync 1;
$second:
    setmaxnreg.dec.sync.aligned.u32 24;
    barrier.sync 1;
"""


def test_registers_belong_to_the_partition_that_branches_to_them():
    """Worked out by hand: the first target in the list is the first partition's, wherever its code is."""
    (loop,) = assembly.read_partitions(TTGIR, PTX, launched=168)
    assert [(each.work, each.warps, each.registers) for each in loop] == [
        ("softmax", 4, 200),
        ("products", 1, 24),
        ("loads", 2, 40),
    ]


def test_a_kernel_that_is_not_specialised_has_no_partitions():
    assert assembly.read(product(specialize=False)).partitions == []


@pytest.fixture(scope="module", params=[64, 128])
def specialised(request) -> Configuration:
    return Configuration(
        "grad_query", "sm_100", request.param, replace(TABLE["sm_100"][request.param][1], warp_specialize=True)
    )


def test_dq_compiles_whole_with_both_loops_specialised(specialised):
    (report,) = inspect.inspect([specialised], Workload())
    assert report.findings == [] and report.stack == report.spill_instructions == 0 and report.programs >= 1
    assert [[each.work for each in loop] for loop in report.partitions] == [["softmax", "products", "loads"]] * 2
    compiled = compile_kernel(specialised)
    assert {each.registers for loop in report.partitions for each in loop} <= assigned_in_machine_code(compiled)
    assert "3 partitions" in inspect.summary([report], Workload()) and report.prediction is None


def test_a_wish_that_the_compiler_ignores_is_a_finding():
    """Triton 3.7.1 specialises nothing of these kernels for sm_90, and does not say so."""
    (report,) = inspect.inspect(
        [Configuration("grad_query", "sm_90", 128, Tile(128, 64, 8, 3, tma=True, warp_specialize=True))]
    )
    assert report.partitions == [] and "made no partitions" in " ".join(report.findings)


@pytest.mark.parametrize(("kernel", "tma"), [("forward", True), ("grad_key", True), ("grad_query", False)])
def test_kernels_that_do_not_compile_specialised_are_refused(kernel, tma):
    with pytest.raises(ValueError, match="only for grad_query with tma"):
        compile_kernel(Configuration(kernel, "sm_100", 64, Tile(128, 64, 4, 3, tma=tma, warp_specialize=True)))
