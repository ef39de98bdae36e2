"""Rows that share prefixes become one forest: every distinct prefix once, and every row is a path from a root."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dccot.train.forest import Forest, build_forest
from dccot.train.prefix_tree import prefix_tree
from tests.support.rounds import final_of, rounds_of

rows_of_few_tokens = st.lists(st.lists(st.integers(0, 2), max_size=7), min_size=1, max_size=12).filter(any)


def path_to(token: int, parent: list[int]) -> list[int]:
    path = [token]
    while parent[path[0]] >= 0:
        path.insert(0, parent[path[0]])
    return path


@given(rows_of_few_tokens)
def test_every_distinct_prefix_is_there_once_and_every_row_is_the_path_to_its_last_token(rows):
    forest, where = Forest.from_rows(rows)
    assert len(forest) == len({tuple(row[: i + 1]) for row in rows for i in range(len(row))})
    parent = forest.mask.parent.tolist()  # the mask's constructor has checked that it is a depth-first forest
    for row, at in zip(rows, where, strict=True):
        assert forest.tokens[at].tolist() == row
        assert not row or path_to(at[-1].item(), parent) == at.tolist()


@given(rows_of_few_tokens, st.randoms())
def test_the_order_of_rows_does_not_change_the_forest(rows, random):
    shuffled = random.sample(rows, len(rows))
    one, other = prefix_tree(rows), prefix_tree(shuffled)
    assert one.tokens.tolist() == other.tokens.tolist()
    assert one.visible_until.tolist() == other.visible_until.tolist()


@given(rows_of_few_tokens)
def test_a_shared_token_belongs_to_the_first_row_that_holds_it(rows):
    tree = prefix_tree(rows)
    for token, first in enumerate(tree.first_row):
        assert first == min(i for i, at in enumerate(tree.where) if token in at)


def test_the_calls_of_a_parallel_response_make_a_forest_as_small_as_the_director_s_own(random_responses):
    for response in random_responses(prompts=3, samples=3, seed=3):
        trunk, calls = list(response.prompt), []
        for number, round_ in enumerate(rounds_of(response)):
            trunk = trunk + round_.director.tokens
            calls += [trunk + worker.tokens for worker in round_.workers]
            if number + 1 < len(response.forks) or final_of(response) is not None:
                trunk = trunk + [token for worker in round_.workers for token in worker.tokens]
        calls.append(trunk + final_of(response).tokens if final_of(response) is not None else trunk)
        forest, _ = Forest.from_rows(calls)
        assert len(forest) <= len(build_forest([[(0, response)]]))  # less where two workers happen to begin alike


def test_lists_arrays_and_tensors_of_any_integer_type_are_rows():
    kinds = (
        list,
        np.array,
        torch.tensor,
        lambda row: np.array(row, np.uint16),
        lambda row: torch.tensor(row, dtype=torch.int32),
    )
    for kind in kinds:
        forest, _ = Forest.from_rows([kind([7, 300, 2]), kind([7, 300, 65_535])])
        assert forest.tokens.tolist() == [7, 300, 2, 65_535]
        assert forest.tokens.dtype == torch.int64


def test_a_token_carries_loss_where_any_row_that_shares_it_says_so():
    forest, where = Forest.from_rows([[1, 2, 3], [1, 2, 4]], sampled=[[False, False, True], [False, True, False]])
    assert forest.sampled.tolist() == [False, True, True, False]
    assert [at.tolist() for at in where] == [[0, 1, 2], [0, 1, 3]]


@pytest.mark.parametrize(
    "rows, sampled, says",
    [
        ([[1, -2]], None, "row 0 holds ids from -2 to 1"),
        ([[1], [2**31]], None, "row 1 holds ids"),
        ([[1.5, 2.0]], None, "row 0 must be one-dimensional integers, got float64"),
        ([[]], None, "1 rows hold no token"),
        ([[1, 2]], [[True, True]], "the first token of row 0 is marked as sampled"),
        ([[1, 2]], [[True]], r"row 0 has 2 tokens, sampled\[0\] has 1"),
    ],
)
def test_what_is_no_row_is_refused_by_its_number(rows, sampled, says):
    with pytest.raises((ValueError, TypeError), match=says):
        Forest.from_rows(rows, sampled)
