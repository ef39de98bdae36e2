"""Functions that users plug in as `module:name`: rewards, filters, advantages, judges, objectives, rewriting rules.

    reward = Plugin("reward", my_reward)
    value = reward(reward.view(rollout), on="problem '417', sample 3")     a copy that cannot be changed
    number = reward.number(value, on=…)                                    finite, at most LARGEST

Whatever such a function raises, SystemExit included, and any value that it must not return, becomes a PluginError: its
own traceback, then one line with its name and what it was called on; the command exits with code 2. Our own functions
are called as they are: an error in one is a bug, with its whole traceback.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import numbers
import traceback
from collections.abc import Callable
from functools import cache
from types import MappingProxyType
from typing import Any, TypeVar

T = TypeVar("T")
LARGEST = 1e6  # of a reward or an advantage; gradients are proportional to it


class PluginError(Exception):
    """What a plugged-in function did wrong: one line, and its own traceback if it raised."""

    def __init__(self, message: str, trace: str = ""):
        super().__init__(message, trace)
        self.trace = trace

    def __str__(self) -> str:
        return self.args[0]


@dataclasses.dataclass(frozen=True)
class Plugin:
    kind: str  # what it is: reward, filter, …
    function: Callable[..., Any]

    @property
    def ours(self) -> bool:
        return self._place().startswith("dccot.")

    @property
    def name(self) -> str:
        return f"{self.kind} {self._place()}"

    def _place(self) -> str:
        """Where it is defined, as module:name; a method, even an inherited one, belongs to its object's class."""
        if inspect.ismethod(self.function):
            owner = type(self.function.__self__)
            return f"{owner.__module__}:{owner.__qualname__}.{self.function.__name__}"
        names = (getattr(self.function, attribute, None) for attribute in ("__module__", "__qualname__"))
        return ":".join(filter(None, names)) or shown(self.function)

    def view(self, value: T) -> T:
        """What to hand out in place of `value`, so that nobody can change it."""
        return value if self.ours else frozen(value)

    def __call__(self, *arguments: Any, on: str, **more: Any) -> Any:
        """`on` says which problem, sample or batch the arguments belong to."""
        if self.ours:
            return self.function(*arguments, **more)
        try:
            return self.function(*arguments, **more)
        except KeyboardInterrupt:  # a signal's
            raise
        except BaseException as error:
            # without this frame: it begins where the plug-in does
            own = error.__traceback__.tb_next if error.__traceback__ else None
            trace = "".join(traceback.format_exception(type(error), error, own))
            what = _cut(" ".join(traceback.format_exception_only(error)[-1].split()), 300)
            raise PluginError(f"{self.name} failed on {on}: {what}", trace) from None

    def refused(self, value: Any, must: str, on: str) -> PluginError:
        return PluginError(f"{self.name} returned {shown(value)} for {on}; it must return {must}")

    def number(self, value: Any, on: str) -> float:
        """`value` as a finite number that is not too large."""
        if not isinstance(value, numbers.Real):
            item = " (.item() of a tensor)" if hasattr(value, "item") else ""
            raise self.refused(value, f"a number{item}", on)
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if not abs(number) <= LARGEST:
            raise self.refused(value, f"a finite number between {-LARGEST:,.0f} and {LARGEST:,.0f}", on)
        return number


def shown(value: Any, most: int = 80) -> str:
    """A value in an error message, however large or broken it is."""
    try:
        text = repr(value)
    except Exception:
        text = f"a {type(value).__name__}"
    return _cut(" ".join(text.split()), most)


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[:most]}…"


def frozen(value: Any) -> Any:
    """A copy that cannot be changed, however deep: attributes cannot be set, and lists become tuples."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        copy: Any = object.__new__(_frozen_class(type(value)))
        for field in dataclasses.fields(value):
            object.__setattr__(copy, field.name, frozen(getattr(value, field.name)))
        return copy
    if isinstance(value, list | tuple):
        plain = not value or isinstance(value[0], int | float | str)  # token ids and log-probs: many, and all alike
        return tuple(value) if plain else tuple(map(frozen, value))
    return MappingProxyType({key: frozen(item) for key, item in value.items()}) if isinstance(value, dict) else value


@cache
def _frozen_class(kind: type) -> type:
    def refuse(self: Any, name: str, *_: Any) -> None:
        raise AttributeError(f"{name} of a {kind.__name__} cannot be changed: what is handed out is read-only")

    return type(kind.__name__, (kind,), {"__setattr__": refuse, "__delattr__": refuse})
