"""Tile sizes, warps and pipeline stages of every kernel: one small table per architecture and head dim.

On a GPU tiles are measured (autotune.py); this table is where that starts, and what remains without it. It is not
measured: no GPU was available. Its tiles spill no register, serialise no product and keep loads one
tile ahead of the arithmetic (`dccot inspect`); among those they were chosen by an estimate of their speed. Keys are
compile-time constants, so a new length or tree never recompiles. sm_86 stands for GPUs with 100 KB of shared memory.
"""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass

import torch
from torch import Tensor

from dccot.kernels.mask import TreeMask


@dataclass(frozen=True)
class Tile:
    block_q: int
    block_k: int
    warps: int
    stages: int
    tma: bool = False  # tiles are loaded through tensor descriptors

    def __str__(self) -> str:
        return f"{self.block_q}x{self.block_k}, {self.warps} warps, {self.stages} stages{', TMA' * self.tma}"


ATTENTION_KERNELS = ("forward", "grad_query", "grad_key")

# architecture → head dim → tile of forward, dQ, dK/dV; fp16 and bf16
TABLE: dict[str, dict[int, tuple[Tile, Tile, Tile]]] = {
    "sm_80": {
        64: (Tile(128, 32, 4, 3), Tile(128, 32, 4, 3), Tile(64, 64, 4, 3)),
        128: (Tile(128, 32, 4, 3), Tile(128, 32, 4, 3), Tile(32, 64, 4, 3)),
    },
    "sm_86": {
        64: (Tile(64, 32, 4, 3), Tile(64, 32, 4, 3), Tile(32, 64, 4, 3)),
        128: (Tile(128, 32, 4, 3), Tile(64, 32, 4, 3), Tile(32, 64, 4, 3)),
    },
    "sm_90": {
        64: (Tile(128, 64, 4, 3, tma=True), Tile(64, 128, 4, 3), Tile(64, 64, 4, 3, tma=True)),
        128: (Tile(128, 32, 4, 3, tma=True), Tile(128, 64, 8, 3), Tile(64, 128, 8, 3)),
    },
    "sm_100": {
        64: (Tile(128, 64, 4, 3, tma=True), Tile(128, 64, 4, 3, tma=True), Tile(32, 128, 4, 3, tma=True)),
        128: (Tile(128, 32, 4, 3, tma=True), Tile(128, 64, 8, 3, tma=True), Tile(64, 128, 8, 3)),
    },
    "gfx942": {
        64: (Tile(128, 32, 4, 2), Tile(64, 32, 4, 2), Tile(32, 128, 4, 2)),
        128: (Tile(128, 32, 4, 2), Tile(64, 32, 4, 2), Tile(32, 64, 4, 2)),
    },
}
FP32 = (Tile(32, 32, 8, 1), Tile(16, 16, 8, 1), Tile(32, 32, 8, 1))  # without tensor cores: for checks, not for speed
INTERPRETER = (Tile(32, 16, 1, 1), Tile(16, 32, 1, 1), Tile(16, 32, 1, 1))  # unequal sides exercise every boundary

# The LM head's kernels: columns per step and warps, on every architecture.
HEAD_COLUMNS = 4096
HEAD_WARPS = 8


CHOSEN: dict[tuple, dict[str, Tile]] = {}  # shape → kernel → tile, where one was measured


def shape_key(mask: TreeMask, heads: int, key_heads: int, head_dim: int, dtype: torch.dtype) -> tuple:
    """What a measured tile holds for."""
    return heads, key_heads, head_dim, str(dtype).removeprefix("torch."), mask.is_causal


def shape_of(q: Tensor, k: Tensor, mask: TreeMask) -> tuple:
    return shape_key(mask, q.shape[1], k.shape[1], q.shape[2], q.dtype)


def tile_for(kernel: str, arch: str, head_dim: int, dtype: torch.dtype) -> Tile:
    if arch == "interpreter":
        tiles = INTERPRETER
    elif dtype == torch.float32:
        tiles = FP32
    else:
        tiles = TABLE[arch][max(head_dim, 64)]
    return tiles[ATTENTION_KERNELS.index(kernel)]


@functools.cache
def architecture(device: torch.device) -> str:
    """The row of the table for a device."""
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1":
        return "interpreter"
    if torch.version.hip:
        return "gfx942"
    major, minor = torch.cuda.get_device_capability(device)
    if major < 8:
        name = torch.cuda.get_device_name(device)
        raise ValueError(f"tree attention needs compute capability 8.0 or newer, {name} has {major}.{minor}")
    if (major, minor) == (8, 0):
        return "sm_80"
    return {9: "sm_90", 10: "sm_100"}.get(major, "sm_86")
