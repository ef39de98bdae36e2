"""What every rank does in test_two_ranks.py: several proofs in one process, which read what it leaves in OUT.

torchrun --nproc_per_node 2 tests/train/two_ranks_program.py CHECKPOINT OUT
"""

import json
import resource
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

import dccot.train.checkpoint as checkpoints
from dccot.core.command import run_cleanly
from dccot.core.plugins import Plugin, PluginError
from dccot.core.run import Run
from dccot.core.runtime import Runtime, on_rank_zero
from dccot.model.sharding import ShardingConfig, build_model
from dccot.model.weights import weight_files
from dccot.rollout.response import Response, Segment
from dccot.train import checkpoint as train_checkpoint
from dccot.train.checkpoint import CheckpointConfig, Checkpointer
from dccot.train.forest import pack
from dccot.train.metrics import TokenMetrics
from dccot.train.objectives import ObjectiveConfig, objective_loss
from dccot.train.phases import Phases, ProfileConfig, profiled
from dccot.train.rewards import Graded, require_agreement
from dccot.train.sft import sft_loss
from dccot.train.update import OptimizerConfig, accumulate, apply_gradients, make_optimizer
from tests.support.rounds import flat
from tests.train.test_token_metrics import batches

SHORT_SECONDS = 3.0  # of a collective, while rank 0 works alone
LONELY = "a single response"  # which leaves a second rank with nothing to do
# Name → (token budget, whether prompts are shared, whether gradients are reduced with the last micro-batch only).
PACKINGS = {
    LONELY: (500, True, True),
    "one forest": (10**6, True, True),
    "one forest, prompts apart": (10**6, False, True),
    "a few": (500, True, True),
    "a few, reduced each": (500, True, False),
    "a few, prompts apart": (300, False, True),
    "one response each": (1, False, True),
}


def gradients(runtime: Runtime, checkpoint: Path, responses_file: Path, out: Path) -> None:
    """The gradient of one mini-batch, packed in every way of PACKINGS, on however many ranks there are."""
    responses = [Response.from_json(row) for row in json.loads(responses_file.read_text())]
    advantages = torch.linspace(-1.5, 2.0, len(responses))
    model = build_model(checkpoint, ShardingConfig(compute_dtype="float32"))
    optimizer = make_optimizer(model, OptimizerConfig())

    def token_loss(number, forest, logprob, entropy):
        rollout, advantage = forest.logprob[forest.targets], advantages[forest.response[forest.targets].long()]
        return objective_loss(ObjectiveConfig("dapo"), logprob, rollout, advantage, rollout, rollout)

    facts = {}
    for name, (budget, share, once) in PACKINGS.items():
        packed = responses[1:2] if name == LONELY else responses
        forests = pack(packed, budget, runtime.ranks, share_prompts=share).forests(runtime.rank)
        mean, _ = accumulate(model, forests, sft_loss(packed, "examples"), 1.0, runtime, once)
        mean_norm, _ = apply_gradients(model, optimizer, float("nan"), 1.0, 1.0)
        loss, tokens = accumulate(model, forests, token_loss, 0.6, runtime, once)
        gradients = {key: p.grad.full_tensor().clone() for key, p in model.named_parameters()}
        facts[name] = {
            "loss": loss,
            "example_mean": [mean, mean_norm],
            "tokens": tokens,
            "targets": runtime.gather([[len(forest.targets) for forest in forests]]),
        }
        if runtime.is_main:
            save_file(gradients, out / f"{name}.safetensors")
        # a loss that is not finite leaves the weights alone
        norm, applied = apply_gradients(model, optimizer, float("nan"), 1.0, 1.0)
        assert not applied
        facts[name]["norm"] = norm
    if runtime.is_main:
        (out / "facts.json").write_text(json.dumps(facts))


def token_metrics(runtime: Runtime, out: Path) -> None:
    """One micro-batch on each of two ranks."""
    tokens = TokenMetrics(ObjectiveConfig("dapo"), runtime)
    tokens.add(*batches()[runtime.rank])
    (out / f"tokens_{runtime.rank}.json").write_text(json.dumps(tokens.reduce()))


def traces(runtime: Runtime, out: Path) -> None:
    """Step 10 is profiled, two of its three phases; step 11 is not."""
    phases = Phases(runtime)
    with profiled(ProfileConfig(steps=[10], phases=["rollout", "update"]), 10, out, runtime, phases):
        with phases("rollout"):
            torch.randn(64, 64) @ torch.randn(64, 64)
        with phases("grade"):
            torch.zeros(3).cumsum(0)
        with phases("update"), torch.profiler.record_function("inner"):
            weight = torch.randn(8, 8, requires_grad=True)
            (weight @ weight).sum().backward()
            dist.all_reduce(weight.grad)
    with profiled(ProfileConfig(steps=[10]), 11, out, runtime, phases):
        torch.zeros(3).sum()


def full_disk(runtime: Runtime, checkpoint: Path, run: Path) -> None:
    """Rank 0's disk is full for the files that only rank 0 writes, then for all; then there is room again."""
    model = build_model(checkpoint, ShardingConfig(compute_dtype="float32"))
    # no state of its own, so that a rank's part in dcp/ is smaller than hf/
    optimizer = torch.optim.SGD(model.parameters())
    checkpointer = Checkpointer(Run(run), CheckpointConfig(), runtime, source=checkpoint)
    saved = []

    def save(step: int) -> None:
        checkpointer.save(step, model, optimizer, {})
        saved.append(checkpointer.finish())

    save(1)
    written = run / "checkpoints" / "step_000001"
    dcp, hf = (max(path.stat().st_size for path in (written / folder).iterdir()) for folder in ("dcp", "hf"))
    assert dcp < hf, "the limit below must stop hf/ and not dcp/"
    for step, limit in ((2, hf - 1), (3, 1000), (4, resource.RLIM_INFINITY)):
        if runtime.is_main:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        save(step)
    answers = runtime.gather(saved)
    if runtime.is_main:
        (run / "saved.json").write_text(json.dumps(answers))
    checkpointer.close()


def spread(runtime: Runtime, checkpoint: Path, run: Path) -> None:
    """A checkpoint whose hf/ has several files; each rank tells which files of it are its own."""
    model = build_model(checkpoint, ShardingConfig(compute_dtype="float32"))
    checkpointer = Checkpointer(Run(run), CheckpointConfig(), runtime, source=checkpoint)
    write_part = checkpointer._write_part

    def told(*arguments):
        problems, rows = write_part(*arguments)
        (run / f"wrote_{runtime.rank}.json").write_text(json.dumps(list(rows)))
        return problems, rows

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_checkpoint, "weight_files", partial(weight_files, max_bytes=20_000))
        patch.setattr(checkpointer, "_write_part", told)
        checkpointer.save(1, model, torch.optim.SGD(model.parameters()), {}, last=True)
    checkpointer.close()


def missing_rank(runtime: Runtime, checkpoint: Path, run: Path) -> None:
    """Rank 1 is as good as stopped for a while when it should write its part."""
    model = build_model(checkpoint, ShardingConfig(compute_dtype="float32"))
    optimizer = torch.optim.SGD(model.parameters())
    checkpointer = Checkpointer(Run(run), CheckpointConfig(), runtime, source=checkpoint)
    whole, checkpoints.ROLL_CALL_SECONDS = dcp.async_save, 0.2
    if runtime.rank == 1:
        checkpoints.ROLL_CALL_SECONDS = 3600.0  # it never counts
        later = ThreadPoolExecutor(1)
        dcp.async_save = lambda *given, **more: later.submit(lambda: [time.sleep(3), whole(*given, **more).result()])
    checkpointer.save(1, model, optimizer, {})
    checkpointer.finish()
    dcp.async_save = whole
    checkpointer.close()


def alone(out: Path) -> None:
    """Rank 0 works alone for longer than any collective may take."""
    runtime = Runtime.start(SHORT_SECONDS)  # of the group that exists

    def work() -> int:
        time.sleep(2 * SHORT_SECONDS)
        return 42

    runtime.barrier()
    (out / f"alone_{runtime.rank}.txt").write_text(str(on_rank_zero(work)))
    runtime.barrier()


def decisions(runtime: Runtime, differ: str | None) -> str:
    """What is said of two groups of two, on which the ranks agree except for what `differ` names."""
    response = flat([1], [], Segment([], [5]))
    groups = [[Graded(p, n, "q", "g", "t", response, reward=0.5, advantage=1.0) for n in (0, 1)] for p in ("a", "b")]
    kept = groups[:1] if differ == "filter" and runtime.rank else groups
    if differ in ("reward", "advantage"):
        setattr(groups[1][0], differ, 0.25 + runtime.rank)
    if differ == "credit":
        groups[1][0].worker_advantages = [0.25 + runtime.rank]
    try:
        kinds = ("reward", "filter", "advantage", "credit")
        require_agreement(groups, kept, runtime, {kind: f"m:{kind[0]}" for kind in kinds})
    except PluginError as error:
        return str(error)
    return "agreed"


def my_judge(rank: int) -> list:
    return [1 // (1 - rank)]


def plugins(runtime: Runtime, out: Path) -> None:
    """Decisions that differ, and a plug-in that fails on rank 1 alone, at the end of a command."""
    said = {str(differ): decisions(runtime, differ) for differ in (None, "reward", "filter", "advantage", "credit")}
    judge = Plugin("judge", my_judge)
    code = run_cleanly(lambda: runtime.together(lambda: judge(runtime.rank, on=f"an answer on rank {runtime.rank}")))
    (out / f"plugins_{runtime.rank}.json").write_text(json.dumps(said | {"code": code}))


def main(checkpoint: Path, out: Path) -> None:
    with Runtime.start(900) as runtime:
        gradients(runtime, checkpoint, out / "responses.json", out / "2")
        token_metrics(runtime, out)
        plugins(runtime, out)
        traces(runtime, out / "profile")
        full_disk(runtime, checkpoint, out / "full")
        spread(runtime, checkpoint, out / "spread")
        missing_rank(runtime, checkpoint, out / "missing")
        alone(out)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
