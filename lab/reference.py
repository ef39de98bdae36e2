"""Writes docs/configuration.md from the configuration dataclasses and the comments next to their fields.

python -m dccot.lab.reference > docs/configuration.md
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import types
import typing

from dccot.data.sft_set import RewriteConfig
from dccot.recipe import Recipe, Stage
from dccot.stages import KINDS

# of the stages that are also commands
COMMANDS = {"sft": "dccot sft", "rl": "dccot rl", "sequential": "dccot data sequential"}
COMMANDS |= {"import_sft": "dccot data import-sft"}
ROOTS = {
    "dccot pipeline": Recipe,
    "a stage of a recipe": Stage,
    **{COMMANDS.get(name, f"stage `{name}`"): kind.config for name, kind in KINDS.items() if name != "rewrite"},
    "dccot data rewrite": RewriteConfig,
}
INTRODUCTION = """# Configuration

Every key with its type, default and meaning, generated from the dataclasses by `python -m dccot.lab.reference`. A YAML
file may name `base: other.yaml` or a list of such files; `key=value` on the command line overrides the file;
`--print-config` shows the resolved configuration. Unknown keys are rejected, with the nearest valid one suggested.
"""


def comments(kind: type) -> dict[str, str]:
    """Field name → the comment above it or after it."""
    found = re.findall(r"^((?:    # .*\n)*)    (\w+):[^#\n]*(?:#\s*(.*))?$", inspect.getsource(kind), re.MULTILINE)
    after = {name: re.sub(r"^type: ignore\S*(  # )?", "", said) for _, name, said in found}
    return {name: after[name] or " ".join(line.strip(" #") for line in above.splitlines()) for above, name, _ in found}


def rows(kind: type, prefix: str = "", instance: object | None = None) -> typing.Iterator[tuple[str, str, str, str]]:
    """(key, type, default, meaning) of a dataclass and everything inside it."""
    hints = typing.get_type_hints(kind)
    said = {name: text for base in reversed(kind.__mro__[:-1]) for name, text in comments(base).items() if text}
    for field in dataclasses.fields(kind):
        value = _default(field) if instance is None else getattr(instance, field.name)
        if dataclasses.is_dataclass(hints[field.name]):
            yield from rows(hints[field.name], f"{prefix}{field.name}.", value)
        else:
            yield f"{prefix}{field.name}", _type_name(hints[field.name]), _shown(value), said.get(field.name, "")


def _default(field: dataclasses.Field) -> object:
    if field.default is not dataclasses.MISSING:
        return field.default
    return field.default_factory() if field.default_factory is not dataclasses.MISSING else dataclasses.MISSING


def _shown(value: object) -> str:
    if value is dataclasses.MISSING:
        return "required"
    return "" if value == "" else f"`{'null' if value is None else value}`"


def _type_name(hint: object) -> str:
    """`int | null`, or the values of a Literal: `auto | never`."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType, typing.Literal):
        return " | ".join(map(_type_name, typing.get_args(hint)))
    if isinstance(hint, type) and typing.get_origin(hint) is None:
        return hint.__name__.replace("NoneType", "null")
    return re.sub(r"[\w.]+\.", "", str(hint))


def reference() -> str:
    parts = [INTRODUCTION]
    for title, kind in ROOTS.items():
        parts.append(f"\n## {title}\n\n| key | type | default | meaning |\n|---|---|---|---|\n")
        for cells in rows(kind):
            key, type_, default, meaning = (cell.replace("|", "\\|") for cell in cells)
            parts.append(f"| `{key}` | {type_} | {default} | {meaning} |\n")
    return "".join(parts)


if __name__ == "__main__":
    print(reference(), end="")
