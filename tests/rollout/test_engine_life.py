"""An engine's start can be watched and explained and changes nothing else; nothing is left when it is shut down."""

import json
import os
import shutil
import sys
import threading
from pathlib import Path

import pytest

from dccot.core.files import BadData
from dccot.rollout import vllm_engine as engine_module
from dccot.rollout.engine import EngineConfig
from dccot.rollout.vllm_engine import engine_arguments, restore_environment
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


@pytest.mark.parametrize("on_gpu", [True, False])
@pytest.mark.parametrize("sleeps", [True, False])
def test_only_a_gpu_engine_for_training_can_sleep_and_its_cuda_graphs_sleep_with_it(monkeypatch, on_gpu, sleeps):
    monkeypatch.setattr(engine_module, "ON_GPU", on_gpu)
    arguments = engine_arguments("m", "t", EngineConfig(batched_tokens=8192), False, sleeps)
    assert arguments.enable_sleep_mode is arguments.sleep_mode_offload_cudagraph is (sleeps and on_gpu)
    assert arguments.max_num_batched_tokens == (8192 if on_gpu else None)  # a CPU engine takes whole prompts


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
