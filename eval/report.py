"""The report of runs: the paper's tables with our rows next to the paper's, trade-off plots, training curves,
wall-clock.

    dccot report runs/eval/dc-cot runs/eval/dsr runs/stage1 runs/stage2 --baseline dsr --out report/
    dccot report runs/demo
    dccot report runs/mini runs/mini-seed1

A RUN is an evaluation (summary.json), a training run (metrics.jsonl), a latency measurement (latency.json) or the
folder of a recipe (recipe.yaml), which stands for what is finished of it. Training runs are drawn over each other, a
colour each; one that started from a run before it in the list begins where that ended. A table has the settings in
which runs, evaluations or recipes differ. Of recipes that differ in their seed only, the evaluations of the first are
shown, and the spread over all. A seed changes the task, the base model and every later draw, so the spread is that of
the whole method, not just of the test problems.

Writes report.html, one file that opens offline, and report.md with its figures next to it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from dccot.core.command import Parser, run_cleanly
from dccot.core.config import require
from dccot.core.files import BadData, read_jsonl
from dccot.core.progress import waiting
from dccot.core.run import METRICS, RECIPE, Run, history, trained_by
from dccot.core.statistics import ByProblem, Estimate, over_problems
from dccot.eval import latency, paper, plots, tables
from dccot.eval.document import Block, Cell, Figure, Grid, Heading, Row, Table, render, show, write_markdown
from dccot.eval.results import BENCHMARKS, DAMAGED, SUMMARY, Evaluation, Recipe

TITLE = "Divide-and-Conquer CoT"
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
BUDGETS = (
    "Curves: the share of responses that are right within a longest path of so many tokens. That is the accuracy under "
    "this budget, because no prompt names the budget."
)
CURVES = (
    "Thin lines are single steps, thick ones running means, marks validation. "
    "A run that continues another begins where that one ended."
)


def write_report(
    evaluations: Sequence[Evaluation],
    training_runs: Sequence[Path],
    out: str | Path,
    title: str = TITLE,
    notes: Sequence[Block] = (),
    *,
    baseline: str | Mapping[str, str] | None = None,
    latencies: Sequence[Path] = (),
    kind: str | None = None,
    seeds: Sequence[Path] = (),
) -> Path:
    """Write report.html and report.md into `out` and return the path of the page. `notes` open it.

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
    for folder, name in distinct(map(Path, latencies)).items():
        blocks += _latency(folder, name)
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
        blocks += [Heading("Change against the baseline"), tables.table_2(pairs, titles), *_training_behind(pairs)]
    hollow = "; hollow marks are the paper's." if known else "."
    how = f"Up and to the left is better. The dashed line is the Pareto front of our points{hollow}"
    drawn = [figure for name in titles for figure in (_tradeoff(name, titles[name], methods), *_budgets(name, methods))]
    blocks += [Heading("Accuracy against longest path"), how, BUDGETS, Grid(drawn), Heading("The responses")]
    blocks += [tables.totals_table(methods, titles), tables.responses_table(evaluations, titles)]
    blocks += tables.settings_table("evaluations", {each.name: _of_evaluation(each) for each in evaluations})
    if kind:
        blocks.append(tables.kinds_table(evaluations, titles, kind))
    if seeds:
        blocks += [Heading("Seeds"), *(tables.seeds_table(seeds, name, title) for name, title in titles.items())]
    if known:
        blocks.append(tables.papers_tables())
    return blocks


def _training_behind(pairs: Iterable[tuple[tables.Method, tables.Method]]) -> list[str]:
    """What the sides of a comparison were trained for, where they are not alike in it."""
    models = {each.evaluation.name: each.evaluation.model for pair in pairs for each in pair}
    if not all(Path(model).exists() for model in models.values()):
        return []  # runs that have been moved or deleted since
    steps: dict[str, dict[str, int]] = {name: {"SFT": 0, "RL": 0} for name in models}
    for name, model in models.items():
        for settings, count in history(model):
            steps[name]["RL" if "reward" in settings else "SFT"] += count
    if len({str(each) for each in steps.values()}) == 1:
        return []
    said = (", ".join(f"{count:,} of {kind}" for kind, count in each.items()) for each in steps.values())
    what = "; ".join(f"{name} {counts}" for name, counts in zip(steps, said))
    due = "Where the sides of a comparison differ in them, its change is due to training as well as to the method."
    return [f"Steps of training, as far as these runs know: {what}. {due}"]


def _of_evaluation(evaluation: Evaluation) -> dict:
    """Its settings, with the model as it is named on command lines."""
    known = {"model": evaluation.model, **evaluation.settings}
    run, step = trained_by(known["model"])
    known["model"] = f"{run}@{step}" if step else known["model"]
    return {key: value for key, value in known.items() if key != "model.sha256"}


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


def _budgets(name: str, methods: Sequence[tables.Method]) -> list[Figure]:
    """Of summaries that say how long each correct response is."""
    found = {m.label: m.evaluation.results[name] for m in methods if not m.vote and name in m.evaluation.results}
    curves = {label: (r.correct_paths, sum(r.verdicts.values())) for label, r in found.items() if r.correct_paths}
    if not curves:
        return []
    title = next(iter(found.values())).title
    caption = f"{title}: accuracy under every smaller budget"
    return [Figure(f"budgets_{name}", caption, *plots.pictures(plots.budgets, title, curves))]


def _latency(folder: Path, name: str) -> list[Block]:
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
    table = Table(f"{name}, on {found['device']}: {how}", corner, [("", columns)], cells)
    caption = "Every measured response: how well longest path predicts seconds."
    figure = Figure(f"latency_{name.replace('/', '_')}", caption, *plots.pictures(plots.latency, timings))
    return [Heading("Wall-clock per response"), table, figure]


# ---- training ----


def _training(runs: Sequence[Path]) -> list[Block]:
    blocks: list[Block] = []
    for heading, rl in (("Supervised fine-tuning", False), ("Reinforcement learning", True)):
        if not (stages := placed(runs, rl)):
            continue
        what, names = ("rl" if rl else "sft"), plots.branches(stages)
        blocks += [Heading(heading), CURVES]
        blocks.append(Figure(f"training_{what}", "; ".join(names.values()), *plots.pictures(plots.training, stages)))
        if rl and len(names) > 1:
            caption = "Accuracy against longest path while they were trained. Up and to the left is better."
            blocks += [caption, Grid([Figure("courses", caption, *plots.pictures(plots.courses, stages))])]
        if (penalised := [stage for stage in stages if _penalised(stage)]) != stages and len(penalised) > 1:
            again = [replace(stage, start=0, branch=number) for number, stage in enumerate(penalised)]
            caption = "Those under the high length penalty, each from its own first step."
            blocks.append(Figure("penalised", caption, *plots.pictures(plots.training, again)))
        blocks += tables.settings_table("runs", {stage.name: stage.config for stage in stages})
        if rl:
            blocks.append(tables.stages_table([(stage.name, stage.config, stage.rows) for stage in stages]))
    if checkpoints := [table for run in runs if (table := tables.checkpoints_table(Run(run)))]:
        blocks += [Heading("Checkpoints"), *checkpoints]
    return blocks


def placed(runs: Sequence[Path], rl: bool) -> list[plots.Stage]:
    """The runs of RL or of SFT. One that started from a run before it in the list begins where that was, and has its
    colour, unless another has it already.
    """
    found: dict[Path, plots.Stage] = {}
    continued = set[str]()
    for folder, name in distinct(runs).items():
        run = Run(folder)
        rows = run.rows()
        require(bool(rows), f"{run.metrics_file} holds no step; a training run writes it from its first step on")
        stage = plots.Stage(name, rows, run.settings(), branch=len({each.branch for each in found.values()}))
        if stage.rl != rl:
            continue
        model, above = (stage.config.get("model") or {}).get("path"), folder.parent
        origin, step = trained_by(model, above) if model else (run, None)
        if before := found.get(origin.folder.resolve()):
            stage = replace(stage, start=before.start + (step or before.rows[-1]["step"] + 1))
            if before.name not in continued:
                stage = replace(stage, branch=before.branch)
            continued.add(before.name)
        found[folder] = stage
    return list(found.values())


def distinct(folders: Iterable[Path]) -> dict[Path, str]:
    """Folders with as much of their paths as tells them apart."""
    paths = dict.fromkeys(folder.resolve() for folder in folders)
    every = ({path: "/".join(path.parts[-count:]) for path in paths} for count in itertools.count(1))
    return next(names for names in every if len(set(names.values())) == len(paths))


def _penalised(stage: plots.Stage) -> bool:
    return (stage.config.get("reward") or {}).get("kind") == "high_length_penalty"


# ---- the command ----


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(
        "Tables, plots and training curves of runs, over each other, as one HTML page and as Markdown.",
        "dccot report runs/eval/dc-cot runs/eval/dsr runs/stage1 runs/stage2 --baseline dsr",
    )
    holds = "folder of a training run, an evaluation, a latency run or a recipe"
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help=holds)
    parser.add_argument("--baseline", help="name of the evaluation to compare with; default: the first sequential one")
    parser.add_argument("--title", help="default: the recipe's, or Divide-and-Conquer CoT")
    parser.add_argument("--out", type=Path, default=Path("report"), help="folder to write to (default: report)")
    return run_cleanly(lambda: _report(parser.read(argv)))


def _report(arguments: argparse.Namespace) -> None:
    kinds: dict[str, list[Path]] = {SUMMARY: [], METRICS: [], latency.REPORT: [], RECIPE: []}
    for run in distinct(arguments.runs):
        here = [folders for file, folders in kinds.items() if (run / file).is_file()]
        remedy = "name folders that `dccot eval`, `dccot rl`, `dccot sft` or a recipe wrote"
        lacks = f"holds neither {', '.join(kinds)}" if run.is_dir() else "does not exist"
        require(bool(here), f"{run} {lacks}; {remedy}")
        for folders in here:
            folders.append(run)
    evaluations = [Evaluation.load(folder, name) for folder, name in distinct(kinds[SUMMARY]).items()]
    recipes = {name: Recipe.of(folder) for folder, name in distinct(kinds[RECIPE]).items()}
    seeds = kinds[RECIPE] if len(recipes) > 1 and not tables.settings_table("recipes", _but_for_seeds(recipes)) else []
    notes: list[Block] = []
    baselines: dict[str, str] = {}
    for name, recipe in recipes.items():
        kinds[METRICS] += [run for kind in ("sft", "rl") for run in recipe.folders(kind, METRICS)]
        kinds[latency.REPORT] += recipe.folders("latency", latency.REPORT)
        if recipe.run in seeds[1:]:
            continue
        of = f"{name}: " if len(recipes) > 1 and not seeds else ""
        for stage, row in recipe.report["rows"].items():
            if (recipe.run / stage / SUMMARY).is_file():
                evaluations.append(Evaluation.load(recipe.run / stage, of + row))
            else:
                notes.append(f"{of}{row} is missing: {recipe.run / stage} is not finished.")
        baselines |= {of + ours: of + theirs for ours, theirs in recipe.report["baselines"].items()}
    found = {method.label for method in tables.methods_of(evaluations)}
    pairs = {ours: theirs for ours, theirs in baselines.items() if {ours, theirs} <= found}
    only = next(iter(recipes.values())).report if len(recipes) == 1 or seeds else {}
    with waiting(f"drawing {arguments.out}/report.html"):
        page = write_report(
            evaluations,
            kinds[METRICS],
            arguments.out,
            arguments.title or only.get("title", TITLE),
            [*notes, *tables.settings_table("recipes", _but_for_seeds(recipes))],
            baseline=arguments.baseline or (not kinds[SUMMARY] and pairs) or None,
            latencies=kinds[latency.REPORT],
            kind=only.get("kind"),
            seeds=seeds,
        )
    show_comparison(evaluations)
    print(f"{page} (and report.md next to it)")


def _but_for_seeds(recipes: Mapping[str, Recipe]) -> dict[str, dict]:
    return {name: {**recipe.tree, "name": "", "seed": "", "output": ""} for name, recipe in recipes.items()}


if __name__ == "__main__":
    sys.exit(main())
