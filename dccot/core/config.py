"""Configuration: plain dataclasses next to the code they configure, YAML files in configs/, `key=value` overrides.

    @dataclass
    class RolloutConfig:
        workers: Positive = 3                            rollout.workers is 0; it must be at least 1
        top_p: Share = 1.0
        order: Literal["random", "given"] = "given"
        judge: Annotated[str, known(JUDGES)] = "exact"   a name in a registry, or your own my_module:my_function

A YAML file may name `base: other.yaml`, or a list of them (relative to itself); later ones win, its own keys override
all. pydantic checks every value against its annotation; a rule over several fields goes into the dataclass's method
`check()`. Whatever is wrong is rejected in one line that says what to change. Duplicate keys, YAML aliases and `${…}`
are rejected: values are literal, both here and on disk.
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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Any, TypeVar
from urllib.parse import urlsplit

import yaml
from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError

import dccot.configs
from dccot.core.plugins import shown

log = logging.getLogger(__name__)
C = TypeVar("C")
E = TypeVar("E")
RENAMED = {
    "advantage.normalise": "advantage",
    "batch": "batch.examples",  # of SFT, as are the next three
    "token_budget": "batch.token_budget",
    "validate_every": "validation.every",
    "workers": "rollout.workers",
    "batch.samples": "batch.group_size",
    "optimizer.clip": "optimizer.max_grad_norm",
    "prompt.format": "prompt.chat_format",
    "rollout.parallel": "prompt.kind (parallel or sequential)",
}  # old key → new one

# what other programs call it → what it is called here, in whichever group
ALSO_CALLED = {
    "lr": ("learning_rate",),
    "max_steps": ("steps",),
    "epochs": ("steps",),
    "batch_size": ("prompts", "examples"),
    "num_generations": ("group_size",),
    "max_tokens": ("max_tokens", "budget"),
    "max_new_tokens": ("budget",),
    "output_dir": ("output",),
    "beta": ("kl_coefficient",),
    "tp": ("tensor_parallel",),
    "fields": ("question", "gold", "completion"),
}
MAX_YAML, MAX_DEPTH = 2**20, 64  # bytes of a file; levels of nesting

Positive = Annotated[int, Field(ge=1, strict=True)]  # strict: true is not 1
NonNegative = Annotated[int, Field(ge=0, strict=True)]
Seed = Annotated[int, Field(ge=0, lt=2**63, strict=True)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(gt=0, le=1)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
Probability = Annotated[float, Field(ge=0, le=1)]


class ConfigError(ValueError):
    """A configuration that cannot be run; the message is one line and says what to change."""

    def __init__(self, message: str):
        super().__init__(hide_credentials(" ".join(message.splitlines())))


def hide_credentials(text: str) -> str:
    """With user and password removed from any URL in it."""
    return re.sub(r"(\w+://)[^/\s\"'@]*@", r"\1[…]@", text)


def check_address(url: str, key: str = "") -> str:
    """A full http(s) URL without a password, which would end up in recipes, provenance and process lists."""
    parts = urlsplit(url)
    if "@" in parts.netloc:
        raise ConfigError(
            f"{key} holds a user or a password; keys come from the environment: leave out all before the @"
        )
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"{key} is {url.rpartition('@')[2]!r}; write a whole address, http://host:8000")
    return url


Address = Annotated[str, AfterValidator(check_address)]


def warn_of_plain_http(url: str, key: str) -> None:
    """Warns if keys and texts leave this machine unencrypted."""
    parts = urlsplit(url)
    if parts.scheme == "http" and not re.fullmatch(r"localhost|127(\.\d+){3}|::1", parts.hostname or ""):
        words = "%s: http://%s is not encrypted: texts and keys can be read in transit; use https if you can"
        log.warning(words, key, parts.netloc)


def find_config(path: str | Path) -> Path:
    """The YAML file itself, that of a recipe's or run's folder, or the one installed with the package when called from
    outside a checkout.
    """
    inside = Path(path).parts[1:] if Path(path).parts[:1] == ("configs",) else Path(path).parts
    kept = (Path(path), Path(path, "recipe.yaml"), Path(path, "config.yaml"))
    for candidate in (*kept, *(Path(root, *inside) for root in dccot.configs.__path__)):
        if os.path.isfile(candidate):  # False for names that no file can have
            return candidate
    if "=" in str(path):
        raise ConfigError(f"{shown(str(path), 300)} comes after the YAML file, e.g. one of configs/")
    raise ConfigError(f"no configuration file {shown(str(path), 300)}; configs/ holds the ones that come with dccot")


def load_config(
    kind: type[C], path: str | Path | None, overrides: Sequence[str] = (), settings: Iterable[tuple[str, Any]] = ()
) -> C:
    """The dataclass `kind`, checked: a YAML file with its bases, `settings` of dotted keys, `key=value` overrides."""
    tree = read_yaml(find_config(path)) if path is not None else {}
    for name, value in settings:
        _set(tree, name, value)
    override_settings(tree, overrides)
    _refuse_interpolation(tree, "")
    config = _build(kind, _over_defaults(kind, tree))
    check(config)
    return config


def override_settings(tree: dict[str, Any], overrides: Iterable[str]) -> None:
    for override in overrides:
        key, equals, value = override.partition("=")
        if not equals:
            raise ConfigError(f"{override!r} is not of the form key=value")
        name, new = key.strip(), _parse(value, key)
        if "." in name:
            tree.pop(name, None)  # a recipe may spell it so
        _set(tree, name, new)


def with_new_names(tree: dict[str, Any], today: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """A saved configuration with its renamed keys as they are called now, except keys that `today`'s also has."""
    tree = _merge({}, tree)
    for old, new in RENAMED.items():
        *path, last = old.split(".")
        groups: list[Any] = [tree, today or {}]
        for part in path:
            groups = [group.get(part) if isinstance(group, Mapping) else None for group in groups]
        group, still = groups
        if not (isinstance(group, dict) and last in group and re.fullmatch(r"[\w.]+", new)):
            continue
        became_group = new.startswith(f"{old}.") and not isinstance(group[last], dict)
        if became_group or not (new.startswith(f"{old}.") or (isinstance(still, Mapping) and last in still)):
            _set(tree, new, group.pop(last))
    return tree


class _Loader(yaml.SafeLoader):
    """YAML without aliases (which can be endless), duplicate keys and deep nesting (every level takes longer)."""

    depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError(f"alias *{self.peek_event().anchor}: write the value out")
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise RecursionError
        try:
            return super().compose_node(parent, index)
        finally:
            self.depth -= 1

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
        if (size := path.stat().st_size) > MAX_YAML:
            raise ConfigError(f"{path} has {size:,} bytes; a configuration has at most {MAX_YAML:,}")
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
        if not isinstance(base, str) or not os.path.isfile(path.parent / base):
            raise ConfigError(f"{path}: base {shown(base)} was not found next to it")
        if len(_above) > 20:
            raise ConfigError(f"{path}: base files name each other in a circle: {' → '.join([*_above[-3:], base])}")
        merged = _merge(merged, read_yaml(path.parent / base, (*_above, base)))
    return _merge(merged, own)


def to_plain(config: Any) -> dict[str, Any]:
    """A configuration as dicts, lists and values."""
    return dataclasses.asdict(config)


def flat(config: Any, prefix: str = "") -> dict[str, Any]:
    """The configuration as dotted keys."""
    found: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            found |= flat(value, f"{prefix}{field.name}.")
        else:
            found[prefix + field.name] = value
    return found


def to_yaml(config: Any) -> str:
    return yaml.safe_dump(to_plain(config), sort_keys=False, allow_unicode=True)


def check(config: Any, key: str = "") -> None:
    """Check values against their types, then every `check()`, leaves first. `key` is its place, for errors."""
    _build(type(config), to_plain(config), key)
    _check_rules(config)


def _check_rules(config: Any) -> None:
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            _check_rules(value)
    if hasattr(config, "check"):
        try:
            config.check()
        except ValueError as error:
            raise ConfigError(str(error)) from None


def require(holds: bool, message: str) -> None:
    if not holds:
        raise ConfigError(message)


def one_of(value: str, allowed: Iterable[str], key: str, or_else: str = "") -> None:
    if value not in (allowed := list(allowed)):
        raise ConfigError(_not_among(value, allowed, key, or_else))


def lookup(registry: Mapping[str, E], name: str, key: str) -> E:
    """What the setting `key` names: an entry of the registry, or your own my_package.my_module:my_function."""
    module, colon, attribute = name.partition(":")
    if not colon:
        one_of(name, registry, key, " or your own, my_package.my_module:my_function")
        return registry[name]
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.append(os.getcwd())  # an installed command does not search the current folder
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (Exception, SystemExit) as error:  # a user's module may raise anything
        form = "the form is my_package.my_module:my_function"
        why = error if isinstance(error, ImportError) else f"{type(error).__name__}: {error}"
        raise ConfigError(f"{key} is {name!r}, which cannot be imported ({why}); {form}") from None
    require(callable(found), f"{key} is {name!r}, a {type(found).__name__}; it must be a function or a class")
    return found


def known(registry: Mapping[str, Any]) -> AfterValidator:
    """For `Annotated[str, known(REGISTRY)]`: a name that `lookup` finds."""

    def check_name(name: str) -> str:
        lookup(registry, name, "")
        return name

    return AfterValidator(check_name)


def required(remedy: str) -> AfterValidator:
    """For `Annotated[str, required("name a folder")]`: it may not be empty, although its default is."""

    def check_given(value: Any) -> Any:
        require(bool(value), f"is not set; {remedy}")
        return value

    return AfterValidator(check_given)


def _not_among(value: Any, allowed: Sequence[str], key: str, or_else: str = "") -> str:
    return f"{key} is {value!r}; it must be one of {', '.join(allowed)}{or_else}{_nearest(str(value), allowed)}"


def _nearest(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else ""


def _merge(under: dict, over: dict) -> dict:
    merged = dict(under)
    for key, value in over.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _merge(merged[key], value) if both else value
    return merged


def _over_defaults(kind: type, tree: dict[str, Any]) -> dict[str, Any]:
    """`tree` over the values that dataclasses choose for their groups: SFT's weight decay is 0 whichever other
    settings of its optimizer are given.
    """
    found = dict(tree)
    for field in dataclasses.fields(kind):
        make, given = field.default_factory, tree.get(field.name)
        if callable(make) and isinstance(given, dict) and dataclasses.is_dataclass(default := make()):
            group = _over_defaults(type(default), given)
            found[field.name] = group if isinstance(make, type) else _merge(to_plain(default), group)
    return found


def _set(tree: dict, dotted: str, value: Any) -> None:
    *path, last = dotted.split(".")
    for part in path:
        if not isinstance(tree.get(part), dict):
            tree[part] = {}
        tree = tree[part]
    tree.update(_merge(tree, {last: value}))


@cache
def _adapter(kind: type) -> TypeAdapter:
    # in a list, because a plain dataclass takes the settings of what it is part of, and has none of its own
    return TypeAdapter(list[kind], config=ConfigDict(extra="forbid", coerce_numbers_to_str=True, allow_inf_nan=False))  # type: ignore[valid-type]


def _build(kind: Any, tree: dict[str, Any], key: str = "") -> Any:
    try:
        return _adapter(kind).validate_python([tree])[0]
    except ValidationError as error:
        found = error.errors(include_url=False)
    wrong = next((e for e in found if e["type"] == "unexpected_keyword_argument"), found[0])
    raise ConfigError(_explained(kind, wrong["loc"][1:], key, wrong)) from None


def _explained(kind: type, place: Sequence[int | str], prefix: str, error: Mapping[str, Any]) -> str:
    """pydantic's error as one line: the key, its value, and what it must be."""
    key = prefix
    for part in place:
        key = f"{key}[{part}]" if isinstance(part, int) else f"{key}.{part}".lstrip(".")
    fault, value, limits = error["type"], error["input"], error.get("ctx", {})
    seen = shown(value, 100)
    unknown = fault == "unexpected_keyword_argument"
    names = [key] if unknown else [f"{key}.{name}" for name in value] if isinstance(value, dict) else []
    if old := next((name for name in names if name in RENAMED), None):  # a key, or inside a group that became a value
        return f"{old} is now called {RENAMED[old]}"
    if unknown:
        keys, name = _keys(kind, place[:-1]), str(place[-1])
        meant = [each for each in _all_keys(kind) if each.split(".")[-1] in ALSO_CALLED.get(name, (name,))]
        where = f"; did you mean {' or '.join(f'{prefix}.{each}'.lstrip('.') for each in meant)}?" if meant else ""
        return f"unknown key {key}{where or _nearest(name, keys) or '; known: ' + ', '.join(keys)}"
    if fault == "literal_error":
        return _not_among(value, re.findall(r"'([^']*)'", limits["expected"]), key)
    if fault == "dataclass_type":
        parts = [f"{key}.{name}".lstrip(".") for name in _keys(kind, place)]
        return f"{key} is {seen}; it is a group of settings: {', '.join(parts)}"
    if isinstance(value, dict) and fault.startswith(("string_", "int_", "float_", "bool_")):
        return f"{key} is one value, without {key}.{next(iter(value), '')}: write {key}=…"
    if fault == "value_error":
        return f"{key} {str(limits['error']).strip()}"
    for beginning, words in MUST_BE.items():
        if fault.startswith(beginning):
            return f"{key} is {seen}; it must be {words.format(**limits)}"
    return f"{key or 'configuration'} is {seen}; {error['msg']}"


MUST_BE = {  # the start of pydantic's name for an error → what the value must be
    "greater_than_equal": "at least {ge}",
    "greater_than": "above {gt}",
    "less_than_equal": "at most {le}",
    "less_than": "below {lt}",
    "finite_number": "finite",
    "int_": "a whole number",
    "float_": "a number",
    "bool_": "true or false",
    "string_": "text",
    "list_": "a list",
    "too_short": "a list of at least {min_length}",
    "too_long": "a list of at most {max_length}",
    "dict_": "a mapping of names to values",
}


def _keys(kind: Any, place: Sequence[int | str]) -> list[str]:
    """The settings of the group at `place` inside the dataclass `kind`."""
    for part in place:
        if typing.get_origin(kind) in (list, dict):
            kind = typing.get_args(kind)[-1]
        else:
            kind = typing.get_type_hints(kind)[str(part)]
    return [field.name for field in dataclasses.fields(kind)]


def _all_keys(kind: Any) -> Iterator[str]:
    """Dotted, of a dataclass and everything inside it."""
    hints = typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):
        if dataclasses.is_dataclass(inner := hints[field.name]):
            yield from (f"{field.name}.{name}" for name in _all_keys(inner))
        else:
            yield field.name


def _refuse_interpolation(value: Any, key: str) -> None:
    """Where others substitute, here nothing would be, and `${HOME}` would name a folder."""
    if isinstance(value, str) and "${" in value:
        raise ConfigError(f"{key} is {value!r}; ${{…}} is not filled in: write the value itself")
    for name, item in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        _refuse_interpolation(item, f"{key}.{name}".lstrip("."))
