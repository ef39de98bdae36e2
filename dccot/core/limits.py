"""What a machine lacks, said in one line: which limit was hit, how high it is, how to raise it."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import psutil

LACKING = 71  # exit code: EX_OSERR of sysexits.h
LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Socket closed")  # gloo's words

# words in an error's message → what there is too little of, its limit, what sets the limit
LIMITS: dict[tuple[str, ...], tuple[str, int, str]] = {
    ("Too many open files",): ("file descriptors", resource.RLIMIT_NOFILE, "ulimit -n"),
    ("can't start new thread", "Resource temporarily unavailable"): ("processes", resource.RLIMIT_NPROC, "ulimit -u"),
    ("annot allocate memory", "an't allocate memory", "MemoryError", "std::bad_alloc"): (
        "memory",
        resource.RLIMIT_AS,
        "ulimit -v",
    ),
}
DISKS = {
    "Read-only file system": "choose an output on a disk that can be written to",
    "No space left on device": "make room and run this again",
    "Disk quota exceeded": "make room and run this again",
}


def shown_limit(kind: int, command: str) -> str:
    soft, _ = resource.getrlimit(kind)
    if soft == resource.RLIM_INFINITY:
        return f"{command} is unlimited: the machine itself, or its container, has no more"
    return f"{command} is {soft // 1024 if kind == resource.RLIMIT_AS else soft}"  # ulimit -v counts KiB


def lacking(error: BaseException) -> str | None:
    """One line if the machine, not the program, is at fault."""
    if isinstance(error, shutil.Error):  # of many files
        return lacking(OSError(str(error.args[0][0][-1])))
    seen = f"{type(error).__name__}: {error}"
    first = _first_line(seen)
    for words, (what, kind, command) in LIMITS.items():
        if any(word in seen for word in words):
            limit = shown_limit(kind, command)
            return f"not enough {what} ({limit}); raise the limit, or use less ({first}, in {_place(error)})"
    disk = next((remedy for words, remedy in DISKS.items() if words in seen), None)
    return f"{first}; {disk}" if disk else None


def lost_rank(error: BaseException) -> str | None:
    """One line if this rank failed only because another one had ended: that one says why."""
    if not isinstance(error, RuntimeError) or not any(words in str(error) for words in LOST):
        return None
    notes = "; ".join(getattr(error, "__notes__", []))
    return f"another rank has ended, and says why; this one waited for it{f' ({notes})' if notes else ''}"


def exceeds(work: Callable[[], object], seconds: int, memory_mb: int) -> str | None:
    """Try what a stranger's file makes us do in a child with limits first: which one it exceeds, or how it crashes;
    None if we can do it ourselves. An error that it raises is for the caller to meet.
    """
    child = os.fork()
    if child == 0:
        code = 0
        try:
            resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            most = psutil.Process().memory_info().vms + memory_mb * 2**20
            resource.setrlimit(resource.RLIMIT_AS, (most, resource.getrlimit(resource.RLIMIT_AS)[1]))
            sys.settrace(_end_without_memory)
            work()
        except MemoryError:
            code = 2
        except BaseException:
            code = 0
        finally:
            os._exit(code)
    deadline = time.monotonic() + 20 * seconds
    while not (ended := os.waitpid(child, os.WNOHANG))[0]:
        if time.monotonic() > deadline:  # not even starved of CPU time would it take so long: the fork itself hangs
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return None
        time.sleep(0.005)
    status = ended[1]
    if os.WIFSIGNALED(status):
        by = os.WTERMSIG(status)
        return f"takes more than {seconds} s" if by in (signal.SIGXCPU, signal.SIGKILL) else f"crashes (signal {by})"
    return f"takes more than {memory_mb:,} MB" if os.WEXITSTATUS(status) == 2 else None


def _end_without_memory(frame: FrameType, event: str, argument: Any) -> Any:
    """At the first MemoryError, which the work may swallow: with more memory it would go on."""
    if event == "exception" and issubclass(argument[0], MemoryError):
        os._exit(2)
    return _end_without_memory


def _first_line(text: str) -> str:
    return next(iter(text.splitlines()), "")[:300]


def _place(error: BaseException) -> str:
    """Where in our code it came from."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if "site-packages" not in frame.filename and "/lib/python" not in frame.filename]
    return "; ".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in ours[-1:])
