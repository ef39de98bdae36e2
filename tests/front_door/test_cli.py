"""The front door: what a person types, and what is said back."""

import subprocess
import sys
from pathlib import Path

import pytest

from dccot.cli import COMMANDS, command, main

ROOT = Path(__file__).parents[2]


def test_help_names_every_command(capsys):
    assert main(["--help"]) == 0
    said = capsys.readouterr().out
    assert all(f"  {name} " in said for name in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_explains_itself_with_an_example(name, capsys):
    with pytest.raises(SystemExit) as end:
        command(name)(["--help"])
    assert end.value.code == 0
    assert "dccot" in capsys.readouterr().out


def test_importing_dccot_loads_neither_torch_nor_vllm():
    check = "import sys, dccot; print([m for m in ('torch', 'vllm', 'transformers') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", check], capture_output=True, text=True).stdout.strip() == "[]"


def test_the_public_names_are_there():
    import dccot

    assert all(getattr(dccot, name) is not None for name in dccot.__all__)
    with pytest.raises(AttributeError, match="it offers"):
        dccot.nothing  # noqa: B018


def test_the_configuration_reference_is_current():
    from dccot.lab.reference import reference

    written = (ROOT / "docs" / "configuration.md").read_text()
    assert written == reference(), "run `python -m dccot.lab.reference > docs/configuration.md`"


def test_every_key_of_the_configuration_has_a_meaning():
    from dccot.lab.reference import ROOTS, rows, shared

    kinds = [*ROOTS.values(), *(kind for _, kind in shared())]
    keys = [(kind.__name__, key, meaning) for kind in kinds for key, _, _, meaning in rows(kind)]
    assert [key for *key, meaning in keys if not meaning and not key[1].endswith("…")] == []
