"""The tile schedule against the dense mask: nothing visible is left out, nothing counts twice, full tiles are full."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_forests import SHAPES, forests, visible_pairs

from dccot.kernels.schedule import Lists, build, cut

BLOCKS = st.sampled_from([1, 2, 4, 8, 16])


def visits(lists: Lists):
    """(own start, own stop, streamed start, streamed stop, whether the mask is applied), as the kernels loop."""
    values = [column.tolist() for column in lists]
    for start, stop, first, middle, last in zip(*values[:5], strict=True):
        for index in range(first, last):
            yield start, stop, values[5][index], values[6][index], index >= middle


def check(visible_until, block_q: int, block_k: int) -> None:
    visible = visible_pairs(visible_until)
    schedule = build(visible_until, block_q, block_k)
    for lists, own_block, block, seen in (
        (schedule.by_query, block_q, block_k, visible),
        (schedule.by_key, block_k, block_q, visible.T),
    ):
        covered = torch.zeros_like(seen, dtype=torch.int64)
        edges = 0
        for start, stop, tile_start, tile_stop, masked in visits(lists):
            tile = seen[start:stop, tile_start:tile_stop]
            assert 0 < stop - start <= own_block and 0 < tile_stop - tile_start <= block
            assert tile.any(), "an empty tile is visited"
            assert masked or (tile.all() and tile_stop - tile_start == block), (
                "a tile without mask must be whole and visible"
            )
            covered[start:stop, tile_start:tile_stop] += 1
            edges += masked
        assert covered.max() == 1 and bool((covered[seen] == 1).all())
        assert edges == schedule.edges[lists is schedule.by_key]
    assert schedule.visited == sum(1 for _ in visits(schedule.by_query)) == sum(1 for _ in visits(schedule.by_key))


@settings(deadline=None, max_examples=120)
@given(forests(80), BLOCKS, BLOCKS)
def test_every_visible_pair_is_visited_once_and_unmasked_tiles_are_full(visible_until, block_q, block_k):
    check(visible_until, block_q, block_k)


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_with_long_branches_are_covered_too(name):
    check(SHAPES[name], 16, 8)


@settings(deadline=None, max_examples=60)
@given(forests(80), BLOCKS)
def test_tiles_cover_all_tokens_in_order(visible_until, block):
    bounds = cut(visible_until.numpy(), block)
    assert bounds[0] == 0 and bounds[-1] == len(visible_until)
    assert (np.diff(bounds) > 0).all() and (np.diff(bounds) <= block).all()


def test_tiles_start_anew_between_long_branches_and_only_there():
    # trunk 10, branches of 20 and 20, trunk 20 more; blocks of 8: long is 16 and more
    visible_until = torch.tensor([70] * 10 + [30] * 20 + [50] * 20 + [70] * 20)
    assert cut(visible_until.numpy(), 8).tolist() == [0, 8, 16, 24, 30, 38, 46, 50, 58, 66, 70]
    assert cut(visible_until.numpy(), 16).tolist() == [0, 16, 32, 48, 64, 70]


@settings(deadline=None, max_examples=30)
@given(forests(80))
def test_longest_lists_come_first(visible_until):
    for lists in (build(visible_until, 8, 8).by_query, build(visible_until, 8, 8).by_key):
        lengths = (lists.last - lists.first).tolist()
        assert lengths == sorted(lengths, reverse=True)


def test_kernels_may_look_one_tile_past_the_last():
    lists = build(torch.tensor([3, 3, 3]), 2, 2).by_query
    assert len(lists.tile_start) == int(lists.last.max()) + 1
