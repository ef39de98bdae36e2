"""A machine that lacks something is told apart from a broken program, in one line that names the limit."""

import errno
import os
import sys

import pytest

from dccot.core.command import run_cleanly
from dccot.core.limits import LACKING, lacking, lost_rank
from tests.support import programs

SCARCE = """
import os, resource, sys
from dccot.core.command import run_cleanly
kind, limit, what = sys.argv[1:]
resource.setrlimit(getattr(resource, kind), (int(limit),) * 2)
sys.exit(run_cleanly(lambda: eval(what)))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "limit", "work", "said"),
    [
        ("RLIMIT_NOFILE", 12, "[os.pipe() for _ in range(20)]", "not enough file descriptors (ulimit -n is 12)"),
        ("RLIMIT_AS", 2**32, "bytearray(2**34)", "not enough memory (ulimit -v is 4194304)"),
    ],
)
def test_the_limit_that_was_hit_is_named_with_its_value(kind, limit, work, said):
    assert LACKING == 71
    [line] = programs.finish([sys.executable, "-c", SCARCE, kind, limit, work], code=71).stderr.splitlines()
    assert line.startswith(f"dccot: {said}; raise the limit")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (RuntimeError("can't start new thread"), "not enough processes (ulimit -u is "),
        (RuntimeError("[enforce fail at loop.cc:48] pipe: Too many open files\nmore"), "not enough file descriptors"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), "not enough memory"),
        (OSError(errno.EROFS, os.strerror(errno.EROFS), "/x"), "choose an output on a disk that can be written to"),
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), "make room and run this again"),
    ],
)
def test_errors_of_torch_gloo_and_the_system_are_told_by_their_words(error, said):
    line = lacking(error)
    assert line is not None and said in line and "\n" not in line


def test_a_program_that_is_wrong_keeps_its_traceback():
    assert lacking(ValueError("a bug")) is None and lost_rank(RuntimeError("a bug")) is None
    with pytest.raises(ZeroDivisionError):
        run_cleanly(lambda: 1 / 0)


def test_a_rank_that_lost_another_one_says_only_that(capsys):
    def lost() -> None:
        error = RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1")
        error.add_note("rank 1, step 3, phase grade, after 2.0 s")
        raise error

    assert run_cleanly(lost) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("dccot: another rank has ended") and "phase grade" in line
