"""What a recipe's stages can do. Each function takes the stage's context (pipeline.py) and leaves its results in `context.folder`.

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
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from dccot.config import require
from dccot.model.folder import resolve_model
from dccot.rollout.settings import EngineConfig

if TYPE_CHECKING:
    from dccot.pipeline import Context


def run_world(context: Context) -> None:
    from dccot.miniature.world import WorldConfig, make_world

    context.overrides = [f"seed={context.recipe.seed}", *context.overrides]
    if context.runtime.is_main:
        make_world(context.load(WorldConfig), context.folder)


def _training(context: Context) -> list[str]:
    """Name, place and seed of a training run inside the recipe's folder."""
    return [f"name={context.stage.name}", f"output={context.recipe.folder}", f"seed={context.recipe.seed}"]


def run_sft(context: Context) -> None:
    from dccot.train.sft import SFTConfig, train

    context.overrides = _training(context) + context.overrides
    train(context.load(SFTConfig))


def run_rl(context: Context) -> None:
    from dccot.train.rl import train
    from dccot.train.rl_config import RLConfig

    context.overrides = _training(context) + context.overrides
    config = context.load(RLConfig)
    train(config, context.engines.on(resolve_model(config.model.path), config.engine))


def run_sequential(context: Context) -> None:
    from dccot.data.sequential import SequentialConfig, run

    own = [f"model={context.start}", f"output={context.folder}/solutions.jsonl", f"seed={context.recipe.seed}"]
    context.overrides = own + context.overrides
    config = context.load(SequentialConfig)
    context.folder.mkdir(parents=True, exist_ok=True)
    context.say(run(config, context.engines.on(resolve_model(config.model), config.engine)))


def run_rewrite(context: Context) -> None:
    from dccot.data.grading import Grader
    from dccot.data.rewrite import RewriteConfig, load_solutions, rewrite_by_rule, run
    from dccot.miniature.arithmetic import rewrite_parallel

    by_rule = "by=rule" in context.overrides
    context.overrides = [f"output={context.folder}/sft.jsonl", *(o for o in context.overrides if not o.startswith("by="))]
    config = context.load(RewriteConfig)
    if not context.runtime.is_main:
        return
    context.folder.mkdir(parents=True, exist_ok=True)
    if by_rule:
        with Grader(config.grading) as grader:
            context.say(rewrite_by_rule(load_solutions(config.source, config.first), rewrite_parallel, grader, config))
    else:
        context.say(asyncio.run(run(config, lambda done, total: None)))


@dataclass
class EvalStage:
    model: str = ""  # stage or folder
    method: str = "parallel"
    budget: int = 12_000
    n: int = 16
    problems: list[str] = field(default_factory=list)
    max_prompt_tokens: int = 4096
    engine: EngineConfig = field(default_factory=EngineConfig)

    def check(self) -> None:
        require(bool(self.problems), "problems is not set; list JSONL files to evaluate on")


def run_eval(context: Context) -> None:
    from dccot.eval.benchmarks import own_benchmark
    from dccot.eval.run import eval_config, evaluate

    stage = context.load(EvalStage)
    model = resolve_model(context.place(stage.model or context.start))
    settings = [f"prompt.max_prompt_tokens={stage.max_prompt_tokens}", f"seed={context.recipe.seed}"]
    config = eval_config(stage.method, stage.budget, settings)
    config.engine = stage.engine
    benchmarks = [own_benchmark(Path(file), stage.n) for file in stage.problems]
    evaluate(model, benchmarks, config, context.folder, engine=context.engines.on(model, stage.engine))


@dataclass
class LatencyStage:
    parallel: str = ""  # stages or folders
    sequential: str = ""
    problems: str = ""
    budget: int = 12_000
    concurrency: list[int] = field(default_factory=lambda: [1, 4, 16])
    n: int = 1
    max_prompt_tokens: int = 4096
    engine: EngineConfig = field(default_factory=EngineConfig)


def run_latency(context: Context) -> None:
    from dccot.data.problems import load_problems
    from dccot.data.prompting import prompts_of
    from dccot.eval.latency import device, measure, save
    from dccot.eval.run import eval_config

    stage = context.load(LatencyStage)
    timings = []
    for method, name in (("parallel", stage.parallel), ("sequential", stage.sequential)):
        model = resolve_model(context.place(name))
        config = eval_config(method, stage.budget, [f"prompt.max_prompt_tokens={stage.max_prompt_tokens}", f"seed={context.recipe.seed}"])
        engine = context.engines.on(model, stage.engine)
        asked = prompts_of(load_problems(stage.problems), engine.tokenizer, config.prompt)
        for concurrency in stage.concurrency:
            timings += measure(engine, asked, config, concurrency, stage.n)
    if context.runtime.is_main:
        context.folder.mkdir(parents=True, exist_ok=True)
        save(context.folder, timings, model=stage.parallel, baseline=stage.sequential, budget=stage.budget, device=device())


@dataclass
class ReportStage:
    title: str = "Divide-and-Conquer CoT"
    rows: dict[str, str] = field(default_factory=dict)  # stage → its name in the tables
    baselines: dict[str, str] = field(default_factory=dict)  # name in the tables → name it is compared with
    kind: str | None = None  # finds the kind of problem in its id (eval/tables.py)
    notes: list[str] = field(default_factory=list)
    other_seeds: list[str] = field(default_factory=list)  # finished folders of the same recipe with other seeds


def run_report(context: Context) -> None:
    from dccot.eval.report import write_report
    from dccot.eval.results import Evaluation

    stage = context.load(ReportStage)
    if not context.runtime.is_main:
        return
    folder, kinds = context.recipe.folder, {s.name: s.run for s in context.recipe.stages}
    evaluations = [Evaluation.load(folder / name) for name in stage.rows]
    for evaluation, shown in zip(evaluations, stage.rows.values()):
        evaluation.name = shown
    trained = [folder / name for name, kind in kinds.items() if kind == "rl"]
    latencies = [folder / name for name, kind in kinds.items() if kind == "latency"]
    seeds = [folder, *map(Path, stage.other_seeds)] if stage.other_seeds else []
    notes = [f"The recipe {context.recipe.name} with seed {context.recipe.seed}; its own ± are those of one run.", *stage.notes]
    page = write_report(
        evaluations, trained, context.folder, stage.title, notes,
        baseline=stage.baselines, latencies=latencies, kind=stage.kind, seeds=seeds,
    )  # fmt: skip
    context.say(f"report: {page}")


KINDS: dict[str, Callable[[Context], None]] = {
    "world": run_world,
    "sft": run_sft,
    "rl": run_rl,
    "sequential": run_sequential,
    "rewrite": run_rewrite,
    "eval": run_eval,
    "latency": run_latency,
    "report": run_report,
}
TRAINING = ("sft", "rl")
