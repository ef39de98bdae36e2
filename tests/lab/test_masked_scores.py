"""The softmax step of the forward kernel as a GPU computes it, with fused multiply-adds that Triton's interpreter does
not have.
"""

import numpy as np

MASKED = np.float32(-1.0e30)
SCALES = np.random.default_rng(0).uniform(1e-3, 4.0, 10_000).astype(np.float32)


def fused_multiply_add(a, b, c) -> np.ndarray:
    """One rounding: the product of two fp32 numbers is exact in fp64."""
    return (a.astype(np.float64) * np.float64(b) + c).astype(np.float32)


def step(best, total, acc, scaled, exponent) -> tuple:
    """One tile with one key whose value is 1: (maximum, sum, output) of the online softmax."""
    higher = np.maximum(best, scaled)
    with np.errstate(over="ignore", invalid="ignore"):
        p, shrink = np.exp2(exponent(higher)), np.exp2(best - higher)
        return higher, total * shrink + p, acc * shrink + p


def output_after_an_empty_tile(masked_tile, scale) -> np.ndarray:
    state = step(np.full_like(scale, MASKED), np.float32(0), np.float32(0), *masked_tile)
    score = np.full_like(scale, 0.7)
    _, total, acc = step(*state, score * scale, lambda higher: fused_multiply_add(score, scale, -higher))
    with np.errstate(invalid="ignore"):
        return acc / total


def test_a_row_whose_first_tile_shows_it_nothing_is_right_for_ten_thousand_scales():
    """MASKED is added after scaling, so nothing multiplies it, and no score that fp16 or bf16 tensors give changes a
    bit of it.
    """
    hidden = fused_multiply_add(np.full_like(SCALES, 1e20), SCALES, MASKED)
    masked_tile = hidden, lambda higher: hidden - higher
    assert (hidden == MASKED).all() and (output_after_an_empty_tile(masked_tile, SCALES) == 1).all()


def test_masking_before_scaling_gave_nan_for_a_third_of_the_scales():
    """Why the order matters: MASKED / scale · scale is not MASKED, and the fused product sees the difference, up to
    1e22.
    """
    masked = (np.float64(MASKED) / SCALES).astype(np.float32)
    before = masked * SCALES, lambda higher: fused_multiply_add(masked, SCALES, -higher)
    assert np.isnan(output_after_an_empty_tile(before, SCALES)).mean() > 0.3
