"""What forests save: TRL's padded batch and a forest of the same rows, forward and backward, side by side.

    python examples/trl_env.py examples/trl_compare.py

Two shapes of batch: a group of seven answers to a long prompt, and the calls behind seven parallel responses (three
workers, and the director that reads them). Model: qwen2, 4M parameters, random. Both sides compute the same numbers:
the gradients' difference is shown.
"""

from __future__ import annotations

import random
import time

import torch
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from trl_grpo import GROUP, LOSSES, make_trainer

VOCABULARY = 1000
SHAPE = {
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}

Row = tuple[list[int], int]  # tokens, and how many of them are the prompt


def group_of_seven(rng: random.Random, prompt: int = 1024, longest: int = 256) -> list[Row]:
    shared = rng.choices(range(VOCABULARY), k=prompt)
    return [
        (shared + rng.choices(range(VOCABULARY), k=rng.randint(longest // 4, longest)), prompt) for _ in range(GROUP)
    ]


def director_and_workers(rng: random.Random, prompt: int = 250, unit: int = 64) -> list[Row]:
    rows, shared = [], rng.choices(range(VOCABULARY), k=prompt)
    for _ in range(GROUP):
        plan, last, *workers = (
            rng.choices(range(VOCABULARY), k=rng.randint(unit // 2, unit * 3 // 2)) for _ in range(5)
        )
        rows += [(shared + plan + worker, prompt + len(plan)) for worker in workers]
        read = [token for worker in workers for token in worker]
        rows.append((shared + plan + read + last, prompt))
    return rows


def padded(rows: list[Row]) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Ids, attention mask and completion length: prompts padded on the left, completions on the right, as TRL does."""
    prompt, completion = max(own for _, own in rows), max(len(row) - own for row, own in rows)
    ids, seen = (torch.zeros(len(rows), prompt + completion, dtype=torch.long) for _ in range(2))
    for i, (row, own) in enumerate(rows):
        ids[i, prompt - own : prompt - own + len(row)] = torch.tensor(row)
        seen[i, prompt - own : prompt - own + len(row)] = 1
    return ids, seen, completion


def measure(loss: str, model, tokenizer, rows: list[Row], repeats: int = 3) -> tuple[int, float, torch.Tensor]:
    """Tokens computed, best seconds of forward and backward, and the gradient."""
    trainer = make_trainer(loss, model, tokenizer, [{"prompt": "a", "gold": "b"}], prompts=1)
    ids, seen, completion = padded(rows)
    best = float("inf")
    for _ in range(repeats):
        model.zero_grad()
        trainer.computed_tokens, start = 0, time.perf_counter()
        logprob = trainer._get_per_token_logps_and_entropies(model, ids, seen, completion, compute_entropy=True)[0]
        logprob[seen[:, -completion:].bool()].mean().backward()
        best = min(best, time.perf_counter() - start)
    return trainer.computed_tokens, best, torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def main() -> None:
    words = {"a": 0, "</s>": 1}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, "a")), eos_token="</s>", pad_token="</s>"
    )
    print(f"{'':32}{'padded':>18}{'forest':>18}{'fewer tokens':>14}{'faster':>9}{'gradient differs by':>21}")
    for name, make in (
        ("group of 7, prompt of 1,024", group_of_seven),
        ("7 director/worker trees", director_and_workers),
    ):
        torch.manual_seed(0)
        model = Qwen2ForCausalLM(Qwen2Config(vocab_size=VOCABULARY, max_position_embeddings=4096, **SHAPE))
        rows = make(random.Random(0))
        (tokens, seconds, gradient), (own, own_seconds, own_gradient) = (
            measure(loss, model, tokenizer, rows) for loss in LOSSES
        )
        difference = ((gradient - own_gradient).norm() / gradient.norm()).item()
        sides = (f"{count:,} in {spent:.2f} s" for count, spent in ((tokens, seconds), (own, own_seconds)))
        ratios = f"{tokens / own:>13.2f}×{seconds / own_seconds:>8.2f}×"
        print(f"{name:32}{''.join(f'{side:>18}' for side in sides)}{ratios}{difference:>21.1e}")


if __name__ == "__main__":
    main()
