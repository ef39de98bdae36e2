"""What users plug in can raise, return or try to change anything: the run says which function did what, and to whom."""

import math
import sys
from asyncio import CancelledError
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from dccot.core.command import Stopped, run_cleanly
from dccot.core.config import ConfigError, lookup
from dccot.core.plugins import Plugin, PluginError, frozen

ON = "problem '417', sample 3"


def raises(error: BaseException):
    def my_reward(*_):
        raise error

    return my_reward


@pytest.mark.parametrize(
    "error", [ValueError("no\nluck"), SystemExit(0), KeyError("x"), RecursionError("deep"), CancelledError()]
)
def test_whatever_a_plugin_raises_ends_the_command_with_its_traceback_then_one_line_and_code_two(error, capsys):
    assert run_cleanly(lambda: Plugin("reward", raises(error))(1, on=ON)) == 2
    *trace, line = capsys.readouterr().err.splitlines()
    assert trace[0] == "Traceback (most recent call last):" and trace[1].split(", ")[-1] == "in my_reward"
    assert line.startswith(f"dccot: reward {__name__}:raises.<locals>.my_reward failed on problem '417', sample 3: ")
    assert type(error).__name__ in "".join(trace) and "core/plugins.py" not in "".join(trace)


@pytest.mark.parametrize("signalled", [KeyboardInterrupt, Stopped])
def test_a_signal_that_arrives_in_a_plugin_is_not_its_error(signalled):
    with pytest.raises(signalled):
        Plugin("reward", raises(signalled()))(on=ON)


@pytest.mark.parametrize(
    ("value", "must"),
    [
        (None, "a number"),
        ("0.5", "a number"),
        (torch.tensor(0.5), "a number (.item() of a tensor)"),
        (math.nan, "a finite number between -1,000,000 and 1,000,000"),
        (math.inf, "a finite number"),
        (1e300, "a finite number"),
        pytest.param(-(10**6000), "a finite number", id="6,000 digits"),
        (1 + 2j, "a number"),
    ],
)
def test_what_is_not_a_reasonable_number_is_refused_with_function_sample_and_value(value, must):
    with pytest.raises(PluginError) as refused:
        Plugin("reward", raises).number(value, ON)
    said = str(refused.value)
    assert said.startswith(f"reward {__name__}:raises returned ") and len(said) < 300
    assert f"for {ON}; it must return {must}" in said


@pytest.mark.parametrize("value", [1, 0.25, True, np.float32(0.5), np.int64(-3), 1e6])
def test_every_kind_of_number_is_taken(value):
    assert Plugin("reward", raises).number(value, ON) == float(value)


@dataclass
class Inner:
    ids: list[int] = field(default_factory=list)


@dataclass
class Outer:
    inners: list[Inner]
    facts: dict[str, list[int]]

    @property
    def length(self) -> int:
        return sum(len(inner.ids) for inner in self.inners)


@pytest.mark.parametrize(
    "change",
    [
        lambda view: view.inners.clear(),
        lambda view: view.inners[0].ids.append(4),
        lambda view: setattr(view.inners[0], "ids", []),
        lambda view: delattr(view, "inners"),
        lambda view: view.facts.update(a=1),
        lambda view: view.facts["a"].append(1),
    ],
)
def test_what_is_handed_out_cannot_be_changed_however_deep_and_works_like_the_original(change):
    whole = Outer([Inner([1, 2, 3])], {"a": [1]})
    view = frozen(whole)
    assert isinstance(view, Outer) and view.length == 3 and list(view.inners[0].ids) == [1, 2, 3]
    with pytest.raises((AttributeError, TypeError)):
        change(view)
    assert whole == Outer([Inner([1, 2, 3])], {"a": [1]})


@pytest.mark.parametrize("line", ["1 / 0", "raise SystemExit(0)", "def f(:", "undefined"])
def test_a_module_that_cannot_be_imported_is_a_configuration_error(line, tmp_path, monkeypatch):
    (tmp_path / "broken_plugin.py").write_text(line)
    monkeypatch.syspath_prepend(tmp_path)
    sys.modules.pop("broken_plugin", None)
    with pytest.raises(ConfigError, match=r"reward\.kind is 'broken_plugin:f', which cannot be imported"):
        lookup({}, "broken_plugin:f", "reward.kind")
