"""Ranks that share forests compute what one process computes: two and four of them over gloo, in fp64 to 1e-9."""

import functools
import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from dccot.core.config import ConfigError
from dccot.core.runtime import Runtime
from dccot.kernels.mask import Share, TreeMask
from dccot.model.config import read_config
from dccot.model.context import ContextGroup
from dccot.model.sharding import ShardingConfig, build_model
from dccot.model.transformer import Transformer
from dccot.model.weights import load_weights
from dccot.train.forest import pack
from tests.train.context_program import CASES, step

PROGRAM = Path(__file__).with_name("context_program.py")


@pytest.fixture(scope="module")
def responses(random_responses):
    return random_responses(prompts=4, samples=3, seed=11, longest=40)


@pytest.fixture(scope="module")
def world(checkpoint, responses, torchrun, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("context")
    (out / "responses.json").write_text(json.dumps([response.to_json() for response in responses]))
    for ranks in (2, 4):
        torchrun(ranks, PROGRAM, checkpoint, out)
    return out


@pytest.fixture(scope="module")
def alone(checkpoint, responses):
    """`alone(case)`: what one process without sharding finds that has every group's forests to itself."""
    model = Transformer(read_config(checkpoint)).double()
    load_weights(model, checkpoint)

    @functools.cache
    def run(groups: int, budget: int) -> tuple[dict, dict[str, torch.Tensor]]:
        packing = pack(responses, budget, groups)
        named = {(g, n): forest for g in range(groups) for n, forest in enumerate(packing.forests(g))}
        model.zero_grad()
        with Runtime.start() as runtime:
            found = step(runtime, model, named)
        return found, {name: p.grad.clone() for name, p in model.named_parameters()}

    return lambda case: run(CASES[case][0] // CASES[case][1].context_parallel, CASES[case][2])


def flat(numbers) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


@pytest.mark.parametrize("case", CASES)
def test_loss_logprobs_entropies_and_gradients_are_those_of_one_process(world, alone, case):
    found, (expected, gradients) = json.loads((world / f"{case}.json").read_text()), alone(case)
    assert found["count"] == expected["count"] == len(expected["tokens"])
    assert found["loss"] == pytest.approx(expected["loss"], abs=1e-9)
    assert [row[0] for row in found["tokens"]] == [row[0] for row in expected["tokens"]]
    ours, theirs = (flat([row[1:] for row in rows]) for rows in (found["tokens"], expected["tokens"]))
    assert float((ours - theirs).abs().max()) < 1e-9
    for name, gradient in load_file(world / f"{case}.safetensors").items():
        assert float((gradient - gradients[name]).abs().max()) < 1e-9, name
    assert max(float(gradient.abs().max()) for gradient in gradients.values()) > 1e-3


@pytest.mark.parametrize("case", CASES)
def test_metrics_and_work_are_those_of_one_process(world, alone, case):
    found, (expected, _) = json.loads((world / f"{case}.json").read_text()), alone(case)
    assert found["metrics"] == pytest.approx(expected["metrics"], abs=1e-6)
    assert found["flops"] == expected["flops"]


def test_each_target_belongs_to_the_rank_whose_row_predicts_it(responses):
    [forest] = pack(responses, 10**6).forests()
    parts = [forest.shared(ContextGroup(rank, 3)) for rank in range(3)]
    assert sorted(t for part in parts for t in part.targets.tolist()) == forest.targets.tolist()
    for part in parts:
        assert part.mask.at[part.rows].tolist() == forest.mask.parent[part.targets].tolist()
        assert part.mask.own(part.tokens).tolist() == forest.tokens[part.mask.at].tolist()


def test_a_layout_that_does_not_divide_the_ranks_is_refused(checkpoint):
    with pytest.raises(ConfigError, match=r"sharding.context_parallel is 2; it must divide the 1 ranks"):
        build_model(checkpoint, ShardingConfig(compute_dtype="float32", context_parallel=2))


def test_torch_compile_takes_a_layer_as_one_graph_whatever_the_share(small_model, responses):
    """One rank in a group of its own: what it holds is everything, gathered all the same."""
    graphs = []

    def count(graph, _):
        graphs.append(graph)
        return graph.forward

    model = small_model()
    torch._dynamo.reset()
    layers = list(model.model.layers)
    compiled = [torch.compile(layer.compute, backend=count, fullgraph=True, dynamic=True) for layer in layers]
    with Runtime.start(), torch.no_grad():
        for number in range(3):
            forest = pack(responses[number : number + 3], 10**6).forests()[0]
            share = Share([np.array([[0, len(forest)]])], 0, dist.group.WORLD.group_name)
            mask = TreeMask(forest.visible_until, share=share)
            expected = model(forest.tokens, forest.mask.position, forest.mask)
            with pytest.MonkeyPatch.context() as patch:
                for layer, run in zip(layers, compiled, strict=True):
                    patch.setattr(layer, "compute", run)
                found = model(forest.tokens, mask.position, mask)
            assert float((found - expected).abs().max()) < 1e-12
    assert len(graphs) == 1, "for all layers and forests"
