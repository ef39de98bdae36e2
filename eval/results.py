"""Benchmarks and what was measured on them: means per problem with standard errors, and the file that holds them.

    runs/eval/NAME/rollouts/aime24.rank0.jsonl      every response, one line each            written by evaluate.py
    runs/eval/NAME/settings.json                    what decides a response: model, prompt, sampling, seed
    runs/eval/NAME/summary.json                     this file's Evaluation                   read by reports

An answer that the grader could not judge (timed out, crashed) counts as wrong in the accuracies; their number is shown
separately.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import comb
from pathlib import Path

from dccot.core.command import print_table
from dccot.core.config import one_of, read_yaml
from dccot.core.files import BadData, write_atomic
from dccot.core.run import Run
from dccot.core.statistics import ByProblem, Estimate, mean, over_problems
from dccot.data.problems import Problem
from dccot.eval.majority import majority_of_three
from dccot.rollout.response import UNJUDGED, Finish, Verdict

SUMMARY, SETTINGS = "summary.json", "settings.json"
DAMAGED = (ValueError, KeyError, TypeError, RecursionError, OSError)  # what reading such a file may raise


@dataclass(frozen=True)
class Benchmark:
    name: str
    title: str
    samples: int  # responses per problem
    file: Path = Path()
    max_problems: int | None = None  # None: all

    def chosen(self, problems: Sequence[Problem]) -> list[Problem]:
        """At most `max_problems` in file order: those whose hashes are smallest, which is as good as drawing them."""

        def drawn(problem: Problem) -> bytes:
            return hashlib.sha256(f"{self.name}/{problem.id}".encode()).digest()

        kept = {problem.id for problem in sorted(problems, key=drawn)[: self.max_problems]}
        return [problem for problem in problems if problem.id in kept]


BENCHMARKS = {  # the paper's; `dccot data fetch NAME` writes runs/data/NAME.jsonl
    "aime24": Benchmark("aime24", "AIME 24", 200),
    "amc23": Benchmark("amc23", "AMC 23", 200),
    "hmmt25": Benchmark("hmmt25", "HMMT 25", 200),
    "math500": Benchmark("math500", "MATH 500", 16),
    "minerva": Benchmark("minerva", "Minerva", 16),
    "olympiadbench": Benchmark("olympiadbench", "OlympiadBench", 16),
}


def named_benchmark(name: str, folder: str | Path = "runs/data", samples: int | None = None) -> Benchmark:
    """A benchmark of the paper; its problems are expected in `folder`."""
    one_of(name, BENCHMARKS, "--bench")
    known = BENCHMARKS[name]
    return Benchmark(name, known.title, samples or known.samples, Path(folder) / f"{name}.jsonl")


def own_benchmark(file: str | Path, samples: int | None = None) -> Benchmark:
    """A JSONL or parquet file with the fields id, question and gold, named after itself."""
    file = Path(file)
    return Benchmark(file.stem, file.stem.replace("_", " "), samples or 16, file)


# ---- measures ----


@dataclass(frozen=True)
class Sample:
    """A response without its tokens: just what the table needs, small enough to hold a whole benchmark in memory."""

    problem: str
    sample: int
    text: str
    verdict: str
    well_formed: bool
    answered: bool  # it ended by itself
    widths: list[int]  # workers of each fork, at any depth
    longest_path: int
    total_tokens: int

    @classmethod
    def from_row(cls, row: dict) -> Sample:
        """From a line of a rollout JSONL."""
        lengths, answered = row["lengths"], row["response"]["finish"] == Finish.ANSWERED
        form = row["flaw"] is None, answered, [len(fork) for fork in lengths["workers"]]
        written = lengths["longest_path"], lengths["total_tokens"]
        return cls(row["problem"], row["sample"], row["text"], row["verdict"], *form, *written)

    @property
    def correct(self) -> bool:
        return self.verdict == Verdict.CORRECT


MEASURES: dict[str, tuple[str, Callable[[Sample], float]]] = {
    "accuracy": ("pass@1 (%)", lambda s: float(s.correct)),
    "longest_path": ("longest path", lambda s: s.longest_path),
    "total_tokens": ("total tokens", lambda s: s.total_tokens),
    "parallelism": ("parallelism", lambda s: s.total_tokens / max(1, s.longest_path)),
    "spawned": ("spawned (%)", lambda s: float(len(s.widths) > 0)),
    "width": ("workers per fork", lambda s: mean(s.widths) if s.widths else 0.0),
    "well_formed": ("well-formed (%)", lambda s: float(s.well_formed)),
    "truncated": ("truncated (%)", lambda s: float(not s.answered)),
}
LABELS = {name: label for name, (label, _) in MEASURES.items()} | {"maj3_accuracy": "maj@3 (%)"}
LABELS |= {f"maj3_{name}": f"maj@3 {LABELS[name]}" for name in ("longest_path", "total_tokens")}


def shown(measure: str, estimate: Estimate) -> tuple[str, str]:
    """Value and standard error in human-readable form; the error is empty if there is none."""
    scale, decimals = (100, 2) if "%" in LABELS[measure] else (1, 2) if measure in ("parallelism", "width") else (1, 0)
    numbers = estimate.value, estimate.stderr
    value, error = ("" if math.isnan(number) else f"{scale * number:.{decimals}f}" for number in numbers)
    return value, error


@dataclass
class BenchmarkResult:
    name: str
    title: str
    samples: int  # per problem
    verdicts: dict[str, int]
    by_problem: dict[str, dict[str, float]]  # measure → problem → mean over its responses
    pooled: dict[str, float] = field(default_factory=dict)  # measure → the paper's standard error: `pooled_errors`
    correct_paths: list[int] = field(default_factory=list)  # longest paths of the correct responses, in order

    @property
    def problems(self) -> int:
        return len(self.by_problem["longest_path"])

    @property
    def unjudged(self) -> int:
        return sum(self.verdicts.get(verdict, 0) for verdict in UNJUDGED)

    def estimate(self, measure: str) -> Estimate | None:
        """Mean and standard error over problems; None if it was not measured (maj@3 of fewer than three responses)."""
        return over_problems(self.by_problem[measure]) if self.by_problem.get(measure) else None

    def to_json(self) -> dict:
        measures = {name: over_problems(means).to_json() for name, means in self.by_problem.items() if means}
        asked = {"name": self.name, "title": self.title, "problems": self.problems, "samples": self.samples}
        found = {"measures": measures, "pooled": self.pooled, "by_problem": self.by_problem}
        return {**asked, "verdicts": self.verdicts, **found, "correct_paths": self.correct_paths}


def summarise(benchmark: Benchmark, samples: Iterable[Sample], classes: Mapping[str, Sequence[int]]) -> BenchmarkResult:
    """The table of one benchmark. `classes`: per problem, the equivalence class of every answer in sample order."""
    groups = by_problem(samples)
    verdicts = Counter(s.verdict for group in groups.values() for s in group)
    table: dict[str, dict[str, float]] = {}
    for name, (_, measure) in MEASURES.items():
        table[name] = {problem: mean([measure(s) for s in group]) for problem, group in groups.items()}
    votes = {
        problem: majority_of_three(classes[problem], [s.correct for s in group], [s.longest_path for s in group])
        for problem, group in groups.items()
        if len(group) >= 3
    }
    table["maj3_accuracy"] = {problem: vote.accuracy for problem, vote in votes.items()}
    table["maj3_longest_path"] = {problem: vote.longest_path for problem, vote in votes.items()}
    table["maj3_total_tokens"] = {problem: 3 * table["total_tokens"][problem] for problem in votes}
    pooled = pooled_errors(list(groups.values()), table["maj3_accuracy"])
    paths = sorted(s.longest_path for group in groups.values() for s in group if s.correct)
    return BenchmarkResult(benchmark.name, benchmark.title, benchmark.samples, dict(verdicts), table, pooled, paths)


def pooled_errors(groups: Sequence[Sequence[Sample]], votes: ByProblem) -> dict[str, float]:
    """Standard errors as the paper computes them: all responses, or all subsets of three, as if they were independent.

    accuracy  √(p(1−p) / PN)          length  s / √PN          votes: the same over the subsets, P · C(N, 3) of them
    """
    every = [sample for group in groups for sample in group]
    right = [sample.correct for sample in every]
    found = {
        "accuracy": share_error(mean(right), len(right)),
        "longest_path": _length_error([(sample.longest_path, 1) for sample in every]),
        "total_tokens": _length_error([(sample.total_tokens, 1) for sample in every]),
    }
    if votes:
        voting = [group for group in groups if len(group) >= 3]
        subsets = {group[0].problem: comb(len(group), 3) for group in voting}
        count = sum(subsets.values())
        found["maj3_accuracy"] = share_error(sum(votes[problem] * n for problem, n in subsets.items()) / count, count)
        ranked = [enumerate(sorted(sample.longest_path for sample in group)) for group in voting]
        found["maj3_longest_path"] = _length_error([(path, comb(rank, 2)) for group in ranked for rank, path in group])
    return {name: error for name, error in found.items() if not math.isnan(error)}


def share_error(share: float, count: int) -> float:
    return math.sqrt(max(0.0, share * (1 - share)) / count) if count else math.nan


def _length_error(lengths: Sequence[tuple[int, int]]) -> float:
    """Of (length, how often) pairs: sample standard deviation over the root of their number."""
    count = sum(times for _, times in lengths)
    if count < 2:
        return math.nan
    centre = sum(length * times for length, times in lengths) / count
    return math.sqrt(sum(times * (length - centre) ** 2 for length, times in lengths) / (count - 1) / count)


def by_problem(samples: Iterable[Sample]) -> dict[str, list[Sample]]:
    """Samples of each problem in order, so that means and votes do not depend on which response finished first."""
    groups: dict[str, list[Sample]] = {}
    for sample in sorted(samples, key=lambda s: (s.problem, s.sample)):
        groups.setdefault(sample.problem, []).append(sample)
    return groups


# ---- an evaluation ----


@dataclass
class Evaluation:
    """One model, one way of prompting it, some benchmarks: a row of the paper's table 1."""

    name: str
    model: str
    method: str  # parallel or sequential
    budget: int
    results: dict[str, BenchmarkResult] = field(default_factory=dict)  # by benchmark name
    settings: dict = field(default_factory=dict)  # of settings.json

    def measured(self, benchmark: str, measure: str) -> ByProblem | None:
        """A measure by problem, or None if there is none."""
        result = self.results.get(benchmark)
        return (result.by_problem.get(measure) or None) if result else None

    def save(self, folder: Path) -> Path:
        """Write summary.json, whole or not at all."""
        path = folder / SUMMARY
        facts = {"name": self.name, "model": self.model, "method": self.method, "budget": self.budget}
        summary = {**facts, "benchmarks": [r.to_json() for r in self.results.values()]}
        write_atomic(path, json.dumps(summary, indent=1, ensure_ascii=False))
        return path

    @classmethod
    def load(cls, folder: str | Path, name: str | None = None) -> Evaluation:
        path = Path(folder) / SUMMARY
        known = BenchmarkResult.__dataclass_fields__
        try:
            found = json.loads(path.read_text())
            rows = [{name: row[name] for name in known if name in row} for row in found["benchmarks"]]
            results = {row["name"]: BenchmarkResult(**row) for row in rows}
            settings = json.loads(file.read_text()) if (file := path.with_name(SETTINGS)).is_file() else {}
            return cls(name or found["name"], found["model"], found["method"], found["budget"], results, settings)
        except FileNotFoundError:
            raise BadData(f"{path} does not exist; `dccot eval` writes it when all responses are there") from None
        except DAMAGED as error:
            what = f"{path} is not what `dccot eval` writes ({type(error).__name__}: {error})"
            raise BadData(f"{what}; run it again") from None

    def print(self) -> None:
        """Measures down, benchmarks across."""
        results = list(self.results.values())
        rows = []
        for measure, label in LABELS.items():
            estimates = [result.estimate(measure) for result in results]
            if any(estimates):
                cells = [shown(measure, estimate) if estimate else ("", "") for estimate in estimates]
                rows.append([label, *(f"{value} ± {error}" if error else value for value, error in cells)])
        if any(result.unjudged for result in results):
            rows.append(["answers that could not be judged", *(str(result.unjudged) for result in results)])
        columns = [f"{result.title}\n{result.problems} × {result.samples}" for result in results]
        title = f"{self.name}: {self.method}, budget {self.budget:,}"
        print_table(title, ["mean ± standard error over problems", *columns], rows)


@dataclass
class Recipe:
    """The recipe that was run in a folder, as far as a report needs it; recipe.yaml holds more."""

    run: Path
    tree: dict
    report: dict  # settings of its report stage
    kinds: dict[str, str]  # stage → what it runs; SFT that made the base model is left out, being much longer

    @classmethod
    def of(cls, run: Path) -> Recipe:
        file = Run(run).recipe_file
        try:
            tree = read_yaml(file)
            before = {
                name: stage["run"] for name, stage in (tree.get("prepare") or {}).items() if stage["run"] != "sft"
            }
            kinds = {name: stage["run"] for name, stage in tree["stages"].items()}
            name = next(name for name, kind in kinds.items() if kind == "report")
            report = {"rows": {}, "baselines": {}} | tree["stages"][name]["set"]
            return cls(run, tree, report | (tree.get("settings") or {}).get(name, {}), before | kinds)
        except (KeyError, TypeError, AttributeError):
            raise BadData(f"{file} is not what a recipe writes; start the recipe again, which writes it anew") from None
        except StopIteration:
            raise BadData(f"{file} has no report stage, which says what the rows are") from None

    def folders(self, kind: str, file: str) -> list[Path]:
        """Of the stages of a kind that have written the file."""
        found = [self.run / name for name, each in self.kinds.items() if each == kind]
        return [folder for folder in found if (folder / file).is_file()]


def rows_of(run: Path) -> dict[str, Evaluation]:
    """Name in the tables → evaluation, as the report stage of the recipe in `run` has it."""
    return {name: Evaluation.load(run / stage, name) for stage, name in Recipe.of(run).report["rows"].items()}
