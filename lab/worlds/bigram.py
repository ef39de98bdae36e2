"""A tiny model that follows the protocol without training, for tests and benchmarks.

Its weights are constructed rather than learnt. The embedding is one-hot, so the LM head can hold any table of bigrams:

    logits(next | last) = T · log P(next | last)  +  the contribution of two random layers over the whole context

Letters follow letters until a tag or the end, with the given probability per token. So segments have geometric lengths
with means chosen by the caller, and every log-prob still depends on everything that attention sees.

    save("checkpoints/tiny", tags="spelled")          → a folder that transformers, vLLM and dccot can load

`tags="single"`: every tag is one special token. `tags="spelled"`: tags are plain text of several tokens, and a tag's
last token may run on into the next line (`>` and `>\\n` are both tokens), as in the tokenizers of published models.
"""

from __future__ import annotations

import string
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from dccot.rollout.tags import (
    ANSWER_OPEN,
    SPAWN_OPEN,
    THINK_CLOSE,
    Width,
    all_tags,
    most_workers,
    task_tags,
    worker_close,
)

BOS, EOS, USER, ASSISTANT = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"
SPACE, NEWLINE = "Ġ", "Ċ"  # as byte-level tokenizers spell them
LETTERS = string.ascii_lowercase + SPACE
CHARACTERS = string.printable[:94] + SPACE + NEWLINE
TAG_PIECES = ["spawn_workers", "worker_", "</worker_", ">\n"]
NEVER = -14.0  # log of a negligible probability
LOUDNESS = 10.0  # of the last token relative to what the layers add


@dataclass(frozen=True)
class Chances:
    """Per token of plain text."""

    spawn: float = 1 / 24
    close: float = 1 / 16  # for each worker's closing tag; the other workers' tags are noise in a worker's text
    eos: float = 1 / 64
    answer: float = 0.0  # of </think>, which <answer> follows; not with spelled tags
    more: float = 0.7  # of another task after a task, where the number of workers is chosen


def tokenizer(tags: str, workers: Width = 3) -> PreTrainedTokenizerFast:
    """Characters, and the tags as single special tokens or spelled with several; mixed: only the workers' spelled."""
    backend = Tokenizer(models.BPE(vocab={character: i for i, character in enumerate(CHARACTERS)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True) for token in (BOS, EOS, USER, ASSISTANT)])
    if tags != "spelled":
        whole = [tag for tag in all_tags(workers) if tags == "single" or "worker_" not in tag]
        backend.add_special_tokens([AddedToken(tag, special=True) for tag in whole])
    if tags != "single":
        backend.add_tokens([AddedToken(piece, normalized=False) for piece in TAG_PIECES])
    # transformers adds <|endoftext|> to the tokenizer of a qwen2 model whose unknown and padding tokens are not named
    names = {"bos_token": BOS, "eos_token": EOS, "unk_token": EOS, "pad_token": EOS}
    return PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False, **names)


def bigrams(tokens: dict[str, int], tags: str, chances: Chances, workers: Width) -> Tensor:
    """P(next | last) as a [V, V] table: plain text that may end after any token, and how the tags are tokenized."""
    ends = {"<" if tags == "spelled" else SPAWN_OPEN: chances.spawn, EOS: chances.eos}
    closing, spelling, most = {">": 0.7, ">\n": 0.3}, {}, most_workers(workers)
    if tags == "single":
        ends |= {worker_close(i): chances.close for i in range(1, most + 1)}
    else:
        digits = [str(i) for i in range(1, most + 1)]
        ends["</worker_"] = chances.close * most
        spelling = {"</worker_": dict.fromkeys(digits, 1 / most)} | dict.fromkeys(digits, closing)
    if not isinstance(workers, int):  # tasks first, at least one and then more by chance
        ends[task_tags(1)[0]] = ends.pop(SPAWN_OPEN)
        listed = task_tags(most)
        for opened, closed, after in zip(listed[::2], listed[1::2], [*listed[2::2], SPAWN_OPEN]):
            spelling |= {opened: {closed: 1.0}, closed: {SPAWN_OPEN: 1 - chances.more, after: chances.more}}
        spelling[listed[-1]] = {SPAWN_OPEN: 1.0}
    if tags == "spelled":
        spelling |= {"<": {"spawn_workers": 1.0}, "spawn_workers": closing}
    else:
        ends[THINK_CLOSE] = chances.answer
        spelling |= {THINK_CLOSE: {ANSWER_OPEN: 1.0}} if chances.answer else {}

    def row(following: dict[str, float]) -> Tensor:
        chance = torch.zeros(len(tokens))
        chance[[tokens[piece] for piece in following]] = torch.tensor(list(following.values()))
        return chance

    plain = {letter: (1 - sum(ends.values())) / len(LETTERS) for letter in LETTERS}
    table = row(plain | ends).repeat(len(tokens), 1)
    for last, following in spelling.items():
        table[tokens[last]] = row(following)
    return table


def hold_bigrams(
    weights: Mapping[str, Tensor], logits: Tensor, common: Tensor | None = None, loudness: float = LOUDNESS
) -> None:
    """Write logits(next | last), [V, V], into a model's weights: embeddings become one-hot, the LM head gets the table
    added. A row that most tokens have in `common` is carried by a dimension that is always on: the rest is sparse.
    """
    embedding, head = weights["model.embed_tokens.weight"], weights["lm_head.weight"]
    vocab, width = embedding.shape
    scale = (width / (1 if common is None else 2)) ** 0.5  # value of each active dimension after the last norm
    embedding.zero_().fill_diagonal_(loudness)
    if common is not None:
        embedding[:, -1] = loudness
        head[:, -1] += common / scale
        logits = logits - common
    head[:, :vocab] += logits.T / scale


def save(
    folder: str | Path,
    tags: str = "single",
    chances: Chances | None = None,
    *,
    workers: Width = 3,
    temperature: float = 0.6,
    context: int = 4096,
    layers: int = 2,
    width: int = 0,
    seed: int = 0,
) -> Path:
    """Write the checkpoint: config, weights, tokenizer. At `temperature` it samples with exactly these chances. What
    more than a few layers add is drowned by the last token; `width`: at least.
    """
    if tags not in ("single", "spelled", "mixed"):
        raise ValueError(f"tags is {tags!r}; use 'single', 'spelled' or 'mixed'")
    if tags != "single" and not isinstance(workers, int):
        raise ValueError(f"workers is {workers}; a chosen number needs tags='single'")
    torch_state = torch.get_rng_state()
    torch.manual_seed(seed)
    spelling = tokenizer(tags, workers)
    vocab = spelling.get_vocab()
    width = -(-max(len(vocab) + 1, width) // 64) * 64  # one dimension per token, and one that is always on
    sizes: dict[str, Any] = {"hidden_size": width, "intermediate_size": 2 * width, "max_position_embeddings": context}
    sizes |= {"num_attention_heads": width // 32, "num_key_value_heads": width // 64, "num_hidden_layers": layers}
    ends: dict[str, Any] = {"bos_token_id": vocab[BOS], "eos_token_id": vocab[EOS], "tie_word_embeddings": False}
    config = Qwen2Config(vocab_size=len(vocab), **sizes, **ends, initializer_range=0.08)
    model = Qwen2ForCausalLM(config).float()
    torch.set_rng_state(torch_state)
    table = bigrams(vocab, tags, chances or Chances(), workers)
    logits = temperature * (table + 1e-9).log().clamp(min=NEVER / temperature)
    with torch.no_grad():
        for name, parameter in model.model.layers.named_parameters():
            if parameter.ndim == 1:  # norms and biases, which would start as ones and zeros
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name))))
        model.lm_head.weight.mul_(0.03 if layers > 2 else 0.3)
    # after EOS, and most other tokens, plain text follows
    loudness = LOUDNESS if isinstance(workers, int) else 4 * LOUDNESS  # lists of tasks are easily spoilt
    loudness *= 400 if layers > 2 else 1
    hold_bigrams(model.state_dict(), logits, common=logits[vocab[EOS]], loudness=loudness)
    folder = Path(folder)
    config.architectures = ["Qwen2ForCausalLM"]
    config.save_pretrained(folder)
    save_file(model.state_dict(), folder / "model.safetensors", metadata={"format": "pt"})
    spelling.save_pretrained(folder)
    return folder
