"""The report of runs: the paper's tables with our rows next to the paper's, trade-off plots, training curves,
wall-clock.

    dccot report runs/eval/dc-cot runs/eval/dsr runs/stage1 runs/stage2 --baseline dsr --out report/

A RUN is an evaluation (summary.json), a training run (metrics.jsonl) or a latency measurement (latency.json). Training
runs share one axis in the order given, as long as each starts from the one before it; one that does not gets its own
figure.

Writes report.html, one file that opens offline, and report.md with its figures next to it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from dccot.core.command import run_cleanly
from dccot.core.config import read_yaml, require
from dccot.core.files import BadData, read_jsonl
from dccot.core.statistics import ByProblem, Estimate, over_problems
from dccot.eval import latency, paper, plots
from dccot.eval.benchmarks import BENCHMARKS
from dccot.eval.document import Block, Cell, Document, Figure, Heading, Paragraph, Row, Table
from dccot.eval.results import SUMMARY, Evaluation
from dccot.eval.tables import (
    Method,
    checkpoints_table,
    compared_pairs,
    kinds_table,
    methods_of,
    papers_tables,
    responses_table,
    seeds_table,
    stages_table,
    table_1,
    table_2,
    totals_table,
)

ERRORS = (
    "± is the standard error of the mean with problems as the independent unit, however many responses each has; changes are paired by "
    "problem, and coloured where they exceed two standard errors."
)
PAPERS_ERRORS = (
    "In brackets: the standard error as the paper has it, which takes every response, or every subset of three, as independent, and is "
    "therefore smaller; for changes that of two independent sides."
)
CURVES = "Thin lines are single steps, thick ones running means, marks validation. Each stage begins where the one before it ended."


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
    require(
        not repeated, f"two evaluations are called {repeated[0] if repeated else ''!r}; rename one of their folders"
    )
    blocks: list[Block] = [Paragraph(note) for note in notes]
    if evaluations:
        blocks += _results(evaluations, baseline, kind, seeds)
    for folder in latencies:
        blocks += _latency(Path(folder))
    if training_runs:
        figures = chains([Path(run) for run in training_runs])
        blocks += [Heading("Training"), Paragraph(CURVES), *map(_training, figures), *_penalised(figures)]
        learnt = [stage for stages in figures for stage in stages if "reward/correct" in stage.rows[0]]
        if learnt:
            blocks.append(stages_table([(stage.name, stage.config, stage.rows) for stage in learnt]))
        if checkpoints := [table for run in training_runs if (table := checkpoints_table(Path(run)))]:
            blocks += [Heading("Checkpoints"), *checkpoints]
    document = Document(title, blocks)
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    (out / "report.md").write_text(document.markdown(out / "figures"), encoding="utf-8")
    page = out / "report.html"
    page.write_text(document.html(), encoding="utf-8")
    return page


def _results(
    evaluations: Sequence[Evaluation], baseline: str | Mapping[str, str] | None, kind: str | None, seeds: Sequence[Path]
) -> list[Block]:
    titles = {name: result.title for evaluation in evaluations for name, result in evaluation.results.items()}
    order = [*(name for name in BENCHMARKS if name in titles), *(name for name in titles if name not in BENCHMARKS)]
    titles = {name: titles[name] for name in order}
    methods = methods_of(evaluations)
    known = bool(set(titles) & set(paper.COLUMNS))
    pairs = compared_pairs(methods, baseline)
    errors = Paragraph(f"{ERRORS} {PAPERS_ERRORS}")
    blocks: list[Block] = [Heading("Accuracy and longest path"), table_1(methods, titles), errors]
    blocks += [Paragraph(text) for text in _unjudged(evaluations)]
    if pairs:
        blocks += [Heading("Change against the baseline"), table_2(pairs, titles)]
    hollow = "; hollow marks are the paper's." if known else "."
    how = Paragraph(f"Up and to the left is better. The dashed line is the Pareto front of our points{hollow}")
    blocks += [
        Heading("Accuracy against longest path"),
        how,
        *(_tradeoff(name, titles[name], methods) for name in titles),
    ]
    blocks += [Heading("The responses"), totals_table(methods, titles), responses_table(evaluations, titles)]
    if kind:
        blocks.append(kinds_table(evaluations, titles, kind))
    if seeds:
        blocks += [Heading("Seeds"), *(seeds_table(seeds, name, title) for name, title in titles.items())]
    if known:
        blocks.append(papers_tables())
    return blocks


def _unjudged(evaluations: Sequence[Evaluation]) -> list[str]:
    return [
        f"{evaluation.name} on {result.title}: {result.unjudged:,} of {sum(result.verdicts.values()):,} answers could not be judged "
        "(the grader ran out of time or memory); they count as wrong in the accuracies."
        for evaluation in evaluations
        for result in evaluation.results.values()
        if result.unjudged
    ]


def _tradeoff(name: str, title: str, methods: Sequence[Method]) -> Figure:
    def percent(means: ByProblem) -> Estimate:
        return over_problems({problem: 100 * value for problem, value in means.items()})

    points = [
        plots.Point(method.label, percent(found[0]), over_problems(found[1]), method.series, method.vote)
        for method in methods
        if (found := method.point(name))
    ]
    theirs = [
        plots.Point(label, *rows[name], vote="Maj" in label) for label, rows in paper.RESULTS.items() if name in rows
    ]
    return Figure(
        f"tradeoff_{name}", f"{title}: accuracy against longest path", *plots.tradeoff(title, [*points, *theirs])
    )


def _latency(folder: Path) -> list[Block]:
    try:
        found = json.loads((folder / latency.REPORT).read_text())
        rows = [latency.cells(level) for level in found["levels"]]
        timings = [row for _, row in read_jsonl(folder / "timings.jsonl")]
    except (ValueError, KeyError, FileNotFoundError) as error:
        raise BadData(
            f"{folder} is not what `dccot eval latency` writes ({type(error).__name__}: {error}); run it again"
        ) from None
    corner, *columns = rows[0]
    caption = f"{found['name']}, on {found['device']}: the same problems both ways. Pairs of figures are parallel / sequential."
    table = Table(
        caption, corner, [("", columns)], [Row(row[corner], [Cell(row[column]) for column in columns]) for row in rows]
    )
    caption = "Every measured response: how well longest path predicts seconds."
    return [
        Heading("Wall-clock per response"),
        table,
        Figure(f"latency_{folder.name}", caption, *plots.latency(timings), wide=True),
    ]


def chains(runs: Sequence[Path]) -> list[list[plots.Stage]]:
    """Training runs as figures: a run stays in the figure of the run before it if it says, or does not deny, that it
    started from it.
    """
    found: list[list[plots.Stage]] = []
    for index, run in enumerate(runs):
        try:
            rows = [row for _, row in read_jsonl(run / "metrics.jsonl")]
        except FileNotFoundError:
            raise BadData(f"{run} has no metrics.jsonl; a training run writes it from its first step on") from None
        require(bool(rows), f"{run}/metrics.jsonl holds no step yet")
        stage = plots.Stage(run.name, rows, read_yaml(run / "config.yaml") if (run / "config.yaml").exists() else {})
        if index and _starts_from(stage, runs[index - 1]):
            found[-1].append(stage)
        else:
            found.append([stage])
    return found


def _starts_from(stage: plots.Stage, before: Path) -> bool:
    path = (stage.config.get("model") or {}).get("path")
    return path is None or Path(path).resolve().is_relative_to(before.resolve())


def _training(stages: Sequence[plots.Stage]) -> Figure:
    names = " → ".join(stage.name for stage in stages)
    return Figure(f"training_{stages[-1].name}", names, *plots.training(stages), wide=True)


def _penalised(figures: Sequence[Sequence[plots.Stage]]) -> list[Figure]:
    """The runs under the high length penalty in one figure, if there are several."""
    runs = [
        stage
        for stages in figures
        for stage in stages
        if (stage.config.get("reward") or {}).get("kind") == "high_length_penalty"
    ]
    if len(runs) < 2:
        return []
    caption = "Under the high length penalty: " + ", ".join(run.name for run in runs) + "; marks are validation."
    return [Figure("penalised", caption, *plots.penalised(runs), wide=True)]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description="Tables, plots and training curves of runs as one HTML page and as Markdown.",
        epilog="example: dccot report runs/eval/dc-cot runs/eval/dsr runs/stage1 runs/stage2 --baseline dsr",
    )
    parser.add_argument(
        "runs", nargs="+", type=Path, metavar="RUN", help="folder of an evaluation, a training run or a latency run"
    )
    parser.add_argument("--baseline", help="name of the evaluation to compare with; default: the first sequential one")
    parser.add_argument("--title", default="Divide-and-Conquer CoT")
    parser.add_argument("--out", type=Path, default=Path("report"), help="folder to write to (default: report)")
    arguments = parser.parse_args(argv)

    def work() -> None:
        kinds: dict[str, list[Path]] = {SUMMARY: [], "metrics.jsonl": [], latency.REPORT: []}
        for run in arguments.runs:
            here = [folders for file, folders in kinds.items() if (run / file).is_file()]
            require(
                bool(here),
                f"{run} holds neither {', '.join(kinds)}; name folders that `dccot eval`, `dccot rl` or `dccot sft` wrote",
            )
            for folders in here:
                folders.append(run)
        evaluations = [Evaluation.load(folder) for folder in kinds[SUMMARY]]
        page = write_report(evaluations, kinds["metrics.jsonl"], arguments.out, arguments.title, baseline=arguments.baseline,
                            latencies=kinds[latency.REPORT])  # fmt: skip
        print(f"{page} (and report.md next to it)")

    return run_cleanly(work)


if __name__ == "__main__":
    sys.exit(main())
