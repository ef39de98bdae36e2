"""What benchmarks share: rows, timing in turns, peak memory, the table.

A row is {name, value, unit, target, better}; `better` is "higher" or "lower" and `target` may be None. What could not
be measured has the value None and a `reason`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

FOLDER = Path("runs/bench")


def row(
    name: str, value: float | None, unit: str, target: float | None = None, better: str = "lower"
) -> dict[str, Any]:
    return {"name": name, "value": value, "unit": unit, "target": target, "better": better}


def judged_quick(rows: Sequence[Mapping[str, Any]], own: Mapping[str, float]) -> list[dict[str, Any]]:
    """Rows of small sizes. Differences and counts keep their targets; ratios have their `own`, by how a name begins, or
    none, because at such sizes they say nothing about those at full size.
    """
    found = []
    for each in rows:
        target = next((value for name, value in own.items() if each["name"].startswith(name)), None)
        ratio = each["unit"].startswith(("×", "%", "share"))
        found.append({**each, "target": target if ratio else each["target"]})
    return found


def falls_short(row: Mapping[str, Any]) -> bool:
    """Whether a row misses its target."""
    if row["target"] is None or row["value"] is None:
        return False
    return row["value"] < row["target"] if row["better"] == "higher" else row["value"] > row["target"]


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    number = lambda value: "" if value is None else f"{value:,.4g}"
    cells = [("benchmark", "value", "unit", "target", "")]
    for each in rows:
        sign = "≥" if each["better"] == "higher" else "≤"
        target = "" if each["target"] is None else f"{sign} {number(each['target'])}"
        said = "short" if falls_short(each) else each.get("reason", "")
        cells.append((each["name"], number(each["value"]), each["unit"], target, said))
    a, b, c, d, _ = (max(map(len, column)) for column in zip(*cells))
    return "\n".join(f"{n:<{a}}  {v:>{b}}  {u:<{c}}  {t:<{d}}  {said}".rstrip() for n, v, u, t, said in cells)


def write(rows: Sequence[Mapping[str, Any]], file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(rows, indent=1) + "\n")


def in_turns(functions: Mapping[str, Callable[[], Any]], repeats: int = 3) -> dict[str, list[float]]:
    """Seconds of every call; the functions take turns, so that a busy machine affects all equally."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(repeats):
        for name, function in functions.items():
            start = time.perf_counter()
            function()
            times[name].append(time.perf_counter() - start)
    return times


def fastest(functions: Mapping[str, Callable[[], Any]], repeats: int = 3) -> dict[str, float]:
    return {name: min(seconds) for name, seconds in in_turns(functions, repeats).items()}


class Peak:
    """Bytes of this process: when the block began, and the most since."""

    before = 0
    most = 0


@contextmanager
def peak_memory() -> Iterator[Peak]:
    """The process's resident memory inside the block, as counted by the kernel.  Linux only."""
    Path("/proc/self/clear_refs").write_text("5")
    found = Peak()
    found.before = _high_water_mark()
    yield found
    found.most = _high_water_mark()


def _high_water_mark() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("VmHWM")).split()[1])
