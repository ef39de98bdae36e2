"""Log-probs of trained responses, span by span, against forward passes with each version's weights."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from pathlib import Path

import torch

from dccot.core.files import read_jsonl
from dccot.core.run import step_of
from dccot.model.config import read_config
from dccot.model.transformer import Transformer
from dccot.model.weights import load_weights
from dccot.rollout.response import Response
from dccot.train.forest import pack


def trained_in(run: Path, step: int) -> list[dict]:
    return [row for _, row in read_jsonl(run / "rollouts" / f"step_{step:06d}.jsonl.gz")]


def metrics(run: Path) -> list[dict]:
    return [row for _, row in read_jsonl(run / "metrics.jsonl")]


def responses_in(run: Path) -> Iterator[tuple[int, Response]]:
    """(step, response) of everything that a run trained on, each token with its version."""
    for step in sorted(filter(None.__ne__, map(step_of, (run / "rollouts").iterdir()))):
        for row in trained_in(run, step):
            response = Response.from_json(row["response"])
            for segment in response.segments():
                segment.versions = segment.versions or [step] * len(segment.sampled)
            yield step, response


def gaps(run: Path, start: Path, temperature: float) -> dict[int, float]:
    """Version → the largest difference of a log-prob that it sampled with from the one that our own model finds in the
    whole tree with that version's weights. `run` kept the weights of every step; version 0 are those of `start`.
    """
    responses, worst = [response for _, response in responses_in(run)], {}
    for version in {v for response in responses for segment in response.segments() for v in segment.versions}:
        folder = run / "checkpoints" / f"step_{version:06d}" / "hf" if version else start
        model = Transformer(read_config(folder))
        load_weights(model, folder, torch.float32)
        those = [each for each in responses if any(version in segment.versions for segment in each.segments())]
        masked = copy.deepcopy(those)
        for segment in (segment for response in masked for segment in response.segments()):
            segment.logprobs = [p if v == version else math.nan for p, v in zip(segment.logprobs, segment.versions)]
        worst[version] = max(_gap(model, forest, temperature) for forest in pack(masked, 2000).forests())
    return worst


@torch.no_grad()
def _gap(model, forest, temperature: float) -> float:
    mask, targets = forest.mask, forest.targets
    logprob, _ = model(forest.tokens, mask.position, mask, mask.parent[targets], forest.tokens[targets], temperature)
    found = (logprob - forest.logprob[targets]).abs()
    return float(found.nan_to_num(0.0).max())
