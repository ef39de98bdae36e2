"""docs/reliability.md lists every timeout: what it guards, its default, what a slow machine needs, what happens."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
ROOMS = ("dccot", "kernels", "model", "rollout", "data", "train", "eval", "serve")
NAMED = re.compile(r"SECONDS|PATIENCE|START_UP|SAYING|PULSE|TIMEOUT|WAIT$|_seconds$|^patience$|^timeout$", re.ASCII)
# how often something is looked at or drawn: nothing ends when it has passed; and what a measurement took
INTERVALS = re.compile(
    r"POLL|LOOK|REFRESH|HEARTBEAT|GARBLED|usual_seconds|^SECONDS$|^_?(decode|rollout|training)_seconds"
)
ROWS = [line for line in (ROOT / "docs" / "reliability.md").read_text().splitlines() if line.startswith("| `")]


def files() -> list[Path]:
    return sorted({path.resolve() for room in ROOMS for path in (ROOT / room).rglob("*.py")})


def value_of(node: ast.expr | None) -> float | None:
    """Of a number, or of an expression of numbers."""
    try:
        found = eval(compile(ast.Expression(node), "", "eval"), {"__builtins__": {}})  # type: ignore[arg-type]
    except Exception:
        return None
    return float(found) if isinstance(found, int | float) and not isinstance(found, bool) else None


def assigned(tree: ast.AST) -> Iterator[tuple[str, float]]:
    """Every constant, and every setting with a default, whose name says that it is a timeout."""
    for node in ast.walk(tree):
        pairs: list[tuple[ast.expr | None, ast.expr | None]] = []
        if isinstance(node, ast.AnnAssign):
            pairs = [(node.target, node.value)]
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                several = isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple)
                pairs += zip(target.elts, node.value.elts) if several else [(target, node.value)]  # type: ignore[attr-defined]
        for target, value in pairs:
            if isinstance(target, ast.Name) and NAMED.search(target.id) and (number := value_of(value)) is not None:
                yield target.id, number


def found() -> list[tuple[str, str, float]]:
    return [
        (str(path.relative_to(ROOT)), name, value)
        for path in files()
        for name, value in assigned(ast.parse(path.read_text()))
        if not INTERVALS.search(name)
    ]


def test_every_timeout_is_in_the_table_with_its_default():
    there = found()
    assert len(there) >= 15
    for file, name, value in there:
        row = next((row for row in ROWS if f"`{name}`" in row.split("|")[1] and f"`{file}`" in row.split("|")[1]), None)
        assert row is not None, f"{name} of {file} is in no row of docs/reliability.md"
        numbers = [float(number.replace(",", "")) for number in re.findall(r"\d[\d,]*(?:\.\d+)?", row.split("|")[3])]
        assert value in numbers, f"{name} of {file} is {value}; the table says {numbers}"
        assert len(row.split("|")) == 7 and all(cell.strip() for cell in row.split("|")[1:-1])


def test_no_call_has_a_timeout_of_its_own_that_no_name_explains():
    for path in files():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                given = {keyword.arg: value_of(keyword.value) for keyword in node.keywords}
                wait = given.get("timeout") or given.get("timeout_seconds")
                assert wait is None or wait < 1, f"{path}:{node.lineno}: give the {wait:g} seconds a name"
