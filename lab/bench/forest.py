"""How long it takes to turn responses, and rows that share prefixes, into packed forests, and how that grows.

    dccot bench forest

Responses are like those of the paper's trained model (dccot.lab.bench.trees), about 6,000 tokens with the prompt,
seven to a prompt. The figures are CPU time of one core for everything between responses and the model: packing is a
plan over lengths, building copies every token once, and positions and parents are derived from `visible_until`. Larger
batches hold the same responses repeatedly. Rows are the turns of agents: seven to a prompt, each leaving the first of
them at a random place. The growth of layout time is shown with and without the kernel's time: gigabytes need new pages
every time, megabytes reuse theirs.
"""

from __future__ import annotations

import random
import resource
import time

import numpy as np
import torch

from dccot.core.runtime import keep_freed_memory
from dccot.lab.bench.harness import row
from dccot.lab.bench.trees import paper_shape
from dccot.rollout.response import Response, Round, Segment
from dccot.train.forest import Forest, pack

TOKEN_BUDGET = 32_768
SAMPLES = 7  # responses to one prompt
WARM_UP = 20  # responses
GROWTH = (1, 4, 16)


def paper_like_response(rng: random.Random, prompt: list[int], tokens: int, vocabulary: int) -> Response:
    """A response of `tokens` tokens after its prompt, scaled from one like the paper's model's."""
    shape = paper_shape(np.random.default_rng(rng.getrandbits(32)), prompt=0)
    shape = shape.scaled(tokens / (sum(shape.director) + sum(map(sum, shape.rounds))))

    def segment(length: int, inserted: int) -> Segment:
        inserted = min(inserted, length - 1)
        ids = rng.choices(range(vocabulary), k=length)
        return Segment(ids[:inserted], ids[inserted:], [-0.5] * (length - inserted))

    director = [segment(length, inserted=5 * bool(i)) for i, length in enumerate(shape.director)]
    workers = [[segment(length, inserted=5) for length in lengths] for lengths in shape.rounds]
    return Response(prompt, list(map(Round, director, workers)), director[-1])


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


def lay_out(rows: list[np.ndarray]) -> tuple[float, float]:
    """Seconds to build one forest of `rows`, including its mask: CPU time, and how much of it outside the kernel."""
    before = resource.getrusage(resource.RUSAGE_SELF)
    forest, _ = Forest.from_rows(rows)
    _ = forest.mask.position, forest.mask.parent, forest.targets
    after = resource.getrusage(resource.RUSAGE_SELF)
    own = after.ru_utime - before.ru_utime
    return own + after.ru_stime - before.ru_stime, own


def run_rows(base: int) -> list[dict]:
    rows: list[dict] = []
    taken: dict[str, list[float]] = {"": [], ", without the kernel's": []}
    for times in GROWTH:
        batch = branching_rows(base * times, 6000)
        seconds, own = map(min, zip(*(lay_out(batch) for _ in range(2))))
        for each, spent in zip(taken.values(), (seconds, own)):
            each.append(spent)
        target = 2.0 if base * times == 1000 else None
        rows.append(row(f"Forest.from_rows, {base * times:,} rows of 6,000 tokens", seconds, "s", target))
    for which, (first, *_, last) in taken.items():
        rows.append(row(f"the same, time per token at 16× against 1×{which}", last / first / 16, "×", 1.5))
    return rows


def run(quick: bool = False) -> list[dict]:
    torch.set_num_threads(1)
    keep_freed_memory()  # as training does: otherwise growth would be that of the kernel's new pages
    base = 100 if quick else 1000
    responses = paper_like_responses(base, 6000)
    build_all(responses[:WARM_UP])
    rows, per_token = [], {}
    for times in GROWTH:
        seconds, tokens = min(build_all(responses * times) for _ in range(2))
        per_token[times] = seconds / tokens
        target = 2.0 if base * times == 1000 else None
        rows.append(row(f"build and pack {base * times:,} responses of ~6,000 tokens", seconds, "s", target))
    rows.append(row("time per token at 16× against 1×", per_token[16] / per_token[1], "×", 1.5))
    return rows + run_rows(base)
