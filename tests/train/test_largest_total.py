"""The largest tree under a cap on all tokens of a response."""

from dccot.core.config import load_config
from dccot.train.config import RLConfig
from dccot.train.largest import largest_micro_batch


def test_a_cap_on_all_tokens_bounds_the_largest_tree():
    """Three workers of at most 7,000 of 21,000 tokens: worker 1 once, the others twice, and the prompt's 1,024."""
    needed = ["model.path=m", "data.train=d", "batch.token_budget=1024"]
    free = largest_micro_batch(load_config(RLConfig, "configs/rl/stage4.yaml", needed), 131_072)
    capped = largest_micro_batch(
        load_config(RLConfig, "configs/rl/stage4.yaml", [*needed, "rollout.total_tokens=21000"]), 131_072
    )
    assert 5 * 11_900 < free.tokens <= 1024 + 5 * 12_000
    assert 5 * 6_900 < capped.tokens <= 1024 + 5 * 7_000
    assert capped.rows <= 21_000
