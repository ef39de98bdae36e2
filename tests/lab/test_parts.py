"""Lists of parts and sums of sums: answers are right, each rule has its own width and depth, and workers are judged."""

import re
from itertools import islice

import pytest

from dccot.lab.worlds.parts import (
    WIDTH,
    Parts,
    problem_stream,
    rewrite_chosen,
    rewrite_fixed,
    rewrite_nested,
    sequential_solution,
)
from dccot.rollout.response import Response, Rollout, Segment
from dccot.rollout.tags import flaw_of, parse, sequential_flaw_of
from dccot.stages import load_recipe
from dccot.train.rewards import worker_rewards_of


@pytest.fixture(scope="module", params=["lists", "sums"])
def problems(request):
    return list(islice(problem_stream(0, request.param, "train", set()), 200))


def results_of(question: str) -> list[int]:
    """Of each part, evaluated as an expression from left to right."""
    parts: dict[str, list[str]] = {}
    for number, digit in re.findall(r"(\d+)[a-e]: (\d)", question):
        parts.setdefault(number, []).append(digit)
    signs = ["", "*", "+", "*", "+"]
    return [eval("(" * len(part) + "".join(f"{s}{d})" for s, d in zip(signs, part))) for part in parts.values()]


def rules(problem):
    return [rewrite_fixed, rewrite_nested if "|" in problem.question else rewrite_chosen]


def test_the_last_digit_of_the_sum_of_all_parts_is_the_answer_of_every_solution(problems):
    for problem in problems:
        gold = sum(results_of(problem.question)) % 10
        assert problem.gold == str(gold)
        texts = [sequential_solution(problem), *(rewrite(problem, "") for rewrite in rules(problem))]
        assert sequential_flaw_of(texts[0]) is None
        for text in texts:
            assert f"\\boxed{{{gold}}}" in text, text
            for left, sign, right, result in re.findall(r"(\d)([*+])(\d)=(\d)", text):
                assert eval(left + sign + right) % 10 == int(result)


def test_each_rule_has_its_own_width_and_depth(problems):
    for problem in problems:
        fixed, other = (rewrite(problem, "") for rewrite in rules(problem))
        assert flaw_of(fixed) is None
        if "|" in problem.question:
            deep = parse(other, 3, depth=2)
            assert deep.depth == 2 and [len(fork) for fork in deep.all_forks()] == [3] * 4
        else:
            assert [len(fork) for fork in parse(other, WIDTH).forks] == [len(results_of(problem.question))]


def test_widths_from_two_to_twelve_all_occur():
    lists = islice(problem_stream(0, "lists", "train", set()), 300)
    assert {int(problem.question.split(" parts")[0]) for problem in lists} == set(range(2, 13))


# 3*7+2 = 23, 4*2+5 = 13, 6*3+1 = 19, 2*2+8 = 12
LIST = "4 parts, …: 1a: 3, 1b: 7, 1c: 2. 2a: 4, 2b: 2, 2c: 5. 3a: 6, 3b: 3, 3c: 1. 4a: 2, 4b: 2, 4c: 8. Add them up."


@pytest.mark.parametrize(
    ("text", "rewards"),
    [
        # parts 1 and 2 are 3 + 3 = 6, part 3 is 9, part 4 is 2
        ("1, 3, 4. <spawn_workers>{A: 6|B: 9|C: 2}</spawn_workers>", [1.0, 1.0, 1.0]),
        ("1, 2, 4. <spawn_workers>{A: 6|B: 2|C: 2}</spawn_workers>", [0.0, 1.0, 1.0]),  # it was given part 1 alone
        ("1, 3, 4. <spawn_workers>{A: 6|B: 9\n?|C: 3}</spawn_workers>", [1.0, 0.0, 0.0]),  # no report, a wrong one
        ("Go. <spawn_workers>{A: 6|B: 9|C: 2}</spawn_workers>", [None] * 3),  # nobody knows who was to do what
        ("<task_1>1</task_1><task_2>2</task_2><spawn_workers>{1: 3|2: 8}</spawn_workers>", [1.0, 0.0]),  # 2 to 4: 4
        (
            "1, 3, 4. <spawn_workers>{1, 2, 3. <spawn_workers>{1: 3|2: 4|3: 0}</spawn_workers>\nA: 6|B: 9|C: 2}"
            "</spawn_workers>",
            [1.0, 1.0, 1.0, 1.0, 0.0, 1.0],  # those of worker 1 come last; part 2 is 3
        ),
    ],
)
def test_a_worker_is_judged_by_the_parts_that_it_was_given(text, rewards):
    # {first|second} are workers, innermost first
    while found := re.search(r"\{([^{}]*)\}", text):
        inside = "".join(f"<worker_{i}>{each}\n</worker_{i}>" for i, each in enumerate(found[1].split("|"), start=1))
        text = text.replace(found[0], inside)
    thread = parse(f"<think>{text}</think><answer>5</answer>", WIDTH if "task" in text else 3, depth=2)
    tokens = thread.map(lambda piece: Segment([], [0]))
    response = Response(tokens.trunk, tokens.forks, prompt=[])
    rollout = Rollout("1", 0, LIST, "0", f"<think>{text}</think><answer>5</answer>", response)
    assert worker_rewards_of(rollout, Parts().worker_rewards) == rewards


@pytest.mark.parametrize("recipe", ["configs/mini/width.yaml", "configs/mini/depth.yaml"])
def test_every_stage_of_the_recipe_has_a_configuration_that_can_run(recipe):
    _, plans = load_recipe(recipe)
    for plan in plans:
        plan.load()
