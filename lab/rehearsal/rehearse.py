"""`dccot rehearse CONFIG… --model 7B --gpus 8`: the training step of a run at its real size, without the GPUs.

    dccot rehearse configs/rl/stage4.yaml --model 1.5B --gpus 8
    dccot rehearse configs/sft.yaml configs/rl/stage*.yaml --model 32B --gpus 64 --gpu H200 --replicate 2 sharding.reduce_once=false

The step is the project's own, on fake tensors (rehearsal.py, fake_gpu.py): the model on the meta device, FSDP or HSDP
over all ranks, forward with recomputation, LM head, objective, backward, clipping, fused AdamW, weights gathered for
the engine, a checkpoint planned. It catches tensors on the wrong device, wrong shapes and dtypes, memory that does not
fit and hosts that wait for their GPU. It cannot predict what kernels, NCCL or vLLM do, or any computed value.

Configurations with the same GPU requirements are rehearsed once. Exits with 1 if a step fails or does not fit.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from dccot.core.command import positive, print_table, run_cleanly
from dccot.core.config import ConfigError
from dccot.core.files import write_atomic
from dccot.model.config import ModelConfig
from dccot.train.config import RLConfig, SFTConfig
from dccot.train.memory import TrainingMemory, largest_batch, load_training
from dccot.train.plan import GB, GPUS, SHAPES, read_shape

AGREES = 0.1  # of the peak: how far `dccot plan` may be off
WORTH_SHOWING = 5e6  # bytes


@dataclass
class Rehearsal:
    """One configuration's GPU requirements, and the result of trying it."""

    configs: list[str]
    overrides: list[str]
    config: RLConfig | SFTConfig
    planned: TrainingMemory
    found: dict

    @property
    def peak(self) -> int:
        return max(phase["total"] for phase in self.found["peaks"].values())

    @property
    def planned_peak(self) -> float:
        return sum(self.planned.persistent.values()) + sum(self.planned.peak[1].values())

    @property
    def steady_differs(self) -> list[str]:
        """Where steady memory differs from the plan, to the byte."""
        have = self.found["steady"]
        return [f"{kind}: {have.get(kind, 0):,} bytes, planned {size:,}" for kind, size in self.planned.persistent.items()
                if have.get(kind, 0) != size]  # fmt: skip

    @property
    def waits_per_micro_batch(self) -> float:
        """How often the host waits for the GPU in an update, including once-per-update waits."""
        return sum(self.found["syncs"].get("update", {}).values()) / self.found["micro_batches"]["update"]


def prepare(paths: Sequence[str], overrides: Sequence[str], model: ModelConfig, gpus: int) -> list[Rehearsal]:
    """One per group of configurations with the same GPU requirements."""
    groups: dict[str, Rehearsal] = {}
    for path in paths:
        config = load_training(path, overrides)
        replicate = config.sharding.copies(gpus)
        if gpus % replicate:
            raise ConfigError(f"sharding.replicate is {replicate}; it must divide the {gpus} GPUs")
        largest = largest_batch(config, model.max_position)
        reference = isinstance(config, RLConfig) and config.objective.kl_coefficient > 0
        planned = TrainingMemory(model, config.sharding, gpus // replicate, largest.tokens, largest.rows, reference)
        objective = asdict(config.objective) if isinstance(config, RLConfig) else None
        same = json.dumps([asdict(largest), asdict(config.sharding), objective])
        groups.setdefault(same, Rehearsal([], list(overrides), config, planned, {})).configs.append(Path(path).stem)
        groups[same].found.setdefault("path", str(path))
    return list(groups.values())


def run(rehearsal: Rehearsal, shape: dict, gpus: int, gpu: str) -> Rehearsal:
    """In a separate process: torch must not be imported before the fake device exists."""
    spec = {
        "config": rehearsal.found["path"],
        "overrides": rehearsal.overrides,
        "shape": shape,
        "ranks": gpus,
        "gpu": gpu,
    }
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "dccot.lab.rehearsal.step"]
    done = subprocess.run(command, input=json.dumps(spec), capture_output=True, text=True, env=environment)
    lines = done.stdout.splitlines()
    if lines and lines[-1].startswith("{"):
        rehearsal.found |= json.loads(lines[-1])
    else:
        rehearsal.found["error"] = f"the rehearsal ended with code {done.returncode}: {done.stderr.strip()[-2000:]}"
    if "error" in rehearsal.found:
        rehearsal.found["trace"] = done.stderr
    return rehearsal


def announced(rehearsal: Rehearsal) -> Rehearsal:
    """Printed as soon as it is known: a size takes minutes, and results survive an interruption."""
    found = rehearsal.found
    what = (
        "failed"
        if "error" in found
        else f"peak {rehearsal.peak / GB:.1f} GB, planned {rehearsal.planned_peak / GB:.1f}, {found['seconds']:.0f} s"
    )
    print(f"[rehearse] {', '.join(rehearsal.configs)}: {what}", flush=True)
    return rehearsal


def show_kinds(rehearsal: Rehearsal, title: str) -> None:
    """GB by kind (rows) and phase (columns), each phase at its own peak."""
    peaks = {phase: peak for phase, peak in rehearsal.found["peaks"].items() if phase}
    kinds = dict.fromkeys(
        kind for peak in peaks.values() for kind, size in peak["kinds"].items() if size > WORTH_SHOWING
    )
    rows = [[kind, *(_gb(peak["kinds"].get(kind, 0)) for peak in peaks.values())] for kind in kinds]
    rows.append(["all", *(_gb(peak["total"]) for peak in peaks.values())])
    print_table(title, ["GB at the phase's peak", *(phase.replace("_", " ") for phase in peaks)], rows)
    for phase, places in rehearsal.found["syncs"].items():
        for place, times in places.items():
            print(f"the host waits, {phase or 'between phases'}: {place} ({times} ×)")


def _gb(size: int) -> str:
    return f"{size / GB:.2f}" if size > WORTH_SHOWING else ""


def show_summary(rehearsals: Sequence[Rehearsal], title: str, memory: float) -> None:
    columns = [
        "configuration",
        "tokens",
        "steady GB",
        "peak GB",
        "planned",
        "off by",
        "left for the engine",
        "waits per micro-batch",
        "s",
    ]
    rows = []
    for rehearsal in rehearsals:
        name, found = ", ".join(rehearsal.configs), rehearsal.found
        if "error" in found:
            rows.append([name, "failed", *[""] * (len(columns) - 2)])
            continue
        peak, planned = rehearsal.peak, rehearsal.planned_peak
        left = f"{memory - peak / GB:.1f}" if peak < memory * GB else "does not fit"
        rows.append(
            [name, f"{found['tokens']:,}", f"{sum(found['steady'].values()) / GB:.2f}", f"{peak / GB:.1f}", f"{planned / GB:.1f}",
             f"{planned / peak - 1:+.1%}", left, f"{rehearsal.waits_per_micro_batch:.1f}", f"{found['seconds']:.0f}"]
        )  # fmt: skip
    print_table(title, columns, rows)


def remarks(rehearsals: Sequence[Rehearsal], memory: float) -> list[str]:
    """What is wrong with a configuration, or with the plan."""
    said = []
    for rehearsal in rehearsals:
        name, found = ", ".join(rehearsal.configs), rehearsal.found
        if "error" in found:
            said.append(f"{name}: {found['error'].splitlines()[0][:300]}\n{found['trace'][-3000:]}")
            continue
        said += [f"{name}: `dccot plan` is wrong about {what}" for what in rehearsal.steady_differs]
        if abs(rehearsal.planned_peak / rehearsal.peak - 1) > AGREES:
            said.append(
                f"{name}: `dccot plan` expects a peak of {rehearsal.planned_peak / GB:.1f} GB, it is {rehearsal.peak / GB:.1f}"
            )
        if rehearsal.peak > memory * GB:
            phase = max(found["peaks"], key=lambda phase: found["peaks"][phase]["total"])
            said.append(
                f"{name}: {phase} needs {rehearsal.peak / GB:.1f} GB, a GPU has {memory:g}; `dccot plan` says what to change"
            )
    return said


def rehearse(arguments: argparse.Namespace) -> int:
    paths = [text for text in arguments.configs if "=" not in text]
    if not paths:
        raise ConfigError("no configuration given; name one or more, e.g. configs/rl/stage4.yaml")
    copies = [f"sharding.replicate={arguments.replicate}"] if arguments.replicate else []
    overrides = [*copies, *(text for text in arguments.configs if "=" in text)]
    model, memory, began = read_shape(arguments.model), GPUS[arguments.gpu].memory, time.perf_counter()
    prepared = prepare(paths, overrides, model, arguments.gpus)
    where = f"{arguments.model} on {arguments.gpus:,} × {arguments.gpu} ({memory} GB)"
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        rehearsals = list(
            pool.map(lambda one: announced(run(one, dict(model.raw), arguments.gpus, arguments.gpu)), prepared)
        )
    for rehearsal in rehearsals if arguments.details or len(rehearsals) == 1 else []:
        if "error" not in rehearsal.found:
            show_kinds(rehearsal, f"{', '.join(rehearsal.configs)}: {where}")
    show_summary(rehearsals, where, memory)
    for remark in remarks(rehearsals, memory):
        print(f"→ {remark}")
    print(f"{len(rehearsals)} steps rehearsed in {time.perf_counter() - began:.0f} s")
    if arguments.json:
        rows = [
            {"configs": r.configs, **r.found, "planned": r.planned_peak, "planned_steady": r.planned.persistent}
            for r in rehearsals
        ]
        found = {"model": arguments.model, "gpus": arguments.gpus, "rehearsals": rows}
        Path(arguments.json).parent.mkdir(parents=True, exist_ok=True)
        write_atomic(Path(arguments.json), json.dumps(found, indent=1) + "\n")
    return int(any("error" in r.found or r.peak > memory * GB for r in rehearsals))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description="Try the training step of a run at its real size on fake GPUs: devices, shapes, dtypes, memory, waiting.",
        epilog="example: dccot rehearse configs/rl/stage4.yaml --model 7B --gpus 8 sharding.reduce_once=false",
    )
    parser.add_argument(
        "configs", nargs="+", metavar="CONFIG", help="configurations of RL or SFT; key=value settings for all of them"
    )
    parser.add_argument("--model", required=True, help=f"a checkpoint, a run, or one of {', '.join(SHAPES)}")
    parser.add_argument("--gpus", type=positive, default=8)
    parser.add_argument(
        "--gpu", choices=[name for name, gpu in GPUS.items() if gpu.arch.startswith("sm_")], default="H100"
    )
    parser.add_argument(
        "--replicate",
        type=positive,
        help="copies of the model (HSDP), usually one per machine (default: as configured)",
    )
    parser.add_argument(
        "--details",
        action="store_true",
        help="memory by kind and phase of every configuration, not only of a single one",
    )
    parser.add_argument("--json", metavar="FILE", help="everything that was found")
    code = 0

    def work() -> None:
        nonlocal code
        code = rehearse(parser.parse_intermixed_args(argv))

    return run_cleanly(work) or code


if __name__ == "__main__":
    sys.exit(main())
