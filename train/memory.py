"""Bytes of one rank while it trains, by arithmetic on shapes. `dccot rehearse` checks them against the step itself.

N tokens and M rows with loss in a micro-batch, d hidden, I intermediate, V vocabulary, H and Hk heads of D; b
parameters of a block, r of embedding, LM head and last norm; w bytes per number in compute precision, S ranks that
share a copy of the model. Steady memory:

    master weights, moments   4 and 8 bytes per parameter of the rank's shard;  reference w
    gradients                 4 per parameter, unsharded until the last micro-batch (sharding.reduce_once), else of the shard
    gathered weights          w (r + 2b): root, the current block and the next one
    activations               per block w N (d + H D) + 4 N H: its input and its attention, or everything without recomputation

The peak is the highest of three moments: the last block's backward, with everything of it recomputed; the LM head's
backward; the reduction of the root's gradients when all blocks are done.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property

import torch

from dccot.kernels.lm_head import BLOCK_ELEMENTS, DEFAULT_CHUNK_ROWS
from dccot.model.config import ModelConfig
from dccot.model.sharding import DTYPES, ShardingConfig
from dccot.model.transformer import Transformer


@cache
def parameter_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        return {name: tuple(parameter.shape) for name, parameter in Transformer(model).named_parameters()}


def numbers(shape: tuple[int, ...], shards: int = 1) -> int:
    """Elements of a tensor, or of the first of `shards` shards: FSDP divides the first dimension, rounded up."""
    size = -(-shape[0] // shards)
    for side in shape[1:]:
        size *= side
    return size


@dataclass(frozen=True)
class TrainingMemory:
    model: ModelConfig
    sharding: ShardingConfig
    shards: int
    tokens: int
    rows: int
    reference: bool

    @cached_property
    def persistent(self) -> dict[str, int]:
        shapes = parameter_shapes(self.model).values()
        shard = sum(numbers(shape, self.shards) for shape in shapes)
        return {
            "master weights": DTYPES[self.sharding.master_dtype].itemsize * shard,
            "AdamW moments": 2 * DTYPES[self.sharding.master_dtype].itemsize * shard
            + 4 * len(shapes),  # and the step count of each
            "reference policy": self.width * shard if self.reference else 0,
        }

    @property
    def peak(self) -> tuple[str, dict[str, float]]:
        """The moment with the most bytes, and what they are."""
        return max(self.moments().items(), key=lambda moment: sum(moment[1].values()))

    def moments(self) -> dict[str, dict[str, float]]:
        parts = self.model, self.width, self.tokens
        gathered = self.width * (self.root + 2 * self.block) if self.shards > 1 or self.width < 4 else 0
        gradients = {
            "gradients": self.gradients,
            "the LM head's gradient": self.width * self.model.vocab_size * self.model.hidden_size,
        }
        flying = 0 if self.waits else 4 * self.block * (self.shards > 1)  # one block's gradients are on their way
        return {
            "a block's backward": {
                **gradients,
                "gathered weights": gathered,
                "activations": self.kept,
                "one block": block_backward(*parts, self.sharding.activation_checkpointing) + flying,
            },
            "the LM head's backward": {
                **gradients,
                "gathered weights": gathered,
                "activations": self.kept,
                "the LM head": head_backward(*parts, self.rows),
            },
            "the last reduction": {
                "gradients": self.shard_gradients + (4 if self.waits else self.width) * self.root,
                "gradients on their way": 4 * self.root * (self.shards > 1),
            },
        }

    @property
    def width(self) -> int:
        return DTYPES[self.sharding.compute_dtype].itemsize

    @cached_property
    def block(self) -> int:
        return sum(numbers(shape) for name, shape in parameter_shapes(self.model).items() if ".layers.0." in name)

    @cached_property
    def root(self) -> int:
        return sum(numbers(shape) for name, shape in parameter_shapes(self.model).items() if ".layers." not in name)

    @property
    def waits(self) -> bool:
        """Gradients stay whole until the last micro-batch."""
        return self.sharding.reduce_once and self.shards > 1

    @property
    def gradients(self) -> int:
        return 4 * sum(map(numbers, parameter_shapes(self.model).values())) if self.waits else self.shard_gradients

    @property
    def shard_gradients(self) -> int:
        return 4 * sum(numbers(shape, self.shards) for shape in parameter_shapes(self.model).values())

    @property
    def kept(self) -> int:
        """What all blocks keep for the backward."""
        each = 1 if self.sharding.activation_checkpointing else 0
        inside = (
            inside_block(self.model) if not each else self.model.hidden_size + self.model.heads * self.model.head_dim
        )
        statistics = 4 * self.model.heads + (0 if each else 2 * 4)  # log-sum-exp, and the norms'
        return self.model.layers * self.tokens * (self.width * inside + statistics)


def inside_block(model: ModelConfig) -> int:
    """Numbers per token that a block's backward needs: residuals and norms; q, k, v and attention; gate, its silu, up,
    their product.
    """
    return 4 * model.hidden_size + (2 * model.heads + 2 * model.kv_heads) * model.head_dim + 4 * model.intermediate_size


def block_backward(model: ModelConfig, width: int, tokens: int, recomputed: bool) -> int:
    """The MLP's backward: with recomputation the whole block except its input and attention, which are kept; three
    gradients of the MLP.
    """
    again = inside_block(model) - model.hidden_size - model.heads * model.head_dim if recomputed else 0
    return width * (
        tokens * (again + 2 * model.intermediate_size + model.hidden_size)
        + 2 * model.hidden_size * model.intermediate_size
    )


def head_backward(model: ModelConfig, width: int, tokens: int, rows: int) -> int:
    """Hidden states and their gradient, one block of logits and its gradient, and the words' gradient twice."""
    tall = min(rows, DEFAULT_CHUNK_ROWS)
    wide = min(model.vocab_size, BLOCK_ELEMENTS // tall)
    logits = tall * wide * (4 + width * (width < 4))
    return width * model.hidden_size * (2 * tokens + rows) + 4 * model.hidden_size * (rows + 2 * wide) + logits
