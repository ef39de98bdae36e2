"""`dccot bench all` (= `make bench`): every benchmark in its own process, one table, one JSON per benchmark.

    dccot bench all                     dccot bench forest rollout                     dccot bench attention --tree paper --profile

A benchmark is a module with `run(quick) -> list[{name, value, unit, target, better}]`; `better` is "higher" or "lower"
and `target` may be None. Anything that could not be measured has the value None and a `reason`.
runs/bench/<benchmark>.json holds the list as JSON.
"""

from __future__ import annotations

import argparse
import importlib
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

BENCHMARKS = {
    "forest": "dccot.lab.bench.forest",
    "kernels": "dccot.lab.bench.kernels",
    "rollout": "dccot.lab.bench.rollout",
    "train": "dccot.lab.bench.step",
    "token": "dccot.lab.bench.token",
    "eval": "dccot.lab.bench.grading",
    "serve": "dccot.lab.bench.serve",
}
KERNEL_BENCHMARKS = ("attention", "logprob")  # have their own options
FOLDER = Path("runs/bench")


def falls_short(row: dict) -> bool:
    """Whether a row misses its target."""
    if row["target"] is None or row["value"] is None:
        return False
    return row["value"] < row["target"] if row["better"] == "higher" else row["value"] > row["target"]


def table(rows: Sequence[dict]) -> str:
    def number(value: float | None) -> str:
        return "" if value is None else f"{value:,.4g}"

    cells = [
        (row["name"], number(row["value"]), row["unit"], ("≥ " if row["better"] == "higher" else "≤ ") + number(row["target"])
         if row["target"] is not None else "", "short" if falls_short(row) else row.get("reason", ""))
        for row in rows
    ]  # fmt: skip
    cells = [("benchmark", "value", "unit", "target", ""), *cells]
    widths = [max(len(row[i]) for row in cells) for i in range(5)]
    return "\n".join(
        f"{a:<{widths[0]}}  {b:>{widths[1]}}  {c:<{widths[2]}}  {d:<{widths[3]}}  {e}".rstrip()
        for a, b, c, d, e in cells
    )


def run_one(name: str, quick: bool) -> list[dict]:
    rows = importlib.import_module(BENCHMARKS[name]).run(quick)
    FOLDER.mkdir(parents=True, exist_ok=True)
    (FOLDER / f"{name}.json").write_text(json.dumps(rows, indent=1) + "\n")
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    argv = list(sys.argv[1:] if argv is None else argv)
    if argv and argv[0] in KERNEL_BENCHMARKS:
        return importlib.import_module("dccot.lab.bench.kernels").main(argv)
    parser = argparse.ArgumentParser(
        description="Run benchmarks; results also in runs/bench/*.json.", epilog="example: dccot bench forest rollout"
    )
    parser.add_argument(
        "names",
        nargs="+",
        help=f"all, or some of {', '.join(BENCHMARKS)}; {' and '.join(KERNEL_BENCHMARKS)} take options",
    )
    parser.add_argument("--quick", action="store_true", help="smaller sizes, to check that everything runs")
    parser.add_argument("--here", action="store_true", help="run in this process instead of a separate one")
    arguments = parser.parse_args(argv)
    names = list(BENCHMARKS) if arguments.names == ["all"] else arguments.names
    unknown = [name for name in names if name not in BENCHMARKS]
    if unknown:
        parser.error(f"no benchmark {unknown[0]!r}; there are {', '.join(BENCHMARKS)}")
    rows, failed = [], []
    for number, name in enumerate(names, start=1):
        print(f"[bench {number}/{len(names)}] {name} …", flush=True)
        start = time.perf_counter()
        if arguments.here:
            rows += run_one(name, arguments.quick)
        else:
            command = [sys.executable, "-m", "dccot.bench", name, "--here", *(["--quick"] if arguments.quick else [])]
            if subprocess.run(command, stdout=subprocess.DEVNULL).returncode:
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
