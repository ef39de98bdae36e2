"""Reads a Hugging Face config.json (qwen2, qwen3, llama) into the few numbers the decoder needs.

    config = read_config("DeepScaleR-1.5B-Preview")

If a checkpoint needs something the decoder does not support (another architecture or activation, a sliding window,
quantised weights, an unknown rope scaling), reading fails with an error: we never train a model that differs from the
published one. Both spellings of the rotary embedding are understood:

    "rope_theta": 1e6, "rope_scaling": {"type": "yarn", "factor": 4.0, ...}            transformers 4 and before
    "rope_parameters": {"rope_theta": 1e6, "rope_type": "yarn", "factor": 4.0, ...}    transformers 5
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from dccot.core.files import BadData

ROPE_TYPES = ("default", "linear", "llama3", "yarn")
REQUIRED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
OPTIONAL_SIZES = ("num_key_value_heads", "head_dim", "max_position_embeddings")
MAX_LAYERS, MAX_SIZE = 1000, 2**31 - 1  # more means a damaged file, rejected before allocating memory
ROPE_WORDS = {"rope_type", "type", "truncate"}
ROPE_NUMBERS = {"rope_theta", "factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"}
ROPE_NUMBERS |= {"beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "partial_rotary_factor"}


@dataclass(frozen=True)
class Family:
    """What distinguishes a family of decoders, and its defaults for what config.json omits."""

    max_position: int = 32_768
    head_dim: int | None = None  # None: hidden_size / heads
    qkv_bias: bool = False  # always, and never in the output projection; otherwise attention_bias decides both
    qk_norm: bool = False


FAMILIES = {  # by model_type
    "qwen2": Family(qkv_bias=True),
    "qwen3": Family(head_dim=128, qk_norm=True),
    "llama": Family(max_position=2048),
}


@dataclass(frozen=True)
class RopeConfig:
    """The rotary embedding; rope.py explains how each scaling uses these numbers."""

    type: str = "default"
    theta: float = 10_000.0
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn
    attention_factor: float = 1.0  # yarn: multiplies cos and sin


@dataclass(frozen=True)
class ModelConfig:
    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    max_position: int
    rms_norm_eps: float
    rope: RopeConfig
    qkv_bias: bool
    output_bias: bool
    qk_norm: bool
    tied_embeddings: bool
    initializer_range: float = 0.02
    raw: Mapping = field(default_factory=dict, repr=False, compare=False)  # config.json as read, to be written back


def read_config(folder: str | Path) -> ModelConfig:
    """The configuration of the checkpoint in `folder`; BadData where the decoder cannot compute that model."""
    path = Path(folder) / "config.json"
    if not path.is_file():
        fetch = "fetch one: `hf download <name> --local-dir <folder>`"
        raise FileNotFoundError(f"{path} does not exist: a checkpoint is a folder in Hugging Face format ({fetch})")
    try:
        raw = json.loads(path.read_text())
    except ValueError as error:
        raise BadData(f"{path} is not JSON ({error}); fetch it again") from None
    if not isinstance(raw, dict):
        raise BadData(f"{path} holds a {type(raw).__name__}; a config.json holds an object")
    return parse_config(raw, where=str(path))


def parse_config(raw: Mapping, where: str = "config") -> ModelConfig:
    """The same from the contents of a config.json."""
    try:
        _reject_unsupported(raw)
        return _parse(raw)
    except BadData as problem:
        raise BadData(f"{where}: {problem}") from None


def _require(holds: object, problem: str) -> None:
    if not holds:
        raise BadData(problem)


def _parse(raw: Mapping) -> ModelConfig:
    family, heads, hidden = FAMILIES[raw["model_type"]], raw["num_attention_heads"], raw["hidden_size"]
    head_dim = raw.get("head_dim") or family.head_dim or hidden // heads
    kv_heads = raw.get("num_key_value_heads") or heads
    _require(heads % kv_heads == 0, f"{heads} heads cannot share {kv_heads} key-value heads evenly")
    _require(head_dim and head_dim % 2 == 0, f"head_dim {head_dim} is odd or 0")
    attention_bias = bool(raw.get("attention_bias", False))
    max_position = raw.get("max_position_embeddings") or family.max_position
    return ModelConfig(
        model_type=raw["model_type"],
        vocab_size=raw["vocab_size"],
        hidden_size=hidden,
        intermediate_size=raw["intermediate_size"],
        layers=raw["num_hidden_layers"],
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        max_position=max_position,
        rms_norm_eps=raw.get("rms_norm_eps", 1e-6),
        rope=_parse_rope(raw, max_position),
        qkv_bias=family.qkv_bias or attention_bias,
        output_bias=not family.qkv_bias and attention_bias,
        qk_norm=family.qk_norm,
        tied_embeddings=bool(raw.get("tie_word_embeddings", False)),
        initializer_range=raw.get("initializer_range", 0.02),
        raw=dict(raw),
    )


def _reject_unsupported(raw: Mapping) -> None:
    model_type = raw.get("model_type")
    _require(model_type in list(FAMILIES), f"model_type is {model_type!r}; the decoder computes {', '.join(FAMILIES)}")
    missing = [key for key in REQUIRED if raw.get(key) is None]
    _require(not missing, f"{', '.join(missing)} missing")
    for key in (*REQUIRED, *(key for key in OPTIONAL_SIZES if raw.get(key) is not None)):
        value, limit = raw[key], MAX_LAYERS if key == "num_hidden_layers" else MAX_SIZE
        whole = type(value) is int and 1 <= value <= limit
        _require(whole, f"{key} is {value!r}; it must be a whole number from 1 to {limit:,}")
    eps = raw.get("rms_norm_eps", 1e-6)
    _require(isinstance(eps, (int, float)) and 0 < eps < 1, f"rms_norm_eps is {eps!r}; it must be between 0 and 1")
    activation = raw.get("hidden_act", "silu")
    _require(activation == "silu", f"hidden_act is {activation!r}; the decoder computes silu")
    _require(not raw.get("mlp_bias"), "mlp_bias is true; the decoder's MLP has no bias")
    _require(not raw.get("quantization_config"), "the weights are quantised; training needs the unquantised checkpoint")
    kinds, full = raw.get("layer_types") or [], raw.get("max_window_layers", 28)
    _require(isinstance(kinds, list), f"layer_types is {kinds!r}; it must be a list")
    slides = any(kind != "full_attention" for kind in kinds)
    if raw.get("use_sliding_window") and raw.get("sliding_window", 4096) and not kinds:
        slides = not isinstance(full, int) or full < raw["num_hidden_layers"]
    remedy = "the decoder computes full attention (use_sliding_window must be false)"
    _require(not slides, f"some layers use a sliding window; {remedy}")


def _parse_rope(raw: Mapping, max_position: int) -> RopeConfig:
    given = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    kept = "it must be an object with rope_type and its settings"
    _require(isinstance(given, Mapping), f"the rotary embedding is {given!r}; {kept}")
    rope: dict[str, Any] = {"rope_theta": raw.get("rope_theta"), **given}
    unknown = sorted(set(rope) - ROPE_WORDS - ROPE_NUMBERS)
    _require(not unknown, f"the rotary embedding has settings the decoder does not know: {', '.join(unknown)}")
    for key in sorted(ROPE_NUMBERS):
        value = rope.get(key)
        finite = value is None or (isinstance(value, (int, float)) and 0 <= value < math.inf)
        _require(finite, f"{key} is {value!r}; it must be a finite number of at least 0")
    kind = rope.get("rope_type") or rope.get("type") or "default"
    _require(kind in ROPE_TYPES, f"rope type is {kind!r}; the decoder computes {', '.join(ROPE_TYPES)}")
    partial = rope.get("partial_rotary_factor") or raw.get("partial_rotary_factor") or 1.0
    _require(partial == 1.0, f"partial_rotary_factor is {partial}; the decoder rotates the whole head (1.0)")
    theta = float(rope.get("rope_theta") or 10_000.0)
    if kind == "default":
        return RopeConfig(theta=theta)
    key = "original_max_position_embeddings"
    original = raw.get(key) or rope.get(key) or max_position
    needed: dict[str, Any] = {"factor": rope.get("factor") or (max_position / original if kind == "yarn" else None)}
    if kind == "llama3":
        needed |= {key: rope.get(key) for key in ("low_freq_factor", "high_freq_factor")}
    missing = [key for key, value in needed.items() if value is None]
    _require(not missing, f"rope type {kind!r} needs {', '.join(missing)}")
    if kind == "yarn":
        needed |= {
            "beta_fast": rope.get("beta_fast") or 32.0,
            "beta_slow": rope.get("beta_slow") or 1.0,
            "truncate": rope.get("truncate", True),
            "attention_factor": _yarn_attention_factor(rope, needed["factor"]),
        }
    return RopeConfig(type=kind, theta=theta, original_max_position=original, **needed)


def _yarn_attention_factor(rope: Mapping, factor: float) -> float:
    """YaRN scales the softmax by 0.1·ln(factor) + 1; `mscale` and `mscale_all_dim` are DeepSeek's variant of it."""

    def warmth(mscale: float = 1.0) -> float:
        return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0

    if rope.get("attention_factor") is not None:
        return rope["attention_factor"]
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return warmth(rope["mscale"]) / warmth(rope["mscale_all_dim"])
    return warmth()


def block_parameters(config: ModelConfig) -> int:
    """Weights of one block's matrices."""
    d, head = config.hidden_size, config.head_dim
    attention = d * head * (2 * config.heads + 2 * config.kv_heads)
    return attention + 3 * d * config.intermediate_size


@cache
def parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Of the decoder's parameters (transformer.py), by Hugging Face's names, in order."""
    wide, inner, heads = config.hidden_size, config.intermediate_size, config.heads * config.head_dim
    keys = config.kv_heads * config.head_dim
    projections = {"q": (heads, wide), "k": (keys, wide), "v": (keys, wide), "o": (wide, heads)}
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, wide)}
    for layer in range(config.layers):
        block: dict[str, tuple[int, ...]] = {}
        for name, shape in projections.items():
            block[f"self_attn.{name}_proj.weight"] = shape
            if config.output_bias if name == "o" else config.qkv_bias:
                block[f"self_attn.{name}_proj.bias"] = shape[:1]
        if config.qk_norm:
            block |= {f"self_attn.{name}_norm.weight": (config.head_dim,) for name in "qk"}
        block |= {f"mlp.{name}_proj.weight": (inner, wide) for name in ("gate", "up")}
        block["mlp.down_proj.weight"] = (wide, inner)
        block |= {f"{name}_layernorm.weight": (wide,) for name in ("input", "post_attention")}
        found |= {f"model.layers.{layer}.{name}": shape for name, shape in block.items()}
    found["model.norm.weight"] = (wide,)
    return found if config.tied_embeddings else found | {"lm_head.weight": (config.vocab_size, wide)}
