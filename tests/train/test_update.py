"""One optimizer step: the schedule, the clip, AdamW as torch has it, and what happens to a gradient that is not
finite.
"""

import copy
import math

import pytest
import torch
from torch import nn

from dccot.train.forest import pack
from dccot.train.sft import negative_logprob
from dccot.train.update import OptimizerConfig, compute_logprobs, make_optimizer, update


@pytest.fixture
def forests(random_responses):
    responses = random_responses(prompts=3, samples=2, seed=1)
    return pack(responses, 100).forests()


def parameters(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def test_warm_up_is_linear_and_then_constant():
    config = OptimizerConfig(learning_rate=1.0, warmup_steps=4)
    assert [config.rate(step) for step in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert OptimizerConfig(learning_rate=1.0).rate(0) == 1.0
    falling = OptimizerConfig(learning_rate=1.0, decay_from=2, decay_to=6)
    assert [falling.rate(step) for step in range(8)] == [1.0, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0]


@pytest.mark.parametrize("clip", [1e-3, 1e6])
def test_two_steps_are_those_of_torchs_adamw_on_the_clipped_mean_gradient(small_model, forests, runtime, clip):
    assert len(forests) > 1
    ours, theirs = small_model(), small_model()
    config = OptimizerConfig(learning_rate=0.01, betas=[0.8, 0.9], weight_decay=0.1, max_grad_norm=clip, warmup_steps=2)
    optimizer = make_optimizer(ours, config)
    reference = torch.optim.AdamW(theirs.parameters(), lr=0.0, betas=(0.8, 0.9), weight_decay=0.1)
    for step in range(2):
        report = update(ours, optimizer, forests, negative_logprob, config, step, 0.7, runtime)
        losses = torch.cat([-compute_logprobs(theirs, forest, 0.7)[0] for forest in forests])
        losses.mean().backward()
        norm = nn.utils.clip_grad_norm_(theirs.parameters(), clip)
        reference.param_groups[0]["lr"] = 0.01 * (step + 1) / 2
        reference.step()
        reference.zero_grad()
        assert (report.loss, report.grad_norm, report.tokens) == (
            pytest.approx(float(losses.detach().mean())), pytest.approx(float(norm)), len(losses))  # fmt: skip
    for mine, expected in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_step_that_is_not_finite_changes_nothing_and_is_reported(small_model, forests, runtime, bad):
    model, config = small_model(), OptimizerConfig(learning_rate=0.01)
    optimizer = make_optimizer(model, config)
    update(model, optimizer, forests, negative_logprob, config, 0, 1.0, runtime)
    before, moments = parameters(model), copy.deepcopy(optimizer.state_dict()["state"])

    def spoiled(number, forest, logprob, entropy):
        return -logprob * torch.where(torch.arange(len(logprob)) == 0, bad, 1.0)

    report = update(model, optimizer, forests, spoiled, config, 1, 1.0, runtime)
    assert not report.applied
    assert all(map(torch.equal, before, parameters(model)))
    for key, state in optimizer.state_dict()["state"].items():
        assert all(torch.equal(state[name], moments[key][name]) for name in state)
    assert update(model, optimizer, forests, negative_logprob, config, 1, 1.0, runtime).applied, (
        "and the next step is taken as usual"
    )


def test_a_gradient_that_is_not_finite_under_a_finite_loss_is_noticed(small_model, forests, runtime):
    model, config = small_model(), OptimizerConfig(learning_rate=0.01)
    before = parameters(model)

    def infinite_slope(number, forest, logprob, entropy):
        return (logprob - logprob.detach()).abs().sqrt()  # 0 everywhere, with a slope of infinity

    report = update(model, make_optimizer(model, config), forests, infinite_slope, config, 0, 1.0, runtime)
    assert report.loss == 0.0
    assert not report.applied
    assert all(map(torch.equal, before, parameters(model)))
