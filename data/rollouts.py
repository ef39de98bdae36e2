"""Problems in, rollouts out, and onto disk: training, evaluation, `dccot rollout` and `dccot data sequential` share it.

    with JsonlWriter(file) as writer:
        missing = missing_in([file], prompted, samples)                         what an earlier run did not finish
        for rollout in sample_to_file(writer, roll_out(engine, prompted, missing, prompt, config, seed=(seed,))): …

A response depends on its seed, (seed, problem, sample), not on what else is generated: an interrupted run is completed
by generating the missing pairs. Each response is one line, appended whole as soon as it is finished.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from itertools import islice, zip_longest
from pathlib import Path

from dccot.core.config import lookup
from dccot.core.files import BadData, JsonlWriter, read_jsonl
from dccot.core.plugins import Plugin
from dccot.data.judge import Judge, verdicts_of
from dccot.data.problems import Problem
from dccot.data.prompts import PromptConfig, Prompted
from dccot.rollout.director import RolloutConfig
from dccot.rollout.engine import Engine
from dccot.rollout.generate import Request, Watch, generate
from dccot.rollout.response import Response, Rollout
from dccot.rollout.tags import RULES, Flaw, after_think, flaw_of, sequential_flaw_of

Pair = tuple[str, int]  # problem id, sample
GRADED_TOGETHER = 64


def missing_pairs(prompted: Iterable[Prompted], samples: Iterable[int], have: Collection[Pair] = ()) -> list[Pair]:
    """Every missing sample of every problem, in the order of the problems."""
    samples = list(samples)
    return [(problem.id, sample) for problem, _ in prompted for sample in samples if (problem.id, sample) not in have]


def saved_rows(files: Iterable[Path], prompted: Iterable[Prompted], samples: int) -> Iterator[dict]:
    """The first `samples` responses to each problem that are in these files, each once. It is an error if the question,
    its gold or its prompt has changed since: those responses do not belong with the rest.
    """
    known = {problem.id: [problem.question, problem.gold, ids] for problem, ids in prompted}
    seen: set[Pair] = set()
    for file in files:
        for line, row in read_jsonl(file) if file.stat().st_size else ():
            try:
                problem, sample, asked = row["problem"], row["sample"], row["response"]["prompt"]
                if problem not in known or sample >= samples or (problem, sample) in seen:
                    continue
                same = [row["question"], row["gold"], asked] == known[problem]
            except (KeyError, TypeError):
                raise BadData(f"{file}:{line}: not a rollout; move the file away, or choose another --out") from None
            if not same:
                changed = f"{file}: question, gold, prompt or tokenizer of problem {problem!r} has changed since"
                raise BadData(f"{changed}; continue with the old ones, or choose another --out")
            seen.add((problem, sample))
            yield row


def missing_in(files: Iterable[Path], prompted: Sequence[Prompted], samples: int) -> list[Pair]:
    """The pairs that these files lack."""
    have = {(row["problem"], row["sample"]) for row in saved_rows(files, prompted, samples)}
    return missing_pairs(prompted, range(samples), have)


def roll_out(
    engine: Engine,
    prompted: Iterable[Prompted],
    pairs: Iterable[Pair],
    prompt: PromptConfig,
    config: RolloutConfig,
    *,
    seed: tuple[int | str, ...],
    watch: Watch | None = None,
    rule: str = "strict",
) -> Iterator[Rollout]:
    """These samples, ungraded, each as soon as it is finished, its format checked by the rules of its prompt; `rule` is
    that of parallel ones (tags.RULES).
    """
    known = {problem.id: (problem, ids) for problem, ids in prompted}
    requests = [Request(problem, sample, known[problem][1], prompt.parallel) for problem, sample in pairs]
    with closing(generate(engine, requests, config, seed=seed, watch=watch)) as responses:
        for request, response in responses:
            problem, _ = known[request.problem]
            yield rollout_of(problem, request.sample, response, engine, prompt, config, rule)


def rollout_of(
    problem: Problem,
    sample: int,
    response: Response,
    engine: Engine,
    prompt: PromptConfig,
    config: RolloutConfig,
    rule: str,
) -> Rollout:
    """A response as text, its format checked by the rules of its prompt; ungraded."""
    text = prompt.whole_text(response.text(engine.tokenizer))
    if not prompt.parallel:
        flaw = sequential_flaw_of(text)
    elif rule == "strict":
        flaw = flaw_of(text, config.workers, depth=config.depth)
    else:
        chosen = Plugin("format rule", lookup(RULES, rule, "format.rule"))
        on = f"problem {problem.id!r}, sample {sample}"
        flaw = chosen(text, config.workers, on=on)
        if not (flaw is None or isinstance(flaw, Flaw)):
            raise chosen.refused(flaw, "a Flaw of dccot.rollout.tags, or None", on)
    return Rollout(problem.id, sample, problem.question, problem.gold, text, response, flaw)


def sample_to_file(
    writer: JsonlWriter | None,
    rollouts: Iterable[Rollout],
    *,
    judge: Judge | None = None,
    row: Callable[[Rollout], dict] = Rollout.to_json,
) -> Iterator[Rollout]:
    """Rollouts as they arrive, each written before it is passed on; with a judge, after it was graded."""
    try:
        for rollout in graded(rollouts, judge) if judge else rollouts:
            if writer:
                writer.write(row(rollout))
            yield rollout
    finally:
        if isinstance(rollouts, Generator):
            rollouts.close()  # while its engine is there


def grade(rollouts: Sequence[Rollout], judge: Judge, *, thinking_counts: bool = True, part: bool = False) -> None:
    """Fill in the verdicts on whole responses; unless `thinking_counts`, also on what follows their thinking, which is
    what DeepScaleR's rule rewards. Of a `part` of a batch the judge reports nothing.
    """
    whole = [(rollout.text, rollout.gold) for rollout in rollouts]
    rest = [] if thinking_counts else [(after_think(rollout.text), rollout.gold) for rollout in rollouts]
    ids = [f"problem {rollout.problem!r}, sample {rollout.sample}" for rollout in rollouts]
    found = verdicts_of(judge, [*whole, *rest], ids if thinking_counts else [*ids, *ids], part=part)
    verdicts = [verdict.value for verdict in found]
    for rollout, verdict, answer in zip_longest(rollouts, verdicts[: len(whole)], verdicts[len(whole) :]):
        rollout.verdict, rollout.answer_verdict = verdict, answer


def graded(rollouts: Iterable[Rollout], judge: Judge) -> Iterator[Rollout]:
    """Rollouts with their verdicts, graded in batches while others are still being generated."""
    rollouts = iter(rollouts)
    while batch := list(islice(rollouts, GRADED_TOGETHER)):
        grade(batch, judge)
        yield from batch


class Grading:
    """Grades in the background while others are sampled: what has arrived meanwhile is graded together.

    grading.add(label, rollout)      as soon as it is finished
    grading.due(all=False)           once a turn: (label, rollout) of the turns before this one, or of all
    """

    def __init__(self, grade: Callable[[Sequence[Rollout]], None]):
        self._grade = grade
        self._thread = ThreadPoolExecutor(1, "grading")
        self._ungraded: deque[Rollout] = deque()
        self._before: list[tuple[int, Rollout, Future[None]]] = []
        self._now: list[tuple[int, Rollout, Future[None]]] = []

    def add(self, label: int, rollout: Rollout) -> None:
        self._ungraded.append(rollout)
        self._now.append((label, rollout, self._thread.submit(self._grade_waiting)))

    def due(self, *, all: bool) -> list[tuple[int, Rollout]]:
        """Waits for their verdicts. When a response comes back depends on turns, not on the judge's speed."""
        due = self._before + self._now if all else self._before
        self._before, self._now = ([] if all else self._now), []
        for _, _, graded in due:
            graded.result()
        return [(label, rollout) for label, rollout, _ in due]

    def done(self) -> list[tuple[int, Rollout]]:
        """Those whose verdicts are there: nothing waits, and the judge's speed decides."""
        there, later = [], []
        for label, rollout, graded in self._now:
            if graded.done():
                graded.result()
                there.append((label, rollout))
            else:
                later.append((label, rollout, graded))
        self._now = later
        return there

    def close(self) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _grade_waiting(self) -> None:
        together = [self._ungraded.popleft() for _ in range(len(self._ungraded))]
        if together:
            self._grade(together)
