"""The SFT set: sequential solutions, rewritten into the parallel format, and a report on the result.

    dccot data sequential configs/data/sequential.yaml model=MODEL problems=runs/data/deepscaler.jsonl
    torchrun --nproc_per_node 8 -m dccot.data.cli sequential configs/data/sequential.yaml …    every rank has its share
    dccot data rewrite configs/data/rewrite.yaml source=runs/data/sequential.jsonl output=runs/data/sft.jsonl
    dccot data check runs/data/sft.jsonl [--tokenizer MODEL] [--json]

sequential   up to three attempts per problem; the first correct one is kept (rejection sampling)
               <output>.attempts.<rank>.jsonl   every graded attempt as it arrives
               output                           id, question, gold, solution, attempt, tokens
rewrite      each solution is rewritten until it is well-formed and correct, or out of attempts
               <output>.attempts.jsonl          every rewrite that arrived, accepted or with the reason against it, and
                                                requests that failed, which are not attempts
               output                           id, question, gold, completion, source: what `dccot sft` trains on
check        balance      mean over blocks of shortest / longest worker, 1 = all equal
             verbatim     share of a worker's words inside a run of five words that also occurs in the source
             leak         a worker that names another worker, or states a result (`x = 5`) that another worker of this
                          block reached first and that neither the question nor the director's text before the block has

Outputs are in the order of the problems; sequential solutions, with `order: attempts`, by the attempt that solved them.
A rerun reads the attempts and continues; an attempt's seed is derived from (seed, problem, attempt), so it ends with
what an uninterrupted run would have.
"""

from __future__ import annotations

import asyncio
import glob
import json
import re
import statistics
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np

from dccot.core.config import Positive, Seed, lookup, require, required
from dccot.core.files import BadData, JsonlWriter, checksum, read_jsonl, write_atomic, write_jsonl_atomic
from dccot.core.plugins import Plugin, shown
from dccot.core.progress import waiting
from dccot.core.provenance import record
from dccot.core.runtime import Runtime, require_shared
from dccot.data.endpoints import Endpoint, EndpointConfig, Refused, Reply
from dccot.data.judge import GradingConfig, Judge, Verdict, verdict_of
from dccot.data.problems import Columns, Fields, Problem, problem_in
from dccot.data.prompts import PromptConfig
from dccot.data.rollouts import missing_pairs, roll_out, sample_to_file
from dccot.data.task import TaskName, find_task, task_of
from dccot.model.folder import model_checksums, resolve_model
from dccot.rollout.director import RolloutConfig
from dccot.rollout.engine import Engine, EngineConfig, open_engine
from dccot.rollout.response import Rollout
from dccot.rollout.tags import (
    TAG_PATTERN,
    TASK_PATTERN,
    THINK_OPEN,
    Flaw,
    IllFormed,
    Width,
    flaw_of,
    parse,
    sequential_flaw_of,
)
from dccot.rollout.thread import Thread

Progress = Callable[[int, int, str], None]  # (done, total, what else to say)


def _silent(done: int, total: int, text: str) -> None: ...


# ---- sequential solutions ----


@dataclass
class SequentialConfig:
    # a Hugging Face folder, or a run (its newest checkpoint)
    model: Annotated[str, required("name a Hugging Face folder or a run, e.g. model=runs/base")] = ""
    problems: Annotated[str, required("name a JSONL or parquet file")] = ""  # JSONL or parquet
    output: str = "runs/data/sequential.jsonl"  # file of the correct solutions
    task: TaskName = "math"  # or your own: my_package.my_module:MyTask
    shuffle: Seed | None = None  # put the problems into a random order, drawn with this seed, before `first`; None: no
    first: Positive | None = 15_000  # use only the first N problems; None: all
    attempts: Positive = 3  # per problem, until one is correct
    # of the output: as the problems come, or all solved at the first attempt, then at the second, …
    order: Literal["problems", "attempts"] = "problems"
    seed: Seed = 0  # of the responses
    data: Columns = field(default_factory=Columns)
    prompt: PromptConfig = field(default_factory=lambda: PromptConfig("raw_sequential"))
    rollout: RolloutConfig = field(default_factory=lambda: RolloutConfig(budget=24_000, top_p=0.95))
    engine: EngineConfig = field(default_factory=EngineConfig)
    grading: GradingConfig = field(default_factory=GradingConfig)

    def check(self) -> None:
        kind, alone = self.prompt.kind, self.engine.tensor_parallel == 1
        wanted = f"prompt.kind is {kind}; sequential solutions are wanted: set it to sequential"
        require(not self.prompt.parallel, wanted)
        require(alone, "engine.tensor_parallel must be 1 here: every rank solves its own share")


@dataclass
class SequentialSummary:
    problems: int
    kept: int
    verdicts: dict[str, int]  # of single attempts
    tokens: int

    def __str__(self) -> str:
        said = ", ".join(f"{count:,} {verdict}" for verdict, count in self.verdicts.items())
        return f"{self.kept:,} of {self.problems:,} problems solved; attempts: {said}; {self.tokens:,} tokens written"


def solve_sequentially(
    config: SequentialConfig, engine: Engine | None = None, *, progress: Progress = _silent
) -> SequentialSummary | None:
    """`dccot data sequential`; None on ranks other than the first. A given engine is used and left running."""
    task, output = task_of(config), Path(config.output)
    problems = chosen_problems(task.problems(config.problems), config.shuffle, config.first)
    with Runtime.of_workers() as runtime:
        with waiting(f"reading {config.model}"):
            model = resolve_model(config.model)
            read = {Path(config.problems).name: checksum(config.problems)}
            inputs = {"model": model_checksums(model, runtime), "problems": read}
        record(output, config, inputs, runtime)
        require_shared(output.parent, runtime)  # rank 0 collects what all of them write there
        opened = open_engine(model, config.engine, engine, logs=output.parent)
        with task.open_judge() as judge, opened as engine:
            _attempt_problems(engine, judge, problems, config, progress)
            runtime.gather([])  # every attempt is on disk
        return _keep_first_correct(problems, config) if runtime.is_main else None


def chosen_problems(problems: Sequence[Problem], shuffle: int | None, first: int | None) -> list[Problem]:
    """The first `first` problems; with `shuffle`, of the permutation that NumPy's default generator draws with this
    seed, which is also the one of Hugging Face's `Dataset.shuffle(seed)`.
    """
    order = range(len(problems)) if shuffle is None else np.random.default_rng(shuffle).permutation(len(problems))
    return [problems[index] for index in order[:first]]


def solution_attempts(output: str | Path, replica: int | str) -> Path:
    return Path(output).with_suffix(f".attempts.{replica}.jsonl")


def _logged(output: str | Path) -> list[dict]:
    """Every attempt that any rank of any earlier run has finished; a last line cut by a kill does not count."""
    paths = sorted(Path(output).parent.glob(solution_attempts(glob.escape(Path(output).name), "*").name))
    return [row for path in paths if path.stat().st_size for _, row in read_jsonl(path, report=lambda _: None)]


def _attempt_problems(
    engine: Engine, judge: Judge, problems: Sequence[Problem], config: SequentialConfig, progress: Progress
) -> None:
    """Append this rank's attempts until each of its problems is solved or out of attempts."""
    prompted = task_of(config).prompts(problems, engine.tokenizer)[engine.replica :: engine.replicas]
    earlier = _logged(config.output)
    solved = {row["id"] for row in earlier if row["verdict"] == Verdict.CORRECT}
    tried = {(row["id"], row["attempt"]) for row in earlier}
    with JsonlWriter(solution_attempts(config.output, engine.replica)) as log:
        for attempt in range(config.attempts):
            due = missing_pairs((one for one in prompted if one[0].id not in solved), [attempt], tried)
            seed = config.seed, "sequential"
            rollouts = roll_out(engine, prompted, due, config.prompt, config.rollout, seed=seed)
            for rollout in sample_to_file(log, rollouts, judge=judge, row=_attempt_row):
                if rollout.correct:
                    solved.add(rollout.problem)
                progress(len(solved), len(prompted), "")


def _attempt_row(rollout: Rollout) -> dict:
    finish, tokens = rollout.response.finish.value, rollout.response.total_tokens
    outcome = {"verdict": rollout.verdict, "finish": finish, "tokens": tokens}
    return {"id": rollout.problem, "attempt": rollout.sample, **outcome, "text": rollout.text}


def _keep_first_correct(problems: Sequence[Problem], config: SequentialConfig) -> SequentialSummary:
    rows = _logged(config.output)
    correct = [row for row in rows if row["verdict"] == Verdict.CORRECT]
    first = {row["id"]: row for row in sorted(correct, key=lambda row: row["attempt"], reverse=True)}
    solved = [problem for problem in problems if problem.id in first]
    if config.order == "attempts":
        solved.sort(key=lambda problem: first[problem.id]["attempt"])
    kept = [
        {**asdict(problem), "solution": row["text"], "attempt": row["attempt"], "tokens": row["tokens"]}
        for problem, row in ((problem, first[problem.id]) for problem in solved)
    ]
    write_jsonl_atomic(config.output, kept)
    verdicts = dict(Counter(row["verdict"] for row in rows))
    return SequentialSummary(len(problems), len(kept), verdicts, sum(row["tokens"] for row in rows))


# ---- rewriting ----

ACCEPTED, FAILED = "accepted", "failed"
RULES: dict[str, Callable[..., str] | None] = {"endpoint": None}  # besides your own; None: a stronger model
OPENED = re.compile(rf"{THINK_OPEN}(?:\s|\\n)*\Z")  # in a file, the paper's template ends with a backslash and an n


@dataclass
class RewriteConfig:
    # sequential solutions, as `dccot data sequential` writes them
    source: Annotated[str, required("name the file that `dccot data sequential` wrote")] = ""
    output: str = "runs/data/sft.jsonl"  # file of the SFT set
    first: Positive | None = 4000  # use only the first N solutions; None: all
    attempts: Positive = 3  # per solution, until a rewriting passes the checks
    workers: Width = 3  # of every block; [1, 8]: as many as tasks are listed before it
    depth: Positive = 1  # levels of workers
    concurrency: Positive = 16  # concurrent requests
    task: TaskName = "math"  # or your own: my_package.my_module:MyTask
    # endpoint: a stronger model; or your own function, my_package.my_module:my_rule; None: the task's own, or endpoint
    by: str | None = None
    # a file with your own; with {question} and {assistant_response} it is the whole message; None: ours
    instruction: str | None = None
    endpoint: EndpointConfig = field(default_factory=EndpointConfig)
    grading: GradingConfig = field(default_factory=lambda: GradingConfig(workers=1))

    def check(self) -> None:
        self.rule()

    def rule(self) -> Callable[..., str] | None:
        """The function that rewrites; None: the endpoint does."""
        return task_of(self).rewrite if self.by is None else lookup(RULES, self.by, "by")


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
    spent: dict[str, int]  # tokens, by TOKENS
    dollars: float | None  # None: endpoint.prices is not set

    def __str__(self) -> str:
        reasons = Counter({key: count for key, count in self.outcomes.items() if key not in (ACCEPTED, FAILED)})
        lines = [
            f"{self.accepted:,} of {self.solutions:,} solutions accepted, {self.exhausted:,} out of attempts, "
            f"{self.failed:,} failed",
            f"spent: {spent_text(self.spent, self.dollars)}",
        ]
        return "\n".join(lines + [f"  {count:>6,} attempts {reason}" for reason, count in reasons.most_common()])


TOKENS = ("input_tokens", "cached_tokens", "output_tokens")  # as rows of the log name them


def dollars_of(spent: Mapping[str, int], prices: Sequence[float] | None) -> float | None:
    """What the tokens cost; `prices` are per million read, read from the cache, and written."""
    read, cached, written = (spent[name] for name in TOKENS)
    if prices is None:
        return None
    return (prices[0] * (read - cached) + prices[1] * cached + prices[2] * written) / 1e6


def spent_text(spent: Mapping[str, int], dollars: float | None) -> str:
    read, cached, written = (spent[name] for name in TOKENS)
    cost = f", ${dollars:,.2f}" if dollars is not None else ""
    return f"{read:,} tokens read ({cached:,} from the cache), {written:,} written{cost}"


Rewriter = Callable[[Solution, int], Awaitable[Reply]]  # (solution, attempt) → reply


def accept(
    problem: Problem, text: str, judge: Judge, workers: Width = 3, depth: int = 1, *, alone: bool = False
) -> str | None:
    """Why a parallel solution must not be trained on; None if it is well-formed and correct. `alone`: it may have no
    workers.
    """
    flaw = flaw_of(text, workers, depth=depth)
    if alone and flaw is Flaw.NO_SPAWN:
        flaw = sequential_flaw_of(text)
    if flaw is not None:
        return f"ill-formed: {flaw.value}"
    verdict = verdict_of(judge, text, problem.gold, problem.id)
    return None if verdict is Verdict.CORRECT else verdict.value


def by_rule(rewrite: Callable[..., str]) -> Rewriter:
    """A rewriter that follows a rule in this process, e.g. `arithmetic.rewrite_parallel`."""
    rule = Plugin("rewriting rule", rewrite)

    async def reply(solution: Solution, attempt: int) -> Reply:
        on = f"problem {solution.problem.id!r}, attempt {attempt}"
        text = rule(rule.view(solution.problem), solution.text, attempt=attempt, on=on)
        if not isinstance(text, str):
            raise rule.refused(text, "text", on)
        return Reply(text, False, 0, 0)

    return reply


def by_endpoint(endpoint: Endpoint, instruction: str) -> Rewriter:
    """A rewriter that asks a stronger model: the instruction and then the problem with its solution, or one message if
    the instruction has {question} and {assistant_response} to be filled in. There, doubled braces become single, and a
    solution that opens its thinking does not do so again after an instruction that ends with `<think>`, as the paper's.
    """
    message, shared = prompt_text("rewrite_task.txt"), ""
    if whole := "{question}" in instruction and "{assistant_response}" in instruction:
        place = re.search(r"(?<!\{)\{(question|assistant_response)\}", instruction)
        shared, message = instruction[: place.start() if place else 0], instruction[place.start() if place else 0 :]
    opened = whole and OPENED.search(instruction.split("{assistant_response}")[0])
    places = r"\{\{question\}\}|\{\{solution\}\}" if not whole else r"\{\{|\}\}|\{question\}|\{assistant_response\}"

    async def reply(solution: Solution, attempt: int) -> Reply:
        question, text = solution.problem.question, solution.text
        if opened:
            text = text.lstrip().removeprefix(THINK_OPEN).lstrip("\n")
        meant = {"{{": "{", "}}": "}", "{question}": question, "{assistant_response}": text}
        meant |= {"{{question}}": question, "{{solution}}": text}
        before, filled = (re.sub(places, lambda found: meant[found.group()], part) for part in (shared, message))
        return await (endpoint.ask("", filled, before) if whole else endpoint.ask(instruction, filled.strip()))

    return reply


def prompt_text(name: str) -> str:
    return files("dccot.data").joinpath("prompts", name).read_text(encoding="utf-8")


def instruction_for(workers: Width, depth: int) -> str:
    """Our rewriting instruction, which speaks of three workers on one level, with what is different about others."""
    parts = [prompt_text("rewrite.txt")]
    if workers != 3:
        fixed = isinstance(workers, int)
        parts.append(prompt_text("rewrite_fixed.txt" if fixed else "rewrite_chosen.txt"))
    parts += [prompt_text("rewrite_nested.txt")] if depth > 1 else []
    least, most = (workers, workers) if isinstance(workers, int) else workers
    meant = {"{{least}}": least, "{{most}}": most, "{{depth}}": depth}
    return re.sub("|".join(map(re.escape, meant)), lambda found: str(meant[found.group()]), "\n".join(parts))


def load_solutions(path: str | Path, first: int | None = None) -> list[Solution]:
    """Problems with their sequential solutions, in file order."""
    found: dict[str, Solution] = {}
    if not Path(path).is_file():
        raise BadData(f"no file {str(path)!r}; `dccot data sequential` writes one")
    for line, row in read_jsonl(path, strict=True):
        _require_fields(row, ("id", "question", "gold", "solution"), f"{path}:{line}", "a solution")
        try:
            problem = problem_in(row, Fields(), line - 1)
        except BadData as fault:
            raise BadData(f"{path}:{line}: {fault}") from None
        if problem.id in found:
            raise BadData(f"{path}:{line}: id {problem.id!r} occurs twice")
        found[problem.id] = Solution(problem, row["solution"])
    return list(found.values())[:first]


def _require_fields(row: dict, names: Sequence[str], place: str, what: str) -> None:
    missing = [name for name in names if name not in row]
    if missing:
        raise BadData(f"{place}: no field {missing[0]!r}; {what} has {', '.join(names[:-1])} and {names[-1]}")
    for name in names:
        if name not in ("id", "gold") and not isinstance(row[name], str):
            raise BadData(f"{place}: field {name!r} must be a text, found {shown(row[name], 60)}")


def rewrite_attempts(output: str | Path) -> Path:
    return Path(output).with_suffix(".attempts.jsonl")


async def rewrite(config: RewriteConfig, progress: Progress = _silent) -> Summary:
    """`dccot data rewrite`: read, ask the endpoint or the rule, check, write."""
    solutions = load_solutions(config.source, config.first)
    read = {"source": config.source, "instruction": config.instruction}
    inputs = {key: {Path(file).name: checksum(file)} for key, file in read.items() if file}
    if (rule := config.rule()) is None:
        config.endpoint.key()  # that it is there
    record(Path(config.output), config, inputs, Runtime.alone())
    async with AsyncExitStack() as stack:
        if rule is not None:
            rewriter = by_rule(rule)
        else:
            own = config.instruction
            instruction = (
                Path(own).read_text(encoding="utf-8") if own else instruction_for(config.workers, config.depth)
            )
            rewriter = by_endpoint(await stack.enter_async_context(Endpoint(config.endpoint)), instruction)
        judge = stack.enter_context(task_of(config).open_judge())
        summary = await rewrite_all(solutions, rewriter, judge, config, progress)
    write_atomic(Path(config.output).with_suffix(".summary.json"), json.dumps(asdict(summary), indent=1) + "\n")
    return summary


async def rewrite_all(
    solutions: Sequence[Solution], rewriter: Rewriter, judge: Judge, config: RewriteConfig, progress: Progress = _silent
) -> Summary:
    """Retry every solution until it is accepted or out of attempts; write the accepted ones. Safe to kill and rerun."""
    with JsonlWriter(rewrite_attempts(config.output)) as log:
        rows = list(log.rows())
        tried = Counter(row["id"] for row in rows if row["outcome"] != FAILED)
        finished = {row["id"] for row in rows if row["outcome"] == ACCEPTED}
        open_ones = [s for s in solutions if s.problem.id not in finished and tried[s.problem.id] < config.attempts]
        done = len(solutions) - len(open_ones)
        queue, spent = iter(open_ones), _spent(rows)

        async def lane() -> None:
            nonlocal done
            for solution in queue:
                for attempt in range(tried[solution.problem.id], config.attempts):
                    row = await _rewrite_once(solution, attempt, rewriter, judge, config)
                    rows.append(row)
                    log.write(row)
                    spent.update(_spent([row]))
                    if row["outcome"] in (ACCEPTED, FAILED):
                        break
                done += 1
                progress(done, len(solutions), spent_text(spent, dollars_of(spent, config.endpoint.prices)))

        try:
            async with asyncio.TaskGroup() as lanes:
                for _ in range(min(config.concurrency, len(open_ones))):
                    lanes.create_task(lane())
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None
    texts = {row["id"]: row["text"].strip() for row in rows if row["outcome"] == ACCEPTED}
    accepted = [solution for solution in solutions if solution.problem.id in texts]
    set_rows = ({**asdict(s.problem), "completion": texts[s.problem.id], "source": s.text} for s in accepted)
    write_jsonl_atomic(config.output, set_rows)
    return _summary(solutions, rows, config)


async def _rewrite_once(
    solution: Solution, attempt: int, rewriter: Rewriter, judge: Judge, config: RewriteConfig
) -> dict:
    """One attempt as a row of the log."""
    row = {"id": solution.problem.id, "attempt": attempt}
    try:
        reply = await rewriter(solution, attempt)
    except Refused as error:
        return {**row, "outcome": FAILED, "reason": str(error)}
    limits, alone = (config.workers, config.depth), find_task(config.task).may_work_alone
    reason = await asyncio.to_thread(accept, solution.problem, reply.text.strip(), judge, *limits, alone=alone)
    if reason is not None and reply.cut:
        reason = "cut by max_tokens"
    return {**row, "outcome": reason or ACCEPTED, **asdict(reply)}


def _spent(rows: Iterable[dict]) -> Counter[str]:
    return Counter({name: sum(row.get(name, 0) for row in rows) for name in TOKENS})


def _summary(solutions: Sequence[Solution], rows: Sequence[dict], config: RewriteConfig) -> Summary:
    ids = {solution.problem.id for solution in solutions}
    rows = [row for row in rows if row["id"] in ids]
    tried = Counter(row["id"] for row in rows if row["outcome"] != FAILED)
    accepted = {row["id"] for row in rows if row["outcome"] == ACCEPTED}
    exhausted = {id_ for id_, count in tried.items() if count >= config.attempts} - accepted
    failed = {row["id"] for row in rows if row["outcome"] == FAILED} - accepted - exhausted
    spent, outcomes = _spent(rows), dict(Counter(row["outcome"] for row in rows))
    dollars = dollars_of(spent, config.endpoint.prices)
    return Summary(len(ids), len(accepted), outcomes, len(failed), len(exhausted), dict(spent), dollars)


# ---- the report on a finished set ----

RUN = 5  # consecutive matching words that count as copied
NAMED_WORKER = re.compile(r"\bworkers?[ _#]?(\d+)\b|\b(?:the )?other workers?\b", re.IGNORECASE)
RESULT = re.compile(r"(?<![\w\\])([A-Za-z]\w*(?:_\{\w+\})?(?:\([^()=]{1,20}\))?)\s*=\s*(-?\d+(?:\.\d+)?(?:/\d+)?)")


MEASURES = {
    "total": "length",
    "longest_path": "longest path",
    "parallelism": "parallelism",
    "balance": "worker balance",
    "verbatim": "verbatim in source",
}  # → its name for people


@dataclass
class SetReport:
    unit: str = "words"
    examples: int = 0
    ill_formed: Counter = field(default_factory=Counter)
    rounds: Counter = field(default_factory=Counter)
    widths: Counter = field(default_factory=Counter)  # workers per block
    depths: Counter = field(default_factory=Counter)  # levels of workers
    measures: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in MEASURES})
    leaks: list[str] = field(default_factory=list)  # "id, round, worker: what"

    def __str__(self) -> str:
        flaws = "".join(f"   {flaw} {count:,}" for flaw, count in self.ill_formed.items())
        lines = {
            "examples": f"{self.examples:,}",
            "ill-formed": f"{sum(self.ill_formed.values()):,}{flaws}",
            "rounds": _counted(self.rounds),
            "workers per block": _counted(self.widths),
            "levels of workers": _counted(self.depths),
        }
        for name, label in MEASURES.items():
            spread = "   ".join(f"{each} {value:,.4g}" for each, value in _spread(self.measures[name]).items())
            lines[label] = (spread or "none") + (f"   ({self.unit})" if name == "total" else "")
        lines["leaks"] = f"{len(self.leaks):,}"
        leaks = [f"  {leak}" for leak in self.leaks[:10]] + ["  …"] * (len(self.leaks) > 10)
        return "\n".join([f"{name:<20}{value}" for name, value in lines.items()] + leaks)

    def to_json(self) -> dict:
        names = ("unit", "examples", "ill_formed", "rounds", "widths", "depths")
        counts = {name: getattr(self, name) for name in names}
        return counts | {name: _spread(values) for name, values in self.measures.items()} | {"leaks": self.leaks}


def _counted(counts: Counter) -> str:
    return ", ".join(f"{n:,} × {number}" for number, n in sorted(counts.items())) or "none"


def _spread(v: Sequence[float]) -> dict[str, float]:
    return {"min": min(v), "median": statistics.median(v), "mean": statistics.fmean(v), "max": max(v)} if v else {}


def check_set(path: str | Path, *, workers: Width = 3, depth: int = 1, tokenizer: Any = None) -> SetReport:
    """Read an SFT set (id, question, completion, and source where known) and measure it."""
    report = SetReport("tokens" if tokenizer else "words")

    def size(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False) if tokenizer else text.split())

    for line, row in read_jsonl(path):
        _require_fields(row, ("id", "question", "completion"), f"{path}:{line}", "an SFT row")
        report.examples += 1
        try:
            parsed = parse(row["completion"], workers, depth=depth)
        except IllFormed as error:
            report.ill_formed[error.flaw.value] += 1
            continue
        _measure(report, parsed, row, size)
    if not report.examples:
        raise BadData(f"{path}: no example in it")
    return report


def _measure(report: SetReport, parsed: Thread[str], row: dict, size: Callable[[str], int]) -> None:
    source = word_runs(row["source"]) if row.get("source") else None

    def measure_forks(thread: Thread[str], known: str, place: str) -> None:
        for number, (text, fork) in enumerate(thread.parts(), start=1):
            known += "\n" + text
            if not fork:
                continue
            lengths, texts = [worker.path(size) for worker in fork], ["\n".join(worker.segments()) for worker in fork]
            report.measures["balance"].append(min(lengths) / max(1, max(lengths)))
            if source is not None:
                report.measures["verbatim"] += [verbatim_share(text, source) for text in texts]
            found = leaks_in(texts, known)
            report.leaks += [f"{place}, round {number}, worker {worker}: {what}" for worker, what in found]
            for i, worker in enumerate(fork, start=1):
                measure_forks(worker, known, f"{place}, round {number}, worker {i}")
            known += "\n" + "\n".join(texts)

    report.rounds[len(parsed.forks)] += 1
    report.widths.update(len(fork) for fork in parsed.all_forks())
    report.depths[parsed.depth] += 1
    plain = lambda text: TASK_PATTERN.sub("", TAG_PATTERN.sub("", text))
    without_tags = [[worker.map(plain) for worker in fork] for fork in parsed.forks]
    thread = Thread(parsed.trunk, without_tags)
    measure_forks(thread, row["question"], row["id"])
    total, path = thread.total(size), thread.path(size)
    for name, value in (("total", total), ("longest_path", path), ("parallelism", total / max(1, path))):
        report.measures[name].append(value)


def leaks_in(workers: list[str], known: str) -> Iterable[tuple[int, str]]:
    """(worker, what) for everything in a block's texts that its writer could not know from what was `known` before."""
    before = _results(known)
    reached: dict[str, int] = {}  # result → the first worker that states it
    for index, text in enumerate(workers, start=1):
        for match in NAMED_WORKER.finditer(text):
            if match.group(1) is None or int(match.group(1)) != index:
                yield index, f"names {match.group().strip()!r}"
        for result in _results(text) - before:
            first = reached.setdefault(result, index)
            if first != index:
                yield index, f"states {result!r}, which worker {first} reached"


def _results(text: str) -> set[str]:
    return {f"{name}={value}" for name, value in RESULT.findall(text)}


def word_runs(text: str) -> set[tuple[str, ...]]:
    """Every run of five words in a text."""
    words = TAG_PATTERN.sub(" ", text).split()
    return {tuple(words[i : i + RUN]) for i in range(len(words) - RUN + 1)}


def verbatim_share(text: str, source_runs: set[tuple[str, ...]]) -> float:
    """Share of the words that are covered by five-word runs of the source; 1 for a text too short to judge."""
    words = TAG_PATTERN.sub(" ", text).split()
    starts = [i for i in range(len(words) - RUN + 1) if tuple(words[i : i + RUN]) in source_runs]
    covered = {i + k for i in starts for k in range(RUN)}
    return len(covered) / len(words) if len(words) >= RUN else 1.0
