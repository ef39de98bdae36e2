"""Countdown as written searches: what they say is true, and the rule hands out every opening once."""

from __future__ import annotations

import random
import re
from dataclasses import asdict
from itertools import islice

import pytest

from dccot.core.files import read_jsonl
from dccot.data.countdown import CountdownConfig, CountdownJudge, evaluate, moves, problem_stream, terms_of
from dccot.data.problems import Problem
from dccot.lab.worlds.countdown import (
    CountdownSearch,
    CountdownWorld,
    make_countdown,
    rewrite_parallel,
    sequential_solution,
)
from dccot.lab.worlds.world import TinyModel
from dccot.model.tokenizer import open_tokenizer
from dccot.rollout.response import Response, Rollout, Segment
from dccot.rollout.tags import Flaw, flaw_of, parse
from dccot.stages import load_recipe
from dccot.train.rewards import RewardConfig, reward_of

SMALL = CountdownConfig(smallest=2, largest=3, highest=12)
PROBLEMS = list(islice(problem_stream(0, "train", SMALL), 60))


def solved(problem: Problem) -> tuple[str, str]:
    text = sequential_solution(problem, SMALL.limit, random.Random(problem.id))
    return text, rewrite_parallel(problem, text)


def steps(text: str) -> list[tuple[str, int]]:
    """Every operation that a text shows, as an expression, and what it says that it gives."""
    found = [(step, int(result)) for step, result in re.findall(r"(\d+[-+*/]\d+)=(\d+)", text)]
    for result, other, last in re.findall(r"=(\d+), (\d+):(.*)", text):
        small, large = sorted([int(result), int(other)])
        found += [(f"{large}{operator}{small}", int(value)) for operator, value in re.findall(r" ([-+*/])(\d+)", last)]
    return found


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: problem.id)
def test_every_step_is_true_and_what_is_found_is_right(problem):
    for text in solved(problem):
        assert len(problem.numbers) == 2 or steps(text)
        for step, said in steps(text):
            assert evaluate(step)[0] == said
        if "none</answer>" not in text:
            assert CountdownJudge().judge(text, problem.gold) == "correct"


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: problem.id)
def test_workers_find_whatever_there_is_and_a_short_search_is_left_alone(problem):
    text, parallel = solved(problem)
    if parallel == text:
        first = text.splitlines()[2]
        assert len(problem.numbers) == 2 or first.endswith(" yes") or "none" not in text
        return
    assert flaw_of(parallel, 12) is None and CountdownJudge().judge(parallel, problem.gold) == "correct"
    [workers] = parse(parallel, 12).forks
    openings = [line.partition(",")[0] for worker in workers for line in worker.trunk[0].splitlines() if ":" in line]
    first_moves = list(moves(terms_of(problem.numbers), SMALL.limit))
    assert len(openings) == len(first_moves)
    assert len(set(openings)) == len(openings) or len(set(problem.numbers)) < 3  # two equal numbers: twice the same


def test_the_searches_of_the_docstring():
    problem = Problem(
        "1", "Reach 20 with 3, 8, 4: use each number exactly once, with +, -, * and /.", "20 from 3, 8, 4"
    )
    text = "<think>\nSums first.\n8+3=11, 4: +15 -7 *44\n8-3=5, 4: +9 -1 *20 yes\n"
    parallel = rewrite_parallel(problem, f"{text}</think><answer>(8-3)*4</answer>")
    begin = "<worker_1>8+3=11, 4: +15 -7 *44\nnone</worker_1><worker_2>8-3=5, 4: +9 -1 *20 yes\n(8-3)*4</worker_2>"
    assert begin in parallel
    assert "<worker_8>none</worker_8>" in parallel, "8 is not divisible by 3"
    assert parallel.endswith("</spawn_workers>\n</think><answer>(8-3)*4</answer>")


@pytest.mark.parametrize(("flaw", "expected"), [(None, 1.0), (Flaw.NO_SPAWN, 1.0), (Flaw.STRAY_TAG, 0.5)])
def test_a_response_that_needed_no_workers_is_not_worth_less(flaw, expected):
    response = Response([Segment([], [1, 2])], prompt=[0])
    rollout = Rollout("1", 0, "?", "3 from 1, 2", "…", response, flaw, "correct")
    assert reward_of(rollout, RewardConfig(cutoff=5), 10, CountdownSearch.reward) == expected


@pytest.mark.parametrize("recipe", ["configs/mini/countdown.yaml", "configs/real/countdown.yaml"])
def test_the_recipe_treats_both_alike_and_every_stage_can_run(recipe):
    _, plans = load_recipe(recipe)
    by_name = {plan.name: asdict(plan.load()) for plan in plans}
    kept_apart = {"name", "seed", "model", "data", "prompt", "rollout"}
    for kind in ("sft", "rl"):
        alone, parallel = by_name[f"{kind}_sequential"], by_name[f"{kind}_parallel"]
        assert {key for key in alone if alone[key] != parallel[key]} <= kept_apart
        files = [by_name[f"{kind}_{which}"]["data"]["train"] for which in ("sequential", "parallel")]
        assert len(set(files)) == 1
        differ = {key for key in alone["rollout"] if alone["rollout"][key] != parallel["rollout"][key]}
        assert differ == {"workers"}
    assert len({by_name[f"eval_{which}"]["budget"] for which in ("sequential", "parallel")}) == 1


def test_the_world_is_written_and_its_tokenizer_has_a_token_for_every_number_of_two_digits(tmp_path):
    sizes = {"base": 20, "train": 10, "validation": 3, "test": 5}
    make_countdown(CountdownWorld(**sizes, problems=SMALL, model=TinyModel()), tmp_path)
    rows = [row for _, row in read_jsonl(tmp_path / "base.jsonl")]
    assert len(rows) == 20 and all(row["solution"].startswith("<think>\n") for row in rows)
    tokenizer = open_tokenizer(tmp_path / "init")
    for row in rows:
        ids = tokenizer.encode(row["solution"], add_special_tokens=False)
        assert tokenizer.decode(ids) == row["solution"]
        numbers = [token for token in tokenizer.convert_ids_to_tokens(ids) if re.fullmatch(r"\d\d", token)]
        assert numbers == re.findall(r"\d\d", row["solution"])
