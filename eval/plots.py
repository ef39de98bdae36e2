"""The report's figures as PNG: pictures(training, stages) draws one for light and for dark screens.

tradeoff     accuracy vs. longest path on one benchmark, ours and the paper's, with the Pareto front of ours
training     accuracy, longest path, parallelism and entropy percentiles of one training, its stages one after another
overlaid     accuracy, longest path and parallelism of several trainings over their own steps, one colour each; of
             continuations of one stage, after that stage
latency      seconds vs. longest path, one panel per concurrency
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
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
    name: str
    rows: Sequence[dict]  # of metrics.jsonl
    config: Mapping = field(default_factory=dict)


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
SMALLEST_ENTROPY = 1e-4  # nats; the logarithmic axis ends there


def training(stages: Sequence[Stage], theme: Theme) -> Canvas:
    """All panels that have something to show, over one axis on which each stage begins where the last one ended."""
    starts = [0]
    for stage in stages:
        starts.append(starts[-1] + stage.rows[-1]["step"] + 1)
    canvas, every = _panels([SUPERVISED, *COMPARED, ENTROPY], stages)
    for panel, axes in every.items():
        for line in panel.lines:
            for stage, start in zip(stages, starts):
                _draw_line(axes, line, [(start + step, value) for step, value in _values(stage, panel, line)], theme)
        for boundary in starts[1:-1]:
            axes.axvline(boundary, color=theme.quiet, linewidth=0.8, linestyle=(0, (2, 2)))
        _finish_panel(axes, panel)
    axes = next(iter(every.values()))
    looks: dict[str, Any] = {"va": "top", "fontsize": 7.5, "color": theme.quiet, "textcoords": "offset points"}
    for stage, start in zip(stages, starts):
        axes.annotate(literal(stage.name), (start, 1.0), (3, -3), xycoords=("data", "axes fraction"), **looks)
    axes.margins(y=0.15)  # room for the names
    axes.set_xlim(0, max(1, starts[-1]))
    return canvas


def overlaid(runs: Sequence[Stage], before: Stage | None, theme: Theme) -> Canvas:
    """Several trainings over their own steps: rollouts as lines, validation as marks, one colour per training. They
    begin where the stage `before` them ended.
    """
    start = before.rows[-1]["step"] + 1 if before else 0
    shown = [(before, 0)] * bool(before) + [(run, start) for run in runs]
    canvas, every = _panels(COMPARED, runs)
    for panel, axes in every.items():
        rollouts, validation = panel.lines
        for number, (run, first) in enumerate(shown):
            for line in (Line(rollouts.metric, run.name, number), Line(validation.metric, "", number, MARKED)):
                _draw_line(axes, line, [(first + step, value) for step, value in _values(run, panel, line)], theme)
        _finish_panel(axes, panel)
    return canvas


def _panels(panels: Sequence[Panel], stages: Sequence[Stage]) -> tuple[Canvas, dict[Panel, Axes]]:
    """A figure of the panels that have something to show."""
    shown = [p for p in panels if any(_values(stage, p, line) for stage in stages for line in p.lines)]
    canvas = figure.Figure(figsize=(9.6, 2.1 * len(shown) + 0.4), layout="constrained")
    every = canvas.subplots(len(shown), sharex=True, squeeze=False)[:, 0]
    every[-1].set(xlabel="step")
    return canvas, dict(zip(shown, every))


def _values(stage: Stage, panel: Panel, line: Line) -> list[tuple[int, float]]:
    """(step, value) as in metrics.jsonl."""
    supervised = not any("reward/correct" in row for row in stage.rows)
    if supervised != (panel is SUPERVISED):
        return []
    return [(row["step"], panel.scale * row[line.metric]) for row in stage.rows if line.metric in row]


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


def _finish_panel(axes: Axes, panel: Panel) -> None:
    axes.set_title(panel.title)
    if panel.log:
        axes.set_yscale("log")
        least, most = axes.get_ylim()
        axes.set_ylim(bottom=max(SMALLEST_ENTROPY, least) if most > SMALLEST_ENTROPY else least)
    if len(labels := axes.get_legend_handles_labels()[1]) > 1:
        axes.legend(loc="lower right", bbox_to_anchor=(1, 0.98), ncols=len(labels), borderaxespad=0.2)


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
