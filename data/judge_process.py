"""The other side of the grader: a process that imports math-verify once and leaves the work to expendable children.

    grader (any process, any thread)  ──pipe──  keeper  ──fork, pipe──  worker

The keeper reads one task per line and answers with one line. It never touches a model's text itself; its worker, a fork
of the clean keeper, does, and is replaced when it uses too much time or memory, when it dies, or when it has grown. A
fork takes a few milliseconds and importing sympy a second, so hostile answers cost little more than their time limit.
Time is the worker's own CPU time, so that a busy machine does not turn right answers into timeouts; wall time is a
generous backstop.

    python -P -m dccot.data.judge_process SECONDS MEMORY_MB       tasks on stdin, answers on stdout; Linux (/proc)
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import os
import resource
import select
import signal
import sys
import time
from collections.abc import Callable
from functools import lru_cache

from dccot.rollout.response import Verdict

POLL_SECONDS = 0.02
WALL_FACTOR = 6  # wall-clock backstop, as a multiple of the CPU time limit
TASKS_PER_WORKER = 2000
PAGE_MB = resource.getpagesize() / 2**20
TICKS = os.sysconf("SC_CLK_TCK")


# --- what the worker does
# -------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=512)
def parsed(text: str) -> list:
    """What math-verify finds in a text: [], [expression, string] or [string]. Its own timeouts need SIGALRM and stay
    off.
    """
    from math_verify import parse

    return parse(text, parsing_timeout=None)


def is_expression(found) -> bool:
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
    """A text that two answers share only if they are the same expression; None if the answer does not even equal
    itself.
    """
    from sympy import srepr

    answer = parsed(text)
    if not answer or not same(answer, answer):
        return None
    return srepr(answer[0]) if is_expression(answer[0]) else f"text {answer[0].strip()!r}"


def either_way(a: str, b: str) -> bool:
    """math-verify is not symmetric (gold first); two answers of equal rank are the same if either order says so."""
    return same(parsed(a), parsed(b)) or same(parsed(b), parsed(a))


JOBS: dict[str, Callable[..., bool | str | None]] = {"grade": grade, "form": form, "same": either_way}


def work(tasks, answers) -> None:
    """A worker's loop until it is killed: one line in, one line out."""
    for line in tasks:
        job, *arguments = json.loads(line)
        answers.write(json.dumps(JOBS[job](*arguments)).encode() + b"\n")
        answers.flush()


# --- what the keeper does
# -------------------------------------------------------------------------------------------------------


class Worker:
    """A forked child and the pipes to it."""

    def __init__(self, memory_mb: int):
        task_read, self.task_write = os.pipe()
        self.answer_read, answer_write = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            with contextlib.suppress(BaseException):
                nowhere = os.open(os.devnull, os.O_RDWR)
                os.dup2(nowhere, 0)
                os.dup2(nowhere, 1)  # whatever sympy prints must not become an answer
                os.close(self.task_write)
                os.close(self.answer_read)
                _become_expendable(memory_mb)
                work(os.fdopen(task_read, "rb"), os.fdopen(answer_write, "wb"))
            os._exit(1)
        os.close(task_read)
        os.close(answer_write)
        self.tasks = 0
        self.base_mb = self.resident_mb()

    def resident_mb(self) -> float:
        with open(f"/proc/{self.pid}/statm") as file:
            return int(file.read().split()[1]) * PAGE_MB

    def cpu_seconds(self) -> float:
        with open(f"/proc/{self.pid}/stat") as file:
            user, system = file.read().rpartition(")")[2].split()[11:13]
        return (int(user) + int(system)) / TICKS

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)  # not reaped yet, so the pid still belongs to this child
        os.waitpid(self.pid, 0)
        os.close(self.task_write)
        os.close(self.answer_read)


def _become_expendable(memory_mb: int) -> None:
    """Die with the keeper, be the OOM killer's first choice, and never allocate far past the limit at once."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")
    with open("/proc/self/statm") as file:
        address_space = int(file.read().split()[0]) * resource.getpagesize()
    limit = address_space + 4 * memory_mb * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


class Keeper:
    def __init__(self, seconds: float, memory_mb: int):
        self.seconds, self.memory_mb = seconds, memory_mb
        self.worker: Worker | None = None
        self.grader = os.getppid()

    def serve(self) -> None:
        """Answer tasks until the grader closes our stdin or is gone (another process may still hold its end of the
        pipe).
        """
        while os.getppid() == self.grader:
            if not select.select([sys.stdin], [], [], 2.0)[0]:
                continue
            task = sys.stdin.buffer.readline()
            if not task:
                break
            sys.stdout.buffer.write(self.answer(task))
            sys.stdout.buffer.flush()
        self._dismiss()

    def answer(self, task: bytes) -> bytes:
        """The worker's answer to one task, or why there is none."""
        worker, taken = self._hand_over(task)
        fate = self._watch(worker) if taken else Verdict.CRASHED
        worker.tasks += 1
        if isinstance(fate, str) or worker.tasks >= TASKS_PER_WORKER or self._grown(worker) > self.memory_mb / 4:
            self._dismiss()
        return json.dumps(fate).encode() + b"\n" if isinstance(fate, str) else fate

    def _hand_over(self, task: bytes) -> tuple[Worker, bool]:
        """Give the task to the worker, or to a new one if the kernel has killed it since its last answer. Returns
        whether it was taken.
        """
        for fresh in (False, True):
            if fresh:
                self._dismiss()
            worker = self.worker = self.worker or Worker(self.memory_mb)
            rest = task
            try:
                while rest:
                    rest = rest[os.write(worker.task_write, rest) :]
                return worker, True
            except BrokenPipeError:
                pass
        return worker, False

    def _dismiss(self) -> None:
        if self.worker:
            self.worker.kill()
        self.worker = None

    def _grown(self, worker: Worker) -> float:
        return worker.resident_mb() - worker.base_mb

    def _watch(self, worker: Worker) -> bytes | str:
        """Wait for the worker's line while checking its CPU time and memory."""
        cpu, wall, line = worker.cpu_seconds() + self.seconds, time.monotonic() + WALL_FACTOR * self.seconds, b""
        while not line.endswith(b"\n"):
            if select.select([worker.answer_read], [], [], POLL_SECONDS)[0]:
                piece = os.read(worker.answer_read, 1 << 16)
                if not piece:
                    return Verdict.CRASHED
                line += piece
            elif self._grown(worker) > self.memory_mb or os.getppid() != self.grader:
                return Verdict.CRASHED
            elif worker.cpu_seconds() > cpu or time.monotonic() > wall:
                return Verdict.TIMED_OUT
        return line


def main(argv: list[str]) -> int:
    logging.disable(logging.CRITICAL)
    for number in (
        signal.SIGINT,
        signal.SIGTERM,
        signal.SIGUSR1,
    ):  # a cluster signals every process; the grader decides when to stop
        signal.signal(number, signal.SIG_IGN)
    import math_verify  # noqa: F401  (imported before the first fork, so that every worker has it)

    parsed(r"\boxed{\frac{1}{2}}")  # builds the grammar's tables and the regular expressions once, for all workers
    parsed.cache_clear()
    Keeper(float(argv[0]), int(argv[1])).serve()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
