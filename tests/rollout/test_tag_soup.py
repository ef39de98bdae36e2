"""The parser against a second opinion, on random tag soups; a larger share is in `make torture`."""

import random
import re

import pytest

from dccot.rollout import tags
from tests.support.tag_soup import (
    LimitedOracle,
    answer_oracle,
    disagreements,
    limited_disagreements,
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
