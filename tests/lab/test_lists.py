"""The boxes: solutions are right and well-formed, each goes to a worker, the test split shares no word or question."""

import re
from dataclasses import asdict
from itertools import islice

import pytest

from dccot.lab.worlds.lists import SPLITS, WORDS, ListsConfig, make_lists, problem_stream, rewrite_parallel, words_of
from dccot.rollout.tags import parse, sequential_flaw_of
from dccot.stages import load_recipe
from tests.support.rounds import rounds_of


@pytest.fixture(scope="module")
def problems():
    return list(islice(problem_stream(0, "train", set()), 400))


def test_counts_and_walks_are_right(problems):
    """Worked out again from the question alone."""
    boxes = r"Box A: (.+)\. Box B: (.+)\. Box C: (.+)\. How many (\w+)(?: numbers)? are there\?"
    digits = {"even": set("02468"), "odd": set("13579")}
    for problem in problems:
        if found := re.fullmatch(boxes, problem.question):
            items, kind = ", ".join(found.groups()[:3]).split(", "), found[4]
            inside = [item[-1] in digits[kind] if kind in digits else item in WORDS[kind].split() for item in items]
            expected = sum(inside)
        else:
            start, steps = re.fullmatch(r"Start at (\d)\. Go (.+)\. Where are you\?", problem.question).groups()
            expected = eval(start + steps.replace("up ", "+").replace("down ", "-").replace(", ", ""))
        assert problem.gold == str(expected), problem.question
        assert sequential_flaw_of(problem.solution) is None and f"\\boxed{{{expected}}}" in problem.solution


def test_every_thing_is_judged_in_its_box_and_counted(problems):
    for problem in problems:
        asked = re.findall(r"(Box [ABC]): (.+?)\.", problem.question)
        judged = re.findall(r"(Box [ABC]): (.+)\. So (\d)\.\n", problem.solution)
        for (box, items), (name, verdicts, count) in zip(asked, judged, strict=True):
            words, numbers = zip(*((each.split(":")[0], each.split(", ")[1]) for each in verdicts.split("; ")))
            assert (box, items) == (name, ", ".join(words))
            assert [number for number in numbers if number != "no"] == [str(i) for i in range(1, int(count) + 1)]


def test_no_word_is_in_two_categories():
    words = " ".join(WORDS.values()).split()
    assert len(words) == len(set(words))


def test_every_box_goes_to_a_worker_and_no_word_is_lost(problems):
    split = [problem for problem in problems if "-walk-" not in problem.id]
    for problem in split:
        text = rewrite_parallel(problem, problem.solution)
        parsed = parse(text)
        assert [worker.split(":")[0] for worker in rounds_of(parsed)[0].workers] == ["Box A", "Box B", "Box C"]
        assert re.sub(r"</?(?:spawn_workers|worker_\d)>", "", text).replace("\n\n", "\n") == problem.solution


def test_the_director_walks_and_every_step_is_checked_by_one_worker(problems):
    for problem in (problem for problem in problems if "-walk-" in problem.id):
        parsed = parse(text := rewrite_parallel(problem, problem.solution))
        (block,) = rounds_of(parsed)
        assert len(block.workers) == 3 and all(block.workers)
        assert "; ".join(worker.split(".\n")[0] for worker in block.workers) + ".\n" in problem.solution
        assert re.sub(r"<spawn_workers>.*</spawn_workers>\n", "", text, flags=re.DOTALL) == problem.solution


def test_what_the_rule_cannot_read_comes_back_as_it_is(problems):
    walk = next(problem for problem in problems if "-walk-" in problem.id)
    whole = next(problem for problem in problems if "-things-" in problem.id)
    for text in (
        walk.solution.replace(";", ",", 1),
        "<think>\n4 up 3: 7; 7 down 2: 5.\n</think><answer>\\boxed{5}</answer>",
        re.sub(r"(Box B.+) So ", r"\1 Thus ", whole.solution),
        whole.solution.replace("Box C:", "And then\nBox C:"),
    ):
        assert rewrite_parallel(whole, text) == text


def test_files_are_reproducible_and_the_test_splits_words_and_questions_are_in_no_other(tmp_path):
    for category in WORDS:
        assert not set(words_of(category, "test")) & set(words_of(category, "train"))
    for again in (tmp_path, tmp_path / "again"):
        make_lists(ListsConfig(base=50, train=50, validation=20, test=50), again)
    files = [tmp_path / "base.jsonl", *(tmp_path / "problems" / f"{split}.jsonl" for split in SPLITS[1:])]
    assert all(file.read_bytes() == (tmp_path / "again" / file.relative_to(tmp_path)).read_bytes() for file in files)
    asked = [re.findall(r'"question": "(.+?)"', file.read_text()) for file in files]
    assert [len(each) for each in asked] == [50, 50, 20, 50]
    assert len(set().union(*asked)) == 170
    boxes = [" ".join(question for question in each if "numbers" not in question) for each in (asked[1], asked[3])]
    used = [set(re.findall(r"\w+", text)) & set(" ".join(WORDS.values()).split()) for text in boxes]
    assert used[0] and used[1] and not used[0] & used[1]


@pytest.mark.parametrize("recipe", ["configs/real/real.yaml", "configs/real/check.yaml"])
def test_every_stage_of_the_recipe_has_a_configuration_that_can_run(recipe):
    for plan in load_recipe(recipe)[1]:
        plan.load()


def test_the_sequential_model_goes_through_the_same_rl():
    stages = {plan.name: plan.load() for plan in load_recipe("configs/real/real.yaml")[1] if plan.stage.run == "rl"}
    for parallel, sequential in (("dapo", "sequential_dapo"), ("cispo", "sequential_cispo")):
        ours, theirs = asdict(stages[parallel]), asdict(stages[sequential])
        different = {key for key in ours if ours[key] != theirs[key]}
        assert different == {"name", "seed", "model", "prompt"}
        assert {key for key in ours["prompt"] if ours["prompt"][key] != theirs["prompt"][key]} == {"kind"}
