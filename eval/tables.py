"""The report's tables: the paper's tables 1 and 2 with our rows above the paper's, and statistics of the responses."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dccot.core.config import ConfigError
from dccot.core.statistics import ByProblem, Estimate, difference, over_problems, relative_change
from dccot.eval import paper
from dccot.eval.benchmarks import BENCHMARKS
from dccot.eval.document import Cell, Fold, Row, Table
from dccot.eval.results import LABELS, Evaluation, shown
from dccot.eval.seeds import MEASURES, by_seed
from dccot.model.folder import best_checkpoint, kept_steps, validated_checkpoints

PAPER = "paper"
PAIR = ("accuracy", "longest_path")
NOT_MEASURED = (Cell("–"), Cell("–"))
Titles = Mapping[str, str]  # benchmark → heading, in the order of the columns


@dataclass(frozen=True)
class Method:
    """A row of table 1: an evaluation by single responses or by majority votes of three."""

    evaluation: Evaluation
    series: int
    vote: bool = False

    @property
    def label(self) -> str:
        return vote_label(self.evaluation.name) if self.vote else self.evaluation.name

    def means(self, benchmark: str, measure: str) -> ByProblem | None:
        return self.evaluation.measured(benchmark, ("maj3_" if self.vote else "") + measure)

    def pooled(self, benchmark: str, measure: str) -> float:
        """The paper's standard error of a measure; nan if unknown."""
        result = self.evaluation.results.get(benchmark)
        return result.pooled.get(("maj3_" if self.vote else "") + measure, math.nan) if result else math.nan

    def estimate(self, benchmark: str, measure: str) -> Estimate:
        """Its mean with the paper's error."""
        return Estimate(over_problems(self.means(benchmark, measure) or {}).value, self.pooled(benchmark, measure))

    def point(self, benchmark: str) -> tuple[ByProblem, ByProblem] | None:
        """Accuracy and longest path, if both were measured."""
        accuracy, longest = (self.means(benchmark, measure) for measure in PAIR)
        return (accuracy, longest) if accuracy and longest else None


def vote_label(name: str) -> str:
    """The row of an evaluation's majority votes: the paper's name for it, if it has one."""
    return paper.VOTES.get(name, f"{name}, maj@3")


def row_labels(names: Sequence[str]) -> list[str]:
    """The rows of evaluations with these names: each and its votes; the paper's rows in its order, if all are named as
    in the paper.
    """
    if all(name in paper.LAYOUT for name in names):
        return [label for label in paper.LAYOUT if label in names or label in [paper.VOTES.get(name) for name in names]]
    return [label for name in names for label in (name, vote_label(name))]


def methods_of(evaluations: Sequence[Evaluation]) -> list[Method]:
    found = []
    for number, evaluation in enumerate(evaluations):
        voted = any(evaluation.measured(name, "maj3_accuracy") for name in evaluation.results)
        found += [Method(evaluation, number), *([Method(evaluation, number, vote=True)] if voted else [])]
    labels = row_labels([evaluation.name for evaluation in evaluations])
    return sorted((method for method in found if method.label in labels), key=lambda method: labels.index(method.label))


def compared_pairs(methods: Sequence[Method], baseline: str | Mapping[str, str] | None) -> list[tuple[Method, Method]]:
    """Each row with its baseline row. By default the first sequential evaluation, or the first; votes with votes."""
    by_label = {method.label: method for method in methods}
    wanted = baseline if isinstance(baseline, Mapping) else {}
    unknown = [
        name
        for name in ({baseline} if isinstance(baseline, str) else {*wanted, *wanted.values()})
        if name not in by_label
    ]
    if unknown:
        raise ConfigError(f"no evaluation is called {unknown[0]!r}; there are {', '.join(by_label)}")
    if isinstance(baseline, Mapping):
        return [(by_label[ours], by_label[theirs]) for ours, theirs in wanted.items()]
    if baseline is None and (known := [pair for pair in paper.COMPARED_WITH.items() if {*pair} <= by_label.keys()]):
        return [(by_label[ours], by_label[theirs]) for ours, theirs in known]
    names = [method.evaluation.name for method in methods]
    sequential = [method.evaluation.name for method in methods if method.evaluation.method == "sequential"]
    chosen = baseline or (sequential or names)[0]
    others = [method for method in methods if method.evaluation.name != chosen]
    labels = [vote_label(chosen) if method.vote else chosen for method in others]
    return [(method, by_label[label]) for method, label in zip(others, labels) if label in by_label]


def table_1(methods: Sequence[Method], titles: Titles) -> Table:
    rows = []
    for method in methods:
        rows.append(Row(method.label, [_both_errors(method, name, measure) for name in titles for measure in PAIR]))
    return Table("Table 1. Accuracy (pass@1 or maj@3, %) and longest path length (LPL, tokens).", "Method", _columns(titles),
                 rows + papers_rows(titles))  # fmt: skip


def _cell(measure: str, means: ByProblem | None) -> Cell:
    return Cell(*shown(measure, over_problems(means))) if means else Cell("–")


def _both_errors(method: Method, benchmark: str, measure: str) -> Cell:
    cell = _cell(measure, method.means(benchmark, measure))
    return replace(cell, pooled=shown(measure, Estimate(math.nan, method.pooled(benchmark, measure)))[1])


def _words(text: str) -> Cell:
    return Cell(text, kind="words")


def _columns(titles: Titles) -> list[tuple[str, Sequence[str]]]:
    return [(title, ("Acc", "LPL")) for title in titles.values()]


def papers_rows(titles: Titles) -> list[Row]:
    """The paper's table 1, for its benchmarks that are in `titles`."""
    if not set(titles) & set(paper.COLUMNS):
        return []
    rows = []
    for number, (method, points) in enumerate(paper.RESULTS.items()):
        cells = [cell for name in titles for cell in (_papers_cells(*points[name]) if name in points else NOT_MEASURED)]
        rows.append(Row(method, cells, tag=PAPER, begins_block=number == 0))
    return rows


def _papers_cells(accuracy: Estimate, longest: Estimate) -> tuple[Cell, Cell]:
    return Cell(f"{accuracy.value:.2f}", pooled=f"{accuracy.stderr:.2f}"), Cell(
        f"{longest.value:.0f}", pooled=f"{longest.stderr:g}"
    )


def table_2(pairs: Sequence[tuple[Method, Method]], titles: Titles) -> Table:
    rows = []
    for ours, theirs in pairs:
        cells = [_words(theirs.label)]
        for name in titles:
            if (found := ours.point(name)) and (base := theirs.point(name)):
                points, percent = _points(difference(found[0], base[0])), _percent(relative_change(found[1], base[1]))
                pooled = _pooled_changes(
                    *((ours.estimate(name, measure), theirs.estimate(name, measure)) for measure in PAIR)
                )
                cells += [
                    replace(points, pooled=_error(100 * pooled[0], 2)),
                    replace(percent, pooled=_error(100 * pooled[1], 1)),
                ]
            else:
                cells += NOT_MEASURED
        rows.append(Row(ours.label, cells))
    return Table("Table 2. Change in accuracy (points) and longest path length (%) against the baseline.", "Method",
                 [("", ("Baseline",)), *_columns(titles)], rows + papers_changes(titles))  # fmt: skip


def papers_changes(titles: Titles) -> list[Row]:
    """The paper's table 2, computed from its table 1."""
    if not set(titles) & set(paper.COLUMNS):
        return []
    rows = []
    for number, (method, compared) in enumerate(paper.COMPARED_WITH.items()):
        cells = [_words(compared)]
        for name in titles:
            if name not in paper.COLUMNS:
                cells += NOT_MEASURED
                continue
            (accuracy, longest), (base_accuracy, base_longest) = (
                paper.RESULTS[method][name],
                paper.RESULTS[compared][name],
            )
            pooled = _pooled_changes((accuracy, base_accuracy), (longest, base_longest))
            cells.append(Cell(_signed(accuracy.value - base_accuracy.value, 2), pooled=_error(pooled[0], 2)))
            cells.append(
                Cell(
                    f"{_signed(100 * (longest.value / base_longest.value - 1), 1)}%", pooled=_error(100 * pooled[1], 1)
                )
            )
        rows.append(Row(method, cells, tag=PAPER, begins_block=number == 0))
    return rows


def _pooled_changes(accuracy: tuple[Estimate, Estimate], longest: tuple[Estimate, Estimate]) -> tuple[float, float]:
    """Errors of a difference and of a ratio − 1 from those of the two sides, treated as independent."""
    (ours, theirs), (top, bottom) = accuracy, longest
    ratio = (
        math.hypot(top.stderr, top.value / bottom.value * bottom.stderr) / bottom.value if bottom.value else math.nan
    )
    return math.hypot(ours.stderr, theirs.stderr), ratio


def _points(change: Estimate) -> Cell:
    kind = ("better" if change.value > 0 else "worse") if change.clear else ""
    return Cell(_signed(100 * change.value, 2), _error(100 * change.stderr, 2), kind)


def _percent(change: Estimate) -> Cell:
    kind = ("better" if change.value < 0 else "worse") if change.clear else ""
    return Cell(f"{_signed(100 * change.value, 1)}%", _error(100 * change.stderr, 1), kind)


def _signed(number: float, decimals: int) -> str:
    return f"{number:+.{decimals}f}".replace("-", "−")


def _error(error: float, decimals: int) -> str:
    return "" if math.isnan(error) else f"{error:.{decimals}f}"


def totals_table(methods: Sequence[Method], titles: Titles) -> Table:
    """Total tokens per response; of votes, those of all three."""
    rows = [
        Row(method.label, [_cell("total_tokens", method.means(name, "total_tokens")) for name in titles])
        for method in methods
    ]
    caption = "Total tokens per response, workers included; a vote counts its three responses."
    return Table(caption, "Method", [("", tuple(titles.values()))], rows + papers_totals(titles))


def papers_totals(titles: Titles) -> list[Row]:
    if not set(titles) & set(paper.COLUMNS):
        return []
    return [
        Row(
            method,
            [Cell(str(totals[name]) if name in totals else "–") for name in titles],
            PAPER,
            begins_block=number == 0,
        )
        for number, (method, totals) in enumerate(paper.TOTAL_TOKENS.items())
    ]


def responses_table(evaluations: Sequence[Evaluation], titles: Titles) -> Table:
    measures = ("total_tokens", "parallelism", "spawned", "well_formed", "truncated")
    rows: list[Row] = []
    for name, title in titles.items():
        ours = [evaluation for evaluation in evaluations if name in evaluation.results]
        for number, evaluation in enumerate(ours):
            result = evaluation.results[name]
            asked = [
                _words(title),
                _words(evaluation.method),
                Cell(f"{evaluation.budget:,}"),
                Cell(f"{result.problems}×{result.samples}"),
            ]
            measured = [_cell(measure, result.by_problem[measure]) for measure in measures]
            rows.append(Row(evaluation.name, [*asked, *measured], begins_block=number == 0 and bool(rows)))
    columns = ("Benchmark", "method", "budget", "responses", *(LABELS[measure] for measure in measures))
    caption = "What the responses are made of. Truncated: ended by budget or context rather than by itself."
    return Table(caption, "Method", [("", columns)], rows)


def kinds_table(evaluations: Sequence[Evaluation], titles: Titles, kind: str) -> Table:
    """Results by kind of problem; `kind` is a regular expression whose group finds the kind in a problem's id."""
    measures = ("accuracy", "longest_path", "spawned")
    rows = []
    for name, title in titles.items():
        ours = [evaluation for evaluation in evaluations if name in evaluation.results]
        problems = ours[0].results[name].by_problem["longest_path"]
        kinds = {problem: found[1] for problem in problems if (found := re.search(kind, problem))}
        for each in dict.fromkeys(sorted(kinds.values())):
            for number, evaluation in enumerate(ours):
                table = evaluation.results[name].by_problem
                cells = [{p: v for p, v in table[measure].items() if kinds.get(p) == each} for measure in measures]
                rows.append(
                    Row(
                        evaluation.name,
                        [_words(title), _words(each), *map(_cell, measures, cells)],
                        begins_block=number == 0,
                    )
                )
    columns = ("Benchmark", "kind", *(LABELS[measure] for measure in measures))
    return Table("The same by kind of problem.", "Method", [("", columns)], rows)


STAGE_MEASURES = {
    "correct (%)": ("reward/correct", 100, ".1f"),
    "well-formed (%)": ("reward/well_formed", 100, ".1f"),
    "spawned (%)": ("parallel/spawn_rate", 100, ".1f"),
    "longest path": ("length/longest_path", 1, ".1f"),
    "entropy": ("policy/entropy", 1, ".2g"),
    "its 80th percentile": ("policy/entropy_p80", 1, ".2g"),
    "90th": ("policy/entropy_p90", 1, ".2g"),
}


def stages_table(stages: Sequence[tuple[str, Mapping, Sequence[Mapping]]]) -> Table:
    """How each RL stage began and ended. A stage: its name, its configuration, the rows of its metrics.jsonl."""
    rows = []
    for name, config, steps in stages:
        quarter = max(1, len(steps) // 4)
        cells = [
            Cell(str(len(steps))),
            _words((config.get("objective") or {}).get("kind", "")),
            _words(config.get("filter") or ""),
        ]
        for metric, scale, digits in STAGE_MEASURES.values():
            values = [scale * row[metric] for row in steps if metric in row]
            ends = [sum(part) / len(part) for part in (values[:quarter], values[-quarter:]) if part]
            cells.append(Cell(" → ".join(format(end, digits) for end in ends)))
        rows.append(Row(name, cells))
    caption = "What each stage of reinforcement learning did to its own rollouts: mean of its first → of its last quarter of steps."
    return Table(caption, "Stage", [("", ("steps", "objective", "filter", *STAGE_MEASURES))], rows)


def checkpoints_table(run: Path) -> Fold | None:
    """Every checkpoint of a run that was validated or still exists, for choosing among them; None if there is none."""
    validated, kept = {each.step: each for each in validated_checkpoints(run)}, kept_steps(run)
    if not validated:
        return None
    best = best_checkpoint(run).step if validated.keys() & set(kept) else None
    rows = []
    for step in sorted({*validated, *kept}):
        found = validated.get(step)
        accuracy, longest = (100 * found.accuracy, found.longest_path) if found else (math.nan, math.nan)
        cells = [
            Cell("–" if math.isnan(accuracy) else f"{accuracy:.2f}"),
            Cell("–" if math.isnan(longest) else f"{longest:,.0f}"),
        ]
        weights = f"{run.name}@{step}" + (" (= @best)" if step == best else "") if step in kept else "not kept"
        rows.append(Row(str(step), [*cells, _words(weights)]))
    chosen = f"@best is step {best}" if best is not None else "no checkpoint that was validated is still there"
    caption = "Validation of the weights after each step. @best: the highest accuracy of those still there, of equal ones the shortest."
    columns = ("validation accuracy (%)", "longest path", "weights")
    return Fold(
        f"{run.name}: {len(validated)} checkpoints validated; {chosen}", [Table(caption, "Step", [("", columns)], rows)]
    )


def seeds_table(runs: Sequence[Path], benchmark: str, title: str) -> Table:
    """Recipes that differ in their seed, side by side."""
    rows = [Row(name, [Cell(text) for text in cells]) for name, cells in by_seed(runs, benchmark).items()]
    caption = f"{title}, {len(runs)} seeds: the mean over seeds (each seed's own value: {', '.join(run.name for run in runs)})."
    return Table(caption, "Method", [("", tuple(LABELS[measure] for measure in MEASURES))], rows)


def papers_tables() -> Fold:
    titles = {name: BENCHMARKS[name].title for name in paper.COLUMNS}
    return Fold(
        "The paper's own results on all its benchmarks",
        [
            Table("The paper's table 1, with the ± of its appendix.", "Method", _columns(titles), papers_rows(titles)),
            Table("The paper's table 2.", "Method", [("", ("Baseline",)), *_columns(titles)], papers_changes(titles)),
            Table("The paper's total tokens per response.", "Method", [("", tuple(titles.values()))], papers_totals(titles)),
        ],
    )  # fmt: skip
