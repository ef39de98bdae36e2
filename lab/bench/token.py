"""What a computed token costs, next to transformers': the same weights, the same rows of equal length, nothing shared
and nothing padded.

    dccot bench token

Packing makes a step cheaper by computing fewer tokens (lab/bench/step.py, lab/bench/peers.py). Here both sides compute
the same tokens, forward and backward, in fp32 on all cores, without recomputation: ours through FSDP on one rank, tree
attention and the fused LM head with entropy, transformers' through SDPA, with logits in memory and cross-entropy. They
take turns in one process, and the median of the ratios counts. Models: the miniature's base, the 20M parameters of
lab/bench/step.py, and the shape of SmolLM2-135M with random weights, whose share of the machine's matmul peak (MFU) is
stated as well.
"""

from __future__ import annotations

import logging
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM

from dccot.core.runtime import Runtime
from dccot.lab.bench.step import MODEL, row
from dccot.model.config import parse_config
from dccot.model.sharding import ShardingConfig, build_model
from dccot.model.transformer import Transformer
from dccot.model.weights import save_checkpoint
from dccot.train.flops import matmul_peak, model_flops
from dccot.train.forest import Forest
from dccot.train.sft import negative_logprob
from dccot.train.update import accumulate

MINIATURE = MODEL | {
    "vocab_size": 384, "hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 3,
    "num_key_value_heads": 3,
}  # fmt: skip
SMOLLM2 = MODEL | {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 49_152, "hidden_size": 576, "intermediate_size": 1536,
    "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3,
}  # fmt: skip
CASES = {
    "miniature": (MINIATURE, 56, 192, 9),
    "20M": (MODEL, 8, 512, 5),
    "135M": (SMOLLM2, 4, 512, 3),
}  # shape, rows, row length, turns


def seconds(work: Callable[[], float]) -> tuple[float, float]:
    start = time.perf_counter()
    loss = work()
    return time.perf_counter() - start, loss


def measure(
    shape: dict[str, Any], rows: int, length: int, repeats: int, folder: Path, runtime: Runtime
) -> dict[str, float]:
    model = Transformer(parse_config(shape))
    model.init_weights(seed=0)
    save_checkpoint(model, folder)
    ours = build_model(folder, ShardingConfig(compute_dtype="float32", activation_checkpointing=False))
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").train()
    tokens = torch.randint(shape["vocab_size"], (rows, length), generator=torch.Generator().manual_seed(0))
    forest, _ = Forest.from_rows(list(tokens))

    def our_step() -> float:
        loss, _ = accumulate(ours, [forest], negative_logprob, 1.0, runtime)
        ours.zero_grad(set_to_none=True)
        return loss

    def their_step() -> float:
        logits: Tensor = theirs(input_ids=tokens, use_cache=False).logits[:, :-1]
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        theirs.zero_grad(set_to_none=True)
        return float(loss.detach())

    our_step(), their_step()  # one-time work
    pairs = [(seconds(our_step), seconds(their_step)) for _ in range(repeats)]
    best = min(ours for (ours, _), _ in pairs)
    return {
        "ratio": statistics.median(ours / theirs for (ours, _), (theirs, _) in pairs),
        "difference": max(abs(ours - theirs) / theirs for (_, ours), (_, theirs) in pairs),
        "tokens": len(forest) / statistics.median(ours for (ours, _), _ in pairs),
        "mfu": 3 * model_flops(ours.config, [forest]) / best / matmul_peak(torch.device("cpu"), torch.float32),
        "shared": rows * length - len(forest),
    }


def run(quick: bool = False) -> list[dict]:
    logging.disable(logging.WARNING)
    found = []
    with Runtime.start() as runtime, tempfile.TemporaryDirectory() as scratch:
        for name, (shape, rows, length, turns) in CASES.items():
            if quick and name == "135M":
                continue
            measured = measure(shape, rows, length, 3 if quick else turns, Path(scratch) / name, runtime)
            found += [
                row(f"{name}: a token's time relative to transformers'", measured["ratio"], "×", 1.0),
                row(f"{name}: difference of losses", measured["difference"], "relative", 1e-5),
                row(f"{name}: our tokens, forward and backward", measured["tokens"], "per second", None, "higher"),
                row(
                    f"{name}: model FLOP utilisation",
                    measured["mfu"],
                    "share",
                    0.7 if name == "135M" else None,
                    "higher",
                ),
                row(
                    f"{name}: tokens saved by shared prefixes (there should be next to none)",
                    measured["shared"],
                    "tokens",
                ),
            ]
    return found
