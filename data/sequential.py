"""Sequential solutions for the SFT set by rejection sampling: up to three attempts per problem, the first correct one
is kept.

    dccot data sequential configs/data/sequential.yaml model=MODEL problems=runs/data/deepscaler.jsonl
    torchrun --nproc_per_node 8 -m dccot.data.cli sequential configs/data/sequential.yaml …          # every rank takes its share

    attempts   <output>.attempts.<rank>.jsonl: every graded attempt as it arrives; a rerun reads them and continues
    output     id, question, gold, solution, attempt, tokens            correct ones in the order of the problems

An attempt's seed is derived from (seed, problem, attempt), so attempts differ and a rerun gives what an uninterrupted
run would have.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dccot.core.config import require
from dccot.core.files import JsonlWriter, checksum, read_jsonl, write_jsonl_atomic
from dccot.core.provenance import record
from dccot.core.runtime import Runtime, require_shared
from dccot.data.judge import GradingConfig, Judge, Verdict
from dccot.data.problems import Problem
from dccot.data.prompts import PromptConfig
from dccot.data.rollouts import graded, missing_pairs, roll_out
from dccot.data.task import find_task, task_of
from dccot.model.folder import model_checksums, resolve_model
from dccot.rollout.director import RolloutConfig
from dccot.rollout.engine import Engine, open_engine
from dccot.rollout.response import Rollout
from dccot.rollout.settings import EngineConfig

Progress = Callable[[int, int], None]  # (done, total)


def _silent(done: int, total: int) -> None: ...


@dataclass
class SequentialConfig:
    model: str = ""  # a Hugging Face folder, or a run (its newest checkpoint)
    problems: str = ""
    output: str = "runs/data/sequential.jsonl"
    task: str = "math"  # or your own: my_package.my_module:MyTask
    first: int | None = 15_000  # use only the first N problems; None: all
    attempts: int = 3
    seed: int = 0
    prompt: PromptConfig = field(default_factory=lambda: PromptConfig("raw_sequential"))
    rollout: RolloutConfig = field(default_factory=lambda: RolloutConfig(budget=24_000, top_p=0.95))
    engine: EngineConfig = field(default_factory=EngineConfig)
    grading: GradingConfig = field(default_factory=GradingConfig)

    def check(self) -> None:
        find_task(self.task)
        require(bool(self.model), "model is not set; name a Hugging Face folder or a run, e.g. model=runs/base")
        require(bool(self.problems), "problems is not set; name a JSONL or parquet file")
        require(self.attempts > 0, f"attempts is {self.attempts}; it must be at least 1")
        require(
            not self.prompt.parallel,
            f"prompt.kind is {self.prompt.kind}; sequential solutions are wanted: set it to sequential",
        )
        require(
            self.engine.tensor_parallel == 1, "engine.tensor_parallel must be 1 here: every rank solves its own share"
        )


@dataclass
class SequentialSummary:
    problems: int
    kept: int
    verdicts: dict[str, int]  # of single attempts
    tokens: int

    def __str__(self) -> str:
        said = ", ".join(f"{count:,} {verdict}" for verdict, count in self.verdicts.items())
        return f"{self.kept:,} of {self.problems:,} problems solved; attempts: {said}; {self.tokens:,} tokens written"


def attempts_path(output: str | Path, replica: int) -> Path:
    return Path(output).with_suffix(f".attempts.{replica}.jsonl")


def logged_attempts(output: str | Path) -> list[dict]:
    """Every attempt that any rank of any earlier run has finished. An unfinished last line, left by a kill, does not
    count.
    """
    paths = sorted(Path(output).parent.glob(attempts_path(Path(output).name, 0).name.replace(".0.", ".*.")))
    return [row for path in paths if path.stat().st_size for _, row in read_jsonl(path, report=lambda _: None)]


def sample(
    engine: Engine,
    judge: Judge,
    problems: Sequence[Problem],
    config: SequentialConfig,
    *,
    progress: Progress = _silent,
) -> None:
    """Append this rank's attempts until each of its problems is solved or out of attempts."""
    asked = task_of(config).prompts(problems, engine.tokenizer)[engine.replica :: engine.replicas]
    earlier = logged_attempts(config.output)
    with JsonlWriter(attempts_path(config.output, engine.replica)) as log:
        solved = {row["id"] for row in earlier if row["verdict"] == Verdict.CORRECT}
        tried = {(row["id"], row["attempt"]) for row in earlier}
        for attempt in range(config.attempts):
            due = missing_pairs((one for one in asked if one[0].id not in solved), [attempt], tried)
            rollouts = roll_out(engine, asked, due, config.prompt, config.rollout, seed=(config.seed, "sequential"))
            for rollout in graded(rollouts, judge):
                log.write(attempt_row(rollout))
                if rollout.correct:
                    solved.add(rollout.problem)
                progress(len(solved), len(asked))


def attempt_row(rollout: Rollout) -> dict:
    outcome = {
        "verdict": rollout.verdict,
        "finish": rollout.response.finish.value,
        "tokens": rollout.response.total_tokens,
    }
    return {"id": rollout.problem, "attempt": rollout.sample, **outcome, "text": rollout.text}


def keep(problems: Sequence[Problem], config: SequentialConfig) -> SequentialSummary:
    """Write the first correct attempt of every problem, in the order of the problems."""
    rows = logged_attempts(config.output)
    correct: dict[str, dict] = {}
    for row in sorted((row for row in rows if row["verdict"] == Verdict.CORRECT), key=lambda row: row["attempt"]):
        correct.setdefault(row["id"], row)
    kept = [
        {
            "id": problem.id,
            "question": problem.question,
            "gold": problem.gold,
            "solution": correct[problem.id]["text"],
            "attempt": correct[problem.id]["attempt"],
            "tokens": correct[problem.id]["tokens"],
        }
        for problem in problems
        if problem.id in correct
    ]
    write_jsonl_atomic(config.output, kept)
    return SequentialSummary(
        len(problems), len(kept), dict(Counter(row["verdict"] for row in rows)), sum(row["tokens"] for row in rows)
    )


def run(
    config: SequentialConfig, engine: Engine | None = None, *, progress: Progress = _silent
) -> SequentialSummary | None:
    """The whole command; None on ranks other than the first. A given engine is used and left running."""
    task = task_of(config)
    problems = task.problems(config.problems)[: config.first]
    with Runtime.of_workers() as runtime:
        model = resolve_model(config.model)
        inputs = {
            "model": model_checksums(model, runtime),
            "problems": {Path(config.problems).name: checksum(config.problems)},
        }
        record(Path(config.output), config, inputs, runtime)
        require_shared(Path(config.output).parent, runtime)  # rank 0 collects what all of them write there
        opened = open_engine(model, config.engine, engine, logs=Path(config.output).parent)
        with task.open_judge() as judge, opened as engine:
            sample(engine, judge, problems, config, progress=progress)
            runtime.gather([])  # every attempt is on disk
        return keep(problems, config) if runtime.is_main else None
