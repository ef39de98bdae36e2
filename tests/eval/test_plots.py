"""Training curves: the figure's own data are what metrics.jsonl holds, number for number."""

import json
import random

import pytest

from dccot.core.statistics import Estimate
from dccot.eval import plots
from dccot.eval.report import placed


def run(folder, name, steps, start=None):
    """An RL run of made-up metrics: validation every third step, an entropy that reaches 0."""
    rng = random.Random(name)
    rows = []
    for step in range(steps):
        row = {"step": step, "reward/correct": rng.random(), "length/longest_path": rng.uniform(50, 200)}
        row |= {"parallel/degree": rng.uniform(1, 3), "policy/entropy": rng.random()}
        row |= {f"policy/entropy_p{p}": rng.random() if p > 60 else 0.0 for p in (60, 70, 80, 90, 100)}
        if step % 3 == 0:
            row |= {"validation/accuracy": rng.random(), "validation/longest_path": rng.uniform(50, 200)}
        rows.append(row)
    where = folder / name
    where.mkdir(parents=True)
    (where / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (where / "config.yaml").write_text(f"model: {{path: {start or 'elsewhere'}}}\n")
    return where


def measured(where, metric, scale=1.0, start=0):
    """(steps, values) of a metric, read from the file by plain json."""
    rows = [json.loads(line) for line in (where / "metrics.jsonl").read_text().splitlines()]
    found = [(start + row["step"], scale * row[metric]) for row in rows if metric in row]
    return tuple(map(list, zip(*found)))


def drawn(canvas, title):
    """Every line of the panel with that title: (x, y, whether it has marks)."""
    [panel] = [panel for panel in canvas.axes if title in (panel.get_title(loc="left"), panel.get_title())]
    return [(list(line.get_xdata()), list(line.get_ydata()), line.get_marker() == "o") for line in panel.lines]


@pytest.mark.parametrize("steps", [2, 30, 200])
def test_the_curves_are_what_metrics_jsonl_holds(tmp_path, steps):
    first = run(tmp_path, "stage1", steps)
    second = run(tmp_path, "stage2", 7, start=first)
    canvas = plots.training(placed([first, second], rl=True), plots.LIGHT)
    entropies = ["policy/entropy", "policy/entropy_p60", "policy/entropy_p100"]
    for title, metrics, scale in (
        ("Accuracy (%)", ["reward/correct", "validation/accuracy"], 100),
        ("Longest path (tokens)", ["length/longest_path", "validation/longest_path"], 1),
        ("Parallelism: total tokens / longest path", ["parallel/degree"], 1),
        ("Entropy per token (nats): mean and percentiles", entropies, 1),
    ):
        lines = drawn(canvas, title)
        for metric in metrics:
            for where, start in ((first, 0), (second, steps)):
                assert (*measured(where, metric, scale, start), metric.startswith("validation")) in lines


def test_two_validations_are_drawn_as_they_are_and_nothing_else_is_marked():
    rows = [{"step": i, "reward/correct": 0.5, "validation/accuracy": share} for i, share in enumerate((0.95, 0.97))]
    lines = drawn(plots.training([plots.Stage("a", rows)], plots.LIGHT), "Accuracy (%)")
    assert [(x, y) for x, y, marked in lines if marked] == [([0, 1], [95.0, 97.0])]


def test_runs_that_do_not_continue_one_another_are_drawn_over_each_other_in_colours_of_their_own(tmp_path):
    names = ["hlp", "dsr_hlp_12k", "dsr_hlp_24k"]
    runs = [run(tmp_path, name, steps) for name, steps in zip(names, (12, 9, 15))]
    canvas = plots.training(placed(runs, rl=True), plots.LIGHT)
    [legend] = canvas.legends
    assert [text.get_text() for text in legend.get_texts()] == names
    assert len({line.get_color() for line in legend.get_lines()}) == len(names)
    lines = drawn(canvas, "Longest path (tokens)")
    for where in runs:
        assert (*measured(where, "length/longest_path"), False) in lines
        assert (*measured(where, "validation/longest_path"), True) in lines


def test_accuracy_is_drawn_against_longest_path_for_all_runs(tmp_path):
    runs = [run(tmp_path, name, steps) for name, steps in (("a", 7), ("b", 10))]
    [axes] = plots.courses(placed(runs, rl=True), plots.LIGHT).axes
    courses = [(list(line.get_xdata()), list(line.get_ydata())) for line in axes.lines]
    for where in runs:
        x, y = (measured(where, f"validation/{what}")[1] for what in ("longest_path", "accuracy"))
        assert (x, [100 * share for share in y]) in courses


def test_the_accuracy_under_a_budget_is_the_share_of_all_responses_that_are_right_within_it():
    canvas = plots.budgets("Test", {"alone": ([30, 50], 4), "with workers": ([20, 20, 20], 4)}, plots.LIGHT)
    alone, parallel = (dict(zip(*line.get_data())) for line in canvas.axes[0].lines)
    assert alone == {0: 0, 30: 25, 50: 50}
    assert parallel == {0: 0, 20: 75, 50: 75}, "to the end of the axis"


@pytest.mark.parametrize("name", ["$x_{1$", r"\$", "$\\frac$ costs $5"])
def test_a_dollar_in_a_name_is_a_dollar(name):
    rows = [{"step": step, "reward/correct": 0.5, "length/longest_path": 9.0} for step in range(3)]
    ours = plots.Point(name, Estimate(50.0, 1.0), Estimate(100.0, 1.0), 0)
    theirs = plots.Point(name, Estimate(9.0), Estimate(9.0))
    for draw, *content in (
        (plots.tradeoff, name, [ours, theirs]),
        (plots.budgets, name, {name: ([3, 5], 4)}),
        (plots.training, [plots.Stage(name, rows)]),
        (plots.training, [plots.Stage(name, rows), plots.Stage("other", rows, branch=1)]),
        (plots.courses, [plots.Stage(name, rows), plots.Stage("other", rows, branch=1)]),
    ):
        assert all(png.startswith(b"\x89PNG") for png in plots.pictures(draw, *content))


def test_two_continuations_of_a_stage_are_drawn_over_each_other_after_it(tmp_path):
    """Figures of the paper's appendix on plateaus: what was kept beside what was changed, from where it was changed."""
    stage1 = run(tmp_path, "stage1", 9)
    cispo = run(tmp_path, "stage2a", 7, start=stage1 / "checkpoints" / "step_000009" / "hf")
    dapo = run(tmp_path, "stage1_dapo", 6, start=f"{stage1}@6")
    stages = placed([stage1, cispo, dapo], rl=True)
    assert plots.branches(stages) == {0: "stage1 → stage2a", 1: "stage1_dapo"}
    canvas = plots.training(stages, plots.LIGHT)
    marks = [(x, y) for x, y, marked in drawn(canvas, "Accuracy (%)") if marked]
    expected = [measured(one, "validation/accuracy", 100, start) for one, start in ((stage1, 0), (cispo, 9), (dapo, 6))]
    assert marks == expected


def test_runs_find_each_other_after_their_folder_was_moved(tmp_path):
    first = run(tmp_path / "there", "stage1", 9)
    run(tmp_path / "there", "stage2", 5, start=first)
    (tmp_path / "there").rename(tmp_path / "here")
    stages = placed([tmp_path / "here" / name for name in ("stage1", "stage2")], rl=True)
    assert [stage.start for stage in stages] == [0, 9]
