"""A module that is imported when it is first used: torch takes seconds, and `--help` and a rejection need none of it.

if TYPE_CHECKING:
    import torch
else:
    torch = Lazy("torch")
"""

from __future__ import annotations

import importlib
from typing import Any


class Lazy:
    def __init__(self, name: str):
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        return getattr(importlib.import_module(self._name), attribute)

    def __setattr__(self, attribute: str, value: Any) -> None:
        if attribute == "_name":
            object.__setattr__(self, attribute, value)
        else:  # a test that replaces something in it
            setattr(importlib.import_module(self._name), attribute, value)
