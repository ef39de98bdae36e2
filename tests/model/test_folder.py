"""Which checkpoint of a run is meant by a path, a step or `best`."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from dccot.core.files import BadData
from dccot.core.run import Checkpoint, Run
from dccot.model.folder import find_model, resolve_model
from tests.support import programs


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Checkpoints 20, 40 and 60, of which 20 has lost its weights; validated every 20 steps and before the first."""
    folder = tmp_path / "hlp"
    for step in (20, 40, 60):
        (folder / f"checkpoints/step_{step:06d}/hf").mkdir(parents=True)
        (folder / f"checkpoints/step_{step:06d}/hf/config.json").write_text("{}")
    (folder / "checkpoints/step_000020/hf/config.json").unlink()
    (folder / "checkpoints/step_000040_keep/hf").mkdir(parents=True)  # somebody's own copy
    (folder / "latest").write_text("step_000060\n")
    accuracies = {0: 0.9, 19: 0.8, 39: 0.5, 59: 0.4}
    rows = [{"step": step, "validation/accuracy": value} for step, value in accuracies.items()]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*rows, {"step": 60}]))
    return folder


def test_a_run_is_its_newest_checkpoint_and_a_step_can_be_named(run):
    assert resolve_model(run) == run / "checkpoints/step_000060/hf"
    assert resolve_model(f"{run}@40") == run / "checkpoints/step_000040/hf"


def test_a_step_that_is_gone_names_the_steps_that_are_there(run):
    assert Run(run).steps() == [40, 60]
    for wrong in ("20", "1e2", "", "-40"):
        with pytest.raises(FileNotFoundError, match="there are 40, 60"):
            resolve_model(f"{run}@{wrong}")


def test_best_is_the_highest_validation_accuracy_among_weights_that_are_there(run):
    # what was measured before the first step has no checkpoint
    assert [each.step for each in Run(run).validated()] == [20, 40, 60]
    assert Run(run).best().step == 40  # 20 was better, but its weights are gone
    assert resolve_model(f"{run}@best") == run / "checkpoints/step_000040/hf"


def test_best_needs_a_validation(run):
    (run / "metrics.jsonl").unlink()
    with pytest.raises(FileNotFoundError, match="name a step instead of best"):
        resolve_model(f"{run}@best")


def test_a_folder_may_have_an_at_sign_in_its_name(tmp_path):
    folder = tmp_path / "me@home"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    assert resolve_model(folder) == folder


@pytest.mark.parametrize(
    "content, said", [("", "is empty"), ("step_000080\n", "names 'step_000080'"), ("../../x", r"names '\.\./\.\./x'")]
)
def test_a_latest_that_leads_nowhere_says_so_and_names_what_is_there(run, content, said):
    (run / "latest").write_text(content)
    with pytest.raises(FileNotFoundError, match=rf"latest {said}.*@STEP \(there are 40, 60\)"):
        resolve_model(run)


def test_weights_that_are_not_what_was_written_are_refused_everywhere_but_found(run, monkeypatch):
    step = run / "checkpoints/step_000060"
    (step / "hf/model.safetensors").write_bytes(b"weights")
    Checkpoint(step).write_manifest()
    assert resolve_model(run) == step / "hf"
    (step / "hf/model.safetensors").write_bytes(b"weighty")
    (run / "favourite").symlink_to(step / "hf")
    monkeypatch.chdir(step / "hf")
    for path in (run, f"{run}@60", step / "hf", run / "favourite", "."):
        damage = r"the checksum of hf/model.safetensors does not match.*another checkpoint.*\(40\)"
        with pytest.raises(BadData, match=rf"step_000060 is damaged \({damage}"):
            resolve_model(path)
    assert find_model(run) == step / "hf"


def test_a_manifest_that_leads_outside_its_checkpoint_is_refused(run, tmp_path):
    step, outside = run / "checkpoints/step_000060", tmp_path / "outside"
    outside.write_text("{}")
    for name in ("hf/../../../../outside", str(outside)):
        listed = {key: {"size": 2, "sha256": ""} for key in (name, "hf/config.json")}
        (step / "manifest.json").write_text(json.dumps(listed))
        with pytest.raises(BadData, match="is damaged"):
            resolve_model(run)
    (step / "hf/config.json").unlink()
    Checkpoint(step).write_manifest()
    (step / "hf/config.json").symlink_to(outside)
    (step / "manifest.json").write_text(json.dumps({"hf/config.json": {"size": 2, "sha256": ""}}))
    with pytest.raises(BadData, match=r"config.json leads outside the checkpoint"):
        resolve_model(run)


def test_ranks_that_share_the_reading_of_a_checkpoint_read_every_file_once(tmp_path):
    step = tmp_path / "step_000001"
    for name in ("dcp/a", "dcp/b", "dcp/c", "hf/d", "state.json"):
        (step / name).parent.mkdir(parents=True, exist_ok=True)
        (step / name).write_text(name)
    Checkpoint(step).write_manifest()
    for name in ("dcp/a", "dcp/b", "dcp/c"):
        (step / name).write_text(name.upper())
        found = [Checkpoint(step).damage("dcp/", slice(rank, None, 2)) for rank in (0, 1)]
        assert [damage for damage in found if damage] == [f"the checksum of {name} does not match the manifest"]
        (step / name).write_text(name)


CHECKSUMS = """
import json, sys
from pathlib import Path
from dccot.model.folder import model_checksums
from dccot.core.runtime import Runtime

with Runtime.start() as runtime:
    found = model_checksums(Path(sys.argv[1]), runtime)
    print(json.dumps(found))
"""


@pytest.mark.slow
def test_ranks_started_by_srun_find_the_checksums_of_all_files(tmp_path):
    """Unlike torchrun, srun as in examples/train.sbatch says nothing of how many ranks a machine has."""
    contents = {name: name.encode() for name in ("config.json", "model.safetensors", "tokenizer.json")}
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": "2"}
    variables = {**os.environ, **where}
    command = [sys.executable, "-c", CHECKSUMS, tmp_path]
    ranks = [
        programs.Popen(command, env={**variables, "RANK": rank, "LOCAL_RANK": rank}, stdout=subprocess.PIPE, text=True)
        for rank in "01"
    ]
    expected = {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}
    assert [json.loads(rank.communicate(timeout=900)[0]) for rank in ranks] == [expected, expected]
