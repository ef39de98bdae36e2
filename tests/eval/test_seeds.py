"""Several seeds as one table, and what the demo says in words: against means worked out by hand."""

import pytest

from dccot.core.files import BadData
from dccot.eval.report import main
from dccot.eval.results import BenchmarkResult, Evaluation, rows_of
from dccot.lab.worlds.demo import COLUMNS, cell, plain_words

ROWS = {"base": "Base", "sft": "SFT", "dc": "DC-CoT", "hlp": "DC-CoT-HLP", "dsr": "Base-HLP"}
ACCURACIES, LENGTHS = [0.6, 0.5, 0.7, 0.69, 0.6], [200, 150, 100, 80, 160]
SHARES = {"well_formed": 1.0, "spawned": 0.5, "parallelism": 1.5, "truncated": 0.0}


def finished(folder, accuracies=ACCURACIES, lengths=LENGTHS):
    """A recipe's folder with an evaluation of two problems per row: one a percent above, one below the mean."""
    for stage, accuracy, length in zip(ROWS, accuracies, lengths):
        values = {"accuracy": accuracy, "longest_path": length, "total_tokens": 2 * length} | SHARES
        by_problem = {name: {"a": value * 1.01, "b": value * 0.99} for name, value in values.items()}
        (folder / f"eval_{stage}").mkdir(parents=True)
        results = {"test": BenchmarkResult("test", "Test", 1, {}, by_problem)}
        model = f"runs/x/{stage}/checkpoints/step_000016/hf"
        Evaluation(f"eval_{stage}", model, "parallel", 10, results).save(folder / f"eval_{stage}")
    rows = "".join(f"        eval_{stage}: {shown}\n" for stage, shown in ROWS.items())
    (folder / "recipe.yaml").write_text(f"name: x\nstages:\n  report:\n    run: report\n    set:\n      rows:\n{rows}")
    return folder


def test_recipes_with_several_seeds_show_their_mean_and_every_seeds_value(tmp_path):
    one = finished(tmp_path / "one")
    two = finished(tmp_path / "two", [0.8, 0.5, 0.9, 0.8, 0.6], [220, 150, 110, 80, 160])
    assert main([str(one), str(two), "--out", str(tmp_path / "report")]) == 0
    text = (tmp_path / "report" / "report.md").read_text()
    assert "2 seeds" in text and "one, two" in text
    assert "| Base | 70.0 (60.0, 80.0) | – | 210.0 (200.0, 220.0) |" in text
    assert "| DC-CoT | 80.0 (70.0, 90.0) | – | 105.0 (100.0, 110.0) |" in text
    assert main([str(one), "--out", str(tmp_path / "alone")]) == 0
    text = (tmp_path / "alone" / "report.md").read_text()
    assert "| DC-CoT | 70.00 ± 0.70 |" in text and "seeds" not in text


def trained(folder, stage, start="base", **changes):
    """The configuration of an RL run."""
    made = {"steps": 16, "budget": 448, "cutoff": 48, "length_penalty": 0.9, "filter": "remove_easy"} | changes
    (folder / stage).mkdir()
    reward = f"{{kind: high_length_penalty, length_penalty: {made['length_penalty']}, cutoff: {made['cutoff']}}}"
    settings = f"steps: {made['steps']}\nfilter: {made['filter']}\nmodel: {{path: runs/x/{start}}}\n"
    (folder / stage / "config.yaml").write_text(f"{settings}rollout: {{budget: {made['budget']}}}\nreward: {reward}\n")


def test_the_demos_sentences_say_what_the_table_says(tmp_path):
    run = finished(tmp_path / "one")
    for stage in ("hlp", "dsr"):
        trained(run, stage, start=f"{stage}_before")
        trained(run, f"{stage}_before", steps=3)
    said = " ".join(plain_words(rows_of(run), run))
    both = "high length penalty on top: longest path 50% shorter, at +9.0 points"
    shorter = "50% shorter than the base's", "33% shorter than after SFT"
    for fact in ("solves 60.0%", "by -10.0 points", "a further +20.0", *shorter, both):
        assert fact in said


UNLIKE = [{"steps": 32}, {"budget": 224}, {"cutoff": 96}, {"length_penalty": 0.5}, {"filter": "none"}]
UNLIKE += [{"start": "before"}, None]  # None: the other run's configuration does not exist


@pytest.mark.parametrize("unlike", UNLIKE)
def test_the_demo_says_nothing_about_models_whose_rl_was_not_the_same(tmp_path, unlike):
    run = finished(tmp_path / "one")
    trained(run, "dsr")
    trained(run, "before")
    if unlike is not None:
        trained(run, "hlp", **unlike)
    said = plain_words(rows_of(run), run)
    assert len(said) == 2 and "penal" not in " ".join(said)


def test_the_demos_table_shows_parallelism(tmp_path):
    rows = rows_of(finished(tmp_path / "one"))
    assert cell(rows["DC-CoT-HLP"], *COLUMNS["parallelism"]).startswith("1.50 ± 0.0")  # problems: 1.515 and 1.485


def test_a_recipe_without_a_report_and_a_folder_without_a_recipe_cost_one_line(tmp_path, capsys):
    (tmp_path / "recipe.yaml").write_text("stages: {}\n")
    with pytest.raises(BadData, match="no report stage"):
        rows_of(tmp_path)
    one = finished(tmp_path / "one")
    two = finished(tmp_path / "two", [0.6, 0.5], [200, 150])
    assert main([str(one), str(two)]) == 2
    assert "two/eval_dc/summary.json does not exist" in capsys.readouterr().err


def test_an_unfinished_recipe_shows_what_it_has_its_training_included(tmp_path):
    run = finished(tmp_path / "one", [0.6, 0.5], [200, 150])
    text = (run / "recipe.yaml").read_text() + "  stage1: {run: rl}\n  sft: {run: sft}\n"
    (run / "recipe.yaml").write_text(text)
    for stage, metric in {"stage1": "reward/correct", "sft": "policy/loss"}.items():
        (run / stage).mkdir()
        (run / stage / "metrics.jsonl").write_text(f'{{"step": 0, "{metric}": 0.5}}\n')
    assert main([str(run), "--out", str(tmp_path / "report")]) == 0
    text = (tmp_path / "report" / "report.md").read_text()
    assert "| SFT | 50.00 ± 0.50 |" in text and "DC-CoT is missing: " in text
    assert "training_rl.png" in text and "training_sft.png" in text


def test_recipes_that_differ_in_more_than_their_seed_are_shown_side_by_side(tmp_path):
    one, two = finished(tmp_path / "one"), finished(tmp_path / "two", [0.8, 0.5, 0.9, 0.8, 0.6])
    (two / "recipe.yaml").write_text((two / "recipe.yaml").read_text() + "seed: 3\ntask: lists\n")
    assert main([str(one), str(two), "--out", str(tmp_path / "report")]) == 0
    text = (tmp_path / "report" / "report.md").read_text()
    assert "| one: DC-CoT | 70.00 ± 0.70 |" in text and "| two: DC-CoT | 90.00 ± 0.90 |" in text
    assert "| task | – | lists |" in text and "| seed |" not in text
