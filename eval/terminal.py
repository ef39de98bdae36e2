"""What the evaluation commands show in a terminal: progress and the table."""
from __future__ import annotations

import argparse
import time

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from dccot.eval.results import LABELS, Evaluation, shown


class ResponseProgress:
    """A bar with the time left on a terminal; elsewhere a line every half minute. Shows rank 0's share."""

    def __init__(self, title: str, total: int, active: bool):
        self.title, self.total, self.done, self.tokens = title, total, 0, 0
        self.began = self.said = time.monotonic()
        self.active = active and total > 0
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
        self.console = Console(highlight=False)
        self.bar = Progress(*columns, console=self.console, disable=not (self.active and self.console.is_terminal))
        self.task = self.bar.add_task(title, total=total)

    def __enter__(self) -> ResponseProgress:
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def advance(self, longest_path: int) -> None:
        self.done += 1
        self.tokens += longest_path
        self.bar.update(self.task, completed=self.done, description=f"{self.title}  longest path {self.tokens / self.done:,.0f}")
        now = time.monotonic()
        if self.active and not self.console.is_terminal and (now - self.said > 30 or self.done == self.total):
            left = (now - self.began) / self.done * (self.total - self.done)
            mean = self.tokens / self.done
            self.console.print(f"{self.title}: {self.done:,} of {self.total:,} responses, longest path {mean:,.0f}, {left:,.0f} s left")
            self.said = now


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


def print_table(table: Table) -> None:
    console = Console()
    (console if console.is_terminal else Console(width=160)).print(table)


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)
