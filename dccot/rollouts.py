"""Generation from the command line: n responses to every problem of a file, in the trainer's JSONL format.

    dccot rollout MODEL PROBLEMS.jsonl --n 4 --budget 7500 --out rollouts.jsonl [--resume] [key=value …]

Every response is one line, written whole when it is finished. An interrupted run continues with --resume: existing
responses stay, and the rest get the seeds they would have had.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dccot.core.command import Parser, conclude, positive, run_cleanly
from dccot.core.config import ConfigError, Seed, load_config, to_plain
from dccot.core.files import JsonlWriter, checksum
from dccot.core.progress import waiting
from dccot.core.provenance import record
from dccot.core.runtime import Runtime
from dccot.data.problems import Columns
from dccot.data.prompts import PromptConfig
from dccot.data.rollouts import missing_in, roll_out, sample_to_file
from dccot.data.task import TaskName, own_settings, task_of
from dccot.model.config import read_config
from dccot.model.folder import find_model, model_checksums, resolve_model
from dccot.model.tokenizer import open_tokenizer
from dccot.rollout.director import RolloutConfig
from dccot.rollout.engine import EngineConfig, open_engine
from dccot.rollout.generate import RolloutProgress


@dataclass
class Settings:
    seed: Seed = 0
    task: TaskName = "math"  # or your own: my_package.my_module:MyTask
    data: Columns = field(default_factory=Columns)
    prompt: PromptConfig = field(default_factory=PromptConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)


def run(model: str, problems: Path, samples: int, out: Path, resume: bool, settings: Settings) -> int:
    """Fill `out` up to `samples` responses per problem; returns how many were added."""
    if out.exists() and out.stat().st_size and not resume:
        raise ConfigError(f"{out} exists already; add --resume to finish it, or choose another --out")
    read_config(find_model(model))
    task = task_of(settings)
    asked = task.problems(problems)
    with waiting(f"reading {model}"):
        folder = resolve_model(model)
        prompted = task.prompts(asked, open_tokenizer(folder))
        inputs = {"model": model_checksums(folder), "problems": {problems.name: checksum(problems)}}
    with JsonlWriter(out) as writer:
        record(out, to_plain(settings) | {"samples": samples}, inputs, Runtime.alone())
        pairs = missing_in([out], prompted, samples)
        if pairs:
            with open_engine(folder, settings.engine) as engine, RolloutProgress(len(pairs)) as progress:
                how = settings.prompt, settings.rollout
                rollouts = roll_out(engine, prompted, pairs, *how, seed=(settings.seed,), watch=progress)
                for _ in sample_to_file(writer, rollouts):
                    pass
    return len(pairs)


def main(argv: Sequence[str] | None = None) -> int:
    example = "dccot rollout runs/hlp problems.jsonl --n 4 --budget 7500 --out rollouts.jsonl"
    parser = Parser("Generate responses to a file of problems.", example)
    add, methods = parser.add_argument, ("parallel", "sequential")
    add("model", help="a hub id, a Hugging Face folder, or a run (its newest checkpoint)")
    add("problems", type=Path, help="JSONL or parquet with id, question, gold")
    add("settings", nargs="*", metavar="key=value", help="e.g. rollout.temperature=1 engine.dtype=float32 seed=1")
    add("--n", type=positive, default=1, help="responses per problem (default: 1)")
    add("--budget", type=positive, help="tokens on the longest path; default: the run's own, or 7500")
    add("--method", choices=methods, help="how the model is prompted; default: as in its run, or parallel")
    add("--out", type=Path, default=Path("rollouts.jsonl"), help="default: rollouts.jsonl")
    add("--resume", action="store_true", help="finish a file that an earlier run started")
    arguments = parser.read(argv)

    def work() -> None:
        given = {"prompt.kind": arguments.method, "rollout.budget": arguments.budget}
        own = own_settings(arguments.model) | {key: value for key, value in given.items() if value is not None}
        settings = load_config(Settings, None, arguments.settings, own.items())
        asked = f"{settings.prompt.kind}, at most {settings.rollout.budget:,} tokens on the longest path"
        print(f"{arguments.model}: {asked}; {arguments.problems}", flush=True)
        added = run(arguments.model, arguments.problems, arguments.n, arguments.out, arguments.resume, settings)
        conclude(f"{added:,} responses added to {arguments.out}", f"dccot view {arguments.out}")

    return run_cleanly(work)


if __name__ == "__main__":
    sys.exit(main())
