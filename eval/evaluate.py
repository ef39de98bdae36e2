"""Evaluation: n responses to every problem of a benchmark, graded, as one table with standard errors.

    dccot eval runs/hlp --bench aime24,math500                n, temperature and top_p are the paper's unless given
    dccot eval runs/base --problems mine.jsonl --n 16 --method sequential --budget 32768 engine.max_sequences=64
    torchrun --nproc_per_node 8 -m dccot.eval.evaluate runs/hlp --bench aime24 --samples 50    torchrun has its own --n
    dccot eval latency …                                      wall-clock instead of accuracy: latency.py

generate what is missing → grade what is ungraded → summarise. Every response is appended to its rank's file as it
finishes, so after an interruption the same command continues with the missing ones, on any number of ranks that share
the folder. A response's seed is a hash of (seed, benchmark, problem, sample): it does not depend on what else runs. On
a CPU in float32 a resumed table is therefore the uninterrupted one; on a GPU the rounding of a kernel may depend on the
batch.
"""

from __future__ import annotations

import argparse
import glob
import hashlib
import json
import logging
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dccot.core.command import Parser, conclude, positive, run_cleanly
from dccot.core.config import RENAMED, ConfigError, Seed, load_config, require, to_plain
from dccot.core.files import BadData, JsonlWriter, checksum, read_json, read_jsonl, write_atomic, write_jsonl_atomic
from dccot.core.progress import Progress, first_rank, waiting
from dccot.core.provenance import record
from dccot.core.run import Checkpoint, Run, steps_until
from dccot.core.runtime import Runtime, require_shared
from dccot.core.statistics import over_problems
from dccot.data.judge import GradingConfig, Judge, classes_of, verdicts_of
from dccot.data.problems import Columns
from dccot.data.prompts import PromptConfig, Prompted
from dccot.data.rollouts import Pair, missing_in, roll_out, sample_to_file, saved_rows
from dccot.data.task import TaskName, own_settings, settings_of, task_of
from dccot.eval import results
from dccot.eval.results import BENCHMARKS, SETTINGS, Benchmark, Evaluation, Sample
from dccot.model.config import read_config
from dccot.model.folder import explain_best, find_model, model_checksums, resolve_model
from dccot.model.hub import hub_name
from dccot.model.tokenizer import open_tokenizer
from dccot.rollout.director import RolloutConfig
from dccot.rollout.engine import Engine, EngineConfig, open_engine
from dccot.rollout.response import Rollout
from dccot.rollout.tags import in_words

log = logging.getLogger(__name__)
METHODS = ("parallel", "sequential")
RESULTS = Path("runs/eval")


@dataclass
class EvalConfig:
    """The paper's sampling; `key=value` on the command line changes any of it."""

    seed: Seed = 0
    task: TaskName = "math"  # or your own: my_package.my_module:MyTask
    data: Columns = field(default_factory=Columns)
    prompt: PromptConfig = field(default_factory=lambda: PromptConfig(max_prompt_tokens=4096))
    rollout: RolloutConfig = field(default_factory=lambda: RolloutConfig(budget=12_000, top_p=0.95))
    engine: EngineConfig = field(default_factory=EngineConfig)
    grading: GradingConfig = field(default_factory=GradingConfig)

    @property
    def method(self) -> str:
        return METHODS[0] if self.prompt.parallel else METHODS[1]


def eval_config(
    method: str | None = None, budget: int | None = None, overrides: Sequence[str] = (), model: str | Path = ""
) -> EvalConfig:
    """What is not given is as the run of `model` has it: its task, how it is prompted, its budget and workers."""
    given = {"prompt.kind": method, "rollout.budget": budget}
    settings = own_settings(model) if model else {}
    settings |= {key: value for key, value in given.items() if value is not None}
    return load_config(EvalConfig, None, overrides, settings.items())


def evaluate(
    model: str | Path,
    benchmarks: Sequence[Benchmark],
    config: EvalConfig,
    out: str | Path | None,
    *,
    engine: Engine | None = None,
    strict: bool = False,
) -> Evaluation:
    """Bring `out` to `benchmark.samples` graded responses per problem, write its summary.json and return it. All ranks
    call this.

    Without an `engine` one is built, and only if a response is missing. Without `out` it is a folder below RESULTS,
    named after the model as rank 0 found it: `latest` may move while the ranks start.
    """
    with Runtime.of_workers() as runtime, ExitStack() as stack:
        read_config(find_model(model))
        care: dict[str, Any] = {"strict": strict, "report": log.warning if runtime.is_main else lambda message: None}
        task = task_of(config)
        problems = {b.name: b.chosen(task.problems(b.file, **care)) for b in benchmarks}
        with nullcontext() if engine else waiting(f"reading {model}"):
            path = resolve_model(model)
            weights = model_checksums(path, runtime)
            tokenizer = engine.tokenizer if engine else open_tokenizer(path)
        if differs := _other_limits(path, config):
            care["report"](differs)
        out = Path(out or RESULTS / default_name(path, config))
        prompted = {name: task.prompts(asked, tokenizer, **care) for name, asked in problems.items()}
        _check_context(path, config, max(len(ids) for problems in prompted.values() for _, ids in problems))
        _open_folder(out, _settings(path, weights, config), runtime)
        require_shared(out, runtime)  # otherwise the table would silently be that of rank 0's responses
        files = {b.name: {b.file.name: checksum(b.file)} for b in benchmarks}
        wanted = {b.name: b.samples for b in benchmarks}
        record(out, to_plain(config) | {"samples": wanted}, {"model": weights, **files}, runtime)
        missing = {b.name: missing_in(_files(out, b), prompted[b.name], b.samples) for b in benchmarks}
        if any(missing.values()):
            engine = stack.enter_context(open_engine(path, config.engine, engine, logs=out))
            for b in benchmarks:
                _generate(engine, b, prompted[b.name], missing[b.name], config, out, runtime)
        runtime.gather([])  # everything is on disk
        judge = stack.enter_context(task.open_judge())
        evaluation = Evaluation(out.name, str(path), config.method, config.rollout.budget)
        with waiting("grading"):
            for file in sorted((out / "rollouts").glob("*.jsonl"))[runtime.rank :: runtime.ranks]:
                grade_file(file, judge)
            runtime.gather([])  # everything is graded
            for b in benchmarks:
                samples = [Sample.from_row(row) for row in saved_rows(_files(out, b), prompted[b.name], b.samples)]
                evaluation.results[b.name] = results.summarise(b, samples, _classes(samples, judge, runtime))
        if runtime.is_main:
            evaluation.save(out)
            _draw(evaluation, Run(out), steps_until(model, rl=True))
    return evaluation


def _draw(evaluation: Evaluation, run: Run, step: int) -> None:
    """A point of each benchmark in TensorBoard, after the steps of RL that the model has had."""
    from dccot.train.recorder import EventFile, scalars

    events = EventFile(run.tensorboard, step)
    for name, result in evaluation.results.items():
        means = {what: over_problems(result.by_problem[what]).value for what in ("accuracy", "longest_path")}
        events.add(scalars({f"evaluation/{name}/{what}": value for what, value in means.items()}), step)
    events.close()


def _other_limits(path: Path, config: EvalConfig) -> str | None:
    """What to say of a model that was trained to spawn otherwise than it is asked to."""
    trained, asked = ((each.workers, each.depth) for each in (settings_of(path)[1], config.rollout))
    if not config.prompt.parallel or trained in ((3, 1), asked):
        return None
    remedy = f"rollout.workers={json.dumps(trained[0], separators=(',', ':'))} rollout.depth={trained[1]}"
    return f"trained with {in_words(*trained)}, asked for {in_words(*asked)}; {remedy} asks as it was trained"


def _check_context(path: Path, config: EvalConfig, longest: int) -> None:
    context, budget = config.engine.context or read_config(path).max_position, config.rollout.budget
    needed = f"the longest prompt has {longest:,} tokens and --budget is {budget:,}"
    require(longest + budget <= context, f"{needed}; the model's context is {context:,}: lower the budget")


# ---- the folder ----


def _settings(path: Path, weights: Mapping[str, str], config: EvalConfig) -> dict:
    """The settings that determine a response and its verdict, not its speed."""
    return {
        "model": str(path.resolve()),
        "model.sha256": hashlib.sha256(json.dumps(sorted(weights.items())).encode()).hexdigest(),
        "task": config.task,
        "seed": config.seed,
        **{f"engine.{name}": getattr(config.engine, name) for name in ("dtype", "kv_cache_dtype", "context")},
        "grading.kind": config.grading.kind,
        "grading.answer_block_only": config.grading.answer_block_only,
        "grading.golds": config.grading.golds,
        **{f"prompt.{name}": value for name, value in asdict(config.prompt).items()},
        **{f"rollout.{name}": value for name, value in asdict(config.rollout).items()},
    }


def _open_folder(out: Path, settings: dict, runtime: Runtime) -> None:
    """Create the folder or continue in it; one made with other settings is rejected: its table would mix the two."""
    fault = runtime.gather([_fault_of(out, settings) if runtime.is_main else None])[0][0]
    if fault:
        raise ConfigError(fault)


def _fault_of(out: Path, settings: dict) -> str | None:
    file, remedy = out / SETTINGS, "give another folder with --out"
    # in folders of versions that did not write them
    older = {name: settings[name] for name in ("model.sha256", "task", "engine.kv_cache_dtype", "engine.context")}
    older |= {"grading.kind": "math_verify", "grading.golds": "any", "prompt.instruction": None}
    older |= {"prompt.spawning": None, "rollout.depth": 1}
    try:
        before = older | read_json(file, remedy) if file.exists() else settings
        before = {RENAMED.get(name, name): value for name, value in before.items()}
        if changed := [name for name in settings if before.get(name) != settings[name]]:
            was, now = before.get(changed[0]), settings[changed[0]]
            return f"{out} was begun with {changed[0]}={was}, now it is {now}; {remedy}"
        (out / "rollouts").mkdir(parents=True, exist_ok=True)
        if not file.exists():
            write_atomic(file, json.dumps(settings, indent=1, ensure_ascii=False))
        for unfinished in (out / "rollouts").glob("*.jsonl"):
            JsonlWriter(unfinished).close()  # cuts off half a line left by a crash, rejects a file being written
    except BadData as error:
        return str(error)
    return None


def _files(out: Path, benchmark: Benchmark) -> list[Path]:
    return sorted((out / "rollouts").glob(f"{glob.escape(benchmark.name)}.rank*.jsonl"))


# ---- generate, grade, classes ----


class LengthProgress(Progress):
    """Counts finished responses and shows their mean longest path."""

    def __init__(self, title: str, total: int, active: bool):
        super().__init__(title, total, active=active and total > 0)
        self.tokens = 0

    def advance(self, longest_path: int) -> None:
        self.tokens += longest_path
        self.show(self.done + 1, f"longest path {self.tokens / (self.done + 1):,.0f}")


def _generate(
    engine: Engine,
    benchmark: Benchmark,
    prompted: Sequence[Prompted],
    missing: Sequence[Pair],
    config: EvalConfig,
    out: Path,
    runtime: Runtime,
) -> None:
    """This replica's share of the missing responses, each written to disk as soon as it is finished."""
    share = missing[engine.replica :: engine.replicas]
    engine.forget_prefixes()  # the cache must not depend on earlier work
    with ExitStack() as stack:
        progress = stack.enter_context(LengthProgress(benchmark.title, len(share), runtime.is_main))
        writes = runtime.rank % config.engine.tensor_parallel == 0  # the ranks of one replica hold the same responses
        file = out / "rollouts" / f"{benchmark.name}.rank{runtime.rank}.jsonl"
        writer = stack.enter_context(JsonlWriter(file)) if writes else None
        seed = (config.seed, "eval", benchmark.name)
        rollouts = roll_out(engine, prompted, share, config.prompt, config.rollout, seed=seed)
        for rollout in sample_to_file(writer, rollouts, row=_line):
            progress.advance(rollout.response.longest_path)


def _line(rollout: Rollout) -> dict:
    """As it is saved. Log-probs are only for inspection here; with four decimals they are a third of the file."""
    for segment in rollout.response.segments():
        segment.logprobs = [round(logprob, 4) for logprob in segment.logprobs]
    return rollout.to_json()


def grade_file(file: Path, judge: Judge) -> None:
    """Give every line of a rollout JSONL its verdict. Two passes: the texts fit in memory, the tokens may not."""
    rows = (row for _, row in read_jsonl(file)) if file.stat().st_size else iter(())
    ungraded = [((row["text"], row["gold"]), row["problem"]) for row in rows if row["verdict"] is None]
    if ungraded:
        pairs, problems = zip(*ungraded)
        verdicts = iter(verdicts_of(judge, pairs, [f"problem {problem!r}" for problem in problems]))
        rows = (row for _, row in read_jsonl(file))
        write_jsonl_atomic(file, (row | {"verdict": row["verdict"] or next(verdicts).value} for row in rows))


def _classes(samples: Sequence[Sample], judge: Judge, runtime: Runtime) -> dict[str, list[int]]:
    """Per problem, which of its answers are equal; each rank takes its share of the problems."""
    mine = list(results.by_problem(samples).items())[runtime.rank :: runtime.ranks]
    found = [(problem, classes_of(judge, [s.text for s in group], problem)) for problem, group in mine]
    return dict(entry for part in runtime.gather(found) for entry in part)


def default_name(model: Path, config: EvalConfig) -> str:
    """Of a model's folder: its run and step, its name on the hub, or the folder's; and how it was prompted."""
    model = model.resolve()
    checkpoint = Checkpoint.of_weights(model)
    name = f"{checkpoint.run.name}-{checkpoint.step}" if checkpoint else hub_name(model) or model.name
    return f"{name}-{config.method}-{config.rollout.budget}"


def main(argv: Sequence[str] | None = None) -> int:
    argv = list(sys.argv[1:] if argv is None else argv)
    if argv[:1] == ["latency"]:
        from dccot.eval import latency

        return latency.main(argv[1:])
    parser = Parser(
        "Accuracy, longest path and parallelism of a model on benchmarks. `dccot eval latency` measures wall-clock. "
        "The same command resumes.",
        "dccot eval runs/hlp --bench aime24,math500 --n 16",
    )
    add = parser.add_argument
    add("model", help="a hub id, a Hugging Face folder, or a run (its newest checkpoint)")
    add("settings", nargs="*", metavar="key=value", help="e.g. rollout.temperature=1 engine.dtype=float32 seed=1")
    add("--bench", default="", help=f"some of {','.join(BENCHMARKS)}")
    mine = "JSONL with id, question, gold; may be repeated"
    add("--problems", action="append", default=[], metavar="FILE", help=mine)
    number = "responses per problem; default: the paper's (200 or 16), 16 for a file"
    add("--n", "--samples", type=positive, help=number)
    add("--method", choices=METHODS, help="how the model is prompted; default: as in its run, or parallel")
    add("--budget", type=positive, help="tokens on the longest path; default: the run's own, or 12000")
    add("--out", type=Path, help="default: runs/eval/MODEL-METHOD-BUDGET")
    add("--data", default="runs/data", help="folder of the benchmarks' files (default: runs/data)")
    add("--strict", action="store_true", help="stop at a malformed problem instead of leaving it out")
    return run_cleanly(lambda: _run(parser.read(argv)))


def _run(arguments: argparse.Namespace) -> None:
    bench = filter(None, map(str.strip, arguments.bench.split(",")))
    benchmarks = [results.named_benchmark(name, arguments.data, arguments.n) for name in bench]
    benchmarks += [results.own_benchmark(file, arguments.n) for file in arguments.problems]
    names = [benchmark.name for benchmark in benchmarks]
    require(bool(names), "nothing to evaluate on; name benchmarks with --bench or a file with --problems")
    repeated = max(names, key=names.count)
    require(names.count(repeated) == 1, f"two benchmarks are called {repeated!r}; rename one of the files")
    config = eval_config(arguments.method, arguments.budget, arguments.settings, arguments.model)
    if first_rank():
        asked = f"{config.method}, at most {config.rollout.budget:,} tokens on the longest path"
        print(explain_best(arguments.model) or f"{arguments.model}: {asked}; {', '.join(names)}", flush=True)
    evaluation = evaluate(arguments.model, benchmarks, config, arguments.out, strict=arguments.strict)
    if first_rank():
        evaluation.print()
    out = arguments.out or RESULTS / evaluation.name
    conclude(f"{out}/summary.json", f"dccot report {out}", f"dccot view {out}")


if __name__ == "__main__":
    sys.exit(main())
