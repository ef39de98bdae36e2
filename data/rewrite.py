"""Rewrites sequential solutions into the parallel format, retrying until they are well-formed and correct.

    dccot data rewrite configs/data/rewrite.yaml source=runs/data/sequential.jsonl output=runs/data/sft.jsonl

    source     id, question, gold, solution                             as `dccot data sequential` writes it
    attempts   <output>.attempts.jsonl: every attempt as it arrives, one line each; a rerun reads it and continues
    output     id, question, gold, completion, source                   accepted ones in source order: what `dccot sft` trains on

An attempt is a rewrite that arrived: accepted, or rejected with the reason. Failed requests are not attempts.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field
from importlib.resources import files
from pathlib import Path

from dccot.core.config import lookup, require
from dccot.core.files import BadData, JsonlWriter, checksum, read_jsonl, write_atomic, write_jsonl_atomic
from dccot.core.provenance import record
from dccot.core.runtime import Runtime
from dccot.data.endpoints import Endpoint, EndpointConfig, Refused, Reply
from dccot.data.judge import GradingConfig, Judge, Verdict
from dccot.data.problems import Problem
from dccot.data.task import task_of
from dccot.rollout.tags import flaw_of

ACCEPTED, FAILED = "accepted", "failed"
ENDPOINT = "endpoint"


@dataclass
class RewriteConfig:
    source: str = ""
    output: str = "runs/data/sft.jsonl"
    first: int | None = 4000  # use only the first N solutions; None: all
    attempts: int = 3
    workers: int = 3
    concurrency: int = 16  # concurrent requests
    task: str = "math"  # or your own: my_package.my_module:MyTask
    # endpoint: a stronger model; or your own function, my_package.my_module:my_rule; None: the task's own, or endpoint
    by: str | None = None
    # a file with your own; with {question} and {assistant_response} it is the whole message; None: ours
    instruction: str | None = None
    endpoint: EndpointConfig = field(default_factory=EndpointConfig)
    grading: GradingConfig = field(default_factory=lambda: GradingConfig(workers=1))

    def check(self) -> None:
        self.rule()
        require(bool(self.source), "source is not set; name the file that `dccot data sequential` wrote")
        require(self.attempts > 0, f"attempts is {self.attempts}; it must be at least 1")
        require(self.concurrency > 0, f"concurrency is {self.concurrency}; it must be at least 1")
        ours = self.instruction is None
        require(
            not ours or self.workers == 3,
            f"workers is {self.workers}, our instruction speaks of 3; set instruction=FILE",
        )

    def rule(self) -> Callable[..., str] | None:
        """The function that rewrites; None: the endpoint does."""
        if self.by is None:
            return task_of(self).rewrite
        return None if self.by == ENDPOINT else lookup({}, self.by, "by")


@dataclass(frozen=True)
class Solution:
    """A problem and a sequential solution of it."""

    problem: Problem
    text: str


@dataclass
class Summary:
    """The outcome for the solutions, over all runs that wrote the same attempts."""

    solutions: int
    accepted: int
    outcomes: dict[str, int]  # of single attempts, by reason
    failed: int  # solutions whose request failed permanently
    exhausted: int  # solutions with no attempt left
    input_tokens: int
    output_tokens: int

    def __str__(self) -> str:
        refused = Counter(
            {reason: count for reason, count in self.outcomes.items() if reason not in (ACCEPTED, FAILED)}
        )
        lines = [
            f"{self.accepted:,} of {self.solutions:,} solutions accepted, {self.exhausted:,} out of attempts, {self.failed:,} failed",
            f"tokens spent: {self.input_tokens:,} read, {self.output_tokens:,} written",
        ]
        return "\n".join(lines + [f"  {count:>6,} attempts {reason}" for reason, count in refused.most_common()])


def accept(problem: Problem, text: str, judge: Judge, workers: int = 3) -> str | None:
    """Why a parallel solution must not be trained on; None if it is well-formed and correct."""
    flaw = flaw_of(text, workers)
    if flaw is not None:
        return f"ill-formed: {flaw.value}"
    verdict = judge.judge(text, problem.gold)
    return None if verdict is Verdict.CORRECT else verdict.value


Rewriter = Callable[[Solution, int], Awaitable[Reply]]  # (solution, attempt) → reply


def rule(rewrite: Callable[..., str]) -> Rewriter:
    """A rewriter that follows a rule in this process, e.g. `arithmetic.rewrite_parallel`."""

    async def reply(solution: Solution, attempt: int) -> Reply:
        return Reply(rewrite(solution.problem, solution.text, attempt=attempt), False, 0, 0)

    return reply


def by_endpoint(endpoint: Endpoint, instruction: str) -> Rewriter:
    """A rewriter that asks a stronger model: the instruction and then the task, or one message if the instruction is a
    template.
    """
    task = prompt_text("rewrite_task.txt")

    async def reply(solution: Solution, attempt: int) -> Reply:
        if is_template(instruction):
            return await endpoint.ask("", fill_template(instruction, solution))
        before, _, rest = task.partition("{{question}}")
        between, _, after = rest.partition("{{solution}}")
        return await endpoint.ask(
            instruction, f"{before}{solution.problem.question}{between}{solution.text}{after}".strip()
        )

    return reply


def is_template(instruction: str) -> bool:
    """Whether an instruction has placeholders for the problem and its solution; then it is the whole message."""
    return "{question}" in instruction and "{assistant_response}" in instruction


def fill_template(template: str, solution: Solution) -> str:
    """The template with both texts filled in and doubled braces made single. The texts themselves are not changed."""
    meant = {"{{": "{", "}}": "}", "{question}": solution.problem.question, "{assistant_response}": solution.text}
    return re.sub(r"\{\{|\}\}|\{question\}|\{assistant_response\}", lambda found: meant[found.group()], template)


def prompt_text(name: str) -> str:
    return files("dccot.data").joinpath("prompts", name).read_text(encoding="utf-8")


def load_solutions(path: str | Path, first: int | None = None) -> list[Solution]:
    """Problems with their sequential solutions, in file order."""
    found: dict[str, Solution] = {}
    for line, row in read_jsonl(path, strict=True):
        missing = [name for name in ("id", "question", "gold", "solution") if name not in row]
        if missing:
            raise BadData(f"{path}:{line}: no field {missing[0]!r}; a solution has id, question, gold and solution")
        problem = Problem(str(row["id"]), row["question"], row["gold"])
        if problem.id in found:
            raise BadData(f"{path}:{line}: id {problem.id!r} occurs twice")
        found[problem.id] = Solution(problem, row["solution"])
    return list(found.values())[:first]


def attempts_path(output: str | Path) -> Path:
    return Path(output).with_suffix(".attempts.jsonl")


async def rewrite_all(
    solutions: Sequence[Solution],
    rewriter: Rewriter,
    judge: Judge,
    config: RewriteConfig,
    *,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Summary:
    """Retry every solution until it is accepted or out of attempts, then write the accepted ones. Safe to kill and call
    again.
    """
    with JsonlWriter(attempts_path(config.output)) as log:
        rows = list(log.rows())
        tried = Counter(row["id"] for row in rows if row["outcome"] != FAILED)
        finished = {row["id"] for row in rows if row["outcome"] == ACCEPTED}
        open_ones = [s for s in solutions if s.problem.id not in finished and tried[s.problem.id] < config.attempts]
        done = len(solutions) - len(open_ones)
        queue = iter(open_ones)

        async def lane() -> None:
            nonlocal done
            for solution in queue:
                for attempt in range(tried[solution.problem.id], config.attempts):
                    row = await _attempt(solution, attempt, rewriter, judge, config.workers)
                    rows.append(row)
                    log.write(row)
                    if row["outcome"] in (ACCEPTED, FAILED):
                        break
                done += 1
                progress(done, len(solutions))

        try:
            async with asyncio.TaskGroup() as lanes:
                for _ in range(min(config.concurrency, len(open_ones))):
                    lanes.create_task(lane())
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None
    write_jsonl_atomic(config.output, accepted_rows(solutions, rows))
    return summarize(solutions, rows, config.attempts)


async def _attempt(solution: Solution, attempt: int, rewriter: Rewriter, judge: Judge, workers: int) -> dict:
    """One attempt as a row of the log."""
    try:
        reply = await rewriter(solution, attempt)
    except Refused as error:
        return {"id": solution.problem.id, "attempt": attempt, "outcome": FAILED, "reason": str(error)}
    reason = await asyncio.to_thread(accept, solution.problem, reply.text.strip(), judge, workers)
    if reason is not None and reply.cut:
        reason = "cut by max_tokens"
    return {"id": solution.problem.id, "attempt": attempt, "outcome": reason or ACCEPTED, **asdict(reply)}


def accepted_rows(solutions: Iterable[Solution], rows: Iterable[dict]) -> list[dict]:
    """The SFT set: one row per accepted solution, in the order of the solutions."""
    texts = {row["id"]: row["text"].strip() for row in rows if row["outcome"] == ACCEPTED}
    return [
        {**asdict(solution.problem), "completion": texts[solution.problem.id], "source": solution.text}
        for solution in solutions
        if solution.problem.id in texts
    ]


def summarize(solutions: Sequence[Solution], rows: Sequence[dict], attempts: int) -> Summary:
    ids = {solution.problem.id for solution in solutions}
    rows = [row for row in rows if row["id"] in ids]
    tried = Counter(row["id"] for row in rows if row["outcome"] != FAILED)
    accepted = {row["id"] for row in rows if row["outcome"] == ACCEPTED}
    exhausted = {id_ for id_, count in tried.items() if count >= attempts} - accepted
    failed = {row["id"] for row in rows if row["outcome"] == FAILED} - accepted - exhausted
    spent = {name: sum(row.get(name, 0) for row in rows) for name in ("input_tokens", "output_tokens")}
    return Summary(
        len(ids), len(accepted), dict(Counter(row["outcome"] for row in rows)), len(failed), len(exhausted), **spent
    )


async def run(config: RewriteConfig, progress: Callable[[int, int], None]) -> Summary:
    """The whole command: read, ask the endpoint or the rule, check, write."""
    solutions = load_solutions(config.source, config.first)
    read = {"source": config.source, "instruction": config.instruction}
    record(
        Path(config.output),
        config,
        {key: {Path(file).name: checksum(file)} for key, file in read.items() if file},
        Runtime.alone(),
    )
    async with AsyncExitStack() as stack:
        rewriting = config.rule()
        if rewriting is None:
            instruction = (
                Path(config.instruction).read_text(encoding="utf-8")
                if config.instruction
                else prompt_text("rewrite.txt")
            )
            rewriter = by_endpoint(await stack.enter_async_context(Endpoint(config.endpoint)), instruction)
        else:
            rewriter = rule(rewriting)
        judge = stack.enter_context(task_of(config).open_judge())
        summary = await rewrite_all(solutions, rewriter, judge, config, progress=progress)
    write_atomic(Path(config.output).with_suffix(".summary.json"), json.dumps(asdict(summary), indent=1) + "\n")
    return summary
