"""TreeMask: positions, parents and the check for a depth-first forest, against the definition of the mask."""

import gc

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_forests import forests, from_depths, visible_pairs

from dccot.kernels.mask import TreeMask, parents, positions, validate


@settings(deadline=None, max_examples=60)
@given(forests())
def test_position_counts_visible_keys_and_parent_is_the_nearest(visible_until):
    visible = visible_pairs(visible_until).tril(-1)
    mask = TreeMask(visible_until)
    assert mask.position.tolist() == visible.sum(1).tolist()
    assert mask.parent.tolist() == [
        max((k for k in range(q) if visible[q, k]), default=-1) for q in range(len(visible))
    ]


@settings(deadline=None, max_examples=60)
@given(forests())
def test_subtree_counts_the_queries_that_see_a_key(visible_until):
    assert TreeMask(visible_until).subtree.tolist() == visible_pairs(visible_until).sum(0).tolist()


def is_forest(ends: list[int]) -> bool:
    """Intervals [k, ends[k]) are nested or disjoint, pair by pair."""
    in_range = all(k < end <= len(ends) for k, end in enumerate(ends))
    return in_range and all(ends[j] <= ends[k] for k in range(len(ends)) for j in range(k + 1, min(ends[k], len(ends))))


@settings(deadline=None, max_examples=300)
@given(st.lists(st.integers(-1, 9), min_size=1, max_size=8))
def test_exactly_the_depth_first_forests_are_accepted(ends):
    try:
        validate(torch.tensor(ends))
        accepted = True
    except ValueError:
        accepted = False
    assert accepted == is_forest(ends)


def test_forests_of_tests_are_accepted_but_not_with_one_end_moved():
    visible_until = from_depths([0, 1, 2, 2, 1, 2, 0, 1])
    validate(visible_until)
    visible_until[1] = 5  # now ends inside the subtree of token 4
    with pytest.raises(ValueError, match=r"visible_until\[4\] = 6 outlives the token's parent"):
        validate(visible_until)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (torch.tensor([1, 1]), r"visible_until\[1\] = 1 must lie after the token itself and at most at N = 2"),
        (torch.tensor([3, 2]), r"visible_until\[0\] = 3 must lie after the token itself and at most at N = 2"),
        (torch.tensor([1.0]), "one-dimensional integer tensor, got torch.float32"),
        (torch.tensor([[1]]), r"one-dimensional integer tensor, got torch.int64 of shape \(1, 1\)"),
    ],
)
def test_errors_name_token_value_and_limit(bad, message):
    with pytest.raises(ValueError, match=message):
        TreeMask(bad)


def test_numpy_and_narrow_integers_are_welcome():
    ends = np.array([3, 2, 3], dtype=np.int16)
    assert positions(ends).tolist() == [0, 1, 1]
    assert parents(ends).tolist() == [-1, 0, 0]
    assert TreeMask(ends).visible_until.dtype == torch.int32


def test_causal_is_packed_sequences():
    assert TreeMask.causal([2, 3]).visible_until.tolist() == [2, 2, 5, 5, 5]


def test_an_empty_forest_is_a_forest():
    mask = TreeMask(torch.empty(0, dtype=torch.int64))
    assert len(mask) == len(mask.position) == len(mask.parent) == 0


def test_a_handle_finds_its_mask_and_rebuilds_it_once_it_is_gone():
    mask = TreeMask(torch.tensor([2, 2]))
    handle, visible_until = mask.handle, mask.visible_until
    assert TreeMask.from_handle(handle, visible_until) is mask
    del mask
    gc.collect()
    assert TreeMask.from_handle(handle, visible_until).position.tolist() == [0, 1]


def test_what_is_derived_is_built_once():
    mask, built = TreeMask(torch.tensor([1])), []
    for _ in range(3):
        mask.derive("thing", lambda: built.append(1))
    assert built == [1]
