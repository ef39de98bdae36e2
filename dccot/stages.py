"""The kinds of stages, and the stages of a recipe ready to run. Each writes its results to its own folder.

sft, rl      training runs
sequential   sequential solutions by rejection sampling        → solutions.jsonl
rewrite      solutions in the parallel format                  → sft.jsonl
import_sft   a published SFT set instead of the last two       → sft.jsonl
eval         accuracy and longest path on the benchmarks       → summary.json
latency      wall-clock, parallel vs. sequential               → latency.json
report       everything above as one page
"""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Literal

from dccot.core.config import (
    ConfigError,
    Positive,
    Seed,
    Share,
    check,
    find_config,
    load_config,
    lookup,
    one_of,
    override_settings,
    read_yaml,
    require,
    required,
)
from dccot.core.progress import Progress
from dccot.core.provenance import describe_code
from dccot.core.run import Run
from dccot.core.runtime import Runtime
from dccot.data import sft_set
from dccot.data.import_sft import ImportConfig, import_sft
from dccot.data.judge import GradingConfig
from dccot.data.problems import Columns
from dccot.data.prompts import PromptConfig
from dccot.data.task import TaskName
from dccot.eval import latency
from dccot.eval.evaluate import METHODS, EvalConfig, evaluate
from dccot.eval.results import BENCHMARKS, SUMMARY, Benchmark, Evaluation, named_benchmark, own_benchmark
from dccot.eval.tables import row_labels
from dccot.model.folder import resolve_model
from dccot.recipe import Kind, Need, Recipe, StagePlan, kind
from dccot.rollout.director import RolloutConfig
from dccot.rollout.engine import EngineConfig, TrainingEngine, open_training_engine
from dccot.rollout.tags import Width
from dccot.train.config import RLConfig, SFTConfig


class SharedEngine:
    """One engine for all stages. A model of the same shape is streamed into it; another shape needs a new engine.

    It uses no more GPU memory than any stage allows, and can sleep if one of them trains, so neither requires a new
    engine. During SFT, which samples nothing, it sleeps.
    """

    def __init__(self, plans: Sequence[StagePlan], logs: Path) -> None:
        configs = [config for plan in plans if (config := getattr(plan.load(), "engine", None))]
        self.gpu_memory = min((config.gpu_memory for config in configs), default=1.0)
        self.sleeps = any(plan.kind.trains for plan in plans)
        self.logs = logs
        self.engine: TrainingEngine | None = None
        self._shape: tuple | None = None
        self._stack = ExitStack()

    def on(self, model: Path, config: EngineConfig) -> TrainingEngine:
        config = replace(config, gpu_memory=self.gpu_memory)
        files = json.loads((model / "config.json").read_text()), (model / "tokenizer.json").read_bytes()
        shape = (*files, asdict(config))
        if self.engine is not None and self._shape == shape:
            from dccot.model.weights import stored_parameters

            self.engine.wake()
            self.engine.load(stored_parameters(model))
            return self.engine
        self.close()
        opened = open_training_engine(model, config, logs=self.logs, sleeps=self.sleeps)
        self.engine, self._shape = self._stack.enter_context(opened), shape
        return self.engine

    def sleep(self) -> None:
        """Lend its GPU memory, until a stage asks for it again."""
        if self.engine is not None:
            self.engine.sleep()

    def close(self) -> None:
        self._stack.close()
        self.engine = self._shape = None


@dataclass
class Context:
    """What a stage may use while it runs."""

    plan: StagePlan
    engines: SharedEngine
    runtime: Runtime

    @property
    def folder(self) -> Path:
        return self.plan.folder

    def say(self, message: object) -> None:
        if self.runtime.is_main and message is not None:
            print(message, flush=True)


# ---- training ----

TRAINING = {"name": "{stage}", "output": "{run}", "model.path": "{start}"}
EXAMPLES = {"model.path": "model", "data.train": "examples", "data.validation": "examples"}
PROBLEMS = {"model.path": "model", "data.train": "problems"}


@kind(SFTConfig, given=TRAINING, reads=EXAMPLES, trains=True)
def run_sft(context: Context, config: SFTConfig) -> None:
    from dccot.train.sft import train

    context.engines.sleep()
    train(config)


def _validation(plan: StagePlan, config: RLConfig) -> list[Need]:
    every, problems = config.validation.every, config.data.validation
    remedy = "name the problems or set it to 0"
    require(bool(problems or not every), f"data.validation is not set, and validation.every is {every}: {remedy}")
    return [Need("data.validation", str(problems), "problems")] if every else []


DATA = {"data.train": "{train}", "data.validation": "{validation}"}


@kind(RLConfig, given=TRAINING | DATA, reads=PROBLEMS, needs=_validation, trains=True)
def run_rl(context: Context, config: RLConfig) -> None:
    from dccot.train.rl import train

    if config.rollout.mode == "asynchronous":  # servers sample
        context.engines.close()
        train(config)
    else:
        train(config, context.engines.on(resolve_model(config.model.path), config.engine))


# ---- the SFT set ----

SOLUTIONS = {"output": "{folder}/solutions.jsonl", "model": "{start}", "problems": "{train}"}


@kind(sft_set.SequentialConfig, given=SOLUTIONS, reads={"model": "model", "problems": "problems"})
def run_sequential(context: Context, config: sft_set.SequentialConfig) -> None:
    context.folder.mkdir(parents=True, exist_ok=True)
    engine = None if config.engine.url else context.engines.on(resolve_model(config.model), config.engine)
    context.say(sft_set.solve_sequentially(config, engine))


def _alone_with_a_key(plan: StagePlan, config: sft_set.RewriteConfig) -> None:
    if config.rule() is not None:
        return
    ranks, names = int(os.environ.get("WORLD_SIZE", "1")), list(plan.recipe.all_stages())
    waits = f"it waits for an API for hours, and {ranks} ranks would wait with it"
    before = names[: names.index(plan.name)][-1:]
    first = f"; the stages before it can run here, with --until {before[0]}" if before else ""
    remedy = f"run it as one process first, `dccot pipeline …` with the same arguments and --until {plan.name}"
    require(ranks == 1, f"{waits}: {remedy}{first}")
    config.endpoint.key()


REWRITTEN = {"output": "{folder}/sft.jsonl"}


@kind(
    sft_set.RewriteConfig,
    given=REWRITTEN,
    reads={"source": "file", "instruction": "file"},
    ready=_alone_with_a_key,
    alone=True,
)
def run_rewrite(context: Context, config: sft_set.RewriteConfig) -> None:
    context.folder.mkdir(parents=True, exist_ok=True)
    with Progress("rewritten") as progress:
        show = lambda done, total, text: progress.show(done, text, total=total)
        context.say(asyncio.run(sft_set.rewrite(config, show)))


IMPORTED = REWRITTEN | {"model": "{start}", "problems": "{train}"}
CHECKED = {"source": "data set", "model": "model", "problems": "problems"}


@kind(ImportConfig, given=IMPORTED, reads=CHECKED, alone=True)
def run_import_sft(context: Context, config: ImportConfig) -> None:
    context.folder.mkdir(parents=True, exist_ok=True)
    context.say(import_sft(config))


# ---- evaluation ----


LISTED = required("list names of benchmarks or files of problems")
COMPARED = Annotated[str, required("latency compares a parallel with a sequential model on problems")]
NUMBERS = required("list numbers of responses at a time, e.g. [1, 4]")
ROWS = required("map evaluation stages to their names in the tables")


@dataclass
class EvalStage:
    seed: Seed = 0  # of the responses
    # stage, stage@step, folder or hub id
    model: Annotated[str, required("name a stage of the recipe, a folder or a hub id")] = ""
    method: Literal["parallel", "sequential"] = "parallel"  # with workers, or without
    workers: Width = 3  # per block; [1, 8]: as many as tasks are listed before it
    depth: Positive = 1  # levels of workers
    budget: Positive = 12_000  # tokens on the longest path
    top_p: Share = 0.95  # the paper's; below 1, sampling sorts the vocabulary, which takes a CPU a while
    # names of the paper's, or files; default: the recipe's
    benchmarks: Annotated[list[str], LISTED] = field(default_factory=list)
    benchmark_folder: str = "runs/data"  # where the paper's benchmarks are
    task: TaskName = "math"  # or your own: my_package.my_module:MyTask
    n: Positive | None = None  # responses per problem; None: the paper's (200 or 16), 16 for a file
    max_problems: Positive | None = None  # of each benchmark, always the same ones, drawn at random; None: all
    max_prompt_tokens: Positive = 4096  # longer problems are left out, and counted
    data: Columns = field(default_factory=Columns)
    engine: EngineConfig = field(default_factory=EngineConfig)
    grading: GradingConfig = field(default_factory=GradingConfig)

    def check(self) -> None:
        _require_distinct([Path(file).stem for file in self.benchmarks], "benchmarks", "the files")

    def resolved(self) -> list[Benchmark]:
        found = [
            named_benchmark(name, self.benchmark_folder, self.n) if name in BENCHMARKS else own_benchmark(name, self.n)
            for name in self.benchmarks
        ]
        return [replace(benchmark, max_problems=self.max_problems) for benchmark in found]


def _require_distinct(names: Sequence[str], what: str, renamed: str) -> None:
    twice = max(names, key=names.count, default="")
    require(len(set(names)) == len(names), f"two {what} are called {twice!r}; rename one of {renamed}")


def sampling(
    config: EvalStage | LatencyStage, method: str, top_p: float = 0.95, grading: GradingConfig | None = None
) -> EvalConfig:
    prompt = PromptConfig(kind=method, max_prompt_tokens=config.max_prompt_tokens)
    rollout = RolloutConfig(config.workers, config.depth, config.budget, top_p=top_p)
    kinds = config.data, prompt, rollout, config.engine, grading or GradingConfig()
    found = EvalConfig(config.seed, config.task, *kinds)
    check(found)
    return found


def _evaluated(plan: StagePlan, config: EvalStage) -> list[Need]:
    benchmarks = [Need("benchmarks", str(each.file), "problems") for each in config.resolved()]
    return [Need("model", plan.recipe.place(config.model), "model"), *benchmarks]


@kind(EvalStage, needs=_evaluated)
def run_eval(context: Context, config: EvalStage) -> None:
    model = resolve_model(context.plan.recipe.place(config.model))
    engine = None if config.engine.url else context.engines.on(model, config.engine)
    how = sampling(config, config.method, config.top_p, config.grading)
    evaluate(model, config.resolved(), how, context.folder, engine=engine)


@dataclass
class LatencyStage:
    seed: Seed = 0  # of the responses
    parallel: COMPARED = ""  # stages, stage@step, folders or hub ids
    sequential: COMPARED = ""  # the model that it is compared with
    problems: COMPARED = ""  # JSONL or parquet
    task: TaskName = "math"  # or your own: my_package.my_module:MyTask
    workers: Width = 3  # per block; [1, 8]: as many as tasks are listed before it
    depth: Positive = 1  # levels of workers
    budget: Positive = 12_000  # tokens on the longest path
    # responses at once, one measurement each
    concurrency: Annotated[list[Positive], NUMBERS] = field(default_factory=lambda: [1, 4, 16])
    n: Positive = 1  # responses per problem
    max_prompt_tokens: Positive = 4096  # longer problems are left out, and counted
    data: Columns = field(default_factory=Columns)
    engine: EngineConfig = field(default_factory=EngineConfig)

    def models(self, plan: StagePlan) -> dict[str, str]:
        return {method: plan.recipe.place(getattr(self, method)) for method in METHODS}


def _compared(plan: StagePlan, config: LatencyStage) -> list[Need]:
    models = [Need(method, path, "model") for method, path in config.models(plan).items()]
    return [*models, Need("problems", config.problems, "problems")]


@kind(LatencyStage, needs=_compared)
def run_latency(context: Context, config: LatencyStage) -> None:
    timings, main = [], context.runtime.is_main
    for method, path in config.models(context.plan).items():
        engine, how = context.engines.on(resolve_model(path), config.engine), sampling(config, method)
        timings += latency.measure_all(engine, how, config.problems, config.concurrency, config.n, main)
    if main:
        facts = {"model": config.parallel, "baseline": config.sequential, "budget": config.budget}
        latency.save(context.folder, timings, **facts, device=latency.device())


# ---- the report ----


@dataclass
class ReportStage:
    title: str = "Divide-and-Conquer CoT"  # of the page
    # stage → its name in the tables
    rows: Annotated[dict[str, str], ROWS] = field(default_factory=dict)
    baselines: dict[str, str] = field(default_factory=dict)  # name in the tables → name it is compared with
    kind: str | None = None  # finds the kind of problem in its id (eval/tables.py)
    notes: list[str] = field(default_factory=list)  # sentences below the tables
    other_seeds: list[str] = field(default_factory=list)  # finished folders of the same recipe with other seeds

    def check(self) -> None:
        shown = list(self.rows.values())
        _require_distinct(shown, "rows", "them")
        for name in (*self.baselines, *self.baselines.values()):
            one_of(name, row_labels(shown), "a name in baselines")
        try:
            groups = re.compile(self.kind or "()").groups
        except re.error as error:
            raise ConfigError(f"kind is {self.kind!r}, which is not a regular expression ({error})") from None
        require(groups == 1, f"kind is {self.kind!r}; it must have one group, which finds the kind in a problem's id")


def _reported(plan: StagePlan, config: ReportStage) -> list[Need]:
    recipe = plan.recipe
    for name in config.rows:
        one_of(name, [known for known, stage in recipe.all_stages().items() if stage.run == "eval"], "a key of rows")
    rows = [Need("rows", str(recipe.folder / name / SUMMARY), "file") for name in config.rows]
    return rows + [Need("other_seeds", str(Run(folder).recipe_file), "file") for folder in config.other_seeds]


def made_by(recipe: Recipe) -> str:
    """Which code made the finished stages: the page should say if several versions did."""
    marks = [mark for name in recipe.all_stages() if (mark := Run(recipe.folder / name).finished())]
    codes = {describe_code(mark["made_from"]["code"]) for mark in marks if "made_from" in mark}
    return f"Made by {'; '.join(sorted(codes))}." if codes else ""


@kind(ReportStage, needs=_reported, alone=True)
def run_report(context: Context, config: ReportStage) -> None:
    from dccot.eval.report import show_comparison, write_report  # it imports matplotlib, which no other stage needs

    recipe = context.plan.recipe
    evaluations = [Evaluation.load(recipe.folder / name, shown) for name, shown in config.rows.items()]
    folders = lambda kind, stages: [recipe.folder / name for name, stage in stages.items() if stage.run == kind]
    one = f"The recipe {recipe.name} with seed {recipe.seed}; its own ± are those of one run. {made_by(recipe)}"
    page = write_report(
        evaluations,
        folders("sft", recipe.stages) + folders("rl", recipe.all_stages()),
        context.folder,
        config.title,
        [one, *config.notes],
        baseline=config.baselines,
        latencies=folders("latency", recipe.all_stages()),
        kind=config.kind,
        seeds=[recipe.folder, *map(Path, config.other_seeds)] if config.other_seeds else [],
    )
    show_comparison(evaluations)
    context.say(f"report: {page}")


KINDS: dict[str, Kind] = {
    "sft": run_sft,
    "rl": run_rl,
    "sequential": run_sequential,
    "rewrite": run_rewrite,
    "import_sft": run_import_sft,
    "eval": run_eval,
    "latency": run_latency,
    "report": run_report,
}


def load_recipe(path: str | Path, overrides: Sequence[str] = (), quick: bool = False) -> tuple[Recipe, list[StagePlan]]:
    """The recipe and its stages in order. Settings of a stage are not checked here: loading its configuration does."""
    file = find_config(path)
    tree = read_yaml(file)
    one = "holds no stages, so it is no recipe: `dccot rl` and `dccot sft` run a single stage"
    require("stages" in tree, f"{file} {one}")
    require(isinstance(tree.get("quick"), dict) or not quick, f"{file} has no quick version: leave out --quick")
    sections = [tree[section] for section in ("prepare", "stages") if isinstance(tree.get(section), dict)]
    names = [str(name) for section in sections for name in section]
    extra: dict[str, list[str]] = {name: [] for name in ("", *names)}
    for override in overrides:
        first, dot, rest = override.partition(".")
        inside = dot and first in names
        extra[first if inside else ""].append(rest if inside else override)
    recipe = load_config(Recipe, file, extra[""], tree["quick"].items() if quick else ())
    kinds = {name: _kind_of(stage.run) for name, stage in recipe.all_stages().items()}
    for name in recipe.common:
        one_of(name, [*KINDS, *(stage.run for stage in recipe.all_stages().values())], "a key of common")
    for name in filter(extra.get, names):
        override_settings(recipe.settings.setdefault(name, {}), extra[name])
    recipe.leave_out()
    require(bool(recipe.all_stages()), "without names every stage: none is left")
    plans, trained = [], recipe.filled_in(recipe.model)
    for name, stage in recipe.all_stages().items():
        own = _config_file(file.parent, stage.config, name) if stage.config else None
        if own and own.parent.is_relative_to(file.parent):  # the saved recipe has another place
            stage.config = str(own)
        start = recipe.place(stage.start) if stage.start else trained
        plans.append(StagePlan(recipe, name, stage, kinds[name], start, own))
        if kinds[name].trains and name in recipe.stages:
            trained = str(plans[-1].folder)
    return recipe, plans


def _kind_of(name: str) -> Kind:
    found = lookup(KINDS, name, "run of a stage")
    require(
        isinstance(found, Kind), f"run of a stage is {name!r}, which is not a kind of stage: put @kind(Config) above it"
    )
    return found


def _config_file(beside: Path, name: str, stage: str) -> Path:
    try:
        return beside / name if os.path.isfile(beside / name) else find_config(name)
    except ConfigError as error:
        raise ConfigError(f"stage {stage}: {error}") from None
