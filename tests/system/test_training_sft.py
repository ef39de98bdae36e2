"""SFT for real: loss falls, runs stop and continue in the same bits, on one rank, on two, and from two to one."""

import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from dccot.lab.worlds.arithmetic import make_tokenizer
from dccot.train import sft
from dccot.train.sft import main
from tests.support import programs
from tests.support.fault_injection.rank import descendants
from tests.support.fault_injection.sft_task import make_sft_task
from tests.support.spans import metrics

pytestmark = pytest.mark.slow

PROGRAM = Path(__file__).with_name("sft_program.py")
STEPS, STOP, LONG = 6, 3, 40
LORA = ("model.lora.rank=3", "model.lora.targets=[q_proj, down_proj]")  # three rows on two ranks
BY_SIGNALS = "checkpoint.every=1000"  # nothing else makes it save before the end
SHARED = "sharding.context_parallel=2"


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    """A random model, demonstrations in the parallel format, and the configuration that trains the one on the other."""
    out = tmp_path_factory.mktemp("sft")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    make_sft_task(out, sizes, {"train": 30, "validation": 12}, batch={"examples": 8, "token_budget": 1500},
                  validation={"every": STOP},
                  checkpoint={"every": STOP, "keep": 2})  # fmt: skip
    return out


def arguments(world: Path, name: str, steps: int) -> list[str]:
    return [str(world / "sft.yaml"), f"name={name}", f"steps={steps}"]


@pytest.fixture(scope="module")
def one_rank(world) -> Path:
    for name, steps in (("one_whole", STEPS), ("one_stopped", STOP), ("one_stopped", STEPS)):
        assert main(arguments(world, name, steps)) == 0
    for name, steps in (("lora_one", STEPS), ("lora_stopped", STOP), ("lora_stopped", STEPS)):
        assert main([*arguments(world, name, steps), *LORA]) == 0
    return world


@pytest.fixture(scope="module")
def two_ranks(world) -> Path:
    runs = [
        arguments(world, "two_whole", STEPS),
        arguments(world, "two_stopped", STOP),
        arguments(world, "two_stopped", STEPS),
    ]
    runs.append([*arguments(world, "long_whole", LONG), BY_SIGNALS])
    runs += [[*arguments(world, "shared", steps), SHARED] for steps in (STOP, STEPS)]
    runs += [[*arguments(world, "shared_whole", STEPS), SHARED]]
    runs += [[*arguments(world, "shared_first", STOP), SHARED], arguments(world, "shared_first", STEPS)]
    runs.append([*arguments(world, "lora_two", STEPS), *LORA])
    (world / "runs.json").write_text(json.dumps(runs))
    programs.finish(programs.torchrun(2, PROGRAM, world / "runs.json"))
    return world


def weights(run: Path, step: int = STEPS) -> dict[str, Tensor]:
    return load_file(run / "checkpoints" / f"step_{step:06d}" / "hf" / "model.safetensors")


def assert_same_bits(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    assert [name for name in left if not torch.equal(left[name], right[name])] == []


def test_one_rank_stopped_and_resumed_ends_in_the_same_bits(one_rank):
    assert_same_bits(weights(one_rank / "one_stopped"), weights(one_rank / "one_whole"))
    assert not torch.equal(
        *(weights(one_rank / "one_whole", step)["model.embed_tokens.weight"] for step in (STOP, STEPS))
    )


def test_two_ranks_stopped_and_resumed_end_in_the_same_bits(two_ranks):
    assert_same_bits(weights(two_ranks / "two_stopped"), weights(two_ranks / "two_whole"))
    assert [row["step"] for row in metrics(two_ranks / "two_stopped")] == list(range(STEPS))


def test_one_rank_and_two_train_the_same_model(one_rank, two_ranks):
    """Losses step by step and weights at the end, up to the rounding of sums taken in another order."""
    one, two = one_rank / "one_whole", two_ranks / "two_whole"
    assert [row["policy/loss"] for row in metrics(one)] == pytest.approx(
        [row["policy/loss"] for row in metrics(two)], rel=1e-5
    )
    left, right = weights(one), weights(two)
    for name in left:
        torch.testing.assert_close(left[name], right[name], rtol=1e-3, atol=1e-4, msg=name)


def test_ranks_that_share_micro_batches_train_the_same_model_and_resume_in_the_same_bits(two_ranks):
    """Losses, held-out loss and weights up to rounding; also if the run continues with a micro-batch per rank."""
    assert_same_bits(weights(two_ranks / "shared"), weights(two_ranks / "shared_whole"))
    for name in ("policy/loss", "validation/loss"):
        shared, apart = (
            [row[name] for row in metrics(two_ranks / run) if name in row] for run in ("shared", "two_whole")
        )
        assert len(shared) > 1 and shared == pytest.approx(apart, rel=1e-5)
    expected = weights(two_ranks / "two_whole")
    for run in ("shared", "shared_first"):
        for name, tensor in weights(two_ranks / run).items():
            torch.testing.assert_close(tensor, expected[name], rtol=1e-3, atol=1e-4, msg=name)


def adapters(run: Path) -> dict[str, Tensor]:
    return load_file(run / "checkpoints" / f"step_{STEPS:06d}" / "hf" / "adapter_model.safetensors")


def test_adapters_stopped_and_resumed_end_in_the_same_bits(one_rank):
    assert_same_bits(adapters(one_rank / "lora_stopped"), adapters(one_rank / "lora_one"))


def test_one_rank_and_two_train_the_same_adapters(one_rank, two_ranks):
    one, two = adapters(one_rank / "lora_one"), adapters(two_ranks / "lora_two")
    for name in one:
        torch.testing.assert_close(one[name], two[name], rtol=1e-3, atol=1e-4, msg=name)


def test_a_checkpoint_of_adapters_is_small(one_rank):
    """Adapters and two moments of each, 4 bytes per number and 2 KB per tensor; the model has 100 KB and more."""
    [whole, few] = [one_rank / name / "checkpoints" / f"step_{STEPS:06d}" for name in ("one_whole", "lora_one")]
    numbers, tensors = 2 * 3 * (64 + 64 + 128 + 64), 8
    assert numbers * 4 < (few / "hf/adapter_model.safetensors").stat().st_size < numbers * 4 + tensors * 256
    size = sum(file.stat().st_size for file in (few / "dcp").glob("*.distcp"))
    assert 3 * numbers * 4 < size < 3 * numbers * 4 + 4 * tensors * 4096
    assert size < sum(file.stat().st_size for file in (whole / "dcp").glob("*.distcp")) / 5


def test_the_next_stage_starts_from_the_merged_model(one_rank):
    start = [f"model.path={one_rank / 'lora_one'}", "optimizer.learning_rate=1e-12"]  # validated after a step
    assert main([*arguments(one_rank, "after_lora", 1), *start]) == 0
    last, first = metrics(one_rank / "lora_one")[-1], metrics(one_rank / "after_lora")[0]
    assert first["validation/loss"] == pytest.approx(last["validation/loss"], rel=1e-5)
    merged = one_rank / "lora_one" / "checkpoints" / f"step_{STEPS:06d}" / "merged" / "model.safetensors"
    base, found, changed = (
        load_file(one_rank / "model/model.safetensors"),
        load_file(merged),
        adapters(one_rank / "lora_one"),
    )
    layer = "model.layers.1.mlp.down_proj"
    a, b = (changed[f"base_model.model.{layer}.lora_{part}.weight"] for part in "AB")
    torch.testing.assert_close(found[f"{layer}.weight"], base[f"{layer}.weight"] + 32 / 3 * b @ a)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (("model.lora.rank=4", LORA[1]), "was trained with model.lora {'rank': 3"),
        ((), "was trained with model.lora {'rank': 3"),
        ((*LORA, "model.lora.alpha=16"), "'alpha': 32.0"),
    ],
)
def test_adapters_resume_only_with_the_settings_they_were_trained_with(one_rank, settings, said, capsys):
    assert main([*arguments(one_rank, "lora_one", STEPS + 1), *settings]) == 2
    assert said in capsys.readouterr().err


def test_adapters_resume_only_on_the_model_they_were_trained_on(one_rank, capsys):
    other = f"model.path={one_rank / 'one_whole'}"
    assert main([*arguments(one_rank, "lora_one", STEPS + 1), *LORA, other]) == 2
    assert "has adapters of" in capsys.readouterr().err


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


class Job:
    """`dccot sft` on two ranks under torchrun, in the background."""

    def __init__(self, world: Path, name: str, *settings: str):
        self.run, self.log = world / name, world / f"{name}.log"
        command = programs.torchrun(2, "dccot.train.sft", *arguments(world, name, LONG), *settings)
        with self.log.open("a") as said:
            self.process = programs.Popen(command, stdout=said, stderr=said)

    def wait_until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 900
        while not condition():
            assert self.process.poll() is None and time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.01)

    def at_step(self, step: int) -> bool:
        path = self.run / "metrics.jsonl"
        return path.exists() and len(path.read_text().splitlines()) >= step


def test_a_run_that_is_told_to_save_and_then_to_stop_ends_in_the_same_bits(two_ranks):
    """SIGUSR1 to one rank, SIGTERM to torchrun, which gives it to its ranks."""
    job = Job(two_ranks, "signalled", BY_SIGNALS)
    job.wait_until(lambda: job.at_step(5))
    os.kill(descendants(job.process.pid)[1], signal.SIGUSR1)
    job.wait_until((job.run / "latest").exists)
    saved = (job.run / "latest").read_text()
    job.process.send_signal(signal.SIGTERM)
    job.process.wait(900)
    assert "stopped; rerun the same command to resume" in job.log.read_text()
    stopped = (job.run / "latest").read_text()
    assert "step_000005" <= saved < stopped < f"step_{LONG:06d}"
    assert len(metrics(job.run)) == int(stopped.removeprefix("step_")), "it stopped where it saved"
    again = Job(two_ranks, "signalled", BY_SIGNALS)
    assert again.process.wait(900) == 0, again.log.read_text()
    assert_same_bits(weights(job.run, LONG), weights(two_ranks / "long_whole", LONG))
    assert [row["step"] for row in metrics(job.run)] == list(range(LONG))


def test_checkpoint_minutes_saves_by_the_clock(world):
    by_the_clock = ("checkpoint.every=1000", "checkpoint.minutes=1e-6", "checkpoint.keep=99")
    assert main([*arguments(world, "by_the_clock", STEPS), *by_the_clock]) == 0
    assert len(list((world / "by_the_clock" / "checkpoints").glob("step_*"))) == STEPS


def test_a_loss_that_is_never_finite_ends_the_run_and_its_batch_can_be_replayed(world, monkeypatch):
    run = world / "nan"
    monkeypatch.setattr(sft, "negative_logprob", lambda number, forest, logprob, entropy: logprob * float("nan"))
    with pytest.raises(RuntimeError, match=r"2 steps in a row .* \(max_bad_steps is 1\).* replay one with replay=FILE"):
        main([*arguments(world, "nan", STEPS), "max_bad_steps=1"])
    assert not (run / "latest").exists()
    kept = sorted((run / "bad").iterdir())
    assert [path.name for path in kept] == ["step_000000.jsonl", "step_000001.jsonl"]
    monkeypatch.undo()
    assert main([*arguments(world, "replayed", 1), f"replay={kept[0]}"]) == 0
    assert main(arguments(world, "undisturbed", 1)) == 0
    assert metrics(world / "replayed")[0]["policy/loss"] == pytest.approx(
        metrics(world / "undisturbed")[0]["policy/loss"], rel=1e-6
    )


def test_loss_falls_on_examples_seen_and_unseen(two_ranks):
    rows = metrics(two_ranks / "two_whole")
    assert rows[-1]["policy/loss"] < rows[0]["policy/loss"] - 1.0
    unseen = [row["validation/loss"] for row in rows if "validation/loss" in row]
    assert len(unseen) == 2
    assert unseen[1] < unseen[0]


def test_the_first_loss_is_that_of_a_model_that_knows_nothing(two_ranks):
    """ln of the vocabulary's size, up to what small random weights make of it."""
    assert metrics(two_ranks / "two_whole")[0]["policy/loss"] == pytest.approx(
        torch.tensor(len(make_tokenizer())).log().item(), abs=0.3
    )
