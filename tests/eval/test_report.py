"""The report: tables that agree with the paper and with the evaluations, and a page that a browser shows without asking
for anything. Its figures: test_plots.py.
"""

import json
import math
import random
import re
import statistics
from html import unescape
from itertools import combinations
from pathlib import Path

import pytest

from dccot.core.config import ConfigError, read_yaml
from dccot.core.run import Run
from dccot.data.task import settings_of
from dccot.eval import paper, tables
from dccot.eval.document import Cell
from dccot.eval.latency import Timing
from dccot.eval.latency import save as save_latency
from dccot.eval.plots import smoothed
from dccot.eval.report import main, placed, write_report
from dccot.eval.results import (
    BENCHMARKS,
    MEASURES,
    Benchmark,
    BenchmarkResult,
    Evaluation,
    Sample,
    share_error,
    summarise,
)
from dccot.model.folder import explain_best, resolve_model

TITLES = {name: BENCHMARKS[name].title for name in paper.COLUMNS}
AIME = {"aime24": "AIME 24"}
PAPERS_TABLE_2 = {  # as printed
    "DC-CoT": "+1.67 -37.4% -0.97 -34.6% -0.21 -36.3% -0.30 -37.1% -1.49 -41.3% -0.75 -36.3%",
    "DC-CoT-HLP": "+1.82 -21.3% -0.28 -22.0% -0.30 -19.0% +0.36 -21.7% -2.34 -21.4% -0.27 -21.6%",
    "DC-CoT-Maj": "+1.83 -23.5% -0.85 -27.0% +0.15 -18.7% -0.36 -32.8% -1.64 -35.8% -0.84 -28.8%",
}


def rolled_out(problem: str, *responses: tuple[str, int]) -> list[Sample]:
    return [Sample(problem, i, "", verdict, True, True, [3, 2], n, 2 * n) for i, (verdict, n) in enumerate(responses)]


def evaluation(name, method="parallel", accuracy=0.0, length=100.0, benchmarks=("arithmetic",), seed=0) -> Evaluation:
    """A made-up evaluation of 12 problems with 4 responses each."""
    rng = random.Random(seed)
    found = Evaluation(name, f"runs/{name}", method, 1000)
    for benchmark in benchmarks:
        samples = []
        for problem in range(12):
            right = 1 / (1 + math.exp(-accuracy - problem / 3 + 2))
            responses = [
                ("correct" if rng.random() < right else "wrong", int(length * rng.uniform(0.8, 1.2))) for _ in range(4)
            ]
            samples += rolled_out(f"p{problem}", *responses)
        classes = {f"p{p}": [0, 0, 1, 2] for p in range(12)}
        benchmark = Benchmark(benchmark, TITLES.get(benchmark, benchmark), 4)
        found.results[benchmark.name] = summarise(benchmark, samples, classes)
    return found


def exactly(name: str, method: str, accuracy: float, length: float) -> Evaluation:
    """An evaluation of two problems with the given means on AIME 24."""
    problems = {"accuracy": dict.fromkeys("ab", accuracy / 100), "longest_path": dict.fromkeys("ab", length)}
    return Evaluation(name, "", method, 12000, {"aime24": BenchmarkResult("aime24", "AIME 24", 1, {}, problems)})


def texts(row) -> list[str]:
    return [cell.text for cell in row.cells]


def change(ours, theirs, titles):
    """Our first row of table 2."""
    return tables.table_2(tables.compared_pairs(tables.methods_of([theirs, ours]), None), titles).rows[0]


@pytest.fixture(scope="module")
def training(tmp_path_factory):
    """A supervised run, two stages of RL that follow it, and one from elsewhere."""
    tmp_path = tmp_path_factory.mktemp("training")

    def run(name: str, start: str | None, rows: list[dict]) -> Path:
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        lines = [json.dumps({"step": i, **row}) + "\n" for i, row in enumerate(rows)]
        (folder / "metrics.jsonl").write_text("".join(lines))
        if start:
            (folder / "config.yaml").write_text(f"model:\n  path: {start}\n")
        return folder

    def stage(steps: int) -> list[dict]:
        row = {"reward/correct": 0.5, "length/longest_path": 90.0, "parallel/degree": 1.2, "policy/entropy": 0.4}
        row |= {f"policy/entropy_p{p}": p / 50 for p in (60, 70, 80, 90, 100)}
        validated = {"validation/accuracy": 0.6, "validation/longest_path": 80.0}
        return [row | (validated if i % 5 == 0 else {}) for i in range(steps)]

    sft = run("sft", None, [{"policy/loss": 1 / (1 + i)} for i in range(10)])
    first = run("stage1", str(sft), stage(20))
    second = run("stage2", str(first / "checkpoints" / "step_000020" / "hf"), stage(15))
    return [sft, first, second, run("elsewhere", str(tmp_path / "other"), stage(8))]


# ---- tables ----


def test_the_papers_table_2_follows_from_its_table_1():
    rows = tables.papers_changes(TITLES)
    assert {row.label: " ".join(texts(row)[1:]).replace("−", "-") for row in rows} == PAPERS_TABLE_2


def test_our_rows_with_the_papers_numbers_change_as_the_paper_says():
    base, ours = exactly("DSR-32K", "sequential", 40.20, 9540), exactly("DC-CoT", "parallel", 41.87, 5974)
    assert texts(change(ours, base, AIME)) == ["DSR-32K", "+1.67", "−37.4%"]
    rows = tables.table_1(tables.methods_of([base, ours]), AIME).rows
    theirs = {row.label: texts(row) for row in rows if row.tag}
    assert [texts(row) for row in rows if not row.tag] == [theirs["DSR-32K"], theirs["DC-CoT"]]


def reproduced(problems: int, **means: float) -> Evaluation:
    """DC-CoT on AIME 24 with 200 responses to each problem; half of the problems are above the means, half below."""
    spread = {name: 0.1 * mean for name, mean in means.items()}
    by_problem = {
        name: {f"p{i}": mean + (spread[name] if i % 2 else -spread[name]) for i in range(problems)}
        for name, mean in means.items()
    }
    count = problems * math.comb(200, 3)
    pooled = {"accuracy": 0.0064, "longest_path": 38.0, "maj3_longest_path": 30 / math.sqrt(count)}
    pooled["maj3_accuracy"] = share_error(means.get("maj3_accuracy", 0.5), count)
    result = BenchmarkResult("aime24", "AIME 24", 200, {}, by_problem, pooled)
    return Evaluation("DC-CoT", "", "parallel", 12000, {"aime24": result})


def against(found: Evaluation) -> dict[str, list[str]]:
    table = tables.against_paper(tables.methods_of([found]), AIME)
    return {row.label: [str(cell) for cell in row.cells] for row in table.rows}


def test_differences_from_the_paper_are_in_the_errors_of_both_sides():
    """The paper: 41.87 ± 0.64 and 5974 ± 38."""
    rows = against(reproduced(30, accuracy=0.43, longest_path=6174))
    sigmas = 1.13 / math.hypot(0.64, 0.64), 200 / math.hypot(38, 38)
    expected = ["43.00 ± 0.64", "41.87", "+1.13", f"+{sigmas[0]:.1f}", "6174 ± 38", "5974", "+200", f"+{sigmas[1]:.1f}"]
    assert rows == {"DC-CoT": ["AIME 24", "30 × 200", *expected]}


def test_some_of_the_papers_problems_differ_by_which_they_are():
    [row] = against(reproduced(12, accuracy=0.30, longest_path=5974)).values()
    error = 100 * 0.03 * math.sqrt(12 / 11) / math.sqrt(12)  # of the mean of twelve that are 3 points off their mean
    assert row[2:6] == [f"30.00 ± {error:.2f}", "41.87", "−11.87", f"−{11.87 / math.hypot(error, 0.64):.1f}"]
    assert row[7:] == ["5974", "+0", "+0.0"]


def test_votes_are_as_far_from_the_papers_as_votes_without_overlap_say():
    """The paper's own ± of votes, 0.01, takes overlapping subsets as independent: two points would be 200 of them."""
    means = {"accuracy": 0.4187, "longest_path": 5974, "maj3_accuracy": 0.4802, "maj3_longest_path": 7412}
    row = against(reproduced(30, **means))["DC-CoT-Maj"]
    error = 100 * math.sqrt(0.4802 * 0.5198 / (30 * 200 / 3))
    assert row[2:6] == [f"48.02 ± {error:.2f}", "46.02", "+2.00", f"+{2 / (error * math.sqrt(2)):.1f}"]
    assert row[6] == f"7412 ± {30 / math.sqrt(30 * 200 / 3):.0f}"


def test_rows_and_benchmarks_that_the_paper_has_not_are_not_compared_with_it():
    other = evaluation("DC-CoT", benchmarks=("arithmetic",))
    assert tables.against_paper(tables.methods_of([other]), {"arithmetic": "arithmetic"}) is None
    assert tables.against_paper(tables.methods_of([evaluation("mine", benchmarks=("aime24",))]), AIME) is None


def test_votes_are_compared_with_votes():
    methods = tables.methods_of([evaluation("seq", "sequential"), evaluation("par")])

    def pairs(baseline):
        return [(ours.label, theirs.label) for ours, theirs in tables.compared_pairs(methods, baseline)]

    assert pairs("seq") == [("par", "seq"), ("par, maj@3", "seq, maj@3")]
    assert pairs({"par, maj@3": "seq"}) == [("par, maj@3", "seq")]
    with pytest.raises(ConfigError, match="is called 'sequential'; the evaluations are seq, seq, maj@3, par"):
        pairs("sequential")


def test_a_stage_begins_with_its_first_quarter_and_ends_with_its_last():
    correct = (0.2, 0.4, 0.9, 0.1, 0.9, 0.1, 0.6, 0.8)
    rows = [{"reward/correct": share, "length/longest_path": 100 - i} for i, share in enumerate(correct)]
    config = {"objective": {"kind": "cispo"}, "filter": "remove_easy"}
    whole, short = tables.stages_table([("stage3", config, rows), ("stage1", {}, rows[:1])]).rows
    measured = ["30.0 → 70.0", "", "", "99.5 → 93.5", "", "", ""]
    assert texts(whole) == ["8", "cispo", "remove_easy", *measured]
    assert texts(short)[:4] == ["1", "", "", "20.0 → 20.0"]


def test_only_changes_beyond_two_standard_errors_are_coloured():
    longer, titles = evaluation("longer", "sequential", length=100, seed=1), {"arithmetic": "arithmetic"}
    row = change(evaluation("shorter", length=60, seed=2), longer, titles)
    assert row.cells[2].kind == "better"  # 40 % shorter with lengths that vary by 20 %
    same = change(evaluation("same", length=100, seed=3), longer, titles)
    assert [cell.kind for cell in same.cells[1:]] == ["", ""] and "+0.00" not in str(same.cells[1])


def test_a_benchmark_that_one_evaluation_lacks_is_a_dash():
    methods = tables.methods_of([evaluation("a", benchmarks=("x", "y")), evaluation("b", benchmarks=("x",))])
    rows = {row.label: row.cells for row in tables.table_1(methods, {"x": "X", "y": "Y"}).rows}
    assert rows["b"][2:] == [Cell("–"), Cell("–")] and rows["a"][2].text != "–"


def test_kinds_of_problems_are_averaged_apart():
    ids = ("t-10-1", "t-10-2", "t-9-1")
    values = {
        "accuracy": (1.0, 0.0, 0.25),
        "longest_path": (10, 30, 7),
        "spawned": (1.0, 1.0, 0.0),
        "width": (9, 10, 0),
    }
    table = {measure: dict(zip(ids, found)) for measure, found in values.items()}
    found = Evaluation("ours", "", "parallel", 100, {"t": BenchmarkResult("t", "Test", 1, {}, table)})
    nine, ten = tables.kinds_table([found], {"t": "Test"}, "-([0-9]+)-").rows  # numbers in their order
    assert texts(nine) == ["Test", "9", "25.00", "7", "–", "0.00", "0.00"]  # total tokens were not measured
    assert texts(ten) == ["Test", "10", "50.00", "20", "–", "100.00", "9.50"]


def test_the_width_of_a_response_is_the_mean_over_its_forks():
    lengths = {"longest_path": 9, "total_tokens": 20, "workers": [[4, 3], [2, 2, 2], [1]]}
    row = {"lengths": lengths, "response": {"finish": "answered"}, "flaw": None, "verdict": "correct"}
    sample = Sample.from_row({**row, "problem": "a", "sample": 0, "text": ""})
    assert MEASURES["width"][1](sample) == 2.0


# ---- both kinds of error ----


def test_the_papers_error_takes_every_response_as_independent():
    samples = rolled_out("a", ("correct", 10), ("correct", 14)) + rolled_out("b", ("correct", 20), ("wrong", 16))
    found = summarise(Benchmark("aime24", "AIME 24", 2), samples, {})
    assert found.pooled["accuracy"] == pytest.approx(0.2165063509)  # √(¾ · ¼ / 4)
    assert found.pooled["longest_path"] == pytest.approx(2.0816659995)  # lengths 15 ± √(52/3), over √4
    assert found.pooled["total_tokens"] == pytest.approx(4.1633319989)
    methods = tables.methods_of([Evaluation("ours", "", "parallel", 9, {"aime24": found})])
    ours = tables.table_1(methods, AIME).rows[0]
    assert [str(cell) for cell in ours.cells] == ["75.00 ± 25.00 (21.65)", "15 ± 3 (2)"]  # problems: 1 and ½; 12 and 18


def test_the_papers_error_of_votes_takes_every_subset_of_three_as_independent():
    lengths = {"a": [9, 4, 30, 17, 17], "b": [8, 2, 5, 6, 40]}
    classes = {"a": [0, 0, 1, 2, 0], "b": [0, 1, 2, 3, 4]}
    samples = []
    for problem, paths in lengths.items():
        verdicts = ["wrong" if answer else "correct" for answer in classes[problem]]
        samples += rolled_out(problem, *zip(verdicts, paths))
    found = summarise(Benchmark("x", "X", 5), samples, classes)
    longest = [max(three) for paths in lengths.values() for three in combinations(paths, 3)]
    assert found.pooled["maj3_longest_path"] == pytest.approx(statistics.stdev(longest) / math.sqrt(20))
    share = statistics.fmean(found.by_problem["maj3_accuracy"].values())
    assert found.pooled["maj3_accuracy"] == pytest.approx(math.sqrt(share * (1 - share) / 20))


@pytest.mark.parametrize(
    ("method", "benchmark", "count"),
    [
        ("DC-CoT", "aime24", 30 * 200),
        ("DSR-32K", "math500", 500 * 16),
        ("Maj-DSR-3", "math500", 500 * 560),
        ("DC-CoT-Maj", "minerva", 272 * 560),
    ],
)
def test_the_formula_gives_the_errors_that_the_paper_prints(method, benchmark, count):
    printed = paper.RESULTS[method][benchmark][0]
    assert round(100 * share_error(printed.value / 100, count), 2) == printed.stderr


def test_the_error_of_a_change_in_the_papers_way_adds_two_independent_sides():
    row = tables.papers_changes(AIME)[0]  # 41.87 ± 0.64 against 40.20 ± 0.63; 5974 ± 38 against 9540 ± 83
    found = ["+1.67 (0.90)", "−37.4% (0.7)"]  # √(.64² + .63²); √(38² + (.6262·83)²) / 9540
    assert [str(cell) for cell in row.cells[1:]] == found


def test_a_summary_without_the_papers_errors_is_still_read(tmp_path):
    made = evaluation("old")
    made.save(tmp_path)
    summary = json.loads((tmp_path / "summary.json").read_text())
    del summary["benchmarks"][0]["pooled"]
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    made.results["arithmetic"].pooled = {}
    assert Evaluation.load(tmp_path) == made


# ---- the paper's layout ----


def test_the_tables_have_every_row_of_the_papers_layout_in_its_order():
    names = ("DC-CoT", "DC-CoT-HLP", "SFT", "DSR-32K", "DSR-HLP-24K", "DSR-HLP-12K", "DSR-12K")
    methods = tables.methods_of([evaluation(name, benchmarks=("aime24",), seed=i) for i, name in enumerate(names)])
    ours = [row.label for row in tables.table_1(methods, TITLES).rows if not row.tag]
    assert [label for label in ours if label != "SFT"] == list(paper.RESULTS) and "SFT" in ours
    rows = tables.table_2(tables.compared_pairs(methods, None), TITLES).rows
    changes = [(row.label, row.cells[0].text) for row in rows if not row.tag]
    assert changes == [("DC-CoT", "DSR-32K"), ("DC-CoT-HLP", "DSR-HLP-12K"), ("DC-CoT-Maj", "Maj-DSR-3")]
    assert [method.evaluation.name for method in methods if method.vote] == ["DSR-12K", "DC-CoT"]


def test_a_vote_costs_the_tokens_of_its_three_responses():
    single = evaluation("DC-CoT", benchmarks=("aime24",))
    ours, vote, *theirs = tables.totals_table(tables.methods_of([single]), AIME).rows
    tokens = statistics.fmean(single.results["aime24"].by_problem["total_tokens"].values())
    assert [texts(row) for row in (ours, vote)] == [[f"{tokens:.0f}"], [f"{3 * tokens:.0f}"]]
    assert [texts(row) for row in theirs] == [["6831"], ["6185"], ["20493"]]


def test_the_shipped_recipe_compares_as_the_papers_table_2_does():
    report = read_yaml(Path(__file__).parents[2] / "configs/paper.yaml")["stages"]["report"]["set"]
    assert {ours: theirs for ours, theirs in report["baselines"].items() if ours != "SFT"} == paper.COMPARED_WITH
    assert tables.row_labels(list(report["rows"].values())) == list(paper.LAYOUT)


def test_sides_that_were_trained_for_different_numbers_of_steps_are_said_to_be(tmp_path):
    for name, start, more in (("base", "hub/model", ""), ("rl", tmp_path / "base", "reward: {}\n")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").write_text(f"steps: 1700\nmodel: {{path: {start}}}\n{more}")
    both = [evaluation("base", "sequential"), evaluation("rl")]
    for each in both:
        each.model = str(tmp_path / each.name)
    text = write_report(both, [], tmp_path / "out").with_suffix(".md").read_text()
    assert "rl 1,700 of SFT, 1,700 of RL; base 1,700 of SFT, 0 of RL." in text
    both[0].model = both[1].model
    assert "Steps of training" not in write_report(both, [], tmp_path / "out").with_suffix(".md").read_text()


# ---- training ----


def test_checkpoints_are_listed_with_what_validation_found(tmp_path):
    run = tmp_path / "hlp"
    for step in (20, 30, 35):
        (run / f"checkpoints/step_{step:06d}/hf").mkdir(parents=True)
        (run / f"checkpoints/step_{step:06d}/hf/config.json").write_text("{}")
    rows = [{"step": i, "reward/correct": 0.5 if i else None} for i in range(35)]  # null: there was no number
    for step, accuracy, longest in ((9, 0.5, 900.0), (19, 0.4, 800.0), (29, 0.4, 700.0)):
        rows[step] |= {"validation/accuracy": accuracy, "validation/longest_path": longest}
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (run / "latest").write_text("step_000035\n")
    fold = tables.checkpoints_table(Run(run))
    assert fold.title == "hlp: 3 checkpoints validated; @best is step 30"
    assert [[row.label, *texts(row)] for row in fold.content[0].rows] == [
        ["10", "50.00", "900", "not kept"],
        ["20", "40.00", "800", "hlp@20"],
        ["30", "40.00", "700", "hlp@30 (= @best)"],  # as accurate as 20, and shorter
        ["35", "–", "–", "hlp@35"],
    ]
    assert resolve_model(f"{run}@best") == run / "checkpoints/step_000030/hf"
    assert explain_best(f"{run}@best") == f"{run}@best is step 30: validation accuracy 40.00%, longest path 700 tokens"
    assert explain_best(run) is None and explain_best(f"{run}@20") is None
    text = write_report([], [run], tmp_path / "out").with_suffix(".md").read_text()
    assert "## Checkpoints" in text and "| 30 | 40.00 | 700 | hlp@30 (= @best) |" in text


def test_a_model_named_by_its_step_is_asked_as_its_run_was(tmp_path):
    (tmp_path / "hlp").mkdir()
    (tmp_path / "hlp/config.yaml").write_text("prompt: {kind: sequential}\nrollout: {budget: 224}\n")
    for name in ("hlp", "hlp@20", "hlp@best"):
        prompt, rollout = settings_of(tmp_path / name)
        assert (prompt.kind, rollout.budget) == ("sequential", 224)


def test_each_stage_begins_where_the_one_that_it_continues_ended(training):
    stages = placed(training, rl=True)
    assert [(stage.name, stage.start, stage.branch) for stage in stages] == [
        ("stage1", 0, 0),
        ("stage2", 20, 0),
        ("elsewhere", 0, 1),
    ]
    assert [stage.name for stage in placed(training, rl=False)] == ["sft"]


def test_settings_that_differ_are_in_a_table_and_no_others():
    runs = {"a": {"name": "a", "steps": 3, "model": {"path": "x", "lora": None}}}
    runs |= {"b": {"name": "b", "steps": 3, "model": {"path": "y"}, "filter": "none"}, "old": {}}
    [table] = tables.settings_table("runs", runs)
    assert [name for _, name, _ in table.columns] == ["a", "b"]
    assert {row.label: texts(row) for row in table.rows} == {"model.path": ["x", "y"], "filter": ["–", "none"]}
    assert (
        tables.settings_table("runs", {"a": runs["a"], "again": runs["a"]}) == tables.settings_table("runs", {}) == []
    )


def test_smoothing_keeps_a_straight_line_inside():
    line = [2.0 * i for i in range(20)]
    assert smoothed(line, 3)[3:-3] == pytest.approx(line[3:-3])
    assert smoothed([1.0, 5.0], 1) == [3.0, 3.0]


# ---- the page ----


@pytest.fixture(scope="module")
def page(training, tmp_path_factory):
    tmp_path = tmp_path_factory.mktemp("page")
    evaluations = [
        evaluation("base", "sequential", 0, 200, ("aime24", "arithmetic"), 1),
        evaluation("dc_cot", "parallel", 0.5, 120, ("aime24", "arithmetic"), 2),
        evaluation("<script>alert(1)</script>|x", "parallel", 0.2, 90, ("arithmetic",), 3),
    ]
    loads = [(method, level) for method in ("parallel", "sequential") for level in (1, 4)]
    seconds = [(*load, f"p{i}", 0, 0.1 + 0.01 * i * load[1], 10 * i, 10 * i) for load in loads for i in range(1, 6)]
    save_latency(tmp_path / "latency", [Timing(*each) for each in seconds], device="a test")
    notes, latencies = ["What was learnt: 3 < 4 & 5 > 4."], [tmp_path / "latency"]
    return write_report(evaluations, training, tmp_path / "report", "A title & more", notes, latencies=latencies)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_shows_on_either_screen_and_requests_nothing(page, chromium, scheme):
    chromium.screen(scheme)
    chromium.requested(), chromium.log("browser")  # of other pages
    chromium.go(page.as_uri())
    assert chromium.js("return document.title") == "A title & more"
    seen = "[t.ariaLabel, t.checkVisibility() && t.offsetHeight]"
    found = chromium.js(f"return [...document.querySelectorAll('table')].map(t => {seen})")
    shown = [" ".join(caption.split()[:2]) for caption, height in found if height > 40]
    assert shown == [
        "Table 1.",
        "Table 2.",
        "Total tokens",
        "What the",
        "Settings in",
        "latency, on",
        "Settings in",
        "What each",
    ]
    assert len(found) == len(shown) + 3 + 3  # the paper's and the checkpoints, folded away
    seen = "[i.complete, i.naturalWidth, i.getBoundingClientRect().width]"
    images = chromium.js(f"return [...document.images].map(i => {seen})")
    assert len(images) == 2 + 2 + 1 + 3  # trade-offs, budgets, latency; SFT, RL and its courses
    assert all(complete and natural > 500 and width > 300 for complete, natural, width in images)
    assert chromium.js("return document.documentElement.scrollWidth <= innerWidth")  # wide tables scroll by themselves
    text = chromium.js("return document.body.innerText")
    assert "3 < 4 & 5 > 4" in text and "<script>alert(1)</script>|x" in text
    paper_colour = "getComputedStyle(document.documentElement).backgroundColor.match(/\\d+/g).slice(0, 3).map(Number)"
    corner = """const c = document.createElement('canvas').getContext('2d'); c.drawImage(document.images[0], 0, 0);
                return [...c.getImageData(1, 1, 1, 1).data.slice(0, 3)]"""
    for colour in (chromium.js(f"return {paper_colour}"), chromium.js(corner)):
        assert (sum(colour) < 300) == (scheme == "dark")
    assert chromium.log("browser") == []
    assert [url for url in chromium.requested() if not url.startswith(("data:", page.as_uri()))] == []


def test_the_page_names_no_address(page):
    text = page.read_text()
    assert not re.findall(r"https?:|//[a-z]|@import|<link|<script", re.sub(r"base64,[A-Za-z0-9+/=]+", "", text))
    sources = re.findall(r'(?:src|srcset|href)="([^"]*)"', text)
    assert sources and all(source.startswith("data:image/png;base64,") for source in sources)


def test_the_markdown_has_the_same_numbers_and_its_figures_next_to_it(page):
    text = (page.parent / "report.md").read_text()
    cells = re.findall(r'<td class="[^"]*">([^<]*)<', page.read_text())
    assert len(cells) > 100 and all(unescape(cell) in text.replace("\\", "") for cell in cells)
    figures = re.findall(r"\]\((figures/[^)]+)\)", text)
    assert len(figures) == 8 and all((page.parent / figure).read_bytes().startswith(b"\x89PNG") for figure in figures)
    assert "\\<script\\>alert(1)\\</script\\>\\|x" in text


def test_the_papers_rows_are_marked(page):
    rows = re.findall(r"<tr class=\"[^\"]*\">.*?</tr>", page.read_text())
    theirs = [row for row in rows if '<span class="tag">paper</span>' in row]
    assert any("46.02" in row for row in theirs) and all("46.02" not in row for row in rows if row not in theirs)


def test_the_command_tells_runs_apart_by_what_they_hold(training, tmp_path, capsys):
    for name, method in {"base": "sequential", "dc_cot": "parallel"}.items():
        (tmp_path / name).mkdir()
        evaluation(name, method).save(tmp_path / name)
    runs = [str(tmp_path / "base"), str(training[1]), str(tmp_path / "dc_cot")]
    assert main([*runs, "--baseline", "base", "--out", str(tmp_path / "out")]) == 0
    text = (tmp_path / "out" / "report.md").read_text()
    assert "| dc\\_cot | base |" in text and "training_rl.png" in text
    assert str(tmp_path / "out" / "report.html") in capsys.readouterr().out
    assert main([str(tmp_path), "--out", str(tmp_path / "out")]) == 2
    printed = capsys.readouterr().err
    assert "holds neither summary.json" in printed and printed.count("\n") == 1
    assert main([str(tmp_path / "nowhere")]) == 2
    assert "nowhere does not exist; name folders that" in capsys.readouterr().err


@pytest.mark.parametrize("content", ["", "null", "[1]", "{", "[" * 100_000], ids=range(5))
@pytest.mark.parametrize("file", ["summary.json", "metrics.jsonl", "latency.json", "recipe.yaml"])
def test_a_damaged_file_is_named_in_one_line(file, content, tmp_path, capsys):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / file).write_text(content)
    (tmp_path / "run" / "timings.jsonl").touch()
    assert main([str(tmp_path / "run"), "--out", str(tmp_path / "out")]) == 2
    *_, line = capsys.readouterr().err.splitlines()
    assert line.startswith("dccot: ") and file in line
