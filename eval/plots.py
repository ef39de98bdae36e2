"""The report's figures as PNG: pictures(training, stages) draws one for light and for dark screens.

tradeoff     accuracy vs. longest path on one benchmark, ours and the paper's, with the Pareto front of ours
budgets      accuracy under every smaller budget, one curve for each method
training     accuracy, longest path, parallelism and entropy of RL runs, or the loss of SFT runs: stages one after
             another, runs that do not continue one another over each other, a colour each
courses      accuracy vs. longest path of several such runs while they were trained
latency      seconds vs. longest path, one panel per concurrency
"""

from __future__ import annotations

import io
import itertools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from dccot.core.lazy import Lazy
from dccot.core.statistics import PERCENTILES, Estimate, pareto_front

if TYPE_CHECKING:
    import matplotlib
    from matplotlib import figure, transforms
    from matplotlib.axes import Axes
    from matplotlib.backends import backend_agg
    from matplotlib.figure import Figure as Canvas
else:
    matplotlib, figure = Lazy("matplotlib"), Lazy("matplotlib.figure")
    transforms, backend_agg = Lazy("matplotlib.transforms"), Lazy("matplotlib.backends.backend_agg")

MARKED = "o-"  # measured at some steps only: marked there, and joined


@dataclass(frozen=True)
class Theme:
    background: str
    ink: str
    quiet: str
    hair: str
    series: tuple[str, ...]

    def colour(self, series: int) -> str:
        return self.series[series % len(self.series)]

    def style(self) -> dict[str, Any]:
        colours = {
            self.background: ("figure.facecolor", "axes.facecolor", "savefig.facecolor"),
            self.ink: ("text.color", "axes.titlecolor"),
            self.quiet: ("axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"),
            self.hair: ("grid.color",),
        }
        return STYLE | {name: colour for colour, names in colours.items() for name in names}


STYLE: dict[str, Any] = {"axes.grid": True, "grid.linewidth": 0.8, "axes.axisbelow": True, "axes.linewidth": 0.8}
STYLE |= {"axes.spines.top": False, "axes.spines.right": False, "font.size": 9, "axes.titlesize": 10}
STYLE |= {"axes.titlelocation": "left", "axes.titleweight": "bold", "legend.frameon": False, "legend.fontsize": 8}
_ON_LIGHT = ("#2563a8", "#c8552b", "#2f855a", "#8a4fae", "#b0841a", "#1f8a99", "#b83a6b", "#5b6470")
_ON_DARK = ("#7fb2ec", "#f0956f", "#74c69a", "#c49be6", "#e2bb5c", "#6cc9d6", "#ee8fb4", "#b3bac4")
LIGHT = Theme("#fdfdfc", "#1f2328", "#6b7280", "#e3e5e8", _ON_LIGHT)
DARK = Theme("#16181c", "#e3e5e8", "#9aa1ab", "#2f343b", _ON_DARK)


def pictures(draw: Callable[..., Canvas], *content: object) -> tuple[bytes, bytes]:
    """What one of the functions below draws of its content, for light and for dark screens."""
    light, dark = (io.BytesIO() for _ in range(2))
    for theme, buffer in ((LIGHT, light), (DARK, dark)):
        with matplotlib.rc_context(theme.style()):
            canvas = draw(*content, theme)
            backend_agg.FigureCanvasAgg(canvas)
            canvas.savefig(buffer, format="png", dpi=150)
    return light.getvalue(), dark.getvalue()


def literal(text: str) -> str:
    """Text escaped so that matplotlib does not parse it as a formula."""
    return text.replace("$", r"\$")


# ---- accuracy against longest path ----


@dataclass(frozen=True)
class Point:
    label: str
    accuracy: Estimate  # %
    longest_path: Estimate
    series: int | None = None  # colour; None: the paper's
    vote: bool = False  # maj@3

    @property
    def at(self) -> tuple[float, float]:
        return self.longest_path.value, self.accuracy.value

    @property
    def mark(self) -> str:
        return "^" if self.vote else "o"


def tradeoff(title: str, points: Sequence[Point], theme: Theme) -> Canvas:
    ours = [p for p in points if p.series is not None]
    theirs = [p for p in points if p.series is None]
    front = [ours[i].at for i in pareto_front([p.at for p in ours])]
    canvas = figure.Figure(figsize=(4.4, 3.1 + 0.17 * math.ceil(len(ours) / 2)), layout="constrained")
    axes = canvas.subplots()
    for point in theirs:
        axes.plot(*point.at, point.mark, color=theme.quiet, fillstyle="none", ms=5)
    # a staircase: the best accuracy achievable within each length
    stairs = [x for x, _ in front for _ in range(2)][1:], [y for _, y in front for _ in range(2)][:-1]
    axes.plot(*stairs, color=theme.ink, linewidth=1, linestyle=(0, (4, 3)), zorder=1)
    for point in ours:
        up, across = (0.0 if math.isnan(e.stderr) else e.stderr for e in (point.accuracy, point.longest_path))
        looks: dict[str, Any] = {"color": theme.colour(point.series or 0), "label": literal(point.label)}
        axes.errorbar(*point.at, up, across, fmt=point.mark, ms=6, elinewidth=0.8, zorder=3, **looks)
    axes.margins(0.12)
    axes.set(title=literal(title), xlabel="longest path (tokens)", ylabel="accuracy (%)")
    canvas.legend(loc="outside lower left", ncols=2, handletextpad=0.3, columnspacing=1.2)
    _name_where_there_is_room(canvas, axes, theirs, points, theme.quiet)
    return canvas


def budgets(title: str, curves: Mapping[str, tuple[Sequence[int], int]], theme: Theme) -> Canvas:
    """Per method: longest paths of its correct responses, in order, and how many responses there are."""
    canvas = figure.Figure(figsize=(4.4, 3.1 + 0.17 * math.ceil(len(curves) / 2)), layout="constrained")
    axes = canvas.subplots()
    most = max(path for paths, _ in curves.values() for path in (*paths, 1))
    for number, (name, (paths, count)) in enumerate(curves.items()):
        x, y = [0, *paths, most], [100 * n / count for n in (*range(len(paths) + 1), len(paths))]
        axes.plot(x, y, drawstyle="steps-post", color=theme.colour(number), linewidth=1.4, label=literal(name))
    axes.set(title=literal(title), xlabel="budget for the longest path (tokens)", ylabel="accuracy (%)")
    canvas.legend(loc="outside lower left", ncols=2)
    return canvas


def _name_where_there_is_room(
    canvas: Canvas, axes: Axes, named: Sequence[Point], points: Sequence[Point], colour: str
) -> None:
    """Labels next to points, on the first of four sides where they cover no mark or other label, or not at all."""
    backend_agg.FigureCanvasAgg(canvas).draw()
    marks = [axes.transData.transform(point.at) for point in points]
    taken = [transforms.Bbox.from_extents(x - 4, y - 4, x + 4, y + 4) for x, y in marks]
    for point in named:
        for offset, side in (((6, 0), "left"), ((-6, 0), "right"), ((0, 8), "center"), ((0, -8), "center")):
            looks: dict[str, Any] = {"ha": side, "va": "center", "fontsize": 6.5, "color": colour}
            label = axes.annotate(literal(point.label), point.at, offset, textcoords="offset points", **looks)
            place = label.get_window_extent()
            if axes.bbox.containsx(place.x1) and axes.bbox.containsx(place.x0) and not place.count_overlaps(taken):
                taken.append(place)
                break
            label.remove()


# ---- training ----


@dataclass(frozen=True)
class Stage:
    """A training run. The stages of a figure are all of RL or all of SFT."""

    name: str
    rows: Sequence[dict]  # of metrics.jsonl
    config: Mapping = field(default_factory=dict)
    start: int = 0  # where it begins on the axis
    branch: int = 0  # its colour, if there are several: stages that continue one another share it

    @property
    def rl(self) -> bool:
        return any("reward/correct" in row for row in self.rows)

    def values(self, metric: str, scale: float = 1.0) -> list[tuple[int, float]]:
        """(place on the axis, value) as in metrics.jsonl."""
        return [(self.start + row["step"], scale * row[metric]) for row in self.rows if metric in row]


@dataclass(frozen=True)
class Line:
    metric: str
    label: str
    colour: int
    style: str = "-"


@dataclass(frozen=True)
class Panel:
    title: str
    lines: tuple[Line, ...]
    scale: float = 1.0
    log: bool = False


def _compared(title: str, rollouts: str, validation: str, scale: float = 1.0) -> Panel:
    lines = Line(rollouts, "training rollouts", 0), Line(f"validation/{validation}", "validation", 1, MARKED)
    return Panel(title, lines, scale)


COMPARED = [
    _compared("Accuracy (%)", "reward/correct", "accuracy", scale=100),
    _compared("Longest path (tokens)", "length/longest_path", "longest_path"),
    _compared("Parallelism: total tokens / longest path", "parallel/degree", "parallelism"),
]
LOSSES = Line("policy/loss", "training", 0), Line("validation/loss", "held out", 1, MARKED)
SUPERVISED = Panel("Loss of supervised fine-tuning", LOSSES)
ENTROPIES = [Line(f"policy/entropy_p{p}", f"p{p}", i) for i, p in enumerate(PERCENTILES, start=1)]
ENTROPY_LINES = (Line("policy/entropy", "mean", 0, "--"), *ENTROPIES)
ENTROPY = Panel("Entropy per token (nats): mean and percentiles", ENTROPY_LINES, log=True)
MEAN_ENTROPY = Panel("Entropy per token (nats)", (Line("policy/entropy", "", 0),))
SMALLEST_ENTROPY = 1e-4  # nats; the logarithmic axis ends there


def branches(stages: Sequence[Stage]) -> dict[int, str]:
    """Colour → the stages that have it."""
    names: dict[int, list[str]] = {}
    for stage in stages:
        names.setdefault(stage.branch, []).append(stage.name)
    return {branch: " → ".join(each if len(each) < 4 else [each[0], "…", each[-1]]) for branch, each in names.items()}


def training(stages: Sequence[Stage], theme: Theme) -> Canvas:
    """Everything there is to show of runs, over one axis on which each begins where the one that it continues ended.
    Several branches have a colour each.
    """
    names = branches(stages)
    several = len(names) > 1
    panels = [*COMPARED, MEAN_ENTROPY if several else ENTROPY] if stages[0].rl else [SUPERVISED]
    shown = [panel for panel in panels if any(stage.values(line.metric) for stage in stages for line in panel.lines)]
    canvas = figure.Figure(figsize=(9.6, 2.1 * len(shown) + 0.4), layout="constrained")
    every = canvas.subplots(len(shown), sharex=True, squeeze=False)[:, 0]
    for panel, axes in zip(shown, every):
        for stage, line in itertools.product(stages, panel.lines):
            drawn = replace(line, colour=stage.branch, label=names[stage.branch]) if several else line
            _draw_line(axes, drawn, stage.values(line.metric, panel.scale), theme)
        for boundary in {stage.start for stage in stages} - {0}:
            axes.axvline(boundary, color=theme.quiet, linewidth=0.8, linestyle=(0, (2, 2)))
        _finish_panel(axes, panel, legend=not several)
    every[-1].set(xlabel="step")
    every[-1].xaxis.get_major_locator().set_params(integer=True)
    every[0].set_xlim(0, max(1, *(stage.start + stage.rows[-1]["step"] + 1 for stage in stages)))
    if several:
        _name_branches(canvas, every[0])
    _name_stages(canvas, every[0], stages, theme)
    return canvas


def _name_branches(canvas: Canvas, axes: Axes) -> None:
    marks, names = axes.get_legend_handles_labels()
    canvas.legend(marks, names, loc="outside upper left", ncols=1 if max(map(len, names)) > 30 else 4)


def _name_stages(canvas: Canvas, axes: Axes, stages: Sequence[Stage], theme: Theme) -> None:
    """The names of stages where they begin, a line for each branch that has several, as far as there is room."""
    lengths = Counter(stage.branch for stage in stages)
    levels = [branch for branch, count in lengths.items() if count > 1 or len(lengths) == 1]
    axes.margins(y=0.07 + 0.08 * len(levels))
    backend_agg.FigureCanvasAgg(canvas).draw()
    ends = dict.fromkeys(levels, 0.0)
    for stage in (stage for stage in stages if stage.branch in levels):
        offset, colour = (3, -3 - 10 * levels.index(stage.branch)), theme.quiet
        looks: dict[str, Any] = {"va": "top", "fontsize": 7.5, "textcoords": "offset points"}
        looks["color"] = theme.colour(stage.branch) if len(lengths) > 1 else colour
        label = axes.annotate(literal(stage.name), (stage.start, 1.0), offset, ("data", "axes fraction"), **looks)
        place = label.get_window_extent()
        if place.x0 < ends[stage.branch] or place.x1 > axes.bbox.x1:
            label.remove()
        else:
            ends[stage.branch] = place.x1


def courses(stages: Sequence[Stage], theme: Theme) -> Canvas:
    """How accuracy and longest path of each branch of RL moved: validation, or rollouts if not all have it."""
    names = branches(stages)
    accuracy, longest = COMPARED[:2]
    validated = {stage.branch for stage in stages if stage.values(accuracy.lines[1].metric)}
    which = 1 if validated == set(names) else 0
    canvas = figure.Figure(figsize=(6.4, 4.2), layout="constrained")
    axes = canvas.subplots()
    for branch, name in names.items():
        here = [stage for stage in stages if stage.branch == branch]
        points = []
        for panel in (longest, accuracy):
            found = [value for stage in here for _, value in stage.values(panel.lines[which].metric, panel.scale)]
            points.append(found if which else smoothed(found, max(1, len(found) // 10)))
        x, y = (found[: min(map(len, points))] for found in points)
        colour = theme.colour(branch)
        axes.plot(x, y, "-", marker="." if which else "", color=colour, linewidth=1.2, label=literal(name))
        axes.plot(x[:1], y[:1], "o", color=colour, fillstyle="none", ms=6)
        axes.plot(x[-1:], y[-1:], "o", color=colour, ms=6)
    axes.margins(0.08)
    what = "validation" if which else "training rollouts, running means"
    axes.set(title=f"From ○ to ● ({what})", xlabel="longest path (tokens)", ylabel="accuracy (%)")
    _name_branches(canvas, axes)
    return canvas


def _draw_line(axes: Axes, line: Line, points: Sequence[tuple[float, float]], theme: Theme) -> None:
    """What was measured: marks where validation was, a thin line through every step, and the running mean over it."""
    if not points:
        return
    colour = theme.colour(line.colour)
    x, y = zip(*points)
    name = literal(line.label)
    label = None if name in axes.get_legend_handles_labels()[1] else name
    if line.style == MARKED:
        axes.plot(x, y, MARKED, color=colour, linewidth=1.4, ms=3.2, label=label)
        return
    axes.plot(x, y, color=colour, linewidth=0.6, alpha=0.4)
    axes.plot(x, smoothed(y, max(1, len(y) // 40)), line.style, color=colour, linewidth=1.4, label=label)


def _finish_panel(axes: Axes, panel: Panel, legend: bool) -> None:
    axes.set_title(panel.title)
    if panel.log:
        axes.set_yscale("log")
        least, most = axes.get_ylim()
        axes.set_ylim(bottom=max(SMALLEST_ENTROPY, least) if most > SMALLEST_ENTROPY else least)
    least = axes.get_ylim()[0]
    marks, labels = axes.get_legend_handles_labels()
    shown = [i for i, line in enumerate(marks) if max(line.get_ydata()) >= least]  # type: ignore[attr-defined]
    if legend and len(shown) > 1:
        where: dict[str, Any] = {"loc": "lower right", "bbox_to_anchor": (1, 0.98), "borderaxespad": 0.2}
        axes.legend([marks[i] for i in shown], [labels[i] for i in shown], ncols=len(shown), **where)


def smoothed(values: Sequence[float], window: int) -> list[float]:
    """Mean over `window` values on either side, fewer at the ends."""
    return [sum(part) / len(part) for i in range(len(values)) for part in [values[max(0, i - window) : i + window + 1]]]


# ---- latency ----


def latency(timings: Sequence[dict], theme: Theme) -> Canvas:
    """Every measured response: seconds against longest path."""
    levels = sorted({timing["concurrency"] for timing in timings})
    canvas = figure.Figure(figsize=(9.6, 3.2), layout="constrained")
    for axes, level in zip(canvas.subplots(1, len(levels), squeeze=False)[0], levels):
        for number, method in enumerate(("parallel", "sequential")):
            here = [t for t in timings if t["concurrency"] == level and t["method"] == method]
            x, y = [t["longest_path"] for t in here], [t["seconds"] for t in here]
            axes.plot(x, y, "o", ms=3.5, alpha=0.7, color=theme.colour(number), label=method)
        axes.set(title=f"{level} at a time", xlabel="longest path (tokens)")
        axes.set(ylabel="seconds" if level == levels[0] else None)
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
    axes.legend(loc="lower right")
    return canvas
