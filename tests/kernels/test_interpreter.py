"""Runs the tests in `interpreted` in their own process: TRITON_INTERPRET=1 is read when kernels are decorated."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("chosen", ["not thorough", pytest.param("thorough", marks=pytest.mark.thorough)])
def test_triton_kernels_in_the_interpreter(chosen):
    folder = Path(__file__).parent / "interpreted"
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "pytest", str(folder), "-x", "-m", chosen, "-W", "ignore::RuntimeWarning"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    print(done.stdout[-8000:], done.stderr[-2000:])
    assert done.returncode == 0
    assert " passed" in done.stdout and "skipped" not in done.stdout
