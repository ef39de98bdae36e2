"""Wall-clock per response, parallel vs. sequential on the same problems, and how well longest path predicts it.

    dccot eval latency runs/hlp --baseline runs/base --problems mine.jsonl --concurrency 1,4,16

At concurrency c the engine always works on c responses: each one that finishes makes room for the next. c extra
responses run first to warm up the engine, and more run afterwards, so that the last measured one still runs under load.
A response's time runs from its first call to its last token.

    seconds ≈ intercept + seconds per token · longest path      r²: the share of the variance that this line explains
    ratio   = parallel / sequential, of the means               standard errors over problems, paired

The two models run one after the other, each in its own process, so that they share no memory or caches.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from dataclasses import asdict, dataclass
from itertools import chain, count, islice
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from dccot.core.command import Parser, conclude, positive, print_table, run_cleanly
from dccot.core.config import require
from dccot.core.files import write_atomic, write_jsonl_atomic
from dccot.core.statistics import ByProblem, Estimate, fit_line, mean, over_problems, plain, relative_change
from dccot.data.prompts import Prompted
from dccot.data.task import task_of
from dccot.eval.evaluate import METHODS, EvalConfig, LengthProgress, default_name, eval_config
from dccot.model.folder import resolve_model
from dccot.rollout.engine import Engine, open_engine
from dccot.rollout.generate import Request, Watch, generate

REPORT = "latency.json"


@dataclass(frozen=True)
class Timing:
    """One measured response."""

    method: str
    concurrency: int
    problem: str
    sample: int
    seconds: float
    longest_path: int
    total_tokens: int


class StopWatch(Watch):
    """Seconds from a response's first call to its end."""

    def __init__(self) -> None:
        self.began: dict[tuple[str, int], float] = {}
        self.seconds: dict[tuple[str, int], float] = {}

    def started(self, request, call) -> None:
        self.began.setdefault((request.problem, request.sample), time.perf_counter())

    def answered(self, request, response) -> None:
        key = request.problem, request.sample
        self.seconds[key] = time.perf_counter() - self.began[key]


def measure(
    engine: Engine, asked: Sequence[Prompted], config: EvalConfig, concurrency: int, samples: int, show: bool = True
) -> list[Timing]:
    """`samples` responses to every problem, timed while `concurrency` responses are always in progress."""
    endless = ((problem.id, sample, ids) for sample in count() for problem, ids in asked)
    requests = (Request(*asked, config.prompt.parallel) for asked in endless)
    measured = list(islice(requests, samples * len(asked)))
    wanted = {(request.problem, request.sample) for request in measured}
    watch = StopWatch()
    timings: list[Timing] = []
    engine.forget_prefixes()
    everything = chain(islice(requests, concurrency), measured, requests)
    seed, title = (config.seed, "latency"), f"{config.method}, {concurrency} at a time"
    running = generate(engine, everything, config.rollout, seed=seed, watch=watch, concurrency=concurrency)
    with closing(running), LengthProgress(title, len(wanted), show) as progress:
        while len(timings) < len(wanted):
            request, response = next(running)
            key = request.problem, request.sample
            if key in wanted:
                lengths = response.longest_path, response.total_tokens
                timings.append(Timing(config.method, concurrency, *key, watch.seconds[key], *lengths))
                progress.advance(response.longest_path)
    return timings


def measure_all(
    engine: Engine, config: EvalConfig, problems: str | Path, levels: Sequence[int], samples: int, show: bool = True
) -> list[Timing]:
    """The same at each concurrency, on a file of problems."""
    task = task_of(config)
    asked = task.prompts(task.problems(problems), engine.tokenizer)
    return [timing for level in levels for timing in measure(engine, asked, config, level, samples, show)]


def measure_model(
    path: Path, configs: Sequence[EvalConfig], problems: Path, levels: Sequence[int], samples: int
) -> list[Timing]:
    """One engine, one or both methods."""
    remedy = "seconds are measured on an engine in this process: leave engine.url out"
    require(not configs[0].engine.url, f"engine.url is set; {remedy}")
    with open_engine(path, configs[0].engine) as engine:
        return [timing for config in configs for timing in measure_all(engine, config, problems, levels, samples)]


def by_problem(timings: Sequence[Timing], quantity: str) -> ByProblem:
    values: dict[str, list[float]] = {}
    for timing in timings:
        values.setdefault(timing.problem, []).append(getattr(timing, quantity))
    return {problem: mean(found) for problem, found in values.items()}


def side(timings: Sequence[Timing]) -> dict:
    """Time that one method took at one concurrency."""
    seconds = [t.seconds for t in timings]
    line = fit_line([t.longest_path for t in timings], seconds)
    return {
        "responses": len(timings),
        "seconds": over_problems(by_problem(timings, "seconds")).to_json(),
        "median_seconds": statistics.median(seconds),
        "longest_path": over_problems(by_problem(timings, "longest_path")).to_json(),
        "seconds_per_token": plain(line.slope),
        "intercept": plain(line.intercept),
        "r2": plain(line.r2),
    }


def compare(timings: Sequence[Timing]) -> list[dict]:
    """Per concurrency: both methods, their ratio, and the line through both."""
    levels = []
    for concurrency in sorted({t.concurrency for t in timings}):
        together = [t for t in timings if t.concurrency == concurrency]
        here = {method: [t for t in together if t.method == method] for method in METHODS}
        level: dict[str, Any] = {"concurrency": concurrency} | {method: side(found) for method, found in here.items()}
        for quantity in ("seconds", "longest_path"):
            change = relative_change(*(by_problem(found, quantity) for found in here.values()))
            level[f"{quantity}_ratio"] = Estimate(1 + change.value, change.stderr).to_json()
        level["r2"] = plain(fit_line([t.longest_path for t in together], [t.seconds for t in together]).r2)
        levels.append(level)
    return levels


def cells(level: dict) -> dict[str, str]:
    """A level in human-readable form: column → cell."""
    sides = [level[method] for method in METHODS]
    return {
        "at a time": str(level["concurrency"]),
        **{f"{method} (s)": _plus_minus(one["seconds"]) for method, one in zip(METHODS, sides)},
        "ratio": _plus_minus(level["seconds_ratio"]),
        "ratio of longest paths": _plus_minus(level["longest_path_ratio"]),
        "ms per token": " / ".join(_number(1e3 * (one["seconds_per_token"] or math.nan)) for one in sides),
        "r²": " / ".join(_number(one["r2"]) for one in sides),
        "r² of both": _number(level["r2"]),
    }


def _number(value: float | None) -> str:
    return "–" if value is None or math.isnan(value) else f"{value:.3g}"


def _plus_minus(estimate: dict) -> str:
    return _number(estimate["value"]) + ("" if estimate["stderr"] is None else f" ± {estimate['stderr']:.2g}")


def device() -> str:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else f"a CPU with {os.cpu_count()} cores"


def save(out: Path, timings: Sequence[Timing], **facts: object) -> None:
    write_jsonl_atomic(out / "timings.jsonl", map(asdict, timings))
    found = {"name": out.name, **facts, "levels": compare(timings)}
    write_atomic(out / REPORT, json.dumps(found, indent=1, ensure_ascii=False))


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(
        "Wall-clock per response of a parallel model against a sequential one on the same problems.",
        "dccot eval latency runs/hlp --baseline runs/base --problems mine.jsonl --concurrency 1,4,16",
        prog="dccot eval latency",
    )
    add = parser.add_argument
    add("model", help="answers in parallel; a hub id, a Hugging Face folder or a run")
    add("settings", nargs="*", metavar="key=value", help="e.g. engine.dtype=float32 rollout.workers=3")
    add("--baseline", required=True, help="answers sequentially; the same")
    add("--problems", required=True, type=Path, metavar="FILE", help="JSONL with id, question, gold")
    add("--concurrency", type=levels_of, default="1,4,16", help="responses in progress at once (default: 1,4,16)")
    add("--n", type=positive, default=1, help="measured responses per problem and concurrency (default: 1)")
    add("--budget", type=positive, help="tokens on the longest path; default: the run's own, or 12000")
    add("--baseline-budget", type=positive, help="default: the same")
    add("--out", type=Path, help="default: runs/latency/MODEL-METHOD-BUDGET")
    return run_cleanly(lambda: _run(parser.read(argv)))


def levels_of(text: str) -> list[int]:
    return [positive(level) for level in text.split(",")]


def _run(arguments: argparse.Namespace) -> None:
    parallel = eval_config(METHODS[0], arguments.budget, arguments.settings, arguments.model)
    budget, settings = parallel.rollout.budget, arguments.settings
    configs = [parallel, eval_config(METHODS[1], arguments.baseline_budget or budget, settings, arguments.baseline)]
    print(f"{arguments.model} against {arguments.baseline}: at most {budget:,} tokens on the longest path", flush=True)
    paths = [resolve_model(arguments.model), resolve_model(arguments.baseline)]
    task_of(configs[0]).problems(arguments.problems)
    out = arguments.out or Path("runs/latency") / default_name(paths[0], configs[0])
    jobs = [(path, [config]) for path, config in zip(paths, configs)]
    if paths[0] == paths[1]:
        jobs = [(paths[0], configs)]
    with ProcessPoolExecutor(1, get_context("spawn"), max_tasks_per_child=1) as processes:
        load = arguments.problems, arguments.concurrency, arguments.n
        found = [processes.submit(measure_model, path, asked, *load) for path, asked in jobs]
        timings = [timing for job in found for timing in job.result()]
    save(out, timings, model=str(paths[0]), baseline=str(paths[1]), budget=budget, device=device())
    rows = [cells(level) for level in compare(timings)]
    print_table("Wall-clock per response", rows[0], [row.values() for row in rows])
    conclude(f"{out / REPORT}; every measured response in {out / 'timings.jsonl'}", f"dccot report {out}")


if __name__ == "__main__":
    sys.exit(main())
