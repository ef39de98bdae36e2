"""Rows that share prefixes, through any Transformers decoder, at the cost of their distinct tokens only.

    python examples/tree_logprobs.py [FOLDER]          FOLDER: a Transformers model; without it, a small random Llama

Seven samples of one prompt, three of them continued (a conversation that branches): log-probs and one step of
REINFORCE, first on the rows one by one, then on one forest. Both print the same numbers; the forest computes each
shared token once.
"""

from __future__ import annotations

import sys
import time

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import dccot.transformers as tree
from dccot import Forest

PROMPT, SAMPLE, TURN = 256, 48, 32


def load(folder: str | None):
    if folder:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 256,
        "intermediate_size": 704,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    return LlamaForCausalLM(LlamaConfig(vocab_size=1000, max_position_embeddings=4096, **sizes))


def sample_rows(vocabulary: int) -> list[torch.Tensor]:
    """Token ids stand in for an agent's turns: only what the rows share matters here."""
    draw = lambda length: torch.randint(0, vocabulary, (length,))
    prompt = draw(PROMPT)
    rows = [torch.cat([prompt, draw(SAMPLE)]) for _ in range(7)]
    return rows + [torch.cat([rows[i], draw(TURN)]) for i in range(3)]


def row_by_row(model, rows: list[torch.Tensor]) -> list[torch.Tensor]:
    model.set_attn_implementation("sdpa")
    logits = [model(row[None]).logits[0, PROMPT - 1 : -1] for row in rows]
    return [values.log_softmax(-1).gather(-1, row[PROMPT:, None])[:, 0] for values, row in zip(logits, rows)]


def on_a_forest(model, rows: list[torch.Tensor]) -> list[torch.Tensor]:
    model.set_attn_implementation("dccot_tree")
    forest, where = Forest.from_rows(rows, sampled=[torch.arange(len(row)) >= PROMPT for row in rows])
    print(f"{sum(map(len, rows)):,} tokens in {len(rows)} rows are {len(forest):,} tokens in the forest")
    logprob, _ = tree.compute_logprobs(model, forest)
    return [values[PROMPT:] for values in tree.to_rows(logprob, forest, where)]


def main() -> None:
    model = load(sys.argv[1] if len(sys.argv) > 1 else None)
    rows = sample_rows(model.config.vocab_size)
    advantages = torch.linspace(-1, 1, len(rows))
    for compute in (row_by_row, on_a_forest):
        model.zero_grad()
        start = time.perf_counter()
        logprobs = compute(model, rows)
        loss = -sum(advantage * values.sum() for advantage, values in zip(advantages, logprobs)) / sum(
            map(len, logprobs)
        )
        loss.backward()
        seconds, norm = time.perf_counter() - start, torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
        print(f"{compute.__name__:12} loss {loss.item():+.6f}   gradient norm {norm.item():.6f}   {seconds:.2f} s")


if __name__ == "__main__":
    main()
