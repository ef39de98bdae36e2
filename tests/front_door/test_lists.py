"""The lists: solutions are right and well-formed, workers take the parts, and the test split shares neither words nor questions."""

import re
from dataclasses import asdict
from itertools import islice

import pytest

from dccot.miniature.lists import SPLITS, WORDS, ListsConfig, make_lists, problem_stream, rewrite_parallel, words_of
from dccot.recipe import load_recipe
from dccot.rollout.protocol import parse, sequential_flaw_of
from dccot.stages import load_stage


@pytest.fixture(scope="module")
def problems():
    return list(islice(problem_stream(0, "train", set()), 400))


def test_counts_and_chains_are_right(problems):
    """Worked out again from the question alone."""
    for problem in problems:
        if found := re.fullmatch(r"How many of these are (\w+): (.+)\?", problem.question):
            expected = sum(item in WORDS[found[1]].split() for item in found[2].split(", "))
        elif found := re.fullmatch(r"How many of these numbers are larger than (\d+): (.+)\?", problem.question):
            expected = sum(int(item) > int(found[1]) for item in found[2].split(", "))
        else:
            start, steps = re.fullmatch(r"Start with (\d)\. Then (.+), and keep only .+", problem.question).groups()
            expected = int(start)
            for step in steps.split(", "):
                times = {"double": 2, "triple": 3}.get(step.split()[0])
                expected = (expected * times if times else expected + int(step.removeprefix("add "))) % 10
        assert problem.gold == str(expected), problem.question
        assert sequential_flaw_of(problem.solution) is None and f"\\boxed{{{expected}}}" in problem.solution


def test_no_word_is_in_two_categories():
    words = " ".join(WORDS.values()).split()
    assert len(words) == len(set(words))


def test_every_part_goes_to_a_worker_and_no_word_is_lost(problems):
    split = [problem for problem in problems if "-chain-" not in problem.id]
    for problem in split:
        text = rewrite_parallel(problem, problem.solution)
        parsed = parse(text)
        assert [worker.split(":")[0] for worker in parsed.rounds[0].workers] == ["Part 1", "Part 2", "Part 3"]
        assert re.sub(r"</?(?:spawn_workers|worker_\d)>", "", text).replace("\n\n", "\n") == problem.solution


def test_what_does_not_split_comes_back_as_it_is(problems):
    chain = next(problem for problem in problems if "-chain-" in problem.id)
    whole = next(problem for problem in problems if "-things-" in problem.id)
    for text in (
        chain.solution,
        whole.solution.replace("Part 2 has", "Part 2 had"),
        whole.solution.replace("Part 3:", "And then\nPart 3:"),
    ):
        assert rewrite_parallel(whole, text) == text


def test_words_and_questions_of_the_test_split_are_in_no_other(tmp_path):
    for category in WORDS:
        assert not set(words_of(category, "test")) & set(words_of(category, "train"))
    make_lists(ListsConfig(base=50, train=50, validation=20, test=50), tmp_path)
    files = [tmp_path / "base.jsonl", *(tmp_path / "problems" / f"{split}.jsonl" for split in SPLITS[1:])]
    asked = [re.findall(r'"question": "(.+?)"', file.read_text()) for file in files]
    assert [len(each) for each in asked] == [50, 50, 20, 50]
    assert len(set().union(*asked)) == 170
    words = [
        set(re.findall(r"\w+", " ".join(re.findall(r"How many of these are \w+: .+", "\n".join(each))))) for each in (asked[1], asked[3])
    ]
    assert not (words[0] & words[1]) - {"How", "many", "of", "these", "are", *WORDS}


def test_the_same_seed_gives_the_same_bytes(tmp_path):
    for name in ("one", "two"):
        make_lists(ListsConfig(seed=3, base=5, train=5, validation=5, test=5), tmp_path / name)
    for file in ("base.jsonl", "problems/test.jsonl"):
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()


@pytest.mark.parametrize("recipe", ["configs/real/real.yaml", "configs/real/check.yaml"])
def test_every_stage_of_the_recipe_has_a_configuration_that_can_run(recipe):
    for plan in load_recipe(recipe)[1]:
        load_stage(plan)


def test_the_sequential_model_goes_through_the_same_rl():
    stages = {plan.name: load_stage(plan) for plan in load_recipe("configs/real/real.yaml")[1] if plan.stage.run == "rl"}
    for parallel, sequential in (("dapo", "sequential_dapo"), ("cispo", "sequential_cispo")):
        ours, theirs = asdict(stages[parallel]), asdict(stages[sequential])
        different = {key for key in ours if ours[key] != theirs[key]}
        assert different == {"name", "seed", "model", "prompt"}
        assert {key for key in ours["prompt"] if ours["prompt"][key] != theirs["prompt"][key]} == {"kind"}
