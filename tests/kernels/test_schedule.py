"""The tile schedule against the dense mask: nothing visible is left out, nothing counts twice, full tiles are full;
and plans that split long lists: every visit happens once, and simulated GPUs stay busy on the trees that training sees.
"""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_forests import SHAPES, forests, visible_pairs

from dccot.kernels.mask import Share, TreeMask, split
from dccot.kernels.schedule import PROGRAM_COST, Lists, build, cut, plan, simulate
from dccot.lab.bench import trees

BLOCKS = st.sampled_from([1, 2, 4, 8, 16])
PROCESSORS = (108, 132, 148)  # A100, H100, B200
HEADS = ((12, 2), (28, 4), (32, 8))


def visits(lists: Lists):
    """(own start, own stop, streamed start, streamed stop, whether the mask is applied), as the kernels loop."""
    values = [column.tolist() for column in lists[:7]]
    for start, stop, first, middle, last in zip(*values[:5], strict=True):
        for index in range(first, last):
            yield start, stop, values[5][index], values[6][index], index >= middle


def check(visible_until, block_q: int, block_k: int) -> None:
    visible, schedule = visible_pairs(visible_until), build(visible_until, block_q, block_k)
    by_query, by_key = (schedule.by_query, block_q, block_k, visible), (schedule.by_key, block_k, block_q, visible.T)
    for side, (lists, own_block, block, seen) in enumerate((by_query, by_key)):
        covered, found = torch.zeros_like(seen, dtype=torch.int64), list(visits(lists))
        for start, stop, tile_start, tile_stop, masked in found:
            tile = seen[start:stop, tile_start:tile_stop]
            assert 0 < stop - start <= own_block and 0 < tile_stop - tile_start <= block
            assert tile.any(), "an empty tile is visited"
            whole = tile.all() and tile_stop - tile_start == block
            assert masked or whole, "a tile without mask must be whole and visible"
            covered[start:stop, tile_start:tile_stop] += 1
        assert covered.max() == 1 and bool((covered[seen] == 1).all())
        assert (len(found), sum(visit[-1] for visit in found)) == (schedule.visited, schedule.edges[side])
        lengths = (lists.last - lists.first).tolist()
        assert lengths == sorted(lengths, reverse=True), "the longest lists come first"
        assert len(lists.tile_start) == int(lists.last.max()) + 1, "kernels look one tile past the last"


@settings(deadline=None, max_examples=100)
@given(forests(80), BLOCKS, BLOCKS)
def test_every_visible_pair_is_visited_once_and_unmasked_tiles_are_full(visible_until, block_q, block_k):
    check(visible_until, block_q, block_k)


@settings(deadline=None, max_examples=60)
@given(forests(80), BLOCKS, BLOCKS, st.integers(1, 5))
def test_the_lists_of_all_ranks_visit_every_visible_pair_once(visible_until, block_q, block_k, ranks):
    """What the kernels of a context-parallel group do together; addresses of queries are rows of the rank's share."""
    visible = visible_pairs(visible_until)
    seen = torch.zeros(2, *visible.shape, dtype=torch.int64)
    for ranges in split(visible_until, ranks):
        schedule = build(visible_until, block_q, block_k, ranges)
        row = TreeMask(visible_until, share=Share([ranges], 0)).row.tolist()
        for start, stop, tile_start, tile_stop, masked in visits(schedule.by_query):
            seen[0, start:stop, tile_start:tile_stop] += 1
            assert masked or bool(visible[start:stop, tile_start:tile_stop].all())
        for tile_start, tile_stop, start, stop, masked in visits(schedule.by_key):
            seen[1, start:stop, tile_start:tile_stop] += 1
            assert masked or bool(visible[start:stop, tile_start:tile_stop].all())
        by_query, by_key = schedule.by_query, schedule.by_key
        assert by_query.row.tolist() == [row[start] for start in by_query.start]
        assert by_key.tile_row.tolist()[:-1] == [row[start] for start in by_key.tile_start[:-1]]
        assert sorted(by_key.start) == cut(visible_until.numpy(), block_k).tolist()[:-1], "every key gets a gradient"
    assert seen.max() == 1 and bool((seen[:, visible] == 1).all())


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_with_long_branches_are_covered_too(name):
    check(SHAPES[name], 16, 8)


@settings(deadline=None, max_examples=60)
@given(forests(80), BLOCKS)
def test_tiles_cover_all_tokens_in_order(visible_until, block):
    bounds = cut(visible_until.numpy(), block)
    assert bounds[0] == 0 and bounds[-1] == len(visible_until)
    assert (np.diff(bounds) > 0).all() and (np.diff(bounds) <= block).all()


def test_a_new_tile_starts_between_long_branches_and_only_there():
    # trunk 10, branches of 20 and 20, trunk 20 more; blocks of 8: long is 16 and more
    visible_until = torch.tensor([70] * 10 + [30] * 20 + [50] * 20 + [70] * 20)
    assert cut(visible_until.numpy(), 8).tolist() == [0, 8, 16, 24, 30, 38, 46, 50, 58, 66, 70]
    assert cut(visible_until.numpy(), 16).tolist() == [0, 16, 32, 48, 64, 70]


@settings(deadline=None, max_examples=80)
@given(forests(80), st.integers(1, 60), st.integers(1, 3), st.integers(1, 4))
def test_pieces_cover_every_visit_once_and_slots_belong_to_one_list(visible_until, processors, copies, repeat):
    lists = build(visible_until, 8, 4).by_key
    made = plan(lists, processors, copies, repeat)
    programs, merges = ([column.numpy() for column in columns] for columns in (made.programs, made.merges))
    start, stop, slot, first, middle, last = programs[:6]
    assert (first <= middle).all() and (middle <= last).all() and (first < last).all()
    for own_start, own_stop, list_first, list_middle, list_last in zip(*lists[:5], strict=True):
        mine = np.flatnonzero(start == own_start)
        mine = mine[np.argsort(first[mine])]
        assert (stop[mine] == own_stop).all()
        assert first[mine[0]] == list_first * repeat and last[mine[-1]] == list_last * repeat
        assert (first[mine[1:]] == last[mine[:-1]]).all()
        assert (middle[mine] - first[mine]).sum() == (list_middle - list_first) * repeat
        merge = np.flatnonzero(merges[0] == own_start)
        expected = list(range(merges[2][merge[0]], merges[3][merge[0]])) if len(merge) else [-1]
        assert slot[mine].tolist() == expected
    assert sorted(slot[slot >= 0]) == list(range(made.slots))


def test_a_machine_by_hand():
    """Two processors, costs 5, 3, 3, 2: one runs 5 and 2, the other 3 and 3."""
    assert simulate(np.array([3, 5, 2, 3]), 2, copies=1) == (13 / 14, 7)


COSTS = st.lists(st.integers(1, 30) | st.sampled_from([1, 50, 200]), min_size=1, max_size=60)


@given(COSTS, st.integers(1, 9), st.integers(1, 4))
def test_programs_start_one_by_one_longest_first_on_whoever_is_free_first(costs, processors, copies):
    free = [0] * processors
    for cost in sorted(costs * copies, reverse=True):
        free[free.index(min(free))] += cost
    assert simulate(np.array(costs), processors, copies) == (sum(free) / (processors * max(free)), max(free))


def test_without_a_gpu_nothing_is_split():
    assert plan(build(torch.full((300,), 300), 16, 16).by_key, 1, 2, 6).slots == 0


@pytest.mark.parametrize(("kind", "tokens"), trees.MEASURED)
def test_every_kernel_keeps_the_processors_busy(kind, tokens):
    visible_until = trees.tree(kind, tokens)
    forward, grad_query, grad_key = (build(visible_until, *blocks) for blocks in ((128, 128), (128, 64), (64, 128)))
    for processors in PROCESSORS:
        for heads, key_heads in HEADS:
            plans = [plan(schedule.by_query, processors, heads, 1) for schedule in (forward, grad_query)]
            plans.append(plan(grad_key.by_key, processors, key_heads, heads // key_heads))
            assert min(each.busy for each in plans) >= 0.95, (processors, heads, key_heads)


def test_before_splitting_a_shared_prompt_left_most_of_the_gpu_idle():
    """Longest list 802 visits, mean 49: what the split is for."""
    lists = build(trees.tree("shared-7x200", 0), 64, 128).by_key
    whole = 6 * (lists.last - lists.first) + PROGRAM_COST
    assert simulate(whole, 132, copies=2)[0] < 0.4
    assert plan(lists, 132, 2, 6).busy >= 0.95
