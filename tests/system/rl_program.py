"""What every rank does in the tests of RL: several runs on one engine and one judge. The tests read what they left in
`out`.

    torchrun --nproc_per_node 2 tests/system/rl_program.py OUT STEPS

The task is that of lab/worlds/exact_task.py: a reward of mean 0.1875 at the start, and variance 1/4 · (1/2 · 1 + 1/2 ·
1/4) − 0.1875².
"""

import contextlib
import gc
import os
import signal
import sys
from pathlib import Path

import torch

from dccot.core.command import Stopped, asked
from dccot.core.config import load_config
from dccot.core.runtime import Runtime, free_memory
from dccot.data.task import Task, task_of
from dccot.lab.worlds.exact_task import make_task, write_problems
from dccot.model.transformer import Transformer
from dccot.rollout.vllm_engine import VllmEngine
from dccot.train import rl
from dccot.train.config import RLConfig
from dccot.train.rewards import Group
from dccot.train.rl import train

LORA_STEPS = 11


def settings(out: Path, name: str, steps: int, *more: str) -> RLConfig:
    return load_config(RLConfig, out / "rl.yaml", [f"name={name}", f"steps={steps}", *more])


def three_spawn(group: Group) -> bool:
    return sum("<spawn_workers>" in graded.text for graded in group) == 3


def stop_in_a_rollout(out: Path, engine: VllmEngine, runtime: Runtime) -> None:
    """The last rank gets SIGTERM in the middle of the second step's rollout; then the same command again."""
    config, begin, step = settings(out, "signalled", 3, "checkpoint.every=1000"), engine.forget_prefixes, engine.step
    begun = 0  # the weights loaded, the first rollout, the weights loaded again, the second rollout

    def count() -> None:
        nonlocal begun
        begun += 1
        begin()

    def signalled() -> list:
        if begun == 4 and runtime.rank == runtime.ranks - 1 and not asked.stop:
            os.kill(os.getpid(), signal.SIGTERM)
        return step()

    engine.forget_prefixes, engine.step = count, signalled
    try:
        train(config, engine)
    except Stopped:
        (out / f"stopped_{runtime.rank}.txt").write_text(f"{begun} {(out / 'signalled' / 'latest').read_text()}")
    finally:
        engine.forget_prefixes, engine.step = begin, step
    train(config, engine)


def other_modes(out: Path, engine: VllmEngine) -> None:
    """Partial rollouts, and prompts that start as they are needed, in turns of 5 tokens: less than a response."""
    rl.TURN = 5
    fresh = ("rollout.mode=partial", "rollout.max_staleness=0")
    train(settings(out, "partial_0", 3, *fresh), engine)
    needed = ("filter=remove_easy", "batch.surplus=keep", "batch.prompts_rolled_out=24")
    train(settings(out, "needed", 3, *needed), engine)
    for stop_after in (2, 3):
        train(settings(out, "needed_stopped", stop_after, *needed, *fresh), engine)
    validated = (f"data.validation={out / 'held_out.jsonl'}", "validation.every=3", "validation.samples=2")
    for stop_after in (2, 5):
        train(settings(out, "partial_2", stop_after, *needed, "rollout.mode=partial", *validated), engine)


def main(out: Path, steps: int) -> None:
    runtime = Runtime.start()
    if runtime.is_main:
        make_task(out)
        write_problems(out / "held_out.jsonl", 3, "4")
        write_problems(out / "hopeless.jsonl", 24, "9")
    runtime.barrier()
    config = settings(out, "whole", steps)
    engine = VllmEngine(out / "model", config.engine)
    with task_of(config).open_judge() as judge:
        Task.open_judge = lambda task: contextlib.nullcontext(judge)
        all_runs(out, steps, engine, runtime)
    engine.shutdown()
    runtime.stop()


def all_runs(out: Path, steps: int, engine: VllmEngine, runtime: Runtime) -> None:
    train(settings(out, "whole", steps), engine)
    free_memory()
    left_over = [
        type(thing).__name__ for thing in gc.get_objects() if isinstance(thing, (Transformer, torch.optim.Optimizer))
    ]
    (out / f"left_over_{runtime.rank}.txt").write_text(str(left_over))
    for stop_after in (2, 3):  # stopped after step 2, then the same command again
        train(settings(out, "stopped", stop_after), engine)
    adapters = ("model.lora.rank=8", "optimizer.learning_rate=0.002", "objective.kl_coefficient=0.001")
    for name, end in (("lora", LORA_STEPS), ("lora_stopped", 2), ("lora_stopped", 3)):
        train(settings(out, name, end, *adapters), engine)
    stop_in_a_rollout(out, engine, runtime)
    validated = (
        f"data.validation={out / 'held_out.jsonl'}",
        "validation.every=2",
        "validation.samples=4",
        "validation.problems=2",
    )
    train(settings(out, "filtered", 2, "filter=remove_easy", "batch.prompts=12", *validated), engine)
    other_modes(out, engine)
    train(settings(out, "own_filter", 1, "filter=rl_program:three_spawn", "batch.prompts=2"), engine)
    try:
        never_right = (f"data.train={out / 'hopeless.jsonl'}", "filter=remove_easy", "batch.max_rollout_batches=2")
        train(settings(out, "hopeless", 1, *never_right), engine)
    except RuntimeError as error:
        (out / f"error_of_rank_{runtime.rank}.txt").write_text(str(error))
    replay = f"replay={out / 'whole' / 'rollouts' / 'step_000000.jsonl.gz'}"
    train(settings(out, "replayed", 1, replay))
    train(settings(out, "shared", 1, replay, "sharding.context_parallel=2"))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
