"""Tree attention by torch's FlexAttention: the same tiles, as a BlockMask built from `visible_until` tile by tile.

FlexAttention picks its own kernel for them: with flash-attn's CuTe kernels installed, FLASH on Hopper and Blackwell,
its Triton template elsewhere. Its tiles start at multiples of BLOCK, so unlike in the schedule no new tile starts
between branches; nothing N×N ever exists. On a CPU it runs uncompiled, as a check.
"""

from __future__ import annotations

import functools
import importlib.util
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from dccot.kernels.mask import TreeMask, moved
from dccot.kernels.schedule import classify

BLOCK = 128


def block_mask(mask: TreeMask, block: int = BLOCK) -> BlockMask:
    """Full and edge tiles of a forest, by query tile. A tile may hold queries of two ranges: the first and the last
    decide, which can only turn a full or empty tile into an edge.
    """
    ends, visible_until, at, own = mask.host.numpy(), mask.visible_until, mask.at.numpy(), moved(mask.at, mask.device)
    keys = np.append(np.arange(0, len(ends), block), len(ends))
    rows = np.append(np.arange(0, mask.queries, block), mask.queries)
    visited, full = classify(ends, at[rows[:-1]], at[rows[1:] - 1] + 1, keys)
    full &= np.diff(keys) == block

    def lists(tiles: np.ndarray) -> tuple[Tensor, Tensor]:
        """How many tiles each row visits, and all of them, the visited ones first."""
        there = lambda array: moved(torch.from_numpy(array.astype(np.int32)), mask.device)[None, None]
        return there(tiles.sum(1)), there(np.argsort(~tiles, axis=1, kind="stable"))

    whole = lambda b, h, q, k: (k <= q) & (q < visible_until[k])
    visible = whole if mask.share is None else lambda b, h, q, k: whole(b, h, own[q], k)
    edge, sizes = lists(visited & ~full), (mask.queries, len(ends))
    return BlockMask.from_kv_blocks(*edge, *lists(full), BLOCK_SIZE=block, mask_mod=visible, seq_lengths=sizes)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: TreeMask, scale: float) -> Tensor:
    """q [M, Hq, D], k and v [N, Hk, D] → [M, Hq, D]; differentiable, and transparent to torch.compile."""
    blocks = mask.derive("flash", lambda: block_mask(mask))
    heads_first = (x.transpose(0, 1)[None] for x in (q, k, v))
    run = _compiled() if q.is_cuda else flex_attention
    options: Any = {"BACKEND": "FLASH"} if q.is_cuda and _has_cute(q.device) else None
    out = run(*heads_first, block_mask=blocks, scale=scale, enable_gqa=q.shape[1] != k.shape[1], kernel_options=options)
    return out[0].transpose(0, 1)


@functools.cache
def _compiled() -> Any:
    return torch.compile(flex_attention, dynamic=True)


@functools.cache
def _has_cute(device: torch.device) -> bool:
    found = lambda module: importlib.util.find_spec(module) is not None
    return torch.cuda.get_device_capability(device)[0] >= 9 and found("flash_attn") and found("flash_attn.cute")
