"""A small document (headings, paragraphs, tables, figures, folds) and its two forms: Markdown, and one self-contained
HTML page.

    page = Document("Title", [Heading("Results"), Table(…), Figure(…)])
    page.markdown(folder)                              figures become PNG files next to it
    page.html()                                        figures become data URIs; the page's policy forbids any request

All text is escaped, whatever a name or a note contains.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape
from importlib.resources import files
from itertools import groupby
from pathlib import Path
from string import Template


@dataclass(frozen=True)
class Heading:
    text: str


@dataclass(frozen=True)
class Paragraph:
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
    groups: Sequence[
        tuple[str, Sequence[str]]
    ]  # heading over several columns, and the columns' own; an empty heading spans nothing
    rows: Sequence[Row]


@dataclass(frozen=True)
class Figure:
    name: str  # of the PNG file next to the Markdown
    caption: str
    light: bytes  # PNG
    dark: bytes  # the same for dark screens
    wide: bool = False


@dataclass(frozen=True)
class Fold:
    """Shown on a click."""

    title: str
    content: Sequence[Block]


Block = Heading | Paragraph | Table | Figure | Fold


@dataclass
class Document:
    title: str
    blocks: list[Block] = field(default_factory=list)

    def markdown(self, figures: Path) -> str:
        """The document as Markdown; writes its figures to `figures`, which the text refers to as a sibling folder."""
        return f"# {_plain(self.title)}\n\n" + "\n\n".join(_markdown(block, figures) for block in self.blocks) + "\n"

    def html(self) -> str:
        pages = files("dccot.eval").joinpath("pages")
        template = Template(pages.joinpath("report.html").read_text(encoding="utf-8"))
        style = pages.joinpath("report.css").read_text(encoding="utf-8")
        return template.substitute(title=escape(self.title), style=style, body=_html_of(self.blocks))


# ---- Markdown ----


def _plain(text: str) -> str:
    """Text escaped for Markdown."""
    for sign in "\\`*_<>|#[]":
        text = text.replace(sign, "\\" + sign)
    return " ".join(text.split())


def _markdown(block: Block, figures: Path) -> str:
    match block:
        case Heading(text):
            return f"## {_plain(text)}"
        case Paragraph(text):
            return _plain(text)
        case Table():
            return _markdown_table(block)
        case Figure(name, caption, light):
            figures.mkdir(parents=True, exist_ok=True)
            (figures / f"{name}.png").write_bytes(light)
            return f"![{_plain(caption)}]({figures.name}/{name}.png)"
        case Fold(title, content):
            inside = "\n\n".join(_markdown(one, figures) for one in content)
            return f"<details>\n<summary>{escape(title)}</summary>\n\n{inside}\n\n</details>"


def _markdown_table(table: Table) -> str:
    columns = [" ".join(filter(None, (group, column))) for group, names in table.groups for column in names]
    lines = [[table.corner, *columns], ["---", *["---:"] * len(columns)]]
    for row in table.rows:
        label = _plain(row.label) + (f" *({row.tag})*" if row.tag else "")
        lines.append([label, *(_plain(str(cell)) for cell in row.cells)])
    return f"**{_plain(table.caption)}**\n\n" + "\n".join("| " + " | ".join(line) + " |" for line in lines)


# ---- HTML ----


def _html_of(blocks: Sequence[Block]) -> str:
    """Blocks in order; small figures that follow one another share a grid."""
    parts = []
    for small, run in groupby(blocks, lambda block: isinstance(block, Figure) and not block.wide):
        inside = "\n".join(map(_html, run))
        parts.append(f'<div class="grid">\n{inside}\n</div>' if small else inside)
    return "\n".join(parts)


def _html(block: Block) -> str:
    match block:
        case Heading(text):
            return f"<h2>{escape(text)}</h2>"
        case Paragraph(text):
            return f"<p>{escape(text)}</p>"
        case Table():
            return _html_table(block)
        case Figure(_, caption, light, dark):
            night = f'<source media="(prefers-color-scheme: dark)" srcset="{_data_uri(dark)}">'
            picture = f'<picture>{night}<img src="{_data_uri(light)}" alt="{escape(caption)}"></picture>'
            return f"<figure>{picture}<figcaption>{escape(caption)}</figcaption></figure>"
        case Fold(title, content):
            return f"<details><summary>{escape(title)}</summary>\n{_html_of(content)}\n</details>"


def _data_uri(png: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(png).decode()


def _html_table(table: Table) -> str:
    grouped = any(heading for heading, _ in table.groups)
    first = {
        sum(len(names) for _, names in table.groups[:i]) for i in range(len(table.groups))
    }  # columns that begin a group

    def kind(column: int) -> str:
        words = table.rows and table.rows[0].cells[column].kind == "words"
        return " ".join(name for name, holds in (("edge", grouped and column in first), ("words", words)) if holds)

    over = "".join(
        f'<th class="group edge" colspan="{len(names)}" scope="colgroup">{escape(heading)}</th>'
        for heading, names in table.groups
    )
    names = [name for _, group in table.groups for name in group]
    corner = f'<th class="name" rowspan="{1 + grouped}" scope="col">{escape(table.corner)}</th>'
    under = "".join(f'<th class="{kind(i)}" scope="col">{escape(name)}</th>' for i, name in enumerate(names))
    head = f"<tr>{corner}{over}</tr><tr>{under}</tr>" if grouped else f"<tr>{corner}{under}</tr>"
    body = "\n".join(_html_row(row, kind) for row in table.rows)
    caption, dense = escape(table.caption), "dense" if len(names) > 8 else ""
    return (
        f'<div class="table"><p class="caption">{caption}</p><div class="scroll">'
        f'<table class="{dense}" aria-label="{caption}"><thead>{head}</thead><tbody>\n{body}\n</tbody></table></div></div>'
    )


def _html_row(row: Row, kind_of: Callable[[int], str]) -> str:
    tag = f' <span class="tag">{escape(row.tag)}</span>' if row.tag else ""
    cells = [f'<th class="name" scope="row">{escape(row.label)}{tag}</th>']
    for column, cell in enumerate(row.cells):
        errors = (f"±{cell.error}" if cell.error else "", f"({cell.pooled})" if cell.pooled else "")
        error = f'<span class="error">{escape(" ".join(filter(None, errors)))}</span>' if any(errors) else ""
        kind = " ".join(dict.fromkeys(filter(None, (kind_of(column), cell.kind))))
        cells.append(f'<td class="{kind}">{escape(cell.text)}{error}</td>')
    kind = " ".join(filter(None, ("block" if row.begins_block else "", "theirs" if row.tag else "")))
    return f'<tr class="{kind}">{"".join(cells)}</tr>'
