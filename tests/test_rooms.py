"""Imports point one way. This list and the line in docs/architecture.md are the only places where the order of the
rooms is written down.

Every import statement counts, inside functions and for type checkers, too.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
ORDER = ("core", "kernels", "model", "rollout", "data", "train", "eval", "front door")
BESIDE = {"lab": "front door", "serve": "eval"}  # rooms that nobody imports, and the last room that they may import


def room_of(module: str) -> str:
    """`dccot.train.rl` → train, `dccot.core.files` → core, `dccot.cli` → front door."""
    part = (module.split(".") + [""])[1]
    return part if part in (*ORDER, *BESIDE) else "core" if part == "__version__" else "front door"


def imported(path: Path) -> list[tuple[int, str]]:
    """(line, module) of everything of dccot that a file imports; a relative import is an error of its own."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}:{node.lineno}: relative import; write `from dccot.…`"
            names = [f"dccot.{alias.name}" for alias in node.names] if node.module == "dccot" else [node.module or ""]
            found += [(node.lineno, name) for name in names]
    return [
        (line, name) for line, name in found if name.split(".")[0] == "dccot" and not name.startswith("dccot.configs")
    ]


def sources() -> dict[str, Path]:
    """Module name → file, of everything that is installed."""
    folders = [ROOT / "dccot", *(ROOT / room for room in (*ORDER[1:-1], *BESIDE))]
    files = [
        file
        for folder in folders
        for file in folder.rglob("*.py")
        if (ROOT / "dccot") not in file.parents or not _linked(file)
    ]
    return {".".join(("dccot", *_inside(file))).removesuffix(".py"): file for file in files}


def _linked(file: Path) -> bool:
    return any(parent.is_symlink() for parent in file.parents)


def _inside(file: Path) -> tuple[str, ...]:
    parts = file.relative_to(ROOT).parts
    return parts[1:] if parts[0] == "dccot" else parts


def may_import(importer: str, imported_room: str) -> bool:
    if importer == imported_room:
        return True
    if imported_room in BESIDE:
        return False
    return ORDER.index(imported_room) <= ORDER.index(BESIDE.get(importer, importer))


def test_nobody_imports_from_a_room_to_its_right():
    wrong = [
        f"{file.relative_to(ROOT)}:{line} ({room_of(module)}) imports {name} ({room_of(name)})"
        for module, file in sources().items()
        for line, name in imported(file)
        if not may_import(room_of(module), room_of(name))
    ]
    assert not wrong, "\n".join([f"{len(wrong)} imports against the order {' ← '.join(ORDER)}:", *wrong])


def test_every_room_was_read():
    assert {room_of(module) for module in sources()} >= {*ORDER, *BESIDE}
    assert len(sources()) > 80


def test_the_order_is_the_documented_one():
    text = (ROOT / "docs/architecture.md").read_text()
    line = re.search(r"^    (core ←.*)$", text, re.MULTILINE)
    assert line, "docs/architecture.md has no line `    core ← …`"
    assert tuple(part.strip() for part in line[1].split("←")) == ORDER


def test_vllm_and_triton_are_imported_in_their_own_rooms_only():
    homes = {"vllm": ("rollout/vllm_engine.py", "rollout/vllm_nccl.py", "serve/"), "triton": ("kernels/", "lab/")}
    for file in sources().values():
        inside = str(file.relative_to(ROOT))
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for name in {name.split(".")[0] for name in names} & set(homes):
                assert inside.startswith(homes[name]), (
                    f"{inside}:{node.lineno} imports {name}; its home is {' or '.join(homes[name])}"
                )
