"""The parser against a second opinion, on random tag soups; a larger share is in `make torture`."""

import itertools
import random
import re

import pytest

from dccot.rollout import tags
from tests.support.tag_soup import (
    LimitedOracle,
    answer_oracle,
    disagreements,
    limited_disagreements,
    limited_soup,
    nodes_of,
    oracle,
    sequential_oracle,
    soup,
)

pytestmark = pytest.mark.slow

COUNT = 20_000


def test_parser_and_oracle_agree_on_every_soup():
    found, well_formed = disagreements(COUNT, seed=1)
    assert found == []
    assert 0.2 < well_formed / COUNT < 0.6, "soups of both kinds, or the agreement says little"


def test_parser_and_oracle_agree_on_chosen_widths_and_workers_of_workers():
    found, well_formed = limited_disagreements(COUNT // 4, seed=1)
    assert found == []
    assert len(well_formed) == 6 and all(0.15 < share < 0.7 for share in well_formed.values()), well_formed


# where one is in a well-formed text → the flaw if it ends there, and if a tag follows that means nothing anywhere
NAMED = {
    "start": (tags.Flaw.NO_THINK, tags.Flaw.NO_THINK),
    "think": (tags.Flaw.OPEN_THINK, tags.Flaw.STRAY_TAG),
    "spawn_workers": (tags.Flaw.OPEN_SPAWN, tags.Flaw.WORKER_ORDER),
    "worker": (tags.Flaw.OPEN_WORKER, tags.Flaw.TAG_IN_WORKER),
    "after think": (tags.Flaw.NO_ANSWER, tags.Flaw.NO_ANSWER),
    "answer": (tags.Flaw.OPEN_ANSWER, tags.Flaw.TAG_IN_ANSWER),
    "after answer": (None, tags.Flaw.TEXT_AFTER_ANSWER),
}


def test_the_first_flaw_is_named_by_where_a_well_formed_text_of_any_limits_ends_or_goes_wrong():
    rng, met = random.Random(7), set()
    for workers, depth in itertools.product((2, 3, [1, 3], [2, 5]), (1, 2, 3)):
        texts = (limited_soup(rng, workers, depth) for _ in range(40))
        for text in (each for each in texts if LimitedOracle(each, workers, depth).read()):
            inside = ["start"]
            for kind, tag, start, end in nodes_of(text, tasks=False):
                if kind == "tag" and tag.startswith("</"):
                    closed = inside.pop()
                    inside = [f"after {closed}"] if closed in ("think", "answer") else inside
                elif kind == "tag":
                    inside += [tag.strip("<>").partition("_")[0].replace("spawn", "spawn_workers")]
                at = end if kind == "tag" else start
                ended, strayed = NAMED[inside[-1]]
                assert tags.flaw_of(text[:at], workers, depth=depth) is ended, text[:at]
                assert tags.flaw_of(f"{text[:at]}<worker_99>{text[at:]}", workers, depth=depth) is strayed, text
                met.add((inside[-1], sum(each == "worker" for each in inside)))
    assert met >= {(where, 0) for where in NAMED if where != "worker"} | {("worker", level) for level in (1, 2, 3)}


def test_both_oracles_agree_on_the_papers_limits():
    rng = random.Random(5)
    for _ in range(2_000):
        text = soup(rng, 3)
        regular, limited = oracle(text, 3), LimitedOracle(text, 3, 1).read()
        texts = limited and [[worker[0][0] for worker in fork] for fork in limited[0][1]]
        assert texts == (regular and [workers for _, workers in regular[0]]), text


@pytest.mark.parametrize(
    "pattern", [r"</?(?:think|answer|spawn_workers|worker_\d)>", r"</?(?:think|spawn_workers|worker_\d+)>"]
)
def test_a_parser_that_overlooks_a_tag_is_found_out(monkeypatch, pattern):
    monkeypatch.setattr(tags, "TAG_PATTERN", re.compile(pattern))
    assert disagreements(3_000)[0]


def test_the_oracle_cuts_a_text_as_one_does_by_hand():
    block = "<spawn_workers> <worker_1>a</worker_1>\n<worker_2></worker_2></spawn_workers>"
    text, final = f" <think>p{block}so</think>\n<answer> 4 </answer>\n", "so</think>\n<answer> 4 </answer>"
    assert oracle(text, 2) == ([(" <think>p<spawn_workers>", ["a</worker_1>", "</worker_2>"])], final, "4")
    assert oracle(text, 3) is None
    assert oracle(text.replace("p<spawn", " <spawn"), 2) is None
    assert oracle(text.replace("so", "so<worker_7>"), 2) is None
    assert sequential_oracle("<think>a</think>b") and not sequential_oracle("<think>a</think> ")
    assert answer_oracle("<answer>1</answer><answer>2</answer>3") == "2"
