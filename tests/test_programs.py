"""Programs forked from the warm process behave as if Python had started them."""

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import programs

pytestmark = pytest.mark.slow
RANK = """
import os, sys, time
from dccot.core.runtime import Runtime

with Runtime.start() as runtime:
    runtime.barrier()
    os.write(1, f"{os.getpid()}\\n".encode())
    if "fail" in sys.argv and runtime.rank == 1:
        sys.exit(7)
    if len(sys.argv) > 1:
        time.sleep(600)
"""


def python(code: str, *arguments: str, **options):
    return programs.finish([sys.executable, "-c", code, *arguments], code=None, **options)


@pytest.fixture
def rank_program(tmp_path) -> Path:
    file = tmp_path / "rank.py"
    file.write_text(RANK)
    return file


@pytest.mark.parametrize(
    "code, status, stdout, stderr",
    [
        ("import sys, vllm; print(len(sys.modules) > 3000)", 0, "True\n", ""),
        ("import sys; sys.exit(3)", 3, "", ""),
        ("import sys; sys.exit('a message')", 1, "", "a message\n"),
        ("import os; os._exit(4)", 4, "", ""),
        ("import os; os.kill(os.getpid(), 9)", -signal.SIGKILL, "", ""),
        ("import signal; signal.raise_signal(signal.SIGTERM)", -signal.SIGTERM, "", ""),
        (
            "import atexit; atexit.register(print, 'at exit'); 1 / 0",
            1,
            "at exit\n",
            "ZeroDivisionError: division by zero\n",
        ),
    ],
)
def test_a_program_ends_as_under_python(code, status, stdout, stderr):
    done = python(code)
    assert (done.returncode, done.stdout) == (status, stdout)
    assert done.stderr.endswith(stderr) and bool(done.stderr) == bool(stderr)


def test_a_program_has_its_own_arguments_folder_input_variables_and_session(tmp_path):
    code = "import os, sys; print(sys.argv, os.getcwd(), input(), os.environ['MINE'], os.getsid(0) == os.getpid())"
    done = python(code, "x", cwd=tmp_path, input="given", env={**os.environ, "MINE": "value"})
    assert done.stdout == f"['-c', 'x'] {tmp_path} given value True\n", done.stderr


def test_variables_read_by_imports_get_a_fresh_process():
    done = python("import sys; print('torch' in sys.modules)", env={**os.environ, "TRITON_INTERPRET": "1"})
    assert done.stdout == "False\n"


def test_signals_and_time_limits_reach_a_program():
    command = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)"]
    with programs.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout.readline() == "up\n" and process.poll() is None
        process.send_signal(signal.SIGINT)
        assert process.wait() == -signal.SIGINT
    with pytest.raises(subprocess.TimeoutExpired):
        programs.run(command, stdout=subprocess.DEVNULL, timeout=0.1)


def test_a_launcher_reports_the_rank_that_failed_and_ends_the_other(rank_program):
    done = programs.finish(programs.torchrun(2, rank_program, "fail"), code=1)
    assert "exitcode  : 7" in done.stderr
    assert not [pid for pid in done.stdout.split() if Path("/proc", pid).exists()]


def test_ranks_do_not_outlive_a_launcher_that_is_killed(rank_program):
    command = programs.torchrun(2, rank_program, "stay")
    with programs.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as launcher:
        pids = [int(launcher.stdout.readline()) for _ in range(2)]
        ends = [os.pidfd_open(pid) for pid in pids]
        launcher.kill()
        for end in ends:
            assert select.select([end], [], [], 120)[0]
