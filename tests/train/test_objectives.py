"""Objectives against values worked out by hand, and their gradients against finite differences."""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dccot.core.config import ConfigError, load_config
from dccot.train.objectives import (
    BY_MODE,
    OBJECTIVES,
    Objective,
    ObjectiveConfig,
    RolloutCorrection,
    cispo,
    dapo,
    decoupled,
    grpo,
    in_mode,
    kl_k3,
    objective_loss,
    objective_of,
    trained_on,
)

CLIP = {"clip_low": 0.2, "clip_high": 0.28}


def logs(*ratios: float) -> Tensor:
    """Log-probs whose ratio to an old log-prob of 0 is given."""
    return torch.tensor(ratios, dtype=torch.float64).log()


def of(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def close(left: Tensor, *right: float) -> None:
    torch.testing.assert_close(left, of(*right), rtol=1e-12, atol=1e-12)


BY_HAND = {  # loss, ratios to an old log-prob of 0, advantages, expected
    # inside; above 1.28 with A > 0 and A < 0; below 0.8 with A > 0 and A < 0
    "dapo": (partial(dapo, **CLIP), (1.1, 1.5, 1.5, 0.5, 0.5), (2, 2, -2, 2, -2), (-2.2, -2.56, 3.0, -1.0, 1.6)),
    "even clip": (partial(grpo, clip=0.2), (1.5, 1.5, 0.5, 0.5), (1, -1, 1, -1), (-1.2, 1.5, -0.5, 0.8)),
    "dual clip": (partial(dapo, **CLIP, dual_clip=3.0), (10, 10, 2), (-1, 1, -1), (3.0, -1.28, 2.0)),
    "no dual clip": (partial(dapo, **CLIP), (10, 10, 2), (-1, 1, -1), (10.0, -1.28, 2.0)),
}


@pytest.mark.parametrize("case", BY_HAND)
def test_clipped_objectives_by_hand(case):
    loss, ratios, advantages, expected = BY_HAND[case]
    close(loss(logs(*ratios), torch.zeros(len(ratios)).double(), of(*advantages)), *expected)


def test_cispo_by_hand_with_an_absolute_cap_of_five():
    #                ratio 2         ratio 8, capped at 5, not at 6
    logprob, old = of(-1.0, -0.5), of(-1.0 - math.log(2), -0.5 - math.log(8))
    close(cispo(logprob, old, of(3, -2), ratio_cap=5.0), 2 * 3 * 1.0, 5 * -2 * 0.5)


def test_cispo_gradient_is_that_of_the_surrogate_with_its_ratio_frozen():
    """d/dx of −w·A·x with w = min(r, cap) held fixed: by central differences, and not the gradient of a ratio that
    moves.
    """
    logprob, old, advantage = of(-1.0, -2.0, -0.3), of(-1.4, -1.5, -3.0), of(1.5, -0.7, 2.0)
    leaf = logprob.clone().requires_grad_()
    cispo(leaf, old, advantage, ratio_cap=5.0).sum().backward()
    frozen = (logprob - old).exp().clamp(max=5.0)
    step = 1e-6

    def surrogate(x: Tensor) -> Tensor:
        return -frozen * advantage * x

    differences = (surrogate(logprob + step) - surrogate(logprob - step)) / (2 * step)
    torch.testing.assert_close(leaf.grad, differences, rtol=1e-8, atol=1e-8)
    moving = [(-(x - old).exp().clamp(max=5.0) * advantage * x) for x in (logprob + step, logprob - step)]
    assert not torch.allclose(leaf.grad, (moving[0] - moving[1]) / (2 * step), rtol=1e-2)


@given(st.lists(st.tuples(st.floats(-5, -0.01), st.floats(-3, 3)), min_size=1, max_size=8))
def test_one_optimizer_step_per_batch_makes_every_objective_reinforce(values):
    """Then the policy is the old policy, the ratio is 1, and nothing is clipped."""
    logprob, advantage = (of(*column) for column in zip(*values))
    for kind in OBJECTIVES:
        leaf = logprob.clone().requires_grad_()
        OBJECTIVES[kind](ObjectiveConfig(kind), leaf, leaf.detach(), advantage).sum().backward()
        torch.testing.assert_close(leaf.grad, -advantage)


def test_log_ratio_is_clamped_to_twenty_so_nothing_overflows():
    huge = torch.tensor([500.0, -500.0])
    loss = dapo(huge, torch.zeros(2), -torch.ones(2), **CLIP)
    torch.testing.assert_close(loss, torch.tensor([math.exp(20.0), 0.8]))
    assert torch.isfinite(kl_k3(huge, torch.zeros(2))).all()
    torch.testing.assert_close(
        cispo(huge[:1], torch.zeros(1), torch.ones(1), ratio_cap=1e12), torch.tensor([-math.exp(20.0) * 500])
    )


def test_kl_k3_by_hand():
    """π_ref/π_θ − log(π_ref/π_θ) − 1 for ratios 2, 1/2 and 1."""
    close(kl_k3(of(0, 0, 0), logs(2.0, 0.5, 1.0)), 2 - math.log(2) - 1, 0.5 + math.log(2) - 1, 0.0)


def test_kl_k3_is_the_kl_divergence_in_expectation():
    policy, reference = of(0.5, 0.3, 0.2), of(0.2, 0.2, 0.6)
    estimate = (policy * kl_k3(policy.log(), reference.log())).sum()
    torch.testing.assert_close(estimate, (policy * (policy.log() - reference.log())).sum())


def test_kl_enters_the_loss_with_its_coefficient_and_pulls_towards_the_reference():
    config = ObjectiveConfig("cispo", kl_coefficient=0.5)
    leaf = of(-1.0).requires_grad_()
    loss = objective_loss(config, leaf, of(-1.0), of(0.0), of(-1.0), of(-1.0 + math.log(2)))
    close(loss.detach(), 0.5 * (2 - math.log(2) - 1))
    loss.sum().backward()
    close(leaf.grad, 0.5 * (1 - 2.0))  # d k3/d logπ = 1 − π_ref/π_θ


def test_without_a_reference_there_is_no_kl():
    close(objective_loss(ObjectiveConfig("cispo"), of(-1.0), of(-1.0), of(2.0), of(-1.0), None), 2.0)


def test_truncated_importance_sampling_by_hand():
    """Tokens weigh min(π_old/π_rollout, cap): 2 stays, 8 becomes 3; the KL term is not weighed."""
    config = ObjectiveConfig("cispo", rollout_ratio_cap=3.0, kl_coefficient=0.1)
    logprob = of(-1.0, -1.0)
    rollout = logprob - logs(2.0, 8.0)
    reference = logprob + logs(2.0, 1.0)
    close(objective_loss(config, logprob, logprob, of(1, 1), rollout, reference), 2.0 + 0.1 * (1 - math.log(2)), 3.0)


def test_decoupled_by_hand_and_only_the_policy_has_a_gradient():
    """DAPO around a proximal policy, weighted by min(π_prox/π_rollout, 2):

    π_θ/π_prox 1.1, 1.5, 0.5    A 2, 2, −2    DAPO −2.2, −2.56 (clipped), 1.6 (clipped)    π_prox/π_rollout 0.5, 4, 1.5
    """
    config = ObjectiveConfig("dapo", rollout_ratio_cap=2.0, kl_coefficient=0.0)
    proximal = of(-1.0, -0.7, -2.0).requires_grad_()
    rollout = (proximal.detach() - logs(0.5, 4, 1.5)).requires_grad_()
    logprob = (proximal.detach() + logs(1.1, 1.5, 0.5)).requires_grad_()
    loss = objective_loss(config, logprob, proximal, of(2, 2, -2), rollout, None)
    close(loss, 0.5 * -2.2, 2 * -2.56, 1.5 * 1.6)
    gradients = torch.autograd.grad(loss.sum(), (logprob, rollout), allow_unused=True)
    close(gradients[0], 0.5 * -2.2, 0.0, 0.0)
    assert gradients[1] is None
    assert not decoupled(of(3.0), proximal[:1], rollout[:1], cap=2.0).requires_grad


def test_with_the_engine_as_the_denominator_the_ratio_is_to_the_policy_that_sampled():
    """CISPO with π_θ/π_rollout = 3 and A = 2 at log π_θ = −1, whatever the proximal policy is."""
    config = ObjectiveConfig("cispo", old="engine")
    for proximal in (-1.0, -5.0):
        close(objective_loss(config, of(-1.0), of(proximal), of(2.0), of(-1.0) - logs(3.0), None), 3 * 2 * 1.0)


def test_on_policy_every_form_is_the_same():
    logprob, advantage = of(-1.0, -0.3, -2.0), of(1.5, -2.0, 0.5)
    found = [
        objective_loss(replace(ObjectiveConfig("dapo"), **form), logprob, logprob, advantage, logprob, None)
        for form in ({"old": "recomputed"}, {"old": "engine"}, {"old": "recomputed", "rollout_ratio_cap": 2.0})
    ]
    for each in found:
        close(each, -1.5, 2.0, -0.5)


def test_the_rollout_is_corrected_for_once():
    with pytest.raises(ConfigError, match=r"rollout_ratio_cap does not go with objective.old=engine"):
        load_config(ObjectiveConfig, None, ["old=engine", "rollout_ratio_cap=2"])


def test_a_mode_decides_only_what_was_left_open():
    left_open, chosen = ObjectiveConfig(), ObjectiveConfig(old="recomputed")
    assert [in_mode(left_open, mode).rollout_ratio_cap for mode in BY_MODE] == [None, 2.0, 2.0]
    assert [in_mode(chosen, mode) for mode in BY_MODE] == [chosen] * 3
    assert in_mode(ObjectiveConfig(rollout_ratio_cap=5.0), "partial").rollout_ratio_cap == 5.0


# four responses, of 2, 1, 2 and 1 tokens: geometric means of the ratios 2, 1/2, 1 and 4; largest 4, 1/2, 3 and 4
RATIOS, RESPONSES = logs(1, 4, 0.5, 3, 1 / 3, 4), torch.tensor([0, 0, 1, 2, 2, 3])


@pytest.mark.parametrize(
    ("correction", "kept"),
    [
        (RolloutCorrection(mean_ratio=1.9), [2]),
        (RolloutCorrection(mean_ratio=2.1), [0, 1, 2]),
        (RolloutCorrection(max_ratio=1.9), []),
        (RolloutCorrection(max_ratio=2.1), [1]),
        (RolloutCorrection(max_ratio=3.1), [1, 2]),
        (RolloutCorrection(mean_ratio=2.1, max_ratio=4.1), [0, 1, 2]),
    ],
)
def test_responses_whose_ratio_is_off_are_masked_whole(correction, kept):
    found = trained_on(correction, RATIOS, RESPONSES, responses=6)
    assert found.tolist() == [int(response) in kept for response in RESPONSES]
    assert trained_on(RolloutCorrection(), RATIOS, RESPONSES, responses=6) is None


def test_a_masked_response_has_neither_loss_nor_gradient():
    leaf = of(-1.0, -2.0).requires_grad_()
    trained, reference = torch.tensor([True, False]), of(-0.5, -0.5)
    loss = objective_loss(ObjectiveConfig("cispo"), leaf, of(-1, -2), of(1, 1), of(-1, -2), reference, trained)
    loss.sum().backward()
    for found in (loss.detach(), leaf.grad):
        assert (found != 0).tolist() == [True, False]


def clipped(config: ObjectiveConfig, logprob: Tensor, old: Tensor, advantage: Tensor) -> Tensor:
    return objective_of(config).clipped(config, logprob, old, advantage)


def test_clip_fraction_counts_tokens_whose_gradient_the_bound_took_or_limited():
    ratio, old = logs(1.3, 1.3, 0.7, 0.7, 1.0), of(0, 0, 0, 0, 0)
    advantage = of(1, -1, 1, -1, 1)
    assert clipped(ObjectiveConfig("dapo"), ratio, old, advantage).tolist() == [True, False, False, True, False]
    assert clipped(ObjectiveConfig("grpo"), logs(1.25, 1.15), of(0, 0), of(1, 1)).tolist() == [True, False]
    assert clipped(ObjectiveConfig("cispo"), logs(5.1, 4.9), of(0, 0), of(1, -1)).tolist() == [True, False]
    dual = ObjectiveConfig("dapo", dual_clip=3.0)
    assert clipped(dual, logs(3.1, 2.9), of(0, 0), of(-1, -1)).tolist() == [True, False]


@pytest.mark.parametrize("kind", OBJECTIVES)
def test_clipped_agrees_with_the_gradient(kind):
    """Where `clipped` says so the gradient with respect to the log-prob is 0 (GRPO, DAPO) or weighed by the cap
    (CISPO).
    """
    torch.manual_seed(0)
    config = ObjectiveConfig(kind, dual_clip=2.0 if kind == "dapo" else None)
    logprob, old, advantage = 1.5 * torch.randn(500).double(), torch.zeros(500).double(), torch.randn(500).double()
    leaf = logprob.requires_grad_()
    OBJECTIVES[kind](config, leaf, old, advantage).sum().backward()
    bound = -5.0 * advantage if kind == "cispo" else torch.zeros(500).double()
    marked = clipped(config, leaf.detach(), old, advantage)
    torch.testing.assert_close(marked, torch.isclose(leaf.grad, bound) & (advantage != 0))
    assert 0 < int(marked.sum()) < 500


def reinforce(config: ObjectiveConfig, logprob: Tensor, old_logprob: Tensor, advantage: Tensor) -> Tensor:
    return -advantage * logprob


careful = Objective(reinforce, clipped=lambda config, logprob, old_logprob, advantage: advantage < 0)


def test_a_loss_of_ones_own_is_named_by_module_and_function_and_clips_what_it_says():
    config = load_config(ObjectiveConfig, None, [f"kind={__name__}:reinforce", "kl_coefficient=0", "dual_clip=3"])
    close(objective_loss(config, of(-1.0, -2.0), of(0, 0), of(3, -1), of(0, 0), None), 3.0, -2.0)
    assert clipped(config, of(-1.0, -2.0), of(0, 0), of(3, -1)).tolist() == [False, False]
    config = ObjectiveConfig(f"{__name__}:careful")
    assert clipped(config, of(-1.0, -2.0), of(0, 0), of(3, -1)).tolist() == [False, True]


def test_an_unknown_objective_is_an_error_and_never_another_one():
    with pytest.raises(
        ConfigError, match=r"objective.kind is 'dappo'; it must be one of grpo, dapo, cispo .* did you mean 'dapo'\?"
    ):
        objective_loss(ObjectiveConfig("dappo"), of(0.0), of(0.0), of(1.0), of(0.0), None)
