"""A task for supervised fine-tuning that takes seconds, for tests and fault injection."""

from __future__ import annotations

import json
from pathlib import Path

from dccot.core.files import write_jsonl_atomic
from dccot.lab.worlds.arithmetic import make_splits, make_tokenizer, rewrite_parallel, sequential_solution
from dccot.model.weights import create_checkpoint
from dccot.rollout.tags import flaw_of

TWELVE = {"train": 12}
SMALLEST = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 1}


def make_sft_task(out: Path, sizes: dict = SMALLEST, problems: dict = TWELVE, **settings: object) -> Path:
    """A small random model, demonstrations and the configuration that trains the one on the other; returns the
    configuration.
    """
    tokenizer = make_tokenizer()
    raw = {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3",
        "vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id,
        "num_key_value_heads": 1, "head_dim": 32, "max_position_embeddings": 2048, "tie_word_embeddings": True, **sizes,
    }  # fmt: skip
    create_checkpoint(raw, out / "model", tokenizer=tokenizer, seed=0)
    for split, chosen in make_splits(0, problems).items():
        texts = [(p, rewrite_parallel(p, sequential_solution(p))) for p in chosen]
        rows = [{"id": p.id, "question": p.question, "completion": text} for p, text in texts if flaw_of(text) is None]
        write_jsonl_atomic(out / f"{split}.jsonl", rows)
    config = {"output": str(out), "batch": {"examples": 2}, "threads": 1, "model": {"path": str(out / "model")}}
    config |= {"data": {split: str(out / f"{split}.jsonl") for split in problems}}
    config |= {"optimizer": {"learning_rate": 0.005, "warmup_steps": 2}, "sharding": {"compute_dtype": "float32"}}
    config |= {"checkpoint": {"every": 1, "keep": 2}}
    (out / "sft.yaml").write_text(json.dumps(config | settings))
    return out / "sft.yaml"
