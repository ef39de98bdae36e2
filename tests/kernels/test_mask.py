"""TreeMask: positions, parents and the check for a depth-first forest, against the definition of the mask."""

import gc

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_forests import forests, from_depths, visible_pairs

from dccot.kernels.mask import TreeMask, parents, positions, split, validate
from dccot.kernels.sizes import CHUNKS, largest_share


@settings(deadline=None, max_examples=60)
@given(forests())
def test_position_parent_and_subtree_follow_from_what_is_visible(visible_until):
    """Keys seen before oneself, the nearest of them, and the queries that see a key."""
    visible, mask = visible_pairs(visible_until), TreeMask(visible_until)
    before = visible.tril(-1)
    nearest = [max((k for k in range(q) if before[q, k]), default=-1) for q in range(len(before))]
    assert mask.position.tolist() == before.sum(1).tolist()
    assert mask.parent.tolist() == nearest
    assert mask.subtree.tolist() == visible.sum(0).tolist()


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


def test_a_forest_with_one_end_moved_is_refused():
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


def test_numpy_narrow_integers_and_no_tokens_are_welcome():
    ends, empty = np.array([3, 2, 3], dtype=np.int16), TreeMask(torch.empty(0, dtype=torch.int64))
    assert (positions(ends).tolist(), parents(ends).tolist()) == ([0, 1, 1], [-1, 0, 0])
    assert TreeMask(ends).visible_until.dtype == torch.int32
    assert len(empty) == len(empty.position) == len(empty.parent) == 0


def test_a_handle_finds_its_mask_and_rebuilds_it_once_it_is_gone():
    mask, built = TreeMask(torch.tensor([2, 2])), []
    handle, visible_until = mask.handle, mask.visible_until
    assert TreeMask.from_handle(handle, visible_until) is mask
    for _ in range(3):
        mask.derive("thing", lambda: built.append(1))
    assert built == [1], "what is derived is built once"
    del mask
    gc.collect()
    assert TreeMask.from_handle(handle, visible_until).position.tolist() == [0, 1]


@settings(deadline=None, max_examples=60)
@given(forests(90), st.integers(1, 7))
def test_ranks_share_all_tokens_and_none_has_much_more_than_another(visible_until, ranks):
    shares = [np.concatenate([np.arange(*bounds) for bounds in ranges]) for ranges in split(visible_until, ranks)]
    assert sorted(np.concatenate(shares)) == list(range(len(visible_until)))
    sizes = [len(share) for share in shares]
    assert max(sizes) <= largest_share(len(visible_until), ranks)
    assert max(sizes) - min(sizes) <= 2 * -(-len(visible_until) // (CHUNKS * ranks))


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_ranks_see_equally_many_keys_of_a_long_tree(ranks):
    """A prompt of 1,024 tokens, three workers of 11,984, two of them twice: stage 4's largest tree."""
    visible_until = torch.tensor([60_960] * 1032 + [13_016] * 11_984 + [25_000] * 11_984 + [60_960] * 35_960)
    seen = [sum(int(positions(visible_until)[a:b].sum()) for a, b in ranges) for ranges in split(visible_until, ranks)]
    assert max(seen) < 1.03 * sum(seen) / ranks
