"""`dccot bench all` (= `make bench`): every benchmark in its own process, one table, one JSON per benchmark.

    dccot bench all             dccot bench forest rollout             dccot bench attention --tree paper --profile

A benchmark is a module with `run(quick) -> rows` (harness.py); runs/bench/<benchmark>.json holds them as JSON.
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import time
from collections.abc import Sequence

from dccot.core.command import Parser
from dccot.lab.bench.harness import FOLDER, judged_quick, table, write

BENCHMARKS = {
    "forest": "dccot.lab.bench.forest",
    "kernels": "dccot.lab.bench.kernels",
    "rollout": "dccot.lab.bench.rollout",
    "train": "dccot.lab.bench.step",
    "context": "dccot.lab.bench.context",
    "token": "dccot.lab.bench.token",
    "eval": "dccot.lab.bench.grading",
    "serve": "dccot.lab.bench.serve",
    "load": "dccot.lab.bench.load",
    "rl": "dccot.lab.bench.rl",
}
KERNEL_BENCHMARKS = ("attention", "logprob")  # have their own options


def run_here(name: str, quick: bool) -> bool:
    module = importlib.import_module(BENCHMARKS[name])
    rows = module.run(quick)
    write(judged_quick(rows, getattr(module, "QUICK", {})) if quick else rows, FOLDER / f"{name}.json")
    return True


def run_apart(name: str, quick: bool) -> bool:
    command = [sys.executable, "-m", "dccot.lab.bench", name, "--here", *["--quick"] * quick]
    return subprocess.run(command, stdout=subprocess.DEVNULL).returncode == 0


def main(argv: Sequence[str] | None = None) -> int:
    argv = list(sys.argv[1:] if argv is None else argv)
    if argv and argv[0] in KERNEL_BENCHMARKS:
        return importlib.import_module("dccot.lab.bench.kernels").main(argv)
    parser = Parser(
        "Run benchmarks; results also in runs/bench/*.json.", "dccot bench forest rollout", prog="dccot bench"
    )
    known = f"all, or some of {', '.join(BENCHMARKS)}; {' and '.join(KERNEL_BENCHMARKS)} take options"
    parser.add_argument("names", nargs="+", help=known)
    parser.add_argument(
        "--quick", action="store_true", help="smaller sizes with targets of their own, to check that everything runs"
    )
    parser.add_argument("--here", action="store_true", help="run in this process instead of a separate one")
    arguments = parser.parse_args(argv)
    names = list(BENCHMARKS) if arguments.names == ["all"] else arguments.names
    if unknown := [name for name in names if name not in BENCHMARKS]:
        parser.error(f"no benchmark {unknown[0]!r}; there are {', '.join(BENCHMARKS)}")
    rows, failed = [], []
    for number, name in enumerate(names, start=1):
        print(f"[bench {number}/{len(names)}] {name} …", flush=True)
        start = time.perf_counter()
        if not (run_here if arguments.here else run_apart)(name, arguments.quick):
            failed.append(name)
            continue
        rows += json.loads((FOLDER / f"{name}.json").read_text())
        print(f"[bench {number}/{len(names)}] {name} took {time.perf_counter() - start:.0f} s", flush=True)
    print(table(rows))
    for name in failed:
        print(f"benchmark {name} failed; `dccot bench {name} --here` shows why", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
