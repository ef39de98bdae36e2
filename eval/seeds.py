"""The same recipe with several seeds as one Markdown table: the mean over seeds and every seed's own value.

    python -m dccot.eval.seeds runs/mini runs/mini-seed1

Rows and their names are those of the recipe's report stage. A seed changes the task, the base model and every later
draw, so the spread is that of the whole method, not just of the test problems.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from dccot.core.command import run_cleanly
from dccot.core.config import read_yaml, require
from dccot.eval.results import LABELS, Evaluation

MEASURES = ("accuracy", "maj3_accuracy", "longest_path", "total_tokens", "parallelism", "well_formed")


def rows_of(run: Path) -> dict[str, Evaluation]:
    """Name in the tables → evaluation, as reported by the recipe in `run`."""
    recipe = read_yaml(run / "recipe.yaml")
    reports = [stage for stage in recipe["stages"].values() if stage["run"] == "report"]
    require(bool(reports), f"{run}/recipe.yaml has no report stage, which says what the rows are")
    return {shown: Evaluation.load(run / stage) for stage, shown in reports[0]["set"]["rows"].items()}


def by_seed(runs: Sequence[Path], benchmark: str) -> dict[str, list[str]]:
    """Name in the tables → `mean (first seed, second, …)` of each measure on `benchmark`."""
    by_run = [rows_of(run) for run in runs]
    for run, rows in zip(runs, by_run):
        lacking = [name for name in by_run[0] if name not in rows or benchmark not in rows[name].results]
        require(
            not lacking, f"{run} has no results of {', '.join(lacking)} on {benchmark!r}; compare runs of one recipe"
        )
    shown = {}
    for name in by_run[0]:
        cells = []
        for measure in MEASURES:
            found = [rows[name].results[benchmark].estimate(measure) for rows in by_run]
            scale = 100 if "%" in LABELS[measure] else 1
            values = [scale * estimate.value for estimate in found if estimate]
            digits = 2 if measure == "parallelism" else 1
            each = ", ".join(f"{value:.{digits}f}" for value in values)
            cells.append(f"{sum(values) / len(values):.{digits}f} ({each})" if values else "–")
        shown[name] = cells
    return shown


def table(runs: Sequence[Path], benchmark: str) -> str:
    """The same as Markdown."""
    lines = [["", *(LABELS[measure] for measure in MEASURES)], ["---", *["---:"] * len(MEASURES)]]
    lines += [[name, *cells] for name, cells in by_seed(runs, benchmark).items()]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description="Recipes that differ in their seed, as one Markdown table.",
        epilog="example: python -m dccot.eval.seeds runs/mini runs/mini-seed1",
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folder of a finished recipe")
    parser.add_argument("--benchmark", default="test", help="which of the evaluated sets (default: test)")
    arguments = parser.parse_args(argv)
    return run_cleanly(lambda: print(table(arguments.runs, arguments.benchmark)))


if __name__ == "__main__":
    sys.exit(main())
