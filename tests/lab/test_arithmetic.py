"""The miniature world: its questions, golds, solutions, rewriting and tokenizer, checked by Python's own arithmetic."""

import re
import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from dccot.data.problems import Problem
from dccot.data.prompts import PromptConfig
from dccot.lab.worlds.arithmetic import (
    FAMILIES,
    LARGER,
    SENTENCES,
    make_splits,
    make_tokenizer,
    rewrite_parallel,
    rewrite_unmarked,
    sequential_solution,
)
from dccot.rollout.tags import TagIds, all_tags, answer_block, flaw_of, parse
from tests.support.rounds import rounds_of

SIZES = {"base": 400, "train": 400, "validation": 100, "test": 100, LARGER: 200}
SPLITS = make_splits(0, SIZES)
PROBLEMS = [problem for split in SPLITS.values() for problem in split]
any_problem = st.sampled_from(PROBLEMS)


def gold_by_python(question: str) -> str:
    """The answer from the question's text alone."""
    asked = re.fullmatch(r"(.+) (\w) to (\w) and keep the last digit: (.*)\.", question)
    steps = asked[4].split(", ")
    first = next(i for i, step in enumerate(steps) if step.startswith(asked[2]))
    last = next(i for i, step in enumerate(steps) if re.findall(r"(\w): ", step)[-1] == asked[3])
    steps = [without_labels(step) for step in steps[first : last + 1]]
    if asked[1] == "Add":
        return str(sum(map(eval, steps)))[-1]
    x = int(re.fullmatch(r"Multiply (\d) and add in turn", asked[1])[1])
    for number, digit in enumerate(map(int, steps)):
        x = x + digit if number % 2 else x * digit
    return str(x)[-1]


def without_labels(text: str) -> str:
    return re.sub(r"\b[a-zA-Z]: ", "", text)


def is_rewritten(problem, text: str) -> bool:
    """Everything is, except a chain that checks nothing: it has no use for workers."""
    return problem.family != "chain" or " to " in text


def test_splits_share_no_question_even_across_seeds():
    other = make_splits(1, {"train": 400, "base": 400})
    test = {p.question for p in SPLITS["test"] + SPLITS["validation"]}
    for name in ("base", "train", LARGER):
        assert test.isdisjoint(p.question for p in SPLITS[name] + other.get(name, []))
    assert len({p.question for p in PROBLEMS}) == len({p.id for p in PROBLEMS}) == sum(SIZES.values())


def test_a_seed_gives_the_same_problems_again_and_more_of_them_when_asked_for_more():
    again = make_splits(0, {"train": 500})["train"]
    assert again[:400] == SPLITS["train"]
    assert make_splits(1, {"train": 50})["train"] != again[:50]


def test_every_held_out_larger_problem_is_larger_than_any_of_its_family_in_training():
    for family in FAMILIES:
        of = {name: [p.question.count(":") for p in split if p.family == family] for name, split in SPLITS.items()}
        assert max(of["base"] + of["train"]) < min(of[LARGER])


def test_an_unknown_split_is_refused_by_name():
    with pytest.raises(ValueError, match=r"dev.*validation"):
        make_splits(0, {"dev": 1})


@given(any_problem)
def test_gold_is_what_python_makes_of_the_question(problem):
    assert problem.gold == gold_by_python(problem.question)


def check_equations(text: str) -> None:
    for equation in re.findall(r"[\d+*]+(?:=[\d+*]+)+", without_labels(text)):
        assert len({eval(side) % 10 for side in equation.split("=")}) == 1


@given(any_problem, st.integers(0, 5), st.booleans())
def test_every_equation_of_a_sequential_solution_is_true_and_it_ends_in_the_gold(problem, seed, marked):
    text = sequential_solution(problem, seed=seed, marked=marked)
    check_equations(text)
    assert text.startswith("<think>\n") and text.endswith(f"</think><answer>\\boxed{{{problem.gold}}}</answer>")


@given(any_problem)
def test_care_costs_words_and_haste_saves_them(problem):
    written = [sequential_solution(problem, seed=seed) for seed in range(60)]
    texts = {text.splitlines()[1]: text for text in written if " to " in text}
    careful, plain, quick = (texts[manner] for manner in ("Carefully.", "Plainly.", "Quickly."))
    once = re.sub(", yes .+", "", careful)
    assert len(quick) <= len(plain) == len(once) + len("Plainly.") - len("Carefully.")


@given(any_problem, st.integers(0, 5))
def test_a_rewritten_solution_is_well_formed_and_still_correct(problem, attempt):
    sequential = sequential_solution(problem, seed=attempt)
    text = rewrite_parallel(Problem(problem.id, problem.question, problem.gold), sequential, attempt=attempt)
    if is_rewritten(problem, sequential):
        assert flaw_of(text) is None
        assert answer_block(text) == f"\\boxed{{{problem.gold}}}"
    else:
        assert text == sequential


@given(any_problem)
def test_rewriting_adds_tags_and_orders_the_parts_and_takes_nothing_away(problem):
    sequential = sequential_solution(problem, seed=3)
    text = re.sub(r"</?(?:spawn_workers|worker_\d)>", "", rewrite_parallel(problem, sequential))
    assert sorted(text.splitlines()) == sorted(sequential.splitlines())
    assert [int(number) for number in re.findall(r"^(\d)\) ", text, re.M)] in ([], [1, 2, 3])


@given(any_problem.filter(lambda p: p.family != "chain"))
def test_each_step_goes_to_exactly_one_worker_in_order(problem):
    workers = rounds_of(parse(rewrite_parallel(problem, sequential_solution(problem))))[0].workers
    labels = [re.findall(r"([a-zA-Z]): ", re.sub(", yes .+", "", text)) for text in workers]
    assert all(labels) and "".join(map("".join, labels)) == problem.labels


@given(any_problem.filter(lambda p: p.family == "chain"))
def test_the_director_walks_a_chain_alone(problem):
    sequential = next(text for seed in range(20) if " to " in (text := sequential_solution(problem, seed=seed)))
    director = rounds_of(parse(rewrite_parallel(problem, sequential)))[0].director
    assert re.findall(r"^([a-zA-Z]): ", director, re.M) == list(problem.labels)


@given(any_problem, st.integers(0, 5))
def test_an_unmarked_solution_has_no_parts_and_rewriting_finds_them(problem, attempt):
    sequential = sequential_solution(problem, seed=attempt, marked=False)
    assert not re.search(r"\d\)| to |end: ", sequential)
    text = rewrite_unmarked(problem, sequential, attempt=attempt)
    check_equations(text)
    assert flaw_of(text) is None and answer_block(text) == f"\\boxed{{{problem.gold}}}"
    assert text.splitlines()[:2] == sequential.splitlines()[:2]
    [spawned] = rounds_of(parse(text))
    labels = [re.findall(r"^([a-zA-Z]): ", words, re.M) for words in (spawned.director, *spawned.workers)]
    steps = re.findall(r"^([a-zA-Z]): ", sequential, re.M)
    if problem.family == "chain":
        assert labels[0] == steps and all(len(checked) == 1 and checked[0] in steps for checked in labels[1:])
    else:
        assert not labels[0] and all(labels[1:]) and [label for part in labels for label in part] == steps


def test_an_unmarked_solution_rewritten_by_hand():
    question = "Add a to h and keep the last digit: a: 3*b: 4, c: 6*d: 9, e: 6*f: 7, g: 2*h: 8."
    once = "a: 3*b: 4=2\nc: 6*d: 9=4, so 4+2=6\ne: 6*f: 7=2, so 2+6=8\ng: 2*h: 8=6, so 6+8=4\n"
    text = f"<think>\nPlainly.\n{once}</think><answer>\\boxed{{4}}</answer>"
    assert rewrite_unmarked(Problem("p", question, "4"), text) == (
        "<think>\nPlainly.\na to b, c to f, g to h.\n<spawn_workers>"
        "<worker_1>1) a to b\na: 3*b: 4=2\n1: 2\n</worker_1>"
        "<worker_2>2) c to f\nc: 6*d: 9=4\ne: 6*f: 7=2, so 2+4=6\n2: 6\n</worker_2>"
        "<worker_3>3) g to h\ng: 2*h: 8=6\n3: 6\n</worker_3>"
        "</spawn_workers>2: 6+2=8\n3: 6+8=4\n</think><answer>\\boxed{4}</answer>"
    )


PRODUCTS = next(p for p in SPLITS["train"] if p.family == "products")
WHOLE, UNMARKED = (sequential_solution(PRODUCTS, marked=marked) for marked in (True, False))


@pytest.mark.parametrize(
    "rewrite, broken",
    [(rewrite_unmarked, text) for text in (UNMARKED.replace("*", "/"), UNMARKED.replace(".\n", ".\nHm.\n"), WHOLE)]
    + [
        (rewrite_parallel, WHOLE.replace(*change))
        for change in (("2: ", "4: "), ("\n1: ", " 1: "), (" to ", " until "))
    ]
    + [(rewrite_parallel, re.sub(r"\n(\d\) )", r"\nHm.\n\1", WHOLE))]
    + [(rewrite, text) for rewrite in (rewrite_parallel, rewrite_unmarked) for text in ("", "<think>\n")],
)
def test_a_text_that_the_rule_cannot_read_comes_back_unchanged(rewrite, broken):
    assert rewrite(PRODUCTS, broken) == broken


@pytest.mark.parametrize("single", [True, False])
def test_any_text_survives_the_tokenizer(single, tmp_path):
    tokenizer = make_tokenizer(single)
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)

    pieces = st.sampled_from([*all_tags(3), *SENTENCES, "a: ", ", ", "<", "\n", " ", "é", "12"])

    @settings(max_examples=200, deadline=None)
    @given(st.one_of(st.text(), st.lists(pieces).map("".join)))
    def survives(text):
        ids, normal = tokenizer.encode(text), unicodedata.normalize("NFC", text)
        assert tokenizer.decode(ids) == normal and loaded.encode(text) == ids and loaded.decode(ids) == normal

    survives()
    for problem in PROBLEMS[:50]:
        survives.hypothesis.inner_test(rewrite_parallel(problem, sequential_solution(problem)))


def test_a_prompt_costs_few_tokens_more_than_its_question():
    tokenizer = make_tokenizer()
    for kind in ("parallel", "sequential", "raw_sequential"):
        question = PROBLEMS[0].question
        assert len(PromptConfig(kind).ids(tokenizer, question)) - len(tokenizer.encode(question)) <= 7


def test_tags_are_one_token_each_or_several_that_a_newline_can_overshoot():
    one, several = make_tokenizer(True), make_tokenizer(False)
    assert {len(one.encode(tag)) for tag in all_tags(3)} == {1}
    assert min(len(several.encode(tag)) for tag in all_tags(3)) > 2
    assert TagIds.of(one).eos == one.eos_token_id and TagIds.of(several).workers == 3
    assert several.decode(several.encode("</worker_1>\n")[-1:]) == ">\n"
