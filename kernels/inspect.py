"""Compiles every kernel for GPUs that are not here, and reads what the compiler made of it.

    dccot inspect                                     # the whole table: sm_80, sm_90, sm_100, gfx942
    dccot inspect --arch sm_90 --json inspect.json

Per kernel: registers, spills (stack frame, local loads and stores), shared memory, resident warps, the matrix instructions used, the
instruction mix of the inner loop over unmasked tiles, and what bounds that loop. The bound is an estimate: cycles a multiprocessor needs
per iteration for matrix products, for exponentials, for issuing all instructions and for memory (a tile from L2, logits from DRAM);
the largest wins.
Triton compiles without a GPU, and its package brings ptxas, cuobjdump and nvdisasm along.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path

from dccot.kernels import assembly
from dccot.kernels.gpus import Gpu, of_architecture
from dccot.kernels.tuning import ATTENTION_KERNELS, STRETCH, STRETCH_WARPS, TABLE, Tile

DEFAULT_ARCHITECTURES = ("sm_80", "sm_90", "sm_100", "gfx942")
GROUP = 6  # query heads per key head; it does not change what is compiled but for two divisions


TENSOR_MEMORY_COLUMNS = 512  # of a Blackwell multiprocessor


@dataclass(frozen=True)
class Configuration:
    kernel: str
    arch: str
    head_dim: int = 0  # 0: the LM head's kernels have none
    tile: Tile | None = None
    dtype: str = "bf16"

    def __str__(self) -> str:
        if self.tile is None:
            return f"{self.arch} {self.kernel}"
        return f"{self.arch} {self.kernel} head_dim {self.head_dim} {self.tile.block_q}×{self.tile.block_k}"


@dataclass(frozen=True)
class Report:
    configuration: Configuration
    registers: int
    stack: int  # bytes of stack frame: anything here is a spill
    spill_instructions: int  # loads and stores of local (scratch) memory
    shared_memory: int
    programs: int  # resident per multiprocessor
    warps: int
    occupancy: float
    matrix_instruction: str | None
    loop: dict[str, int]  # instructions of the inner loop by class
    cycles: dict[str, float]  # estimated, per iteration of the inner loop
    bound: str


def configurations(archs: Iterable[str] = DEFAULT_ARCHITECTURES) -> list[Configuration]:
    """Everything that ships: the attention table for each architecture, and the two kernels of the LM head."""
    found = []
    for arch in archs:
        if arch not in TABLE:
            raise ValueError(f"unknown architecture {arch!r}: choose from {', '.join(TABLE)}")
        for head_dim, tiles in TABLE[arch].items():
            found += [Configuration(kernel, arch, head_dim, tile) for kernel, tile in zip(ATTENTION_KERNELS, tiles, strict=True)]
        found += [Configuration("statistics", arch), Configuration("gradient", arch)]
    return found


def inspect(configs: list[Configuration]) -> list[Report]:
    """Compiles on all cores; what was compiled before comes from Triton's cache."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise RuntimeError("TRITON_INTERPRET=1 replaces the compiler by an interpreter: unset it to inspect compiled kernels")
    with ProcessPoolExecutor(min(len(configs), os.cpu_count() or 1), mp_context=get_context("spawn")) as pool:
        return list(pool.map(inspect_one, configs))


def inspect_one(config: Configuration) -> Report:
    compiled = compile_kernel(config)
    code = assembly.read(compiled)
    machine = of_architecture(config.arch)
    warps = config.tile.warps if config.tile else STRETCH_WARPS
    programs = _resident(machine, warps, code.registers, compiled.metadata.shared, getattr(compiled.metadata, "tmem_size", 0) or 0)
    cycles = _cycles(config, machine, warps, code.loop)
    return Report(
        config, code.registers, code.stack, code.spill_instructions, compiled.metadata.shared, programs, programs * warps,
        programs * warps / machine.max_warps, code.matrix_instruction, code.loop, cycles, max(cycles, key=lambda name: cycles[name]),
    )  # fmt: skip


def compile_kernel(config: Configuration):
    import triton
    from triton.backends.compiler import GPUTarget

    from dccot.kernels import attention_triton, logprob_triton

    module = attention_triton if config.tile else logprob_triton
    kernel = getattr(module, f"{config.kernel}_kernel")
    signature = {name: _type(name, config.dtype) for name in kernel.arg_names}
    # What the launcher finds out about its arguments: tensors and their strides are multiples of 16, the rest may be anything.
    known = [p.name for p in kernel.params if not p.do_not_specialize]
    aligned = [name for name in known if signature[name][0] == "*" or name.endswith(("_n", "_h", "_stride"))]
    constants = {"BLOCK": STRETCH}
    if config.tile:
        sizes = {"D": config.head_dim, "BLOCK_Q": config.tile.block_q, "BLOCK_K": config.tile.block_k}
        constants = {"GROUP": GROUP, "HEADS": GROUP, "UPCAST": False} | sizes
    source = triton.compiler.ASTSource(
        kernel, signature,
        {name: value for name, value in constants.items() if name in signature},
        {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )  # fmt: skip
    target = GPUTarget("hip", config.arch, 64) if config.arch.startswith("gfx") else GPUTarget("cuda", int(config.arch[3:]), 32)
    options = {"num_warps": config.tile.warps, "num_stages": config.tile.stages} if config.tile else {"num_warps": STRETCH_WARPS}
    return triton.compile(source, target=target, options=options)


def _type(argument: str, dtype: str) -> str:
    """Triton's type of a kernel argument, by the naming rule of the kernels: UPPER tensors of numbers, lower integers."""
    if argument in ("Q", "K", "V", "OUT", "GRAD", "DQ", "DK", "DV"):
        return f"*{dtype}"
    if argument in ("LSE", "DELTA", "LOGITS", "STATISTICS", "ROW_VALUES"):
        return "*fp32"
    if argument in ("visible_until", "starts", "stops", "firsts", "middles", "lasts", "tile_start", "tile_stop"):
        return "*i32"
    if argument == "targets":
        return "*i64"
    if argument in ("scale", "inverse_temperature"):
        return "fp32"
    return "i32" if argument == "N" or argument.islower() or argument.endswith(("_n", "_h")) else "constexpr"


def _resident(machine: Gpu, warps: int, registers: int, shared_memory: int, tensor_memory: int) -> int:
    """Programs that fit on a multiprocessor at once."""
    granted = -(registers // -8) * 8 * machine.threads_per_warp * warps
    limits = [machine.max_warps // warps, machine.registers // granted, machine.shared_memory // (shared_memory + 1024)]
    if machine.threads_per_warp == 64:
        limits[2] = machine.shared_memory // max(shared_memory, 1)
    if tensor_memory:
        limits.append(TENSOR_MEMORY_COLUMNS // tensor_memory)
    return min(limits)


def _cycles(config: Configuration, machine: Gpu, warps: int, loop: dict[str, int]) -> dict[str, float]:
    """Estimated cycles of a multiprocessor per iteration of the inner loop, by what they are spent on."""
    lanes = warps * machine.threads_per_warp
    cycles = {
        "exponential": loop["special"] * lanes / machine.exponentials,
        "issue": sum(loop.values()) * warps / machine.issue,
    }
    if config.tile is None:
        return cycles | {"memory": 4 * STRETCH * (2 if config.kernel == "gradient" else 1) / machine.dram_bytes}
    products = {"forward": 2, "grad_query": 3, "grad_key": 4}[config.kernel]
    streamed = config.tile.block_q if config.kernel == "grad_key" else config.tile.block_k
    pairs = config.tile.block_q * config.tile.block_k
    return cycles | {
        "matrix": 2 * products * pairs * config.head_dim / machine.matrix_flops,
        "memory": 2 * 2 * streamed * config.head_dim / machine.l2_bytes,
    }


def table(reports: list[Report]) -> str:
    """For people; the JSON has everything."""
    from rich.console import Console
    from rich.table import Table

    columns = "arch kernel D tile warps stages registers spills shared resident matrix mix bound"
    grid = Table(*columns.split())
    for report in reports:
        config, tile = report.configuration, report.configuration.tile
        size = (str(config.head_dim), f"{tile.block_q}×{tile.block_k}", str(tile.warps), str(tile.stages)) if tile else ("", "", "", "")
        total = sum(report.loop.values())
        mix = " ".join(f"{name} {count / total:.0%}" for name, count in report.loop.items() if count)
        spills = f"{report.stack} B, {report.spill_instructions} instr." if report.stack or report.spill_instructions else "0"
        grid.add_row(
            config.arch, config.kernel, *size, str(report.registers), spills, f"{report.shared_memory / 1024:.0f} KB",
            f"{report.warps} warps, {report.occupancy:.0%}", report.matrix_instruction or "", mix, report.bound,
        )  # fmt: skip
    console = Console(width=200)
    with console.capture() as captured:
        console.print(grid)
    return captured.get()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="dccot inspect", description="Compile every kernel without a GPU; report registers, spills, occupancy, instruction mix.",
        epilog="example: dccot inspect --arch sm_90,gfx942 --json inspect.json",
    )  # fmt: skip
    parser.add_argument("--arch", default=",".join(DEFAULT_ARCHITECTURES), help=f"comma-separated, of {', '.join(TABLE)}")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything found as JSON")
    arguments = parser.parse_args(argv)
    try:
        reports = inspect(configurations(arguments.arch.split(",")))
    except (ValueError, RuntimeError) as error:
        print(f"dccot inspect: {error}", file=sys.stderr)
        return 2
    print(table(reports))
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(report) for report in reports], indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
