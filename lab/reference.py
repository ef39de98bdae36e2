"""Writes docs/configuration.md from the configuration dataclasses and the comments next to their fields.

python -m dccot.lab.reference > docs/configuration.md
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
import types
import typing
from collections import Counter

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
A key whose default is empty must be set, unless its meaning says what empty means. Keys that several commands
share are listed once, at the end.
"""
Row = tuple[str, str, str, str]  # key, type, default, meaning


def comments(kind: type) -> dict[str, str]:
    """Field name → the comment above it or after it."""
    found = re.findall(r"^((?:    # .*\n)*)    (\w+):[^#\n]*(?:#\s*(.*))?$", inspect.getsource(kind), re.MULTILINE)
    after = {name: re.sub(r"^type: ignore\S*(  # )?", "", said) for _, name, said in found}
    return {name: after[name] or " ".join(line.strip(" #") for line in above.splitlines()) for above, name, _ in found}


def fields_of(kind: type, instance: object | None = None) -> typing.Iterator[tuple[str, typing.Any, object, str]]:
    """(name, type, default, meaning) of each field of a dataclass; defaults of this instance, if there is one."""
    hints = typing.get_type_hints(kind)
    said = {name: text for base in reversed(kind.__mro__[:-1]) for name, text in comments(base).items() if text}
    for field in dataclasses.fields(kind):
        value = _default(field) if instance is None else getattr(instance, field.name)
        yield field.name, hints[field.name], value, said.get(field.name, "")


def groups(kind: type) -> typing.Iterator[tuple[str, type]]:
    """(key, dataclass) of everything that is nested in a configuration."""
    for name, inner, _, _ in fields_of(kind):
        if dataclasses.is_dataclass(inner):
            yield name, typing.cast(type, inner)


@functools.cache
def shared() -> list[tuple[str, type]]:
    """What more than one configuration holds."""
    counted = Counter(group for kind in ROOTS.values() for group in groups(kind))
    return [group for group, count in counted.items() if count > 1]


def rows(kind: type, prefix: str = "", instance: object | None = None) -> typing.Iterator[Row]:
    """The rows of a dataclass and of what is nested in it; one row for what several commands share."""
    for name, inner, value, meaning in fields_of(kind, instance):
        if (name, inner) in shared() and not prefix:
            own, usual = dict(keys(inner, value)), dict(keys(inner))
            changed = ", ".join(f"`{key}={_plain(own[key])}`" for key in own if own[key] != usual[key])
            yield f"{name}.…", f"[{name}](#{name})", "", f"defaults: {changed}" if changed else ""
        elif dataclasses.is_dataclass(inner):
            yield from rows(typing.cast(type, inner), f"{prefix}{name}.", value)
        else:
            yield f"{prefix}{name}", _type_name(inner), _shown(value), meaning.replace("None", "null")


def keys(kind: type, instance: object | None = None, prefix: str = "") -> typing.Iterator[tuple[str, object]]:
    """(key, default) of a dataclass and of what is nested in it."""
    for name, inner, value, _ in fields_of(kind, instance):
        if dataclasses.is_dataclass(inner):
            yield from keys(typing.cast(type, inner), value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _default(field: dataclasses.Field) -> object:
    if field.default is not dataclasses.MISSING:
        return field.default
    return field.default_factory() if field.default_factory is not dataclasses.MISSING else dataclasses.MISSING


def _plain(value: object) -> str:
    """As it is written on a command line."""
    if isinstance(value, list):
        return f"[{','.join(map(_plain, value))}]"
    return str(value).lower() if isinstance(value, bool) else "null" if value is None else str(value)


def _shown(value: object) -> str:
    if value is dataclasses.MISSING:
        return "required"
    return "" if value == "" else f"`{_plain(value)}`"


def _type_name(hint: typing.Any) -> str:
    """`int | null`, the values of a Literal `auto | never`, `list[str]`."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType, typing.Literal):
        return " | ".join(map(_type_name, inner))
    if origin is not None:
        return f"{origin.__name__}[{', '.join(map(_type_name, inner))}]"
    return hint.__name__.replace("NoneType", "null") if isinstance(hint, type) else str(hint).removeprefix("typing.")


def table(rows: typing.Iterable[Row]) -> str:
    lines = [f"| `{row[0]}` | {' | '.join(cell.replace('|', chr(92) + '|') for cell in row[1:])} |\n" for row in rows]
    return "".join(["\n| key | type | default | meaning |\n|---|---|---|---|\n", *lines])


def reference() -> str:
    parts = [f"\n## {title}\n{table(rows(kind))}" for title, kind in ROOTS.items()]
    parts += [f"\n## {name}\n{table(rows(kind, f'{name}.'))}" for name, kind in shared()]
    return "".join([INTRODUCTION, *parts])


if __name__ == "__main__":
    print(reference(), end="")
