"""`--check`: a recipe whose inputs are all there passes, and each input that is missing is named, alone, with the
stages that need it.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from dccot.core.config import ConfigError
from dccot.lab.worlds import bigram
from dccot.pipeline import main
from dccot.preflight import check_recipe, made_from
from dccot.stages import load_recipe

BENCHMARKS = ("aime24", "amc23", "hmmt25", "math500", "minerva", "olympiadbench")
DATA = [f"runs/data/{name}.jsonl" for name in ("deepscaler", *BENCHMARKS)]


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> Path:
    """DeepScaleR's place: a tiny model with its context length."""
    folder = bigram.save(tmp_path_factory.mktemp("models") / "MODEL", "spelled", context=65536)
    return folder


@pytest.fixture
def inputs(tmp_path, model, monkeypatch) -> Path:
    """Everything that the paper's recipe reads, in a folder like a user's."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ANTHROPIC_API_KEY", "planted")
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage._replace(free=10**12))
    shutil.copytree(model, "MODEL")
    row = {"id": "1", "question": "What is 1 + 1?", "gold": "2"}
    for name in DATA:
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(json.dumps(row) + "\n")
    return tmp_path


def faults(*settings: str, recipe: str = "configs/paper.yaml", ranks: int = 8) -> dict[str, set[str]]:
    """What is wrong → where."""
    found: dict[str, set[str]] = {}
    for place, message in check_recipe(*load_recipe(recipe, ["model=MODEL", *settings]), ranks=ranks).faults:
        found.setdefault(message, set()).add(place)
    return found


def test_the_papers_recipe_with_all_inputs_can_run(inputs, capsys):
    assert faults() == {}
    assert main(["configs/paper.yaml", "model=MODEL", "--check"]) == 0
    assert "20 stages can run; checkpoints, rollouts and evaluations will take" in capsys.readouterr().out
    assert not Path("runs/paper").exists()  # nothing was written


def test_the_recipe_about_plateaus_can_run(inputs):
    assert faults(recipe="configs/plateaus.yaml") == {}


@pytest.mark.parametrize("name", DATA)
def test_a_missing_file_is_the_only_fault_and_names_its_stages(inputs, name):
    Path(name).unlink()
    [(message, places)] = faults().items()
    assert f"no problem file {name!r}; `dccot data fetch {Path(name).stem}`" in message
    evaluations = {
        f"eval_{row}.benchmarks"
        for row in ("dsr_32k", "dsr_12k", "dsr_hlp_24k", "dsr_hlp_12k", "sft", "dc_cot", "dc_cot_hlp")
    }
    trained = {"stage1", "stage2a", "stage2b", "stage3", "stage4", "hlp", "dsr_hlp_12k", "dsr_hlp_24k"}
    expected = {"deepscaler": {"sequential.problems"} | {f"{stage}.data.train" for stage in trained}}
    expected["aime24"] = evaluations | {f"{stage}.data.validation" for stage in trained} | {"latency.problems"}
    assert places == expected.get(Path(name).stem, evaluations)


def test_a_missing_model_names_every_stage_that_begins_with_it(inputs):
    shutil.rmtree("MODEL")
    [(message, places)] = faults().items()
    assert "'MODEL' is neither a Hugging Face folder" in message
    began = {
        "sequential.model",
        "sft.model.path",
        "dsr_hlp_12k.model.path",
        "dsr_hlp_24k.model.path",
        "latency.sequential",
    }
    assert places == began | {"eval_dsr_32k.model", "eval_dsr_12k.model"}


def test_a_missing_key_names_its_variable(inputs, monkeypatch):
    monkeypatch.delenv("ANTHROPIC_API_KEY")
    said = "the environment variable ANTHROPIC_API_KEY (endpoint.key_variable) is not set"
    assert faults() == {f"{said}; a server without keys: endpoint.key_variable=": {"rewrite"}}


def test_a_finished_rewriting_needs_no_key(inputs, monkeypatch):
    _, plans = load_recipe("configs/paper.yaml", ["model=MODEL"])
    [plan] = [plan for plan in plans if plan.name == "rewrite"]
    plan.folder.mkdir(parents=True)
    plan.home.finish({"seconds": 1.0, "made_from": made_from(plan, plan.load())})
    monkeypatch.delenv("ANTHROPIC_API_KEY")
    assert faults() == {}


def test_rewriting_through_an_api_is_refused_on_several_ranks_with_the_command_to_run_first(inputs, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.delenv("ANTHROPIC_API_KEY")  # the GPUs' machine needs none
    [(message, places)] = faults().items()
    assert places == {"rewrite"} and "8 ranks would wait" in message
    assert "--until rewrite" in message and "with --until sequential" in message
    assert faults("rewrite.by=dccot.lab.worlds.arithmetic:rewrite_parallel") == {}


def test_until_checks_and_runs_the_first_stages_only(inputs, monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "8")
    Path("runs/data/minerva.jsonl").unlink()
    assert main(["configs/paper.yaml", "model=MODEL", "--until", "sequential", "--check"]) == 0
    assert "1 stage can run" in capsys.readouterr().out
    assert main(["configs/paper.yaml", "model=MODEL", "--until", "sequental", "--check"]) == 2
    assert "did you mean 'sequential'" in capsys.readouterr().err


def test_all_faults_are_reported_at_once(inputs, monkeypatch, capsys):
    monkeypatch.delenv("ANTHROPIC_API_KEY")
    Path("runs/data/minerva.jsonl").unlink()
    code = main(["configs/paper.yaml", "model=MODEL", "stage3.steps=0", "stage4.rollout.budget=100000", "--check"])
    said = capsys.readouterr().err
    assert code == 2 and "4 things are missing or wrong" in said
    for part in (
        "ANTHROPIC_API_KEY",
        "'runs/data/minerva.jsonl'",
        "steps is 0; it must be at least 1   (stage3)",
        "101,024",
    ):
        assert part in said


def test_validation_without_problems_is_a_fault(inputs):
    found = faults("validation=null")
    assert found.pop("validation is not set; give validation=… on the command line") == {"latency.problems"}
    [(message, places)] = found.items()
    assert "data.validation is not set, and validation.every is 20" in message and "stage1" in places


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        (
            "eval_dc_cot_hlp.model=hlp@185",
            "hlp will not keep step 185: it has 200 steps and checkpoint.keep_hf_every is 20",
        ),
        ("eval_dc_cot_hlp.model=hlp@220", "hlp will not keep step 220"),
        ("eval_dc_cot_hlp.model=hlp@last", "hlp@last names no step; write hlp@NUMBER or hlp@best"),
        (
            "stage1.model.path=runs/paper/stage4",
            "runs/paper/stage4 is produced by stage stage4, which runs later",
        ),
        ("report.rows={stage1: X}", "a key of rows is 'stage1'; it must be one of eval_dsr_32k"),
        ("report.baselines={DC-CoT: DSR}", "a name in baselines is 'DSR'; it must be one of DSR-32K"),
        ("eval_sft.model=rewrite", "stage rewrite trains no model; name one that does"),
        ("sft.data.train=runs/paper/rewirte/sft.jsonl", "no SFT set"),
        ("report.kind='-[a-z]+-'", "it must have one group"),
        ("report.kind='-([a-z+-'", "not a regular expression"),
        ("report.other_seeds=[nowhere]", "no file 'nowhere/recipe.yaml'"),
        ("report.rows={eval_sft: A, eval_dc_cot: A}", "two rows are called 'A'"),
        ("benchmarks=[a/test.jsonl, b/test.jsonl]", "two benchmarks are called 'test'"),
        ("eval_sft.method=paralel", "method is 'paralel'; it must be one of parallel, sequential"),
        ("eval_sft.n=0", "n is 0"),
        ("stage1.validation.max_prompt_tokens=60000", "validation.max_prompt_tokens + rollout.budget is 67,500"),
        ("latency.concurrency=[]", "concurrency is not set"),
        ("latency.concurrency=[0, 1]", "concurrency[0] is 0"),
        ("stage1.step=3", "unknown key step"),
        ("rewrite.by=rul", "by is 'rul'"),
        ("eval_sft.model=''", "model is not set; name a stage of the recipe, a folder or a hub id"),
        ("latency.parallel=''", "parallel is not set"),
    ],
)
def test_references_between_stages_are_checked(inputs, setting, said):
    [(message, _)] = faults(setting).items()
    assert said in message


@pytest.mark.parametrize("step", ["@180", "@200", "@best", ""])
def test_steps_that_will_be_kept_are_no_faults(inputs, step):
    assert faults(f"eval_dc_cot_hlp.model=hlp{step}") == {}


def test_a_disk_that_is_too_small_is_a_fault(inputs, monkeypatch):
    usage = shutil.disk_usage(inputs)
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage._replace(free=1000))
    [(message, places)] = faults().items()
    assert "evaluations will take about" in message and places == {"all.output"}


def test_training_that_does_not_fit_the_memory_is_a_fault(inputs, monkeypatch):
    monkeypatch.setattr("dccot.preflight._memory_per_rank", lambda: (1e6, "the GPU"))
    assert any(
        "training needs about" in message and "stage1.batch.token_budget" in places
        for message, places in faults().items()
    )


def test_a_finished_stage_needs_nothing(inputs):
    Path("runs/paper/sequential").mkdir(parents=True)
    Path("runs/paper/sequential/done.json").write_text('{"seconds": 1}')
    Path("runs/data/deepscaler.jsonl").unlink()
    [(_, places)] = faults().items()
    assert "sequential.problems" not in places and "stage1.data.train" in places


@pytest.mark.parametrize("recipe", ["configs/mini/mini.yaml", "configs/mini/demo.yaml"])
def test_the_miniatures_make_everything_they_need(tmp_path, monkeypatch, recipe):
    monkeypatch.chdir(tmp_path)
    assert check_recipe(*load_recipe(recipe), ranks=2).faults == []


def test_a_list_of_stages_is_refused(tmp_path):
    (tmp_path / "old.yaml").write_text("stages: [{name: sft, run: sft}]")
    with pytest.raises(ConfigError, match=r"stages is .* it must be a mapping of names to values"):
        load_recipe(tmp_path / "old.yaml")


def test_ranks_without_work_are_remarked_with_a_layout(inputs):
    """SFT has 8 examples per step; RL 96 prompts of 7 responses in two updates, 336."""
    recipe = load_recipe("configs/paper.yaml", ["model=MODEL"])
    assert check_recipe(*recipe, ranks=8).idle == {}
    found = check_recipe(*recipe, ranks=512)
    assert found.faults == []
    assert "504 of 512 ranks would train nothing" in found.idle["sft"]
    assert "176 of 512 ranks would train nothing" in found.idle["stage1"]
    assert "sharding.context_parallel=2" in found.idle["stage1"]
    assert found.idle["stage1"] in "\n".join(found.remarks())


def test_a_layout_that_does_not_divide_the_ranks_is_a_fault(inputs):
    assert "sharding.context_parallel is 3; it must divide the 8 ranks" in faults("sft.sharding.context_parallel=3")
