"""The model of what a recipe costs: seconds worked out by hand, and calibration that gives back what was put in."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from dccot import cost
from dccot.core.config import load_config, to_yaml
from dccot.cost import Assumptions, Hardware, Response, decode_seconds, rl_step, rollout_seconds
from dccot.model.config import parse_config
from dccot.plan import GPUS, SHAPES
from dccot.train.config import RLConfig

# every decoding step takes one second, whatever is in it
ONE_SECOND = Assumptions(host_step=1.0, host_sequence=0.0, bandwidth_share=1e12, decode_utilisation=1e12)
GPU = Hardware(parse_config(SHAPES["1.5B"], "1.5B"), GPUS["H100"], 1, 1, slots=100, cache=10**9)
TREE = Response(10, [[2], [3, 5, 4], [1]])  # longest path 2 + 5 + 1
LINE = Response(10, [[6]])


@pytest.mark.parametrize(
    ("responses", "hardware", "seconds"),
    [
        ([LINE], GPU, 6),
        ([TREE], GPU, 8),  # the director waits for the longest worker
        ([TREE, LINE, LINE], GPU, 8),  # side by side
        ([LINE, LINE], replace(GPU, slots=1), 12),  # one after another
        ([LINE, LINE], replace(GPU, slots=1, gpus=2), 6),  # on two engines
        ([TREE], replace(GPU, slots=1), 2 + 3 + 5 + 4 + 1),  # workers one after another
    ],
)
def test_seconds_of_a_rollout_are_those_worked_out_by_hand(responses, hardware, seconds):
    assert rollout_seconds(responses, hardware, ONE_SECOND) == pytest.approx(seconds)


def test_a_cache_that_holds_one_prompt_lets_one_response_run_at_a_time():
    assert decode_seconds([LINE, LINE], replace(GPU, cache=16), ONE_SECOND) == pytest.approx(12)


def test_a_tree_holds_every_worker_but_the_first_twice():
    assert TREE.sampled == 15 and TREE.forest == 10 + 15 + 5 + 4


@pytest.fixture(scope="module")
def config() -> RLConfig:
    small = ["batch.prompts=8", "batch.prompts_rolled_out=16", "batch.max_rollout_batches=3"]
    return load_config(RLConfig, "configs/rl/stage3.yaml", ["model.path=m", "data.train=t", *small])


def test_problems_that_are_always_solved_never_pass_the_filter_that_removes_easy_ones(config):
    always = Assumptions(solved=0.999999, alike=1e6)
    assert rl_step(config, GPU, always, samples=1).batches == 3
    assert rl_step(replace(config, filter="include_easy"), GPU, always, samples=1).batches == 1


def test_calibration_gives_back_the_lengths_solve_rate_and_factors_of_a_run(config, tmp_path):
    true = Assumptions(
        director=30, worker=50, rounds=1.0, solved=0.5, alike=2.0, rollout_factor=3.0, training_factor=7.0
    )
    step = rl_step(config, GPU, true)
    row = {
        "parallel/rounds": 1.0,
        "parallel/worker_length": 50,
        "length/total_tokens": 2 * 30 + 3 * 50,
        "reward/correct": 0.5,
        "data/rollout_batches": step.batches,
        "data/kept": step.batches * 16 * 0.65,
        "time/rollout": step.rollout,
        "time/update": step.training,
        "time/step": step.seconds + 5,
    }
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row | {"step": n}) + "\n" for n in range(4)))
    found = cost.calibrated(tmp_path, config, GPU, Assumptions())
    assert (found.director, found.worker, found.rounds, found.other) == pytest.approx((30, 50, 1, 5))
    assert found.rollout_factor == pytest.approx(3.0, rel=0.2) and found.training_factor == pytest.approx(7.0, rel=0.2)


def test_the_command_names_every_stage_and_calls_itself_a_model(capsys, tmp_path, config):
    assert cost.main(["configs/paper.yaml", "model=M", "--gpus", "16", "--assume", "utilisation=0.2"]) == 0
    shown = capsys.readouterr().out
    for words in ("not a measurement", "utilisation 0.2", "stage4", "eval_dc_cot_hlp", "GPU-hours", "API: "):
        assert words in shown
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n')
    assert cost.main(["configs/paper.yaml", "model=M", "--from", str(tmp_path)]) == 2
    assert "fewer than two steps" in capsys.readouterr().err
    assert cost.main(["configs/paper.yaml", "model=M", "--assume", "utilization=0.2"]) == 2
    assert "did you mean 'utilisation'" in capsys.readouterr().err


def test_eight_times_the_gpus_sample_and_train_faster_but_not_more_than_eight_times(config):
    few, many = (rl_step(config, replace(GPU, gpus=gpus), Assumptions(), samples=1) for gpus in (8, 64))
    assert few.rollout / 8 < many.rollout < few.rollout
    assert many.training == pytest.approx(few.training / 8)
