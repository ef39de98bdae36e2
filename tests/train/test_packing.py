"""Packing never matters: the same gradient for any token budget, prompt sharing on or off, one rank or two."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from dccot.kernels.tree_attention import TreeMask
from dccot.model.config import read_config
from dccot.model.transformer import Transformer
from dccot.model.weights import load_weights
from dccot.train.objectives import dapo

PROGRAM = Path(__file__).with_name("gradient_program.py")
PACKINGS = [
    "one forest",
    "one forest, prompts apart",
    "a few",
    "a few, reduced each",
    "a few, prompts apart",
    "one response each",
]


@pytest.fixture(scope="module")
def world(checkpoint, random_responses, torchrun, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("packing")
    responses = random_responses(prompts=5, samples=4, seed=5, longest=30)
    (out / "responses.json").write_text(json.dumps([response.to_json() for response in responses]))
    for ranks in (1, 2):
        (out / str(ranks)).mkdir()
        torchrun(ranks, PROGRAM, checkpoint, out / "responses.json", out / str(ranks))
    return out


def facts(world: Path, ranks: int, packing: str) -> dict:
    return json.loads((world / str(ranks) / "facts.json").read_text())[packing]


@pytest.fixture(scope="module")
def expected(world, checkpoint, random_responses) -> tuple[float, int, dict[str, Tensor]]:
    """Loss, tokens and gradient in fp64, one causal run per call that inference made, none packed with another."""
    model = Transformer(read_config(checkpoint)).double()
    load_weights(model, checkpoint)
    responses = random_responses(prompts=5, samples=4, seed=5, longest=30)
    losses = []
    for response, advantage in zip(responses, torch.linspace(-1.5, 2.0, len(responses))):
        read = list(response.prompt)
        segments = [[round_.director] for round_ in response.rounds]
        for director, round_ in zip(segments, response.rounds):
            director.extend(round_.workers)
        for together in [*segments, [response.final] if response.final else []]:
            for number, segment in enumerate(together):
                context = read + (together[0].tokens if number else [])
                ids = torch.tensor(context + segment.tokens)
                mask = TreeMask.causal([len(ids)])
                logprobs = (model(ids, mask.position, mask) / 0.6).log_softmax(-1)
                first = len(context) + len(segment.inserted)
                logprob = logprobs[first - 1 : len(ids) - 1].gather(1, ids[first:, None])[:, 0]
                old = torch.tensor(segment.logprobs, dtype=torch.float32).double()
                kl = torch.exp(old - logprob) - (old - logprob) - 1
                losses.append(dapo(logprob, old, advantage.double(), clip_low=0.2, clip_high=0.28) + 0.001 * kl)
            read += [token for segment in together for token in segment.tokens]
    every = torch.cat(losses)
    every.mean().backward()
    return float(every.detach().mean()), len(every), {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("packing", PACKINGS)
def test_gradient_is_that_of_separate_calls_in_fp64(world, expected, packing, ranks):
    """To 1e-6 of the gradient's norm, in fp32."""
    loss, tokens, gradients = expected
    found = load_file(world / str(ranks) / f"{packing}.safetensors")
    assert facts(world, ranks, packing)["tokens"] == tokens
    assert facts(world, ranks, packing)["loss"] == pytest.approx(loss, rel=1e-6)
    whole = torch.cat([gradients[name].flatten() for name in gradients])
    ours = torch.cat([found[name].flatten().double() for name in gradients])
    assert float((ours - whole).norm() / whole.norm()) < 1e-6
    assert facts(world, ranks, packing)["norm"] == pytest.approx(float(whole.norm()), rel=1e-6)


@pytest.mark.parametrize("packing", PACKINGS)
def test_both_ranks_have_equally_many_micro_batches(world, packing):
    [one], [two] = facts(world, 2, packing)["targets"]
    assert len(one) == len(two)


def test_a_rank_with_nothing_to_do_keeps_in_step(world):
    """One response for two ranks: one of them has no token of its own, and the gradient is still that of one rank."""
    [[mine], [nothing]] = (rank[0] for rank in facts(world, 2, "a single response")["targets"])
    assert (mine > 0, nothing) == (True, 0)
    one, two = (load_file(world / ranks / "a single response.safetensors") for ranks in "12")
    for name in one:
        torch.testing.assert_close(one[name], two[name], rtol=1e-5, atol=1e-7)
