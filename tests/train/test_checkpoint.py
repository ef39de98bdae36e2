"""Checkpoints are whole or not there; damage is noticed; a full disk costs a checkpoint and not the run."""

import logging
import pickle
import re
import resource
import shutil
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint.api import CheckpointException
from transformers import AutoModelForCausalLM, AutoTokenizer

from dccot.core.files import BadData
from dccot.core.run import Checkpoint, Run
from dccot.core.runtime import set_timeout
from dccot.model.folder import resolve_model
from dccot.model.sharding import ShardingConfig, build_model
from dccot.train.checkpoint import CheckpointConfig, Checkpointer
from dccot.train.dcp_reader import load_shards
from dccot.train.update import OptimizerConfig, make_optimizer
from tests.support.fault_injection.folders import flip_a_bit
from tests.support.fault_injection.rank import FILES
from tests.support.fault_injection.run import DAMAGES, damage


@pytest.fixture
def trained(checkpoint, runtime):
    """A model and its optimizer after one step."""
    model = build_model(checkpoint, ShardingConfig(compute_dtype="float32"))
    optimizer = make_optimizer(model, OptimizerConfig(learning_rate=0.1))
    move(model, optimizer)
    return model, optimizer


def move(model, optimizer) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()


@pytest.fixture
def checkpointer(tmp_path, runtime, checkpoint):
    made = []

    def make(**settings) -> Checkpointer:
        made.append(Checkpointer(Run(tmp_path / "run"), CheckpointConfig(**settings), runtime, source=checkpoint))
        return made[-1]

    yield make
    for one in made:
        one.close()


def saved(checkpointer: Checkpointer, *arguments) -> bool:
    checkpointer.save(*arguments)
    return checkpointer.finish()


def steps(checkpointer: Checkpointer) -> list[str]:
    return sorted(path.name for path in checkpointer.folder.iterdir())


def values(model) -> list[torch.Tensor]:
    return [parameter.full_tensor().clone() for parameter in model.parameters()]


@contextmanager
def no_file_larger_than(limit: int):
    """What a full disk looks like to a process: a write fails half-way through a file."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_model_optimizer_and_state_come_back_bit_for_bit(checkpointer, trained, checkpoint):
    model, optimizer = trained
    assert saved(checkpointer(), 7, model, optimizer, {"stream": {"position": 3}})
    before = values(model)
    move(model, optimizer)
    moved = values(model)
    fresh = build_model(checkpoint, ShardingConfig(compute_dtype="float32"))
    fresh_optimizer = make_optimizer(fresh, OptimizerConfig(learning_rate=0.1))
    assert checkpointer().resume(fresh, fresh_optimizer) == {"step": 7, "stream": {"position": 3}}
    assert all(map(torch.equal, values(fresh), before))
    move(fresh, fresh_optimizer)
    assert all(map(torch.equal, values(fresh), moved)), "the optimizer's moments belong to the checkpoint"


def test_every_moment_at_which_fault_injection_kills_is_seen_while_checkpoints_are_saved(checkpointer, trained):
    seen, watching = set(), True

    def hook(event: str, arguments: tuple) -> None:
        if watching:
            seen.update(
                moment for moment, (name, path) in FILES.items() if event == name and re.search(path, str(arguments[0]))
            )

    sys.addaudithook(hook)  # for the life of the process
    keeper = checkpointer(keep=1)
    assert all(saved(keeper, step, *trained, {}) for step in (1, 2))
    watching = False
    assert seen == set(FILES)


def test_a_checkpoint_holds_what_training_had_when_it_was_asked_for(checkpointer, trained, checkpoint):
    """Training continues at once, and writes over the very memory that is being saved."""
    model, optimizer = trained
    keeper, before = checkpointer(), values(model)
    keeper.save(1, model, optimizer, {})
    for _ in range(20):
        move(model, optimizer)
    assert keeper.finish()
    theirs = dict(AutoModelForCausalLM.from_pretrained(keeper.folder / "step_000001" / "hf").named_parameters())
    assert all(
        torch.equal(theirs[name], value) for (name, _), value in zip(model.named_parameters(), before, strict=True)
    )
    assert keeper.resume(model, optimizer)["step"] == 1
    assert all(map(torch.equal, values(model), before))
    costs = keeper.costs()
    assert costs["time/checkpoint_written"] > costs["time/checkpoint_waited"] > 0
    assert keeper.costs() == {"checkpoint/failures": 0.0}, "each is told once"


def test_a_checkpoint_has_no_name_until_its_last_file_is_written(checkpointer, trained, monkeypatch):
    keeper, hold, reached = checkpointer(), threading.Event(), threading.Event()
    saved(keeper, 1, *trained, {})
    write_manifest = Checkpoint.write_manifest

    def held(checkpoint: Checkpoint, known: dict) -> None:
        reached.set()
        hold.wait(600)
        write_manifest(checkpoint, known)

    monkeypatch.setattr(Checkpoint, "write_manifest", held)
    keeper.save(2, *trained, {})
    assert reached.wait(600)
    assert steps(keeper) == [".step_000002.partial", "step_000001"]
    assert keeper.latest.read_text() == "step_000001\n"
    hold.set()
    assert keeper.finish()
    assert steps(keeper) == ["step_000001", "step_000002"]
    assert keeper.latest.read_text() == "step_000002\n"


def test_the_hf_folder_opens_in_transformers_with_its_tokenizer(checkpointer, trained):
    model, optimizer = trained
    saved(checkpointer(), 1, model, optimizer, {})
    folder = checkpointer().folder / "step_000001" / "hf"
    theirs = dict(AutoModelForCausalLM.from_pretrained(folder).named_parameters())
    assert all(torch.equal(theirs[name], parameter.full_tensor()) for name, parameter in model.named_parameters())
    assert AutoTokenizer.from_pretrained(folder).encode("<worker_1>", add_special_tokens=False)


def test_a_new_run_has_nothing_to_resume(checkpointer, trained):
    assert checkpointer().resume(*trained) is None


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_newest_checkpoint_is_reported_and_the_one_before_is_used(checkpointer, trained, caplog, kind):
    model, optimizer = trained
    for step in (1, 2):
        saved(checkpointer(), step, model, optimizer, {})
    damage(checkpointer().folder / "step_000002", kind)
    assert checkpointer().resume(model, optimizer)["step"] == 1
    assert "step_000002 is damaged" in caplog.text
    assert resolve_model(checkpointer().folder.parent).parent.name == "step_000001"


def test_a_run_without_a_whole_checkpoint_is_not_silently_started_over(checkpointer, trained):
    saved(checkpointer(), 1, *trained, {})
    damage(checkpointer().folder / "step_000001", "a flipped bit")
    with pytest.raises(FileExistsError, match=r"no checkpoint in .* is whole \(step_000001\); remove that folder"):
        checkpointer().resume(*trained)


def test_a_run_of_which_only_weights_were_kept_is_not_silently_started_over(checkpointer, trained):
    """Somebody has deleted dcp/ to save space. A new beginning would cut the metrics and delete the weights as it
    passed their steps.
    """
    saved(checkpointer(), 5, *trained, {})
    shutil.rmtree(checkpointer().folder / "step_000005" / "dcp")
    with pytest.raises(
        FileExistsError, match=r"no checkpoint in .* is whole \(step_000005\); remove that folder .* or rename the run"
    ):
        checkpointer().resume(*trained)


def test_between_validations_a_checkpoint_has_no_weights_for_inference_and_resumes_all_the_same(checkpointer, trained):
    model, optimizer = trained
    keeper = checkpointer(keep=2, keep_hf_every=2)
    for step in (2, 3):
        saved(keeper, step, model, optimizer, {})
    assert not (keeper.folder / "step_000003" / "hf").exists()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert checkpointer(keep=2, keep_hf_every=2).resume(model, optimizer)["step"] == 3
    assert all(map(torch.equal, before, model.parameters()))
    run = keeper.folder.parent
    assert resolve_model(run) == keeper.folder / "step_000002" / "hf"  # the newest that has some


def test_weights_for_inference_are_rounded_and_those_of_the_last_step_are_exact(checkpointer, trained):
    """The next stage starts from the last step's: fp32 master weights, to the bit."""
    model, optimizer = trained
    keeper = checkpointer()
    keeper.steps, keeper.dtype = 2, torch.bfloat16
    for step in (1, 2):
        saved(keeper, step, model, optimizer, {})
    first, last = (load_file(keeper.folder / f"step_00000{step}/hf/model.safetensors") for step in (1, 2))
    for name, parameter in model.named_parameters():
        whole = parameter.detach().full_tensor()
        assert whole.dtype == torch.float32 and torch.equal(last[name], whole)
        assert torch.equal(first[name], whole.bfloat16())


def test_the_newest_are_kept_and_chosen_hf_folders_stay_for_good(checkpointer, trained):
    keeper = checkpointer(keep=2, keep_hf_every=2)
    keeper.steps = 5
    for step in range(1, 6):
        saved(keeper, step, *trained, {})
    assert steps(keeper) == ["step_000002", "step_000004", "step_000005"]
    assert sorted(path.name for path in (keeper.folder / "step_000002").iterdir()) == [
        "hf",
        "manifest.json",
        "state.json",
    ]
    assert resolve_model(f"{keeper.folder.parent}@2") == keeper.folder / "step_000002" / "hf"
    flip_a_bit(keeper.folder / "step_000002" / "hf" / "model.safetensors")
    with pytest.raises(BadData, match=r"step_000002 is damaged .*use another checkpoint of this run \(4, 5\)"):
        resolve_model(f"{keeper.folder.parent}@2")
    assert [Checkpoint(keeper.folder / name).damage() for name in ("step_000004", "step_000005")] == [None, None]
    assert keeper.resume(*trained)["step"] == 5


def test_a_damaged_checkpoint_never_outlives_a_good_one(checkpointer, trained):
    """After a damaged step 20 the run continues from 10; what it saves at 15 is the newest, whatever the numbers
    say.
    """
    keeper = checkpointer(keep=1)
    saved(keeper, 10, *trained, {})
    shutil.copytree(keeper.folder / "step_000010", keeper.folder / "step_000020")
    damage(keeper.folder / "step_000020", "a flipped bit")
    assert keeper.resume(*trained)["step"] == 10
    saved(keeper, 15, *trained, {})
    assert steps(keeper) == ["step_000015"]
    assert keeper.resume(*trained)["step"] == 15


def test_folders_that_people_put_beside_checkpoints_are_left_alone(checkpointer, trained):
    keeper = checkpointer(keep=1)
    assert saved(keeper, 1, *trained, {})
    for stray in ("step_000001_keep", "step_abc", "step_", "step_000009~"):
        shutil.copytree(keeper.folder / "step_000001", keeper.folder / stray)
    (keeper.folder / "step_000099").write_text("a file")
    assert saved(keeper, 2, *trained, {})
    assert checkpointer().resume(*trained)["step"] == 2
    assert steps(keeper) == ["step_", "step_000001_keep", "step_000002", "step_000009~", "step_000099", "step_abc"]


def test_an_old_checkpoint_that_cannot_be_deleted_is_not_a_failed_save(checkpointer, trained, caplog, monkeypatch):
    keeper, rmtree = checkpointer(keep=1), shutil.rmtree

    def refuse(folder, *arguments, **named):
        if Path(folder).name == "step_000001":
            raise PermissionError(13, "Permission denied")
        rmtree(folder, *arguments, **named)

    assert saved(keeper, 1, *trained, {})
    monkeypatch.setattr(shutil, "rmtree", refuse)
    assert saved(keeper, 2, *trained, {})
    keeper.save(3, *trained, {}, last=True)
    assert steps(keeper) == ["step_000001", "step_000003"]
    assert "step_000001 could not be deleted" in caplog.text
    assert "was not written" not in caplog.text


def test_half_a_checkpoint_that_was_being_deleted_is_never_resumed(checkpointer, trained, monkeypatch, caplog):
    """Killed between striking dcp/ from the manifest and deleting it."""
    keeper = checkpointer(keep=1, keep_hf_every=1)
    assert saved(keeper, 1, *trained, {})
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", lambda *_, **__: None)
        assert saved(keeper, 2, *trained, {})
    damage(keeper.folder / "step_000002", "a flipped bit")
    with pytest.raises(FileExistsError, match=r"no checkpoint in .* is whole"):
        checkpointer().resume(*trained)
    assert "manifest.json lists no file of dcp/" in caplog.text


def test_a_full_disk_costs_a_checkpoint_and_not_the_run(checkpointer, trained, caplog):
    keeper = checkpointer(keep=1)
    assert saved(keeper, 1, *trained, {})
    with no_file_larger_than(20_000):
        assert saved(keeper, 2, *trained, {}) is False
    assert "checkpoint of step 2 was not written" in caplog.text
    assert "training continues" in caplog.text
    assert steps(keeper) == ["step_000001"]
    assert keeper.resume(*trained)["step"] == 1
    assert saved(keeper, 3, *trained, {})
    assert keeper.resume(*trained)["step"] == 3


def test_a_disk_without_room_is_noticed_before_it_is_full(checkpointer, trained, caplog, monkeypatch):
    """Weights twice (dcp/ and hf/) and two moments of them; nothing is written that would have to be taken back."""
    keeper = checkpointer(keep=1)
    assert saved(keeper, 1, *trained, {})
    needed = 4 * sum(4 * parameter.numel() for parameter in trained[0].parameters())
    disk = shutil.disk_usage(keeper.folder)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: disk._replace(free=needed - 1))
    assert not saved(keeper, 2, *trained, {})
    assert f"checkpoint of step 2 was not written (it needs {needed / 1e6:,.0f} MB" in caplog.text
    assert steps(keeper) == ["step_000001"]
    with pytest.raises(OSError, match="last checkpoint, step 3, was not written"):
        keeper.save(3, *trained, {}, last=True)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: disk._replace(free=needed + 1000))
    assert saved(keeper, 4, *trained, {})


def test_checkpoints_cannot_fail_for_ever(checkpointer, trained):
    keeper = checkpointer(max_failures=1)
    assert saved(keeper, 1, *trained, {})
    keeper.costs()
    with no_file_larger_than(20_000):
        for step in (2, 3):
            assert not saved(keeper, step, *trained, {})
            assert keeper.costs().keys() == {"checkpoint/failures", "time/checkpoint_waited"}, (
                "what does not stand was not written"
            )
        with pytest.raises(
            OSError,
            match=r"2 checkpoints in a row were not written \(checkpoint.max_failures is 1\).* because of rank 0: [^C]",
        ):
            keeper.save(4, *trained, {})
    assert steps(keeper) == ["step_000001"]


def test_one_that_is_written_makes_up_for_those_that_failed(checkpointer, trained):
    keeper = checkpointer(max_failures=1)
    for step in (1, 3):
        with no_file_larger_than(20_000):
            assert not saved(keeper, step, *trained, {})
        assert keeper.costs()["checkpoint/failures"] == 1
        assert saved(keeper, step + 1, *trained, {})
        assert keeper.costs()["checkpoint/failures"] == 0


def test_the_runs_time_out_reaches_the_checkpoints_group(checkpointer, runtime):
    try:
        set_timeout(77)
        assert checkpointer()._group._get_backend(torch.device("cpu")).options._timeout.total_seconds() == 77
    finally:
        set_timeout(1800)


def test_the_last_checkpoint_of_a_run_must_be_written(checkpointer, trained):
    with no_file_larger_than(20_000), pytest.raises(OSError, match="last checkpoint, step 9, was not written"):
        checkpointer().save(9, *trained, {}, last=True)


def test_a_source_that_is_deleted_during_the_run_costs_no_tokenizer(checkpoint, trained, runtime, tmp_path):
    source = shutil.copytree(checkpoint, tmp_path / "source")
    keeper = Checkpointer(Run(tmp_path / "run"), CheckpointConfig(), runtime, source=source)
    shutil.rmtree(source)
    assert saved(keeper, 1, *trained, {})
    keeper.close()
    names = {path.name for path in (keeper.folder / "step_000001" / "hf").iterdir()}
    assert names == {path.name for path in checkpoint.iterdir()}


class Bomb:
    """Unpickled, it makes a file."""

    def __init__(self, file: Path):
        self.file = file

    def __reduce__(self):
        return Path.touch, (self.file,)


def test_a_checkpoint_from_elsewhere_cannot_run_code(checkpointer, trained, tmp_path):
    """The bomb is in the metadata; the manifest is in order, as whoever planted it would see to."""
    saved(checkpointer(), 1, *trained, {})
    step, crater = checkpointer().folder / "step_000001", tmp_path / "crater"
    good = (step / "dcp" / ".metadata").read_bytes()
    (step / "dcp" / ".metadata").write_bytes(pickle.dumps(Bomb(crater)))
    (step / "manifest.json").unlink()
    Checkpoint(step).write_manifest()
    with pytest.raises(BadData, match=r"\.metadata is refused"):
        checkpointer().resume(*trained)
    assert not crater.exists()
    metadata = pickle.loads(good)
    for place in metadata.storage_data.values():
        place.relative_path = f"../../{place.relative_path}"
    (step / "dcp" / ".metadata").write_bytes(pickle.dumps(metadata))
    (step / "manifest.json").unlink()
    Checkpoint(step).write_manifest()
    with pytest.raises(BadData, match="outside its folder"):
        checkpointer().resume(*trained)


def test_a_checkpoint_of_python_3_13_can_be_read_by_any_other(checkpointer, trained):
    """That Python has its paths in pathlib._local, which others do not know."""
    saved(checkpointer(), 1, *trained, {})
    dcp_folder = checkpointer().folder / "step_000001" / "dcp"
    written = pickle.dumps(pickle.loads((dcp_folder / ".metadata").read_bytes()), protocol=2)
    assert b"cpathlib\nPosixPath\n" in written
    (dcp_folder / ".metadata").write_bytes(written.replace(b"cpathlib\n", b"cpathlib._local\n"))
    name, parameter = next(trained[0].named_parameters())
    read_back = torch.zeros(parameter.shape)
    load_shards({"model": {name: read_back}}, dcp_folder, no_dist=True)
    assert torch.equal(read_back, parameter.full_tensor())


def test_the_optimizers_numbers_cannot_run_code_either(tmp_path):
    crater, saved_bomb = tmp_path / "crater", tmp_path / "dcp"
    dcp.save({"optimizer": {"lr": Bomb(crater)}}, checkpoint_id=saved_bomb, no_dist=True)
    with pytest.raises(CheckpointException, match="Weights only load failed"):
        load_shards({"optimizer": {"lr": 0.1}}, saved_bomb, no_dist=True)
    assert not crater.exists()
    dcp.save({"optimizer": {"lr": 0.5, "betas": (0.9, 0.99)}}, checkpoint_id=saved_bomb, no_dist=True)
    state = {"optimizer": {"lr": 0.1, "betas": (0.0, 0.0)}}
    load_shards(state, saved_bomb, no_dist=True)
    assert state == {"optimizer": {"lr": 0.5, "betas": (0.9, 0.99)}}


def test_what_a_killed_writer_left_behind_is_removed(checkpointer, trained):
    (checkpointer().folder / ".step_000003.partial" / "dcp").mkdir(parents=True)
    assert steps(checkpointer()) == []


def test_a_folder_with_checkpoints_is_refused_where_resuming_is_not_wanted(checkpointer, trained):
    saved(checkpointer(), 1, *trained, {})
    with pytest.raises(FileExistsError, match=r"choose another name or set checkpoint\.resume=auto"):
        checkpointer(resume="never").resume(*trained)


def test_a_model_is_meant_by_its_folder_or_by_a_run(checkpointer, trained, checkpoint, tmp_path):
    saved(checkpointer(), 4, *trained, {})
    run = checkpointer().folder.parent
    assert resolve_model(checkpoint) == checkpoint
    assert resolve_model(run) == run / "checkpoints" / "step_000004" / "hf"
    with pytest.raises(FileNotFoundError, match="is neither a Hugging Face folder"):
        resolve_model(tmp_path / "nowhere")


@pytest.fixture(autouse=True)
def see_errors(caplog):
    caplog.set_level(logging.INFO)
