"""The paper's benchmarks, and any file of problems as a benchmark.

aime24, amc23, hmmt25                  200 responses per problem        runs/data/<name>.jsonl, as `dccot data fetch <name>` writes it
math500, minerva, olympiadbench         16
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dccot.core.config import one_of


@dataclass(frozen=True)
class Benchmark:
    name: str
    title: str
    samples: int  # responses per problem
    file: Path = Path()


BENCHMARKS = {
    benchmark.name: benchmark
    for benchmark in [
        Benchmark("aime24", "AIME 24", 200),
        Benchmark("amc23", "AMC 23", 200),
        Benchmark("hmmt25", "HMMT 25", 200),
        Benchmark("math500", "MATH 500", 16),
        Benchmark("minerva", "Minerva", 16),
        Benchmark("olympiadbench", "OlympiadBench", 16),
    ]
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
