"""Plans that cut long lists: every visit happens once, and simulated GPUs stay busy on the trees that training sees."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_forests import forests

from dccot.kernels.schedule import PROGRAM_COST, build, plan, simulate
from dccot.lab.bench import trees

PROCESSORS = (108, 132, 148)  # A100, H100, B200
HEADS = ((12, 2), (28, 4), (32, 8))


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


def test_without_a_gpu_nothing_is_cut():
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


def test_before_cutting_a_shared_prompt_left_most_of_the_gpu_idle():
    """Longest list 802 visits, mean 49: what the cut is for."""
    lists = build(trees.tree("shared-7x200", 0), 64, 128).by_key
    uncut = 6 * (lists.last - lists.first) + PROGRAM_COST
    assert simulate(uncut, 132, copies=2)[0] < 0.4
    assert plan(lists, 132, 2, 6).busy >= 0.95
