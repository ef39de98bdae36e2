"""Floating-point operations of one forward pass over forests, for MFU and for balancing: only what the algorithm needs.

    2 · (parameters of the blocks) per token
    4 · heads · head_dim per query–key pair and layer
    2 · d · V per row of the LM head

A training step with backward counts three times as much, or twice for matrices that are frozen (model.lora);
recomputation is not useful work and is not counted.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import cache

import torch

from dccot.model.config import ModelConfig, block_parameters
from dccot.train.forest import Forest


def pair_cost(config: ModelConfig) -> float:
    """Cost of one query–key pair, in units of a token's linear work: used for balancing by `forest.pack`."""
    return 4 * config.heads * config.head_dim / (2 * block_parameters(config))


def model_flops(config: ModelConfig, forests: Sequence[Forest]) -> float:
    masks = [forest.mask for forest in forests]
    pairs = sum(int(mask.own(mask.position).sum()) + mask.queries for mask in masks)
    return matrix_flops(config, forests) + config.layers * 4 * config.heads * config.head_dim * pairs


def matrix_flops(config: ModelConfig, forests: Sequence[Forest]) -> float:
    """Of products with weights."""
    tokens, rows = sum(forest.mask.queries for forest in forests), sum(len(forest.targets) for forest in forests)
    return config.layers * 2 * block_parameters(config) * tokens + 2 * config.hidden_size * config.vocab_size * rows


@cache
def matmul_peak(device: torch.device, dtype: torch.dtype) -> float:
    """Measured FLOP/s of large square matrix products on this machine: the reference for MFU."""
    size = 8192 if device.type == "cuda" else 1024
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    best = 0.0
    for _ in range(6):
        _wait(device)
        start = time.perf_counter()
        a @ b
        _wait(device)
        best = max(best, 2 * size**3 / (time.perf_counter() - start))
    return best


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def training_speed(
    config: ModelConfig,
    forests: Sequence[Forest],
    seconds: float,
    device: torch.device,
    dtype: torch.dtype,
    frozen: bool = False,
) -> dict[str, float]:
    """Useful TFLOP/s of this rank's training step (forward and backward) and its share of the matmul peak."""
    achieved = (3 * model_flops(config, forests) - frozen * matrix_flops(config, forests)) / seconds
    return {"speed/tflops": achieved / 1e12, "speed/mfu": achieved / matmul_peak(device, dtype)}
