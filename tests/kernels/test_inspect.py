"""Every shipped kernel configuration, compiled for GPUs that are not here: it fits, it does not spill, it uses the tensor cores."""

import json
from dataclasses import asdict

import pytest

from dccot.kernels import assembly, inspect
from dccot.kernels.gpus import of_architecture
from dccot.kernels.inspect import Configuration, configurations
from dccot.kernels.tuning import ATTENTION_KERNELS, FP32, TABLE

MATRIX_INSTRUCTION = {"sm_80": "mma.sync", "sm_86": "mma.sync", "sm_90": "wgmma.mma_async", "sm_100": "tcgen05.mma", "gfx942": "v_mfma"}
SHIPPED = configurations(TABLE)


@pytest.fixture(scope="module")
def reports():
    return dict(zip(map(str, SHIPPED), inspect.inspect(SHIPPED), strict=True))


def test_the_table_covers_the_promised_architectures_and_head_dims():
    promised = {"sm_80", "sm_90", "sm_100", "gfx942"}
    assert promised <= set(TABLE) and all(set(TABLE[arch]) == {64, 128} for arch in TABLE)
    kernels = {config.kernel for config in SHIPPED}
    assert kernels == {"forward", "grad_query", "grad_key", "statistics", "gradient"}


@pytest.mark.parametrize("config", map(str, SHIPPED))
def test_shipped_configuration(config, reports):
    report = reports[config]
    machine = of_architecture(report.configuration.arch)
    assert report.stack == 0 and report.spill_instructions == 0, "it spills"
    assert report.shared_memory <= machine.shared_memory_per_program
    assert report.programs >= 1 and report.warps <= machine.max_warps
    if report.configuration.tile:
        assert report.matrix_instruction.startswith(MATRIX_INSTRUCTION[report.configuration.arch])
        assert report.loop["matrix"] > 0 and report.loop["special"] > 0
    assert report.bound in report.cycles


def test_exponentials_in_the_loop_are_one_per_pair(reports):
    """Counted by hand: 128×64 pairs over 256 threads are 32 exponentials each."""
    report = reports["sm_90 grad_query head_dim 128 128×64"]
    assert report.loop["special"] == 32


def test_the_json_of_a_report_has_everything_a_program_needs(reports):
    row = json.loads(json.dumps(asdict(next(iter(reports.values())))))
    assert {"registers", "stack", "shared_memory", "warps", "occupancy", "matrix_instruction", "loop", "cycles", "bound"} <= set(row)


def test_fp32_tiles_do_not_spill_either():
    widest = [Configuration(kernel, "sm_80", 128, tile, "fp32") for kernel, tile in zip(ATTENTION_KERNELS, FP32, strict=True)]
    assert [report.stack for report in inspect.inspect(widest)] == [0, 0, 0]


def test_an_oversized_tile_is_seen_to_spill():
    """The check can fail: accumulators of this tile need more than the 255 registers a thread has."""
    oversized = Configuration("grad_key", "sm_80", 128, inspect.Tile(64, 64, 4, 3))
    report = inspect.inspect_one(oversized)
    assert report.stack > 0 and report.spill_instructions > 0


def test_the_command_prints_a_table_and_writes_json(tmp_path, capsys):
    file = tmp_path / "inspect.json"
    assert inspect.main(["--arch", "sm_80", "--json", str(file)]) == 0
    assert len(json.loads(file.read_text())) == len(configurations(["sm_80"]))
    printed = capsys.readouterr().out
    assert "grad_key" in printed and "mma.sync" in printed and "registers" in printed


def test_an_unknown_architecture_is_named_with_the_known_ones(capsys):
    assert inspect.main(["--arch", "sm_70"]) == 2
    assert "unknown architecture 'sm_70': choose from sm_80" in capsys.readouterr().err


def test_the_interpreter_is_no_compiler(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(RuntimeError, match="unset it"):
        inspect.inspect(SHIPPED[:1])


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
    loop = assembly.inner_loop(stream, assembly.NVIDIA, "BRA")
    assert [item.mnemonic for item in loop][:2] == ["LDGSTS.E.BYPASS.128", "HMMA.16816.F32.BF16"], "the unmasked loop is the shorter one"
    assert assembly.mix(loop, assembly.NVIDIA) == {"matrix": 1, "special": 1, "memory": 1, "integer": 1, "float": 1, "other": 1}
    assert assembly.spill_count(stream, "LDL|STL") == 1
