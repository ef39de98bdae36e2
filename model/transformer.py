"""The decoder, from scratch: qwen2, qwen3 and llama over a packed forest of tokens.

    x = embed(tokens)
    for each layer:   x += o(tree_attention(rotate(q(norm x)), rotate(k(norm x)), v(norm x)))
                      x += down(silu(gate(norm x)) · up(norm x))
    norm x  →  log-prob and entropy of `targets`, only at the rows that predict them

There is no batch dimension: N tokens follow one another, `position` gives each one's position at inference, and the
mask says what each sees. Parameter names are Hugging Face's own, so no mapping is needed. Everything runs through
`forward`, because that is where FSDP gathers the weights; it works at the weights' precision (bf16, fp32, fp64), norms
and rotation at fp32 or better. Where ranks share a forest (context.py), all of it is about the rank's own tokens.

N tokens, M rows that predict, H heads, D head dim, V vocabulary.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from dccot.kernels.lm_head import linear_logprob
from dccot.kernels.norm_rotate import rms_norm, rotate
from dccot.kernels.tree_attention import TreeMask, tree_attention
from dccot.model.config import ModelConfig
from dccot.model.context import gather_keys, prepare
from dccot.model.rope import cos_sin

if TYPE_CHECKING:
    from dccot.model.lora import LoraConfig


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class Attention(nn.Module):
    def __init__(self, config: ModelConfig):
        super().__init__()
        width, self.head_dim = config.hidden_size, config.head_dim
        self.backend: str | None = None  # of tree attention; None: by device
        self.q_proj = nn.Linear(width, config.heads * config.head_dim, bias=config.qkv_bias)
        self.k_proj = nn.Linear(width, config.kv_heads * config.head_dim, bias=config.qkv_bias)
        self.v_proj = nn.Linear(width, config.kv_heads * config.head_dim, bias=config.qkv_bias)
        self.o_proj = nn.Linear(config.heads * config.head_dim, width, bias=config.output_bias)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else None

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: TreeMask) -> Tensor:
        q, k, v = (project(x).unflatten(-1, (-1, self.head_dim)) for project in (self.q_proj, self.k_proj, self.v_proj))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        if mask.share is not None:
            k, v = gather_keys(k, v, mask)
        out = tree_attention(q, k, v, mask, backend=self.backend)
        return self.o_proj(out.flatten(1))


class MLP(nn.Module):
    def __init__(self, config: ModelConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """One layer. With `recompute`, its backward reruns its forward, except the attention, whose output is kept."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.recompute = False

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: TreeMask) -> Tensor:
        if self.recompute and torch.is_grad_enabled():
            keep = functools.partial(create_selective_checkpoint_contexts, [torch.ops.dccot.tree_attention.default])
            rerun = functools.partial(checkpoint, use_reentrant=False, preserve_rng_state=False, context_fn=keep)
            return rerun(self.compute, x, cos, sin, mask)
        return self.compute(x, cos, sin, mask)

    def compute(self, x: Tensor, cos: Tensor, sin: Tensor, mask: TreeMask) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    """Everything below the LM head: tokens [N] → hidden [N, width]."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, tokens: Tensor, position: Tensor, mask: TreeMask) -> Tensor:
        x = self.embed_tokens(tokens)
        prepare(mask)
        cos, sin = cos_sin(position, self.config.rope, self.config.head_dim, x.dtype)
        for layer in self.layers:
            x = layer(x, cos, sin, mask)
        return self.norm(x)


class Transformer(nn.Module):
    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.lora: LoraConfig | None = None  # of its adapters (lora.py)
        self.head_backend = "own"  # of the LM head
        self.model = Decoder(config)
        if not config.tied_embeddings:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(
        self,
        tokens: Tensor,
        position: Tensor,
        mask: TreeMask,
        rows: Tensor | None = None,
        targets: Tensor | None = None,
        temperature: float = 1.0,
    ) -> tuple[Tensor, Tensor] | Tensor:
        """Log-prob and entropy [M] of `targets` predicted from `rows` at `temperature`; without them, logits [N, V]."""
        hidden = self.model(tokens, position, mask)
        head = self.model.embed_tokens.weight if self.config.tied_embeddings else self.lm_head.weight
        if rows is None or targets is None:
            return F.linear(hidden, head)
        return linear_logprob(hidden[rows], head, targets, temperature, backend=self.head_backend)

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        """Matrices ~ N(0, initializer_range), norms 1, biases 0: the same bits for a seed, however it is sharded."""
        generator = torch.Generator(device="cpu").manual_seed(seed)
        for name, parameter in self.named_parameters():
            full = torch.zeros(parameter.shape, dtype=torch.float32, device="cpu")
            if name.endswith("norm.weight"):
                full.fill_(1.0)
            elif not name.endswith(".bias"):
                full.normal_(0.0, self.config.initializer_range, generator=generator)
            fill(parameter, full)


def fill(parameter: Tensor, full: Tensor) -> None:
    """Copy a whole tensor, the same on every rank, into a parameter or its shards."""
    if isinstance(parameter, DTensor):
        mesh, full = parameter.device_mesh, full.to(parameter.device)
        full = distribute_tensor(full, mesh, parameter.placements, src_data_rank=None)
    parameter.copy_(full)
