"""What one rank holds while it trains: the largest micro-batch that a configuration allows, and its bytes.

A forest is filled up to the token budget, but a response that is larger than the budget gets its own forest. A tree
with K workers holds worker 1 once and the others twice, as written and as read, so a longest path of L tokens can be a
tree of (2K − 1)·L:

    prompt S1 | W2 | W3 | W1 W2' W3' S2          longest path |S1| + |W| + |S2|, tokens |S1| + 5 |W| + |S2|

With D levels of workers it holds K^D workers that spawn none, and each level reads all of them but its first again:
K^D · L · (1 + D (K − 1) / K) tokens.

Bytes are arithmetic on shapes, which `dccot rehearse` checks against the step itself. N tokens and M rows with loss in
a micro-batch, d hidden, H and Hk heads of D; b parameters of a block, r of embedding, LM head and last norm; w bytes
per number in compute precision, S ranks that share a copy of the model. Steady memory:

    master weights, moments   4 and 8 bytes per parameter of the rank's shard;  reference w
    gradients                 4 per parameter, whole until the last micro-batch (reduce_once), else of the shard
    gathered weights          w (r + 2b): root, the current block and the next one
    activations               per block w N (d + H D) + 4 N H: its input and attention; without recomputation everything

Where C ranks share a micro-batch (sharding.context_parallel), N and M are a rank's share of it, and while a block runs
the keys and values of all tokens are there, w · 2 Hk D each.

With adapters (model.lora) the model's own weights are w bytes each and have neither moments nor gradients, and the
reference policy takes no memory.

Outside torch's allocator, and assumed rather than computed: the CUDA context, NCCL's buffers, and the CUDA graphs of an
engine that sleeps at level 1.

The peak is the highest of four moments: gathering the root, which is there twice until it is copied out; the last
block's backward, with everything of it recomputed; the LM head's backward; the reduction of the root's gradients when
all blocks are done.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property

from dccot.kernels.sizes import BLOCK_ELEMENTS, DEFAULT_CHUNK_ROWS, largest_share
from dccot.model.config import ModelConfig, parameter_shapes
from dccot.model.settings import BYTES, LoraConfig, ShardingConfig
from dccot.rollout.tags import most_workers
from dccot.train.config import RLConfig, SFTConfig

# bytes; not measured, since no GPU was available
CONTEXT = 0.6e9  # CUDA context with its kernels
NCCL = 1.0e9  # buffers of the trainer's and the engine's communicators
GRAPHS = 1.5e9  # CUDA graphs, which stay on the GPU unless engine.sleep_level is 2
DIRECTOR = 8  # director tokens before and after spawning: few, since worker tokens make a larger tree


@dataclass(frozen=True)
class LargestBatch:
    """`copies` equal responses: a prompt, `workers` workers of `length` tokens each, and the director's own text."""

    copies: int
    prompt: int
    workers: int
    length: int
    final: int
    depth: int = 1  # levels of workers; those of the last one write `length` tokens

    @property
    def tokens(self) -> int:
        spawning = DIRECTOR + tree_factor(self.workers, self.depth) * self.length if self.workers else 0
        return self.copies * (self.prompt + spawning + self.final)

    @property
    def rows(self) -> int:
        """Tokens that carry loss: every worker once."""
        return self.copies * (DIRECTOR * bool(self.workers) + self.workers**self.depth * self.length + self.final)


def tree_factor(workers: int, depth: int) -> int:
    """Tokens of a tree over those of one of its last workers.

    >>> tree_factor(3, 1), tree_factor(2, 2)  # W2 W3 W1 W2' W3'; [2.2 2.1 2.2'] [1.2 1.1 1.2'] 2.1' 2.2'
    (5, 8)
    """
    return workers**depth + depth * (workers - 1) * workers ** (depth - 1)


def largest_batch(config: RLConfig | SFTConfig, max_position: int) -> LargestBatch:
    prompt, budget = config.prompt.max_prompt_tokens, config.batch.token_budget
    if isinstance(config, SFTConfig):
        alone = LargestBatch(1, prompt, 0, 0, config.data.max_tokens - prompt)
    elif config.prompt.kind == "parallel":
        workers, depth = most_workers(config.rollout.workers), config.rollout.depth
        room = min((config.engine.context or max_position) - prompt, config.rollout.total_tokens or max_position)
        length = max(1, min(config.rollout.budget, room // workers**depth) - 2 * DIRECTOR)
        alone = LargestBatch(1, prompt, workers, length, DIRECTOR, depth)
    else:
        alone = LargestBatch(1, prompt, 0, 0, config.rollout.budget)
    copies = -(-budget // alone.tokens)
    if copies == 1:
        return alone
    size = budget // copies - prompt
    if not alone.workers:
        return LargestBatch(copies, prompt, 0, 0, size)
    length = (size - 2 * DIRECTOR) // tree_factor(alone.workers, alone.depth)
    return LargestBatch(copies, prompt, alone.workers, length, DIRECTOR, alone.depth)


Shapes = dict[str, tuple[int, ...]]


def outside_torch(config: RLConfig | SFTConfig, ranks: int) -> dict[str, float]:
    engine = isinstance(config, RLConfig) and config.engine.compile is not False and config.engine.sleep_level == 1
    return {"CUDA context": CONTEXT, "NCCL": NCCL * (ranks > 1), "CUDA graphs of the sleeping engine": GRAPHS * engine}


def adapter_shapes(model: ModelConfig, lora: LoraConfig) -> Shapes:
    targets = [each for each in parameter_shapes(model).items() if each[0].split(".")[-2] in lora.targets]
    return {
        f"{name}.lora_{part}": (lora.rank, shape[1]) if part == "A" else (shape[0], lora.rank)
        for name, shape in targets
        if len(shape) == 2 and lora.rank
        for part in "AB"
    }


def count(shapes: Shapes, where: str = "", shards: int = 1) -> int:
    """Parameters with `where` in their names, or their first of `shards`: FSDP divides the first side, rounded up."""
    found = [shape for name, shape in shapes.items() if where in name]
    return sum(-(-shape[0] // shards) * math.prod(shape[1:]) for shape in found)


def parameters(model: ModelConfig, where: str = "", shards: int = 1) -> int:
    return count(parameter_shapes(model), where, shards)


def trained_parameters(model: ModelConfig, lora: LoraConfig) -> int:
    return count(adapter_shapes(model, lora)) if lora.rank else parameters(model)


@dataclass(frozen=True)
class TrainingMemory:
    model: ModelConfig
    sharding: ShardingConfig
    shards: int
    forest_tokens: int
    forest_rows: int
    reference: bool
    lora: LoraConfig = field(default_factory=LoraConfig)

    @cached_property
    def trained(self) -> Shapes:
        return adapter_shapes(self.model, self.lora) if self.lora.rank else parameter_shapes(self.model)

    @property
    def tokens(self) -> int:
        return largest_share(self.forest_tokens, self.sharding.context_parallel)

    @property
    def rows(self) -> int:
        """Nearly the same on each rank: shares are balanced by what attention computes."""
        return -(-self.forest_rows // self.sharding.context_parallel)

    @cached_property
    def persistent(self) -> dict[str, int]:
        shard, master = count(self.trained, shards=self.shards), BYTES[self.sharding.master_dtype]
        frozen = self.width * parameters(self.model, shards=self.shards)
        return {
            "master weights": master * shard + (frozen if self.lora.rank else 0),
            "AdamW moments": 2 * master * shard + 4 * len(self.trained),  # and the step count of each
            "reference policy": frozen if self.reference and not self.lora.rank else 0,
        }

    @property
    def peak(self) -> tuple[str, dict[str, float]]:
        """The moment with the most bytes, and what they are."""
        return max(self.moments().items(), key=lambda moment: sum(moment[1].values()))

    def moments(self) -> dict[str, dict[str, float]]:
        model, width = self.model, self.width
        root, block = parameters(model) - parameters(model, ".layers."), parameters(model, ".layers.0.")
        moved = count(self.trained, ".layers.0.")
        flying = 0 if self.waits else 4 * moved * (self.shards > 1)  # one block's gradients are on their way
        at_root = count(self.trained) - count(self.trained, ".layers.")
        both: dict[str, float] = {
            "gradients": self.gradients,
            "the LM head's gradient": 0 if self.lora.rank else width * model.vocab_size * model.hidden_size,
            "gathered weights": width * (root + 2 * block) if self.shards > 1 or width < 4 else 0,
            "activations": self.kept,
        }
        return {
            "gathering the root": {
                "gradients": self.gradients,
                "gathered weights": width * (2 * root + 2 * block) * (self.shards > 1),
            },
            "a block's backward": {**both, "one block": self.block_backward + flying},
            "the LM head's backward": {**both, "the LM head": self.head_backward},
            "the last reduction": {
                "gradients": 4 * count(self.trained, shards=self.shards) + (4 if self.waits else width) * at_root,
                "gradients on their way": 4 * at_root * (self.shards > 1),
            },
        }

    @property
    def width(self) -> int:
        return BYTES[self.sharding.compute_dtype]

    @property
    def waits(self) -> bool:
        """Gradients stay whole until the last micro-batch."""
        return self.sharding.reduce_once and self.shards > 1

    @property
    def gradients(self) -> int:
        return 4 * count(self.trained, shards=1 if self.waits else self.shards)

    @property
    def _inside_block(self) -> int:
        """Numbers per token that a block's backward needs: residuals and norms; q, k, v and attention; gate, its silu,
        up, their product.
        """
        heads = (2 * self.model.heads + 2 * self.model.kv_heads) * self.model.head_dim
        return 4 * self.model.hidden_size + heads + 4 * self.model.intermediate_size

    @property
    def _input_and_attention(self) -> int:
        return self.model.hidden_size + self.model.heads * self.model.head_dim

    @property
    def kept(self) -> int:
        """What all blocks keep for the backward."""
        recomputed = self.sharding.activation_checkpointing
        inside = self._input_and_attention if recomputed else self._inside_block
        statistics = 4 * self.model.heads + (0 if recomputed else 2 * 4)  # log-sum-exp, and the norms'
        return self.model.layers * self.tokens * (self.width * inside + statistics)

    @property
    def block_backward(self) -> int:
        """The MLP's backward: with recomputation the whole block except its input and attention, which are kept; three
        gradients of the MLP.
        """
        hidden, inner = self.model.hidden_size, self.model.intermediate_size
        again = self._inside_block - self._input_and_attention if self.sharding.activation_checkpointing else 0
        gathered = 2 * self.model.kv_heads * self.model.head_dim * (self.sharding.context_parallel > 1)
        weights = 0 if self.lora.rank else 2 * hidden * inner
        own = self.tokens * (again + 2 * inner + hidden) + weights
        return self.width * (own + self.forest_tokens * gathered)

    @property
    def head_backward(self) -> int:
        """Hidden states and their gradient, one block of logits and its gradient, and the words' gradient twice."""
        hidden, width, tall = self.model.hidden_size, self.width, min(self.rows, DEFAULT_CHUNK_ROWS)
        wide = min(self.model.vocab_size, BLOCK_ELEMENTS // tall)
        logits = tall * wide * (4 + width * (width < 4))
        words = 0 if self.lora.rank else 2 * wide
        return width * hidden * (2 * self.tokens + self.rows) + 4 * hidden * (self.rows + words) + logits
