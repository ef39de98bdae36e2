"""The rest of `dccot inspect`: --sweep, --sass, --diff and --roofline."""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from dccot.core.files import write_jsonl_atomic
from dccot.kernels import attention_triton
from dccot.kernels import lm_head_triton as logprob_triton
from dccot.kernels.gpus import of_architecture
from dccot.kernels.tuning import ATTENTION_KERNELS, TABLE, Tile
from dccot.lab.critic import assembly
from dccot.lab.critic.compiling import Configuration, compile_kernel, configurations
from dccot.lab.critic.inspect import Report, Workload, inspect
from dccot.lab.critic.predict import PRODUCTS, SUSTAINED

COMPARED = (
    "registers",
    "stack",
    "spill_instructions",
    "shared_memory",
    "programs",
    "prefetch",
    "loop",
    "edge_loop",
    "bound",
    "findings",
)


def candidates(kernel: str, arch: str, head_dim: int) -> Iterator[Tile]:
    """Tiles whose accumulators fit the registers and whose pipeline fits the shared memory.

    On NVIDIA's GPUs two stages wait for the load just issued: the critic ruled out every one that was tried.
    """
    gpu, pipelines = of_architecture(arch), (2, 3) if arch.startswith("gfx") else (3,)
    descriptors = (True, False) if arch in ("sm_90", "sm_100") else (False,)
    for own, streamed, warps, stages, tma in itertools.product(
        (64, 128), (32, 64, 128), (4, 8), pipelines, descriptors
    ):
        block_q, block_k = (streamed, own) if kernel == "grad_key" else (own, streamed)
        kept, scores = {"forward": (1, 1), "grad_query": (1, 2), "grad_key": (2, 2)}[kernel]
        numbers = (kept * own * head_dim + scores * block_q * block_k) / (32 * warps)
        owned = {"forward": 1, "grad_query": 2, "grad_key": 2}[kernel] * own
        if (
            numbers <= 200
            and 2 * head_dim * (owned + 2 * stages * streamed) <= gpu.shared_memory_per_program
            and own >= 16 * warps
        ):
            yield Tile(block_q, block_k, warps, stages, tma)


def rank(kernel: str, arch: str, head_dim: int, tiles: Sequence[Tile], workload: Workload) -> list[Report]:
    """Fastest predicted first; those that spill, serialise or do not fit come last, with their findings."""
    reports = inspect([Configuration(kernel, arch, head_dim, tile) for tile in tiles], workload)
    return sorted(
        reports, key=lambda each: (bool(each.findings), each.prediction.seconds if each.prediction else float("inf"))
    )


def choose(ranked: Sequence[Report]) -> Report:
    """The tile to ship: of those without a finding that are predicted within 2% of the fastest, the largest, which
    loads least.
    """
    good = [each for each in ranked if not each.findings and each.prediction]
    speed = lambda each: each.prediction.tflops if each.prediction else 0.0
    close = [each for each in good if speed(each) >= 0.98 * speed(good[0])]
    return max(
        close,
        key=lambda each: (each.tile.block_q * each.tile.block_k, -each.tile.warps, speed(each)),
        default=ranked[0],
    )


def sweep(archs: Sequence[str], workload: Workload, record: Path | None = None) -> str:
    """Every candidate and the shipped tile, ranked; `record` gets the tile to ship for each kernel, as a JSON row."""
    lines, chosen = [], []
    for arch, head_dim, kernel in itertools.product(archs, (64, 128), ATTENTION_KERNELS):
        shipped = TABLE[arch][head_dim][ATTENTION_KERNELS.index(kernel)]
        ranked = rank(
            kernel, arch, head_dim, [*dict.fromkeys([shipped, *candidates(kernel, arch, head_dim)])], workload
        )
        ruled_out, choice = sum(bool(each.findings) for each in ranked), choose(ranked)
        print(
            f"[sweep] {arch} {kernel} head dim {head_dim}: {len(ranked)} compiled, {ruled_out} ruled out",
            file=sys.stderr,
            flush=True,
        )
        for each in ranked[:4] + [each for each in ranked[4:] if each.tile in (shipped, choice.tile)]:
            speed = f"{each.prediction.tflops:.0f} TFLOP/s" if each.prediction else ""
            marks = ["shipped"] * (each.tile == shipped) + ["chosen"] * (each is choice) + each.findings
            lines.append(f"{arch} {kernel} {head_dim}: {each.tile} {speed} {'; '.join(marks)}".rstrip())
        found = {
            "tflops": choice.prediction and round(choice.prediction.tflops, 1),
            "compiled": len(ranked),
            "ruled_out": ruled_out,
        }
        chosen.append({"arch": arch, "head_dim": head_dim, "kernel": kernel, **asdict(choice.tile), **found})
        if record:  # incrementally: a sweep takes a while
            write_jsonl_atomic(record, chosen)
    return "\n".join(lines)


def sass(kernel: str, arch: str) -> str:
    """The inner loops of every shipped configuration of `kernel`, under the source lines they come from."""
    found = [config for config in configurations([arch]) if config.kernel == kernel]
    if not found or arch.startswith("gfx"):
        known = ", ".join(dict.fromkeys(config.kernel for config in configurations([arch])))
        raise ValueError(
            f"no NVIDIA machine code of kernel {kernel!r} for {arch}: choose one of {known} and an sm_ architecture"
        )
    module = attention_triton if found[0].tile else logprob_triton
    source = Path(str(module.__file__)).read_text().splitlines()
    lines = []
    for config in found:
        stream = assembly.nvidia_stream(assembly.disassemble(compile_kernel(config).asm["cubin"]))
        for name, body in zip(("full", "edge"), assembly.inner_loops(stream, assembly.NVIDIA, "BRA")):
            lines.append(f"═══ {config}: {name} loop, {len(body)} instructions")
            for line, group in itertools.groupby(body, key=lambda item: item.line):
                lines.append(f"── {line}: {source[line - 1].strip() if 0 < line <= len(source) else ''}")
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
        changes = [
            f"{name} {old[key].get(name)} → {new[key].get(name)}"
            for name in COMPARED
            if old[key].get(name) != new[key].get(name)
        ]
        speeds = [(row.get("prediction") or {}).get("tflops") for row in (old[key], new[key])]
        if all(speeds) and speeds[0] != speeds[1]:
            changes.append(f"predicted {speeds[0]:.0f} → {speeds[1]:.0f} TFLOP/s")
        lines += [f"{key}: {'; '.join(changes)}"] if changes else []
    return "\n".join(lines) or "no difference"


def _rows(origin: str, archs: str) -> dict[str, dict]:
    if Path(origin).is_file():
        rows = json.loads(Path(origin).read_text())
    else:
        rows = _inspect_commit(origin, archs)
    key = lambda row: (
        f"{row['configuration']['arch']} {row['configuration']['kernel']} {row['configuration']['head_dim'] or ''}".strip()
    )
    return {key(row): row for row in rows}


def _inspect_commit(commit: str, archs: str) -> list[dict]:
    root = Path(__file__).resolve().parents[2]
    with tempfile.TemporaryDirectory() as folder:
        tree, file = Path(folder) / "tree", Path(folder) / "inspect.json"
        git = ["git", "-C", str(root), "worktree"]
        added = subprocess.run([*git, "add", "--detach", str(tree), commit], capture_output=True, text=True)
        if added.returncode:
            raise ValueError(f"{commit!r} is neither a file nor a commit of {root}: {added.stderr.strip()}")
        try:
            command = [sys.executable, "-m", "dccot.lab.critic.inspect", "--arch", archs, "--json", str(file)]
            done = subprocess.run(
                command, env=os.environ | {"PYTHONPATH": str(tree)}, capture_output=True, text=True, cwd=tree
            )
            if not file.is_file():
                raise RuntimeError(f"dccot inspect failed at {commit}: {done.stderr[-500:]}")
            return json.loads(file.read_text())
        finally:
            subprocess.run([*git, "remove", "--force", str(tree)], capture_output=True)


def roofline(reports: Sequence[Report], file: Path) -> None:
    """Predicted speed of every attention kernel over its arithmetic intensity (flops per byte from L2), below what each
    GPU sustains.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    reports = [each for each in reports if each.prediction]
    colours = dict(
        zip(
            dict.fromkeys(each.configuration.arch for each in reports),
            pyplot.rcParams["axes.prop_cycle"].by_key()["color"],
        )
    )
    for arch, colour in colours.items():
        gpu = of_architecture(arch)
        slope = gpu.l2_bytes * gpu.multiprocessors * gpu.clock / 1e12
        intensities = [2**power for power in range(3, 12)]
        axes.plot(intensities, [min(SUSTAINED * gpu.tflops, slope * x) for x in intensities], color=colour, label=arch)
    for each in reports:
        config, tile = each.configuration, each.configuration.tile
        assert tile is not None and each.prediction is not None
        own = tile.block_k if config.kernel == "grad_key" else tile.block_q
        intensity = 2 * PRODUCTS[config.kernel] * own / 4  # per streamed row: two tensors of 2 bytes per number
        axes.plot(intensity, each.prediction.tflops, "o", color=colours[config.arch])
        label = re.sub("_", " ", f"{config.kernel} {config.head_dim}")
        axes.annotate(label, (intensity, each.prediction.tflops), fontsize=6, xytext=(4, 0), textcoords="offset points")
    axes.set(xscale="log", yscale="log", xlabel="flops per byte from L2", ylabel="TFLOP/s on visible pairs (predicted)")
    axes.legend()
    figure.savefig(file, dpi=150)
    pyplot.close(figure)
