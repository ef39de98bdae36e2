"""Ranks that share a forest (sharding.context_parallel) against one rank: the same step, the same loss, side by side.

    dccot bench context

The training step of bench/step.py on one long response: on one rank with one thread, on one with two, and on two ranks
with one thread each that share the response over gloo. Each measurement has its own processes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from dccot.lab.bench.harness import row
from dccot.lab.bench.step import MODEL, make_model

TOKENS, QUICK_TOKENS = 8192, 4096
WAYS = {"one rank": (1, 1), "one rank, two threads": (1, 2), "two ranks": (2, 1)}  # ranks, threads of each


def measured(ranks: int, threads: int, tokens: int, folder: Path, repeats: int) -> dict[str, Any]:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
    command = [*launch, "-m", "dccot.lab.bench.step", "ours", str(tokens), str(folder), str(repeats)]
    env = os.environ | {"OMP_NUM_THREADS": str(threads)}
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
    return json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))


def run(quick: bool = False) -> list[dict]:
    tokens, repeats = (QUICK_TOKENS, 1) if quick else (TOKENS, 3)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "model"
        make_model(MODEL, folder)
        found = {way: measured(*layout, tokens, folder, repeats) for way, layout in WAYS.items()}
    alone, shared = found["one rank"], found["two ranks"]
    size = f"a response of {tokens:,} tokens"
    return [
        *(row(f"step, {way}, {size}", each["seconds"], "s") for way, each in found.items()),
        row(f"speed of two ranks against one, {size}", alone["seconds"] / shared["seconds"], "×"),
        *(row(f"peak memory of a rank, {way}", each["peak_bytes"] / 2**30, "GiB") for way, each in found.items()),
        row("difference of losses", abs(shared["loss"] - alone["loss"]) / alone["loss"], "relative", 1e-5),
    ]
