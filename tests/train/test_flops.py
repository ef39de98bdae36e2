"""Useful floating-point operations, counted by hand and by torch."""

import torch
from torch.utils.flop_counter import FlopCounterMode

from dccot.kernels.tree_attention import TreeMask
from dccot.rollout.response import Segment
from dccot.train.flops import block_parameters, model_flops, pair_cost, training_speed
from dccot.train.forest import build_forest
from tests.support.rounds import Round, flat


def test_linear_work_is_what_torch_counts(small_model):
    """Without attention: `FlopCounterMode` sees the matrix products of the blocks and of the LM head on every row."""
    model = small_model(torch.float32)
    tokens, mask = torch.arange(2, 32), TreeMask.causal([30])
    with FlopCounterMode(display=False) as counted, torch.no_grad():
        model(tokens, mask.position, mask)
    forest = build_forest([[(0, flat([2], [], Segment([], list(range(3, 33)))))]])  # one row of 31 predicts nothing
    config = model.config
    pairs = 31 * 32 // 2
    attention = config.layers * 4 * config.heads * config.head_dim * pairs
    blocks_of_one = config.layers * 2 * block_parameters(config)
    assert model_flops(config, [forest]) - attention - blocks_of_one == counted.get_total_flops()


def test_pairs_of_a_tree_by_hand(small_model):
    """Prompt 2, director 1, workers 2 and 3, director 2: positions 0 1 2 | 3 4 5 | 3 4 | 5 6 7 | 8 9, so 57 + 13
    pairs.
    """
    workers = [Segment([], [5, 5]), Segment([], [5, 5, 5])]
    forest = build_forest([[(0, flat([2, 2], [Round(Segment([], [4]), workers)], Segment([], [6, 6])))]])
    config = small_model().config
    pairs, rows = sum([0, 1, 2, 3, 4, 5, 3, 4, 5, 6, 7, 8, 9]) + 13, 1 + 2 + 3 + 2
    expected = config.layers * (2 * block_parameters(config) * 13 + 4 * 64 * pairs) + 2 * 32 * 40 * rows
    assert model_flops(config, [forest]) == expected


def test_the_balance_of_packing_is_that_of_the_model(small_model):
    """A block: attention 32·32·(2·2 + 2·1), MLP 3·32·48 weights; a pair costs 4·2·32 FLOPs, a token 2 per weight."""
    assert pair_cost(small_model().config) == 4 * 64 / (2 * (32 * 32 * 6 + 3 * 32 * 48))


def test_utilisation_is_three_forwards_over_time_and_peak(small_model):
    forest = build_forest([[(0, flat([2], [], Segment([], [3, 4])))]])
    config = small_model().config
    speed = training_speed(config, [forest], 0.5, torch.device("cpu"), torch.float32)
    assert speed["speed/tflops"] == 3 * model_flops(config, [forest]) / 0.5 / 1e12
    assert 0 < speed["speed/mfu"] < 1
