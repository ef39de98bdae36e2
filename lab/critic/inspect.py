"""The critic: compiles every kernel for GPUs that are not present, reads the machine code and lists problems.

    dccot inspect                                     # the whole table: sm_80, sm_90, sm_100, gfx942
    dccot inspect --arch sm_90 --json inspect.json
    dccot inspect --sass forward --arch sm_90         # machine code of the inner loops next to its source lines
    dccot inspect --diff HEAD~1 HEAD                  # two commits (or two JSON files), kernel by kernel
    dccot inspect --tune                              # on a GPU: time tiles and backends ahead of training

Per kernel: registers, spills, shared memory, resident warps, matrix instructions, the instructions of the loops over
unmasked and over masked tiles, and how many iterations loads run ahead. Facts of the code, nothing about its speed:
`dccot bench` measures that on a GPU.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import torch

from dccot.core.command import Parser, print_table
from dccot.core.files import cache_folder, write_atomic
from dccot.kernels import autotune
from dccot.kernels.mask import TreeMask
from dccot.kernels.tuning import TABLE, shape_of
from dccot.lab.bench import trees
from dccot.lab.bench.kernels import attention_inputs
from dccot.lab.critic import assembly
from dccot.lab.critic.assembly import Code
from dccot.lab.critic.compiling import Configuration, compile_kernel, configurations, examine
from dccot.model.config import parse_config
from dccot.plan import SHAPES

DEFAULT_ARCHITECTURES = ("sm_80", "sm_90", "sm_100", "gfx942")
TUNED_TOKENS = 16_384
MIX = assembly.CLASSES[:-1]  # the rest are others
TENSOR_MEMORY_COLUMNS = 512  # of a Blackwell multiprocessor
MEASURE = """measure on a GPU:
  ncu --set full --import-source on -k 'regex:(forward|grad_query|grad_key)_kernel' -o attention dccot bench attention
  dccot bench attention --profile && proton-viewer -m time/ms runs/bench/attention.trace.proton.hatchet"""


class Multiprocessor(NamedTuple):
    """Limits of a multiprocessor (AMD: compute unit)."""

    max_warps: int
    threads_per_warp: int
    registers: int  # 32-bit
    shared_memory: int  # bytes
    reserved: int  # bytes of it per program


LIMITS = {
    "sm_80": Multiprocessor(64, 32, 65536, 164 * 1024, 1024),
    "sm_86": Multiprocessor(48, 32, 65536, 100 * 1024, 1024),
    "sm_90": Multiprocessor(64, 32, 65536, 228 * 1024, 1024),
    "sm_100": Multiprocessor(64, 32, 65536, 228 * 1024, 1024),
    "gfx942": Multiprocessor(32, 64, 4 * 512 * 64, 64 * 1024, 0),
}


@dataclass(frozen=True)
class Report:
    configuration: Configuration
    code: Code
    programs: int  # resident per multiprocessor
    occupancy: float
    findings: list[str]

    def as_dict(self) -> dict[str, Any]:
        everything = asdict(self)
        return everything.pop("code") | everything


def inspect(configs: Sequence[Configuration]) -> list[Report]:
    """Compiles on all cores; earlier results come from Triton's cache."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise RuntimeError("TRITON_INTERPRET=1 replaces the compiler by an interpreter: unset it to inspect kernels")
    with ProcessPoolExecutor(min(len(configs), os.cpu_count() or 1), mp_context=get_context("spawn")) as pool:
        return list(map(report, configs, pool.map(examine, configs)))


def report(config: Configuration, code: Code) -> Report:
    programs = resident(LIMITS[config.arch], code)
    occupancy = programs * code.warps / LIMITS[config.arch].max_warps
    return Report(config, code, programs, occupancy, criticise(config, code, programs))


def resident(limits: Multiprocessor, code: Code) -> int:
    """Programs that fit on a multiprocessor at once."""
    granted = -(code.registers // -8) * 8 * limits.threads_per_warp * code.warps
    by_memory = limits.shared_memory // max(code.shared_memory + limits.reserved, 1)
    fit = [limits.max_warps // code.warps, limits.registers // granted, by_memory]
    return min([*fit, TENSOR_MEMORY_COLUMNS // code.tensor_memory] if code.tensor_memory else fit)


def criticise(config: Configuration, code: Code, programs: int) -> list[str]:
    """The problems found, one sentence each."""
    found = [f"ptxas {advisory}" for advisory in code.advisories]
    if code.stack or code.spill_instructions:
        spilt = f"{code.stack} bytes of registers spill ({code.spill_instructions} instructions)"
        found.append(f"{spilt}: use smaller tiles or more warps")
    if not programs:
        memory = f"{code.shared_memory / 1024:.0f} KB of shared memory"
        found.append(f"no multiprocessor has room for it ({memory}): use fewer stages")
    if config.arch.startswith("gfx"):
        return found
    for name, loop in zip(("full", "edge"), code.loops):
        if config.tile and loop.prefetch == 0:
            found.append(f"the {name} loop waits for the tile it has just requested: add a stage")
        if not {"16", "32", "tile"} & set(loop.load_bytes):
            remedy = "something is not known to be a multiple of 16"
            found.append(f"the {name} loop loads no vectors of 16 bytes ({loop.load_bytes}): {remedy}")
        masked = "a fused multiply-add takes a masked score, which may overflow"
        found += [f"line {line}: {masked}" for line in loop.fused_masked]
    return found


def show(reports: Sequence[Report]) -> None:
    """Two tables that fit 100 columns, and the findings; the JSON has everything."""
    used, loops = [], []
    for each in reports:
        config, tile, code = each.configuration, each.configuration.tile, each.code
        size = ["", "", ""]
        if tile:
            size = [f"{tile.block_q}×{tile.block_k}", str(tile.warps), f"{tile.stages}{' TMA' * tile.tma}"]
        memory = [str(code.registers), str(code.spill_instructions), f"{code.shared_memory / 1024:.0f} KB"]
        ahead = "/".join("–" if loop.prefetch is None else str(loop.prefetch) for loop in code.loops)
        fits = f"{each.programs * code.warps} ({each.occupancy:.0%})"
        used.append([_name(config), *size, *memory, fits, ahead])
        full, *edge = (sum(loop.mix.values()) for loop in code.loops)
        mix = [f"{code.loops[0].mix.get(name, 0) / full:.0%}" for name in MIX]
        loops.append(
            [
                _name(config),
                str(full),
                "".join(map(str, edge)),
                (code.matrix_instruction or "").partition("_f32")[0],
                *mix,
            ]
        )
    columns = ["kernel", "tile", "warps", "stages", "regs", "spills", "shared", "resident", "ahead"]
    print_table("What a program uses: registers, their spills, shared memory", columns, used)
    title = "Instructions of the loops over full and over edge tiles; the mix is that of full ones"
    print_table(title, ["kernel", "full", "edge", "product", *(name.replace("integer", "int") for name in MIX)], loops)
    found = [f"{each.configuration}: {finding}" for each in reports for finding in each.findings]
    print("\n".join(found or ["no findings"]))


def _name(config: Configuration) -> str:
    return f"{config.arch} {config.kernel} {config.head_dim or ''}".strip()


def sass(kernel: str, arch: str) -> str:
    """The inner loops of every shipped configuration of `kernel`, under the source lines they come from."""
    from dccot.kernels import attention_triton, lm_head_triton

    shipped = configurations([arch])
    found = [config for config in shipped if config.kernel == kernel]
    if not found or arch.startswith("gfx"):
        choice = f"choose one of {', '.join(dict.fromkeys(each.kernel for each in shipped))} and an sm_ architecture"
        raise ValueError(f"no NVIDIA machine code of kernel {kernel!r} for {arch}: {choice}")
    module = attention_triton if found[0].tile else lm_head_triton
    source = ["", *Path(str(module.__file__)).read_text().splitlines()]
    lines = []
    for config in found:
        stream = assembly.nvidia_stream(assembly.disassemble(compile_kernel(config).asm["cubin"]))
        for name, body in zip(("full", "edge"), assembly.inner_loops(stream, assembly.NVIDIA, "BRA")):
            lines.append(f"═══ {config}: {name} loop, {len(body)} instructions")
            for line, group in itertools.groupby(body, key=lambda item: item.line):
                lines.append(f"── {line}: {source[line].strip() if line < len(source) else ''}")
                lines += [f"      {item.mnemonic:<28} {item.operands}" for item in group]
    return "\n".join(lines)


def diff(before: str, after: str, archs: str) -> str:
    """What changed between two commits, or two files written with --json, kernel by kernel."""
    old, new = (_rows(each, archs) for each in (before, after))
    lines = []
    for key in dict.fromkeys([*old, *new]):
        if key not in old or key not in new:
            lines.append(f"{key}: only in {before if key in old else after}")
            continue
        facts = [name for name in dict.fromkeys([*old[key], *new[key]]) if name != "configuration"]
        values = [(name, old[key].get(name), new[key].get(name)) for name in facts]
        changes = [f"{name} {was} → {now}" for name, was, now in values if was != now]
        lines += [f"{key}: {'; '.join(changes)}"] if changes else []
    return "\n".join(lines) or "no difference"


def _rows(origin: str, archs: str) -> dict[str, dict]:
    rows = json.loads(Path(origin).read_text()) if Path(origin).is_file() else _inspect_commit(origin, archs)
    name = lambda config: f"{config['arch']} {config['kernel']} {config['head_dim'] or ''}".strip()
    return {name(row["configuration"]): row for row in rows}


def _inspect_commit(commit: str, archs: str) -> list[dict]:
    root = Path(__file__).resolve().parents[2]
    with tempfile.TemporaryDirectory() as folder:
        tree, file = Path(folder) / "tree", Path(folder) / "inspect.json"
        git = ["git", "-C", str(root), "worktree"]
        added = subprocess.run([*git, "add", "--detach", str(tree), commit], capture_output=True, text=True)
        if added.returncode:
            raise ValueError(f"{commit!r} is neither a file nor a commit of {root}: {added.stderr.strip()}")
        try:
            command = [sys.executable, "-m", "dccot.cli", "inspect", "--arch", archs, "--json", str(file)]
            environment = os.environ | {"PYTHONPATH": str(tree)}
            done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=tree)
            if not file.is_file():
                raise RuntimeError(f"dccot inspect failed at {commit}: {done.stderr[-500:]}")
            return json.loads(file.read_text())
        finally:
            subprocess.run([*git, "remove", "--force", str(tree)], capture_output=True)


def tune() -> str:
    """Choose tiles and backends for every known model shape on this GPU, as their first use would."""
    if not torch.cuda.is_available():
        raise RuntimeError("--tune times kernels and needs a GPU; without one the table in kernels/tuning.py is used")
    lines = []
    for name, shape in SHAPES.items():
        config = parse_config(shape, name)
        for kind, ends in {"tree": trees.tree("paper", TUNED_TOKENS), "causal": torch.full((8192,), 8192)}.items():
            size, mask = (config.heads, config.kv_heads, config.head_dim), TreeMask(ends, "cuda")
            q, k, v, _ = attention_inputs(len(ends), *size, "cuda", torch.bfloat16)
            autotune.backend_for(q, k, v, mask, config.head_dim**-0.5)
            if found := autotune.stored(shape_of(q, k, mask), torch.device("cuda")):
                tiles = "; ".join(f"{kernel} {tile}" for kernel, tile in found.tiles.items())
                lines.append(f"{name}, {kind}: {found.backend} ({tiles})")
    return "\n".join([*lines, f"kept in {cache_folder() / autotune.FILE}"])


def main(argv: list[str] | None = None) -> int:
    parser = Parser(
        "Compile every kernel without a GPU, and say what is wrong with its machine code.",
        "dccot inspect --arch sm_90,gfx942 --json inspect.json",
        prog="dccot inspect",
    )
    archs = ",".join(DEFAULT_ARCHITECTURES)
    parser.add_argument("--arch", default=archs, help=f"comma-separated, of {', '.join(TABLE)}")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything found as JSON")
    parser.add_argument("--sass", metavar="KERNEL", help="print a kernel's inner loops: machine code by source line")
    parser.add_argument("--diff", nargs=2, metavar=("A", "B"), help="compare two commits, or two files of --json")
    parser.add_argument("--tune", action="store_true", help="on a GPU: time tiles and backends, and keep the fastest")
    arguments = parser.parse_args(argv)
    archs = arguments.arch
    try:
        if arguments.tune:
            print(tune())
            return 0
        if arguments.diff:
            print(diff(arguments.diff[0], arguments.diff[1], archs))
            return 0
        if arguments.sass:
            print(sass(arguments.sass, archs.split(",")[0]))
            return 0
        reports = inspect(configurations(archs.split(",")))
    except (ValueError, RuntimeError) as error:
        print(f"dccot inspect: {error}", file=sys.stderr)
        return 2
    show(reports)
    print(MEASURE)
    if arguments.json:
        write_atomic(arguments.json, json.dumps([each.as_dict() for each in reports], indent=1) + "\n")
    return 1 if any(each.findings for each in reports) else 0


if __name__ == "__main__":
    sys.exit(main())
