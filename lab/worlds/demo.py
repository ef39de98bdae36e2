"""`dccot demo` (= `make demo`): the whole paper in miniature, on a CPU, in minutes.

    world → base model → its own solutions → rewritten in parallel → SFT → RL stages 1–4 → evaluation → report

The same trainer, engine and report as at full size (configs/mini/demo.yaml); configs/mini/mini.yaml adds the high
length penalty, and the same RL for the sequential base. After an interruption, a rerun resumes. At the end it prints
the table, a summary computed from it, and the paths of the report and the TensorBoard logs.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from dccot.core.command import CONTINUE, Parser, conclude, print_table, run_cleanly
from dccot.core.files import BadData
from dccot.core.run import Checkpoint, Run
from dccot.core.runtime import gpus
from dccot.core.statistics import Estimate
from dccot.data.problems import load_problems
from dccot.eval.results import Evaluation, rows_of
from dccot.pipeline import run_recipe
from dccot.preflight import checked_recipe
from dccot.stages import load_recipe

COLUMNS = {
    "pass@1 %": ("accuracy", 100),
    "maj@3 %": ("maj3_accuracy", 100),
    "longest path": ("longest_path", 1),
    "total tokens": ("total_tokens", 1),
    "parallelism": ("parallelism", 1),
    "well-formed %": ("well_formed", 100),
}


def cell(evaluation: Evaluation, measure: str, scale: int) -> str:
    estimate = evaluation.results["test"].estimate(measure)
    digits = 2 if measure == "parallelism" else 1
    return f"{estimate.value * scale:.{digits}f} ± {estimate.stderr * scale:.{digits}f}" if estimate else ""


def rl_history(evaluation: Evaluation, run: Path) -> list[tuple]:
    """Settings of every RL stage that led to an evaluated model, last one first: steps and reward terms."""
    model = Path(evaluation.model)
    found: list[tuple] = []
    while True:
        saved = Checkpoint.of_weights(model)
        settings = Run(run / (saved.run if saved else Run(model)).name).settings()
        if "reward" not in settings:  # a model that RL did not make
            return found
        step = saved.step if saved else settings["steps"]
        reward = [settings["reward"][key] for key in ("kind", "length_penalty", "cutoff")]
        found.append((settings["steps"], step, settings["filter"], *reward, settings["rollout"]["budget"]))
        model = Path(settings["model"]["path"])


def plain_words(rows: dict[str, Evaluation], run: Path) -> list[str]:
    """Sentences computed from the table of a finished run; models after RL are compared only if it was the same."""

    def of(name: str, measure: str) -> Estimate:
        estimate = rows[name].results["test"].estimate(measure)
        if estimate is None:
            raise BadData(f"{name} has no {measure}: evaluate it with n of at least 3")
        return estimate

    def points(name: str, other: str, measure: str = "accuracy") -> str:
        return f"{100 * (of(name, measure).value - of(other, measure).value):+.1f}"

    def against(name: str, other: str) -> str:
        change = 100 * (of(name, "longest_path").value / of(other, "longest_path").value - 1)
        return f"{abs(change):.0f}% {'longer' if change > 0 else 'shorter'}"

    def alike(name: str, other: str) -> bool:
        if not {name, other} <= rows.keys():
            return False
        history = rl_history(rows[name], run)
        return bool(history) and history == rl_history(rows[other], run)

    said = [
        f"The sequential base solves {100 * of('Base', 'accuracy').value:.1f}% of the test problems; SFT on its own "
        f"solutions, rewritten for workers, changes that by {points('SFT', 'Base')} points, and RL by a further "
        f"{points('DC-CoT', 'SFT')} (well-formed: {points('DC-CoT', 'SFT', 'well_formed')}).",
        f"The trained model thinks in parallel: its longest path is {against('DC-CoT', 'Base')} than the base's, "
        f"and {against('DC-CoT', 'SFT')} than after SFT alone.",
    ]
    for name, other, words in (
        ("DC-CoT", "Base-RL", "After the same RL as the base itself"),
        ("DC-CoT-HLP", "Base-HLP", "After the same high length penalty on top"),
    ):
        if alike(name, other):
            said.append(f"{words}: longest path {against(name, other)}, at {points(name, other)} points of accuracy.")
    return said


def main(argv: Sequence[str] | None = None) -> int:
    about = "The whole paper in miniature, on a CPU."
    parser = Parser(about, "dccot demo")
    add = parser.add_argument
    add("overrides", nargs="*", metavar="key=value", help="settings of the recipe, e.g. seed=1 name=demo1")
    add("--recipe", default="configs/mini/demo.yaml", help="default: %(default)s")
    add("--redo", action="append", default=[], metavar="STAGE", help="do a finished stage again; may be repeated")
    add("--processes", type=int, help="ranks; default: 2 where there are two GPUs, or no GPU and two cores")
    arguments = parser.read(argv)
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    processes = arguments.processes or min(2, gpus() or os.cpu_count() or 1)
    if "RANK" in os.environ or processes < 2:
        return run_cleanly(lambda: _run(arguments.recipe, arguments.overrides, arguments.redo))
    loaded = lambda: load_recipe(arguments.recipe, arguments.overrides)
    refused = run_cleanly(lambda: checked_recipe(*loaded(), processes, arguments.redo))  # once, not once per rank
    redo = [f"--redo={stage}" for stage in arguments.redo]
    return refused or _launch(processes, ["--recipe", arguments.recipe, *redo, *arguments.overrides])


def _launch(processes: int, arguments: Sequence[str]) -> int:
    """The demo as ranks of one thread each, as torchrun would start them: the same figures as one process, faster."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    os.environ.setdefault("OMP_NUM_THREADS", "1")
    logging.disable()  # of the launcher only: the ranks report their own
    try:
        torchrun(["--standalone", "--nproc_per_node", str(processes), "-m", "dccot.cli", "demo", *arguments])
    except SignalException:  # the ranks have received it as well
        return CONTINUE
    except ChildFailedError as failed:
        return failed.get_first_failure()[1].exitcode
    return 0


def _run(file: str, overrides: Sequence[str], redo: Sequence[str]) -> None:
    began = time.perf_counter()
    recipe = run_recipe(file, overrides, redo)
    if os.environ.get("RANK", "0") != "0":
        return
    rows = rows_of(recipe.folder)
    cells = [[name, *(cell(evaluation, *how) for how in COLUMNS.values())] for name, evaluation in rows.items()]
    print_table("test split, mean ± standard error over problems", ["model", *COLUMNS], cells)
    print("\n".join(plain_words(rows, recipe.folder)))
    example = load_problems(recipe.folder / "world/problems/test.jsonl")[0].question
    conclude(
        f"\n{recipe.folder}/report/report.html after {(time.perf_counter() - began) / 60:.1f} minutes; try",
        f'dccot solve {recipe.folder}/stage4 "{example}"',
        f"dccot view {recipe.folder}/stage4",
        f"dccot serve {recipe.folder}/stage4",
        f"tensorboard --logdir {recipe.folder}",
    )


if __name__ == "__main__":
    sys.exit(main())
