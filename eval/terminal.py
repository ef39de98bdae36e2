"""Terminal output of the evaluation commands: progress and the table."""

from __future__ import annotations

from dccot.core.command import print_table
from dccot.core.progress import Progress
from dccot.eval.results import LABELS, Evaluation, shown


class LengthProgress(Progress):
    """Counts finished responses and shows their mean longest path."""

    def __init__(self, title: str, total: int, active: bool):
        super().__init__(title, total, active=active and total > 0)
        self.tokens = 0

    def advance(self, longest_path: int) -> None:
        self.tokens += longest_path
        self.show(self.done + 1, f"longest path {self.tokens / (self.done + 1):,.0f}")


def show(evaluation: Evaluation) -> None:
    """Measures down, benchmarks across."""
    results = list(evaluation.results.values())
    rows = []
    for measure, label in LABELS.items():
        estimates = [result.estimate(measure) for result in results]
        if any(estimates):
            cells = [shown(measure, estimate) if estimate else ("", "") for estimate in estimates]
            rows.append([label, *(f"{value} ± {error}" if error else value for value, error in cells)])
    if any(result.unjudged for result in results):
        rows.append(["answers that could not be judged", *(str(result.unjudged) for result in results)])
    columns = [f"{result.title}\n{result.problems} × {result.samples}" for result in results]
    title = f"{evaluation.name}: {evaluation.method}, budget {evaluation.budget:,}"
    print_table(title, ["mean ± standard error over problems", *columns], rows)
