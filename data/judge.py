"""Judges decide whether an answer is right. Ours is math-verify, isolated from whatever an answer does to it.

    with open_judge(GradingConfig(workers=2)) as judge:            # the judge that grading.kind names
        verdicts = judge.grade([(response_text, gold), ...])       # same order; identical pairs are graded once
        classes = judge.equivalence_classes(texts)                 # for majority voting

math-verify's own time limits use SIGALRM, which only works on a main thread, and sympy can hang or eat memory where no
exception reaches it. So it runs in separate processes (`judge_process.py`), with a time and a memory limit per
answer, and the verdict says what happened: an answer that could not be judged never counts as wrong. The processes
start cheaply and import neither torch nor the program that grades. A batch without a single parsable answer is logged
as an error and recorded in `grader.alarm`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import resource
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Protocol, Self

import psutil
from pydantic import Field

from dccot.core.config import Positive, check, known, lookup
from dccot.core.limits import shown_limit
from dccot.core.plugins import Plugin, frozen
from dccot.rollout.response import UNJUDGED, Verdict
from dccot.rollout.tags import answer_block

logger = logging.getLogger("dccot.grading")
Gold = str | Sequence[str]
STOP_SECONDS = 5.0  # for a grading process to end by itself; it has nothing to save
SELF_TEST = [
    (["grade", r"so it is \boxed{0.5}", [r"\boxed{\frac{1}{2}}"]], Verdict.CORRECT),
    (["grade", r"\boxed{2}", [r"\boxed{3}"]], Verdict.WRONG),
]


class Judge(Protocol):
    """Base class for your own judge. It must implement `grade`; it is built from a GradingConfig."""

    # to be called now and then by a judge whose batches take minutes; without progress a training run is ended
    beat: Callable[[], None] = staticmethod(lambda: None)

    def grade(self, pairs: Sequence[tuple[str, Gold]]) -> list[Verdict]:
        """The verdict on each (response text, gold or golds) of a batch, in order."""

    def verdicts(self, pairs: Sequence[tuple[str, Gold]]) -> list[Verdict]:
        """The same for a part of a batch: nothing is reported before `report` is told of the whole."""
        return self.grade(pairs)

    def report(self, verdicts: Sequence[Verdict]) -> None:
        """Tell the user if a batch's verdicts look wrong."""
        return

    def judge(self, text: str, gold: Gold) -> Verdict:
        """The verdict on a single answer."""
        return self.grade([(text, gold)])[0]

    def equivalence_classes(self, texts: Sequence[str]) -> list[int]:
        """A class number per response, equal for equal answers; here, by the text of the answer block."""
        numbers: dict[str, int] = {}
        return [numbers.setdefault((answer_block(text) or text).strip(), len(numbers)) for text in texts]

    def close(self) -> None:
        """Stop everything the judge has started."""
        return

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass
class GradingConfig:
    # the judge, or your own: my_package.my_module:MyJudge
    kind: Annotated[str, known(JUDGES)] = "math_verify"
    workers: Positive = 2  # processes
    seconds: Annotated[float, Field(ge=0.1)] = 5.0  # CPU seconds per answer
    memory_mb: Annotated[int, Field(ge=64)] = 1024  # per answer, on top of what the process itself needs
    answer_block_only: bool = False  # look only inside <answer>…</answer>
    golds: Literal["any", "first"] = "any"  # of several golds: any of them is right, or only the first (the release)


class Grader(Judge):
    """math-verify in a pool of grading processes. Thread-safe; batches are graded one after another."""

    def __init__(self, config: GradingConfig | None = None):
        self.config = config or GradingConfig()
        check(self.config, "grading")
        self.counts: Counter[Verdict] = Counter()  # of the last batch
        self.alarm: str | None = None  # why someone should take a look at the last batch
        self.bad_golds: set[str] = set()
        self._lock = threading.Lock()
        self._tested = False
        self._processes = [_Process(self.config) for _ in range(self.config.workers)]

    def grade(self, pairs: Sequence[tuple[str, Gold]]) -> list[Verdict]:
        """The verdict on each (response text, gold or golds) of a batch, summed up in `counts` and `alarm`."""
        verdicts = self.verdicts(pairs)
        self.report(verdicts)
        return verdicts

    def judge(self, text: str, gold: Gold) -> Verdict:
        """The verdict on a single answer: nothing is reported."""
        return self.verdicts([(text, gold)])[0]

    def verdicts(self, pairs: Sequence[tuple[str, Gold]]) -> list[Verdict]:
        most = 1 if self.config.golds == "first" else None
        golds = [[gold] if isinstance(gold, str) else gold[:most] for _, gold in pairs]
        keys = [(self._scope(text), tuple(map(boxed, gold))) for (text, _), gold in zip(pairs, golds)]
        distinct = list(dict.fromkeys(keys))
        answers = dict(zip(distinct, self._ask_all([["grade", text, list(golds)] for text, golds in distinct])))
        self._complain_about({gold for (_, golds), answer in answers.items() if answer == "bad_gold" for gold in golds})
        return [Verdict.UNPARSABLE if answers[key] == "bad_gold" else Verdict(answers[key]) for key in keys]

    def equivalence_classes(self, texts: Sequence[str]) -> list[int]:
        """A class number per response, by math-verify's equality of their final answers; classes are numbered as they
        appear.

        Each answer joins the first class whose first member it equals, in either order. An answer that cannot be parsed
        or judged equals nothing, not even itself (math-verify says so of two empty answers), and is its own class.
        """
        scoped = [self._scope(text) for text in texts]
        distinct = list(dict.fromkeys(scoped))
        form_of = dict(zip(distinct, self._ask_all([["form", text] for text in distinct])))
        spelling = {form: text for text, form in reversed(form_of.items()) if form is not None and form not in UNJUDGED}
        leader: dict[str, str] = {}
        waiting = [form for form in dict.fromkeys(form_of.values()) if form in spelling]
        while waiting:
            first, *others = waiting
            joins = self._ask_all([["same", spelling[first], spelling[other]] for other in others])
            leader |= dict.fromkeys([first, *(o for o, same in zip(others, joins) if same is True)], first)
            waiting = [other for other in others if other not in leader]
        numbers: dict = {}
        return [numbers.setdefault(leader.get(form_of[text], index), len(numbers)) for index, text in enumerate(scoped)]

    def pids(self) -> list[int]:
        """The grading processes, each followed by its workers, for monitoring."""
        keepers = [psutil.Process(process.pid) for process in self._processes]
        return [each.pid for keeper in keepers for each in (keeper, *keeper.children())]

    def close(self) -> None:
        for process in self._processes:
            process.stop()

    def _scope(self, text: str) -> str:
        return (answer_block(text) or "") if self.config.answer_block_only else text

    def _ask_all(self, tasks: Sequence[list]) -> list:
        """The processes' answers in order; the next free process takes the next task."""
        with self._lock:
            if not self._tested:
                self._self_test()
            free: queue.SimpleQueue[_Process] = queue.SimpleQueue()
            for process in self._processes:
                free.put(process)

            def ask(task: list) -> Any:
                process = free.get()
                try:
                    return process.ask(task)
                finally:
                    self.beat()
                    free.put(process)

            with ThreadPoolExecutor(len(self._processes), "grader") as threads:
                return list(threads.map(ask, tasks))

    def _self_test(self) -> None:
        """A grader that cannot tell right from wrong must not start: its verdicts would look like wrong answers."""
        for process in self._processes:
            said = [process.ask(task) for task, _ in SELF_TEST]
            if said != [expected for _, expected in SELF_TEST]:
                wrong = f"two known answers were judged {', '.join(map(str, said))}"
                limited = resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY
                memory = f"its processes may lack memory: {shown_limit(resource.RLIMIT_AS, 'ulimit -v')}; raise it"
                remedy = memory if limited and Verdict.CRASHED in said else "reinstall math-verify"
                raise RuntimeError(f"math-verify does not work here: {wrong}; {remedy}")
        self._tested = True

    def report(self, verdicts: Sequence[Verdict]) -> None:
        self.counts = Counter(verdicts)
        self.alarm, count = None, self.counts.total()
        said = ", ".join(f"{number} {verdict.value}" for verdict, number in self.counts.most_common())
        if count and not self.counts[Verdict.CORRECT] + self.counts[Verdict.WRONG]:
            remedy = "look at the responses before trusting a reward"
            self.alarm = f"not one of {count} answers could be judged ({said}); {remedy}"
            logger.error(self.alarm)
        elif count and not self.counts[Verdict.CORRECT]:
            self.alarm = f"not one of {count} answers is correct ({said})"
            logger.warning(self.alarm)
        elif any(self.counts[verdict] for verdict in UNJUDGED):
            logger.info("grading: %s", said)

    def _complain_about(self, golds: set[str]) -> None:
        for gold in sorted(golds - self.bad_golds):
            remedy = "no answer to that problem can be right; fix or drop the problem"
            logger.error("gold answer %.80r cannot be parsed: %s", gold, remedy)
        self.bad_golds |= golds


JUDGES: dict[str, Callable[[GradingConfig], Judge]] = {"math_verify": Grader}


def open_judge(config: GradingConfig) -> Judge:
    return Plugin("judge", lookup(JUDGES, config.kind, "grading.kind"))(config, on="grading")


def verdicts_of(
    judge: Judge, pairs: Sequence[tuple[str, Gold]], ids: Sequence[str], *, part: bool = False
) -> list[Verdict]:
    """The judge's verdicts, one per pair; `ids` say whose answers they are, for errors. On a `part` of a batch the
    judge reports nothing.
    """
    plugin = Plugin("judge", judge.verdicts if part else judge.grade)
    on = f"{len(pairs)} answers ({ids[0]} to {ids[-1]})" if len(ids) > 1 else "".join(ids) or "no answers"
    found = plugin([(text, frozen(gold)) for text, gold in pairs], on=on)
    if not isinstance(found, Sequence) or isinstance(found, str) or len(found) != len(pairs):
        raise plugin.refused(found, f"a list of {len(pairs)} verdicts", on)
    return [_verdict(plugin, verdict, id) for verdict, id in zip(found, ids)]


def verdict_of(judge: Judge, text: str, gold: Gold, problem: str) -> Verdict:
    """The judge's verdict on a single answer."""
    plugin, on = Plugin("judge", judge.judge), f"an answer to problem {problem!r}"
    return _verdict(plugin, plugin(text, frozen(gold), on=on), on)


def _verdict(plugin: Plugin, found: Any, on: str) -> Verdict:
    if not isinstance(found, Verdict):
        raise plugin.refused(found, f"a Verdict ({', '.join(each.name for each in Verdict)})", on)
    return found


def classes_of(judge: Judge, texts: Sequence[str], problem: str) -> list[int]:
    """The judge's equivalence classes of the answers to one problem."""
    plugin, on = Plugin("judge", judge.equivalence_classes), f"the answers to problem {problem!r}"
    found = plugin(texts, on=on)
    if not isinstance(found, Sequence) or len(found) != len(texts) or not all(isinstance(each, int) for each in found):
        raise plugin.refused(found, f"a list of {len(texts)} whole numbers", on)
    return list(found)


def boxed(gold: str) -> str:
    """A gold answer in the form math-verify expects: on one line, in a box."""
    gold = " ".join(gold.split())
    if r"\boxed" in gold:
        return gold
    if len(gold) > 2 and gold[0] == gold[-1] == "$" and "$" not in gold[1:-1]:
        gold = gold[1:-1]
    return rf"\boxed{{{gold}}}"


class _Process:
    """One grading process; when it dies, a new one is started."""

    def __init__(self, config: GradingConfig):
        limits = [str(config.seconds), str(config.memory_mb)]
        self._command = [sys.executable, "-P", "-m", "dccot.data.judge_process", *limits]
        self._answered = False
        self._start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def _start(self) -> None:
        # Keys and CUDA settings are not passed on; a fixed hash seed makes sympy's set order, and so every verdict,
        # repeatable.
        kept = ("PATH", "LANG", "LD_LIBRARY_PATH", "PYTHONPATH")
        environment = {name: os.environ[name] for name in kept if name in os.environ} | {"PYTHONHASHSEED": "0"}
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (lives as long as the process)
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self._errors}
        # in its own session: Ctrl-C in a terminal goes to the trainer only
        self._process: Any = subprocess.Popen(self._command, **pipes, env=environment, start_new_session=True)

    def ask(self, task: list) -> Any:
        """The answer to a task. If the process dies, a new one retries the task once."""
        for _ in range(2):
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.write(json.dumps(task).encode() + b"\n")
                self._process.stdin.flush()
                if answer := self._process.stdout.readline():
                    self._answered = True
                    return json.loads(answer)
            reason = self._reason()
            self.stop()
            self._start()
        if not self._answered:
            raise RuntimeError(f"the grading process does not start: {reason}")
        return Verdict.CRASHED.value

    def _reason(self) -> str:
        self._process.wait()
        self._errors.seek(0)
        said = self._errors.read().decode(errors="replace").strip().splitlines()
        return said[-1] if said else f"exit code {self._process.returncode}"

    def stop(self) -> None:
        """Close its stdin, which ends it and its worker; kill it if it does not exit."""
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(timeout=STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._errors.close()
