"""Tile sizes, warps and pipeline stages of every kernel: one row per architecture, head dim and kernel."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Tile:
    block_q: int
    block_k: int
    warps: int
    stages: int


INTERPRETER = {"forward": Tile(32, 16, 1, 1), "grad_query": Tile(16, 32, 1, 1), "grad_key": Tile(32, 32, 1, 1)}


@functools.cache
def architecture(device: torch.device) -> str:
    return "interpreter"


def tile_for(kernel: str, arch: str, head_dim: int, dtype: torch.dtype) -> Tile:
    return INTERPRETER[kernel]
STRETCH = 1024
STRETCH_WARPS = 4
