"""Synchronous, partial and asynchronous RL on a workload with a long tail, in turns: seconds per trained group.

    dccot bench rl

The bigram model writes segments of geometric length, so the longest response of a batch is several times the mean: a
synchronous step waits for it. Batches are small, so that a step of the engine takes hardly longer for many sequences
than for few, as on a GPU. The learning rate is next to 0, so all modes have the same work at every step.
All modes have the same cores: synchronous and partial runs have a rank on each, which samples and then trains; the
asynchronous one has a server on one and trains on the other. The first steps of a run, which fill the queue, do not
count.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from dccot.lab.bench.harness import row
from dccot.lab.worlds import bigram as tiny
from dccot.lab.worlds.exact_task import write_problems

STALENESS = 2
MODES = {
    "synchronous": ["batch.surplus=keep"],
    "partial": ["rollout.mode=partial", f"rollout.max_staleness={STALENESS}"],
    "asynchronous": ["rollout.mode=asynchronous", f"rollout.max_staleness={STALENESS}", "rollout.gpus=1"],
}
FILLING = STALENESS + 1  # steps
PROMPT = 400  # tokens, at most
SHARES = ("time/engines_wait", "time/trainer_waits")


def prepare(folder: Path, scale: int, prompts: int, group: int) -> Path:
    """Model, problems and configuration; `scale` is the mean length of a segment."""
    chances = tiny.Chances(spawn=0.5 / scale, close=1 / scale, eos=0.5 / scale)
    tiny.save(folder / "model", "single", chances, context=PROMPT + 10 * scale)
    write_problems(folder / "problems.jsonl", 1000)
    settings = {
        "output": str(folder),
        "model": {"path": str(folder / "model")},
        "data": {"train": str(folder / "problems.jsonl")},
        "filter": "none",
        "prompt": {"max_prompt_tokens": PROMPT},
        "rollout": {"budget": 10 * scale, "max_rounds": 2},
        "engine": {
            "dtype": "float32",
            "context": PROMPT + 10 * scale,
            "max_sequences": 3 * (STALENESS + 1) * prompts * group,
            "kv_cache_gb": 1,
        },
        "reward": {"cutoff": scale},
        "batch": {
            "prompts": prompts,
            "prompts_rolled_out": (STALENESS + 1) * prompts,
            "group_size": group,
            "token_budget": 16 * scale,
        },
        "optimizer": {"learning_rate": 1e-12, "weight_decay": 0.0},
        "sharding": {"compute_dtype": "float32", "whole": True, "activation_checkpointing": False},
        "validation": {"every": 0},
        "checkpoint": {"every": 1000},
        "grading": {"workers": 1},
    }
    (folder / "rl.yaml").write_text(json.dumps(settings))
    return folder / "rl.yaml"


def steps_of(config: Path, mode: str, turn: int, steps: int, cores: int) -> list[dict[str, float]]:
    """Metrics of the steps of one run that count."""
    name, ranks = f"{mode}_{turn}", 1 if mode == "asynchronous" else cores
    given = [f"name={name}", f"steps={FILLING + steps}", f"seed={turn}", *MODES[mode]]
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"] if ranks > 1 else []
    command = [sys.executable, *launcher, "-m", "dccot.train.rl", str(config), *given]
    done = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"the {mode} run failed: {done.stderr[-2000:]}")
    lines = (config.parent / name / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines][FILLING:]


def run(quick: bool) -> list[dict]:
    scale, prompts, group, steps, turns = (20, 2, 2, 3, 1) if quick else (100, 2, 4, 9, 2)
    cores = 1 if quick else os.cpu_count() or 1
    found: dict[str, list[list[dict[str, float]]]] = {mode: [] for mode in MODES}
    with tempfile.TemporaryDirectory() as folder:
        config = prepare(Path(folder), scale, prompts, group)
        for turn in range(turns):
            for mode in MODES:
                found[mode].append(steps_of(config, mode, turn, steps, cores))
    best = {mode: min(mean_of(each, "time/step") for each in runs) / prompts for mode, runs in found.items()}
    rows = [row(f"{mode}, seconds per trained group", seconds, "s") for mode, seconds in best.items()]
    rows += [row(f"{mode} over synchronous", best["synchronous"] / best[mode], "×", 1.3, "higher") for mode in best][1:]
    for mode, runs in found.items():
        every = [step for each in runs for step in each]
        told = ("length/longest_path", *SHARES, *(() if mode == "synchronous" else ("staleness/mean", "staleness/max")))
        rows += [row(f"{mode}, {name}", mean_of(every, name), "") for name in told]
    return rows


def mean_of(steps: list[dict[str, float]], name: str) -> float:
    return statistics.fmean(step[name] for step in steps)
