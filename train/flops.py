"""Floating-point operations of one forward pass over forests, for MFU and for balancing: only what the algorithm needs.

    2 · (parameters of the blocks) per token, 4 · heads · head_dim per query–key pair and layer, 2 · d · V per row of the LM head

A training step with backward counts three times as much; what recomputation adds is not useful work and is not counted.
"""
from __future__ import annotations

from collections.abc import Sequence

from dccot.model.config import ModelConfig
from dccot.train.forest import Forest


def block_parameters(config: ModelConfig) -> int:
    """Weights of one block's matrices."""
    d, head = config.hidden_size, config.head_dim
    attention = d * head * (2 * config.heads + 2 * config.kv_heads)
    return attention + 3 * d * config.intermediate_size


def pair_cost(config: ModelConfig) -> float:
    """What one query–key pair costs, in tokens' worth of linear work: the balance of `forest.pack`."""
    return 4 * config.heads * config.head_dim / (2 * block_parameters(config))


def model_flops(config: ModelConfig, forests: Sequence[Forest]) -> float:
    tokens = sum(len(forest) for forest in forests)
    pairs = sum(int(forest.mask.position.sum()) + len(forest) for forest in forests)
    rows = sum(len(forest.targets) for forest in forests)
    per_layer = 2 * block_parameters(config) * tokens + 4 * config.heads * config.head_dim * pairs
    return config.layers * per_layer + 2 * config.hidden_size * config.vocab_size * rows
