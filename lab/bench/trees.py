"""Shapes of forests to measure kernels on: `visible_until` of responses given by their lengths.

    paper         prompt ~200, director ~1,500, three workers ~700 each, director ~1,500 tokens, one or two rounds
    one           a single response of that kind, scaled to all the tokens
    shared-7x200  seven such responses to one prompt of 200 tokens, which they share
    packs         plain sequences of 20 to 120 tokens
    causal        one plain sequence
    FILE.jsonl    the responses of a rollout file

In training layout only workers 2..K have their own branch, since worker 1 as written and as read is the same text in
the same place:
    prompt S1 | W2 | W3 | W1 W2' W3' S2
With `duplicates` every worker has one (the layout of the paper), which is what a dense mask without the tree has to
hold:
    prompt S1 | W1 | W2 | W3 | W1' W2' W3' S2
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dccot.rollout.response import Response

KINDS = ("paper", "one", "shared-7x200", "packs", "causal")
SHARED = re.compile(r"shared-(\d+)x(\d+)")
# Trees that kernel targets are checked on: kind and tokens.
MEASURED = (
    *(("paper", 16_384), ("paper", 32_768), ("packs", 32_768), ("one", 60_000)),
    *((f"shared-{responses}x{prompt}", 0) for prompt in (200, 1500) for responses in (3, 7)),
)


@dataclass(frozen=True)
class Shape:
    """Lengths of a response: director segments, the first with the prompt, and between them rounds of workers."""

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

    def scaled(self, factor: float) -> Shape:
        scale = lambda lengths: tuple(max(1, round(length * factor)) for length in lengths)
        return Shape(scale(self.director), tuple(map(scale, self.rounds)))

    def longer(self, prompt: int) -> Shape:
        """With `prompt` tokens more before it."""
        return Shape((self.director[0] + prompt, *self.director[1:]), self.rounds)


def forest(shapes: list[Shape], duplicates: bool = False) -> Tensor:
    """`visible_until` of responses packed one after the other."""
    trees = [shape.visible_until(duplicates) for shape in shapes]
    offsets = np.cumsum([0] + [len(tree) for tree in trees])
    return torch.from_numpy(np.concatenate([tree + offset for tree, offset in zip(trees, offsets, strict=False)]))


def tree(name: str, tokens: int, seed: int = 0) -> Tensor:
    """`visible_until` of about `tokens` tokens of a kind named above; the name of shared ones gives their size."""
    packed = shapes(name, tokens, seed)
    if not (sizes := SHARED.fullmatch(name)):
        return forest(packed)
    prompt = int(sizes[2])
    responses = prompt + forest([shape.longer(-prompt) for shape in packed])
    return torch.cat([torch.full((prompt,), prompt + len(responses)), responses])


def shapes(name: str, tokens: int, seed: int = 0) -> list[Shape]:
    """The responses of such a forest, each with its prompt."""
    rng = np.random.default_rng(seed)
    if name == "paper":
        return paper_like(tokens, seed)
    if name == "one":
        shape = paper_shape(rng)
        return [shape.scaled(tokens / len(shape.visible_until()))]
    if sizes := SHARED.fullmatch(name):
        return [paper_shape(rng, prompt=0).longer(int(sizes[2])) for _ in range(int(sizes[1]))]
    if name == "packs":
        return [Shape((int(length),)) for length in rng.integers(20, 121, size=max(1, tokens // 70))]
    if name == "causal":
        return [Shape((tokens,))]
    if not Path(name).is_file():
        raise ValueError(f"no tree shape {name!r}: use {', '.join(KINDS)} or the path of a rollout JSONL")
    return from_rollouts(Path(name), tokens)


def paper_like(tokens: int, seed: int = 0) -> list[Shape]:
    """As many responses as fit, with lengths drawn around the paper's and then scaled together to fill `tokens`."""
    rng = np.random.default_rng(seed)
    drawn, total = [paper_shape(rng)], 0
    while (total := sum(len(shape.visible_until()) for shape in drawn)) < 0.8 * tokens:
        drawn.append(paper_shape(rng))
    return [shape.scaled(tokens / total) for shape in drawn]


def paper_shape(rng: np.random.Generator, prompt: int = 200) -> Shape:
    """Like the paper's model, with a prompt of about that many tokens before it."""
    rounds = 1 if rng.random() < 0.75 else 2
    around = lambda mean, size: np.maximum(1, mean * rng.lognormal(-0.08, 0.4, size)).astype(int)
    director = around(1500, rounds + 1)
    director[0] += around(prompt, 1)[0] if prompt else 0
    return Shape(tuple(director.tolist()), tuple(tuple(around(700, 3).tolist()) for _ in range(rounds)))


def from_rollouts(file: Path, tokens: int) -> list[Shape]:
    """The first responses of the file that fit into `tokens`."""
    found: list[Shape] = []
    total = 0
    for line in file.read_text().splitlines():
        response = Response.from_json(json.loads(line)["response"])
        director = [*map(len, response.trunk), *[0] * (len(response.forks) == len(response.trunk))]
        workers = tuple(tuple(worker.total() for worker in fork) for fork in response.forks)
        shape = Shape(tuple(director), workers).longer(len(response.prompt))
        total += len(shape.visible_until())
        if total > tokens and found:
            break
        found.append(shape)
    return found
