"""Weights that change under running calls: responses continue, and every token knows its version of the weights."""

import pytest
import torch

from dccot.rollout.director import RolloutConfig
from dccot.rollout.generate import Sampler
from tests.rollout.test_generate import Listener, logprobs_by, requests
from tests.rollout.test_sync import perturbed

pytestmark = pytest.mark.slow

CONFIG = RolloutConfig(budget=160, temperature=1.0)
STEPS_PER_VERSION = 25


@pytest.fixture(scope="module")
def heard(checkpoints, build_engine):
    """Responses sampled while the weights change every 25 steps: (the models by version, the calls, the responses)."""
    engine, heard = build_engine(checkpoints["single"]), Listener()
    sampler, models, done = Sampler(engine, heard), [], []
    for request in requests(engine, 16):
        sampler.start(request, CONFIG, seed=(0,))
    while sampler:
        models.append(perturbed(checkpoints["single"], seed=len(models), scale=0.02))
        engine.load(models[-1].named_parameters(), version=len(models) - 1)
        for _ in range(STEPS_PER_VERSION):
            done += sampler.step()
    return models, heard, [response for _, response in done]


def test_every_span_has_the_log_probs_of_a_forward_pass_with_its_versions_weights(heard):
    """Of directors and workers, by transformers: the text before a span is read again with the span's weights."""
    models, heard, responses = heard
    assert len(models) >= 4
    crossing = [call for _, call, completion in heard.ended if len(set(completion.versions)) > 1]
    assert {call.path[1] > 0 for call in crossing} == {True, False}, "of directors and of workers"
    for _, call, completion in heard.ended:
        assert completion.versions == sorted(completion.versions)
        assert len(completion.versions) == len(completion.ids)
        versions = torch.tensor(completion.versions)
        for version in versions.unique().tolist():
            expected = logprobs_by(models[version], call.prompt, completion.ids, CONFIG.temperature)
            found = torch.tensor(completion.logprobs)
            mine = versions == version
            assert (found - expected)[mine].abs().max() < 1e-4
    told = [segment.versions for response in responses for segment in response.segments()]
    assert sorted(told) == sorted(completion.versions for _, _, completion in heard.ended)


def test_other_weights_would_have_given_other_log_probs(heard):
    """The test above would notice a token whose version is wrong."""
    models, heard, _ = heard
    _, call, completion = max(heard.ended, key=lambda each: len(set(each[2].versions)))
    first, last = (logprobs_by(models[v], call.prompt, completion.ids, 1.0) for v in (0, completion.versions[-1]))
    assert (first - last).abs().max() > 1e-2


def test_responses_of_weights_without_a_number_have_no_versions(engines):
    engine = engines["single"]
    sampler = Sampler(engine)
    sampler.start(requests(engine, 1)[0], CONFIG, seed=(0,))
    found = []
    while sampler:
        found += sampler.step()
    [(_, response)] = found
    assert {tuple(segment.versions) for segment in response.segments()} == {()}
