"""Rollout = training: the packed forest gives, token by token, the log-probs that vLLM sampled with.

A real engine rolls out real responses; our own model computes their log-probs through the forest in one forward.
Nothing of the two is shared but the checkpoint: not the attention (paged and causal there, a tree here), nor the
positions, nor the calls that the response was cut into.
"""

from collections import Counter
from dataclasses import replace

import pytest
import torch

from dccot.kernels.tree_attention import TreeMask
from dccot.lab.worlds import bigram as tiny
from dccot.model.config import read_config
from dccot.model.transformer import Transformer
from dccot.model.weights import full_parameters, load_weights
from dccot.rollout.director import RolloutConfig
from dccot.rollout.engine import EngineConfig
from dccot.rollout.generate import Request, generate
from dccot.rollout.response import Finish, Response
from dccot.rollout.vllm_engine import VllmEngine
from dccot.train.forest import Forest, pack
from tests.support.rounds import final_of, rounds_of

pytestmark = pytest.mark.slow

CONFIG = RolloutConfig(budget=200)
DEEP = RolloutConfig(workers=[1, 8], depth=3, budget=200)
KINDS = {"single": CONFIG, "spelled": CONFIG, "deep": DEEP, "spelled deep": replace(CONFIG, depth=2)}


@pytest.fixture(scope="module", params=KINDS)
def kind(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def config(kind) -> RolloutConfig:
    return KINDS[kind]


@pytest.fixture(scope="module")
def pair(kind, config, tmp_path_factory):
    """An engine, and our model in fp32, from one checkpoint; then both with weights that have moved, synced through
    `load`.
    """
    tags = "spelled" if "spelled" in kind else "single"
    often = tiny.Chances(spawn=1 / 14, close=1 / 24, more=0.85) if config.depth > 1 else None
    folder = tiny.save(tmp_path_factory.mktemp("tiny") / tags, tags, often, workers=config.workers, context=2048)
    engine = VllmEngine(folder, EngineConfig(dtype="float32", kv_cache_gb=0.125))
    model = Transformer(read_config(folder))
    load_weights(model, folder, torch.float32)
    noise = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.model.layers.parameters():
            parameter.add_(0.1 * parameter.std() * torch.randn(parameter.shape, generator=noise))
    engine.load(full_parameters(model))
    return engine, model


@pytest.fixture(scope="module")
def responses(pair, config) -> list[Response]:
    engine, _ = pair
    prompts = [
        engine.tokenizer.encode(f"{tiny.BOS}{tiny.USER}{text}{tiny.ASSISTANT}<think>\n")
        for text in ("what", "why not " * 9)
    ]
    requests = [Request(f"p{i}", sample, prompt) for i, prompt in enumerate(prompts) for sample in range(16)]
    done = {(r.problem, r.sample): response for r, response in generate(engine, requests, config, seed=(1,))}
    return [done[r.problem, r.sample] for r in requests]


@torch.no_grad()
def gap(model, forest: Forest) -> torch.Tensor:
    mask: TreeMask = forest.mask
    logprob, _ = model(
        forest.tokens,
        mask.position,
        mask,
        mask.parent[forest.targets],
        forest.tokens[forest.targets],
        CONFIG.temperature,
    )
    return (logprob - forest.logprob[forest.targets]).abs()


def test_the_responses_have_all_the_shapes_that_can_go_wrong(responses, config):
    """Without these the tests below would prove little."""
    assert all(response.longest_path <= config.budget for response in responses)
    if config.depth > 1:
        assert {response.depth for response in responses} >= {0, config.depth}
        widths = {len(fork) for response in responses for fork in response.all_forks()}
        assert widths >= ({3} if isinstance(config.workers, int) else {1, 2, 3, 8})
        inner = [worker for response in responses for worker in response.threads() if worker.forks]
        assert {len(worker.trunk) > len(worker.forks) for worker in inner} == {True, False}  # read, and cut
        return
    assert {0, 1, 2} <= {len(response.forks) for response in responses}
    assert {Finish.ANSWERED, Finish.BUDGET} <= {response.finish for response in responses}
    assert any(final_of(response) is None for response in responses)
    sampled = Counter()
    for response in responses:
        for round_ in rounds_of(response):
            sampled.update({i: len(worker.sampled) for i, worker in enumerate(round_.workers)})
    assert min(sampled[i] for i in range(3)) > 100


@pytest.mark.parametrize("share_prompts", [True, False])
@pytest.mark.parametrize("token_budget", [1, 700, 100_000])
def test_the_forest_gives_the_log_probs_that_the_engine_sampled_with(pair, responses, share_prompts, token_budget):
    _, model = pair
    forests = pack(responses, token_budget, share_prompts=share_prompts).forests()
    assert sum(len(forest.targets) for forest in forests) == sum(response.sampled_tokens for response in responses)
    worst = torch.cat([gap(model, forest) for forest in forests]).max()
    assert worst < 1e-4


def test_a_log_prob_depends_on_what_the_tree_shows(pair, responses):
    """The same tokens under a plain causal mask are far off: the test above would notice a wrong mask."""
    _, model = pair
    branched = [response for response in responses if len(response.forks) > 0 and final_of(response) is not None]
    forest = pack(branched, 1).forests()[0]
    causal = Forest(
        forest.tokens,
        torch.full_like(forest.visible_until, len(forest)),
        forest.sampled,
        forest.response,
        forest.logprob,
    )
    assert gap(model, causal).max() > 0.01 > 100 * gap(model, forest).max()
