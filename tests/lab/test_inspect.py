"""Every shipped kernel configuration, compiled for GPUs that are not here: the critic has no findings, and can have."""

import contextlib
import functools
import io
import json
import tempfile
from pathlib import Path

import pytest

from dccot.kernels.tuning import ATTENTION_KERNELS, FP32, TABLE, Tile
from dccot.lab.critic import assembly, inspect
from dccot.lab.critic.compiling import Configuration, compile_kernel, configurations, examine

pytestmark = pytest.mark.slow

MATRIX_INSTRUCTION = {
    "sm_80": "mma.sync",
    "sm_86": "mma.sync",
    "sm_90": "wgmma.mma_async",
    "sm_100": "tcgen05.mma",
    "gfx942": "v_mfma",
}
ONE = "sm_90"  # in `make test`: it has every kind of load and product that the critic knows


@functools.cache
def inspected(arch: str) -> tuple[int, str, list[dict]]:
    """Exit code, table and JSON of `dccot inspect`; compiled once."""
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()) as printed:
        file = Path(folder) / "inspect.json"
        code = inspect.main(["--arch", arch, "--json", str(file)])
        return code, printed.getvalue(), json.loads(file.read_text())


def row_of(arch: str, kernel: str, head_dim: int) -> dict:
    wanted = {"arch": arch, "kernel": kernel, "head_dim": head_dim}
    return next(row for row in inspected(arch)[2] if wanted.items() <= row["configuration"].items())


def judged(config: Configuration) -> inspect.Report:
    return inspect.report(config, examine(config))


def test_the_table_covers_the_promised_architectures_and_head_dims():
    assert {"sm_80", "sm_90", "sm_100", "gfx942"} <= set(TABLE) and set(TABLE) == set(MATRIX_INSTRUCTION)
    assert all(set(TABLE[arch]) == {64, 128} for arch in TABLE)
    assert {config.kernel for config in configurations(TABLE)} == {*ATTENTION_KERNELS, "statistics", "gradient"}


@pytest.mark.parametrize("arch", [pytest.param(arch, marks=[pytest.mark.thorough] * (arch != ONE)) for arch in TABLE])
def test_shipped_configurations_have_no_findings(arch):
    """No spill, no serialised product, loads a tile ahead in both loops, vectors of 16 bytes, no fused product of a
    masked score; the command says so in words and in JSON.
    """
    code, printed, rows = inspected(arch)
    assert max(map(len, printed.partition("no findings")[0].splitlines())) <= 100
    assert code == 0 and len(rows) == len(configurations([arch])) == 8
    assert all(word in printed for word in ("grad_key", MATRIX_INSTRUCTION[arch], "registers", "no findings", "ncu "))
    for row in rows:
        limits, loops = inspect.LIMITS[arch], row["loops"]
        assert row["findings"] == [] and row["stack"] == row["spill_instructions"] == 0
        assert row["shared_memory"] <= limits.shared_memory - limits.reserved
        assert row["programs"] >= 1 and row["programs"] * row["warps"] <= limits.max_warps
        if row["configuration"]["tile"]:
            assert row["matrix_instruction"].startswith(MATRIX_INSTRUCTION[arch]) and len(loops) == 2
            assert all(loop["mix"]["matrix"] > 0 and loop["mix"]["special"] > 0 for loop in loops)
            assert arch == "gfx942" or all(loop["prefetch"] >= 1 for loop in loops)


def test_exponentials_in_the_loop_are_one_per_pair():
    """Counted by hand: 128×64 pairs over 256 threads are 32 exponentials each."""
    row = row_of("sm_90", "grad_query", 128)
    tile = row["configuration"]["tile"]
    assert (tile["block_q"], tile["block_k"], tile["warps"]) == (128, 64, 8)
    assert row["loops"][0]["mix"]["special"] == 32


def test_tensor_descriptors_are_compiled_to_bulk_copies():
    tile = TABLE["sm_90"][128][0]
    assert tile.tma
    assert "cp.async.bulk.tensor" in compile_kernel(Configuration("forward", "sm_90", 128, tile)).asm["ptx"]


@pytest.mark.thorough
def test_fp32_tiles_do_not_spill_either():
    widest = [Configuration(kernel, "sm_80", 128, tile, "fp32") for kernel, tile in zip(ATTENTION_KERNELS, FP32)]
    assert [judged(config).code.stack for config in widest] == [0, 0, 0]


def test_the_critic_sees_spills_and_serialised_products_and_loads_that_do_not_run_ahead():
    # accumulators need more than the 255 registers a thread has
    spilling = judged(Configuration("grad_key", "sm_80", 128, Tile(64, 64, 4, 3)))
    assert spilling.code.stack > 0 and "spill" in " ".join(spilling.findings)
    said = " ".join(judged(Configuration("forward", "sm_90", 128, Tile(128, 128, 8, 2))).findings)
    assert "C7515" in said and "the full loop waits for the tile it has just requested" in said


def test_two_reports_are_compared_kernel_by_kernel(tmp_path, capsys):
    rows = [json.loads(json.dumps(row)) for row in inspected(ONE)[2]]
    before, after = tmp_path / "before.json", tmp_path / "after.json"
    before.write_text(json.dumps(rows))
    was, rows[0]["registers"] = rows[0]["registers"], 7
    after.write_text(json.dumps(rows[:-1]))
    assert inspect.main(["--diff", str(before), str(after)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"{ONE} forward 64: registers {was} → 7",
        f"{ONE} gradient: only in {before}",
    ]


def test_machine_code_is_printed_under_the_source_line_it_comes_from(capsys):
    assert inspect.main(["--sass", "forward", "--arch", ONE]) == 0
    printed = capsys.readouterr().out
    line = "scores = scores * scale + tl.where(visible, 0.0, MASKED)"
    assert "edge loop" in printed and "HGMMA" in printed and line in printed


def test_unknown_names_are_refused_with_the_known_ones(capsys):
    assert inspect.main(["--arch", "sm_70"]) == 2
    assert "unknown architecture 'sm_70': choose from sm_80" in capsys.readouterr().err
    assert inspect.main(["--sass", "backward", "--arch", "sm_80"]) == 2
    assert "choose one of forward, grad_query" in capsys.readouterr().err


def test_the_interpreter_is_not_a_compiler(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(RuntimeError, match="unset it"):
        inspect.inspect(configurations([ONE]))


LISTING = """
.L_x_0:
        /*0010*/   LDGSTS.E.BYPASS.128 [R4], desc[UR6][R2.64] ;
        /*0020*/   HMMA.16816.F32.BF16 R8, R4, R2, R8 ;
        /*0030*/   MUFU.EX2 R5, R5 ;
        /*0040*/   FFMA R6, R5, R4, R3 ;
        /*0050*/   IADD3 R2, R2, 0x1, RZ ;
        /*0060*/   @!P0 BRA `(.L_x_0) ;
.L_x_1:
        /*0070*/   HMMA.16816.F32.BF16 R8, R4, R2, R8 ;
        /*0080*/   MUFU.EX2 R5, R5 ;
        /*0090*/   ISETP.GE.AND P1, PT, R2, R3, PT ;
        /*00a0*/   SEL R5, R5, RZ, P1 ;
        /*00b0*/   LDL R7, [R1] ;
        /*00c0*/   FFMA R6, R5, R4, R3 ;
        /*00d0*/   @P0 BRA `(.L_x_1) ;
.L_x_2:
        /*00e0*/   BRA `(.L_x_2) ;
"""


def test_a_listing_is_read_as_a_person_reads_it():
    stream = assembly.nvidia_stream(LISTING)
    full, edge = assembly.inner_loops(stream, assembly.NVIDIA, "BRA")
    first = [item.mnemonic for item in full][:2]
    assert first == ["LDGSTS.E.BYPASS.128", "HMMA.16816.F32.BF16"], "the unmasked loop is the shorter one"
    assert assembly.mix(full, assembly.NVIDIA) == dict.fromkeys(assembly.CLASSES, 1)
    assert assembly.count(stream, "LDL|STL") == 1
    assert (assembly.load_widths(full), assembly.load_widths(edge)) == ({"16": 1}, {})


def test_a_fused_product_of_a_masked_score_is_found_with_its_line():
    listing = """
        //## File "kernel.py", line 70
        /*0010*/   FSEL R5, R5, -1.0e+30, P1 ;
        /*0020*/   FSEL R7, R7, RZ, P1 ;
        //## File "kernel.py", line 71
        /*0030*/   FFMA R9, R7, R4, R3 ;
        //## File "kernel.py", line 72
        /*0040*/   FFMA R6, R5, R4, -R3 ;
        /*0050*/   FADD R5, R5, R2 ;
        /*0060*/   FFMA R6, R5, R4, -R3 ;
"""
    body = [item for item in assembly.nvidia_stream(listing) if not isinstance(item, str)]
    assert assembly.fused_masked(body) == [72]
