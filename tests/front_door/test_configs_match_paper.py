"""Every number of the paper's training against the resolved configurations that would be launched."""

import pytest

from dccot.core.config import load_config
from dccot.stages import load_recipe
from dccot.train.config import RLConfig, SFTConfig
from dccot.train.rl import validation_task

NEEDED = ["model.path=m", "data.train=d"]
STAGES = ("stage1", "stage2a", "stage2b", "stage3", "stage4", "hlp", "dsr_hlp_12k", "dsr_hlp_24k")

# One row per line of the paper's table, one value per stage, in the order of STAGES.
TABLE = {
    "steps": (700, 200, 280, 240, 220, 200, 200, 200),
    "optimizer.learning_rate": (7.071e-7, 1.414e-6, 2.828e-6, 2e-6, 2e-6, 2e-6, 2e-6, 2e-6),
    "batch.prompts_rolled_out": (288, 288, 288, 288, 360, 360, 360, 360),
    "batch.prompts": (96, 96, 192, 96, 96, 96, 96, 96),
    "objective.kind": ("dapo", "cispo", "cispo", "cispo", "cispo", "cispo", "cispo", "cispo"),
    "rollout.budget": (7500, 7500, 7500, 7500, 12000, 12000, 12000, 24000),
    "rollout.total_tokens": (None,) * 4 + (21000, 21000, None, None),  # the release's; the paper has none
    "objective.dual_clip": (3.0,) + (None,) * 7,  # the release's; the paper has none
    "reward.cutoff": (2000, 2000, 2000, 2000, 6500, 2000, 2000, 2000),
    "reward.length_penalty": (0.1, 0.1, 0.1, 0.1, 0.1, 0.9, 0.9, 0.9),
    "reward.correct_only": (0.5, 0.5, 0.5, 0.5, 0.5, 0.01, 0.0, 0.0),
    "reward.kind": ("correctness_format",) * 5 + ("high_length_penalty",) * 3,
    "filter": ("include_easy",) * 3 + ("remove_easy",) * 5,
    "prompt.kind": ("parallel",) * 6 + ("sequential",) * 2,
}
MINI_BATCH = (48, 48, 96, 48, 48, 48, 48, 48)

SAME_IN_ALL = {
    "rollout.workers": 3,
    "rollout.temperature": 0.6,
    "rollout.top_p": 1.0,
    "rollout.max_rounds": None,
    "prompt.open_think": True,
    "batch.group_size": 7,
    "advantage": "std",
    "batch.optimizer_steps": 2,
    "objective.clip_low": 0.2,
    "objective.clip_high": 0.28,
    "objective.ratio_cap": 5.0,
    "objective.kl_coefficient": 0.001,
    "objective.rollout_ratio_cap": None,
    "optimizer.betas": [0.9, 0.999],
    "optimizer.weight_decay": 0.01,
    "optimizer.max_grad_norm": 1.0,
    "optimizer.warmup_steps": 0,
    "sharding.master_dtype": "float32",
    "sharding.compute_dtype": "bfloat16",
    "grading.answer_block_only": False,
    "checkpoint.every": 10,
    "validation.every": 20,
    "validation.samples": 50,
    "validation.top_p": 0.95,
    "validation.max_prompt_tokens": 2048,  # the release's
    "format.rule": "strict",
}

SFT = {
    "steps": 1800,
    "batch.examples": 8,
    "rollout.workers": 3,
    "data.max_tokens": 10_000,
    "loss_mean": "examples",  # the release's
    "prompt.kind": "parallel",
    "prompt.open_think": False,
    "optimizer.learning_rate": 5e-6,
    "optimizer.warmup_steps": 105,
    "optimizer.betas": [0.9, 0.999],
    "optimizer.weight_decay": 0.0,
    "optimizer.max_grad_norm": 1.0,
}


def value(config, dotted: str):
    for name in dotted.split("."):
        config = getattr(config, name)
    return config


def stage(name: str) -> RLConfig:
    return load_config(RLConfig, f"configs/rl/{name}.yaml", NEEDED)


@pytest.mark.parametrize(("number", "name"), enumerate(STAGES))
def test_a_stage_has_the_values_of_the_papers_table(number, name):
    config = stage(name)
    assert {key: value(config, key) for key in TABLE} == {key: row[number] for key, row in TABLE.items()}
    assert config.batch.prompts // config.batch.optimizer_steps == MINI_BATCH[number]
    assert config.name == name


@pytest.mark.parametrize("name", STAGES)
def test_what_the_paper_keeps_fixed_is_the_same_in_every_stage(name):
    config = stage(name)
    assert {key: value(config, key) for key in SAME_IN_ALL} == SAME_IN_ALL


@pytest.mark.parametrize(
    ("name", "like", "differs"),
    [
        ("stage1_dapo", "stage1", {"name", "steps"}),
        ("stage2_include_easy", "stage2b", {"name", "steps"}),
        ("cispo_from_start", "stage1", {"name", "objective"}),
    ],
)
def test_runs_about_plateaus_change_nothing_but_what_they_are_about(name, like, differs):
    one, other = vars(stage(name)), vars(stage(like))
    assert {key for key in one if one[key] != other[key]} == differs


def test_runs_about_plateaus_keep_the_rule_that_the_next_stage_drops():
    dapo, include, cispo = map(stage, ("stage1_dapo", "stage2_include_easy", "cispo_from_start"))
    assert (dapo.objective.kind, dapo.steps) == ("dapo", stage("stage2a").steps)
    assert (include.objective.kind, include.filter, include.steps) == ("cispo", "include_easy", stage("stage3").steps)
    assert (cispo.objective.kind, cispo.filter, cispo.steps) == ("cispo", "include_easy", 700)


def test_validation_takes_longer_prompts_than_training():
    """The release: 2,048 tokens in validation."""
    config = stage("stage1")
    assert (config.prompt.max_prompt_tokens, validation_task(config).prompting.max_prompt_tokens) == (1024, 2048)
    config.validation.max_prompt_tokens = None
    assert validation_task(config).prompting.max_prompt_tokens == 1024


def test_sft_has_the_papers_values():
    config = load_config(SFTConfig, "configs/sft.yaml", NEEDED)
    assert {key: value(config, key) for key in SFT} == SFT


def test_sft_warms_up_over_105_steps_and_stays_constant():
    rate = load_config(SFTConfig, "configs/sft.yaml", NEEDED).optimizer.rate
    assert rate(0) == pytest.approx(5e-6 / 105)
    assert rate(51) == pytest.approx(5e-6 * 52 / 105)
    assert rate(104) == rate(105) == rate(1799) == 5e-6


@pytest.mark.parametrize("name", STAGES)
def test_rl_rates_are_constant_from_the_first_step(name):
    config = stage(name)
    assert {config.optimizer.rate(step) for step in (0, 1, 100, 1399)} == {config.optimizer.learning_rate}


@pytest.mark.parametrize(("name", "step"), [("hlp", 180), ("dsr_hlp_12k", 160), ("dsr_hlp_24k", 180)])
def test_the_weights_of_the_step_that_the_paper_evaluates_are_kept(name, step):
    checkpoint = stage(name).checkpoint
    assert step % checkpoint.every == 0
    assert step % checkpoint.keep_hf_every == 0


def test_the_recipe_trains_and_evaluates_what_the_paper_did_each_stage_from_the_one_before():
    _, plans = load_recipe("configs/paper.yaml", ["model=MODEL"])
    starts = {plan.name: plan.start for plan in plans if plan.stage.run in ("sft", "rl")}
    line = ["sft", "stage1", "stage2a", "stage2b", "stage3", "stage4", "hlp"]
    before = dict(zip(line, ["MODEL", *(f"runs/paper/{name}" for name in line)]))
    assert starts == before | {"dsr_hlp_12k": "MODEL", "dsr_hlp_24k": "MODEL"}
    evaluated = {plan.name: plan.load() for plan in plans if plan.stage.run == "eval"}
    rows = {config.model: (config.method, config.budget) for config in evaluated.values() if config.model != "MODEL"}
    assert rows == {
        "dsr_hlp_24k@180": ("sequential", 24000),
        "dsr_hlp_12k@160": ("sequential", 12000),
        "sft": ("parallel", 12000),
        "stage4": ("parallel", 12000),
        "hlp@180": ("parallel", 12000),
    }
    assert sorted(config.budget for config in evaluated.values() if config.model == "MODEL") == [12000, 32768]
    assert {config.grading.golds for config in evaluated.values()} == {"first"}  # the release's
    samples = {b.name: b.samples for config in evaluated.values() for b in config.resolved()}
    assert samples == {"aime24": 200, "amc23": 200, "hmmt25": 200, "math500": 16, "minerva": 16, "olympiadbench": 16}
    assert all(len(config.resolved()) == 6 for config in evaluated.values())


def test_the_recipe_about_plateaus_continues_the_papers_own_stages():
    paper, plateaus = (
        {plan.name: plan for plan in load_recipe(f"configs/{name}.yaml", ["model=MODEL"])[1]}
        for name in ("paper", "plateaus")
    )
    own = {name: plan.start for name, plan in plateaus.items() if name not in paper and plan.stage.run == "rl"}
    starts = {"stage1_dapo": "stage1", "stage2_include_easy": "stage2b", "cispo_from_start": "sft"}
    assert own == {name: f"runs/paper/{start}" for name, start in starts.items()}
    shared = [name for name in plateaus if name in paper]
    assert shared == ["sequential", "rewrite", "sft", "stage1", "stage2a", "stage2b", "stage3", "eval_sft"]
    assert all(plateaus[name].load() == paper[name].load() for name in shared)
