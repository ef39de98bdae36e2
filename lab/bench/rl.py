"""Synchronous, partial and asynchronous RL on a workload with a long tail, in turns: seconds per trained group.

    dccot bench rl

The bigram model writes segments of geometric length, so the longest response of a batch is several times the mean: a
synchronous step waits for it. The learning rate is next to 0, so all modes have the same work at every step.
Synchronous and partial runs use both cores for sampling and then for training; the asynchronous one samples on one core
and trains on the other. The first two steps of a run, which fill the queue, do not count.

On GPUs nothing of this was measured. A model of 8 H100 (stage 4; its assumptions are not measurements either) says:
partial 1.8 times the synchronous speed, 5 GPUs that sample beside 3 that train 1.9 times.
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

MODES = {
    "synchronous": ["batch.surplus=keep"],
    "partial": ["rollout.mode=partial", "rollout.max_staleness=2"],
    "asynchronous": ["rollout.mode=asynchronous", "rollout.max_staleness=2", "rollout.gpus=1"],
}
FILLING = 2  # steps
PROMPT = 400  # tokens, at most


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
            "max_sequences": 4 * prompts * group,
            "kv_cache_gb": 1,
        },
        "reward": {"cutoff": scale},
        "batch": {
            "prompts": prompts,
            "prompts_rolled_out": 3 * prompts,
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


def seconds_per_group(
    config: Path, mode: str, turn: int, steps: int, prompts: int, cores: int
) -> tuple[float, dict[str, float]]:
    """Of one run, and its other metrics, averaged over the steps that count."""
    name = f"{mode}_{turn}"
    given = [f"name={name}", f"steps={FILLING + steps}", f"seed={turn}", *MODES[mode]]
    threads = 1 if mode == "asynchronous" else cores
    command = [sys.executable, "-m", "dccot.train.rl", str(config), *given]
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"the {mode} run failed: {done.stderr[-2000:]}")
    lines = (config.parent / name / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines][FILLING:]
    means = {key: statistics.fmean(each[key] for each in rows) for key in ("time/engines_wait", "time/trainer_waits")}
    means |= {"staleness/mean": statistics.fmean(each.get("staleness/mean", 0.0) for each in rows)}
    return sum(each["time/step"] for each in rows) / (len(rows) * prompts), means


def run(quick: bool) -> list[dict]:
    scale, prompts, group, steps, turns = (20, 4, 2, 2, 1) if quick else (100, 8, 8, 8, 3)
    cores = 1 if quick else os.cpu_count() or 1
    found: dict[str, list[float]] = {mode: [] for mode in MODES}
    told: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        config = prepare(Path(folder), scale, prompts, group)
        for turn in range(turns):
            for mode in MODES:
                seconds, told[mode] = seconds_per_group(config, mode, turn, steps, prompts, cores)
                found[mode].append(seconds)
    best = {mode: min(seconds) for mode, seconds in found.items()}
    rows = [row(f"{mode}, seconds per trained group", seconds, "s") for mode, seconds in best.items()]
    for mode in ("partial", "asynchronous"):
        rows += [row(f"{mode} over synchronous", best["synchronous"] / best[mode], "×", 1.3, "higher")]
        rows += [row(f"{mode}, {what}", value, "") for what, value in told[mode].items()]
    return rows
