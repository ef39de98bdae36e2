"""Recipes: which stage gets which settings, and what is refused before the first stage starts."""

import pytest

from dccot.config import ConfigError
from dccot.pipeline import Context, load_recipe, prepare
from dccot.stages import KINDS

RECIPE = """
name: r
output: OUT
common: {rl: {data.train: "{run}/world/train.jsonl"}}
settings: {stage1: {steps: 3}}
stages:
  - {name: world, run: world}
  - {name: sft, run: sft, start: world/init, set: {data.train: "{run}/world/base.jsonl"}}
  - {name: stage1, run: rl, config: stage1.yaml, set: {steps: 9, rollout.budget: 300}}
  - {name: measure, run: eval, set: {problems: ["{run}/world/test.jsonl"]}}
  - {name: clock, run: latency, set: {parallel: stage1, sequential: sft@best, problems: "{run}/world/test.jsonl"}}
  - {name: page, run: report, set: {rows: {measure: Ours}, baselines: {"Ours, maj@3": Ours}, kind: "-([a-z]+)-"}}
"""


@pytest.fixture
def recipe_file(tmp_path):
    (tmp_path / "stage1.yaml").write_text("reward: {cutoff: 100}")
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE.replace("OUT", str(tmp_path / "runs")))
    return path


def configs_of(recipe_file, *overrides):
    return {context.stage.name: context.config for context in prepare(recipe_file, overrides)[1]}


def test_a_stage_starts_from_the_one_before_and_settings_win_in_order(recipe_file, tmp_path):
    run = tmp_path / "runs" / "r"
    configs = configs_of(recipe_file, "stage1.seed=7", "seed=5")
    config = configs["stage1"]
    assert (config.model.path, config.steps, config.rollout.budget, config.reward.cutoff) == (str(run / "sft"), 3, 300, 100)
    assert config.data.train == str(run / "world" / "train.jsonl")
    assert (config.seed, configs["sft"].seed, configs["world"].seed, configs["measure"].seed) == (7, 5, 5, 5)
    assert configs["sft"].model.path == str(run / "world" / "init")
    assert configs["measure"].model == str(run / "stage1")


def test_a_stage_is_named_by_itself_by_a_checkpoint_or_by_a_folder_inside(recipe_file, tmp_path):
    recipe, _, _ = load_recipe(recipe_file, [])
    context = Context(recipe, recipe.stages[3], {"world": "world", "sft": "sft"}, None)
    assert context.model("world/init", "model") == str(recipe.folder / "world" / "init")
    assert context.model("sft@best", "model") == str(recipe.folder / "sft@best")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "config.json").write_text("{}")
    assert context.model(str(tmp_path / "elsewhere"), "model") == str(tmp_path / "elsewhere")


@pytest.mark.parametrize(
    "change, said",
    [
        (("run: rl", "run: lr"), "did you mean 'rl'"),
        (("name: stage1", "name: sft"), "two stages are called 'sft'"),
        (("name: sft", "name: ../sft"), "a stage is called '../sft'"),
        (("settings: {stage1:", "settings: {stag1:"), "did you mean 'stage1'"),
        (("common: {rl:", "common: {xx:"), "must be one of"),
        (("name: r\n", 'name: ""\n'), "names the recipe's folder"),
        (("settings: {", "seed: -1\nsettings: {"), "seed is -1"),
        (("start: world/init", "start: wrold/init"), "stage sft: 'wrold/init' is neither"),
        (("start: world/init", "start: stage1"), "does not come before stage sft"),
        (("start: world/init", "start: world"), "'world', a stage that trains no model"),
        (("start: world/init", "start: null"), "stage sft: model.path is not set"),
        (("{run}/world/base", "{run}/wrold/base"), "stage sft: data.train reads {run}/wrold"),
        (("{run}/world/base", "{run}/measure/base"), "stage sft: data.train reads {run}/measure"),
        (("config: stage1.yaml", "config: stage2.yaml"), "stage stage1: no configuration file"),
        (("steps: 3", "step: 3"), "stage stage1: unknown key step"),
        (('set: {problems: ["{run}/world/test.jsonl"]}', "set: {}"), "stage measure: problems is not set"),
        (("eval, set: {", "eval, set: {n: 0, "), "stage measure: n is 0"),
        (("eval, set: {", "eval, set: {budget: 0, "), "stage measure: budget is 0"),
        (("eval, set: {", "eval, set: {method: paralel, "), "stage measure: prompt.kind is 'paralel'"),
        (("eval, set: {", "eval, set: {model: page, "), "'page', which does not come before"),
        (('["{run}/world/test.jsonl"', '[a/test.jsonl, "{run}/world/test.jsonl"'), "two files of problems are called 'test'"),
        (("parallel: stage1, ", ""), "stage clock: parallel is not set"),
        (("sequential: sft@best, ", ""), "stage clock: sequential is not set"),
        (("parallel: stage1", "parallel: stage9"), "stage clock: 'stage9' is neither"),
        ((', problems: "{run}/world/test.jsonl"', ""), "stage clock: problems is not set"),
        (("latency, set: {", "latency, set: {concurrency: [], "), "concurrency is empty"),
        (("latency, set: {", "latency, set: {concurrency: [0, 1], "), "concurrency is 0"),
        (("rows: {measure:", "rows: {measur:"), "stage page: a stage in rows is 'measur'.*did you mean 'measure'"),
        (("rows: {measure:", "rows: {clock:"), "stage page: a stage in rows is 'clock'"),
        (("rows: {measure: Ours}", "rows: {measure: Theirs}"), "stage page: a name in baselines is 'Ours'"),
        (("-([a-z]+)-", "-[a-z]+-"), "it must have one group"),
        (("-([a-z]+)-", "-([a-z+-"), "no regular expression"),
        (('kind: "-([a-z]+)-"', "other_seeds: [nowhere]"), "nowhere holds no recipe.yaml"),
    ],
)
def test_a_recipe_that_cannot_run_is_refused(recipe_file, change, said):
    text = recipe_file.read_text()
    assert change[0] in text
    recipe_file.write_text(text.replace(*change))
    with pytest.raises(ConfigError, match=said):
        prepare(recipe_file)


@pytest.mark.parametrize("kind", [name for name in KINDS if name != "world"])
def test_a_stage_alone_with_nothing_set_is_refused_whatever_its_kind(tmp_path, kind):
    path = tmp_path / "recipe.yaml"
    path.write_text(f"output: {tmp_path}/runs\nstages: [{{name: only, run: {kind}}}]")
    with pytest.raises(ConfigError, match=r"stage only: .* set"):
        prepare(path)


def test_sizes_of_a_world_that_hold_nothing_are_refused(recipe_file):
    with pytest.raises(ConfigError, match="stage world: test is 0"):
        prepare(recipe_file, ["world.test=0"])
    with pytest.raises(ConfigError, match=r"stage world: model.num_attention_heads is 0"):
        prepare(recipe_file, ["world.model.num_attention_heads=0"])


def test_how_solutions_are_rewritten_is_one_of_two(recipe_file):
    text = recipe_file.read_text().replace(
        "\n  - {name: sft", '\n  - {name: w, run: rewrite, set: {by: rul, source: "{run}/world/x"}}\n  - {name: sft'
    )
    recipe_file.write_text(text)
    with pytest.raises(ConfigError, match=r"stage w: by is 'rul'.*did you mean 'rule'"):
        prepare(recipe_file)
    assert configs_of(recipe_file, "w.by=rule")["w"].by == "rule"
