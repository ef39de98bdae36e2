"""Checks a model folder and whether all implementations agree on it; and creates a folder from a GGUF file.

dccot model check FOLDER              family, shape, tokenizer, prompt, tags; logits vs. transformers' and vLLM's
dccot model import FILE.gguf FOLDER   a Hugging Face folder from a llama.cpp file
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dccot.core.command import Parser, run_cleanly
from dccot.core.config import ConfigError
from dccot.core.lazy import Lazy
from dccot.core.progress import waiting
from dccot.data.prompts import PromptConfig
from dccot.model.config import ModelConfig, read_config
from dccot.model.folder import resolve_model
from dccot.model.tokenizer import open_tokenizer
from dccot.rollout.tags import PROBE, TagIds, Width, all_tags, width

if TYPE_CHECKING:
    import torch

    from dccot.kernels import mask
    from dccot.model import transformer, weights
else:
    torch, mask = Lazy("torch"), Lazy("dccot.kernels.mask")
    transformer, weights = Lazy("dccot.model.transformer"), Lazy("dccot.model.weights")

DTYPES = ("float32", "bfloat16", "float16")
QUESTION = "Which is larger, 17 or 41?"
MAX_GAP = 1e-3  # of a logit or a log-prob in float32
Row = tuple[str, str]


def shape_rows(config: ModelConfig, folder: Path) -> list[Row]:
    with weights.open_tensors(folder) as tensors:
        stored = ", ".join(sorted({tensor.get_dtype() for tensor in tensors.values()}))
    heads = f"{config.heads} heads, {config.kv_heads} of keys and values, of {config.head_dim}"
    rope = config.rope.type + (f" ×{config.rope.factor:g}" if config.rope.type != "default" else "")
    tied = ", embeddings tied" if config.tied_embeddings else ""
    return [
        ("family", config.model_type),
        ("shape", f"{config.layers} layers, width {config.hidden_size:,}, MLP {config.intermediate_size:,}, {heads}"),
        ("parameters", f"{count_parameters(config):,}{tied}; stored as {stored}"),
        ("largest context", f"{config.max_position:,} tokens (rope {rope})"),
    ]


def count_parameters(config: ModelConfig) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in transformer.Transformer(config).parameters())


def text_rows(config: ModelConfig, folder: Path, workers: Width) -> Iterator[Row]:
    """The tokenizer, the prompt it produces and how it tokenizes the tags."""
    tokenizer = open_tokenizer(folder)

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    size = f"{len(tokenizer):,} of {config.vocab_size:,} tokens"
    yield "tokenizer", f"{type(tokenizer).__name__}, {size}, eos {tokenizer.eos_token!r}"
    exact = tokenizer.decode(encode(PROBE), clean_up_tokenization_spaces=False) == PROBE
    yield "round trip", "exact" if exact else "white space is kept; other characters of the probe are not"
    if len(tokenizer) > config.vocab_size:
        embeds = f"the model embeds {config.vocab_size:,}"
        raise ConfigError(f"the tokenizer of {folder} has {len(tokenizer):,} tokens, {embeds}")
    prompt = PromptConfig()
    yield "prompt", f"{prompt.chat_format_for(tokenizer)}: {prompt.text('QUESTION', tokenizer)!r}"
    TagIds.of(tokenizer, workers)
    for tag in all_tags(workers):
        merges = encode(f"{tag}\n")[: len(encode(tag))] != encode(tag)
        yield tag, " ".join(map(str, encode(tag))) + "   (its > merges with a newline after it)" * merges


def numbers_rows(folder: Path) -> Iterator[Row]:
    """Our decoder in float32 vs. transformers' logits of the probe."""
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()

    ids = torch.tensor(open_tokenizer(folder).encode(PROBE, add_special_tokens=False))
    with torch.no_grad():
        found = decoder(folder)(ids, torch.arange(len(ids)), mask.TreeMask.causal([len(ids)]))
        theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        gap = float((found - theirs(input_ids=ids[None]).logits[0]).abs().max())
        del theirs
    yield "vs. transformers", verdict(gap, "transformers", f"logits of {len(ids)} tokens")


def engine_rows(folder: Path) -> Iterator[Row]:
    """Our decoder in float32 vs. vLLM's log-probs of what it sampled."""
    gap, tokens, rate = sampled_gap(folder)
    yield "vs. vLLM", verdict(gap, "vLLM", f"log-probs of {tokens} sampled tokens") + f", {rate:.1f} tokens/s alone"


def decoder(folder: Path) -> transformer.Transformer:
    with torch.device("meta"):
        model = transformer.Transformer(read_config(folder))
    model.to_empty(device="cpu")
    weights.load_weights(model, folder, torch.float32)
    return model


def sampled_gap(folder: Path, tokens: int = 48) -> tuple[float, int, float]:
    """Largest |Δ log-prob| between vLLM and the trainer over a sampled response; its length; tokens per second."""
    from dccot.rollout.director import RolloutConfig
    from dccot.rollout.engine import EngineConfig, open_engine
    from dccot.rollout.generate import Request, generate
    from dccot.train.forest import build_forest
    from dccot.train.update import compute_logprobs

    config = RolloutConfig(budget=tokens, temperature=1.0)
    context = min(1024, read_config(folder).max_position)
    with open_engine(folder, EngineConfig(dtype="float32", context=context, kv_cache_gb=0.5)) as engine:
        prompt = PromptConfig("sequential").ids(engine.tokenizer, QUESTION)
        for seed in (0, 1):  # the first warms up
            began = time.perf_counter()
            ((_, response),) = generate(engine, [Request("probe", 0, prompt, parallel=False)], config, seed=(seed,))
            seconds = time.perf_counter() - began
    forest = build_forest([[(0, response)]])
    with torch.no_grad():
        logprob, _ = compute_logprobs(decoder(folder), forest, config.temperature)
    gap = float((logprob - forest.logprob[forest.targets]).abs().max())
    return gap, len(logprob), len(logprob) / seconds


def verdict(gap: float, judge: str, what: str) -> str:
    if not gap < MAX_GAP:
        raise ConfigError(
            f"{what} are {gap:.2g} away from those of {judge} in float32; at most {MAX_GAP:g} is rounding"
        )
    return f"{what} in float32 differ by at most {gap:.1e}"


def check(model: str, workers: Width, engine: bool, compute: bool) -> None:
    """Print the findings; the first unusable part is an error, after everything usable was printed."""
    folder = resolve_model(model)
    rows: list[Row] = []
    try:
        config = read_config(folder)
        with waiting(f"checking {model}"):
            rows.extend(shape_rows(config, folder))
            rows.extend(text_rows(config, folder, workers))
        with waiting("comparing with transformers"):
            rows.extend(numbers_rows(folder) if compute else ())
        rows.extend(engine_rows(folder) if compute and engine else ())
    except (ValueError, OSError) as error:
        raise ConfigError(f"model {folder} cannot be used: {error}") from None
    finally:
        width = max((len(name) for name, _ in rows), default=0)
        print("\n".join([str(folder), *(f"  {name:<{width}}  {said}" for name, said in rows)]))
    print("all checks passed")


def convert(file: Path, folder: Path, dtype: str) -> None:
    from dccot.model.gguf import import_gguf

    config = import_gguf(file, folder, getattr(torch, dtype))
    parameters = f"{count_parameters(config):,} parameters in {dtype}"
    print(f"{folder}: {config.model_type}, {parameters}; `dccot model check {folder}` compares it")


def main(argv: Sequence[str] | None = None) -> int:
    top = Parser("Model folders.", "dccot model check MODEL")
    commands = top.add_subparsers(required=True, metavar="COMMAND")
    what, example = "describe a model folder; compare with transformers and vLLM", "dccot model check MODEL"
    one = commands.add_parser("check", help=what, description=what, example=example)
    one.add_argument("model", help="a hub id, a Hugging Face folder, or a run (its newest checkpoint)")
    one.add_argument("--workers", type=width, default=3, help="workers whose tags are shown (default: %(default)s)")
    one.add_argument("--no-engine", action="store_true", help="do not compare with vLLM, which takes a while to start")
    one.add_argument("--no-weights", action="store_true", help="compute nothing: configuration and tokenizer only")
    one.set_defaults(run=lambda a: check(a.model, a.workers, not a.no_engine, not a.no_weights))
    what, example = "a folder from a GGUF file", "dccot model import MODEL.gguf FOLDER"
    one = commands.add_parser("import", help=what, description=what, example=example)
    one.add_argument("file", type=Path, help="qwen2, qwen3 or llama, quantised or not")
    one.add_argument("folder", type=Path, help="a new one")
    one.add_argument("--dtype", choices=DTYPES, default="float32", help="of the written weights (default: %(default)s)")
    one.set_defaults(run=lambda a: convert(a.file, a.folder, a.dtype))
    arguments = top.parse_args(argv)
    return run_cleanly(lambda: arguments.run(arguments))


if __name__ == "__main__":
    sys.exit(main())
