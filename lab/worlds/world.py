"""The miniature world on disk: problems of every split, sequential solutions for a base model, and its untrained
checkpoint.

<folder>/problems/{train,validation,test,larger}.jsonl   id, question, gold
<folder>/base.jsonl                                      id, question, completion: what the base model learns from
<folder>/init/                                           a small qwen2 with random weights and the world's tokenizer
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

from dccot.core.config import Positive, Seed, require
from dccot.core.files import write_jsonl_atomic
from dccot.lab.worlds.arithmetic import make_splits, make_tokenizer, sequential_solution

if TYPE_CHECKING:
    from dccot.model.transformer import Block, Transformer


@dataclass
class TinyModel:
    hidden_size: Positive = 96
    intermediate_size: Positive = 256
    num_hidden_layers: Positive = 2
    num_attention_heads: Positive = 3
    max_position_embeddings: Positive = 1024

    def check(self) -> None:
        width, heads = self.hidden_size, self.num_attention_heads
        require(width % heads == 0, f"model.hidden_size {width} is not divisible by model.num_attention_heads {heads}")


@dataclass
class WorldConfig:
    seed: Seed = 0
    base_examples: Positive = 20_000
    train: Positive = 4_000
    validation: Positive = 100
    test: Positive = 300
    larger: Positive = 100
    single_token_tags: bool = True
    marked_parts: bool = True  # the base's solutions divide the list into numbered parts; otherwise rewriting has to
    model: TinyModel = field(default_factory=TinyModel)


def make_world(config: WorldConfig, folder: Path) -> None:
    """Write everything; the same configuration gives the same bytes."""
    from dccot.model.weights import create_checkpoint

    written = ("train", "validation", "test", "larger")
    sizes = {"base": config.base_examples} | {name: getattr(config, name) for name in written}
    splits = make_splits(config.seed, sizes)
    (folder / "problems").mkdir(parents=True, exist_ok=True)
    for name in written:
        rows = ({"id": p.id, "question": p.question, "gold": p.gold} for p in splits[name])
        write_jsonl_atomic(folder / "problems" / f"{name}.jsonl", rows)
    solve = partial(sequential_solution, marked=config.marked_parts)
    demonstrations = ({"id": p.id, "question": p.question, "completion": solve(p)} for p in splits["base"])
    write_jsonl_atomic(folder / "base.jsonl", demonstrations)
    tokenizer = make_tokenizer(config.single_token_tags)
    shape = checkpoint_config(config.model, tokenizer)
    create_checkpoint(shape, folder / "init", tokenizer=tokenizer, seed=config.seed, prepare=look_back)


def checkpoint_config(model: TinyModel, tokenizer) -> dict:
    """A config.json for a qwen2 of this size."""
    return {
        "model_type": "qwen2",
        "architectures": ["Qwen2ForCausalLM"],
        "vocab_size": -(-len(tokenizer) // 64) * 64,
        "num_key_value_heads": model.num_attention_heads,
        **model.__dict__,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        "tie_word_embeddings": True,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "dtype": "float32",
    }


def look_back(model: Transformer) -> None:
    """An initialisation from which a small model quickly learns to look up digits by their labels.

    Initialised like a wide model, embeddings are drowned out by the layers, and attention is flat; so embeddings and
    everything that reads the residual stream start larger than what writes to it. And a lookup needs two heads in
    sequence, which take long to emerge, so they start close to that. In the first layer one looks at the token before,
    by its biases: with query and key constant in a few of RoPE's fastest planes, and the query turned by one token, a
    score is highest one token back. It writes that token to dimensions reserved for notes. In the second layer one
    looks for its own token among the notes, in RoPE's slowest planes, which distance hardly rotates, and copies what it
    finds there: the digit after the label.
    """
    import torch

    config, planes, notes = model.config, 5, 12
    half = config.head_dim // 2
    frequency = config.rope.theta ** (-torch.arange(planes) / half)
    slowest = torch.cat([torch.arange(end - notes // 2, end) for end in (half, config.head_dim)])
    free = torch.arange(config.hidden_size - notes, config.hidden_size)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 2 and not name.endswith(("o_proj.weight", "down_proj.weight")):
                weight.mul_(5 if "embed" in name else 4)
        embedding = model.model.embed_tokens.weight
        first, *others = [cast("Block", layer).self_attn for layer in model.model.layers]
        embedding[:, free] = 0
        for projection, angle in ((first.q_proj, -frequency), (first.k_proj, 0 * frequency)):
            projection.weight[: config.head_dim] *= 0.1
            # RoPE turns dimension i together with dimension i + head_dim / 2
            bias = projection.bias[: config.head_dim].view(2, -1)
            bias[0, :planes], bias[1, :planes] = 6 * angle.cos(), 6 * angle.sin()
        reading = torch.linalg.qr(first.v_proj.weight[slowest].T)[0].T
        first.v_proj.weight[slowest] = reading
        first.o_proj.weight[:, slowest] = 0.0
        first.o_proj.weight[free, slowest] = embedding.std()
        for second in others[:1]:
            for projection in (second.q_proj, second.k_proj):
                projection.weight[: config.head_dim] = 0
            second.q_proj.weight[slowest] = 2 * reading
            second.k_proj.weight[slowest, free] = 2
            second.o_proj.weight[:, : config.head_dim] = 0.3 * second.v_proj.weight[: config.head_dim].T
