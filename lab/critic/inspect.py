"""The critic: compiles every kernel for GPUs that are not present, reads the machine code, lists problems, and predicts
the speed.

    dccot inspect                                     # the whole table: sm_80, sm_90, sm_100, gfx942
    dccot inspect --arch sm_90 --tree shared-7x200 --json inspect.json --roofline roofline.png
    dccot inspect --sweep --arch sm_90                # tile sizes, warps and stages, ranked by the prediction
    dccot inspect --sass forward --arch sm_90         # machine code of the inner loops next to its source lines
    dccot inspect --diff HEAD~1 HEAD                  # two commits (or two JSON files), kernel by kernel

Per kernel: registers, spills, shared memory, resident warps, matrix instructions, the instruction mix of the loop over
unmasked tiles, how many iterations loads run ahead, the cost of a masked tile, what bounds the loop (predict.py) and
TFLOP/s on the visible pairs of a tree.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from multiprocessing import get_context
from pathlib import Path

from torch import Tensor

from dccot.core.files import write_atomic
from dccot.kernels.gpus import GPUS, Gpu, of_architecture
from dccot.kernels.tuning import TABLE, Tile
from dccot.lab.critic import trees
from dccot.lab.critic.assembly import Partition
from dccot.lab.critic.compiling import Configuration, Examined, configurations, examine
from dccot.lab.critic.predict import Prediction, backward_tflops, cycles, predict

DEFAULT_ARCHITECTURES = ("sm_80", "sm_90", "sm_100", "gfx942")
TENSOR_MEMORY_COLUMNS = 512  # of a Blackwell multiprocessor


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
    loop: dict[str, int]  # instructions of the inner loop over unmasked tiles, by class
    edge_loop: dict[str, int] | None
    load_bytes: dict[str, int]
    prefetch: list[int | None]  # per inner loop
    cycles: dict[str, float]  # estimated, per iteration of the inner loop
    bound: str
    findings: list[str]
    prediction: Prediction | None = None
    partitions: list[list[Partition]] = field(default_factory=list)  # of each warp-specialised loop

    @property
    def tile(self) -> Tile:
        """Of an attention kernel; the LM head's have none."""
        assert self.configuration.tile is not None
        return self.configuration.tile


@dataclass(frozen=True)
class Workload:
    """The workload that predictions are for."""

    tree: str = "paper"
    tokens: int = 16_384
    heads: int = 12
    key_heads: int = 2

    def visible_until(self) -> Tensor:
        return trees.tree(self.tree, self.tokens)


def inspect(configs: Sequence[Configuration], workload: Workload | None = None) -> list[Report]:
    """Compiles on all cores; earlier results come from Triton's cache."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise RuntimeError(
            "TRITON_INTERPRET=1 replaces the compiler by an interpreter: unset it to inspect compiled kernels"
        )
    with ProcessPoolExecutor(min(len(configs), os.cpu_count() or 1), mp_context=get_context("spawn")) as pool:
        examined = list(pool.map(examine, configs))
    visible_until = workload.visible_until() if workload else None
    return [
        report(config, each, visible_until, workload or Workload())
        for config, each in zip(configs, examined, strict=True)
    ]


def report(config: Configuration, examined: Examined, visible_until: Tensor | None, workload: Workload) -> Report:
    code, gpu = examined.code, of_architecture(config.arch)
    programs = resident(gpu, examined)
    # The model adds up what one group of warps does: it does not apply to partitions that run side by side.
    estimated = {} if code.partitions else cycles(config, gpu, code.loop, programs, bool(code.advisories))
    prediction = None
    if visible_until is not None and config.tile and programs and not code.partitions:
        prediction = predict(config, examined, programs, gpu, visible_until, workload.heads, workload.key_heads)
    return Report(
        config, code.registers, code.stack, code.spill_instructions, examined.shared_memory, programs, programs * examined.warps,
        programs * examined.warps / gpu.max_warps, code.matrix_instruction, code.loop.mix, code.edge.mix if code.edge else None,
        code.loop.load_bytes, [loop.prefetch for loop in (code.loop, code.edge) if loop], estimated,
        max(estimated, key=lambda name: estimated[name], default=""), criticise(config, examined, programs), prediction, code.partitions,
    )  # fmt: skip


def criticise(config: Configuration, examined: Examined, programs: int) -> list[str]:
    """The problems found, one sentence each."""
    code, nvidia = examined.code, not config.arch.startswith("gfx")
    found = [f"ptxas {advisory}" for advisory in code.advisories]
    if code.stack or code.spill_instructions:
        found.append(
            f"{code.stack} bytes of registers spill ({code.spill_instructions} instructions): use smaller tiles or more warps"
        )
    if not programs:
        found.append(
            f"no multiprocessor has room for it ({examined.shared_memory / 1024:.0f} KB of shared memory): use fewer stages"
        )
    if config.tile and config.tile.warp_specialize and not code.partitions:
        found.append("warp_specialize is set, but the compiler made no partitions of it")
    for name, loop in (("full", code.loop), ("edge", code.edge)):
        if loop is None or not nvidia:
            continue
        if config.tile and loop.prefetch == 0:
            found.append(f"the {name} loop waits for the tile it has just requested: add a stage")
        if not {"16", "32", "tile"} & set(loop.load_bytes) and not code.partitions:  # there, other warps load
            found.append(
                f"the {name} loop loads no vectors of 16 bytes ({loop.load_bytes}): something is not known to be a multiple of 16"
            )
        found += [
            f"line {line}: a fused multiply-add takes a masked score, which may overflow" for line in loop.fused_masked
        ]
    return found


def resident(gpu: Gpu, examined: Examined) -> int:
    """Programs that fit on a multiprocessor at once."""
    warps = examined.warps
    granted = -(examined.code.registers // -8) * 8 * gpu.threads_per_warp * warps
    reserved = 1024 if gpu.threads_per_warp == 32 else 0
    limits = [
        gpu.max_warps // warps,
        gpu.registers // granted,
        gpu.shared_memory // max(examined.shared_memory + reserved, 1),
    ]
    if examined.tensor_memory:
        limits.append(TENSOR_MEMORY_COLUMNS // examined.tensor_memory)
    return min(limits)


def table(reports: Sequence[Report]) -> str:
    """Human-readable; the JSON has everything."""
    from rich.console import Console
    from rich.table import Table

    columns = "arch kernel D tile warps stages registers spills shared resident ahead matrix mix edge bound TFLOP/s"
    grid = Table(*columns.split())
    for each in reports:
        config, tile, prediction = each.configuration, each.configuration.tile, each.prediction
        size = ("", "", "", "")
        if tile:
            stages = f"{tile.stages}{' TMA' * tile.tma}{' WS' * tile.warp_specialize}"
            size = str(config.head_dim), f"{tile.block_q}×{tile.block_k}", str(tile.warps), stages
        mix = " ".join(f"{name} {count / sum(each.loop.values()):.0%}" for name, count in each.loop.items() if count)
        grid.add_row(
            config.arch, config.kernel, *size, str(each.registers), str(each.spill_instructions), f"{each.shared_memory / 1024:.0f} KB",
            f"{each.warps} warps, {each.occupancy:.0%}", "/".join("–" if p is None else str(p) for p in each.prefetch),
            each.matrix_instruction or "", mix, f"{prediction.edge_cost:.2f}×" if prediction else "", each.bound,
            f"{prediction.tflops:.0f}" if prediction else "",
        )  # fmt: skip
    console = Console(width=220)
    with console.capture() as captured:
        console.print(grid)
    return captured.get()


def describe(partitions: Sequence[Sequence[Partition]]) -> list[str]:
    """One line per warp-specialised loop."""
    said = lambda loop: ", ".join(f"{each.work}: {each.warps} × {each.registers}" for each in loop)
    return [
        f"loop {number} has {len(loop)} partitions (warps × registers): {said(loop)}"
        for number, loop in enumerate(partitions, 1)
    ]


def summary(reports: Sequence[Report], workload: Workload) -> str:
    """Findings, and forward and backward per architecture and head dim."""
    lines = [f"{each.configuration}: {finding}" for each in reports for finding in each.findings] or [
        "nothing to object to"
    ]
    lines += [f"{each.configuration}: {line}" for each in reports for line in describe(each.partitions)]
    lines.append(
        f"predicted, not measured: {workload.tree} tree, {workload.heads}/{workload.key_heads} heads, TFLOP/s on visible pairs"
    )
    groups: dict[tuple[str, int], dict[str, Prediction]] = {}
    for each in reports:
        if each.prediction:
            groups.setdefault((each.configuration.arch, each.configuration.head_dim), {})[each.configuration.kernel] = (
                each.prediction
            )
    for (arch, head_dim), kernels in groups.items():
        if {"forward", "grad_query", "grad_key"} <= set(kernels):
            name = next(name for name, gpu in GPUS.items() if gpu.arch == arch)
            forward = kernels["forward"]
            lines.append(
                f"  {name} ({arch}), head dim {head_dim}: forward {forward.tflops:.0f}, backward {backward_tflops(kernels):.0f}; "
                f"useful work {min(each.useful for each in kernels.values()):.2f}, busy {min(each.busy for each in kernels.values()):.2f}"
            )
    return "\n".join(lines)


def profile_commands() -> str:
    """Commands for anyone with the GPU."""
    return (
        "measure on a GPU:\n"
        "  ncu --set full --import-source on -k 'regex:(forward|grad_query|grad_key)_kernel' -o tree_attention dccot bench attention\n"
        "  dccot bench attention --profile && proton-viewer -m time/ms runs/bench/attention.trace.proton.hatchet"
    )


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="dccot inspect", description="Compile every kernel without a GPU; say what is wrong, and predict its speed.",
        epilog="example: dccot inspect --arch sm_90,gfx942 --json inspect.json",
    )  # fmt: skip
    top.add_argument("--arch", default=",".join(DEFAULT_ARCHITECTURES), help=f"comma-separated, of {', '.join(TABLE)}")
    top.add_argument(
        "--tree", default="paper", help="paper, one, shared-7x200, packs, causal, or the path of a rollout JSONL"
    )
    top.add_argument("--tokens", type=int, default=16_384)
    top.add_argument("--heads", type=int, default=12, help="query heads")
    top.add_argument("--key-heads", type=int, default=2)
    top.add_argument(
        "--json", type=Path, metavar="FILE", help="write everything found as JSON; with --sweep, the tiles to ship"
    )
    top.add_argument("--roofline", type=Path, metavar="FILE", help="draw the predictions below their ceilings (PNG)")
    top.add_argument("--sweep", action="store_true", help="compile other tile sizes, warps and stages, and rank them")
    top.add_argument(
        "--sass", metavar="KERNEL", help="print the inner loops of a kernel as machine code with source lines"
    )
    top.add_argument(
        "--diff", nargs=2, metavar=("A", "B"), help="compare two commits, or two files written with --json"
    )
    return top


def main(argv: list[str] | None = None) -> int:
    arguments = parser().parse_args(argv)
    workload = Workload(arguments.tree, arguments.tokens, arguments.heads, arguments.key_heads)
    try:
        if arguments.diff or arguments.sass or arguments.sweep:
            from dccot.lab.critic import inspect_tools as tools

            archs = arguments.arch.split(",")
            if arguments.diff:
                before, after = arguments.diff
                print(tools.diff(before, after, arguments.arch))
            else:
                print(
                    tools.sass(arguments.sass, archs[0])
                    if arguments.sass
                    else tools.sweep(archs, workload, arguments.json)
                )
            return 0
        reports = inspect(configurations(arguments.arch.split(",")), workload)
    except (ValueError, RuntimeError) as error:
        print(f"dccot inspect: {error}", file=sys.stderr)
        return 2
    print(table(reports), summary(reports, workload), profile_commands(), sep="\n")
    if arguments.json:
        write_atomic(arguments.json, json.dumps([asdict(each) for each in reports], indent=1) + "\n")
    if arguments.roofline:
        from dccot.lab.critic.inspect_tools import roofline

        roofline(reports, arguments.roofline)
    return 1 if any(each.findings for each in reports) else 0


if __name__ == "__main__":
    sys.exit(main())
