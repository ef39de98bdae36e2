"""An engine's start can be watched and explained and changes nothing else; nothing is left when it is shut down."""

import json
import os
import shutil
import sys
import threading
from pathlib import Path

import pytest

from dccot.core.config import ConfigError
from dccot.core.files import BadData
from dccot.rollout import vllm_engine as engine_module
from dccot.rollout.engine import RUNNER, EngineConfig, choose_switches, keep_checked_runner, machine
from dccot.rollout.vllm_engine import engine_arguments, restore_environment
from tests.support import programs

pytestmark = pytest.mark.slow

PROGRAM = Path(__file__).with_name("engine_life_program.py")


@pytest.fixture(scope="module")
def life(checkpoints, tmp_path_factory) -> tuple[dict, str, Path]:
    out = tmp_path_factory.mktemp("life")
    done = programs.finish([sys.executable, PROGRAM, checkpoints["single"], out])
    return json.loads((out / "found.json").read_text()), done.stderr, out


def test_a_start_that_fails_shows_the_end_of_its_log(life):
    found, stderr, out = life
    assert "No available memory for the cache blocks" in found["error"]
    shown = stderr.split("--- and now")[0].split(f"the end of {out / 'failed/engine.rank0.log'}:\n")[1]
    lines = (out / "failed/engine.rank0.log").read_text().splitlines()
    assert shown.splitlines() == lines[-60:] and any(" INFO vllm" in line for line in lines)


def test_the_console_hears_that_the_engine_is_still_starting_and_the_log_has_the_rest(life):
    _, stderr, out = life
    lines = stderr.split("--- and now")[1].splitlines()
    beats = [line for line in lines if line.startswith("starting the engine: ")]
    said = (out / "first/engine.rank0.log").read_text()
    assert any(beat.split(" s; ", 1)[1][:60] in said for beat in beats)
    assert "vllm" in said and not any(" INFO vllm" in line for line in lines if line not in beats)


def test_no_weight_and_no_cache_outlives_the_shutdown(life):
    found, _, _ = life
    assert found["held"] > 10 and found["alive"] == 0


def test_an_engine_after_another_says_the_same(life):
    found, _, _ = life
    assert found["second"] == found["first"]


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("on_gpu", [True, False])
@pytest.mark.parametrize("sleeps", [True, False])
def test_only_a_gpu_engine_for_training_sleeps_and_its_cuda_graphs_at_level_two(monkeypatch, on_gpu, sleeps, level):
    monkeypatch.setattr(engine_module, "ON_GPU", on_gpu)
    arguments = engine_arguments("m", "t", EngineConfig(batched_tokens=8192, sleep_level=level), False, sleeps)
    assert arguments.enable_sleep_mode is (sleeps and on_gpu)
    assert arguments.sleep_mode_offload_cudagraph is (sleeps and on_gpu and level == 2)
    assert arguments.max_num_batched_tokens == (8192 if on_gpu else None)  # a CPU engine takes whole prompts


SPLIT = "VLLM_DISTRIBUTED_USE_SPLIT_GROUP"


@pytest.fixture
def switches(monkeypatch, tmp_path):
    """What vLLM is told for settings and a number of ranks, on a GPU."""
    monkeypatch.setenv("DCCOT_CACHE", str(tmp_path))
    for name in (RUNNER, SPLIT):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)

    def choose(ranks: int = 1, **settings) -> tuple[str | None, str | None]:
        choose_switches(EngineConfig(**settings), ranks, on_gpu=True)
        return os.environ.pop(RUNNER, None), os.environ.pop(SPLIT, None)

    return choose


def test_vllm_decides_where_nothing_is_chosen(switches):
    assert switches(1024) == (None, None)


def test_a_runner_is_chosen_by_name(switches):
    assert switches(runner="v1") == ("0", None) and switches(runner="v2") == ("1", None)


def test_groups_are_split_on_request_and_from_64_ranks(switches):
    assert switches(63, split_groups=True) == (None, None) and switches(64, split_groups=True) == (None, "1")


def test_training_uses_the_runner_that_passed_its_checks_and_says_so(switches, caplog):
    keep_checked_runner(machine(), "v1")
    keep_checked_runner("another machine", "v2")
    assert switches() == ("0", None)
    assert "engine.runner: v1, the only one" in caplog.text
    assert switches(runner="v2") == ("1", None)
    keep_checked_runner(machine(), None)  # both pass now
    assert switches() == (None, None)


def test_runner_v2_is_refused_without_a_gpu():
    with pytest.raises(ConfigError, match="v2, which runs on GPUs only"):
        choose_switches(EngineConfig(runner="v2"), 1, on_gpu=False)


def test_only_what_changed_is_restored_and_nothing_is_ever_missing(monkeypatch):
    monkeypatch.setenv("DCCOT_KEPT", "1")
    monkeypatch.setenv("DCCOT_CHANGED", "before")
    monkeypatch.setenv("DCCOT_REMOVED", "before")
    before, missing, done = dict(os.environ), [], threading.Event()

    def read() -> None:
        while not done.is_set():
            if os.environ.get("DCCOT_KEPT") != "1":
                missing.append(1)

    reader = threading.Thread(target=read)
    reader.start()
    for _ in range(300):
        os.environ["DCCOT_CHANGED"], os.environ["DCCOT_ADDED"] = "after", "1"
        del os.environ["DCCOT_REMOVED"]
        restore_environment(before)
        assert dict(os.environ) == before
    done.set()
    reader.join()
    assert not missing


def test_damaged_weights_are_refused_before_vllm_starts(checkpoints, build_engine, tmp_path, monkeypatch):
    monkeypatch.setattr(engine_module, "LLMEngine", None)
    folder = shutil.copytree(checkpoints["spelled"], tmp_path / "model")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(BadData, match=r"model\.safetensors is damaged or cut short"):
        build_engine(folder)
    weights.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n")
    with pytest.raises(BadData, match="git-LFS pointer"):
        build_engine(folder)
