"""Every shipped kernel configuration, compiled for GPUs that are not here: the critic has nothing to object to, and can
object.
"""

import json
from dataclasses import asdict, fields, replace
from pathlib import Path

import pytest

from dccot.kernels.gpus import GPUS, of_architecture
from dccot.kernels.tuning import ATTENTION_KERNELS, FP32, TABLE, Tile
from dccot.lab.critic import assembly, inspect, inspect_tools, predict
from dccot.lab.critic.compiling import Configuration, compile_kernel, configurations
from dccot.lab.critic.inspect import Workload

MATRIX_INSTRUCTION = {
    "sm_80": "mma.sync",
    "sm_86": "mma.sync",
    "sm_90": "wgmma.mma_async",
    "sm_100": "tcgen05.mma",
    "gfx942": "v_mfma",
}
SHIPPED = configurations(TABLE)


@pytest.fixture(scope="module")
def reports():
    return dict(zip(map(str, SHIPPED), inspect.inspect(SHIPPED, Workload()), strict=True))


def test_the_table_covers_the_promised_architectures_and_head_dims():
    promised = {"sm_80", "sm_90", "sm_100", "gfx942"}
    assert promised <= set(TABLE) and all(set(TABLE[arch]) == {64, 128} for arch in TABLE)
    kernels = {config.kernel for config in SHIPPED}
    assert kernels == {"forward", "grad_query", "grad_key", "statistics", "gradient"}


@pytest.mark.parametrize("config", map(str, SHIPPED))
def test_shipped_configuration(config, reports):
    """No spill, no serialised product, loads a tile ahead in both loops, vectors of 16 bytes, no fused product of a
    masked score.
    """
    report = reports[config]
    gpu = of_architecture(report.configuration.arch)
    assert report.findings == []
    assert report.stack == 0 and report.spill_instructions == 0
    assert report.shared_memory <= gpu.shared_memory_per_program
    assert report.programs >= 1 and report.warps <= gpu.max_warps
    if report.configuration.tile:
        assert report.matrix_instruction.startswith(MATRIX_INSTRUCTION[report.configuration.arch])
        assert report.loop["matrix"] > 0 and report.loop["special"] > 0
        assert report.configuration.arch == "gfx942" or (
            all(distance >= 1 for distance in report.prefetch) and len(report.prefetch) == 2
        )
        assert report.prediction.useful >= 0.85
    assert report.bound in report.cycles


def test_exponentials_in_the_loop_are_one_per_pair(reports):
    """Counted by hand: 128×64 pairs over 256 threads are 32 exponentials each."""
    assert reports["sm_90 grad_query head_dim 128 128×64"].loop["special"] == 32


def test_cycles_of_matrix_products_are_flops_over_rate(reports):
    """Two products of 128×32×128 are 2,097,152 flops; a multiprocessor of an H100 does 4,096 per cycle."""
    assert reports["sm_90 forward head_dim 128 128×32"].cycles["matrix"] == 512


def test_cycles_of_shared_memory_are_bytes_over_its_bandwidth(reports):
    """dK/dV, 64×128, two warp groups, 128 bytes per cycle. Each group reads 16 times 64 and 8 times 128 columns of 32
    bytes, and 16 left operands of 64 × 32 bytes; each of 8 warps reads 4,992 bytes (16 LDS.64, 7 LDS) and writes 4,352
    (8 LDGSTS.128, 2 LDGSTS)."""
    products = 2 * (32 * (16 * 64 + 8 * 128) + 16 * 64 * 32)
    assert reports["sm_90 grad_key head_dim 128 64×128"].cycles["shared"] == (products + 8 * (4992 + 4352)) / 128


def test_bytes_of_shared_memory_are_read_from_the_machine_code():
    moves = [
        "LDSM.16.M88.4",
        "LDSM.16.MT88.2",
        "STSM.16.M88",
        "LDS.U.128",
        "STS.64",
        "LDS",
        "LDGSTS.E.BYPASS.128",
        "LDG.E.128",
        "STG.E",
    ]
    assert (
        assembly.shared_bytes([assembly.Instruction(name, "") for name in moves])
        == 512 + 256 + 128 + 512 + 256 + 128 + 512
    )
    waves = ["ds_read_b128", "ds_read2st64_b64", "ds_write_b32", "ds_bpermute_b32", "global_load_dwordx4"]
    assert assembly.amd_shared_bytes([assembly.Instruction(name, "") for name in waves]) == 1024 + 1024 + 256
    products = [("HGMMA.64x128x16.F32.BF16", "R24, gdesc[UR16], RZ"), ("HGMMA.64x64x16.F32.BF16", "R88, R160, gdesc[UR20].tnspB, R88"),
                ("UTCHMMA", "gdesc[UR40], gdesc[UR24], tmem[UR11]"), ("UTCHMMA", "tmem[UR26], gdesc[UR30], tmem[UR8]")]  # fmt: skip
    assert assembly.shared_left([assembly.Instruction(*each) for each in products]) == 2


def test_the_prediction_meets_what_others_published_for_such_a_kernel():
    """Triton's own tutorial without warp specialisation, causal, 16K, head dim 128: 378 to 487 TFLOP/s on an H100, 427
    to 746 on a B200.
    """
    configs = [
        config
        for config in configurations(["sm_90", "sm_100"])
        if config.kernel == "forward" and config.head_dim == 128
    ]
    found = inspect.inspect(configs, Workload("causal", 16_384, 16, 16))
    for report, (low, high) in zip(found, ((378, 487), (427, 746)), strict=True):
        assert 0.9 * low <= report.prediction.tflops <= 1.15 * high


def test_an_h100_is_predicted_to_reach_its_targets_on_the_papers_trees(reports):
    found = {kernel: reports[f"sm_90 {kernel} head_dim 128 {size}"].prediction
             for kernel, size in (("forward", "128×32"), ("grad_query", "128×64"), ("grad_key", "64×128"))}  # fmt: skip
    assert found["forward"].tflops >= 400 and predict.backward_tflops(found) >= 260


def test_the_json_of_a_report_has_everything_a_program_needs(reports):
    row = json.loads(json.dumps(asdict(next(iter(reports.values())))))
    assert {
        "registers",
        "stack",
        "shared_memory",
        "occupancy",
        "loop",
        "edge_loop",
        "prefetch",
        "cycles",
        "bound",
        "findings",
    } <= set(row)


def test_fp32_tiles_do_not_spill_either():
    widest = [
        Configuration(kernel, "sm_80", 128, tile, "fp32") for kernel, tile in zip(ATTENTION_KERNELS, FP32, strict=True)
    ]
    assert [report.stack for report in inspect.inspect(widest)] == [0, 0, 0]


def test_the_critic_sees_spills_and_serialised_products_and_loads_that_do_not_run_ahead():
    # accumulators need more than the 255 registers a thread has
    oversized = Configuration("grad_key", "sm_80", 128, Tile(64, 64, 4, 3))
    two_stages = Configuration("forward", "sm_90", 128, Tile(128, 128, 8, 2))
    spilling, serialised = inspect.inspect([oversized, two_stages])
    assert spilling.stack > 0 and "spill" in " ".join(spilling.findings)
    said = " ".join(serialised.findings)
    assert "C7515" in said and "the full loop waits for the tile it has just requested" in said


def test_the_shipped_table_is_what_the_sweep_chose(reports):
    """The record of `dccot inspect --sweep --json`. When a kernel or the prediction changes, its figures do: sweep
    again.
    """
    rows = [json.loads(line) for line in Path(__file__).with_name("sweep.jsonl").read_text().splitlines()]
    chosen = {
        (row["arch"], row["head_dim"], row["kernel"]): Tile(**{each.name: row[each.name] for each in fields(Tile)})
        for row in rows
    }
    assert chosen == {
        (arch, dim, kernel): tile
        for arch in TABLE
        for dim in TABLE[arch]
        for kernel, tile in zip(ATTENTION_KERNELS, TABLE[arch][dim])
    }
    for row in rows:
        report = reports[
            str(
                Configuration(
                    row["kernel"], row["arch"], row["head_dim"], chosen[row["arch"], row["head_dim"], row["kernel"]]
                )
            )
        ]
        assert report.prediction.tflops == pytest.approx(row["tflops"], abs=0.06), row


def test_the_sweep_takes_the_largest_tile_within_two_percent_and_none_that_is_ruled_out():
    shipped = TABLE["sm_90"][128][0]
    others = [replace(shipped, tma=False), replace(shipped, warps=8), replace(shipped, block_q=64, block_k=64)]
    assert {shipped, *others} <= set(inspect_tools.candidates("forward", "sm_90", 128))
    ranked = inspect_tools.rank("forward", "sm_90", 128, [*others, shipped, replace(shipped, stages=2)], Workload())
    assert inspect_tools.choose(ranked).tile == shipped and ranked[-1].findings and ranked[-1].tile.stages == 2
    slower = replace(ranked[0].prediction, tflops=0.985 * ranked[0].prediction.tflops)
    larger = replace(
        ranked[0], configuration=replace(ranked[0].configuration, tile=replace(shipped, block_k=64)), prediction=slower
    )
    assert inspect_tools.choose([*ranked, larger]) is larger
    assert inspect_tools.choose([*ranked, replace(larger, findings=["spills"])]).tile == shipped


def test_the_command_prints_a_table_and_writes_json_and_a_picture(tmp_path, capsys):
    file = tmp_path / "inspect.json"
    assert inspect.main(["--arch", "sm_80", "--json", str(file), "--roofline", str(tmp_path / "roofline.png")]) == 0
    assert len(json.loads(file.read_text())) == len(configurations(["sm_80"]))
    printed = capsys.readouterr().out
    assert all(
        word in printed
        for word in ("grad_key", "mma.sync", "registers", "predicted, not measured", "nothing to object to", "ncu ")
    )
    assert (tmp_path / "roofline.png").read_bytes().startswith(b"\x89PNG")


def test_two_reports_are_compared_kernel_by_kernel(tmp_path, reports, capsys):
    rows = [asdict(report) for report in reports.values() if report.configuration.arch == "sm_80"]
    before, after = tmp_path / "before.json", tmp_path / "after.json"
    before.write_text(json.dumps(rows))
    rows[0]["registers"] = 7
    after.write_text(json.dumps(rows[:-1]))
    assert inspect.main(["--diff", str(before), str(after)]) == 0
    lines = capsys.readouterr().out.splitlines()
    was = reports[str(SHIPPED[0])].registers
    assert lines == [f"sm_80 forward 64: registers {was} → 7", f"sm_80 gradient: only in {before}"]


def test_machine_code_stands_under_the_source_line_it_comes_from(capsys):
    assert inspect.main(["--sass", "forward", "--arch", "sm_80"]) == 0
    printed = capsys.readouterr().out
    assert (
        "edge loop" in printed
        and "HMMA" in printed
        and "scores = scores * scale + tl.where(visible, 0.0, MASKED)" in printed
    )


def test_unknown_names_are_refused_with_the_known_ones(capsys):
    assert inspect.main(["--arch", "sm_70"]) == 2
    assert "unknown architecture 'sm_70': choose from sm_80" in capsys.readouterr().err
    assert inspect.main(["--sass", "backward", "--arch", "sm_80"]) == 2
    assert "choose one of forward, grad_query" in capsys.readouterr().err


def test_the_interpreter_is_no_compiler(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(RuntimeError, match="unset it"):
        inspect.inspect(SHIPPED[:1])


def test_clocks_follow_from_peaks():
    """Vendors state an H100's peak for 1.83 GHz and an A100's for 1.41 GHz."""
    assert [round(GPUS[name].clock / 1e9, 2) for name in ("A100", "H100")] == [1.41, 1.83]


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
    assert [item.mnemonic for item in full][:2] == ["LDGSTS.E.BYPASS.128", "HMMA.16816.F32.BF16"], (
        "the unmasked loop is the shorter one"
    )
    assert assembly.mix(full, assembly.NVIDIA) == {
        "matrix": 1,
        "special": 1,
        "memory": 1,
        "integer": 1,
        "float": 1,
        "other": 1,
    }
    assert assembly.spill_count(stream, "LDL|STL") == 1
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


def test_instructions_between_a_product_and_its_wait_run_beside_it():
    listing = """
        /*0010*/   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR16], R24, gsb0 ;
        /*0020*/   IADD3 R2, R2, 0x1, RZ ;
        /*0030*/   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
        /*0040*/   MUFU.EX2 R5, R5 ;
"""
    body = [item for item in assembly.nvidia_stream(listing) if not isinstance(item, str)]
    assert assembly.overlapped(body) == 1


def test_tensor_descriptors_are_compiled_to_bulk_copies():
    config = next(
        config for config in configurations(["sm_90"]) if config.kernel == "forward" and config.head_dim == 128
    )
    assert config.tile.tma and "cp.async.bulk.tensor" in compile_kernel(config).asm["ptx"]
