"""Checks Triton launches without running them: for rehearsals without the GPUs (lab/rehearsal/rehearse.py)."""

from __future__ import annotations

from typing import Any

import torch
from triton.runtime.jit import JITFunction

GRID_LIMITS = (2**31 - 1, 65535, 65535)
OPTIONS = ("num_warps", "num_stages")


def check_instead_of_launching() -> None:
    """After this, no kernel runs in this process."""
    JITFunction.run = _launch


def _launch(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
    """What Triton would check before it launches: the arguments' number, that tensors are on the GPU, the grid's
    limits.
    """
    kernel.signature.bind(*args, **{key: value for key, value in options.items() if key not in OPTIONS})
    for parameter, value in zip(kernel.signature.parameters, args):
        if isinstance(value, torch.Tensor) and value.device.type != "cuda":
            where = f"{kernel.fn.__name__}: {parameter} is on {value.device}"
            raise ValueError(f"{where}; a kernel reads the GPU's memory only: move it first")
    for size, limit in zip(grid, GRID_LIMITS):
        if not 0 < size <= limit:
            raise ValueError(
                f"{kernel.fn.__name__}: the grid {tuple(grid)} has a side of {size:,}; it must be in 1 … {limit:,}"
            )
