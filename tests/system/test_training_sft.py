"""SFT for real: loss falls, runs stop and continue in the same bits, on one rank, on two, and from two to one."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from dccot.files import write_jsonl_atomic
from dccot.miniature.arithmetic import make_splits, make_tokenizer, rewrite_parallel, sequential_solution
from dccot.model.checkpoint_io import create_checkpoint
from dccot.rollout.protocol import flaw_of
from dccot.train.sft import main

PROGRAM = Path(__file__).with_name("sft_program.py")
STEPS, STOP = 6, 3


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    """A random model, demonstrations in the parallel format, and the configuration that trains the one on the other."""
    out, tokenizer = tmp_path_factory.mktemp("sft"), make_tokenizer()
    raw = {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": len(tokenizer), "hidden_size": 64,
        "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32,
        "max_position_embeddings": 2048, "tie_word_embeddings": True, "eos_token_id": tokenizer.eos_token_id,
    }  # fmt: skip
    create_checkpoint(raw, out / "model", tokenizer=tokenizer, seed=0)
    for split, problems in make_splits(0, {"train": 30, "validation": 12}).items():
        texts = {problem: rewrite_parallel(problem, sequential_solution(problem)) for problem in problems}
        rows = [{"id": p.id, "question": p.question, "completion": text} for p, text in texts.items() if flaw_of(text) is None]
        write_jsonl_atomic(out / f"{split}.jsonl", rows)
    config = {
        "output": str(out),
        "batch": 8,
        "token_budget": 1500,
        "validate_every": STOP,
        "model": {"path": str(out / "model")},
        "data": {"train": str(out / "train.jsonl"), "validation": str(out / "validation.jsonl")},
        "optimizer": {"learning_rate": 0.005, "warmup_steps": 2},
        "sharding": {"compute_dtype": "float32"},
        "checkpoint": {"every": STOP, "keep": 2},
    }
    (out / "sft.yaml").write_text(json.dumps(config))
    return out


def arguments(world: Path, name: str, steps: int) -> list[str]:
    return [str(world / "sft.yaml"), f"name={name}", f"steps={steps}"]


@pytest.fixture(scope="module")
def one_rank(world) -> Path:
    torch.set_num_threads(1)
    for name, steps in (("one_whole", STEPS), ("one_stopped", STOP), ("one_stopped", STEPS)):
        assert main(arguments(world, name, steps)) == 0
    return world


@pytest.fixture(scope="module")
def two_ranks(world) -> Path:
    runs = [arguments(world, "two_whole", STEPS), arguments(world, "two_stopped", STOP), arguments(world, "two_stopped", STEPS)]
    (world / "runs.json").write_text(json.dumps(runs))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", str(PROGRAM), str(world / "runs.json")]
    done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]
    return world


def weights(run: Path, step: int = STEPS) -> dict[str, Tensor]:
    return load_file(run / "checkpoints" / f"step_{step:06d}" / "hf" / "model.safetensors")


def assert_same_bits(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    assert [name for name in left if not torch.equal(left[name], right[name])] == []


def metrics(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_one_rank_stopped_and_resumed_ends_in_the_same_bits(one_rank):
    assert_same_bits(weights(one_rank / "one_stopped"), weights(one_rank / "one_whole"))
    assert not torch.equal(*(weights(one_rank / "one_whole", step)["model.embed_tokens.weight"] for step in (STOP, STEPS)))


def test_two_ranks_stopped_and_resumed_end_in_the_same_bits(two_ranks):
    assert_same_bits(weights(two_ranks / "two_stopped"), weights(two_ranks / "two_whole"))
    assert [row["step"] for row in metrics(two_ranks / "two_stopped")] == list(range(STEPS))


def test_one_rank_and_two_train_the_same_model(one_rank, two_ranks):
    """Losses step by step and weights at the end, up to the rounding of sums taken in another order."""
    one, two = one_rank / "one_whole", two_ranks / "two_whole"
    assert [row["policy/loss"] for row in metrics(one)] == pytest.approx([row["policy/loss"] for row in metrics(two)], rel=1e-5)
    left, right = weights(one), weights(two)
    for name in left:
        torch.testing.assert_close(left[name], right[name], rtol=1e-3, atol=1e-4, msg=name)


def test_a_run_of_two_ranks_goes_on_on_one(two_ranks):
    """From the checkpoint that two ranks wrote at step 3, one rank reaches what two would have reached."""
    run = two_ranks / "moved"
    shutil.copytree(two_ranks / "two_whole", run)
    shutil.rmtree(run / "checkpoints" / f"step_{STEPS:06d}")
    assert main(arguments(two_ranks, "moved", STEPS)) == 0
    assert [row["step"] for row in metrics(run)] == list(range(STEPS))
    expected = weights(two_ranks / "two_whole")
    for name, tensor in weights(run).items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-3, atol=1e-4, msg=name)


def test_loss_falls_on_examples_seen_and_unseen(two_ranks):
    rows = metrics(two_ranks / "two_whole")
    assert rows[-1]["policy/loss"] < rows[0]["policy/loss"] - 1.0
    unseen = [row["validation/loss"] for row in rows if "validation/loss" in row]
    assert len(unseen) == 2
    assert unseen[1] < unseen[0]


def test_the_first_loss_is_that_of_a_model_that_knows_nothing(two_ranks):
    """ln of the vocabulary's size, up to what small random weights make of it."""
    assert metrics(two_ranks / "two_whole")[0]["policy/loss"] == pytest.approx(torch.tensor(len(make_tokenizer())).log().item(), abs=0.3)
