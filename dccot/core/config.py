"""Configuration: typed dataclasses next to the code they configure, YAML files in configs/, `key=value` on the command
line.

A YAML file may name `base: other.yaml`, or a list of them (relative to itself); later ones win, its own keys override
all. Unknown keys, wrong types and impossible combinations are rejected with one line that says what to change. A
dataclass defines what is impossible in its method `check()`. Duplicate keys, YAML aliases and `${…}` are rejected too:
values are literal, both here and on disk.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import logging
import os
import re
import sys
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

log = logging.getLogger(__name__)
C = TypeVar("C")
E = TypeVar("E")
RENAMED = {
    "advantage.normalise": "advantage (std, or mean where it was none)",
    "batch.samples": "batch.group_size",
    "optimizer.clip": "optimizer.max_grad_norm",
    "rollout.parallel": "prompt.kind (parallel or sequential)",
}  # old key → new one


class ConfigError(ValueError):
    """A configuration that cannot be run; the message is one line and says what to change."""

    def __init__(self, message: str):
        super().__init__(hide_credentials(" ".join(message.splitlines())))


def hide_credentials(text: str) -> str:
    """With user and password removed from any URL in it."""
    return re.sub(r"(\w+://)[^/\s\"'@]*@", r"\1[…]@", text)


def check_address(url: str, key: str) -> None:
    """A full http(s) URL without a password, which would end up in recipes, provenance and process lists."""
    parts = urlsplit(url)
    require(
        "@" not in parts.netloc,
        f"{key} holds a user or a password; keys come from the environment: leave what is before the @ out",
    )
    example = "write a whole address, http://host:8000"
    require(
        parts.scheme in ("http", "https") and bool(parts.hostname), f"{key} is {url.rpartition('@')[2]!r}; {example}"
    )


def warn_of_plain_http(url: str, key: str) -> None:
    """Warns if keys and texts leave this machine unencrypted."""
    parts = urlsplit(url)
    if parts.scheme == "http" and not re.fullmatch(r"localhost|127(\.\d+){3}|::1", parts.hostname or ""):
        log.warning(
            "%s: http://%s is not encrypted: texts and keys can be read in transit; use https if you can",
            key,
            parts.netloc,
        )


def find_config(path: str | Path) -> Path:
    """The YAML file itself, or the one installed with the package when called from outside a checkout."""
    path = Path(path)
    installed = [
        root / Path(*path.parts[1:] if path.parts[:1] == ("configs",) else path.parts) for root in _config_roots()
    ]
    for candidate in [path, *installed]:
        if candidate.is_file():
            return candidate
    raise ConfigError(f"no configuration file {str(path)!r}; configs/ holds the ones that come with dccot")


def _config_roots() -> list[Path]:
    import dccot.configs

    return [Path(folder) for folder in dccot.configs.__path__]


def load_config(kind: type[C], path: str | Path | None, overrides: typing.Sequence[str] = ()) -> C:
    """Read `path` (and its bases), apply `key=value` overrides, check, and return an instance of the dataclass
    `kind`.
    """
    tree = read_yaml(find_config(path)) if path is not None else {}
    for override in overrides:
        key, equals, value = override.partition("=")
        if not equals:
            raise ConfigError(f"{override!r} is not of the form key=value")
        _set(tree, key.strip(), _parse(value, key))
    _refuse_unknown(kind, tree, "")
    _refuse_interpolation(tree, "")
    try:
        config = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(kind), tree))
    except (OmegaConfBaseException, TypeError, ValueError) as error:
        first = str(error).splitlines()[0]
        raise ConfigError(f"{getattr(error, 'full_key', None) or 'configuration'}: {first}") from None
    check(config)
    return typing.cast(C, config)


class _Loader(yaml.SafeLoader):
    """YAML without aliases (which can be endless) and duplicate keys."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError(f"alias *{self.peek_event().anchor}: write the value out")
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        twice = next((key for key in keys if keys.count(key) > 1), None)
        if twice is not None:
            raise yaml.YAMLError(f"key {twice!r} is given twice")
        return super().construct_mapping(node, deep)


def _parse(text: str, where: str) -> Any:
    try:
        return yaml.load(text, _Loader)
    except RecursionError:
        raise ConfigError(f"{where}: nested too deeply to be a configuration") from None
    except Exception as error:  # besides YAMLError, whatever the date and number constructors raise
        raise ConfigError(f"{where}: not valid YAML ({' '.join(str(error).split())})") from None


def read_yaml(path: Path, _above: tuple[str, ...] = ()) -> dict[str, Any]:
    """One YAML file merged over its `base` files."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    own = _parse(text, str(path)) or {}
    if not isinstance(own, dict):
        raise ConfigError(f"{path} holds a {type(own).__name__}; a configuration is a mapping of keys to values")
    bases = own.pop("base", None) or []
    if not isinstance(bases, str | list):
        raise ConfigError(f"{path}: base is {bases!r}; it must be a file name or a list of them")
    merged: dict[str, Any] = {}
    for base in [bases] if isinstance(bases, str) else bases:
        if not isinstance(base, str) or not (path.parent / base).is_file():
            raise ConfigError(f"{path}: base {base!r} was not found beside it")
        if len(_above) > 20:
            raise ConfigError(f"{path}: base files name each other in a circle: {' → '.join([*_above[-3:], base])}")
        merged = _merge(merged, read_yaml(path.parent / base, (*_above, base)))
    return _merge(merged, own)


def to_plain(config: Any) -> dict[str, Any]:
    """A configuration as dicts, lists and values."""
    return typing.cast(dict[str, Any], OmegaConf.to_container(OmegaConf.structured(config), enum_to_str=True))


def to_yaml(config: Any) -> str:
    return yaml.safe_dump(to_plain(config), sort_keys=False, allow_unicode=True)


def check(config: Any) -> None:
    """Call `check()` of every dataclass in the tree, leaves first."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            check(value)
    if hasattr(config, "check"):
        try:
            config.check()
        except ValueError as error:
            raise ConfigError(str(error)) from None


def require(holds: bool, message: str) -> None:
    if not holds:
        raise ConfigError(message)


def at_least(least: float, value: float, key: str) -> None:
    require(value >= least, f"{key} is {value}; it must be at least {least}")


def one_of(value: str, allowed: typing.Iterable[str], key: str, or_else: str = "") -> None:
    if value not in (allowed := list(allowed)):
        raise ConfigError(
            f"{key} is {value!r}; it must be one of {', '.join(allowed)}{or_else}{_nearest(str(value), allowed)}"
        )


def named(registry: Mapping[str, E], name: str, key: str) -> E:
    """What `name` means: an entry of the registry, or your own `my_package.my_module:my_function`. `key` is the
    setting's name.
    """
    module, colon, attribute = name.partition(":")
    if not colon:
        one_of(name, registry, key, " or your own, my_package.my_module:my_function")
        return registry[name]
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.append(os.getcwd())  # an installed command does not search the current folder
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{key} is {name!r}, which cannot be imported ({error}); the form is my_package.my_module:my_function"
        ) from None
    require(callable(found), f"{key} is {name!r}, a {type(found).__name__}; it must be a function or a class")
    return found


def _nearest(name: str, known: typing.Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else ""


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
    tree.update(_merge(tree, {last: value}))


def _refuse_unknown(kind: type, tree: dict, prefix: str) -> None:
    hints = typing.get_type_hints(kind)
    for key, value in tree.items():
        if key not in hints:
            if new := RENAMED.get(prefix + str(key)):
                raise ConfigError(f"{prefix}{key} is now called {new}")
            near = _nearest(str(key), hints)
            raise ConfigError(f"unknown key {prefix}{key}{near or '; known: ' + ', '.join(hints)}")
        _refuse_misfit(hints[key], value, prefix + key)


def _refuse_misfit(hint: Any, value: Any, key: str) -> None:
    """Unknown keys under `key`, and a single value where a group or list is expected."""
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        require(
            isinstance(value, dict), f"{key} is {value!r}; it is a group of settings: {', '.join(hint.__annotations__)}"
        )
        _refuse_unknown(hint, value, f"{key}.")
    elif isinstance(value, dict) and (old := next((n for n in value if f"{key}.{n}" in RENAMED), None)):
        raise ConfigError(f"{key}.{old} is now called {RENAMED[f'{key}.{old}']}")  # a group that became a value
    elif typing.get_origin(hint) is dict and dataclasses.is_dataclass(typing.get_args(hint)[1]):
        require(
            isinstance(value, dict),
            f"{key} is {str(value)[:80]!r}; it must be a mapping of names to groups of settings",
        )
        for name, item in value.items():
            _refuse_misfit(typing.get_args(hint)[1], item, f"{key}.{name}")
    elif typing.get_origin(hint) is list:
        require(isinstance(value, list), f"{key} is {value!r}; it must be a list")
        for index, item in enumerate(value):
            _refuse_misfit(typing.get_args(hint)[0], item, f"{key}[{index}]")


def _refuse_interpolation(value: Any, key: str) -> None:
    """OmegaConf would substitute environment variables for `${oc.env:…}`; none may end up in a configuration on
    disk.
    """
    if isinstance(value, str) and "${" in value:
        raise ConfigError(f"{key} is {value!r}; ${{…}} is not filled in: write the value itself")
    for name, item in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        _refuse_interpolation(item, f"{key}.{name}".lstrip("."))
