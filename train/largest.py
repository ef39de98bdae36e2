"""The largest micro-batch that a configuration allows: what must fit in memory.

A forest is filled up to the token budget, but a response that is larger than the budget gets its own forest. A tree
with K workers holds worker 1 once and the others twice, as written and as read, so a longest path of L tokens can be a
tree of (2K − 1)·L:

    prompt S1 | W2 | W3 | W1 W2' W3' S2          longest path |S1| + |W| + |S2|, tokens |S1| + 5 |W| + |S2|
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path

from dccot.core.config import find_config, load_config, read_yaml
from dccot.rollout.response import Response, Round, Segment
from dccot.train.config import RLConfig, SFTConfig

DIRECTOR = 8  # director tokens before and after spawning: few, since worker tokens make a larger tree


@dataclass(frozen=True)
class Largest:
    """A micro-batch of `copies` equal responses: a prompt, `workers` workers of `length` tokens each, and the
    director's own text.
    """

    copies: int
    prompt: int
    workers: int
    length: int
    final: int

    @property
    def tokens(self) -> int:
        return self.copies * (
            self.prompt + DIRECTOR * bool(self.workers) + max(0, 2 * self.workers - 1) * self.length + self.final
        )

    @property
    def rows(self) -> int:
        """Tokens that carry loss: every worker once."""
        return self.copies * (DIRECTOR * bool(self.workers) + self.workers * self.length + self.final)

    def response(self, number: int) -> Response:
        """One of them; prompts differ by number, so that nothing is shared."""
        prompt = [number, *[1] * (self.prompt - 1)]
        rounds = (
            [Round(_segment(DIRECTOR), [_segment(self.length) for _ in range(self.workers)])] if self.workers else []
        )
        return Response(prompt, rounds, _segment(self.final))


@cache
def _segment(tokens: int) -> Segment:
    return Segment([], [1] * tokens, [-1.0] * tokens)


def load_training(path: str | Path, overrides: Sequence[str]) -> RLConfig | SFTConfig:
    """An RL or SFT configuration, depending on the file; the paths of its model and data do not matter here."""
    only_rl = {field.name for field in fields(RLConfig)} - {field.name for field in fields(SFTConfig)}
    rl = only_rl & read_yaml(find_config(path)).keys()
    kind: type[RLConfig] | type[SFTConfig] = RLConfig if rl else SFTConfig
    return load_config(kind, path, ["model.path=unused", "data.train=unused", *overrides])


def largest_micro_batch(config: RLConfig | SFTConfig, max_position: int) -> Largest:
    prompt = config.prompt.max_prompt_tokens
    if isinstance(config, SFTConfig):
        alone, budget = Largest(1, prompt, 0, 0, config.data.max_tokens - prompt), config.batch.token_budget
    elif config.prompt.kind == "parallel":
        workers, budget = config.rollout.workers, config.batch.token_budget
        room = min((config.engine.context or max_position) - prompt, config.rollout.total_tokens or max_position)
        length = min(config.rollout.budget, room // workers) - 2 * DIRECTOR
        alone = Largest(1, prompt, workers, length, DIRECTOR)
    else:
        alone, budget = Largest(1, prompt, 0, 0, config.rollout.budget), config.batch.token_budget
    copies = -(-budget // alone.tokens)
    if copies == 1:
        return alone
    size = budget // copies - prompt
    if not alone.workers:
        return Largest(copies, prompt, 0, 0, size)
    return Largest(copies, prompt, alone.workers, (size - 2 * DIRECTOR) // (2 * alone.workers - 1), DIRECTOR)
