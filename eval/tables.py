"""The report's tables: the paper's tables 1 and 2 with our rows above the paper's, and statistics of the responses."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from textwrap import shorten

from dccot.core.config import ConfigError, require
from dccot.core.run import Run
from dccot.core.statistics import ByProblem, Estimate, difference, over_problems, relative_change
from dccot.data.problems import PRESETS
from dccot.eval import paper
from dccot.eval.document import Cell, Fold, Row, Table
from dccot.eval.results import BENCHMARKS, LABELS, Evaluation, rows_of, shown

PAIR = ("accuracy", "longest_path")
DASH = Cell("–")
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

    def estimate(self, benchmark: str, measure: str) -> Estimate:
        """Its mean with the paper's standard error; nan if unknown."""
        result = self.evaluation.results.get(benchmark)
        error = result.pooled.get(("maj3_" if self.vote else "") + measure, math.nan) if result else math.nan
        return Estimate(over_problems(self.means(benchmark, measure) or {}).value, error)

    def point(self, benchmark: str) -> tuple[ByProblem, ByProblem] | None:
        """Accuracy and longest path, if both were measured."""
        accuracy, longest = (self.means(benchmark, measure) for measure in PAIR)
        return (accuracy, longest) if accuracy and longest else None


def vote_label(name: str) -> str:
    """The row of an evaluation's majority votes: the paper's name for it, if it has one."""
    return paper.VOTES.get(name, f"{name}, maj@3")


def row_labels(names: Sequence[str]) -> list[str]:
    """The rows of evaluations with these names: each and its votes; in the paper's order if the paper has them all."""
    if all(name in paper.LAYOUT for name in names):
        return [label for label in paper.LAYOUT if label in names or label in [paper.VOTES.get(name) for name in names]]
    return [label for name in names for label in (name, vote_label(name))]


def methods_of(evaluations: Sequence[Evaluation]) -> list[Method]:
    found = []
    for number, evaluation in enumerate(evaluations):
        voted = any(evaluation.measured(name, "maj3_accuracy") for name in evaluation.results)
        found += [Method(evaluation, number, vote) for vote in ((False, True) if voted else (False,))]
    labels = row_labels([evaluation.name for evaluation in evaluations])
    return sorted((method for method in found if method.label in labels), key=lambda method: labels.index(method.label))


def compared_pairs(methods: Sequence[Method], baseline: str | Mapping[str, str] | None) -> list[tuple[Method, Method]]:
    """Each row with its baseline row. By default the first sequential evaluation, or the first; votes with votes."""
    by_label = {method.label: method for method in methods}
    named = [baseline] if isinstance(baseline, str) else [*baseline, *baseline.values()] if baseline else []
    for name in named:
        if name not in by_label:
            raise ConfigError(f"no evaluation is called {name!r}; the evaluations are {', '.join(by_label)}")
    known = {ours: theirs for ours, theirs in paper.COMPARED_WITH.items() if {ours, theirs} <= by_label.keys()}
    pairs = known if baseline is None and known else baseline
    if isinstance(pairs, Mapping):
        return [(by_label[ours], by_label[theirs]) for ours, theirs in pairs.items()]
    sequential = [method.evaluation.name for method in methods if method.evaluation.method == "sequential"]
    chosen = pairs or [*sequential, *(method.evaluation.name for method in methods)][0]
    others = [method for method in methods if method.evaluation.name != chosen]
    labels = [vote_label(chosen) if method.vote else chosen for method in others]
    return [(method, by_label[label]) for method, label in zip(others, labels) if label in by_label]


# ---- cells ----


def _cell(measure: str, means: ByProblem | None) -> Cell:
    return Cell(*shown(measure, over_problems(means))) if means else DASH


def _words(text: str) -> Cell:
    return Cell(text, kind="words")


def _columns(titles: Titles) -> list[tuple[str, Sequence[str]]]:
    return [(title, ("Acc", "LPL")) for title in titles.values()]


def _paper_rows(methods: Iterable[str], titles: Titles, cells: Callable[[str, str], Sequence[Cell]]) -> list[Row]:
    """Rows of the paper, `cells` of each method and benchmark; none if `titles` has none of its benchmarks."""
    if not set(titles) & set(paper.COLUMNS):
        return []
    return [
        Row(method, [cell for name in titles for cell in cells(method, name)], "paper", begins_block=number == 0)
        for number, method in enumerate(methods)
    ]


# ---- tables 1 and 2 ----


def table_1(methods: Sequence[Method], titles: Titles) -> Table:
    def cell(method: Method, name: str, measure: str) -> Cell:
        papers_error = Estimate(math.nan, method.estimate(name, measure).stderr)
        return replace(_cell(measure, method.means(name, measure)), pooled=shown(measure, papers_error)[1])

    rows = [Row(each.label, [cell(each, name, measure) for name in titles for measure in PAIR]) for each in methods]
    caption = "Table 1. Accuracy (pass@1 or maj@3, %) and longest path length (LPL, tokens)."
    return Table(caption, "Method", _columns(titles), rows + papers_results(titles))


def papers_results(titles: Titles) -> list[Row]:
    """The paper's table 1, for its benchmarks that are in `titles`."""

    def cells(method: str, name: str) -> Sequence[Cell]:
        if name not in paper.COLUMNS:
            return DASH, DASH
        accuracy, longest = paper.RESULTS[method][name]
        return (
            Cell(f"{accuracy.value:.2f}", pooled=f"{accuracy.stderr:.2f}"),
            Cell(f"{longest.value:.0f}", pooled=f"{longest.stderr:g}"),
        )

    return _paper_rows(paper.RESULTS, titles, cells)


def table_2(pairs: Sequence[tuple[Method, Method]], titles: Titles) -> Table:
    rows = []
    for ours, theirs in pairs:
        cells = [_words(theirs.label)]
        for name in titles:
            found, base = ours.point(name), theirs.point(name)
            if found and base:
                pooled = _independent(*([each.estimate(name, measure) for measure in PAIR] for each in (ours, theirs)))
                paired = difference(found[0], base[0]), relative_change(found[1], base[1])
                cells += _changes(paired, [change.stderr for change in pooled])
            else:
                cells += [DASH, DASH]
        rows.append(Row(ours.label, cells))
    caption = "Table 2. Change in accuracy (points) and longest path length (%) against the baseline."
    return Table(caption, "Method", [("", ("Baseline",)), *_columns(titles)], rows + papers_changes(titles))


def papers_changes(titles: Titles) -> list[Row]:
    """The paper's table 2, computed from its table 1."""

    def cells(method: str, name: str) -> Sequence[Cell]:
        if name not in paper.COLUMNS:
            return DASH, DASH
        ours, theirs = (
            (Estimate(accuracy.value / 100, accuracy.stderr / 100), longest)
            for accuracy, longest in (paper.RESULTS[label][name] for label in (method, paper.COMPARED_WITH[method]))
        )
        changes = _independent(ours, theirs)
        return _changes([Estimate(change.value) for change in changes], [change.stderr for change in changes])

    rows = _paper_rows(paper.COMPARED_WITH, titles, cells)
    return [replace(row, cells=[_words(paper.COMPARED_WITH[row.label]), *row.cells]) for row in rows]


def _independent(ours: Sequence[Estimate], theirs: Sequence[Estimate]) -> tuple[Estimate, Estimate]:
    """Difference of the accuracies and ratio − 1 of the lengths of two sides, as if they were independent."""
    (accuracy, longest), (base, bottom) = ours, theirs
    ratio, error = math.nan, math.nan
    if bottom.value:
        ratio = longest.value / bottom.value
        error = math.hypot(longest.stderr, ratio * bottom.stderr) / bottom.value
    points = Estimate(accuracy.value - base.value, math.hypot(accuracy.stderr, base.stderr))
    return points, Estimate(ratio - 1, error)


def _changes(changes: Sequence[Estimate], pooled: Sequence[float]) -> list[Cell]:
    """Cells of a change in accuracy, where more is better, and in length, where less is."""
    cells = []
    for change, paper_error, better, decimals, unit in zip(changes, pooled, (1, -1), (2, 1), ("", "%")):
        text = f"{100 * change.value:+.{decimals}f}{unit}".replace("-", "−")
        kind = ("better" if better * change.value > 0 else "worse") if change.clear else ""
        errors = ["" if math.isnan(e) else f"{100 * e:.{decimals}f}" for e in (change.stderr, paper_error)]
        cells.append(Cell(text, errors[0], kind, errors[1]))
    return cells


# ---- our figures against the paper's ----

FAR = 3.0  # standard errors from which a difference is marked


def against_paper(methods: Sequence[Method], titles: Titles) -> Table | None:
    """Rows and benchmarks that the paper has too: ours, its own, and their difference in standard errors."""
    rows: list[Row] = []
    for method in (each for each in methods if each.label in paper.RESULTS):
        known = [name for name in titles if name in paper.COLUMNS and method.point(name)]
        for number, name in enumerate(known):
            result = method.evaluation.results[name]
            cells = [_words(titles[name]), Cell(f"{result.problems} × {result.samples}")]
            for measure in PAIR:
                cells += _reproduced(measure, *_sides(method, name, measure))
            rows.append(Row(method.label, cells, begins_block=number == 0 and bool(rows)))
    columns = ("ours", "paper", "off by", "in s.e.")
    groups = [("", ("Benchmark", "responses")), ("Accuracy (%)", columns), ("Longest path (tokens)", columns)]
    caption = f"Our figures against the paper's. Marked: more than {FAR:g} standard errors (s.e.) apart."
    return Table(caption, "Method", groups, rows) if rows else None


def _sides(method: Method, name: str, measure: str) -> tuple[Estimate, Estimate]:
    """Ours and the paper's, with the errors of their difference: those of drawing responses, and of drawing problems if
    ours are only some of the paper's.

    Subsets of three overlap, so the error of votes that takes them as independent is far too small. That of N/3 votes
    without overlap is an upper bound; the paper's is ours, for its own N.
    """
    result, theirs = method.evaluation.results[name], paper.RESULTS[method.label][name][PAIR.index(measure)]
    scale = 0.01 if measure == "accuracy" else 1
    ours, error = method.estimate(name, measure), theirs.stderr * scale
    if method.vote:
        n = result.samples
        ours = replace(ours, stderr=ours.stderr * math.sqrt((n - 1) * (n - 2) / 2))
        error = ours.stderr * math.sqrt(n / BENCHMARKS[name].samples)
    if result.problems < (PRESETS[name].count or 0):
        ours = over_problems(method.means(name, measure) or {})
    return ours, Estimate(theirs.value * scale, error)


def _reproduced(measure: str, ours: Estimate, theirs: Estimate) -> list[Cell]:
    apart, error = ours.value - theirs.value, math.hypot(ours.stderr, theirs.stderr)
    sigmas = apart / error if error > 0 else math.nan
    sign, (size, _) = "−" if apart < 0 else "+", shown(measure, Estimate(abs(apart)))
    cells = [Cell(*shown(measure, ours)), Cell(shown(measure, theirs)[0]), Cell(f"{sign}{size}")]
    far = Cell(f"{sign}{abs(sigmas):.1f}", kind="worse" if abs(sigmas) > FAR else "")
    return [*cells, DASH if math.isnan(sigmas) else far]


# ---- the responses ----


def totals_table(methods: Sequence[Method], titles: Titles) -> Table:
    """Total tokens per response; of votes, those of all three."""
    measure = "total_tokens"
    rows = [Row(each.label, [_cell(measure, each.means(name, measure)) for name in titles]) for each in methods]
    caption = "Total tokens per response, workers included; a vote counts its three responses."
    return Table(caption, "Method", [("", tuple(titles.values()))], rows + papers_totals(titles))


def papers_totals(titles: Titles) -> list[Row]:
    totals = paper.TOTAL_TOKENS
    return _paper_rows(totals, titles, lambda method, name: [Cell(str(totals[method].get(name, "–")))])


def responses_table(evaluations: Sequence[Evaluation], titles: Titles) -> Table:
    measures = ("total_tokens", "parallelism", "spawned", "width", "well_formed", "truncated")
    rows: list[Row] = []
    for name, title in titles.items():
        ours = [evaluation for evaluation in evaluations if name in evaluation.results]
        for number, evaluation in enumerate(ours):
            result = evaluation.results[name]
            count = Cell(f"{evaluation.budget:,}"), Cell(f"{result.problems}×{result.samples}")
            measured = [_cell(measure, result.by_problem.get(measure)) for measure in measures]
            cells = [_words(title), _words(evaluation.method), *count, *measured]
            rows.append(Row(evaluation.name, cells, begins_block=number == 0 and bool(rows)))
    columns = ("Benchmark", "method", "budget", "responses", *(LABELS[measure] for measure in measures))
    caption = "What the responses are made of. Truncated: ended by budget or context rather than by itself."
    return Table(caption, "Method", [("", columns)], rows)


def kinds_table(evaluations: Sequence[Evaluation], titles: Titles, kind: str) -> Table:
    """Accuracy, length and workers by kind of problem, the first group of `kind` in its id; numbers in their order."""
    measures = ("accuracy", "longest_path", "total_tokens", "spawned", "width")
    rows = []
    for name, title in titles.items():
        ours = [evaluation for evaluation in evaluations if name in evaluation.results]
        problems = ours[0].results[name].by_problem["longest_path"]
        kinds = {problem: found[1] for problem in problems if (found := re.search(kind, problem))}
        for each in sorted(set(kinds.values()), key=lambda kind: (int(kind) if kind.isdecimal() else 0, kind)):
            for number, evaluation in enumerate(ours):
                table = evaluation.results[name].by_problem
                measured = (table.get(measure, {}) for measure in measures)
                means = [{p: v for p, v in values.items() if kinds.get(p) == each} for values in measured]
                cells = [_words(title), _words(each), *map(_cell, measures, means)]
                rows.append(Row(evaluation.name, cells, begins_block=number == 0))
    columns = ("Benchmark", "kind", *(LABELS[measure] for measure in measures))
    return Table("The same by kind of problem.", "Method", [("", columns)], rows)


def seeds_table(runs: Sequence[Path], benchmark: str, title: str) -> Table:
    """Recipes that differ in their seed, side by side: the mean over seeds and each seed's own value."""
    measures = ("accuracy", "maj3_accuracy", "longest_path", "total_tokens", "parallelism", "well_formed")
    by_run = [rows_of(run) for run in runs]
    for run, found in zip(runs, by_run):
        lacking = [name for name in by_run[0] if name not in found or benchmark not in found[name].results]
        message = f"{run} has no results of {', '.join(lacking)} on {benchmark!r}; compare runs of one recipe"
        require(not lacking, message)
    rows = []
    for name in by_run[0]:
        cells = []
        for measure in measures:
            scale, digits = 100 if "%" in LABELS[measure] else 1, 2 if measure == "parallelism" else 1
            estimates = [found[name].results[benchmark].estimate(measure) for found in by_run]
            values = [scale * estimate.value for estimate in estimates if estimate]
            each = ", ".join(f"{value:.{digits}f}" for value in values)
            cells.append(Cell(f"{sum(values) / len(values):.{digits}f} ({each})") if values else DASH)
        rows.append(Row(name, cells))
    each = f"each seed's own value: {', '.join(run.name for run in runs)}"
    caption = f"{title}, {len(runs)} seeds: the mean over seeds ({each})."
    return Table(caption, "Method", [("", tuple(LABELS[measure] for measure in measures))], rows)


# ---- settings ----


def settings_table(what: str, runs: Mapping[str, Mapping]) -> list[Table]:
    """Settings by run, as far as they differ: one table, or none. Runs without settings are left out."""
    known = {name: dict(_leaves(tree)) for name, tree in runs.items() if tree}
    keys = dict.fromkeys(key for settings in known.values() for key in settings if key not in ("name", "output"))
    values = {key: [settings.get(key) for settings in known.values()] for key in keys}
    rows = [
        Row(key, [_words(_short(x)) for x in found])
        for key, found in values.items()
        if found.count(found[0]) < len(known)
    ]
    return [Table(f"Settings in which the {what} differ.", "Setting", [("", tuple(known))], rows)] if rows else []


def _leaves(tree: Mapping, above: str = "") -> Iterator[tuple[str, object]]:
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{above}{name}.")
        else:
            yield f"{above}{name}", value


def _short(value: object) -> str:
    return "–" if value in (None, "", {}, []) else shorten(str(value), 60, placeholder=" …")


# ---- training ----

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
        objective = (config.get("objective") or {}).get("kind", "")
        cells = [Cell(str(len(steps))), _words(objective), _words(config.get("filter") or "")]
        for metric, scale, digits in STAGE_MEASURES.values():
            values = [scale * row[metric] for row in steps if metric in row]
            ends = [sum(part) / len(part) for part in (values[:quarter], values[-quarter:]) if part]
            cells.append(Cell(" → ".join(format(end, digits) for end in ends)))
        rows.append(Row(name, cells))
    what = "mean of its first → of its last quarter of steps"
    caption = f"What each stage of reinforcement learning did to its own rollouts: {what}."
    return Table(caption, "Stage", [("", ("steps", "objective", "filter", *STAGE_MEASURES))], rows)


def checkpoints_table(run: Run) -> Fold | None:
    """Every checkpoint of a run that was validated or still exists, for choosing among them; None if there is none."""
    validated, kept = {each.step: each for each in run.validated()}, run.steps()
    if not validated:
        return None
    best = run.best().step if validated.keys() & set(kept) else None
    rows = []
    for step in sorted({*validated, *kept}):
        found = validated.get(step)
        accuracy, longest = (100 * found.accuracy, found.longest_path) if found else (math.nan, math.nan)
        numbers = ["–" if math.isnan(n) else f"{n:,.{digits}f}" for n, digits in ((accuracy, 2), (longest, 0))]
        weights = f"{run.name}@{step}" + (" (= @best)" if step == best else "") if step in kept else "not kept"
        rows.append(Row(str(step), [*map(Cell, numbers), _words(weights)]))
    chosen = f"@best is step {best}" if best is not None else "no checkpoint that was validated still exists"
    what = "the highest accuracy of those that still exist, of equal ones the shortest"
    columns = ("validation accuracy (%)", "longest path", "weights")
    table = Table(f"Validation of the weights after each step. @best: {what}.", "Step", [("", columns)], rows)
    return Fold(f"{run.name}: {len(validated)} checkpoints validated; {chosen}", [table])


def papers_tables() -> Fold:
    titles = {name: BENCHMARKS[name].title for name in paper.COLUMNS}
    columns = _columns(titles)
    baseline, totals = [("", ("Baseline",)), *columns], [("", tuple(titles.values()))]
    tables = [
        Table("The paper's table 1, with the ± of its appendix.", "Method", columns, papers_results(titles)),
        Table("The paper's table 2.", "Method", baseline, papers_changes(titles)),
        Table("The paper's total tokens per response.", "Method", totals, papers_totals(titles)),
    ]
    return Fold("The paper's own results on all its benchmarks", tables)
