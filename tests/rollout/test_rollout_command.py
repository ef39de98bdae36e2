"""`dccot rollout`: whole lines whatever happens, and a run that was killed continues as if it had not been."""

import io
import json
import re
import signal
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

from dccot.rollout.director import RolloutConfig
from dccot.rollout.generate import Request, RolloutProgress, generate
from dccot.rollout.response import Rollout
from dccot.rollouts import main
from tests.support import programs

pytestmark = pytest.mark.slow

SETTINGS = ["--n", "12", "--budget", "150", "engine.dtype=float32", "engine.kv_cache_gb=0.125", "seed=3"]


@pytest.fixture(scope="module")
def command(checkpoints, tmp_path_factory, engines) -> list[str]:
    """Model and problems. `engines`: the command's own engine must leave an earlier process group alone."""
    problems = tmp_path_factory.mktemp("cli") / "problems.jsonl"
    rows = [{"id": "a", "question": "what is love", "gold": "4"}]
    rows += [{"id": "b", "question": "why not", "gold": ["5", "6"]}]
    problems.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [str(checkpoints["spelled"]), str(problems)]


def rows_of(path: Path) -> dict[tuple[str, int], dict]:
    assert path.read_bytes().endswith(b"\n")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    by_key = {(row["problem"], row["sample"]): row for row in rows}
    assert len(by_key) == len(rows)
    return by_key


@pytest.fixture(scope="module")
def uninterrupted(command, tmp_path_factory) -> dict[tuple[str, int], dict]:
    out = tmp_path_factory.mktemp("cli") / "whole.jsonl"
    assert main([*command, *SETTINGS, "--out", str(out)]) == 0
    return rows_of(out)


def test_every_row_is_a_rollout_of_its_problem(uninterrupted):
    assert sorted(uninterrupted) == [(problem, sample) for problem in "ab" for sample in range(12)]
    for (problem, _), row in uninterrupted.items():
        rollout = Rollout.from_json(row)
        assert (rollout.question, rollout.gold) == {"a": ("what is love", "4"), "b": ("why not", ["5", "6"])}[problem]
        assert rollout.text.startswith("<think>\n")
        assert row["lengths"]["longest_path"] == rollout.response.longest_path <= 150
        assert rollout.flaw is not None  # letters at random are no well-formed answer


def test_a_killed_run_leaves_whole_lines_and_resume_finishes_the_rest(command, uninterrupted, tmp_path):
    out = tmp_path / "killed.jsonl"
    arguments = [*command, *SETTINGS, "--out", str(out), "engine.max_sequences=3"]  # slow enough to be caught midway
    run = programs.Popen([sys.executable, "-m", "dccot.rollouts", *arguments])
    deadline = time.monotonic() + 900
    while run.poll() is None and (not out.exists() or out.read_bytes().count(b"\n") < 3):
        assert time.monotonic() < deadline
        time.sleep(0.005)
    run.send_signal(signal.SIGKILL)
    run.wait()
    before = rows_of(out)
    assert 3 <= len(before) < len(uninterrupted)
    with out.open("ab") as file:
        file.write(b'{"problem": "a", "sam')  # as if it had been killed in the middle of a line
    assert main([*arguments, "--resume"]) == 0
    after = rows_of(out)
    assert before.items() <= after.items()
    written = [{key: row["response"]["trunk"] for key, row in rows.items()} for rows in (after, uninterrupted)]
    assert written[0] == written[1]


def test_a_finished_file_is_neither_overwritten_nor_added_to(command, uninterrupted, tmp_path, capsys):
    out = tmp_path / "done.jsonl"
    out.write_text("".join(json.dumps(row) + "\n" for row in uninterrupted.values()))
    content = out.read_bytes()
    assert main([*command, *SETTINGS, "--out", str(out)]) == 2
    assert "exists already; add --resume" in capsys.readouterr().err
    assert main([*command, *SETTINGS, "--out", str(out), "--resume"]) == 0
    assert "0 responses added" in capsys.readouterr().out
    assert out.read_bytes() == content


def test_rows_of_another_prompt_are_not_mixed_in(command, uninterrupted, tmp_path, capsys):
    out = tmp_path / "other.jsonl"
    out.write_text(json.dumps(uninterrupted["a", 0]) + "\n")
    assert main([*command, *SETTINGS, "--out", str(out), "--resume", "--method", "sequential"]) == 2
    assert "question, gold, prompt or tokenizer of problem 'a' has changed since" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (["--budget", "0"], "'0' is not a whole number of at least 1"),
        (["rollout.temprature=1"], "unknown key rollout.temprature; did you mean 'temperature'?"),
        (["rollout.parallel=false"], "rollout.parallel is now called prompt.kind"),
    ],
)
def test_what_cannot_run_is_refused_in_one_line(command, changed, message, capsys, tmp_path):
    try:
        code = main([*command, *changed, "--out", str(tmp_path / "x.jsonl")])
    except SystemExit as stopped:
        code = stopped.code
    assert code == 2
    assert message in capsys.readouterr().err


def test_progress_shows_responses_tokens_per_second_and_running_sequences(engines):
    engine, said = engines["single"], []

    class Said(RolloutProgress):
        def show(self, done, text="", **more):
            super().show(done, text, **more)
            said.append(text)

    requests = [Request("p", sample, [5, 6, 7]) for sample in range(6)]
    with Said(len(requests), console=Console(file=io.StringIO())) as progress:
        progress.refresh, before = 0.0, engine.sampled_tokens
        done = list(generate(engine, requests, RolloutConfig(budget=60), seed=(0,), watch=progress))
    assert engine.sampled_tokens - before == sum(response.sampled_tokens for _, response in done)
    assert any(re.fullmatch(r"[\d,]+ tokens/s, [1-6] running", text) for text in said)
    assert progress.done == 6
