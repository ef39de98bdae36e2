"""The report of runs: the paper's tables with our rows next to the paper's, trade-off plots, training curves,
wall-clock.

    dccot report runs/eval/dc-cot runs/eval/dsr runs/stage1 runs/stage2 --baseline dsr --out report/
    dccot report runs/mini runs/mini-seed1

A RUN is an evaluation (summary.json), a training run (metrics.jsonl), a latency measurement (latency.json) or the
folder of a finished recipe (recipe.yaml). Training runs share one axis in the order given, as long as each starts from
the one before it; one that does not gets its own figure. Runs that continue the same stage are also drawn over each
other. Of a recipe, the evaluations in its own report are shown; of
several, which may differ in their seed only, those of the first and the spread over all. A seed changes the task, the
base model and every later draw, so the spread is that of the whole method, not just of the test problems.

Writes report.html, one file that opens offline, and report.md with its figures next to it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from dccot.core.command import Parser, run_cleanly
from dccot.core.config import require
from dccot.core.files import BadData, read_jsonl
from dccot.core.progress import waiting
from dccot.core.run import METRICS, RECIPE, Run
from dccot.core.statistics import ByProblem, Estimate, over_problems
from dccot.eval import latency, paper, plots, tables
from dccot.eval.document import Block, Cell, Figure, Grid, Heading, Row, Table, render, show, write_markdown
from dccot.eval.results import BENCHMARKS, DAMAGED, SUMMARY, Evaluation, rows_of

ERRORS = (
    "± is the standard error of the mean with problems as the independent unit, however many responses each has; "
    "changes are paired by problem, and coloured where they exceed two standard errors. In brackets: the standard "
    "error as the paper has it, which takes every response, or every subset of three, as independent, and is "
    "therefore smaller; for changes that of two independent sides."
)
APART = (
    "On all problems of a benchmark, ours and the paper's are means over the same problems, and the standard errors "
    "(s.e.) are those of drawing responses, as the paper computes them; for votes, those of N/3 votes without overlap, "
    "because subsets of three overlap. Where ours are only some of the problems, it is our standard error over "
    "problems. By chance alone, one figure in twenty is two standard errors off."
)
CURVES = (
    "Thin lines are single steps, thick ones running means, marks validation. "
    "Each stage begins where the one before it ended."
)


def write_report(
    evaluations: Sequence[Evaluation],
    training_runs: Sequence[Path],
    out: str | Path,
    title: str = "Divide-and-Conquer CoT",
    notes: Sequence[str] = (),
    *,
    baseline: str | Mapping[str, str] | None = None,
    latencies: Sequence[Path] = (),
    kind: str | None = None,
    seeds: Sequence[Path] = (),
) -> Path:
    """Write report.html and report.md into `out` and return the path of the page. `notes` open it, a paragraph each.

    `baseline` names the evaluation that the others are compared with, or says for each row of table 1 which row is its
    baseline. `kind`: a regular expression whose group extracts the kind of problem from its id, if ids contain it.
    `seeds`: folders of finished recipes that differ only in their seed; their spread is shown.
    """
    names = [evaluation.name for evaluation in evaluations]
    repeated = [name for name in names if names.count(name) > 1]
    require(not repeated, f"two evaluations are called {(*repeated, '')[0]!r}; rename one of their folders")
    blocks: list[Block] = list(notes)
    if evaluations:
        blocks += _results(evaluations, baseline, kind, seeds)
    for folder in latencies:
        blocks += _latency(Path(folder))
    if training_runs:
        blocks += _training([Path(run) for run in training_runs])
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    (out / "report.md").write_text(write_markdown(title, blocks, out / "figures"), encoding="utf-8")
    page = out / "report.html"
    page.write_text(render("report.html", title=title, blocks=blocks), encoding="utf-8")
    return page


def _results(
    evaluations: Sequence[Evaluation], baseline: str | Mapping[str, str] | None, kind: str | None, seeds: Sequence[Path]
) -> list[Block]:
    found = {name: result.title for evaluation in evaluations for name, result in evaluation.results.items()}
    titles = {name: found[name] for name in dict.fromkeys([*BENCHMARKS, *found]) if name in found}
    methods = tables.methods_of(evaluations)
    known = bool(set(titles) & set(paper.COLUMNS))
    blocks: list[Block] = [Heading("Accuracy and longest path"), tables.table_1(methods, titles), ERRORS]
    blocks += [
        f"{evaluation.name} on {result.title}: {result.unjudged:,} of {sum(result.verdicts.values()):,} answers could "
        "not be judged (the grader ran out of time or memory); they count as wrong in the accuracies."
        for evaluation in evaluations
        for result in evaluation.results.values()
        if result.unjudged
    ]
    if comparison := tables.against_paper(methods, titles):
        blocks += [Heading("Against the paper"), comparison, APART]
    if pairs := tables.compared_pairs(methods, baseline):
        blocks += [Heading("Change against the baseline"), tables.table_2(pairs, titles)]
    hollow = "; hollow marks are the paper's." if known else "."
    how = f"Up and to the left is better. The dashed line is the Pareto front of our points{hollow}"
    figures = Grid([_tradeoff(name, titles[name], methods) for name in titles])
    blocks += [Heading("Accuracy against longest path"), how, figures, Heading("The responses")]
    blocks += [tables.totals_table(methods, titles), tables.responses_table(evaluations, titles)]
    if kind:
        blocks.append(tables.kinds_table(evaluations, titles, kind))
    if seeds:
        blocks += [Heading("Seeds"), *(tables.seeds_table(seeds, name, title) for name, title in titles.items())]
    if known:
        blocks.append(tables.papers_tables())
    return blocks


def show_comparison(evaluations: Sequence[Evaluation]) -> None:
    """Print ours next to the paper's; nothing if the paper has none of these rows and benchmarks."""
    titles = {name: result.title for evaluation in evaluations for name, result in evaluation.results.items()}
    if table := tables.against_paper(tables.methods_of(evaluations), titles):
        show(table)


def _tradeoff(name: str, title: str, methods: Sequence[tables.Method]) -> Figure:
    def percent(means: ByProblem) -> Estimate:
        return over_problems({problem: 100 * value for problem, value in means.items()})

    points = [
        plots.Point(method.label, percent(found[0]), over_problems(found[1]), method.series, method.vote)
        for method in methods
        if (found := method.point(name))
    ]
    theirs = {label: rows[name] for label, rows in paper.RESULTS.items() if name in rows}
    points += [plots.Point(label, *result, vote="Maj" in label) for label, result in theirs.items()]
    return Figure(
        f"tradeoff_{name}", f"{title}: accuracy against longest path", *plots.pictures(plots.tradeoff, title, points)
    )


def _latency(folder: Path) -> list[Block]:
    try:
        found = json.loads((folder / latency.REPORT).read_text())
        rows = [latency.cells(level) for level in found["levels"]]
        if not (timings := [row for _, row in read_jsonl(folder / "timings.jsonl")]):
            raise ValueError("timings.jsonl has no row")
    except DAMAGED as error:
        what = f"{folder / latency.REPORT} is not what `dccot eval latency` writes ({type(error).__name__}: {error})"
        raise BadData(f"{what}; run it again") from None
    corner, *columns = rows[0]
    how = "the same problems both ways. Pairs of figures are parallel / sequential."
    cells = [Row(row[corner], [Cell(row[column]) for column in columns]) for row in rows]
    table = Table(f"{found['name']}, on {found['device']}: {how}", corner, [("", columns)], cells)
    caption = "Every measured response: how well longest path predicts seconds."
    figure = Figure(f"latency_{folder.name}", caption, *plots.pictures(plots.latency, timings))
    return [Heading("Wall-clock per response"), table, figure]


# ---- training ----


def _training(runs: Sequence[Path]) -> list[Block]:
    figures = chains(runs)
    every = [stage for stages in figures for stage in stages]
    blocks: list[Block] = [Heading("Training"), CURVES]
    for stages in figures:
        names = " → ".join(stage.name for stage in stages)
        blocks.append(Figure(f"training_{stages[-1].name}", names, *plots.pictures(plots.training, stages)))
    blocks += continuations(runs, every)
    if figure := penalised(every):
        blocks.append(figure)
    learnt = [(stage.name, stage.config, stage.rows) for stage in every if "reward/correct" in stage.rows[0]]
    if learnt:
        blocks.append(tables.stages_table(learnt))
    if checkpoints := [table for run in runs if (table := tables.checkpoints_table(Run(run)))]:
        blocks += [Heading("Checkpoints"), *checkpoints]
    return blocks


def chains(runs: Sequence[Path]) -> list[list[plots.Stage]]:
    """Training runs by figure: a run joins that of the run before it if it says, or does not deny, that it started
    from it.
    """
    found: list[list[plots.Stage]] = []
    for index, run in enumerate(map(Run, runs)):
        rows = run.rows()
        require(bool(rows), f"{run.metrics_file} holds no step; a training run writes it from its first step on")
        stage = plots.Stage(run.name, rows, run.settings())
        start = (stage.config.get("model") or {}).get("path")
        if index and (start is None or Path(start).resolve().is_relative_to(runs[index - 1].resolve())):
            found[-1].append(stage)
        else:
            found.append([stage])
    return found


def continuations(runs: Sequence[Path], stages: Sequence[plots.Stage]) -> list[Figure]:
    """For each of the runs that several others of RL started from, these in one figure, after its own steps."""
    learnt = [stage for stage in stages if "reward/correct" in stage.rows[0]]
    figures = []
    for run, before in zip(runs, stages):
        starts = [(stage, (stage.config.get("model") or {}).get("path")) for stage in learnt]
        after = [stage for stage, start in starts if start and Path(start).resolve().is_relative_to(run.resolve())]
        if len(after) > 1:
            caption = f"Continuations of {before.name}: " + ", ".join(stage.name for stage in after)
            drawn = plots.pictures(plots.overlaid, after, before if before in learnt else None)
            figures.append(Figure(f"continued_{before.name}", f"{caption}; marks are validation.", *drawn))
    return figures


def penalised(stages: Sequence[plots.Stage]) -> Figure | None:
    """The runs under the high length penalty in one figure, if there are several."""
    runs = [stage for stage in stages if (stage.config.get("reward") or {}).get("kind") == "high_length_penalty"]
    if len(runs) < 2:
        return None
    caption = "Under the high length penalty: " + ", ".join(run.name for run in runs) + "; marks are validation."
    return Figure("penalised", caption, *plots.pictures(plots.overlaid, runs, None))


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(
        "Tables, plots and training curves of runs as one HTML page and as Markdown.",
        "dccot report runs/eval/dc-cot runs/eval/dsr runs/stage1 runs/stage2 --baseline dsr",
    )
    holds = "folder of an evaluation, a training run, a latency run or a finished recipe"
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help=f"{holds}; recipes differ in their seed only")
    parser.add_argument("--baseline", help="name of the evaluation to compare with; default: the first sequential one")
    parser.add_argument("--title", default="Divide-and-Conquer CoT")
    parser.add_argument("--out", type=Path, default=Path("report"), help="folder to write to (default: report)")
    return run_cleanly(lambda: _report(parser.read(argv)))


def _report(arguments: argparse.Namespace) -> None:
    kinds: dict[str, list[Path]] = {SUMMARY: [], METRICS: [], latency.REPORT: [], RECIPE: []}
    for run in arguments.runs:
        here = [folders for file, folders in kinds.items() if (run / file).is_file()]
        remedy = "name folders that `dccot eval`, `dccot rl`, `dccot sft` or a recipe wrote"
        require(bool(here), f"{run} holds neither {', '.join(kinds)}; {remedy}")
        for folders in here:
            folders.append(run)
    recipes = kinds[RECIPE]
    evaluations = [Evaluation.load(folder) for folder in kinds[SUMMARY]]
    evaluations += rows_of(recipes[0]).values() if recipes else []
    also = {"baseline": arguments.baseline, "latencies": kinds[latency.REPORT], "seeds": recipes[1:] and recipes}
    with waiting(f"drawing {arguments.out}/report.html"):
        page = write_report(evaluations, kinds[METRICS], arguments.out, arguments.title, **also)
    show_comparison(evaluations)
    print(f"{page} (and report.md next to it)")


if __name__ == "__main__":
    sys.exit(main())
