"""Lists of parts and sums of sums: answers are right, and each rule gives a solution of its own width and depth."""

import re
from itertools import islice

import pytest

from dccot.lab.worlds.parts import (
    WIDTH,
    problem_stream,
    rewrite_chosen,
    rewrite_fixed,
    rewrite_nested,
    sequential_solution,
)
from dccot.rollout.tags import flaw_of, parse, sequential_flaw_of
from dccot.stages import load_recipe


@pytest.fixture(scope="module", params=["lists", "sums"])
def problems(request):
    return list(islice(problem_stream(0, request.param, "train", set()), 200))


def test_the_last_digit_of_all_digits_is_the_answer_of_every_solution(problems):
    rewrites = [rewrite_fixed, rewrite_chosen, *([rewrite_nested] if "|" in problems[0].question else [])]
    for problem in problems:
        gold = sum(map(int, re.findall(r"\d", problem.question))) % 10
        assert problem.gold == str(gold)
        texts = [sequential_solution(problem), *(rewrite(problem, "") for rewrite in rewrites)]
        assert sequential_flaw_of(texts[0]) is None
        for text in texts:
            assert f"\\boxed{{{gold}}}" in text, text
            for left, right, total in re.findall(r"(\d) \+ (\d) = (\d)", text):
                assert (int(left) + int(right)) % 10 == int(total)


def test_each_rule_has_its_own_width_and_depth(problems):
    nested = "|" in problems[0].question
    for problem in problems:
        parts = problem.question.count(":")
        assert flaw_of(rewrite_fixed(problem, "")) is None
        chosen = parse(rewrite_chosen(problem, ""), WIDTH)
        assert [len(fork) for fork in chosen.forks] == [parts]
        if nested:
            deep = parse(rewrite_nested(problem, ""), 3, depth=2)
            assert deep.depth == 2 and [len(fork) for fork in deep.all_forks()] == [3] * 4


def test_widths_from_two_to_twelve_all_occur():
    lists = islice(problem_stream(0, "lists", "train", set()), 300)
    assert {problem.question.count(":") for problem in lists} == set(range(2, 13))


@pytest.mark.parametrize("recipe", ["configs/mini/width.yaml", "configs/mini/depth.yaml"])
def test_every_stage_of_the_recipe_has_a_configuration_that_can_run(recipe):
    _, plans = load_recipe(recipe)
    for plan in plans:
        plan.load()
