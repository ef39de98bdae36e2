"""dccot vs. TRL's GRPOTrainer: the same task, model and batch, in pairs of runs, each side as its users would run it.

    make bench-peers                                                   after `make demo`, which trains the model
    python -m dccot.lab.bench.peers --model FOLDER --problems FILE --processes 1

A step is 8 prompts of the arithmetic world × 7 sequential answers by the miniature's base model, one optimizer step
with the DAPO loss, no reference model, fp32. TRL 1.16 generates with Transformers (its colocated vLLM does not run on a
CPU unpatched) and trains on one padded batch; "TRL on forests" is the same trainer with the one method of
examples/trl_grpo.py. dccot generates with vLLM, grades with math-verify in separate processes, and trains on forests.
Training is everything in a step except generation. All sides have the same number of processes, by default one per core
with one thread each, as `dccot demo` starts them. The runs of a pair follow one another; the first step of each warms
up and is not counted. A run's figures are medians over its steps; the table shows the median over the pairs.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from dccot.core.command import run_cleanly
from dccot.core.files import BadData, read_jsonl, write_atomic
from dccot.core.run import Run, step_name
from dccot.lab.bench.harness import FOLDER
from dccot.model.folder import resolve_model
from dccot.rollout.response import Rollout
from dccot.train.forest import build_forest

ROOT = Path(__file__).resolve().parents[2]
PROMPTS, SAMPLES, BUDGET = 8, 7, 448
SETTINGS = f"""
    filter=none engine.compile=true reward.length_penalty=0 objective.kind=dapo objective.kl_coefficient=0
    batch.prompts_rolled_out={PROMPTS} batch.prompts={PROMPTS} batch.group_size={SAMPLES} batch.optimizer_steps=1
    batch.token_budget=16384 prompt.max_prompt_tokens=256 reward.cutoff=48 sharding.compute_dtype=float32
    sharding.activation_checkpointing=false sharding.whole=true engine.dtype=float32 engine.context=1024
    engine.max_sequences=256 rollout.budget={BUDGET} optimizer.learning_rate=8e-5 validation.every=0
    checkpoint.every=1000
""".split()

Figures = dict[str, float]


def timed(command: Sequence[str | Path], processes: int) -> tuple[str, float]:
    """A program's output and its seconds. The cores are divided among its processes."""
    start = time.perf_counter()
    environment = {**os.environ, "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // processes))}
    done = subprocess.run(list(map(str, command)), cwd=ROOT, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, command))} failed:\n{done.stderr[-2000:]}")
    return done.stdout, time.perf_counter() - start


def summary(steps: list[dict[str, float]], wall: float, memory: float) -> Figures:
    """Medians over the steps after the first; an answer token is one that the task has, computed or not."""
    median = lambda of: statistics.median(map(of, steps[1:]))
    return {
        "seconds per step": median(lambda step: step["step"]),
        "generation, tokens/s": median(lambda step: step["generated_tokens"] / step["generation"]),
        "training, answer tokens/s": median(lambda step: step["generated_tokens"] / step["training"]),
        "tokens computed per answer token": median(lambda step: step["computed_tokens"] / step["generated_tokens"]),
        "generation, seconds": median(lambda step: step["generation"]),
        "training, seconds": median(lambda step: step["training"]),
        "start, seconds": wall - sum(step["step"] for step in steps),
        "memory of a process, GB": memory,
    }


def launcher(processes: int) -> list[str]:
    return ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)] if processes > 1 else []


def run_trl(loss: str, model: Path, problems: Path, steps: int, processes: int) -> Figures:
    sizes = ["--prompts", str(PROMPTS), "--budget", str(BUDGET), "--steps", str(steps)]
    launch = [sys.executable, "examples/trl_env.py", *launcher(processes)]
    program = [*launch, "examples/trl_grpo.py", "--loss", loss, "--model", str(model)]
    printed, wall = timed([*program, "--problems", str(problems), *sizes], processes)
    facts = json.loads(next(line for line in reversed(printed.splitlines()) if line.startswith("{")))
    return summary(facts["steps"], wall, facts["memory_gb"])


def run_dccot(model: Path, problems: Path, steps: int, seed: int, processes: int) -> Figures:
    name = f"{time.time_ns()}"  # a run folder is never resumed here
    overrides = [f"name={name}", "output=runs/peers", f"seed={seed}", f"steps={steps}"]
    overrides += [f"model.path={model}", f"data.train={problems}"]
    recipe = ["-m", "dccot.train.rl", "configs/rl/dsr_hlp_12k.yaml", *SETTINGS, *overrides]
    program = [sys.executable, *launcher(processes), *recipe]
    _, wall = timed(program, processes)
    run = Run(ROOT / "runs/peers" / name)
    found, memory = [], 0.0
    for number, row in read_jsonl(run.metrics_file, strict=True):
        sampled = read_jsonl(run.rollouts / f"{step_name(number - 1)}.jsonl.gz", strict=True)
        responses = [Rollout.from_json(rollout).response for _, rollout in sampled]
        groups = [[(0, each) for each in responses[i : i + SAMPLES]] for i in range(0, len(responses), SAMPLES)]
        generated, computed = sum(response.total_tokens for response in responses), len(build_forest(groups))
        tokens = {"generated_tokens": generated, "computed_tokens": computed}
        whole, generation = row["time/step"], row["time/rollout"]
        found.append({"step": whole, "generation": generation, "training": whole - generation, **tokens})
        memory = max(memory, row["memory/resident_gb"] * 1e9 / 2**30)
    return summary(found, wall, memory)


def side_by_side(runs: dict[str, list[Figures]]) -> str:
    lines = [f"{'':36}" + "".join(f"{name:>18}" for name in runs)]
    for measure in next(iter(runs.values()))[0]:
        middle = (statistics.median(run[measure] for run in of) for of in runs.values())
        lines.append(f"{measure:36}" + "".join(f"{value:>18,.4g}" for value in middle))
    return "\n".join(lines)


def bench(model: Path, problems: Path, pairs: int, steps: int, processes: int) -> None:
    if not problems.is_file():
        raise BadData(f"{problems} does not exist: run `make demo` first, or give --model and --problems")
    sides: dict[str, Callable[[int], Figures]] = {
        "TRL": lambda pair: run_trl("padded", model, problems, steps, processes),
        "TRL on forests": lambda pair: run_trl("forest", model, problems, steps, processes),
        "dccot": lambda pair: run_dccot(model, problems, steps, pair, processes),
    }
    runs: dict[str, list[Figures]] = {name: [] for name in sides}
    for pair in range(pairs):
        for name, measure in sides.items():
            runs[name].append(measure(pair))
            print(f"pair {pair + 1}/{pairs}  {name}: {runs[name][-1]['seconds per step']:.2f} s per step", flush=True)
    print(side_by_side(runs))
    seconds = {name: [run["seconds per step"] for run in of] for name, of in runs.items()}
    faster = [theirs / ours for theirs, ours in zip(seconds["TRL"], seconds["dccot"])]
    how = f"{pairs} pairs, {processes} processes each; target: at least 2"
    print(f"dccot's step is {min(faster):.2f} to {max(faster):.2f} times as fast as TRL's ({how})")
    facts = {"processes": processes, "runs": runs, "TRL / dccot, seconds per step": faster}
    write_atomic(FOLDER / f"peers{processes}.json", json.dumps(facts, indent=1) + "\n")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="dccot vs. TRL's GRPOTrainer.", epilog="example: make bench-peers")
    parser.add_argument("--model", default="runs/demo/base", help="a model or run; default: the miniature's base")
    parser.add_argument("--problems", type=Path, default=Path("runs/demo/world/problems/train.jsonl"))
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=6, help="of each run; the first is not counted")
    processes = min(2, os.cpu_count() or 1)
    parser.add_argument("--processes", type=int, choices=(1, 2, 4), default=processes, help="of each side")
    arguments = parser.parse_args(argv)

    def work() -> None:
        model, problems = resolve_model(arguments.model).absolute(), arguments.problems.absolute()
        bench(model, problems, arguments.pairs, arguments.steps, arguments.processes)

    return run_cleanly(work)


if __name__ == "__main__":
    sys.exit(main())
