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

from dccot.kernels.mask import TreeMask
from dccot.kernels.schedule import classify

BLOCK = 128


def block_mask(visible_until: Tensor, block: int = BLOCK) -> BlockMask:
    """Full and edge tiles of a forest, by query tile."""
    ends = visible_until.cpu().numpy()
    bounds = np.append(np.arange(0, len(ends), block), len(ends))
    visited, full = classify(ends, bounds, bounds)
    full &= np.diff(bounds) == block

    def lists(tiles: np.ndarray) -> tuple[Tensor, Tensor]:
        """How many tiles each row visits, and all of them, the visited ones first."""
        moved = lambda array: torch.from_numpy(array.astype(np.int32)).to(visible_until.device)[None, None]
        return moved(tiles.sum(1)), moved(np.argsort(~tiles, axis=1, kind="stable"))

    visible = lambda b, h, q, k: (k <= q) & (q < visible_until[k])
    edge, sizes = lists(visited & ~full), (len(ends), len(ends))
    return BlockMask.from_kv_blocks(*edge, *lists(full), BLOCK_SIZE=block, mask_mod=visible, seq_lengths=sizes)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: TreeMask, scale: float) -> Tensor:
    """q [N, Hq, D], k and v [N, Hk, D] → [N, Hq, D]; differentiable, and transparent to torch.compile."""
    blocks = mask.derive("flash", lambda: block_mask(mask.visible_until))
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
