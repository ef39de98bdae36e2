"""RL for real: torchrun, FSDP over gloo, a vLLM engine in every rank, on a miniature task whose start is known
exactly.
"""

import json
import math
from pathlib import Path

import pytest
from safetensors.torch import load_file
from torch.utils.tensorboard import SummaryWriter

from dccot.core.files import read_jsonl, write_jsonl_atomic
from dccot.data.prompts import PromptConfig
from dccot.lab.worlds.arithmetic import make_tokenizer
from dccot.lab.worlds.exact_task import TEMPERATURE
from dccot.rollout.response import Response
from tests.support import programs
from tests.support.fault_injection.rank import Kill
from tests.support.fault_injection.run import FaultInjection
from tests.support.spans import gaps, metrics, trained_in

pytestmark = pytest.mark.slow

PROGRAM = Path(__file__).with_name("rl_program.py")
RANKS, STEPS = 2, 8

# Of the task in rl_program.py. One step rolls out 8 · 4 responses.
START_MEAN = 0.25 * (0.5 * 1.0 + 0.5 * 0.5)
START_VARIANCE = 0.25 * (0.5 * 1.0 + 0.5 * 0.25) - START_MEAN**2
ROLLOUTS = 32


@pytest.fixture(scope="module")
def out(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("rl")
    programs.finish(programs.torchrun(RANKS, PROGRAM, out, STEPS))
    return out


def weights(run: Path, step: int) -> dict[str, bytes]:
    tensors = load_file(run / "checkpoints" / f"step_{step:06d}" / "hf" / "model.safetensors")
    return {name: tensor.numpy().tobytes() for name, tensor in tensors.items()}


def test_a_run_that_was_stopped_ends_in_the_same_bits(out):
    assert weights(out / "stopped", 3) == weights(out / "whole", 3)
    assert weights(out / "whole", 3) != weights(out / "whole", 2)


def test_a_run_that_was_stopped_has_every_step_once_in_its_metrics(out):
    assert [row["step"] for row in metrics(out / "stopped")] == [0, 1, 2]
    same = ("reward/mean", "policy/loss", "policy/grad_norm", "policy/entropy", "gap/kl", "length/longest_path")
    for stopped, whole in zip(metrics(out / "stopped"), metrics(out / "whole"), strict=False):
        assert {name: stopped[name] for name in same} == {name: whole[name] for name in same}


def test_a_run_that_one_rank_is_told_to_stop_in_a_rollout_saves_the_step_before_and_ends_in_the_same_bits(out):
    for rank in range(RANKS):
        assert (out / f"stopped_{rank}.txt").read_text().split() == ["4", "step_000001"]
    assert weights(out / "signalled", 3) == weights(out / "whole", 3)
    assert [row["step"] for row in metrics(out / "signalled")] == [0, 1, 2]


def test_replaying_a_saved_batch_gives_the_update_that_was_made_with_it(out):
    assert weights(out / "replayed", 1) == weights(out / "whole", 1)


def test_ranks_that_share_micro_batches_measure_the_same(out):
    """Of a saved batch: loss, gradient norm, entropy, ratios, the gap to the engine's log-probs."""
    [apart], [shared] = metrics(out / "replayed"), metrics(out / "shared")
    compared = [name for name in apart if name.startswith(("policy/", "gap/"))]
    assert len(compared) > 10
    assert {name: shared[name] for name in compared} == pytest.approx(
        {name: apart[name] for name in compared}, rel=1e-3, abs=1e-5
    )


def test_the_trainer_finds_the_log_probs_that_the_engine_sampled_with(out):
    """After every weight sync again; at each step the largest difference over all sampled tokens."""
    found = [row["gap/max_abs_logprob"] for row in metrics(out / "whole")]
    assert len(found) == STEPS
    assert max(found) < 1e-4


def adapters(run: Path, step: int) -> bytes:
    return (run / "checkpoints" / f"step_{step:06d}" / "hf" / "adapter_model.safetensors").read_bytes()


def test_a_run_with_adapters_that_was_stopped_ends_in_the_same_bits(out):
    assert adapters(out / "lora_stopped", 3) == adapters(out / "lora", 3) != adapters(out / "lora", 2)


def test_merged_adapters_sample_with_the_log_probs_that_training_finds(out):
    assert max(row["gap/max_abs_logprob"] for row in metrics(out / "lora")) < 1e-4


def test_the_reference_of_a_model_with_adapters_is_the_model_without_them(out):
    """The first update starts from it; a second one has moved away."""
    kl = [row["policy/kl"] for row in metrics(out / "lora")]
    assert 0 <= kl[0] < 1e-3 < max(kl)


def test_rl_with_adapters_alone_learns_the_format(out):
    """The frozen head tells no digit from another, but it tells spawning from not: half the responses spawn at first.
    Four steps are 128 responses: their share has a standard deviation of 0.044.
    """
    found = [row["reward/well_formed"] for row in metrics(out / "lora")]
    assert sum(found[-4:]) / 4 > 0.5 + 5 * 0.044


def test_every_rank_leaves_a_trace_of_the_chosen_phases_and_of_no_others(out):
    traces = sorted((out / "whole" / "profile").rglob("rank*.pt.trace.json"))
    assert [trace.name for trace in traces] == [f"rank{rank}.pt.trace.json" for rank in range(RANKS)]
    for trace in traces:
        names = {event.get("name") for event in json.loads(trace.read_text())["traceEvents"]}
        assert names & {"rollout", "grade", "old_logprob", "reference", "update", "sync"} == {"update", "sync"}


def test_nothing_of_a_trainer_is_left_beside_the_engine_when_its_stage_has_ended(out):
    assert [(out / f"left_over_{rank}.txt").read_text() for rank in range(RANKS)] == ["[]"] * RANKS


def test_saved_rollouts_hold_text_verdict_reward_and_lengths(out):
    rows = [row for _, row in read_jsonl(out / "whole" / "rollouts" / "step_000000.jsonl.gz")]
    assert len(rows) == ROLLOUTS
    for row in rows:
        right, formed = (
            "\\boxed{3}" in row["text"],
            "<spawn_workers>" in row["text"] and row["text"].endswith("</answer>"),
        )
        assert row["verdict"] == ("correct" if right else "unparsable" if "\\boxed" not in row["text"] else "wrong")
        assert (row["flaw"] is None) == formed
        assert row["reward"] == (right and (1.0 if formed else 0.5))
        assert row["lengths"]["total_tokens"] >= row["lengths"]["longest_path"] > 0


def test_whole_batches_are_rolled_out_until_the_filter_has_kept_enough_prompts(out):
    """Remove-Easy keeps a prompt whose 4 responses are neither all right nor all wrong; 12 such are wanted of batches
    of 8.
    """
    for step, row in enumerate(metrics(out / "filtered")):
        groups = {}
        for rollout in trained_in(out / "filtered", step):
            groups.setdefault(rollout["problem"], []).append(rollout["verdict"] == "correct")
        assert len(groups) == 12
        assert all(0 < sum(group) < 4 for group in groups.values())
        assert row["data/rollout_batches"] >= 2
        assert row["data/kept"] - row["data/surplus"] == 12
        assert 0 <= row["data/surplus"] < 8


def test_partial_rollouts_without_staleness_are_synchronous_to_the_bit(out):
    assert weights(out / "partial_0", 3) == weights(out / "whole", 3)


def test_prompts_that_start_as_they_are_needed_leave_no_surplus_and_a_stopped_run_ends_in_the_same_bits(out):
    """Remove-Easy rejects some: as many start in their place, all are finished and considered in the order drawn. The
    run that was stopped is one of partial rollouts without staleness.
    """
    for row in metrics(out / "needed"):
        assert row["data/surplus"] == row["pool/unfinished"] == row["pool/waiting"] == row["staleness/max"] == 0
        assert row["pool/started"] > 8
    assert weights(out / "needed_stopped", 3) == weights(out / "needed", 3)


def test_partial_rollouts_train_on_tokens_of_several_versions_none_too_old(out):
    rows, ages, crossing = metrics(out / "partial_2"), set(), 0
    assert [row["step"] for row in rows] == list(range(5))
    for step, row in enumerate(rows):
        responses = trained_in(out / "partial_2", step)
        parsed = [Response.from_json(each["response"]) for each in responses]
        versions = [segment.versions or [step] for response in parsed for segment in response.segments()]
        ages |= {step - version for each in versions for version in each}
        crossing += sum(len(set(each)) > 1 for each in versions)
        assert row["staleness/max"] == max(step - version for each in versions for version in each)
        assert len(responses) == ROLLOUTS
        assert row["pool/too_old"] == 0
    assert ages == {0, 1, 2}
    assert crossing > 0, "no response continued under new weights"
    assert sum(row["pool/unfinished"] for row in rows) > 0
    assert {row["step"] for row in rows if "validation/accuracy" in row} >= {0, 2, 4}, "validated under unfinished ones"


def test_every_span_of_partial_rollouts_has_the_log_probs_of_its_versions_weights(out):
    """By our own model, in the whole tree, with the weights that the run kept of every step."""
    found = gaps(out / "partial_2", out / "model", TEMPERATURE)
    assert len(found) > 3
    assert max(found.values()) < 1e-4


def test_a_filter_of_ones_own_sees_the_texts_of_all_ranks(out):
    """It keeps a prompt if exactly three of its four responses spawn."""
    groups = {}
    for _, row in read_jsonl(out / "own_filter" / "rollouts" / "step_000000.jsonl.gz"):
        groups.setdefault(row["problem"], []).append("<spawn_workers>" in row["text"])
    assert [sorted(spawns) for spawns in groups.values()] == [[False, True, True, True]] * 2


def test_a_filter_that_keeps_nothing_ends_in_an_error_on_every_rank(out):
    for rank in range(RANKS):
        said = (out / f"error_of_rank_{rank}.txt").read_text()
        assert said.startswith("step 0: remove_easy kept only 0 of 8 prompts after 2 batches of 8; accuracy 0.0%")


def test_validation_runs_before_the_first_step_and_at_the_last_on_its_own_problems(out):
    """Its problems have the ids of training problems: neither may be asked in the place of the other."""
    first, last = metrics(out / "filtered")
    for row in (first, last):
        assert 0.0 <= row["validation/accuracy"] <= 1.0
        assert row["validation/longest_path"] > 0
    for step in (0, 1):
        for _, row in read_jsonl(out / "filtered" / "rollouts" / f"step_{step:06d}.jsonl.gz"):
            assert row["question"] == f"Say 3, case {row['problem'][1:]}."
            assert prompt_of(row["question"]) == row["response"]["prompt"]


def prompt_of(question: str) -> list[int]:
    return PromptConfig().ids(make_tokenizer(), question)


def test_reward_rises_by_more_than_noise_can_explain(out):
    """The margin: six standard errors of the mean over the last three steps of a policy that had learnt nothing (32
    rollouts each).
    """
    rewards = [row["reward/mean"] for row in metrics(out / "whole")]
    standard_error = math.sqrt(START_VARIANCE / ROLLOUTS)
    assert abs(rewards[0] - START_MEAN) < 4 * standard_error
    assert sum(rewards[-3:]) / 3 > START_MEAN + 6 * standard_error / math.sqrt(3)


def test_a_run_killed_and_restarted_by_torchrun_is_one_that_nobody_touched(out):
    """A small part of `make torture`: weights and optimizer to the bit, rollouts, metrics and TensorBoard series."""
    injection = FaultInjection(out, STEPS, settings=(), run=programs.run)
    injection.inject([Kill("rollout", "rank 1", 0.5)], restarts=1)
    assert (injection.problems, injection.lost(), injection.differences()) == ([], [], [])
    assert len(injection.kills()) == 1
    spoil(out / "faulted", STEPS)
    assert [text.split(" ")[0] for text in injection.differences()] == [
        "hf/",
        "rollouts/step_000001.jsonl.gz",
        "metrics.jsonl",
        "TensorBoard",
    ]


def spoil(run: Path, steps: int) -> None:
    """The last bit of the weights, one rollout, a row too many, a value too many: each must be noticed."""
    weights = run / "checkpoints" / f"step_{steps:06d}" / "hf" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + bytes([weights.read_bytes()[-1] ^ 1]))
    rollouts = run / "rollouts" / "step_000001.jsonl.gz"
    rows = [row for _, row in read_jsonl(rollouts)]
    write_jsonl_atomic(rollouts, [rows[0] | {"verdict": "timed_out"}, *rows[1:]])
    with open(run / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"step": steps - 1}) + "\n")
    with SummaryWriter(str(run / "tensorboard")) as writer:
        writer.add_scalar("reward/mean", 0.0, steps - 1)
