"""Bad numbers and stuck things, in a real run on two ranks: one engine, one trial after another.

    torchrun --nproc_per_node 2 -m tests.support.fault_injection.inside FOLDER        writes trials.jsonl

Each trial spoils one thing by replacing one method of the loop, and judges by what the run left on disk or said when it
ended.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path

import torch
from safetensors.torch import load_file

import dccot.train.rl as rl
import dccot.train.update as updating
from dccot.core.config import load_config
from dccot.core.files import read_jsonl
from dccot.core.runtime import Runtime
from dccot.data.judge import Judge, Verdict
from dccot.rollout.vllm_engine import VllmEngine
from dccot.train.config import RLConfig
from tests.support.fault_injection.faults import Trial

TIMEOUT_SECONDS = 20.0  # of a collective
STALL_SECONDS = 30.0
Settings = Callable[..., RLConfig]


def _nan_gradient(settings: Settings, engine: VllmEngine) -> Trial:
    """One shard's gradient is NaN on rank 1 in the second step of four: all ranks skip it, count it, keep the batch,
    and continue.
    """

    class Spoiled(rl.RL):
        def update(self, *more):
            whole = updating.apply_gradients

            def spoiled(model, *more):
                if self.runtime.rank == 1:
                    next(model.parameters()).grad.to_local()[0, 0] = float("nan")
                return whole(model, *more)

            updating.apply_gradients = spoiled if self.phases.step == 1 else whole
            try:
                return super().update(*more)
            finally:
                updating.apply_gradients = whole

    config, before = settings("nan", "steps=4", "checkpoint.keep=9"), rl.RL
    rl.RL = Spoiled
    rl.train(config, engine)
    rl.RL = before
    run = Path(config.output) / "nan"
    weights = [load_file(run / f"checkpoints/step_{step:06d}/hf/model.safetensors") for step in (1, 2, 3, 4)]
    same = [all(torch.equal(a[name], b[name]) for name in a) for a, b in pairwise(weights)]
    skipped = [row["policy/skipped_updates"] for _, row in read_jsonl(run / "metrics.jsonl")]
    kept = [path.name for path in sorted((run / "bad").glob("*"))]
    good = same == [True, False, False] and skipped == [0, 2, 2, 2] and kept == ["step_000001.jsonl.gz"]
    seen = "step skipped and counted, weights unchanged, batch kept, next step taken"
    return Trial.once("gradient not finite", seen, good, f"{same} {skipped} {kept}")


def _always_nan(settings: Settings, engine: VllmEngine) -> Trial:
    """Every loss is NaN: after max_bad_steps the run ends and says why."""
    before, rl.objective_loss = rl.objective_loss, lambda objective, logprob, *more: logprob * float("nan")
    said = _error_of(lambda: rl.train(settings("always_nan", "max_bad_steps=1"), engine))
    rl.objective_loss = before
    good = said.startswith("2 steps in a row had a loss or gradient that is not finite (max_bad_steps is 1)")
    return Trial.once("loss never finite", "stopped with an explanation that names max_bad_steps", good, said)


def _bad_weight(settings: Settings, engine: VllmEngine) -> Trial:
    """A weight that is not finite is caught before the engine computes with it, on both ranks."""

    class Spoiled(rl.RL):
        def sync(self, *more):
            if self.phases.step == 1:
                with torch.no_grad():
                    next(self.model.parameters()).to_local()[0, 0] = float("inf")
            super().sync(*more)

    before, rl.RL = rl.RL, Spoiled
    said = _error_of(lambda: rl.train(settings("bad_weight"), engine))
    rl.RL = before
    # one on each rank
    good = "model.embed_tokens.weight holds 2 values that are not finite" in said and "phase sync" in said
    seen = "refused before the engine used it; weight, rank and phase named"
    return Trial.once("synced weight not finite", seen, good, said)


def _stalled_engine(settings: Settings, engine: VllmEngine) -> Trial:
    usual, engine.config.stall_seconds = engine.config.stall_seconds, 0.0
    said = _error_of(lambda: rl.train(settings("stalled"), engine))
    engine.config.stall_seconds = usual
    rank = os.environ["RANK"]
    signs = (f"rank {rank}: no call finished", "pending: ", "/p", f"rank {rank}, step 0, phase rollout")
    good = all(sign in said for sign in signs)
    return Trial.once("engine stalled", "error names rank, phase and pending request ids", good, said)


def _stuck_collective(settings: Settings, engine: VllmEngine) -> Trial:
    """Rank 1 stays away for longer than a collective may take. The last trial: afterwards the process group is of no
    use.
    """

    class Slow(rl.RL):
        def grade(self):
            if self.runtime.rank == 1:
                time.sleep(2 * TIMEOUT_SECONDS)  # a busy machine may bring rank 0 here late, too
            return super().grade()

    rl.RL = Slow
    said = _error_of(lambda: rl.train(settings("stuck"), engine))
    good = os.environ["RANK"] == "1" or ("imed out" in said and "rank 0, step 0, phase grade" in said)
    return Trial.once("collective stuck", "time-out error names rank, step and phase", good, said)


def noisy_advantage(rewards):
    return [reward + int(os.environ["RANK"]) for reward in rewards]


def leaving_reward(rollout, config, budget):
    raise SystemExit(0)


def clearing_reward(rollout, config, budget):
    rollout.response.prompt.clear()


def nameless_reward(rollout, config, budget): ...


class SlowJudge(Judge):
    def __init__(self, config):
        pass

    def grade(self, pairs):
        for _ in range(int(1.5 * STALL_SECONDS)):
            time.sleep(1.0)
            self.beat()
        return [Verdict.CORRECT if number % 2 else Verdict.WRONG for number, _ in enumerate(pairs)]


def _slow_judge(settings: Settings, engine: VllmEngine) -> Trial:
    """A judge that takes longer than stall_seconds, but makes progress, is not taken for a hang."""
    slow = ["grading.kind=tests.support.fault_injection.inside:SlowJudge", f"stall_seconds={STALL_SECONDS}", "steps=1"]
    config = settings("slow_judge", *slow, "filter=none", "validation.every=0", "timeout_seconds=300")
    rl.train(config, engine)
    done = (Path(config.output) / "slow_judge" / "latest").exists()
    return Trial.once(
        "judge slower than stall_seconds", "it reports progress: the run continues", done, "no checkpoint"
    )


def _plugins(settings: Settings, engine: VllmEngine) -> Trial:
    """Functions that leave, change, forget or disagree: each ends the run and is named."""
    here, problems = "tests.support.fault_injection.inside", []
    expected = {
        f"reward.kind={here}:leaving_reward": "leaving_reward failed on problem 'p",
        f"reward.kind={here}:clearing_reward": "clearing_reward failed on problem 'p",
        f"reward.kind={here}:nameless_reward": "nameless_reward returned None for problem 'p",
        f"advantage={here}:noisy_advantage": "noisy_advantage differs between ranks, problem 'p",
    }
    for number, (setting, sign) in enumerate(expected.items()):
        said = _error_of(lambda name=f"plugin_{number}", setting=setting: rl.train(settings(name, setting), engine))
        if sign not in said:
            problems.append(f"{setting}: {said[:300]}")
    return Trial.each("plug-ins that misbehave", "function, problem and sample named", len(expected), problems)


INSIDE = (_nan_gradient, _always_nan, _bad_weight, _plugins, _slow_judge, _stalled_engine, _stuck_collective)


def _error_of(action: Callable) -> str:
    try:
        action()
    except Exception as error:
        return "\n".join([str(error), *getattr(error, "__notes__", [])])
    return "no error"


def main(out: Path) -> None:
    """What each of the two ranks runs: one engine, one trial after another."""
    torch.set_num_threads(1)
    runtime = Runtime.start(TIMEOUT_SECONDS)
    small = [f"timeout_seconds={TIMEOUT_SECONDS}", "steps=3", "batch.prompts_rolled_out=2", "batch.prompts=2"]
    small += ["profile.steps=[]", "checkpoint.keep_hf_every=null"]

    def settings(name: str, *more: str) -> RLConfig:
        return load_config(RLConfig, out / "rl.yaml", [f"name={name}", *small, *more])

    engine = VllmEngine(out / "model", settings("any").engine)
    for trial in INSIDE:
        result = trial(settings, engine)
        if result.problems:
            print(f"rank {runtime.rank}: {result}", file=sys.stderr)
        if trial is not INSIDE[-1]:
            both = runtime.gather([result])
            result = next((each for [each] in both if not each.good), result)
        if runtime.is_main:
            with open(out / "trials.jsonl", "a") as file:
                file.write(json.dumps(asdict(result)) + "\n")
    os._exit(0)  # the process group is broken on purpose


if __name__ == "__main__":
    main(Path(sys.argv[1]))
