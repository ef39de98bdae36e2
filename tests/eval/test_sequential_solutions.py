"""Sequential solutions: the first correct attempt is kept, attempts differ, and stopping anywhere changes nothing."""

import json
import os
from collections import defaultdict

import pytest

from dccot.core.config import ConfigError, check, load_config
from dccot.core.files import read_jsonl
from dccot.data.judge import Grader, GradingConfig
from dccot.data.problems import Problem
from dccot.data.prompts import INSTRUCTION, PromptConfig
from dccot.data.sft_set import SequentialConfig, chosen_problems, solution_attempts, solve_sequentially
from dccot.rollout.director import RolloutConfig

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def config(speaker, tmp_path_factory):
    folder = tmp_path_factory.mktemp("sequential")
    problems = folder / "problems.jsonl"
    rows = [{"id": f"p{i}", "question": f"What is {i}?", "gold": "1" if i % 2 else ["2", "12", "1"]} for i in range(24)]
    problems.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {"rollout": RolloutConfig(budget=16, top_p=0.95), "grading": GradingConfig(workers=1)}
    return SequentialConfig(
        str(speaker), str(problems), str(folder / "kept.jsonl"), prompt=PromptConfig("raw_sequential"), **settings
    )


@pytest.fixture(scope="module")
def uninterrupted(config, speaker_engine):
    return solve_sequentially(config, speaker_engine)


def attempts(config) -> dict[str, list[dict]]:
    found = defaultdict(list)
    for _, row in read_jsonl(solution_attempts(config.output, 0)):
        found[row["id"]].append(row)
    return found


def test_attempts_stop_at_the_first_correct_one(uninterrupted, config):
    for rows in attempts(config).values():
        verdicts = [row["verdict"] for row in sorted(rows, key=lambda row: row["attempt"])]
        assert "correct" not in verdicts[:-1]
        assert verdicts[-1] == "correct" or len(verdicts) == config.attempts
    tries = [len(rows) for rows in attempts(config).values()]
    assert len(tries) == 24 and 1 < sum(tries) / 24 < 3  # some were kept, some needed another attempt


def test_kept_solutions_are_correct_by_a_grader_of_our_own_and_in_problem_order(uninterrupted, config):
    kept = [row for _, row in read_jsonl(config.output)]
    assert [int(row["id"][1:]) for row in kept] == sorted(int(row["id"][1:]) for row in kept)
    assert len(kept) == uninterrupted.kept < 24
    with Grader(GradingConfig(workers=1)) as grader:
        assert set(grader.grade([(row["solution"], row["gold"]) for row in kept])) == {"correct"}


def test_attempts_at_the_same_problem_differ(uninterrupted, config):
    texts = [[row["text"] for row in rows] for rows in attempts(config).values() if len(rows) == 3]
    assert texts and all(len(set(three)) == 3 for three in texts)


def test_solutions_begin_with_the_tag_that_the_prompt_opened(uninterrupted, config):
    assert all(row["solution"].startswith("<think>\n") for _, row in read_jsonl(config.output))
    assert config.prompt.text("What is 1?") == f"What is 1? {INSTRUCTION}<think>\n"


def test_in_the_order_of_attempts_all_first_attempts_come_first(uninterrupted, config, speaker_engine, tmp_path):
    """The release's file: every problem's first attempt, then the second ones of those still open, …"""
    again = SequentialConfig(**{**config.__dict__, "output": str(tmp_path / "kept.jsonl"), "order": "attempts"})
    solution_attempts(again.output, 0).write_bytes(solution_attempts(config.output, 0).read_bytes())
    solve_sequentially(again, speaker_engine)
    solved = {
        id: next((row["attempt"] for row in rows if row["verdict"] == "correct"), None)
        for id, rows in attempts(config).items()
    }
    expected = [f"p{i}" for attempt in range(3) for i in range(24) if solved[f"p{i}"] == attempt]
    assert [row["id"] for _, row in read_jsonl(again.output)] == expected
    assert len(set(solved.values()) - {None}) > 1


def test_shuffling_takes_numpys_permutation_of_the_seed_before_the_first_are_taken():
    problems = [Problem(str(number), "?", "1") for number in range(10)]
    # numpy.random.default_rng(42).permutation(10)
    assert [int(each.id) for each in chosen_problems(problems, 42, None)] == [5, 6, 0, 7, 3, 2, 4, 9, 1, 8]
    assert [int(each.id) for each in chosen_problems(problems, 42, 3)] == [5, 6, 0]
    assert chosen_problems(problems, None, 3) == problems[:3]


def test_the_papers_recipe_draws_and_orders_its_problems_as_the_release_does():
    config = load_config(SequentialConfig, "configs/data/sequential.yaml", ["model=m", "problems=p"])
    assert (config.shuffle, config.first, config.attempts, config.order) == (42, 15_000, 3, "attempts")


@pytest.mark.parametrize("share", [0.0, 0.4, 0.9])
def test_cut_anywhere_and_started_again_it_keeps_the_same_solutions(
    uninterrupted, config, speaker_engine, share, tmp_path
):
    again = SequentialConfig(**{**config.__dict__, "output": str(tmp_path / "kept.jsonl")})
    log = solution_attempts(config.output, 0).read_bytes()
    solution_attempts(again.output, 0).write_bytes(log[: int(share * len(log))])
    assert solve_sequentially(again, speaker_engine).kept == uninterrupted.kept
    assert {row["id"]: row for _, row in read_jsonl(again.output)} == {
        row["id"]: row for _, row in read_jsonl(config.output)
    }


def test_finished_set_asks_the_engine_nothing(uninterrupted, config, speaker_engine):
    before = os.stat(solution_attempts(config.output, 0)).st_size
    solve_sequentially(config, speaker_engine)
    assert os.stat(solution_attempts(config.output, 0)).st_size == before


@pytest.mark.parametrize(
    "wrong, words", [({"prompt": PromptConfig()}, "prompt.kind is parallel"), ({"problems": ""}, "problems is not set")]
)
def test_impossible_settings_are_refused(config, wrong, words):
    with pytest.raises(ConfigError, match=words):
        check(SequentialConfig(**{**config.__dict__, **wrong}))
