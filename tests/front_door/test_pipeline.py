"""Recipes: which stage gets which settings, that no two draw the same, and what is refused."""

from __future__ import annotations

import os
from contextlib import nullcontext
from dataclasses import asdict

import pytest

from dccot.core.config import ConfigError, flat, to_yaml
from dccot.core.runtime import Runtime
from dccot.data.problems import Problem, ProblemStream
from dccot.lab.worlds import bigram
from dccot.rollout.engine import EngineConfig
from dccot.rollout.generate import seed_of
from dccot.stages import KINDS, Context, SharedEngine, load_recipe

RECIPE = """
name: r
output: OUT
train: "{run}/world/train.jsonl"
common: {rl: {rollout: {budget: 250, workers: 2}}}
settings: {stage1: {steps: 3}}
prepare:
  base: {run: sft, config: sft.yaml, start: MODEL, set: {data.train: base.jsonl}}
stages:
  sft: {run: sft, config: sft.yaml, set: {data.train: a.jsonl}}
  stage1: {run: rl, config: stage1.yaml, set: {steps: 9, rollout.budget: 300}}
  eval: {run: eval, set: {model: stage1@4, benchmarks: [aime24]}}
"""


@pytest.fixture
def recipe_file(tmp_path):
    (tmp_path / "stage1.yaml").write_text("reward: {cutoff: 100}")
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE.replace("OUT", str(tmp_path / "runs")))
    return path


def test_a_stage_starts_from_the_one_before_and_settings_win_in_order(recipe_file, tmp_path):
    recipe, plans = load_recipe(recipe_file, ["stage1.seed=7", "seed=5", "model=M"])
    assert [plan.start for plan in plans] == ["MODEL", "M", f"{recipe.folder}/sft", f"{recipe.folder}/stage1"]
    config = plans[2].load()
    assert (config.model.path, config.steps, config.reward.cutoff) == (f"{recipe.folder}/sft", 3, 100)
    # of a group of settings only what is named is replaced
    assert (config.rollout.budget, config.rollout.workers) == (300, 2)
    assert config.data.train == str(tmp_path / "runs" / "r" / "world" / "train.jsonl")
    assert (config.seed, recipe.seed) == (7, 5)


def test_the_saved_recipe_is_the_same_recipe(tmp_path):
    """Without the stages it dropped, with what was set on the command line; its own files are found again."""
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "own.yaml").write_text("steps: 5\n")
    (tmp_path / "here" / "r.yaml").write_text(f"base: {os.path.abspath('configs/mini/demo.yaml')}\n")
    given = ["sft.optimizer.learning_rate=0.5", "stage1.rollout={workers: 2}", "stages.stage4.config=own.yaml"]
    recipe, plans = load_recipe(tmp_path / "here" / "r.yaml", [*given, "output=o"])
    assert plans[4].load().optimizer.learning_rate == 0.5 and "hlp" not in recipe.stages
    (tmp_path / "saved.yaml").write_text(to_yaml(recipe))
    again, other = load_recipe(tmp_path / "saved.yaml")
    assert [plan.name for plan in other] == [plan.name for plan in plans]
    assert [plan.load() for plan in other] == [plan.load() for plan in plans]
    assert again == recipe


def test_a_stage_is_named_by_itself_by_a_step_or_by_a_folder_inside(recipe_file):
    recipe, _ = load_recipe(recipe_file)
    assert recipe.place("stage1/x") == str(recipe.folder / "stage1" / "x")
    assert recipe.place("stage1@4") == str(recipe.folder / "stage1@4")
    assert recipe.place("/elsewhere") == "/elsewhere"


@pytest.mark.parametrize(
    "change, said",
    [
        (("run: rl", "run: lr"), "did you mean 'rl'"),
        (("  base: {", "  sft: {"), "'sft' is both in prepare and in stages"),
        (("  sft: {", "  a/b: {"), "a stage is called 'a/b'"),
        (("settings: {stage1:", "settings: {stag1:"), "did you mean 'stage1'"),
        (("common: {rl:", "common: {xx:"), "must be one of"),
        (("config: stage1.yaml", "config: none.yaml"), "stage stage1: no configuration file 'none.yaml'"),
    ],
)
def test_a_recipe_that_cannot_run_is_refused(recipe_file, change, said):
    recipe_file.write_text(recipe_file.read_text().replace(*change, 1))
    with pytest.raises(ConfigError, match=said):
        load_recipe(recipe_file)


@pytest.mark.parametrize("recipe", ["configs/paper.yaml", "configs/mini/mini.yaml"])
def test_no_two_stages_share_a_request_seed_or_the_order_of_their_problems(recipe, tmp_path):
    _, plans = load_recipe(recipe, ["model=M", f"output={tmp_path}"])
    configs = {plan.name: plan.load() for plan in plans}
    seeds = {name: config.seed for name, config in configs.items() if hasattr(config, "seed")}
    assert len(set(seeds.values())) == len(seeds) > 10
    requests = [
        seed_of((seed, step, 0), f"p{problem}", sample, 0, 0)
        for seed in seeds.values()
        for step, problem, sample in FIRST_1000
    ]
    assert len(set(requests)) == len(requests) == 1000 * len(seeds)
    problems = [Problem(str(i), "q", "1") for i in range(100)]
    orders = [tuple(p.id for p in ProblemStream(problems, seed, 100).next_batch()) for seed in seeds.values()]
    assert len(set(orders)) == len(orders)


FIRST_1000 = [(step, problem, sample) for step in range(5) for problem in range(20) for sample in range(10)]

NOT_SIZES = {  # the keys besides sizes in which the miniature differs from the paper's recipe, and why
    "sequential.shuffle": "as the results in the README were made: the paper's order, loss and clip, not the release's",
    "sequential.order": "the same",
    "sft.loss_mean": "the same",
    "stage1.objective.dual_clip": "the same",
    "sequential.prompt.kind": "the base was trained with chat tokens only",
    "sft.prompt.open_think": "the base never writes <think> itself",
    "sft.optimizer.decay_from": "80 steps leave no time for a constant rate",
    "sft.optimizer.decay_to": "the same",
    "hlp.filter": "with nearly every problem always solved, Remove-Easy would find too few",
    "dsr_hlp_12k.filter": "the same",
    "report.rows": "only one sequential budget, and a row for the base after the same RL",
    "report.baselines": "DC-CoT is compared with the base after the same RL",
    "latency.concurrency": "two cores are full with more than one",
    "report.title": "says that it is the miniature",
    "report.kind": "ids of its problems tell their kind",
}
NAMES_OF_SIZES = """
steps examples token_budget threads budget n max_prompt_tokens first cutoff context max_sequences gpu_memory prompts
prompts_rolled_out learning_rate warmup_steps every samples keep keep_hf_every dtype compute_dtype max_rollout_batches
activation_checkpointing whole
"""
SIZES = set(NAMES_OF_SIZES.split())
PLACES = {"name", "output", "seed", "model", "path", "train", "problems", "benchmarks", "source", "validation"}
PLACES |= {"parallel", "sequential", "task"}  # the question is part of where problems come from


def test_the_miniature_is_the_papers_recipe_with_other_sizes():
    paper, mini = (
        {plan.name: plan for plan in load_recipe(f"configs/{name}.yaml", settings)[1]} for name, settings in RECIPES
    )
    ours_alone = ["world", "base", *(f"dsr_{stage}" for stage in STAGES), "eval_dsr_rl"]
    left_out = ["dsr_hlp_24k", "eval_dsr_hlp_24k", "eval_dsr_32k"]
    assert list(mini) == ours_alone + [name for name in paper if name not in left_out]
    differing = set()
    for name, plan in paper.items():
        if name in left_out:
            continue
        assert mini[name].stage.run == plan.stage.run
        ours, theirs = flat(mini[name].load()), flat(plan.load())
        differing |= {
            f"{name}.{key}" for key in ours if ours[key] != theirs[key] and key.split(".")[-1] not in PLACES | SIZES
        }
    assert differing == set(NOT_SIZES)


STAGES = ("stage1", "stage2a", "stage2b", "stage3", "stage4")
RECIPES = (("paper", ["model=MODEL"]), ("mini/mini", []))


def test_in_the_miniature_the_sequential_base_gets_the_same_rl_as_dc_cot():
    plans = {plan.name: plan for plan in load_recipe("configs/mini/mini.yaml")[1]}
    for ours, theirs in [*((stage, f"dsr_{stage}") for stage in STAGES), ("hlp", "dsr_hlp_12k")]:
        one, other = flat(plans[ours].load()), flat(plans[theirs].load())
        allowed = {"name", "seed", "model.path", "prompt.kind"} | (
            {"reward.correct_only", "rollout.total_tokens"} if ours == "hlp" else set()
        )
        assert {key for key in one if one[key] != other[key]} == allowed
    assert {plan.load().budget for name, plan in plans.items() if name.startswith("eval_") or name == "latency"} == {
        640
    }


@pytest.mark.parametrize("recipe", ["configs/mini/modes.yaml", "configs/mini/modes_exact.yaml"])
def test_the_three_modes_are_compared_with_the_same_settings(recipe):
    plans = {plan.name: flat(plan.load()) for plan in load_recipe(recipe)[1]}
    own = {"name", "seed", "rollout.mode", "rollout.max_staleness", "rollout.gpus"}
    for mode in ("partial", "asynchronous"):
        assert {key for key in plans[mode] if plans[mode][key] != plans["synchronous"][key]} <= own
        ours, theirs = plans[f"eval_{mode}"], plans["eval_synchronous"]
        assert {key for key in ours if ours[key] != theirs[key]} == {"seed", "model"}


def test_rl_with_adapters_and_of_all_weights_differ_in_what_is_trained_and_how_fast():
    plans = {plan.name: plan for plan in load_recipe("configs/mini/adapters.yaml")[1]}
    one, other = (flat(plans[name].load()) for name in ("rl_weights", "rl_adapters"))
    assert {key for key in one if one[key] != other[key]} == {"name", "model.lora.rank", "optimizer.learning_rate"}
    assert plans["rl_weights"].start == plans["rl_adapters"].start


def test_the_unmarked_miniature_differs_in_its_solutions_and_in_how_much_sft_it_needs():
    marked, unmarked = (
        {plan.name: flat(plan.load()) for plan in load_recipe(f"configs/mini/{name}.yaml")[1]} for name in NAMES
    )
    differing = {
        f"{stage}.{key}" for stage, found in marked.items() for key in found if found[key] != unmarked[stage][key]
    }
    sft = {
        "sft.steps",
        "sft.checkpoint.every",
        *(f"sft.optimizer.{key}" for key in ("learning_rate", "warmup_steps", "decay_from", "decay_to")),
    }
    assert {key for key in differing if key.rpartition(".")[2] not in PLACES} == {
        "world.marked_parts",
        "sequential.first",
        *sft,
    }


NAMES = ("mini", "unmarked")


def test_a_recipe_leaves_out_what_it_is_told_to_and_its_rows(tmp_path):
    recipe, plans = load_recipe("configs/mini/demo.yaml", [f"output={tmp_path}"])
    assert not {plan.name for plan in plans} & set(recipe.without)
    report = plans[-1].load()
    assert report.rows == {"eval_dsr_12k": "Base", "eval_sft": "SFT", "eval_dc_cot": "DC-CoT"}
    assert report.baselines == {"DC-CoT": "Base", "DC-CoT-Maj": "Base, maj@3", "SFT": "Base"}
    with pytest.raises(ConfigError, match="a name in without is 'stage9'"):
        load_recipe("configs/mini/demo.yaml", ["without=[stage9]"])
    (tmp_path / "one.yaml").write_text("stages: {only: {run: rl}}")
    with pytest.raises(ConfigError, match="without names every stage"):
        load_recipe(tmp_path / "one.yaml", ["without=[only]"])


@pytest.mark.parametrize("recipe, least", [("paper.yaml", 0.6), ("mini/mini.yaml", 0.6)])
def test_all_stages_share_one_engine_that_takes_what_the_most_modest_grants_it(recipe, least, tmp_path):
    _, plans = load_recipe(f"configs/{recipe}", ["model=M"])
    engines = [asdict(config.engine) for config in (plan.load() for plan in plans) if hasattr(config, "engine")]
    assert {engine.pop("gpu_memory") for engine in engines} == {0.6} and len(engines) > 10
    assert all(engine == engines[0] for engine in engines)
    shared = SharedEngine(plans, tmp_path)
    assert (shared.gpu_memory, shared.sleeps) == (least, True)
    _, plans = load_recipe(f"configs/{recipe}", ["model=M", "eval_sft.engine.gpu_memory=0.5"])
    assert SharedEngine(plans, tmp_path).gpu_memory == 0.5
    assert not SharedEngine([plan for plan in plans if plan.stage.run == "eval"], tmp_path).sleeps


def test_the_shared_engine_sleeps_during_sft_and_is_woken_for_the_next_stage_that_samples(
    recipe_file, tmp_path, monkeypatch
):
    """The order of calls alone: an engine can only sleep on a GPU."""
    happened = []

    class Recording:
        sleep = lambda self: happened.append("sleep")
        wake = lambda self: happened.append("wake")
        load = lambda self, parameters: happened.append("load")

    model = bigram.save(tmp_path / "model", "single")
    monkeypatch.setattr("dccot.stages.open_training_engine", lambda *_, sleeps, **__: nullcontext(Recording()))
    monkeypatch.setattr("dccot.train.sft.train", lambda config: happened.append("train"))
    _, plans = load_recipe(recipe_file, ["model=M"])
    engines = SharedEngine(plans, tmp_path)
    assert SharedEngine([plans[1], plans[3]], tmp_path).sleeps  # SFT and evaluation
    KINDS["sft"](Context(plans[1], engines, Runtime.alone()), plans[1].load())
    engines.on(model, EngineConfig())
    KINDS["sft"](Context(plans[1], engines, Runtime.alone()), plans[1].load())
    engines.on(model, EngineConfig())
    assert happened == ["train", "sleep", "train", "wake", "load"]
