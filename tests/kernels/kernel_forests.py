"""Forests for tests, built from depths and by brute force: nothing here comes from the code under test."""

from __future__ import annotations

import torch
from hypothesis import strategies as st
from torch import Tensor


def from_depths(depths: list[int]) -> Tensor:
    """visible_until of the preorder forest with these depths: up to the next token that is not deeper."""
    after = [
        next((j for j in range(i + 1, len(depths)) if depths[j] <= depth), len(depths))
        for i, depth in enumerate(depths)
    ]
    return torch.tensor(after, dtype=torch.int64)


@st.composite
def forests(draw, max_tokens: int = 60) -> Tensor:
    """Mostly runs, with branches that fall back to any depth; roots included."""
    tokens = draw(st.integers(1, max_tokens))
    steps = draw(st.lists(st.integers(-30, max_tokens), min_size=tokens - 1, max_size=tokens - 1))
    depths = [0]
    for step in steps:
        # Most steps go one deeper; the others land on any depth that exists.
        depths.append(step % (depths[-1] + 2) if step < 0 else depths[-1] + 1)
    return from_depths(depths)


def branches(count: int, trunk: int, length: int) -> Tensor:
    """A trunk, then `count` branches of `length` tokens, then the trunk continues."""
    return from_depths([*range(trunk), *([trunk + i for i in range(length)] * count), *range(trunk, 2 * trunk)])


def visible_pairs(visible_until: Tensor) -> Tensor:
    """bool [N, N], pair by pair from the definition."""
    tokens = len(visible_until)
    return torch.tensor([[k <= q < int(visible_until[k]) for k in range(tokens)] for q in range(tokens)])


SHAPES = {
    "one token": torch.tensor([1]),
    "plain causal": torch.full((77,), 77),
    "packed sequences": torch.tensor([5] * 5 + [6] + [60] * 54 + [93] * 33),
    "one-token segments": from_depths([0, 1, 1, 2, 2, 2, 1, 0, 0, 1, 2, 3, 3, 3, 4]),
    "forty branches": branches(40, trunk=9, length=2),
    "long branches": torch.cat([branches(2, trunk=40, length=35), branches(3, trunk=7, length=33) + 150]),
    "exactly one tile": torch.full((32,), 32),
    "a tile and one token": torch.full((33,), 33),
}
