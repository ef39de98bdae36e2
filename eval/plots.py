"""The report's figures as PNG, each for light and for dark screens.

tradeoff     accuracy vs. longest path on one benchmark, ours and the paper's, with the Pareto front of ours
training     accuracy, longest path, parallelism and entropy percentiles over all stages of one training, stages one after another
penalised    accuracy, longest path and parallelism of several trainings over their own steps, one colour each
latency      seconds vs. longest path, one panel per concurrency
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure as Canvas
from matplotlib.transforms import Bbox

from dccot.core.statistics import PERCENTILES, Estimate, pareto_front

MARKED = "o-"  # measured at some steps only: marked there, and joined


@dataclass(frozen=True)
class Theme:
    background: str
    ink: str
    quiet: str
    hair: str
    series: tuple[str, ...]


LIGHT = Theme(
    "#fdfdfc", "#1f2328", "#6b7280", "#e3e5e8",
    ("#2563a8", "#c8552b", "#2f855a", "#8a4fae", "#b0841a", "#1f8a99", "#b83a6b", "#5b6470"),
)  # fmt: skip
DARK = Theme(
    "#16181c", "#e3e5e8", "#9aa1ab", "#2f343b",
    ("#7fb2ec", "#f0956f", "#74c69a", "#c49be6", "#e2bb5c", "#6cc9d6", "#ee8fb4", "#b3bac4"),
)  # fmt: skip
Picture = tuple[bytes, bytes]  # light, dark


def literal(text: str) -> str:
    """Text escaped so that matplotlib does not parse it as a formula."""
    return text.replace("$", r"\$")


def both_themes(draw: Callable[[Theme], Canvas]) -> Picture:
    return _png(draw, LIGHT), _png(draw, DARK)


def _png(draw: Callable[[Theme], Canvas], theme: Theme) -> bytes:
    style = {
        "figure.facecolor": theme.background, "axes.facecolor": theme.background, "savefig.facecolor": theme.background,
        "text.color": theme.ink, "axes.labelcolor": theme.quiet, "axes.edgecolor": theme.quiet, "axes.titlecolor": theme.ink,
        "xtick.color": theme.quiet, "ytick.color": theme.quiet, "grid.color": theme.hair, "axes.grid": True, "grid.linewidth": 0.8,
        "axes.axisbelow": True, "axes.spines.top": False, "axes.spines.right": False, "axes.linewidth": 0.8, "font.size": 9,
        "axes.titlesize": 10, "axes.titlelocation": "left", "axes.titleweight": "bold", "legend.frameon": False, "legend.fontsize": 8,
    }  # fmt: skip
    buffer = io.BytesIO()
    with matplotlib.rc_context(style):
        canvas = draw(theme)
        FigureCanvasAgg(canvas)
        canvas.savefig(buffer, format="png", dpi=150)
    return buffer.getvalue()


# ---- accuracy against longest path ----


@dataclass(frozen=True)
class Point:
    label: str
    accuracy: Estimate  # %
    longest_path: Estimate
    series: int | None = None  # colour; None: the paper's
    vote: bool = False  # maj@3


def tradeoff(title: str, points: Sequence[Point]) -> Picture:
    ours = [p for p in points if p.series is not None]
    theirs = [p for p in points if p.series is None]
    front = [ours[i] for i in pareto_front([(p.longest_path.value, p.accuracy.value) for p in ours])]

    def draw(theme: Theme) -> Canvas:
        canvas = Canvas(figsize=(4.4, 3.1 + 0.17 * math.ceil(len(ours) / 2)), layout="constrained")
        axes = canvas.subplots()
        for point in theirs:
            axes.plot(
                point.longest_path.value,
                point.accuracy.value,
                "^" if point.vote else "o",
                color=theme.quiet,
                fillstyle="none",
                ms=5,
            )
        axes.plot(*_steps(front), color=theme.ink, linewidth=1, linestyle=(0, (4, 3)), zorder=1)
        for point in ours:
            colour = theme.series[(point.series or 0) % len(theme.series)]
            axes.errorbar(
                point.longest_path.value, point.accuracy.value, _finite(point.accuracy.stderr), _finite(point.longest_path.stderr),
                fmt="^" if point.vote else "o", color=colour, ms=6, elinewidth=0.8, label=literal(point.label), zorder=3,
            )  # fmt: skip
        axes.margins(0.12)
        axes.set(title=literal(title), xlabel="longest path (tokens)", ylabel="accuracy (%)")
        canvas.legend(loc="outside lower left", ncols=2, handletextpad=0.3, columnspacing=1.2)
        _name_where_there_is_room(canvas, axes, theirs, points, theme)
        return canvas

    return both_themes(draw)


def _name_where_there_is_room(
    canvas: Canvas, axes: Axes, named: Sequence[Point], points: Sequence[Point], theme: Theme
) -> None:
    """Labels next to points, on the first of four sides where they cover no mark or other label; none if all are
    taken.
    """
    FigureCanvasAgg(canvas).draw()
    marks = [axes.transData.transform((p.longest_path.value, p.accuracy.value)) for p in points]
    taken = [Bbox.from_extents(x - 4, y - 4, x + 4, y + 4) for x, y in marks]
    for point in named:
        for offset, side in (((6, 0), "left"), ((-6, 0), "right"), ((0, 8), "center"), ((0, -8), "center")):
            label = axes.annotate(
                literal(point.label), (point.longest_path.value, point.accuracy.value), xytext=offset, textcoords="offset points",
                ha=side, va="center", fontsize=6.5, color=theme.quiet,
            )  # fmt: skip
            place = label.get_window_extent()
            if axes.bbox.containsx(place.x1) and axes.bbox.containsx(place.x0) and not place.count_overlaps(taken):
                taken.append(place)
                break
            label.remove()


def _steps(front: Sequence[Point]) -> tuple[list[float], list[float]]:
    """The front as a staircase: the best accuracy achievable within each length."""
    x = [point.longest_path.value for point in front for _ in range(2)]
    y = [point.accuracy.value for point in front for _ in range(2)]
    return x[1:], y[:-1]


def _finite(error: float) -> float:
    return 0.0 if math.isnan(error) else error


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


def _rollouts_and_validation(training: str, validation: str) -> tuple[Line, Line]:
    return Line(training, "training rollouts", 0), Line(validation, "validation", 1, MARKED)


SUPERVISED = Panel(
    "Loss of supervised fine-tuning",
    (Line("policy/loss", "training", 0), Line("validation/loss", "held out", 1, MARKED)),
)
PANELS = [
    SUPERVISED,
    Panel("Accuracy (%)", _rollouts_and_validation("reward/correct", "validation/accuracy"), scale=100),
    Panel("Longest path (tokens)", _rollouts_and_validation("length/longest_path", "validation/longest_path")),
    Panel(
        "Parallelism: total tokens / longest path",
        _rollouts_and_validation("parallel/degree", "validation/parallelism"),
    ),
    Panel(
        "Entropy per token (nats): mean and percentiles",
        (
            Line("policy/entropy", "mean", 0, "--"),
            *(Line(f"policy/entropy_p{p}", f"p{p}", i) for i, p in enumerate(PERCENTILES, start=1)),
        ),
        log=True,
    ),
]
COMPARED = PANELS[1:4]
SMALLEST_ENTROPY = 1e-4  # nats; the logarithmic axis ends there


def training(stages: Sequence[Stage]) -> Picture:
    return both_themes(lambda theme: draw_training(stages, theme))


def draw_training(stages: Sequence[Stage], theme: Theme) -> Canvas:
    """All panels that have something to show, over one axis on which every stage begins where the previous one
    ended.
    """
    starts = [0]
    for stage in stages:
        starts.append(starts[-1] + stage.rows[-1]["step"] + 1)
    canvas, every = _panels([panel for panel in PANELS if _shows(panel, stages)])
    for panel, axes in every.items():
        for line in panel.lines:
            for stage, start in zip(stages, starts):
                _draw_line(axes, line, [(start + step, value) for step, value in _values(stage, panel, line)], theme)
        _finish_panel(axes, panel, starts[1:-1], theme)
    axes = next(iter(every.values()))
    for stage, start in zip(stages, starts):
        axes.annotate(literal(stage.name), (start, 1.0), xycoords=("data", "axes fraction"), xytext=(3, -3), textcoords="offset points",
                      va="top", fontsize=7.5, color=theme.quiet)  # fmt: skip
    axes.margins(y=0.15)  # room for the names
    axes.set_xlim(0, max(1, starts[-1]))
    return canvas


def penalised(runs: Sequence[Stage]) -> Picture:
    return both_themes(lambda theme: draw_penalised(runs, theme))


def draw_penalised(runs: Sequence[Stage], theme: Theme) -> Canvas:
    """Several trainings over their own steps: rollouts as lines, validation as marks, one colour per training."""
    canvas, every = _panels([panel for panel in COMPARED if _shows(panel, runs)])
    for panel, axes in every.items():
        rollouts, validation = panel.lines
        for number, run in enumerate(runs):
            _draw_line(axes, Line(rollouts.metric, run.name, number), _values(run, panel, rollouts), theme)
            _draw_line(axes, Line(validation.metric, "", number, MARKED), _values(run, panel, validation), theme)
        _finish_panel(axes, panel, (), theme)
    return canvas


def _panels(panels: Sequence[Panel]) -> tuple[Canvas, dict[Panel, Axes]]:
    canvas = Canvas(figsize=(9.6, 2.1 * len(panels) + 0.4), layout="constrained")
    every = canvas.subplots(len(panels), sharex=True, squeeze=False)[:, 0]
    every[-1].set(xlabel="step")
    return canvas, dict(zip(panels, every))


def _shows(panel: Panel, stages: Sequence[Stage]) -> bool:
    return any(_values(stage, panel, line) for stage in stages for line in panel.lines)


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
    colour = theme.series[line.colour % len(theme.series)]
    x, y = zip(*points)
    name = literal(line.label)
    label = None if name in axes.get_legend_handles_labels()[1] else name
    if line.style == MARKED:
        axes.plot(x, y, MARKED, color=colour, linewidth=1.4, ms=3.2, label=label)
        return
    axes.plot(x, y, color=colour, linewidth=0.6, alpha=0.4)
    axes.plot(x, smoothed(y, max(1, len(y) // 40)), line.style, color=colour, linewidth=1.4, label=label)


def _finish_panel(axes: Axes, panel: Panel, boundaries: Sequence[int], theme: Theme) -> None:
    for boundary in boundaries:
        axes.axvline(boundary, color=theme.quiet, linewidth=0.8, linestyle=(0, (2, 2)))
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


def latency(timings: Sequence[dict]) -> Picture:
    """Every measured response: seconds against longest path."""
    levels = sorted({timing["concurrency"] for timing in timings})

    def draw(theme: Theme) -> Canvas:
        canvas = Canvas(figsize=(9.6, 3.2), layout="constrained")
        for axes, level in zip(canvas.subplots(1, len(levels), squeeze=False)[0], levels):
            for number, method in enumerate(("parallel", "sequential")):
                here = [t for t in timings if t["concurrency"] == level and t["method"] == method]
                x, y = [t["longest_path"] for t in here], [t["seconds"] for t in here]
                axes.plot(x, y, "o", ms=3.5, alpha=0.7, color=theme.series[number], label=method)
            axes.set(
                title=f"{level} at a time",
                xlabel="longest path (tokens)",
                ylabel="seconds" if level == levels[0] else None,
            )
            axes.set_xlim(left=0)
            axes.set_ylim(bottom=0)
        axes.legend(loc="lower right")
        return canvas

    return both_themes(draw)
