"""Entropy of every sampled token for `dccot view --entropy`, recomputed from the weights: rollouts keep log-probs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import torch

from dccot.model.config import read_config
from dccot.model.transformer import Transformer
from dccot.model.weights import load_weights
from dccot.rollout.response import Response
from dccot.train.forest import layout, pack
from dccot.train.update import compute_logprobs

TOKEN_BUDGET = 8192  # of one pass


class Scorer:
    """Scorer(folder, temperature=0.6)(responses)  →  per response and segment in reading order, a number per sampled id

    The same packed forests as in training, so that a response with workers takes one pass.
    """

    def __init__(self, folder: str | Path, temperature: float):
        self.temperature = temperature
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._model = Transformer(read_config(folder)).requires_grad_(False).eval().to(self._device)
        load_weights(self._model, folder)
        self._differences, self._tokens = 0.0, 0

    @property
    def difference(self) -> float:
        """Mean difference between recomputed and recorded log-probs: large for a different model or temperature."""
        return self._differences / max(1, self._tokens)

    def check(self, response: Response) -> None:
        """ValueError if the model cannot compute with these ids, which would fail all that are packed with them."""
        vocab = self._model.config.vocab_size
        ids = [*response.prompt, *(token for segment in response.segments() for token in segment.tokens)]
        outside = [token for token in ids if not 0 <= token < vocab]
        if outside or not response.prompt:
            raise ValueError(f"token id {outside[0]}; the model has {vocab:,}" if outside else "the prompt is empty")

    @torch.no_grad()
    def __call__(self, responses: Sequence[Response]) -> list[list[list[float]]]:
        found: list[list[list[float]]] = [[] for _ in responses]
        for forest in pack(responses, TOKEN_BUDGET).forests():
            forest = forest.to(self._device)
            logprob, entropy = compute_logprobs(self._model, forest, self.temperature)
            self._differences += float((logprob - forest.logprob[forest.targets]).abs().sum())
            self._tokens += len(logprob)
            owner = forest.response[forest.targets]
            for index in owner.unique().tolist():
                found[index] = _by_segment(responses[index], entropy[owner == index].tolist())
        return found


def _by_segment(response: Response, values: list[float]) -> list[list[float]]:
    """Values in the forest's order, where worker 1 comes after the others of its fork, in reading order."""
    rest, parts = iter(values), dict[int, list[float]]()
    for segment, as_written, _, _ in layout(response):
        if as_written:
            parts[id(segment)] = list(islice(rest, len(segment.sampled)))
    return [parts[id(segment)] for segment in response.segments()]
