"""Recipes: which stage gets which settings, and what is refused."""

import pytest

from dccot.config import ConfigError
from dccot.pipeline import Context, SharedEngine, load_recipe, stage_overrides
from dccot.train.rl_config import RLConfig

RECIPE = """
name: r
output: OUT
common: {rl: {data.train: "{run}/world/train.jsonl"}}
settings: {stage1: {steps: 3}}
stages:
  - {name: sft, run: sft, config: sft.yaml}
  - {name: stage1, run: rl, config: stage1.yaml, set: {steps: 9, rollout.budget: 300}}
"""


@pytest.fixture
def recipe_file(tmp_path):
    (tmp_path / "stage1.yaml").write_text("reward: {cutoff: 100}")
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE.replace("OUT", str(tmp_path / "runs")))
    return path


def test_a_stage_starts_from_the_one_before_and_settings_win_in_order(recipe_file, tmp_path):
    recipe, extra, beside = load_recipe(recipe_file, ["stage1.seed=7", "seed=5"])
    stage = recipe.stages[1]
    overrides = stage_overrides(recipe, stage, "runs/sft", extra)
    context = Context(recipe, stage, beside / stage.config, "runs/sft", overrides, SharedEngine(), None)
    config = context.load(RLConfig)
    assert (config.model.path, config.steps, config.rollout.budget, config.reward.cutoff) == ("runs/sft", 3, 300, 100)
    assert config.data.train == str(tmp_path / "runs" / "r" / "world" / "train.jsonl")
    assert (config.seed, recipe.seed) == (7, 5)


def test_a_stage_is_named_by_itself_or_by_a_folder_inside(recipe_file):
    recipe, _, _ = load_recipe(recipe_file, [])
    context = Context(recipe, recipe.stages[0], None, None, [], SharedEngine(), None)
    assert context.place("stage1/x") == str(recipe.folder / "stage1" / "x")
    assert context.place("/elsewhere") == "/elsewhere"


@pytest.mark.parametrize(
    "change, said",
    [
        (("run: rl", "run: lr"), "did you mean 'rl'"),
        (("name: stage1", "name: sft"), "two stages are called 'sft'"),
        (("settings: {stage1:", "settings: {stag1:"), "did you mean 'stage1'"),
        (("common: {rl:", "common: {xx:"), "must be one of"),
    ],
)
def test_a_recipe_that_cannot_run_is_refused(recipe_file, change, said):
    recipe_file.write_text(recipe_file.read_text().replace(*change))
    with pytest.raises(ConfigError, match=said):
        load_recipe(recipe_file, [])
