"""An engine's start can be watched and explained, and nothing of an engine is left when it is shut down."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from dccot.rollout import vllm_engine as engine_module
from dccot.rollout.engine import EngineConfig
from dccot.rollout.vllm_engine import engine_arguments
from tests.support import programs

pytestmark = pytest.mark.slow

PROGRAM = Path(__file__).with_name("engine_life_program.py")


@pytest.fixture(scope="module")
def life(checkpoints, tmp_path_factory) -> tuple[dict, str, Path]:
    out = tmp_path_factory.mktemp("life")
    command = [sys.executable, str(PROGRAM), str(checkpoints["single"]), str(out)]
    done = programs.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads((out / "found.json").read_text()), done.stderr, out


def test_a_start_that_fails_shows_the_end_of_its_log(life):
    found, stderr, out = life
    assert "No available memory for the cache blocks" in found["error"]
    shown = stderr.split("--- and now")[0].split(f"the end of {out / 'failed/engine.rank0.log'}:\n")[1]
    lines = (out / "failed/engine.rank0.log").read_text().splitlines()
    assert shown.splitlines() == lines[-60:] and any(" INFO vllm" in line for line in lines)


def test_the_console_hears_that_the_engine_is_still_starting_and_the_log_has_the_rest(life):
    _, stderr, out = life
    beats = [line for line in stderr.split("--- and now")[1].splitlines() if line.startswith("starting the engine: ")]
    said = (out / "first/engine.rank0.log").read_text()
    assert any(beat.split(" s; ", 1)[1][:60] in said for beat in beats)
    assert "vllm" in said and " INFO vllm" not in stderr.split("--- and now")[1].replace("\n".join(beats), "")


def test_no_weight_and_no_cache_outlives_the_shutdown(life):
    found, _, _ = life
    assert found["held"] > 10 and found["alive"] == 0


def test_an_engine_after_another_says_the_same(life):
    found, _, _ = life
    assert found["second"] == found["first"]


@pytest.fixture
def on_a_gpu(monkeypatch):
    monkeypatch.setattr(engine_module, "ON_GPU", True)
    return lambda config, sleeps=False: engine_arguments("m", "t", config, False, sleeps)


def test_a_gpu_engine_works_on_as_many_tokens_at_once_as_the_configuration_says(on_a_gpu):
    assert on_a_gpu(EngineConfig()).max_num_batched_tokens == 16_384
    assert on_a_gpu(EngineConfig(batched_tokens=8192)).max_num_batched_tokens == 8192


def test_only_an_engine_for_training_can_sleep_and_its_cuda_graphs_sleep_with_it(on_a_gpu):
    for sleeps in (False, True):
        arguments = on_a_gpu(EngineConfig(), sleeps)
        assert arguments.enable_sleep_mode is arguments.sleep_mode_offload_cudagraph is sleeps


def test_a_cpu_engine_takes_whole_prompts_and_never_sleeps():
    arguments = engine_arguments("m", "t", replace(EngineConfig(), batched_tokens=1), False, True)
    assert arguments.max_num_batched_tokens is None and not arguments.enable_sleep_mode
