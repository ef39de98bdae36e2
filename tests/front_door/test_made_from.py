"""A finished stage knows what it was made from: other settings and inputs are refused, and that changes nothing."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dccot import __version__
from dccot.pipeline import main
from dccot.stages import load_recipe, made_by
from tests.support import programs

pytestmark = pytest.mark.slow

RECIPE = """
name: r
output: OUT
common:
  sft: {steps: 2, batch: {examples: 2, token_budget: 2000}, sharding.compute_dtype: float32, threads: 1}
prepare:
  world: {run: "dccot.lab.worlds.stages:arithmetic", set: {base_examples: 8, train: 4, validation: 2, test: 2,
    larger: 1, model: {hidden_size: 32, intermediate_size: 32, num_hidden_layers: 1, num_attention_heads: 1}}}
  base: {run: sft, config: mini/base.yaml, start: world/init, set: {data.train: "{run}/world/base.jsonl"}}
  again: {run: sft, config: mini/base.yaml, start: base, set: {data.train: "{run}/world/base.jsonl"}}
stages:
  last: {run: sft, config: mini/base.yaml, start: again, set: {data.train: "{run}/world/base.jsonl"}}
"""


def write_recipe(folder: Path) -> Path:
    (folder / "recipe.yaml").write_text(RECIPE.replace("OUT", str(folder)))
    return folder / "recipe.yaml"


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("finished")
    assert main([str(write_recipe(folder))]) == 0
    return folder / "r"


@pytest.fixture
def recipe(finished, tmp_path) -> Path:
    """The same, finished elsewhere: moving a recipe's folder changes nothing."""
    shutil.copytree(finished, tmp_path / "r")
    return write_recipe(tmp_path)


def everything(folder: Path) -> dict[str, bytes]:
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != ".lock")
    return {str(path): path.read_bytes() for path in files}


def refused(recipe: Path, capsys, *settings: str) -> str:
    """What a start says that changes nothing."""
    before = everything(recipe.parent)
    assert main([str(recipe), *settings]) == 2
    assert everything(recipe.parent) == before
    return capsys.readouterr().err


def test_a_finished_recipe_is_passed_over_even_if_it_was_moved_and_its_files_touched(recipe, capsys):
    (recipe.parent / "r" / "world" / "base.jsonl").touch()
    assert main([str(recipe)]) == 0
    assert capsys.readouterr().out.count("done before") == 4


@pytest.mark.parametrize("setting, said", [
    ("base.steps=3", "steps was 2 when the stage was finished and is 3 now   (base.steps)"),
    ("base.optimizer.learning_rate=0.125", "optimizer.learning_rate was"),
    ("seed=5", "(world.seed)"),
])  # fmt: skip
def test_other_settings_are_named_and_refused_and_recipe_yaml_stays(recipe, capsys, setting, said):
    text = refused(recipe, capsys, setting)
    assert said in text
    assert ("--redo world --redo base --redo again --redo last" if setting == "seed=5" else "or: --redo base\n") in text


def test_changed_data_and_a_changed_model_are_refused_by_their_content(recipe, capsys):
    run = recipe.parent / "r"
    before = (run / "world" / "base.jsonl").read_text()
    (run / "world" / "base.jsonl").write_text(before.replace("1", "2"))
    changed = "has changed since the stage was finished"
    assert f"data.train {changed}   (base.data.train, again.data.train" in refused(recipe, capsys)
    (run / "world" / "base.jsonl").write_text(before)
    weights = run / "world" / "init" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    assert f"model.path {changed} (model.safetensors)   (base.model.path)" in refused(recipe, capsys)


def test_an_input_that_is_gone_is_not_asked_for_by_a_finished_stage(recipe):
    shutil.rmtree(recipe.parent / "r" / "world" / "init")
    assert main([str(recipe)]) == 0


def test_redo_keeps_the_old_results_and_a_later_stage_that_was_made_from_them_stops(recipe, capsys):
    run = recipe.parent / "r"
    weights = "checkpoints/step_000002/hf/model.safetensors"
    before = (run / "base" / weights).read_bytes()
    assert main([str(recipe), "base.optimizer.learning_rate=0.125", "--redo", "base"]) == 2
    said = capsys.readouterr()
    assert f"base: done again; what was there is in {run}/replaced/base-1" in said.out
    assert (run / "replaced" / "base-1" / weights).read_bytes() == before != (run / "base" / weights).read_bytes()
    assert "stage again: model.path has changed since the stage was finished (model.safetensors)" in said.err
    assert main([str(recipe), "base.optimizer.learning_rate=0.125", "--redo", "again", "--redo", "last"]) == 0
    assert "[2/4] base: done before" in capsys.readouterr().out


def test_redo_that_was_stopped_goes_on_when_the_same_command_is_given_again(recipe, capsys):
    run = recipe.parent / "r"
    (run / "last" / "done.json").unlink()
    assert main([str(recipe), "--redo", "last"]) == 0
    assert (run / "last" / "done.json").is_file() and not (run / "replaced").exists()
    # it was started again, in its own folder
    assert len(json.loads((run / "last" / "provenance.json").read_text())["starts"]) == 2


def test_redo_of_a_stage_that_is_not_there_is_refused(recipe, capsys):
    said = refused(recipe, capsys, "--redo", "bas")
    assert "--redo is 'bas'; it must be one of world, base, again, last; did you mean 'base'?" in said


def test_other_code_is_said_and_not_refused(recipe, capsys):
    mark = recipe.parent / "r" / "base" / "done.json"
    told = json.loads(mark.read_text())
    told["made_from"]["code"]["sha256"] = "0" * 64
    mark.write_text(json.dumps(told))
    assert main([str(recipe)]) == 0
    assert "made by other code than this (" in (said := capsys.readouterr().out) and "): base\n" in said
    on_the_page = made_by(load_recipe(recipe)[0])
    assert on_the_page.count(f"dccot {__version__}, ") == 2 and "source 00000000" in on_the_page


def test_a_setting_that_did_not_exist_yet_is_a_change_only_if_it_is_not_its_default(recipe, capsys):
    mark = recipe.parent / "r" / "base" / "done.json"
    told = json.loads(mark.read_text())
    sharding = told["made_from"]["configuration"]["sharding"]
    del sharding["reduce_once"]
    sharding["skip_below"] = 0.0  # and one that exists no longer is none
    mark.write_text(json.dumps(told))
    assert main([str(recipe)]) == 0
    said = refused(recipe, capsys, "base.sharding.reduce_once=false")
    assert "sharding.reduce_once was True when the stage was finished and is False now" in said


def test_a_setting_whose_default_is_not_what_was_done_before_is_a_change(recipe, capsys):
    """SFT used to take the mean over tokens."""
    mark = recipe.parent / "r" / "base" / "done.json"
    told = json.loads(mark.read_text())
    del told["made_from"]["configuration"]["loss_mean"]
    mark.write_text(json.dumps(told))
    said = refused(recipe, capsys, "base.loss_mean=examples")
    assert "loss_mean was 'tokens' when the stage was finished and is 'examples' now" in said
    assert main([str(recipe), "base.loss_mean=tokens"]) == 0


def test_a_mark_from_before_marks_said_what_they_were_made_from_is_taken(recipe):
    (recipe.parent / "r" / "base" / "done.json").write_text('{"seconds": 1.5}')
    assert main([str(recipe), "base.steps=3"]) == 0


def test_a_recipe_that_another_job_runs_is_refused(recipe, capsys):
    hold = "import sys; from dccot.core.run import Run; print(Run(sys.argv[1]).claim(), flush=True); input()"
    other = programs.Popen(
        [sys.executable, "-c", hold, recipe.parent / "r"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert other.stdout.readline() == "None\n"
        assert f"is being written by process {other.pid}" in refused(recipe, capsys)
    finally:
        other.communicate("\n")


def test_the_recipe_and_each_training_stage_say_what_they_were_made_of(recipe):
    run = recipe.parent / "r"
    [start] = json.loads((run / "base" / "provenance.json").read_text())["starts"]
    assert start["configuration"]["steps"] == 2
    assert set(start["inputs"]) == {"model.path", "data.train"} and "model.safetensors" in start["inputs"]["model.path"]
    assert start["packages"]["torch"].startswith("2.") and start["machines"][0]["cores"] == os.cpu_count()
    [start] = json.loads((run / "provenance.json").read_text())["starts"]
    assert start["configuration"]["name"] == "r" and start["code"]["version"]
