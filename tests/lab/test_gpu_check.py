"""`dccot gpu-check`: what of it runs on a CPU runs here; a check that fails, crashes or hangs hides no other."""

import json
import os
import re
import time
from dataclasses import replace

import pytest

from dccot.lab.gpu_check import checks
from dccot.lab.gpu_check.checks import (
    ADVICE,
    CHECKS,
    Check,
    Result,
    check_all,
    main,
    only_runner,
    page,
    processes,
    with_runners,
)

pytestmark = pytest.mark.slow

HERE = "tests.lab.test_gpu_check"


def fails(context):
    raise ValueError("one | two")


def crashes(context):
    print("about to crash", flush=True)
    os.kill(os.getpid(), 11)


def hangs(context):
    print("about to hang", flush=True)
    time.sleep(600)


def fails_on_the_second_rank(context):
    """Rank 0 passes, and says so after the other has failed."""
    if os.environ["RANK"] == "1":
        raise ValueError("rank 1 is off")
    while not list(context.folder.glob("fails_on_the_second_rank*.json")):
        time.sleep(0.001)
    return "fine"


def passes(context):
    return f"fine on {context.device}\nin detail"


def verdicts(results) -> dict[str, str]:
    return {result.check.name: result.verdict for result in results}


def test_one_check_never_hides_the_next(tmp_path, monkeypatch):
    """All in one process, as on a CPU: it is started again after each that ends it."""
    monkeypatch.setattr(checks, "PATIENCE", 1)
    planted = [Check(name, HERE, name, 20) for name in ("fails", "crashes", "passes")]
    results = check_all([*planted, Check("gpu", HERE, "gpu", 4, cuda_only=True)], tmp_path, "cpu", "")
    assert verdicts(results) == {"fails": "failed", "crashes": "failed", "passes": "passed", "gpu": "not run"}
    report = (tmp_path / "report.md").read_text()
    assert re.search(r"\| fails \(`fails`\) \| \*\*failed\*\* \| \d+ \| ValueError: one \\\| two \|", report)
    for said in (
        "its process ended with code -11",
        "about to crash",
        "| gpu (`gpu`) | not run |  | not run: no GPU |",
        "1 passed, 2 failed, 1 not run",
        "fine on cpu\nin detail",
    ):
        assert said in report


def test_a_rank_that_fails_is_not_hidden_by_one_that_passes(tmp_path):
    [result] = check_all([Check("fails_on_the_second_rank", HERE, "two", 20, ranks=2)], tmp_path, "cpu", "")
    assert result.verdict == "failed" and result.found.startswith("ValueError: rank 1 is off")


def test_a_check_that_hangs_is_ended_and_its_stack_is_shown(tmp_path, monkeypatch):
    monkeypatch.setattr(checks, "PATIENCE", 1)
    [hung] = check_all([Check("hangs", HERE, "hangs", 8)], tmp_path, "cpu", "")
    assert hung.verdict == "failed" and hung.found.startswith("not finished after 8 s")
    assert "about to hang" in hung.found and "in hangs" in hung.found


def test_on_gpus_every_check_has_its_own_process_and_is_expected_to_take_25_minutes_on_one():
    every = with_runners(CHECKS, "cuda")
    assert [len(group) for group in processes(every, "cuda")] == [1] * len(every)
    assert sum(check.expected for check in every if check.ranks == 1) <= 25 * 60
    [two] = [check for check in CHECKS if check.name == "tensor_parallel"]
    assert two.obstacle(1, "cuda") == "needs 2 GPUs, found 1"
    assert two.obstacle(2, "cuda") == two.obstacle(0, "cpu") == ""


def test_a_machine_on_which_no_gpu_is_found_fails_and_is_told_why(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    results = check_all([replace(check, expected=300) for check in CHECKS[:2]], tmp_path, "cuda", "")
    assert verdicts(results) == {"environment": "failed", "attention": "not run"}
    report = (tmp_path / "report.md").read_text()
    assert "finds no GPU; nvidia-smi says" in report and "not run: needs 1 GPUs, found 0" in report


def test_the_engines_checks_run_with_both_model_runners_on_a_gpu_and_with_one_on_a_cpu():
    names = [check.label for check in with_runners(CHECKS, "cuda")]
    assert {"engine_start-v1", "engine_start-v2", "mini_rl-v1", "mini_rl-v2", "training_step"} < set(names)
    assert with_runners(CHECKS, "cpu") == list(CHECKS)


def results_of(**verdicts: str) -> list[Result]:
    """`logprob_gap_v1="failed"`; the rest has passed."""
    return [
        Result(check, verdicts.get(check.label.replace("-", "_"), "passed"), "found")
        for check in with_runners(CHECKS, "cuda")
    ]


@pytest.mark.parametrize(
    ("verdicts", "runner"),
    [
        ({}, None),
        ({"logprob_gap_v2": "failed"}, "v1"),
        ({"mini_rl_v1": "failed"}, "v2"),
        ({"mini_rl_v1": "failed", "engine_start_v2": "failed"}, None),
        ({"attention": "failed", "tensor_parallel_v1": "not run"}, None),
    ],
)
def test_training_gets_a_runner_only_if_the_other_one_failed(verdicts, runner):
    assert only_runner(results_of(**verdicts)) == runner


def test_the_report_says_what_a_failure_means_and_ends_with_a_line_to_paste():
    report = page(results_of(logprob_gap_v2="failed", sleep_and_wake_v2="failed"), "cuda", "", 60)
    assert "| `sleep_and_wake-v2` | memory that the sleeping pool does not restore | engine.sleep_level=1" in report
    assert "Only with the model runner v1 did all checks of the engine pass" in report
    last = report.splitlines()[-1]
    assert (
        last.startswith("gpu-check | dccot ")
        and "failed: sleep_and_wake-v2 (found), logprob_gap-v2 (found) | runner: v1" in last
    )


def test_every_check_has_advice():
    assert ADVICE.keys() == {check.name for check in CHECKS}


def test_an_unknown_check_is_an_error_with_the_choices(capsys):
    assert main(["atention"]) == 2
    assert "'atention'; it must be one of environment, attention" in capsys.readouterr().err


ALONE = [check.name for check in CHECKS if check.ranks == 1 and not check.interpreted]


@pytest.mark.parametrize("chosen", [["training_step"], pytest.param(ALONE, marks=pytest.mark.thorough)])
def test_checks_of_one_process_pass_on_a_cpu(tmp_path, chosen):
    """`make docs-check` runs all of them; kernels in the interpreter and two ranks have tests of their own."""
    assert main([*chosen, "--device", "cpu", "--output", str(tmp_path)]) == 0, (tmp_path / "report.md").read_text()
    gpu_only = {"sleep_and_wake", "benchmarks"} & set(chosen)
    for name in set(chosen) - gpu_only:
        assert json.loads((tmp_path / f"{name}.json").read_text())["found"]
    report = (tmp_path / "report.md").read_text()
    assert f"{len(chosen) - len(gpu_only)} passed, 0 failed, {len(gpu_only)} not run" in report
    assert report.count("not run: no GPU") == len(gpu_only)
