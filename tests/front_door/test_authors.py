"""The recipes that begin with what the paper's authors published, with tiny stand-ins on a hub on loopback."""

from __future__ import annotations

import json
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from dccot.core.config import ConfigError
from dccot.core.files import write_jsonl_atomic
from dccot.eval.results import BENCHMARKS, Evaluation
from dccot.lab.worlds import bigram
from dccot.pipeline import main
from dccot.stages import load_recipe
from tests.support import programs
from tests.support.hub import Hub, environment, use_here

BASE, SFT_SET = "agentica-org/DeepScaleR-1.5B-Preview", "amahanka/DC-CoT-SFT-Dataset"
MODELS = (BASE, "amahanka/DC-CoT", "amahanka/DC-CoT-HLP")
PROBLEMS, DRAWN, RESPONSES = 5, 3, 4
ENGINE = {"dtype": "float32", "context": 1024, "max_sequences": 16, "kv_cache_gb": 0.1}
SMALL = [f"common.eval.engine.{name}={value}" for name, value in ENGINE.items()]
SMALL += ["common.eval.grading.workers=1"]
SMALL += [f"eval_{row}.budget={budget}" for row, budget in {"dsr_32k": 80, "dsr_12k": 40}.items()]
SMALL += ["eval_dc_cot.budget=60", "eval_dc_cot_hlp.budget=60"]


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    """Stand-ins of one shape whose answers are sometimes right."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bigram, "LETTERS", "12" + bigram.SPACE)
        folder = tmp_path_factory.mktemp("models")
        chances = [bigram.Chances(spawn=1 / 40, close=1 / 12, eos=1 / (16 + 8 * i)) for i in range(len(MODELS))]
        made = [bigram.save(folder / str(i), chances=chance, context=65536) for i, chance in enumerate(chances)]
        return dict(zip(MODELS, made))


@pytest.fixture(scope="module")
def sft_set(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("published")
    workers = "".join(f"<worker_{k}>part {k}</worker_{k}>" for k in (1, 2, 3))
    text = f"<think>plan<spawn_workers>{workers}</spawn_workers>so</think><answer>\\boxed{{1}}</answer>"
    write_jsonl_atomic(folder / "train.jsonl", [{"problem": "What?", "parallel_rewritten_completion": text}])
    return folder


def benchmark_files(folder: Path, *more: str) -> None:
    rows = [{"id": f"p{i}", "question": f"What is {i} + {i}?", "gold": ["1", "2", "12"]} for i in range(PROBLEMS)]
    for name in (*BENCHMARKS, *more):
        write_jsonl_atomic(folder / f"runs/data/{name}.jsonl", rows)


# ---- evaluated for real ----


@dataclass
class Quick:
    folder: Path
    home: Path
    url: str  # of a hub that is gone
    served: list[str]
    said: str

    @property
    def results(self) -> Path:
        return self.folder / "runs/authors-quick"


@pytest.fixture(scope="module")
def quick(models, tmp_path_factory) -> Quick:
    """`dccot pipeline configs/authors.yaml --quick` in a folder like a user's."""
    folder = tmp_path_factory.mktemp("user")
    benchmark_files(folder)
    with Hub(models) as hub:
        command = [sys.executable, "-m", "dccot.pipeline", "configs/authors.yaml", "--quick", *SMALL]
        command.append(f"common.eval.max_problems={DRAWN}")
        done = programs.finish(command, cwd=folder, env=os.environ | environment(hub.url, folder / "home"))
        return Quick(folder, folder / "home", hub.url, hub.served, done.stdout)


@pytest.mark.slow
def test_every_published_model_is_downloaded_once_and_evaluated_as_in_the_paper(quick):
    assert quick.served.count("model.safetensors") == len(MODELS)
    for row, (model, method) in {
        "dsr_32k": (BASE, "sequential"),
        "dsr_12k": (BASE, "sequential"),
        "dc_cot": (MODELS[1], "parallel"),
        "dc_cot_hlp": (MODELS[2], "parallel"),
    }.items():
        found = Evaluation.load(quick.results / f"eval_{row}")
        assert f"models--{model.replace('/', '--')}/" in found.model and found.method == method
        assert {(r.problems, r.samples) for r in found.results.values()} == {(DRAWN, RESPONSES)}
        assert list(found.results) == list(BENCHMARKS)


@pytest.mark.slow
def test_console_and_page_show_the_papers_figures_next_to_ours(quick):
    page = (quick.results / "report/report.md").read_text()
    assert "## Against the paper" in page
    mine = Evaluation.load(quick.results / "eval_dc_cot").results["aime24"].estimate("accuracy")
    for text in (quick.said, page.replace("|", " ")):
        for method in ("DSR-32K", "DSR-12K", "Maj-DSR-3", "DC-CoT", "DC-CoT-HLP", "DC-CoT-Maj"):
            rows = re.findall(rf"^ *{method} .* {DRAWN} × {RESPONSES} .*$", text, re.MULTILINE)
            assert len(rows) == 6, method
            if method == "DC-CoT":  # as the paper's appendix has it
                ours, theirs = f"{100 * mine.value:.2f} ± {100 * mine.stderr:.2f}", "41.87"
                assert "AIME 24" in rows[0] and ours in rows[0] and theirs in rows[0] and " 5974 " in rows[0]


@pytest.mark.slow
def test_a_second_start_needs_neither_hub_nor_cache_and_the_whole_recipe_takes_nothing_of_it(
    quick, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(quick.folder)
    again = ["configs/authors.yaml", *SMALL]
    for home in (quick.home, tmp_path / "empty"):
        use_here(monkeypatch, quick.url, home)
        assert main([*again, "--quick", f"common.eval.max_problems={DRAWN}", "--check"]) == 0
        assert "every stage is finished" in capsys.readouterr().out
    use_here(monkeypatch, quick.url, quick.home)
    assert main([*again, "--check"]) == 0
    assert "5 stages can run" in capsys.readouterr().out
    assert main([*again, "--check", "name=authors-quick"]) == 2
    assert f"n was {RESPONSES} when the stage was finished and is None now" in capsys.readouterr().err


# ---- checked ----


@pytest.mark.parametrize("recipe, stages", [("authors", 5), ("paper_published_sft", 19)])
def test_a_check_fetches_small_files_only_and_names_everything_missing(
    recipe, stages, models, sft_set, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ANTHROPIC_API_KEY", raising=False)
    benchmark_files(tmp_path, "deepscaler")
    with Hub(models, {SFT_SET: sft_set}) as hub:
        use_here(monkeypatch, hub.url, tmp_path / "home")
        assert main([f"configs/{recipe}.yaml", "--check"]) == 0
        assert f"{stages} stages can run" in capsys.readouterr().out
        assert hub.served and not [name for name in hub.served if name.endswith((".safetensors", ".jsonl"))]
    use_here(monkeypatch, hub.url, tmp_path / "elsewhere")  # the hub is gone
    Path("runs/data/minerva.jsonl").unlink()
    assert main([f"configs/{recipe}.yaml", "--check"]) == 2
    said = capsys.readouterr().err
    missing = [*(MODELS if recipe == "authors" else (BASE, SFT_SET)), "minerva"]
    assert f"{len(missing)} things are missing or wrong" in said
    assert all(f"hf download {name}" in said or f"fetch {name}" in said for name in missing)


def test_the_published_sft_set_takes_the_place_of_rewriting_and_changes_nothing_else():
    settings = ["model=M", "name=same"]
    _, plans = load_recipe("configs/paper.yaml", settings)
    _, others = load_recipe("configs/paper_published_sft.yaml", settings)
    assert [plan.name for plan in others] == ["published", *(plan.name for plan in plans[2:])]
    for plan, other in zip(plans[2:], others[1:]):
        ours, theirs = plan.load(), other.load()
        if plan.name == "sft":
            assert theirs.data.train == "runs/same/published/sft.jsonl"
            theirs.data.train = ours.data.train
        assert ours == theirs, plan.name


def test_the_published_models_are_evaluated_with_the_papers_settings():
    """Budgets and prompts of its rows in configs/paper.yaml; n: the paper's, because none is set."""
    rows = {plan.name: plan.load() for plan in load_recipe("configs/paper.yaml", [f"model={BASE}"])[1]}
    found = {plan.name: plan.load() for plan in load_recipe("configs/authors.yaml")[1] if plan.name != "report"}
    assert list(found) == ["eval_dsr_32k", "eval_dsr_12k", "eval_dc_cot", "eval_dc_cot_hlp"]
    for name, config in found.items():
        config.model = rows[name].model if "dc_cot" in name else config.model
        assert config == rows[name]
        assert {b.name: b.samples for b in config.resolved()} == {
            "aime24": 200,
            "amc23": 200,
            "hmmt25": 200,
            "math500": 16,
            "minerva": 16,
            "olympiadbench": 16,
        }


def test_a_recipe_without_a_quick_version_and_one_whose_results_would_mix_are_rejected(tmp_path):
    with pytest.raises(ConfigError, match=r"paper\.yaml has no quick version"):
        load_recipe("configs/paper.yaml", ["model=M"], quick=True)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(json.dumps({"stages": {"a": {"run": "eval"}}, "quick": {"seed": 1}}))
    with pytest.raises(ConfigError, match="quick has no name"):
        load_recipe(recipe)
