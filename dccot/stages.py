"""The kinds of stages that a recipe can have. Each leaves its results in the stage's folder (`context.folder`, see pipeline.py).

world        problems, base demonstrations and an untrained model of the miniature world
sft, rl      training runs
sequential   sequential solutions by rejection sampling        → solutions.jsonl
rewrite      solutions in the parallel format, by an endpoint or by the miniature world's rule   → sft.jsonl
eval         accuracy and longest path                          → summary.json
latency      wall-clock, parallel against sequential            → latency.json
report       everything above as one page
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dccot.config import at_least, one_of, require
from dccot.data.grading import open_judge
from dccot.data.rewrite import RewriteConfig, load_solutions, rewrite_by_rule
from dccot.data.rewrite import run as rewrite_by_endpoint
from dccot.data.sequential import SequentialConfig
from dccot.data.sequential import run as solve_sequentially
from dccot.eval.benchmarks import own_benchmark
from dccot.eval.run import EvalConfig, eval_config, evaluate
from dccot.miniature.arithmetic import rewrite_parallel
from dccot.miniature.world import WorldConfig, make_world
from dccot.model.folder import resolve_model
from dccot.rollout.settings import EngineConfig
from dccot.train.rl_config import RLConfig
from dccot.train.sft import SFTConfig
from dccot.train.sft import train as train_sft

if TYPE_CHECKING:
    from dccot.pipeline import Context, Session


def run_world(session: Session, context: Context, config: WorldConfig) -> None:
    if session.runtime.is_main:
        make_world(config, context.folder)


def run_sft(session: Session, context: Context, config: SFTConfig) -> None:
    train_sft(config)


def run_rl(session: Session, context: Context, config: RLConfig) -> None:
    from dccot.train.rl import train

    train(config, session.engines.on(resolve_model(config.model.path), config.engine))


def run_sequential(session: Session, context: Context, config: SequentialConfig) -> None:
    context.folder.mkdir(parents=True, exist_ok=True)
    session.say(solve_sequentially(config, session.engines.on(resolve_model(config.model), config.engine)))


@dataclass
class RewriteStage(RewriteConfig):
    by: str = "endpoint"  # or rule: the miniature world's

    def check(self) -> None:
        one_of(self.by, ("endpoint", "rule"), "by")
        super().check()


def run_rewrite(session: Session, context: Context, config: RewriteStage) -> None:
    if not session.runtime.is_main:
        return
    context.folder.mkdir(parents=True, exist_ok=True)
    if config.by == "rule":
        with open_judge(config.grading) as judge:
            session.say(rewrite_by_rule(load_solutions(config.source, config.first), rewrite_parallel, judge, config))
    else:
        session.say(asyncio.run(rewrite_by_endpoint(config, lambda done, total: None)))


@dataclass
class Sampling:
    budget: int = 12_000  # tokens on the longest path
    n: int = 16  # responses per problem
    seed: int = 0
    max_prompt_tokens: int = 4096
    engine: EngineConfig = field(default_factory=EngineConfig)

    def by(self, method: str) -> EvalConfig:
        at_least(1, self.n, "n")
        at_least(1, self.budget, "budget")
        config = eval_config(method, self.budget, [f"prompt.max_prompt_tokens={self.max_prompt_tokens}", f"seed={self.seed}"])
        config.engine = self.engine
        return config


@dataclass
class EvalStage(Sampling):
    model: str = ""  # stage or folder; empty: the model that the last training stage left
    method: str = "parallel"  # or sequential
    problems: list[str] = field(default_factory=list)  # JSONL files

    def check(self) -> None:
        require(bool(self.model), "model is not set, and no stage before it trains one; name a stage or a folder")
        require(bool(self.problems), "problems is not set; list JSONL files to evaluate on")
        names = [Path(file).stem for file in self.problems]
        require(len(set(names)) == len(names), f"two files of problems are called {max(names, key=names.count)!r}; rename one of them")
        self.by(self.method)


@dataclass
class LatencyStage(Sampling):
    n: int = 1
    parallel: str = ""  # stage or folder of the model that answers in parallel
    sequential: str = ""  # of the one that it is compared with
    problems: str = ""  # a JSONL file
    concurrency: list[int] = field(default_factory=lambda: [1, 4, 16])  # responses in progress at once

    def check(self) -> None:
        for key in ("parallel", "sequential"):
            require(bool(getattr(self, key)), f"{key} is not set; name the stage or the folder of the model that answers this way")
            self.by(key)
        require(bool(self.problems), "problems is not set; name a JSONL file")
        require(bool(self.concurrency), "concurrency is empty; list how many responses are in progress at once, e.g. [1, 4, 16]")
        at_least(1, min(self.concurrency), "concurrency")


def check_eval(context: Context, config: EvalStage) -> None:
    config.model = context.model(config.model, "model")


def run_eval(session: Session, context: Context, config: EvalStage) -> None:
    model = resolve_model(config.model)
    benchmarks = [own_benchmark(Path(file), config.n) for file in config.problems]
    engine = session.engines.on(model, config.engine)
    evaluate(model, benchmarks, config.by(config.method), context.folder, engine=engine)


def check_latency(context: Context, config: LatencyStage) -> None:
    for key in ("parallel", "sequential"):
        context.model(getattr(config, key), key)


def run_latency(session: Session, context: Context, config: LatencyStage) -> None:
    from dccot.eval.latency import device, measure_all, save

    timings = []
    for method, name in (("parallel", config.parallel), ("sequential", config.sequential)):
        engine = session.engines.on(resolve_model(context.model(name, method)), config.engine)
        timings += measure_all(engine, config.by(method), config.problems, config.concurrency, config.n)
    if session.runtime.is_main:
        save(context.folder, timings, model=config.parallel, baseline=config.sequential, budget=config.budget, device=device())


@dataclass
class ReportStage:
    title: str = "Divide-and-Conquer CoT"
    rows: dict[str, str] = field(default_factory=dict)  # stage → its name in the tables
    baselines: dict[str, str] = field(default_factory=dict)  # name in the tables → name it is compared with
    kind: str | None = None  # finds the kind of problem in its id (eval/tables.py)
    notes: list[str] = field(default_factory=list)
    other_seeds: list[str] = field(default_factory=list)  # finished folders of the same recipe with other seeds

    def check(self) -> None:
        shown = list(self.rows.values())
        require(len(set(shown)) == len(shown), f"two rows are called {max(shown, key=shown.count) if shown else ''!r}; rename one of them")
        for name in (*self.baselines, *self.baselines.values()):
            one_of(name.removesuffix(", maj@3"), shown, "a name in baselines")
        try:
            groups = re.compile(self.kind or "()").groups
        except re.error as error:
            require(False, f"kind is {self.kind!r}, which is no regular expression ({error})")
        require(groups == 1, f"kind is {self.kind!r}; it must have one group, which finds the kind in a problem's id")
        for folder in self.other_seeds:
            require(
                (Path(folder) / "recipe.yaml").is_file(), f"other_seeds: {folder} holds no recipe.yaml; name folders of finished recipes"
            )


def check_report(context: Context, config: ReportStage) -> None:
    evaluated = [name for name, kind in context.earlier.items() if kind == "eval"]
    for name in config.rows:
        require(bool(evaluated), f"rows names {name!r}, but no stage before it evaluates; add one with `run: eval`")
        one_of(name, evaluated, "a stage in rows")
    require(bool(config.rows) or bool({"rl", "latency"} & {*context.earlier.values()}), "there is nothing to report; set rows")


def run_report(session: Session, context: Context, config: ReportStage) -> None:
    from dccot.eval.report import write_report
    from dccot.eval.results import Evaluation

    if not session.runtime.is_main:
        return
    recipe, folder = context.recipe, context.recipe.folder

    def made_by(kind: str) -> Sequence[Path]:
        return [folder / stage.name for stage in recipe.stages if stage.run == kind]

    evaluations = [Evaluation.load(folder / name) for name in config.rows]
    for evaluation, shown in zip(evaluations, config.rows.values()):
        evaluation.name = shown
    seeds = [folder, *map(Path, config.other_seeds)] if config.other_seeds else []
    notes = [f"The recipe {recipe.name} with seed {recipe.seed}; its own ± are those of one run.", *config.notes]
    page = write_report(
        evaluations, made_by("rl"), context.folder, config.title, notes,
        baseline=config.baselines, latencies=made_by("latency"), kind=config.kind, seeds=seeds,
    )  # fmt: skip
    session.say(f"report: {page}")


@dataclass(frozen=True)
class Kind:
    """What configures a stage, what it does, which keys the recipe fills in, and what can be refused only in view of other stages."""

    config: type
    run: Callable[[Session, Context, Any], None]
    fills: dict[str, str]  # key → its value, in which {stage}, {run}, {folder}, {seed} and {start} are known
    check: Callable[[Context, Any], None] | None = None
    trains: bool = False  # it leaves a model, from which the next stage starts


TRAINING = {"name": "{stage}", "output": "{run}", "seed": "{seed}", "model.path": "{start}"}
SOLVING = {"model": "{start}", "output": "{folder}/solutions.jsonl", "seed": "{seed}"}
KINDS = {
    "world": Kind(WorldConfig, run_world, {"seed": "{seed}"}),
    "sft": Kind(SFTConfig, run_sft, TRAINING, trains=True),
    "rl": Kind(RLConfig, run_rl, TRAINING, trains=True),
    "sequential": Kind(SequentialConfig, run_sequential, SOLVING),
    "rewrite": Kind(RewriteStage, run_rewrite, {"output": "{folder}/sft.jsonl"}),
    "eval": Kind(EvalStage, run_eval, {"model": "{start}", "seed": "{seed}"}, check_eval),
    "latency": Kind(LatencyStage, run_latency, {"seed": "{seed}"}, check_latency),
    "report": Kind(ReportStage, run_report, {}, check_report),
}
