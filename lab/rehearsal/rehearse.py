"""`dccot rehearse CONFIG… --model 7B --gpus 8`: the training step of a run at its real size, without the GPUs.

    dccot rehearse configs/rl/stage4.yaml --model 1.5B --gpus 8
    dccot rehearse configs/sft.yaml configs/rl/stage*.yaml --model 32B --gpus 64 --replicate 2 --context-parallel 8

The step is the project's own, on fake tensors (step.py, fake_gpu.py): the model on the meta device, FSDP or HSDP over
all ranks, forward with recomputation, LM head, objective, backward, clipping, fused AdamW, weights gathered for the
engine, a checkpoint planned. It catches tensors on the wrong device, wrong shapes and dtypes, memory that does not fit
and hosts that wait for their GPU. It cannot predict what kernels, NCCL or vLLM do, or any computed value.

Configurations with the same GPU requirements are rehearsed once. Exits with 1 if a step fails or does not fit.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path

from dccot.core.command import Parser, positive, print_table, run_cleanly
from dccot.core.config import ConfigError
from dccot.core.files import write_atomic
from dccot.core.progress import waiting
from dccot.lab.rehearsal.inputs import load_training
from dccot.memory import TrainingMemory, largest_batch
from dccot.model.config import ModelConfig
from dccot.plan import GB, GPUS, SHAPES, idle, read_shape, remedy_for_idle
from dccot.train.config import RLConfig

AGREES = 0.1  # of the peak: how far `dccot plan` may be off
WORTH_SHOWING = 5e6  # bytes
COLUMNS = ["configuration", "tokens", "steady GB", "peak GB", "planned", "off by"]
COLUMNS += ["left for the engine", "waits per micro-batch", "s"]


@dataclass
class Rehearsal:
    """One configuration's GPU requirements, and the result of trying it."""

    path: str
    overrides: list[str]
    planned: TrainingMemory
    configs: list[str] = field(default_factory=list)
    found: dict = field(default_factory=dict)  # what step.py printed

    @property
    def name(self) -> str:
        return ", ".join(self.configs)

    @property
    def failed(self) -> bool:
        return "error" in self.found

    @property
    def peak(self) -> int:
        return max(phase["total"] for phase in self.found["peaks"].values())

    @property
    def planned_peak(self) -> float:
        return sum(self.planned.persistent.values()) + sum(self.planned.peak[1].values())

    @property
    def waits_per_micro_batch(self) -> float:
        """How often the host waits for the GPU in an update, including once-per-update waits."""
        return sum(self.found["syncs"].get("update", {}).values()) / self.found["micro_batches"]["update"]


def prepare(
    paths: Sequence[str], overrides: Sequence[str], model: ModelConfig, gpus: int, gpu: str = "H100"
) -> list[Rehearsal]:
    """One per group of configurations with the same GPU requirements."""
    groups: dict[str, Rehearsal] = {}
    for path in paths:
        config = load_training(path, overrides)
        config.sharding.check_ranks(gpus)
        if without := idle(config, gpus):
            raise ConfigError(f"{Path(path).stem}: {without}: {remedy_for_idle(model, config, gpus, GPUS[gpu])}")
        largest = largest_batch(config, model.max_position)
        objective = asdict(config.objective) if isinstance(config, RLConfig) else None
        reference = isinstance(config, RLConfig) and config.objective.kl_coefficient > 0
        lora, shards = config.model.lora, gpus // config.sharding.copies(gpus)
        planned = TrainingMemory(model, config.sharding, shards, largest.tokens, largest.rows, reference, lora)
        same = json.dumps([asdict(largest), asdict(config.sharding), objective, asdict(lora)])
        groups.setdefault(same, Rehearsal(str(path), list(overrides), planned)).configs.append(Path(path).stem)
    return list(groups.values())


def run(rehearsal: Rehearsal, shape: dict, gpus: int, gpu: str) -> Rehearsal:
    """In a separate process: torch must not be imported before the fake device exists."""
    spec = {"config": rehearsal.path, "overrides": rehearsal.overrides, "shape": shape, "ranks": gpus, "gpu": gpu}
    command, env = [sys.executable, "-m", "dccot.lab.rehearsal.step"], {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, input=json.dumps(spec), capture_output=True, text=True, env=env)
    lines = done.stdout.splitlines()
    if lines and lines[-1].startswith("{"):
        rehearsal.found = json.loads(lines[-1])
    else:
        rehearsal.found = {"error": f"the rehearsal ended with code {done.returncode}: {done.stderr.strip()[-2000:]}"}
    said = "failed"
    if rehearsal.failed:
        rehearsal.found["trace"] = done.stderr
    else:
        peaks = f"peak {rehearsal.peak / GB:.1f} GB, planned {rehearsal.planned_peak / GB:.1f}"
        said = f"{peaks}, {rehearsal.found['seconds']:.0f} s"
    print(f"[rehearse] {rehearsal.name}: {said}", flush=True)  # at once: a size takes minutes
    return rehearsal


def show_kinds(rehearsal: Rehearsal, title: str) -> None:
    """GB by kind (rows) and phase (columns), each phase at its own peak."""
    peaks = {phase: peak for phase, peak in rehearsal.found["peaks"].items() if phase}
    held = [peak["kinds"] | {"all": peak["total"]} for peak in peaks.values()]
    kinds = dict.fromkeys(kind for sizes in held for kind in sizes if kind != "all" and sizes[kind] > WORTH_SHOWING)
    gb = lambda size: f"{size / GB:.2f}" if size > WORTH_SHOWING else ""
    rows = [[kind, *(gb(sizes.get(kind, 0)) for sizes in held)] for kind in [*kinds, "all"]]
    print_table(title, ["GB at the phase's peak", *(phase.replace("_", " ") for phase in peaks)], rows)
    for phase, places in rehearsal.found["syncs"].items():
        for place, times in places.items():
            print(f"the host waits, {phase or 'between phases'}: {place} ({times} ×)")


def summary(rehearsal: Rehearsal, memory: float) -> list[str]:
    """A row of the table."""
    if rehearsal.failed:
        return [rehearsal.name, "failed", *[""] * (len(COLUMNS) - 2)]
    found, peak, planned = rehearsal.found, rehearsal.peak, rehearsal.planned_peak
    left = f"{memory - peak / GB:.1f}" if peak < memory * GB else "does not fit"
    sizes = [f"{sum(found['steady'].values()) / GB:.2f}", f"{peak / GB:.1f}", f"{planned / GB:.1f}"]
    ends = [f"{planned / peak - 1:+.1%}", left, f"{rehearsal.waits_per_micro_batch:.1f}", f"{found['seconds']:.0f}"]
    return [rehearsal.name, f"{found['tokens']:,}", *sizes, *ends]


def remarks(rehearsal: Rehearsal, memory: float) -> Iterator[str]:
    """What is wrong with a configuration, or with the plan."""
    name, found = rehearsal.name, rehearsal.found
    if rehearsal.failed:
        yield f"{name}: {found['error'].splitlines()[0][:300]}\n{found['trace'][-3000:]}"
        return
    peak, planned = rehearsal.peak, rehearsal.planned_peak
    for kind, size in rehearsal.planned.persistent.items():  # steady memory, to the byte
        if (have := found["steady"].get(kind, 0)) != size:
            yield f"{name}: `dccot plan` is wrong about {kind}: {have:,} bytes, planned {size:,}"
    if abs(planned / peak - 1) > AGREES:
        yield f"{name}: `dccot plan` expects a peak of {planned / GB:.1f} GB, it is {peak / GB:.1f}"
    if peak > memory * GB:
        phase = max(found["peaks"], key=lambda phase: found["peaks"][phase]["total"])
        remedy = "`dccot plan` says what to change"
        yield f"{name}: {phase} needs {peak / GB:.1f} GB, a GPU has {memory:g}; {remedy}"


def rehearse(arguments: argparse.Namespace) -> int:
    paths = [text for text in arguments.configs if "=" not in text]
    if not paths:
        raise ConfigError("no configuration given; name one or more, e.g. configs/rl/stage4.yaml")
    given = {"replicate": arguments.replicate, "context_parallel": arguments.context_parallel}
    layout = [f"sharding.{key}={value}" for key, value in given.items() if value]
    overrides = [*layout, *(text for text in arguments.configs if "=" in text)]
    model, memory, began = read_shape(arguments.model), GPUS[arguments.gpu].memory, time.perf_counter()
    prepared = prepare(paths, overrides, model, arguments.gpus, arguments.gpu)
    where = f"{arguments.model} on {arguments.gpus:,} × {arguments.gpu} ({memory} GB)"
    what = f"rehearsing {', '.join(each.name for each in prepared)}"
    with waiting(what), ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        tried = list(pool.map(lambda one: run(one, dict(model.raw), arguments.gpus, arguments.gpu), prepared))
    for rehearsal in tried if arguments.details or len(tried) == 1 else []:
        if not rehearsal.failed:
            show_kinds(rehearsal, f"{rehearsal.name}: {where}")
    print_table(where, COLUMNS, [summary(rehearsal, memory) for rehearsal in tried])
    for remark in (remark for rehearsal in tried for remark in remarks(rehearsal, memory)):
        print(f"→ {remark}")
    print(f"{len(tried)} steps rehearsed in {time.perf_counter() - began:.0f} s")
    if arguments.json:
        plans = [{"planned": each.planned_peak, "planned_steady": each.planned.persistent} for each in tried]
        rows = [{"configs": r.configs, "path": r.path, **r.found, **plan} for r, plan in zip(tried, plans)]
        found = {"model": arguments.model, "gpus": arguments.gpus, "rehearsals": rows}
        Path(arguments.json).parent.mkdir(parents=True, exist_ok=True)
        write_atomic(Path(arguments.json), json.dumps(found, indent=1) + "\n")
    return int(any(rehearsal.failed or rehearsal.peak > memory * GB for rehearsal in tried))


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(
        "Try a run's training step at its real size on fake GPUs: devices, shapes, dtypes, memory, waits.",
        "dccot rehearse configs/rl/stage4.yaml --model 7B --gpus 8 sharding.reduce_once=false",
    )
    add, cards = parser.add_argument, [name for name, gpu in GPUS.items() if gpu.arch.startswith("sm_")]
    add("configs", nargs="+", metavar="CONFIG", help="configurations of RL or SFT; key=value settings for all of them")
    add("--model", required=True, help=f"a checkpoint, a run, or one of {', '.join(SHAPES)}")
    add("--gpus", type=positive, default=8)
    add("--gpu", choices=cards, default="H100")
    add(
        "--replicate",
        type=positive,
        help="copies of the model (HSDP), usually one per machine (default: as configured)",
    )
    add("--context-parallel", type=positive, help="GPUs that share a micro-batch (default: as configured)")
    add("--details", action="store_true", help="memory by kind and phase of every configuration, even of several")
    add("--json", metavar="FILE", help="everything that was found")
    codes: list[int] = []
    return run_cleanly(lambda: codes.append(rehearse(parser.parse_intermixed_args(argv)))) or codes[0]


if __name__ == "__main__":
    sys.exit(main())
