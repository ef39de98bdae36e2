"""A small document (headings, paragraphs, tables, figures, folds) and its two forms, each a template in pages/:

    blocks = [Heading("Results"), "A paragraph.", Table(…), Figure(…)]
    write_markdown("Title", blocks, folder)               figures become PNG files in `folder`, a sibling of the text
    render("report.html", title="Title", blocks=blocks)   figures become data URIs; its policy forbids any request

All text is escaped, whatever a name or a note contains.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, select_autoescape

from dccot.core.command import print_table


@dataclass(frozen=True)
class Heading:
    text: str


@dataclass(frozen=True)
class Cell:
    text: str = ""
    error: str = ""  # shown small, after ±
    kind: str = ""  # better, worse, words (not a number) or nothing
    pooled: str = ""  # the error as the paper computes it, in brackets

    def __str__(self) -> str:
        return self.text + (f" ± {self.error}" if self.error else "") + (f" ({self.pooled})" if self.pooled else "")


@dataclass(frozen=True)
class Row:
    label: str
    cells: Sequence[Cell]
    tag: str = ""  # a word after the label, for rows that are not ours
    begins_block: bool = False  # a rule above it


@dataclass(frozen=True)
class Table:
    caption: str
    corner: str  # heading of the first column
    groups: Sequence[tuple[str, Sequence[str]]]  # heading over some columns, or "" for none, and the columns' own
    rows: Sequence[Row]

    @property
    def columns(self) -> list[tuple[str, str, bool]]:
        """(heading of its group, its own, whether it begins a group)."""
        return [(group, name, i == 0) for group, names in self.groups for i, name in enumerate(names)]


@dataclass(frozen=True)
class Figure:
    name: str  # of the PNG file next to the Markdown
    caption: str
    light: bytes  # PNG
    dark: bytes  # the same for dark screens


@dataclass(frozen=True)
class Grid:
    """Small figures in rows."""

    figures: Sequence[Figure]


@dataclass(frozen=True)
class Fold:
    """Shown on a click."""

    title: str
    content: Sequence[Table]


Block = Heading | str | Table | Figure | Grid | Fold


def write_markdown(title: str, blocks: Sequence[Block], figures: Path) -> str:
    """The document as Markdown; writes its figures to `figures`, which the text refers to as a sibling folder."""
    for block in blocks:
        for figure in block.figures if isinstance(block, Grid) else [block] if isinstance(block, Figure) else []:
            figures.mkdir(parents=True, exist_ok=True)
            (figures / f"{figure.name}.png").write_bytes(figure.light)
    return render("report.md", title=title, blocks=blocks, folder=figures.name)


def show(table: Table) -> None:
    """Print a table."""
    headings = [f"{group}\n{name}" if group and begins else f"\n{name}" for group, name, begins in table.columns]
    rows = [[row.label, *map(str, row.cells)] for row in table.rows]
    print_table(table.caption, [f"\n{table.corner}", *headings], rows)


def render(page: str, **content: Any) -> str:
    """A template of pages/ with its content, which is escaped."""
    return _templates().get_template(page).render(content)


@cache
def _templates() -> Environment:
    loader, escaped = PackageLoader("dccot.eval", "pages"), select_autoescape(["html"])
    found = Environment(loader=loader, autoescape=escaped, trim_blocks=True, lstrip_blocks=True)
    found.filters |= {"kind": lambda block: type(block).__name__, "markdown": _markdown, "data_uri": _data_uri}
    found.globals["file"] = lambda name: loader.get_source(found, name)[0]  # a style or a script
    return found


def _markdown(text: object) -> str:
    """Text escaped for Markdown."""
    return " ".join("".join("\\" + sign if sign in "\\`*_<>|#[]" else sign for sign in str(text)).split())


def _data_uri(png: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(png).decode()
