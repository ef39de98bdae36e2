"""The other side of the grader: a process that imports math-verify once and leaves the work to expendable children.

    grader (any process, any thread)  ──pipe──  keeper  ──fork, pipe──  worker

The keeper reads one task per line and answers with one line. It never touches a model's text itself; its worker, a fork
of the clean keeper, does, and is replaced when it uses too much time or memory, when it dies, or when it has grown. A
fork takes a few milliseconds and importing sympy a second, so hostile answers cost little more than their time limit.
Time is the worker's own CPU time, so that a busy machine does not turn right answers into timeouts; wall time is a
generous backstop.

    python -P -m dccot.data.judge_process SECONDS MEMORY_MB       tasks on stdin, answers on stdout; Linux
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import multiprocessing
import os
import resource
import select
import signal
import sys
import time
from collections.abc import Callable
from functools import lru_cache
from multiprocessing.connection import Connection
from typing import Any

import psutil

from dccot.rollout.response import Verdict

POLL_SECONDS = 0.02
# wall-clock backstop, as a multiple of the CPU time limit and in seconds: a busy machine gives it a small share
WALL_FACTOR, WALL_SECONDS = 20, 60.0
FORK = multiprocessing.get_context("fork")


# ---- what the worker does ----


@lru_cache(maxsize=512)
def parsed(text: str) -> list:
    """What math-verify finds: [], [expression, string] or [string]. Its own timeouts need SIGALRM and stay off."""
    from math_verify import parse

    return parse(text, parsing_timeout=None)


def is_expression(found: Any) -> bool:
    return not isinstance(found, str)


def same(gold: list, answer: list) -> bool:
    from math_verify import verify

    return verify(gold, answer, timeout_seconds=None)


def grade(text: str, golds: list[str]) -> str:
    answer = parsed(text)
    found = [gold for gold in map(parsed, golds) if gold]
    if not found:
        return "bad_gold"
    if any(same(gold, answer) for gold in found):
        return Verdict.CORRECT
    return Verdict.WRONG if any(map(is_expression, answer)) else Verdict.UNPARSABLE


def form(text: str) -> str | None:
    """A text that answers share only if they are the same expression; None for one that does not equal itself."""
    from sympy import srepr

    answer = parsed(text)
    if not answer or not same(answer, answer):
        return None
    return srepr(answer[0]) if is_expression(answer[0]) else f"text {answer[0].strip()!r}"


def either_way(a: str, b: str) -> bool:
    """math-verify is not symmetric (gold first); two answers of equal rank are the same if either order says so."""
    return same(parsed(a), parsed(b)) or same(parsed(b), parsed(a))


JOBS: dict[str, Callable[..., bool | str | None]] = {"grade": grade, "form": form, "same": either_way}


def work(tasks: Connection, memory_mb: int) -> None:
    """A worker's loop until it is killed. It dies with the keeper, is the OOM killer's first choice, and never
    allocates far past the limit at once.
    """
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")
    limit = psutil.Process().memory_info().vms + 4 * memory_mb * 2**20
    if (highest := resource.getrlimit(resource.RLIMIT_AS)[1]) != resource.RLIM_INFINITY:
        limit = min(limit, highest)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.dup2(os.open(os.devnull, os.O_RDWR), 1)  # whatever sympy prints must not become an answer
    with contextlib.suppress(BaseException):
        while True:
            job, *arguments = tasks.recv()
            tasks.send(JOBS[job](*arguments))
    os._exit(1)


# ---- what the keeper does ----


class Worker:
    """A forked child and the pipe to it."""

    def __init__(self, memory_mb: int):
        self.pipe, theirs = FORK.Pipe()
        self.process = FORK.Process(target=work, args=(theirs, memory_mb))
        self.process.start()
        theirs.close()
        self._usage = psutil.Process(self.process.pid)
        self._base_mb = 0.0
        self._base_mb = self.grown_mb()

    def grown_mb(self) -> float:
        return self._usage.memory_info().rss / 2**20 - self._base_mb

    def cpu_seconds(self) -> float:
        return sum(self._usage.cpu_times()[:2])

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()


class Keeper:
    def __init__(self, seconds: float, memory_mb: int):
        self.seconds, self.memory_mb = seconds, memory_mb
        self.worker: Worker | None = None
        self.grader = os.getppid()

    def serve(self) -> None:
        """Answer tasks until the grader closes our stdin or is gone (others may still hold its end of the pipe)."""
        while os.getppid() == self.grader:
            if not select.select([sys.stdin], [], [], 2.0)[0]:
                continue
            task = sys.stdin.buffer.readline()
            if not task:
                break
            sys.stdout.buffer.write(json.dumps(self.answer(json.loads(task))).encode() + b"\n")
            sys.stdout.buffer.flush()
        self._dismiss()

    def answer(self, task: list) -> Any:
        """The worker's answer to one task, or why there is none."""
        if self.worker and not self.worker.process.is_alive():  # the kernel has killed it since its last answer
            self._dismiss()
        worker = self.worker = self.worker or Worker(self.memory_mb)
        try:
            worker.pipe.send(task)
            fate = self._watch(worker)
            answer = worker.pipe.recv() if fate is None else fate
        except (EOFError, OSError, psutil.Error):
            fate = answer = Verdict.CRASHED
        if fate is not None or not worker.process.is_alive() or worker.grown_mb() > self.memory_mb / 4:
            self._dismiss()
        return answer

    def _dismiss(self) -> None:
        if self.worker:
            self.worker.kill()
        self.worker = None

    def _watch(self, worker: Worker) -> Verdict | None:
        """Wait for the worker's answer while checking its CPU time and memory; None: it is there."""
        cpu = worker.cpu_seconds() + self.seconds
        wall = time.monotonic() + max(WALL_SECONDS, WALL_FACTOR * self.seconds)
        while not worker.pipe.poll(POLL_SECONDS):
            if worker.grown_mb() > self.memory_mb or os.getppid() != self.grader:
                return Verdict.CRASHED
            if worker.cpu_seconds() > cpu or time.monotonic() > wall:
                return Verdict.TIMED_OUT
        return None


def main(argv: list[str]) -> int:
    logging.disable(logging.CRITICAL)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # a cluster signals every process; the grader decides when to stop
    import math_verify  # noqa: F401  (imported before the first fork, so that every worker has it)

    parsed(r"\boxed{\frac{1}{2}}")  # builds the grammar's tables and the regular expressions once, for all workers
    parsed.cache_clear()
    Keeper(float(argv[0]), int(argv[1])).serve()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
