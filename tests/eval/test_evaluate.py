"""`dccot eval`: the table is that of the saved responses, and stopping anywhere does not change it."""

import json
import shutil
import statistics
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

import dccot.eval.evaluate as run_module
from dccot.cli import main as dccot
from dccot.core.config import ConfigError
from dccot.core.files import BadData, read_jsonl
from dccot.core.run import Run
from dccot.data.problems import Problem
from dccot.eval.evaluate import EvalConfig, _files, _other_limits, eval_config, evaluate, main
from dccot.eval.results import Benchmark, Evaluation, Sample, own_benchmark, summarise
from dccot.rollout.response import Rollout
from tests.support import programs
from tests.support.hub import Hub, use_here

pytestmark = pytest.mark.slow

SAMPLES, BUDGET = 8, 120
SIZES = {"context": 1024, "max_sequences": 16, "kv_cache_gb": 0.1, "dtype": "float32"}
SETTINGS = [*(f"engine.{name}={value}" for name, value in SIZES.items()), "grading.workers=1"]


@pytest.fixture(scope="session")
def config() -> EvalConfig:
    return eval_config("parallel", BUDGET, SETTINGS)


@pytest.fixture(scope="session")
def run(speaker, sums, config, speaker_engine):
    """Evaluate the speaker on the sums."""

    def evaluated(out, samples=SAMPLES) -> Path:
        evaluate(speaker, [own_benchmark(sums, samples)], config, out, engine=speaker_engine)
        return out

    return evaluated


@pytest.fixture(scope="session")
def uninterrupted(run, tmp_path_factory):
    """The folder of an evaluation that ran through."""
    return run(tmp_path_factory.mktemp("uninterrupted") / "sums")


def summary(out) -> str:
    return (out / "summary.json").read_text()


def rollouts(out) -> list[Rollout]:
    files = sorted((out / "rollouts").glob("*.jsonl"))
    return [Rollout.from_json(row) for file in files for _, row in read_jsonl(file, strict=True)]


def test_the_folder_is_named_after_the_checkpoint_that_rank_zero_found(speaker, sums, tmp_path, monkeypatch, capsys):
    """A rank whose `latest` has moved since sees rank 0's answer, and a newer name on its disk."""

    def stop(out: Path, *_: object) -> None:
        raise ConfigError(f"it would be {out}")

    for step in (5, 9):
        shutil.copytree(speaker, tmp_path / f"run/checkpoints/step_{step:06d}/hf")
    (tmp_path / "run/latest").write_text("step_000009\n")
    monkeypatch.setattr(run_module, "resolve_model", lambda model: tmp_path / "run/checkpoints/step_000005/hf")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run_module, "_open_folder", stop)
    assert main(["run", "--problems", str(sums), "--budget", "100"]) == 2
    assert "it would be runs/eval/run-5-parallel-100" in capsys.readouterr().err


def test_every_response_is_saved_once_and_graded(uninterrupted):
    pairs = [(r.problem, r.sample) for r in rollouts(uninterrupted)]
    assert sorted(pairs) == [(f"p{i}", sample) for i in range(6) for sample in range(SAMPLES)]
    verdicts = {r.verdict for r in rollouts(uninterrupted)}
    assert "correct" in verdicts and "wrong" in verdicts  # else the tables below would be equal for want of content


def test_the_table_is_that_of_the_saved_responses(uninterrupted):
    result = Evaluation.load(uninterrupted).results["sums"]
    groups = {f"p{i}": [r for r in rollouts(uninterrupted) if r.problem == f"p{i}"] for i in range(6)}
    for measure, of in {
        "accuracy": lambda r: r.verdict == "correct",
        "longest_path": lambda r: r.response.longest_path,
        "total_tokens": lambda r: r.response.total_tokens,
        "parallelism": lambda r: r.response.total_tokens / r.response.longest_path,
        "spawned": lambda r: len(r.response.forks) > 0,
        "truncated": lambda r: r.response.finish != "answered",
    }.items():
        means = [statistics.fmean(of(r) for r in group) for group in groups.values()]
        assert result.estimate(measure).value == pytest.approx(statistics.fmean(means)), measure
        assert result.estimate(measure).stderr == pytest.approx(statistics.stdev(means) / 6**0.5), measure
    assert 0 < result.estimate("spawned").value < 1
    assert result.estimate("longest_path").value < result.estimate("maj3_longest_path").value < BUDGET


def test_a_run_cut_in_the_middle_of_a_line_resumes_to_the_same_table(uninterrupted, run, tmp_path):
    lines = (uninterrupted / "rollouts" / "sums.rank0.jsonl").read_text().splitlines(keepends=True)
    ungraded = [json.dumps({**json.loads(line), "verdict": None}) + "\n" for line in lines[:20]]
    out = tmp_path / "sums"
    (out / "rollouts").mkdir(parents=True)
    (out / "rollouts" / "sums.rank0.jsonl").write_text("".join(ungraded) + lines[20][:300])
    assert summary(run(out)) == summary(uninterrupted)
    assert [r.text for r in rollouts(out)][:20] == [r.text for r in rollouts(uninterrupted)][:20]


def test_a_part_of_a_benchmark_is_the_same_part_however_its_file_is_ordered():
    problems = [Problem(f"p{i}", "q", "1") for i in range(100)]
    benchmark = Benchmark("aime24", "AIME 24", 4, max_problems=30)
    chosen = benchmark.chosen(problems)
    assert len(chosen) == 30 and chosen == sorted(chosen, key=problems.index) != problems[:30]
    assert benchmark.chosen(problems[::-1]) == chosen[::-1]
    assert Benchmark("aime24", "AIME 24", 4).chosen(problems) == problems


def test_more_samples_extend_the_same_folder(uninterrupted, run, tmp_path):
    assert summary(run(run(tmp_path / "sums", 3))) == summary(uninterrupted)


def test_two_ranks_killed_and_resumed_on_one_give_the_same_table(uninterrupted, run, speaker, sums, tmp_path):
    out = tmp_path / "sums"
    process = torchrun(speaker, sums, out)
    try:
        deadline = time.monotonic() + 900
        while sum(file.read_bytes().count(b"\n") for file in (out / "rollouts").glob("*.jsonl")) < 4:
            assert process.poll() is None and time.monotonic() < deadline, process.communicate()[0]
            time.sleep(0.02)
    finally:
        kill_all(process)
    files = sorted(file.name for file in (out / "rollouts").glob("*.jsonl"))
    assert not (out / "summary.json").exists() and files == ["sums.rank0.jsonl", "sums.rank1.jsonl"]
    assert summary(run(out)) == summary(uninterrupted)


def test_ranks_that_do_not_share_the_folder_are_refused(speaker, sums, tmp_path):
    """Each has a home of its own, as on two machines without a shared disk: the table would be that of half of them."""
    program = tmp_path / "program.py"
    home = "os.mkdir(os.environ['RANK'])\nos.chdir(os.environ['RANK'])"
    run = "sys.exit(main([*sys.argv[1:], '--out', 'out']))"
    impatient = "import dccot.core.runtime\ndccot.core.runtime.SHARED_SECONDS = 2.0"
    program.write_text(f"import os, sys\n{impatient}\nfrom dccot.eval.evaluate import main\n{home}\n{run}")
    command = programs.torchrun(2, program, speaker, "--problems", sums, "--budget", 100, "engine.context=1024")
    done = programs.finish(command, cwd=tmp_path, code=1)
    assert done.stderr.count("dccot: out of rank 0 on ") == 1, done.stderr
    assert "is not the folder of rank 1 on " in done.stderr


def test_two_ranks_share_the_grading_and_agree(uninterrupted, speaker, sums, tmp_path):
    out = tmp_path / "sums"
    shutil.copytree(uninterrupted, out)
    (out / "summary.json").unlink()
    rows = [json.loads(line) for line in (out / "rollouts" / "sums.rank0.jsonl").read_text().splitlines()]
    for rank in range(2):
        ungraded = [json.dumps({**row, "verdict": None}) + "\n" for row in rows[rank::2]]
        (out / "rollouts" / f"sums.rank{rank}.jsonl").write_text("".join(ungraded))
    process = torchrun(speaker, sums, out)
    printed = process.communicate(timeout=900)[0]
    assert process.returncode == 0, printed
    assert summary(out) == summary(uninterrupted)
    assert printed.count("pass@1") == 1  # one table, not one per rank


def kill_all(process: subprocess.Popen) -> None:
    """The ranks have sessions of their own, so no signal reaches them through their launcher."""
    launcher = psutil.Process(process.pid)
    everybody = [launcher, *launcher.children(recursive=True)]
    for one in everybody:
        with suppress(psutil.NoSuchProcess):
            one.kill()
    psutil.wait_procs(everybody)
    process.wait()


def torchrun(speaker, sums, out) -> subprocess.Popen:
    options = {"--problems": sums, "--samples": SAMPLES, "--budget": BUDGET, "--out": out}
    given = [part for option in options.items() for part in option]
    command = programs.torchrun(2, "dccot.eval.evaluate", speaker, *SETTINGS, *given)
    return programs.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("prompt.kind=sequential", r"prompt\.kind=parallel, now it is sequential; give another folder"),
        ("rollout.temperature=1", r"rollout\.temperature=0\.6, now it is 1\.0; give another folder"),
        ("engine.kv_cache_dtype=fp8", r"engine\.kv_cache_dtype=auto, now it is fp8; give another folder"),
        ("engine.context=512", r"engine\.context=1024, now it is 512; give another folder"),
    ],
)
def test_a_folder_made_with_other_settings_is_refused(uninterrupted, speaker, sums, setting, said):
    changed = eval_config("parallel", BUDGET, [*SETTINGS, setting])
    with pytest.raises(ConfigError, match=f"begun with {said}"):
        evaluate(speaker, [own_benchmark(sums, SAMPLES)], changed, uninterrupted)


def test_a_folder_made_with_other_weights_at_the_same_path_is_refused(uninterrupted, speaker, sums, config, tmp_path):
    model, out = tmp_path / "model", tmp_path / "out"
    shutil.copytree(speaker, model)
    shutil.copytree(uninterrupted, out)
    settings = json.loads((out / "settings.json").read_text()) | {"model": str(model.resolve())}
    (out / "settings.json").write_text(json.dumps(settings))
    evaluate(model, [own_benchmark(sums, SAMPLES)], config, out)  # moved, not changed: complete
    (model / "generation_config.json").write_text('{"top_k": 3}')
    with pytest.raises(ConfigError, match=r"begun with model\.sha256=\w{64}, now it is \w{64}; give another folder"):
        evaluate(model, [own_benchmark(sums, SAMPLES)], config, out)


def test_a_problem_that_changed_under_its_id_is_refused(uninterrupted, speaker, sums, config, tmp_path):
    (tmp_path / "sums.jsonl").write_text(sums.read_text().replace("What is 3 + 3?", "What is 3 + 4?"))
    with pytest.raises(BadData, match="problem 'p3' has changed since"):
        evaluate(speaker, [own_benchmark(tmp_path / "sums.jsonl", SAMPLES)], config, uninterrupted)


def test_a_hub_id_is_downloaded_once_and_never_evaluated_in_part(
    uninterrupted, speaker, sums, config, speaker_engine, tmp_path, monkeypatch, capsys
):
    out = tmp_path / "out"
    command = ["someone/speaker", "--problems", str(sums), "--n", "2", "--budget", str(BUDGET), "--out", str(out)]
    with Hub({"someone/speaker": speaker}) as hub:
        use_here(monkeypatch, hub.url, tmp_path / "home")
        hub.cut = "model.safetensors"
        assert main([*command, *SETTINGS]) == 2
        assert "someone/speaker is not in the cache and cannot be downloaded" in capsys.readouterr().err
        assert not out.exists()
        hub.cut = None
        evaluate("someone/speaker", [own_benchmark(sums, 2)], config, out, engine=speaker_engine)
        assert hub.served.count("model.safetensors") == 2  # the one that broke off, and the whole
    assert main([*command, *SETTINGS]) == 0  # the hub is gone
    assert "pass@1" in capsys.readouterr().out
    before = {(r.problem, r.sample): r.response for r in rollouts(uninterrupted) if r.sample < 2}
    assert {(r.problem, r.sample): r.response for r in rollouts(out)} == before  # as from the folder itself


def test_a_complete_folder_needs_no_engine(uninterrupted, speaker, sums, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "dccot.rollout.vllm_engine", None)  # importing it now fails
    before = summary(uninterrupted)
    options = {"--problems": sums, "--n": SAMPLES, "--budget": BUDGET, "--out": uninterrupted}
    arguments = [str(speaker), *SETTINGS, *(str(part) for option in options.items() for part in option)]
    assert dccot(["eval", *arguments]) == 0
    assert summary(uninterrupted) == before
    accuracy = 100 * Evaluation.load(uninterrupted).results["sums"].estimate("accuracy").value
    assert f"{accuracy:.2f} ±" in capsys.readouterr().out


def test_responses_to_a_file_whose_name_holds_brackets_are_found_again(tmp_path):
    (tmp_path / "rollouts").mkdir()
    (tmp_path / "rollouts/sums[v2].rank0.jsonl").touch()
    assert len(_files(tmp_path, own_benchmark("sums[v2].jsonl"))) == 1


# ---- the summary by hand ----


def test_an_answer_that_could_not_be_judged_counts_as_wrong_and_is_shown_apart():
    rows = {"a": [("correct", 100, 150), ("wrong", 200, 250), ("crashed", 300, 350)]}
    rows["b"] = [("correct", 400, 400), ("correct", 400, 400), ("correct", 700, 700)]
    samples = [
        Sample(problem, i, "", verdict, True, longest != 700, [3], longest, total)  # the last one did not end by itself
        for problem, found in rows.items()
        for i, (verdict, longest, total) in enumerate(found)
    ]
    result = summarise(Benchmark("x", "X", 3), samples, {"a": [0, 1, 2], "b": [0, 0, 0]})
    assert result.estimate("accuracy").value == pytest.approx((1 / 3 + 1) / 2)
    assert result.estimate("accuracy").stderr == pytest.approx(1 / 3)  # 1/3 and 1: standard deviation √2/3, over √2
    assert result.estimate("longest_path").value == pytest.approx((200 + 500) / 2)
    assert result.estimate("truncated").value == pytest.approx(1 / 6)
    # three answers that differ: any of them
    assert result.by_problem["maj3_accuracy"] == pytest.approx({"a": 1 / 3, "b": 1.0})
    assert result.by_problem["maj3_longest_path"] == {"a": 300.0, "b": 700.0}
    assert result.by_problem["maj3_total_tokens"] == {"a": 750.0, "b": 1500.0}
    assert result.unjudged == 1
    assert result.correct_paths == [100, 400, 400, 700]


def test_a_summary_survives_the_disk_and_a_damaged_one_is_named(tmp_path):
    samples = [Sample(problem, 0, "", "wrong", True, True, [3], 3, 4) for problem in ("a", "ä|b")]
    result = summarise(Benchmark("x", "X", 1), samples, {"a": [0], "ä|b": [0]})
    evaluation = Evaluation("n", "m", "parallel", 10, {"x": result})
    evaluation.save(tmp_path)
    assert Evaluation.load(tmp_path) == evaluation
    assert result.estimate("maj3_accuracy") is None
    for damaged in ('{"name": "x"', "null", "[" * 100_000):
        (tmp_path / "summary.json").write_text(damaged)
        with pytest.raises(BadData, match=r"summary\.json is not what `dccot eval` writes"):
            Evaluation.load(tmp_path)


def test_a_model_that_is_asked_for_other_workers_than_it_was_trained_with_says_so(tmp_path):
    (tmp_path / "config.yaml").write_text("prompt: {kind: parallel}\nrollout: {workers: [2, 12], depth: 2}\n")
    weights = Run(tmp_path).checkpoint_folder(4).hf  # what a recipe evaluates
    said = "trained with 2 to 12 workers, 2 levels deep, asked for 3 workers; rollout.workers=[2,12] rollout.depth=2"
    assert _other_limits(weights, eval_config()) == f"{said} asks as it was trained"
    assert _other_limits(weights, eval_config(model=weights)) is None
    assert _other_limits(weights, eval_config("sequential")) is None
    assert _other_limits(tmp_path / "elsewhere", eval_config(overrides=["rollout.depth=3"])) is None
