"""What a rehearsal runs on: a training configuration, and responses as large as it allows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from functools import cache
from pathlib import Path

from dccot.core.config import find_config, load_config, read_yaml
from dccot.memory import DIRECTOR, LargestBatch
from dccot.rollout.response import Response, Segment
from dccot.rollout.thread import Thread
from dccot.train.config import RLConfig, SFTConfig


def load_training(path: str | Path, overrides: Sequence[str]) -> RLConfig | SFTConfig:
    """An RL or SFT configuration, depending on the file; the paths of its model and data do not matter here."""
    only_rl = {field.name for field in fields(RLConfig)} - {field.name for field in fields(SFTConfig)}
    rl = only_rl & read_yaml(find_config(path)).keys()
    kind: type[RLConfig] | type[SFTConfig] = RLConfig if rl else SFTConfig
    return load_config(kind, path, ["model.path=unused", "data.train=unused", *overrides])


def response_of(largest: LargestBatch, number: int) -> Response:
    """One response of the largest micro-batch; prompts differ by number, so that nothing is shared."""

    def worker(levels: int) -> Thread[Segment]:
        if not levels:
            return Thread([_segment(largest.length)])
        return Thread([_segment(0), _segment(0)], [[worker(levels - 1) for _ in range(largest.workers)]])

    workers = [worker(largest.depth - 1) for _ in range(largest.workers)]
    trunk, forks = ([_segment(DIRECTOR)], [workers]) if workers else ([], [])
    return Response([*trunk, _segment(largest.final)], forks, prompt=[number, *[1] * (largest.prompt - 1)])


@cache
def _segment(tokens: int) -> Segment:
    return Segment([], [1] * tokens, [-1.0] * tokens)
