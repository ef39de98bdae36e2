"""How long it takes to turn responses, and rows that share prefixes, into packed forests, and how that grows.

    dccot bench forest

Responses are like those of the paper's trained model (dccot.lab.bench.trees), about 6,000 tokens with the prompt,
seven to a prompt. The figures are CPU time of one core for everything between responses and the model: packing is a
plan over lengths, building copies every token once, and positions and parents are derived from `visible_until`. Larger
batches hold the same responses repeatedly. Rows are the turns of agents: seven to a prompt, each leaving the first of
them at a random place.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import numpy as np
import torch

from dccot.core.runtime import keep_freed_memory
from dccot.lab.bench.harness import row
from dccot.lab.bench.trees import paper_shape
from dccot.rollout.response import Response, Segment
from dccot.rollout.thread import Thread
from dccot.train.forest import Forest, pack

TOKEN_BUDGET = 32_768
SAMPLES = 7  # responses to one prompt
WARM_UP = 20  # responses


def paper_like_response(rng: random.Random, prompt: list[int], tokens: int, vocabulary: int) -> Response:
    """A response of `tokens` tokens after its prompt, scaled from one like the paper's model's."""
    shape = paper_shape(np.random.default_rng(rng.getrandbits(32)), prompt=0)
    shape = shape.scaled(tokens / (sum(shape.director) + sum(map(sum, shape.rounds))))

    def segment(length: int, inserted: int) -> Segment:
        inserted = min(inserted, length - 1)
        ids = rng.choices(range(vocabulary), k=length)
        return Segment(ids[:inserted], ids[inserted:], [-0.5] * (length - inserted))

    director = [segment(length, inserted=5 * bool(i)) for i, length in enumerate(shape.director)]
    workers = [[Thread([segment(length, inserted=5)]) for length in lengths] for lengths in shape.rounds]
    return Response(director, workers, prompt=prompt)


def paper_like_responses(
    count: int, tokens: int, seed: int = 0, prompt_tokens: int = 250, vocabulary: int = 151_936
) -> list[Response]:
    """`count` responses in groups of SAMPLES that share their prompts."""
    rng = random.Random(seed)
    made: list[Response] = []
    while len(made) < count:
        prompt, group = rng.choices(range(1000), k=prompt_tokens), min(SAMPLES, count - len(made))
        made += [paper_like_response(rng, prompt, tokens - prompt_tokens, vocabulary) for _ in range(group)]
    return made


def build_all(responses: list[Response]) -> tuple[float, int]:
    """Seconds to pack and build `responses`, including masks, and the number of tokens."""
    start = time.process_time()
    plan = pack(responses, TOKEN_BUDGET, ranks=8)
    tokens = 0
    for rank in range(8):
        for forest in plan.forests(rank):
            tokens += len(forest)
            _ = forest.mask.position, forest.mask.parent, forest.targets
    return time.process_time() - start, tokens


def branching_rows(count: int, tokens: int, seed: int = 0, vocabulary: int = 151_936) -> list[np.ndarray]:
    """Rows of `tokens` tokens; of every SAMPLES, all but the first leave the first one after a quarter or later."""
    rng = np.random.default_rng(seed)
    made: list[np.ndarray] = []
    while len(made) < count:
        row = rng.integers(0, vocabulary, tokens)
        first = made[len(made) - len(made) % SAMPLES] if len(made) % SAMPLES else row
        leaves = rng.integers(tokens // 4, tokens)
        made.append(np.concatenate([first[:leaves], row[leaves:]]))
    return made


def lay_out(rows: list[np.ndarray]) -> tuple[float, int]:
    """Seconds to build one forest of `rows`, including its mask, and the number of tokens."""
    start = time.process_time()
    forest, _ = Forest.from_rows(rows)
    _ = forest.mask.position, forest.mask.parent, forest.targets
    return time.process_time() - start, sum(map(len, rows))


def grow(name: str, batch: Callable[[int], list], work: Callable[[list], tuple[float, int]], base: int) -> list[dict]:
    """Seconds for `base`, 4 and 16 times as many, and how much more a token takes of the last than of the first."""
    rows, per_token = [], []
    for count in (base, 4 * base, 16 * base):
        given = batch(count)
        seconds, tokens = min(work(given) for _ in range(2))
        per_token.append(seconds / tokens)
        rows.append(row(name.format(count), seconds, "s", 2.0 if count == 1000 else None))
    return [*rows, row("the same, time per token at 16× against 1×", per_token[-1] / per_token[0], "×", 1.5)]


def run(quick: bool = False) -> list[dict]:
    torch.set_num_threads(1)
    keep_freed_memory()  # as training does: otherwise growth would be that of the kernel's new pages
    base = 100 if quick else 1000
    responses = paper_like_responses(base, 6000)
    build_all(responses[:WARM_UP])
    repeated = lambda count: responses * (count // base)
    rows = grow("build and pack {:,} responses of ~6,000 tokens", repeated, build_all, base)
    return rows + grow("Forest.from_rows, {:,} rows of 6,000 tokens", lambda n: branching_rows(n, 6000), lay_out, base)
