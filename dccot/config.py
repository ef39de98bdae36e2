"""Configuration: typed dataclasses next to the code they configure, YAML files in configs/, `key=value` on the command line.

A YAML file may name `base: other.yaml`, or a list of them (relative to itself); later ones win, its own keys over all. Unknown keys, wrong types and impossible
combinations are refused with one line that says what to change. A dataclass says what is impossible in its method `check()`.
"""
from __future__ import annotations

import dataclasses
import difflib
import typing
from pathlib import Path
from typing import Any, TypeVar

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

C = TypeVar("C")


class ConfigError(ValueError):
    """A configuration that cannot be run; the message is one line and says what to change."""


def find_config(path: str | Path) -> Path:
    """The YAML file itself, or the one that is installed with the package when called from outside a checkout."""
    path = Path(path)
    installed = [root / Path(*path.parts[1:] if path.parts[:1] == ("configs",) else path.parts) for root in _config_roots()]
    for candidate in [path, *installed]:
        if candidate.is_file():
            return candidate
    raise ConfigError(f"no configuration file {str(path)!r}; configs/ holds the ones that come with dccot")


def _config_roots() -> list[Path]:
    import dccot.configs

    return [Path(folder) for folder in dccot.configs.__path__]


def load_config(kind: type[C], path: str | Path | None, overrides: typing.Sequence[str] = ()) -> C:
    """Read `path` (and its bases), apply `key=value` overrides, check, and return an instance of the dataclass `kind`."""
    tree = read_yaml(find_config(path)) if path is not None else {}
    for override in overrides:
        key, equals, value = override.partition("=")
        if not equals:
            raise ConfigError(f"{override!r} is not of the form key=value")
        _set(tree, key.strip(), _parse_value(value, key))
    _refuse_unknown(kind, tree, "")
    try:
        config = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(kind), tree))
    except OmegaConfBaseException as error:
        first = str(error).splitlines()[0]
        raise ConfigError(f"{getattr(error, 'full_key', None) or 'configuration'}: {first}") from None
    check(config)
    return config


def read_yaml(path: Path, _above: tuple[str, ...] = ()) -> dict[str, Any]:
    """One YAML file merged over the files it names as `base`."""
    try:
        own = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from None
    except RecursionError:
        raise ConfigError(f"{path} is nested too deeply to be a configuration") from None
    if not isinstance(own, dict):
        raise ConfigError(f"{path} holds a {type(own).__name__}; a configuration is a mapping of keys to values")
    bases = own.pop("base", None) or []
    merged: dict[str, Any] = {}
    for base in [bases] if isinstance(bases, str) else bases:
        if not isinstance(base, str) or not (path.parent / base).is_file():
            raise ConfigError(f"{path}: base {base!r} was not found beside it")
        if len(_above) > 20:
            raise ConfigError(f"{path}: base files name each other in a circle: {' → '.join([*_above[-3:], base])}")
        merged = _merge(merged, read_yaml(path.parent / base, (*_above, base)))
    return _merge(merged, own)


def to_yaml(config: Any) -> str:
    return yaml.safe_dump(OmegaConf.to_container(OmegaConf.structured(config), enum_to_str=True), sort_keys=False, allow_unicode=True)


def check(config: Any) -> None:
    """Call `check()` of every dataclass in the tree, leaves first."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            check(value)
    if hasattr(config, "check"):
        config.check()


def require(holds: bool, message: str) -> None:
    if not holds:
        raise ConfigError(message)


def one_of(value: str, allowed: typing.Iterable[str], key: str) -> None:
    allowed = list(allowed)
    require(value in allowed, f"{key} is {value!r}; it must be one of {', '.join(allowed)}{_nearest(str(value), allowed)}")


def _nearest(name: str, known: typing.Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else ""


def _parse_value(text: str, key: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        raise ConfigError(f"{key}: cannot read the value {text!r}") from None


def _merge(under: dict, over: dict) -> dict:
    merged = dict(under)
    for key, value in over.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _merge(merged[key], value) if both else value
    return merged


def _set(tree: dict, dotted: str, value: Any) -> None:
    *path, last = dotted.split(".")
    for part in path:
        if not isinstance(tree.get(part), dict):
            tree[part] = {}
        tree = tree[part]
    tree[last] = value


def _refuse_unknown(kind: type, tree: dict, prefix: str) -> None:
    hints = typing.get_type_hints(kind)
    for key, value in tree.items():
        if key not in hints:
            near = _nearest(str(key), hints)
            raise ConfigError(f"unknown key {prefix}{key}{near or '; known: ' + ', '.join(hints)}")
        nested = next((t for t in (hints[key], *typing.get_args(hints[key])) if dataclasses.is_dataclass(t)), None)
        if nested and isinstance(value, dict):
            _refuse_unknown(nested, value, f"{prefix}{key}.")
