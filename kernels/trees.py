"""Shapes of forests to measure kernels on: `visible_until` of responses given by their lengths.

    paper      prompt ~200, director ~1,500, three workers ~700 each, director ~1,500 tokens, one or two rounds
    causal     plain sequences
    FILE.jsonl the responses of a rollout file

In training layout only workers 2..K have a branch of their own, since worker 1 as written and as read is the same text in the same place:
    prompt S1 | W2 | W3 | W1 W2' W3' S2
With `duplicates` every worker has one (the layout of the paper), which is what a dense mask without the tree has to hold:
    prompt S1 | W1 | W2 | W3 | W1' W2' W3' S2
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Shape:
    """Lengths of one response: director segments (the first includes the prompt) and, between them, rounds of workers."""

    director: tuple[int, ...]
    rounds: tuple[tuple[int, ...], ...] = ()

    def visible_until(self, duplicates: bool = False) -> np.ndarray:
        branches = [workers if duplicates else workers[1:] for workers in self.rounds]
        total = sum(self.director) + sum(map(sum, self.rounds)) + sum(map(sum, branches))
        pieces, position = [], 0
        for segment, workers, read in zip(self.director, [*branches, ()], [*self.rounds, ()], strict=True):
            pieces.append(np.full(segment, total))
            position += segment
            for worker in workers:
                position += worker
                pieces.append(np.full(worker, position))
            pieces.append(np.full(sum(read), total))
            position += sum(read)
        return np.concatenate(pieces)


def forest(shapes: list[Shape], duplicates: bool = False) -> Tensor:
    """`visible_until` of responses packed one behind the other."""
    trees = [shape.visible_until(duplicates) for shape in shapes]
    offsets = np.cumsum([0] + [len(tree) for tree in trees])
    return torch.from_numpy(np.concatenate([tree + offset for tree, offset in zip(trees, offsets, strict=False)]))
