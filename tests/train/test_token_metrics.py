"""Token metrics by hand; percentiles of the histogram against those of the sorted tokens."""

import math

import pytest
import torch
from torch import Tensor

from dccot.core.plugins import PluginError
from dccot.core.runtime import Runtime
from dccot.train.metrics import BINS, TokenMetrics, count_bins, percentile
from dccot.train.objectives import Objective, ObjectiveConfig, RolloutCorrection

PERCENTS = (1, 25, 50, 60, 70, 80, 90, 99, 99.9, 100)


def exact(values: Tensor, percent: float) -> float:
    ordered = sorted(values.tolist())
    return ordered[max(0, math.ceil(percent / 100 * len(ordered)) - 1)]


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def confident(tokens: int) -> Tensor:
    """Like a trained policy: most tokens nearly certain, some forks; with rounding noise around zero."""
    logits = torch.randn(tokens, 50, generator=generator()) * 10 ** torch.empty(tokens, 1).uniform_(
        -1, 2, generator=generator()
    )
    log = logits.log_softmax(-1)
    return -(log.exp() * log).sum(-1)


DISTRIBUTIONS = {
    "mostly zeros": torch.cat([torch.zeros(700), torch.rand(300, generator=generator())]),
    "all zeros": torch.zeros(10),
    "noise below zero": torch.randn(5000, generator=generator()) * 1e-7,
    "heavy tail": 10 ** (torch.randn(20_000, generator=generator()) * 3 - 2),
    "ties": torch.tensor([0.1, 0.25, 0.25, 0.25, 1.7]).repeat(100),
    "softmax": confident(20_000),
    "even": torch.rand(9_999, generator=generator()) * math.log(151_936),
    "one": torch.tensor([3.0]),
    "two": torch.tensor([1e-30, 11.9]),
}


@pytest.mark.parametrize("name", DISTRIBUTIONS)
@pytest.mark.parametrize("percent", PERCENTS)
def test_percentiles_are_within_half_a_percent_of_the_exact_ones(name, percent):
    values = DISTRIBUTIONS[name]
    histogram = torch.zeros(BINS, dtype=torch.int64)
    for part in values.split(1000):
        count_bins(histogram, part)
    found = percentile(histogram.double(), percent, float(values.min()), float(values.max()))
    assert found == pytest.approx(exact(values, percent), rel=0.005, abs=1e-38)


def logs(*ratios: float) -> Tensor:
    return torch.tensor(ratios).log()


def batches() -> list[tuple[Tensor, ...]]:
    """Two micro-batches, of three tokens and one. Old log-probs are 0; ratios to them 1, 2, 1/2 and 8, to the rollout's
    1, 4, 1/3 and 1.
    """
    zero = torch.zeros(4)
    logprob, entropy, advantage = logs(1, 2, 0.5, 8), torch.tensor([0.0, 2.0, 1.0, 5.0]), torch.tensor([1.0, 1, 1, -1])
    rollout, reference = logs(1, 1 / 4, 3, 1), logprob + logs(1, 2, 1, 1)
    whole = (logprob, entropy, zero, advantage, rollout, reference)
    return [tuple(values[:3] for values in whole), tuple(values[3:] for values in whole)]


EXPECTED = {
    "policy/clip_fraction": 1 / 4,  # DAPO: the ratio of 2 with A > 0
    "policy/ratio_mean": (1 + 2 + 0.5 + 8) / 4,
    "policy/ratio_max": 8.0,
    "policy/logprob": math.log(8) / 4,
    "policy/entropy": 2.0,
    "policy/kl": (2 - math.log(2) - 1) / 4,
    "gap/kl": ((4 - 1 - math.log(4)) + (1 / 3 - 1 + math.log(3))) / 4,
    "gap/max_abs_logprob": math.log(4),
    "gap/max_ratio": 4.0,
    "gap/fraction_over_2": 2 / 4,
    "gap/mean_abs_logprob": (math.log(4) + math.log(3)) / 4,
    "gap/kl_k1": (math.log(3) - math.log(4)) / 4,
    "gap/perplexity_ratio": (3 / 4) ** (1 / 4),
    "gap/reverse_kl_k1": (4 * math.log(4) - math.log(3) / 3) / 4,
    "gap/reverse_kl": ((4 * math.log(4) - 3) + (2 / 3 - math.log(3) / 3)) / 4,
    "gap/effective_sample_size": (1 + 4 + 1 / 3 + 1) ** 2 / (4 * (1 + 16 + 1 / 9 + 1)),
}
PERCENTILES = {f"policy/entropy_p{p}": value for p, value in ((60, 2.0), (70, 2.0), (80, 5.0), (90, 5.0), (100, 5.0))}
CONFIG = ObjectiveConfig("dapo")


def agree(found: dict[str, float]) -> None:
    assert {name: value for name, value in found.items() if name not in PERCENTILES} == pytest.approx(
        EXPECTED, rel=1e-6
    )
    assert {name: found[name] for name in PERCENTILES} == pytest.approx(PERCENTILES, rel=0.005)


def test_metrics_by_hand_over_micro_batches_one_of_them_empty():
    with Runtime.start() as runtime:
        tokens = TokenMetrics(CONFIG, runtime)
        for batch in [*batches(), tuple(values[:0] for values in batches()[0])]:
            tokens.add(*batch)
        agree(tokens.reduce())


def test_weights_as_used_are_capped_and_zero_where_masked():
    """Ratios 1, 4, 1/3 and 1; a cap of 2 takes the second to 2, and the third is masked."""
    correction = RolloutCorrection(max_ratio=9.0)
    with Runtime.start() as runtime:
        tokens = TokenMetrics(ObjectiveConfig("dapo", rollout_ratio_cap=2.0, rollout_correction=correction), runtime)
        for batch, trained in zip(batches(), ([True, True, False], [True])):
            tokens.add(*batch, torch.tensor(trained))
        found = tokens.reduce()
    assert found["gap/truncated"] == found["gap/masked"] == 1 / 4
    assert found["gap/effective_sample_size"] == pytest.approx((1 + 2 + 0 + 1) ** 2 / (4 * (1 + 4 + 0 + 1)), rel=1e-6)


careless = Objective(lambda *tokens: tokens[1], clipped=lambda *tokens: 1 / 0)


def test_an_objective_of_ones_own_that_cannot_say_what_it_clips_is_named():
    tokens = TokenMetrics(ObjectiveConfig(f"{__name__}:careless"), Runtime.alone())
    with pytest.raises(PluginError, match=f"objective {__name__}:<lambda> failed on 3 tokens: ZeroDivisionError"):
        tokens.add(*batches()[0])


def test_the_ratio_is_to_the_engine_if_it_is_the_denominator_and_the_gap_remains_that_of_the_trainer():
    with Runtime.start() as runtime:
        tokens = TokenMetrics(ObjectiveConfig("dapo", old="engine"), runtime)
        for batch in batches():
            tokens.add(*batch)
        found = tokens.reduce()
    assert found["policy/ratio_mean"] == pytest.approx((1 + 8 + 1 / 6 + 8) / 4, rel=1e-6)
    assert found["gap/kl"] == pytest.approx(EXPECTED["gap/kl"], rel=1e-6)


def test_tokens_are_measured_by_how_many_versions_ago_they_were_sampled():
    with Runtime.start() as runtime:
        tokens = TokenMetrics(CONFIG, runtime)
        for batch, lag in zip(batches(), ([0, 2, 2], [-1])):  # −1: unknown
            tokens.add(*batch, None, torch.tensor(lag, dtype=torch.int32))
        found = {name: value for name, value in tokens.reduce().items() if "lag" in name}
        same = ("mean_abs_logprob", "max_abs_logprob", "kl", "kl_k1", "reverse_kl", "reverse_kl_k1", "fraction_over_2")
        zero = {f"gap/lag_0_{name}": 0.0 for name in same}  # a ratio of 1
        zero |= {"gap/lag_0_tokens": 1 / 4, "gap/lag_0_perplexity_ratio": 1, "gap/lag_0_effective_sample_size": 1}
        two = {  # ratios of 4 and 1/3
            "tokens": 2 / 4,
            "mean_abs_logprob": (math.log(4) + math.log(3)) / 2,
            "max_abs_logprob": math.log(4),
            "kl": ((4 - 1 - math.log(4)) + (1 / 3 - 1 + math.log(3))) / 2,
            "kl_k1": (math.log(3) - math.log(4)) / 2,
            "reverse_kl": ((4 * math.log(4) - 3) + (2 / 3 - math.log(3) / 3)) / 2,
            "reverse_kl_k1": (4 * math.log(4) - math.log(3) / 3) / 2,
            "fraction_over_2": 1.0,
            "perplexity_ratio": (3 / 4) ** (1 / 2),
            "effective_sample_size": (4 + 1 / 3) ** 2 / (2 * (16 + 1 / 9)),
        }
        by_hand = zero | {f"gap/lag_2_{name}": value for name, value in two.items()}
        assert found == pytest.approx(by_hand, rel=1e-6, abs=1e-9)
        tokens.add(*batches()[0], None, torch.tensor([7, 8, 30]))
        assert tokens.reduce()["gap/lag_7_tokens"] == 3 / 7  # 7 and more


def test_without_a_reference_there_is_no_kl_and_without_tokens_nothing():
    with Runtime.start() as runtime:
        tokens = TokenMetrics(CONFIG, runtime)
        assert tokens.reduce() == {}
        tokens.add(*batches()[0][:-1], None)
        assert tokens.reduce().keys() == (EXPECTED | PERCENTILES).keys() - {"policy/kl"}
