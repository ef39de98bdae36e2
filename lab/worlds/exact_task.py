"""An RL task whose starting point is known exactly, for tests, fault injection and the GPU check.

A model whose next token depends only on the last one, with probabilities written into its LM head, answers every
question with one of four equally likely digits and spawns workers half of the time. The right answer is always 3. So
the mean reward of the start is 1/4 · (1/2 · 1 + 1/2 · 1/2) = 0.1875, and a step of a few seconds on a CPU moves it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from dccot.core.files import write_jsonl_atomic
from dccot.lab.worlds.arithmetic import EOS, make_tokenizer

if TYPE_CHECKING:
    from dccot.model.transformer import Transformer

TEMPERATURE, HARDLY_EVER = 0.6, 1e-5
CHANCES = {
    "Ċ": {"a": 1.0},  # the newline of `<think>\n`, as byte-level tokenizers write it
    "a": {"<spawn_workers>": 0.5, "</think>": 0.5},
    **{f"<worker_{i}>": {letter: 1.0} for i, letter in enumerate("klm", 1)},
    **{letter: {f"</worker_{i}>": 1.0} for i, letter in enumerate("klm", 1)},
    "</spawn_workers>": {"z": 1.0},
    "z": {"</think>": 1.0},
    "</think>": {"<answer>": 1.0},
    "<answer>": {"\\boxed{": 1.0},
    "\\boxed{": dict.fromkeys("1234", 0.25),
    **{digit: {"}": 1.0} for digit in "1234"},
    "}": {"</answer>": 1.0},
    "</answer>": {EOS: 1.0},
}


def make_model(folder: Path) -> None:
    """A model that holds the table above; one random layer makes log-probs depend on the context."""
    import torch  # all of these take seconds to import; `--check` of a recipe needs none

    from dccot.lab.worlds.bigram import hold_bigrams
    from dccot.model.weights import create_checkpoint

    tokenizer = make_tokenizer()
    vocab = tokenizer.get_vocab()
    width = -(-len(vocab) // 32) * 32
    raw = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": len(vocab), "hidden_size": width}
    raw |= {"intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    raw |= {"head_dim": 32, "max_position_embeddings": 512, "tie_word_embeddings": False}
    raw |= {"eos_token_id": tokenizer.eos_token_id}
    table = torch.full((len(vocab), len(vocab)), HARDLY_EVER)
    for last, following in CHANCES.items():
        for token, chance in following.items():
            table[vocab[last], vocab[token]] = chance

    def prepare(model: Transformer) -> None:
        weights = model.state_dict()
        weights["lm_head.weight"].zero_()
        hold_bigrams(weights, TEMPERATURE * table.log())

    create_checkpoint(raw, folder, tokenizer=tokenizer, seed=0, prepare=prepare)


RL = {
    "filter": "none",
    "prompt": {"max_prompt_tokens": 100},
    "rollout": {"budget": 60, "temperature": TEMPERATURE},
    "engine": {"dtype": "float32", "context": 256, "max_sequences": 64, "kv_cache_gb": 0.1},
    "reward": {"cutoff": 40},
    "batch": {"prompts_rolled_out": 8, "prompts": 8, "group_size": 4, "optimizer_steps": 2, "token_budget": 400},
    "objective": {"kind": "cispo"},
    "optimizer": {"learning_rate": 0.002, "weight_decay": 0.0},
    "sharding": {"compute_dtype": "float32"},
    "validation": {"every": 0},
    "checkpoint": {"every": 1, "keep": 1, "keep_hf_every": 1},
    "grading": {"workers": 1},
    "profile": {"steps": [1]},
}


def write_problems(path: Path, count: int = 24, digit: str = "3") -> None:
    rows = [{"id": f"p{i}", "question": f"Say {digit}, case {i}.", "gold": digit} for i in range(count)]
    write_jsonl_atomic(path, rows)


def make_task(out: Path) -> Path:
    """Model, problems and configuration in `out`; returns the configuration."""
    make_model(out / "model")
    write_problems(out / "problems.jsonl")
    paths = {"output": str(out), "model": {"path": str(out / "model")}, "data": {"train": str(out / "problems.jsonl")}}
    (out / "rl.yaml").write_text(json.dumps(RL | paths))
    return out / "rl.yaml"
