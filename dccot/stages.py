"""The kinds of stages in a recipe. Each writes its results to its own folder.

sft, rl      training runs
sequential   sequential solutions by rejection sampling        → solutions.jsonl
rewrite      solutions in the parallel format                  → sft.jsonl
eval         accuracy and longest path on the benchmarks       → summary.json
latency      wall-clock, parallel vs. sequential               → latency.json
report       everything above as one page

A kind of stage is one entry of KINDS: its configuration, the settings from the pipeline, what it needs, and what it
does.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from dccot.core.config import ConfigError, Positive, Seed, Share, lookup, one_of, require, required
from dccot.core.provenance import describe_code
from dccot.core.run import Run
from dccot.core.runtime import Runtime
from dccot.data import sft_set
from dccot.data.task import TaskName
from dccot.eval import latency
from dccot.eval.evaluate import METHODS, EvalConfig, eval_config, evaluate
from dccot.eval.results import BENCHMARKS, Benchmark, Evaluation, named_benchmark, own_benchmark
from dccot.eval.tables import row_labels
from dccot.model.folder import resolve_model
from dccot.model.weights import stored_parameters
from dccot.recipe import Recipe, StagePlan, stage_seed
from dccot.rollout.engine import EngineConfig, TrainingEngine, open_training_engine
from dccot.train import rl, sft
from dccot.train.config import RLConfig, SFTConfig


class SharedEngine:
    """One engine for all stages. A model of the same shape is streamed into it; another shape needs a new engine.

    It uses no more GPU memory than any stage allows, and can sleep if one of them trains, so neither requires a new
    engine.
    """

    def __init__(self, plans: Sequence[StagePlan], logs: Path) -> None:
        configs = [config for plan in plans if (config := getattr(load_stage(plan), "engine", None))]
        self.gpu_memory = min((config.gpu_memory for config in configs), default=1.0)
        self.sleeps = any(kind_of(plan.stage.run).config is RLConfig for plan in plans)
        self.logs = logs
        self.engine: TrainingEngine | None = None
        self._shape: tuple | None = None
        self._stack = ExitStack()

    def on(self, model: Path, config: EngineConfig) -> TrainingEngine:
        config = replace(config, gpu_memory=self.gpu_memory)
        shape = (
            json.loads((model / "config.json").read_text()),
            (model / "tokenizer.json").read_bytes(),
            asdict(config),
        )
        if self.engine is not None and self._shape == shape:
            self.engine.load(stored_parameters(model))
            return self.engine
        self.close()
        opened = open_training_engine(model, config, logs=self.logs, sleeps=self.sleeps)
        self.engine, self._shape = self._stack.enter_context(opened), shape
        return self.engine

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


@dataclass(frozen=True)
class Need:
    """Something a stage reads: the key that names it, its path, and what it must be (preflight.CHECKS)."""

    key: str
    path: str
    what: str


def _nothing(plan: StagePlan, *_: Any) -> list:
    return []


@dataclass(frozen=True)
class Kind:
    config: type
    run: Callable[[Context, Any], None]
    given: Callable[[StagePlan], list[str]] = _nothing  # settings that the pipeline provides
    needs: Callable[[StagePlan, Any], list[Need]] = _nothing
    trains: bool = False  # it produces a model, from which the next stage starts


def seed_setting(plan: StagePlan) -> str:
    return f"seed={stage_seed(plan.recipe.seed, plan.name)}"


def _set(key: str, value: str | None, plan: StagePlan) -> list[str]:
    return [f"{key}={json.dumps(plan.recipe.filled_in(value))}"] if value else []


# ---- training ----


def _given_training(plan: StagePlan) -> list[str]:
    return [
        f"name={plan.name}",
        f"output={plan.recipe.folder}",
        seed_setting(plan),
        *_set("model.path", plan.start, plan),
    ]


def _given_rl(plan: StagePlan) -> list[str]:
    shared = _set("data.train", plan.recipe.train, plan) + _set("data.validation", plan.recipe.validation, plan)
    return _given_training(plan) + shared


def _sft_needs(plan: StagePlan, config: SFTConfig) -> list[Need]:
    validation = [Need("data.validation", config.data.validation, "examples")] if config.data.validation else []
    return [
        Need("model.path", config.model.path, "model"),
        Need("data.train", config.data.train, "examples"),
        *validation,
    ]


def _rl_needs(plan: StagePlan, config: RLConfig) -> list[Need]:
    found = [Need("model.path", config.model.path, "model")]
    found += [Need("data.train", config.data.train, "problems")] if config.data.train else []
    if config.validation.every:
        lacking = f"data.validation is not set, and validation.every is {config.validation.every}: name the problems or set it to 0"
        require(config.data.validation is not None, lacking)
        found.append(Need("data.validation", str(config.data.validation), "problems"))
    return found


def _run_rl(context: Context, config: RLConfig) -> None:
    rl.train(config, context.engines.on(resolve_model(config.model.path), config.engine))


# ---- the SFT set ----


def _given_sequential(plan: StagePlan) -> list[str]:
    place = [f"output={plan.folder}/solutions.jsonl", seed_setting(plan)]
    return [*place, *_set("model", plan.start, plan), *_set("problems", plan.recipe.train, plan)]


def _sequential_needs(plan: StagePlan, config: sft_set.SequentialConfig) -> list[Need]:
    return [Need("model", config.model, "model"), Need("problems", config.problems, "problems")]


def _run_sequential(context: Context, config: sft_set.SequentialConfig) -> None:
    context.folder.mkdir(parents=True, exist_ok=True)
    engine = None if config.engine.url else context.engines.on(resolve_model(config.model), config.engine)
    context.say(sft_set.solve_sequentially(config, engine))


def _rewrite_needs(plan: StagePlan, config: sft_set.RewriteConfig) -> list[Need]:
    found = [Need("source", config.source, "file")]
    found += [Need("instruction", config.instruction, "file")] if config.instruction else []
    if config.rule() is None:
        config.endpoint.key()
    return found


def _run_rewrite(context: Context, config: sft_set.RewriteConfig) -> None:
    if not context.runtime.is_main:
        return
    context.folder.mkdir(parents=True, exist_ok=True)
    context.say(asyncio.run(sft_set.rewrite(config)))


# ---- evaluation ----


LISTED = required("list names of benchmarks or files of problems")


@dataclass
class EvalStage:
    seed: Seed = 0
    # stage, stage@step or folder
    model: Annotated[str, required("name a stage of the recipe or a folder")] = ""
    method: Literal["parallel", "sequential"] = "parallel"
    budget: Positive = 12_000
    top_p: Share = 0.95  # the paper's; below 1, sampling sorts the vocabulary, which takes a CPU a while
    # names of the paper's, or files; default: the recipe's
    benchmarks: Annotated[list[str], LISTED] = field(default_factory=list)
    benchmark_folder: str = "runs/data"
    task: TaskName = "math"  # or your own: my_package.my_module:MyTask
    n: Positive | None = None  # responses per problem; None: the paper's (200 or 16), 16 for a file
    max_prompt_tokens: Positive = 4096
    engine: EngineConfig = field(default_factory=EngineConfig)

    def check(self) -> None:
        names = [Path(file).stem for file in self.benchmarks]
        require(
            len(set(names)) == len(names),
            f"two benchmarks are called {max(names, key=names.count)!r}; rename one of the files",
        )

    def named(self) -> list[Benchmark]:
        known = lambda name: name in BENCHMARKS
        return [
            named_benchmark(name, self.benchmark_folder, self.n) if known(name) else own_benchmark(name, self.n)
            for name in self.benchmarks
        ]

    def evaluation(self) -> EvalConfig:
        rest = [
            f"task={self.task}",
            f"rollout.top_p={self.top_p}",
            f"prompt.max_prompt_tokens={self.max_prompt_tokens}",
            f"seed={self.seed}",
        ]
        config = eval_config(self.method, self.budget, rest)
        config.engine = self.engine
        return config


def _given_eval(plan: StagePlan) -> list[str]:
    benchmarks = [plan.recipe.filled_in(name) for name in plan.recipe.benchmarks]
    return [
        seed_setting(plan),
        f"benchmarks={json.dumps(benchmarks)}",
        f"benchmark_folder={plan.recipe.benchmark_folder}",
    ]


def _eval_needs(plan: StagePlan, config: EvalStage) -> list[Need]:
    return [
        Need("model", plan.recipe.place(config.model), "model"),
        *(Need("benchmarks", str(b.file), "problems") for b in config.named()),
    ]


def _run_eval(context: Context, config: EvalStage) -> None:
    model = resolve_model(context.plan.recipe.place(config.model))
    engine = None if config.engine.url else context.engines.on(model, config.engine)
    evaluate(model, config.named(), config.evaluation(), context.folder, engine=engine)


COMPARED = Annotated[str, required("latency compares a parallel with a sequential model on problems")]
NUMBERS = required("list numbers of responses at a time, e.g. [1, 4]")


@dataclass
class LatencyStage:
    seed: Seed = 0
    parallel: COMPARED = ""  # stages, stage@step or folders
    sequential: COMPARED = ""
    problems: COMPARED = ""
    task: TaskName = "math"  # or your own: my_package.my_module:MyTask
    budget: Positive = 12_000
    concurrency: Annotated[list[Positive], NUMBERS] = field(default_factory=lambda: [1, 4, 16])
    n: Positive = 1
    max_prompt_tokens: Positive = 4096
    engine: EngineConfig = field(default_factory=EngineConfig)

    def models(self, plan: StagePlan) -> dict[str, str]:
        return {method: plan.recipe.place(getattr(self, method)) for method in METHODS}


def _latency_needs(plan: StagePlan, config: LatencyStage) -> list[Need]:
    models = [Need(method, path, "model") for method, path in config.models(plan).items()]
    return [*models, Need("problems", config.problems, "problems")]


def _run_latency(context: Context, config: LatencyStage) -> None:
    timings = []
    for method, path in config.models(context.plan).items():
        own = [f"task={config.task}", f"prompt.max_prompt_tokens={config.max_prompt_tokens}", f"seed={config.seed}"]
        sampling = eval_config(method, config.budget, own)
        engine = context.engines.on(resolve_model(path), config.engine)
        timings += latency.measure_all(
            engine, sampling, config.problems, config.concurrency, config.n, context.runtime.is_main
        )
    if context.runtime.is_main:
        facts = {
            "model": config.parallel,
            "baseline": config.sequential,
            "budget": config.budget,
            "device": latency.device(),
        }
        latency.save(context.folder, timings, **facts)


# ---- the report ----


ROWS = required("map evaluation stages to their names in the tables")


@dataclass
class ReportStage:
    title: str = "Divide-and-Conquer CoT"
    # stage → its name in the tables
    rows: Annotated[dict[str, str], ROWS] = field(default_factory=dict)
    baselines: dict[str, str] = field(default_factory=dict)  # name in the tables → name it is compared with
    kind: str | None = None  # finds the kind of problem in its id (eval/tables.py)
    notes: list[str] = field(default_factory=list)
    other_seeds: list[str] = field(default_factory=list)  # finished folders of the same recipe with other seeds

    def check(self) -> None:
        shown = list(self.rows.values())
        require(
            len(set(shown)) == len(shown), f"two rows are called {max(shown, key=shown.count)!r}; rename one of them"
        )
        for name in (*self.baselines, *self.baselines.values()):
            one_of(name, row_labels(shown), "a name in baselines")
        try:
            groups = re.compile(self.kind or "()").groups
        except re.error as error:
            raise ConfigError(f"kind is {self.kind!r}, which is no regular expression ({error})") from None
        require(groups == 1, f"kind is {self.kind!r}; it must have one group, which finds the kind in a problem's id")


def _report_needs(plan: StagePlan, config: ReportStage) -> list[Need]:
    stages = plan.recipe.all_stages()
    for name in config.rows:
        one_of(name, [known for known, stage in stages.items() if stage.run == "eval"], "a key of rows")
    evaluated = [Need("rows", str(plan.recipe.folder / name / "summary.json"), "file") for name in config.rows]
    return evaluated + [Need("other_seeds", f"{folder}/recipe.yaml", "file") for folder in config.other_seeds]


def _made_by(recipe: Recipe) -> str:
    """Which code made the finished stages: the page should say if several versions did."""
    marks = [mark for name in recipe.all_stages() if (mark := Run(recipe.folder / name).finished())]
    codes = {describe_code(mark["made_from"]["code"]) for mark in marks if "made_from" in mark}
    return f"Made by {'; '.join(sorted(codes))}." if codes else ""


def _run_report(context: Context, config: ReportStage) -> None:
    if not context.runtime.is_main:
        return
    from dccot.eval.report import write_report  # it imports matplotlib, which no other stage needs

    recipe = context.plan.recipe
    folder, kinds = recipe.folder, {name: stage.run for name, stage in recipe.all_stages().items()}
    evaluations = [Evaluation.load(folder / name) for name in config.rows]
    for evaluation, shown in zip(evaluations, config.rows.values()):
        evaluation.name = shown
    page = write_report(
        evaluations,
        [folder / name for name, kind in kinds.items() if kind == "rl"],
        context.folder,
        config.title,
        [
            f"The recipe {recipe.name} with seed {recipe.seed}; its own ± are those of one run. {_made_by(recipe)}",
            *config.notes,
        ],
        baseline=config.baselines,
        latencies=[folder / name for name, kind in kinds.items() if kind == "latency"],
        kind=config.kind,
        seeds=[folder, *map(Path, config.other_seeds)] if config.other_seeds else [],
    )
    context.say(f"report: {page}")


KINDS: dict[str, Kind] = {
    "sft": Kind(SFTConfig, lambda context, config: sft.train(config), _given_training, _sft_needs, trains=True),
    "rl": Kind(RLConfig, _run_rl, _given_rl, _rl_needs, trains=True),
    "sequential": Kind(sft_set.SequentialConfig, _run_sequential, _given_sequential, _sequential_needs),
    "rewrite": Kind(
        sft_set.RewriteConfig, _run_rewrite, lambda plan: [f"output={plan.folder}/sft.jsonl"], _rewrite_needs
    ),
    "eval": Kind(EvalStage, _run_eval, _given_eval, _eval_needs),
    "latency": Kind(LatencyStage, _run_latency, lambda plan: [seed_setting(plan)], _latency_needs),
    "report": Kind(ReportStage, _run_report, needs=_report_needs),
}


def kind_of(name: str) -> Kind:
    """An entry of KINDS, or your own: `my_package.my_module:my_kind`, a function that returns a Kind."""
    found = lookup(KINDS, name, "run of a stage")
    return found if isinstance(found, Kind) else found()


def load_stage(plan: StagePlan) -> Any:
    """A stage's configuration, checked; an error names the stage."""
    try:
        return plan.load(kind_of(plan.stage.run).config)
    except ConfigError as error:
        raise ConfigError(f"stage {plan.name}: {error}") from None
