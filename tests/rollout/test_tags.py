"""The protocol's rules, each with a text that breaks only it."""

import random

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from dccot.lab.worlds import bigram as tiny
from dccot.rollout.tags import (
    Flaw,
    IllFormed,
    TagIds,
    answer_block,
    flaw_of,
    overshoots,
    parse,
    release_flaw_of,
    sequential_flaw_of,
)
from tests.support.rounds import Round, final_of, rounds_of
from tests.support.tag_soup import oracle, soup

BLOCK = "<spawn_workers><worker_1>a</worker_1><worker_2>b</worker_2></spawn_workers>"
GOOD = f"<think>plan{BLOCK}so</think><answer>4</answer>"


def test_a_well_formed_text_falls_into_its_parts():
    """White space between a block's tags is dropped, and at the end; random texts are in test_tag_soup.py."""
    spaced = GOOD.replace("<worker_", "\n<worker_").replace("</spawn", " </spawn").replace("so<", f"so{BLOCK}\nthen<")
    parsed = parse(f" {spaced}\n", workers=2)
    texts = ["a</worker_1>", "b</worker_2>"]
    assert rounds_of(parsed) == [
        Round(" <think>plan<spawn_workers>", texts),
        Round("so<spawn_workers>", texts),
    ]
    assert final_of(parsed) == "\nthen</think><answer>4</answer>"
    assert flaw_of(GOOD, workers=2) is None
    assert flaw_of(GOOD, workers=1) == flaw_of(GOOD, workers=3) == Flaw.WORKER_ORDER


END, EMPTY = "</think><answer>4</answer>", "<spawn_workers></spawn_workers>"
SWAPPED = GOOD.replace("worker_1", "x").replace("worker_2", "worker_1").replace("x", "worker_2")
FLAWS = {  # texts, and changes to the good one
    Flaw.NO_THINK: ["", "plan", f"x{GOOD}", f"<answer>4</answer>{GOOD}", ("<think>", "")],
    Flaw.NO_SPAWN: [f"<think>plan{END}"],
    Flaw.EMPTY_DIRECTOR: [f"<think> \n{BLOCK}so{END}", f"<think>plan{BLOCK} {BLOCK}so{END}"],
    Flaw.WORKER_ORDER: [("worker_1", "worker_9"), SWAPPED, ("<worker_2>b</worker_2>", ""), (BLOCK, EMPTY)]
    + [("</spawn_workers>", "<worker_3>c</worker_3></spawn_workers>")],
    Flaw.TEXT_BETWEEN_WORKERS: [(tag, f"x{tag}") for tag in ("<worker_1>", "<worker_2>", "</spawn_workers>")],
    Flaw.TAG_IN_WORKER: [("b</", "<think></"), ("a</", f"{BLOCK}</"), ("a</worker_1>", "a</worker_2>")],
    Flaw.OPEN_WORKER: [GOOD.partition("b</")[0]],
    Flaw.OPEN_SPAWN: [GOOD.partition("<worker_1>")[0], GOOD.partition("</spawn_workers>")[0]],
    Flaw.STRAY_TAG: [("so", "<worker_1>"), ("so", "</spawn_workers>"), ("plan", "plan<think>")],
    Flaw.OPEN_THINK: ["<think>plan", GOOD.partition("</think>")[0]],
    Flaw.NO_ANSWER: [GOOD.partition("<answer>")[0], ("<answer>", "x<answer>"), ("<answer>", "</answer>")],
    Flaw.TAG_IN_ANSWER: [("4", "<answer>4"), ("4", "</think>")],
    Flaw.OPEN_ANSWER: [GOOD.removesuffix("</answer>")],
    Flaw.TEXT_AFTER_ANSWER: [f"{GOOD}x", f"{GOOD}<think>", f"{GOOD}<answer>4</answer>"],
}


@pytest.mark.parametrize(("flaw", "text"), [(flaw, text) for flaw, texts in FLAWS.items() for text in texts])
def test_each_broken_rule_is_named(flaw, text):
    assert set(FLAWS) == set(Flaw) - {Flaw.TASKS}  # which only a chosen number of workers can break
    assert flaw_of(text if isinstance(text, str) else GOOD.replace(*text), workers=2) == flaw


CRAFTED = {  # change to the good text → whether the release accepts it; the strict rule refuses all fifteen
    ("a</", "a <think> a</"): True,  # workers and the answer may hold any other tag
    ("a</", "a <answer> a</"): True,
    ("a</", "a <worker_2> a</"): True,
    ("a</", "a </worker_2> a</"): True,
    ("b</", "b <spawn_workers> b</"): True,
    ("4", "<think>4"): True,
    ("4", "</think>4"): True,
    ("4", "<worker_1>4</worker_1>"): True,
    ("a</", "a </think> a</"): False,  # the first occurrence of a tag counts
    ("b</", "b </spawn_workers> b</"): False,
    ("a</", "a</worker_1> a</"): False,
    ("4", "4</answer>4"): False,
    ("<worker_2>b</worker_2>", ""): False,
    ("</think>", "</think>so"): False,
    ("<think>plan", "<think>"): False,
}


@pytest.mark.parametrize(("change", "accepted"), CRAFTED.items())
def test_of_fifteen_texts_with_stray_or_nested_tags_the_release_accepts_eight(change, accepted):
    """Its rule as described: the first occurrence of each tag, and any other tag inside workers and the answer. Which
    fifteen texts were tried is not known; these follow from that description.
    """
    text = GOOD.replace(*change)
    assert text != GOOD and flaw_of(text, workers=2) is not None
    assert (release_flaw_of(text, workers=2) is None) is accepted
    assert len(CRAFTED) == 15 and sum(CRAFTED.values()) == 8


def test_what_is_well_formed_by_the_strict_rule_is_so_by_the_releases():
    rng, well_formed = random.Random(0), 0
    for _ in range(3000):
        workers = rng.choice((1, 2, 3))
        if oracle(text := soup(rng, workers), workers):
            well_formed += 1
            assert release_flaw_of(text, workers) is None, text
    assert well_formed > 500


def test_the_error_shows_where_reading_stopped():
    with pytest.raises(IllFormed, match=r"stray_tag at …'<think>plan<worker_1>'"):
        parse("<think>plan<worker_1>rest", workers=2)


@pytest.mark.parametrize(
    ("text", "flaw"),
    [
        ("<think>a</think>4", None),
        (" <think>\na\n</think>\n<answer>4</answer>", None),
        ("a</think>4", Flaw.NO_THINK),
        ("x<think>a</think>4", Flaw.NO_THINK),
        ("<think>a", Flaw.OPEN_THINK),
        ("<think>a</think> \n", Flaw.NO_ANSWER),
        ("<think>a<think>b</think>4", Flaw.STRAY_TAG),
        ("<think>a</think>4</think>", Flaw.STRAY_TAG),
        ("<think>a</think>4<think>", Flaw.STRAY_TAG),
    ],
)
def test_a_sequential_response_thinks_once_and_then_answers(text, flaw):
    assert sequential_flaw_of(text) == flaw


@pytest.mark.parametrize(
    ("text", "answer"),
    [("4", None), ("<answer> 4 </answer>", " 4 "), ("<answer>1</answer><answer>2</answer>x", "2"), ("<answer>3", "3")],
)
def test_the_answer_is_the_last_block(text, answer):
    assert answer_block(text) == answer


@pytest.mark.parametrize("kind", ["single", "spelled"])
@pytest.mark.parametrize("workers", [1, 3, 12])
def test_tag_ids_spell_the_tags(kind, workers):
    words = tiny.tokenizer(kind, workers)
    tags = TagIds.of(words, workers)
    assert words.decode(list(tags.spawn_close)) == "</spawn_workers>"
    assert [words.decode(list(ids)) for ids in tags.worker_open] == [f"<worker_{i}>" for i in range(1, workers + 1)]
    lengths = {len(tags.spawn_close), *map(len, tags.worker_open)}
    assert lengths == {1} if kind == "single" else min(lengths) > 1
    assert tags.eos == words.convert_tokens_to_ids(tiny.EOS)


def test_a_tokenizer_that_cannot_spell_a_tag_or_has_no_end_is_refused():
    # no p, o or _
    words = Tokenizer(models.BPE(vocab={character: i for i, character in enumerate("</>thinkaswer")}, merges=[]))
    words.decoder = decoders.Fuse()
    with pytest.raises(ValueError, match="does not give '<spawn_workers>' back"):
        TagIds.of(PreTrainedTokenizerFast(tokenizer_object=words, eos_token="</s>"))
    endless = tiny.tokenizer("single")
    endless.eos_token = None
    with pytest.raises(ValueError, match="has no eos token"):
        TagIds.of(endless)


@pytest.mark.parametrize(
    "text, expected",
    [
        ("a<spawn_workers><worker_1>b</worker_1><worker_2>c</worker_2></spawn_workers>\n", {}),
        (
            "a<spawn_workers>\n<worker_1>b</worker_1>\n\n<worker_2>c</worker_2> </spawn_workers>",
            {"newline": 2, "space": 1},
        ),
        ("a<spawn_workers>The<worker_1>b</worker_1></<worker_2>c</worker_2></spawn_workers>", {"text": 1, "tag": 1}),
        ("a<spawn_workers><worker_1>no end of it<worker_2>c</worker_2></spawn_workers>\n\nso", {}),
    ],
)
def test_what_a_token_wrote_after_a_tag_is_counted_by_kind(text, expected):
    assert overshoots(text) == expected


# ---- chosen widths, workers of workers ----

LISTED = "<task_1>x</task_1><task_2>y</task_2>"
INNER = f"<worker_1>a{BLOCK}b</worker_1>"
NESTED = f"<think>plan<spawn_workers>{INNER}<worker_2>c</worker_2></spawn_workers>so</think><answer>4</answer>"
CHOSEN = GOOD.replace("plan", f"plan {LISTED}\n")


def test_a_worker_with_workers_falls_into_its_parts():
    parsed = parse(NESTED, 2, depth=2)
    assert parsed.trunk == ["<think>plan<spawn_workers>", "so</think><answer>4</answer>"]
    [[one, two]] = parsed.forks
    assert (one.trunk, two.trunk) == (["a<spawn_workers>", "b</worker_1>"], ["c</worker_2>"])
    assert [[worker.trunk for worker in fork] for fork in one.forks] == [[["a</worker_1>"], ["b</worker_2>"]]]


@pytest.mark.parametrize(
    ("text", "workers", "depth", "flaw"),
    [
        (NESTED, 2, 2, None),
        (NESTED, 2, 1, Flaw.TAG_IN_WORKER),
        (GOOD, 2, 3, None),
        (NESTED.replace(">a<spawn", "> <spawn"), 2, 2, Flaw.EMPTY_DIRECTOR),
        (NESTED.replace("b</worker_1>", ""), 2, 2, Flaw.TAG_IN_WORKER),
        (NESTED.split("b</worker_2>")[0], 2, 2, Flaw.OPEN_WORKER),
        (CHOSEN, [1, 3], 1, None),
        (CHOSEN, [2, 2], 1, None),
        (CHOSEN, 2, 1, None),  # ordinary text where the number is fixed
        (CHOSEN, [3, 8], 1, Flaw.TASKS),
        (CHOSEN, [1, 1], 1, Flaw.TASKS),
        (GOOD, [1, 3], 1, Flaw.TASKS),  # nothing listed
        (CHOSEN.replace("</task_1>", ""), [1, 3], 1, Flaw.TASKS),
        (CHOSEN.replace("task_2", "task_3"), [1, 3], 1, Flaw.TASKS),
        (CHOSEN.replace(LISTED, LISTED + "<task_3></task_3>"), [1, 3], 1, Flaw.WORKER_ORDER),
        (CHOSEN.replace("so", f"so{LISTED}"), [1, 3], 1, Flaw.TASKS),  # listed, and nobody spawned
        (CHOSEN.replace("4", "<task_1>"), [1, 3], 1, Flaw.TAG_IN_ANSWER),
        (CHOSEN.replace("a</worker_1>", "<task_1>a</worker_1>"), [1, 3], 1, Flaw.TASKS),
        (CHOSEN.split("<spawn")[0], [1, 3], 1, Flaw.OPEN_THINK),
        (NESTED.replace("plan", LISTED), [1, 3], 2, Flaw.TASKS),  # the worker listed none
        (NESTED.replace("plan", LISTED).replace(">a<spawn", f">{LISTED}<spawn"), [1, 3], 2, None),
    ],
)
def test_the_first_broken_rule_with_other_limits(text, workers, depth, flaw):
    assert flaw_of(text, workers, depth=depth) is flaw
