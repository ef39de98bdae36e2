"""What the evaluation commands show in a terminal: progress and the table."""

from __future__ import annotations

from rich import box
from rich.table import Table

from dccot.eval.results import LABELS, Evaluation, shown
from dccot.progress import Progress


class LengthProgress(Progress):
    """Counts finished responses and shows their mean longest path."""

    def __init__(self, title: str, total: int, active: bool):
        super().__init__(title, total, active=active and total > 0)
        self.tokens = 0

    def advance(self, longest_path: int) -> None:
        self.tokens += longest_path
        self.show(self.done + 1, f"longest path {self.tokens / (self.done + 1):,.0f}")


def table_of(evaluation: Evaluation) -> Table:
    """Measures down, benchmarks across."""
    table = Table(title=f"{evaluation.name}: {evaluation.method}, budget {evaluation.budget:,}", title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("mean ± standard error over problems")
    for result in evaluation.results.values():
        table.add_column(f"{result.title}\n{result.problems} × {result.samples}", justify="right")
    for measure, label in LABELS.items():
        estimates = [result.estimate(measure) for result in evaluation.results.values()]
        if any(estimates):
            cells = [shown(measure, estimate) if estimate else ("", "") for estimate in estimates]
            table.add_row(label, *(f"{value} ± {error}" if error else value for value, error in cells))
    if any(result.unjudged for result in evaluation.results.values()):
        table.add_row("answers that could not be judged", *(str(result.unjudged) for result in evaluation.results.values()))
    return table
