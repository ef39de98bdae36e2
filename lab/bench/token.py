"""What a computed token costs, next to transformers': the same weights and rows, nothing shared, nothing padded.

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
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM

from dccot.core.runtime import Runtime
from dccot.lab.bench.harness import in_turns, row
from dccot.lab.bench.step import MODEL, make_model
from dccot.model.sharding import ShardingConfig, build_model
from dccot.train.flops import matmul_peak, model_flops
from dccot.train.forest import Forest
from dccot.train.sft import negative_logprob
from dccot.train.update import accumulate

MINIATURE = MODEL | {
    **{"vocab_size": 384, "hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 2},
    **{"num_attention_heads": 3, "num_key_value_heads": 3},
}
SMOLLM2 = MODEL | {
    **{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 49_152, "hidden_size": 576},
    **{"intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3},
}
CASES = {
    "miniature": (MINIATURE, 56, 192, 9),
    "20M": (MODEL, 8, 512, 5),
    "135M": (SMOLLM2, 4, 512, 3),
}  # shape, rows, row length, turns


def measure(name: str, turns: int, folder: Path, runtime: Runtime) -> list[dict]:
    shape, rows, length, _ = CASES[name]
    make_model(shape, folder)
    ours = build_model(folder, ShardingConfig(compute_dtype="float32", activation_checkpointing=False))
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").train()
    tokens = torch.randint(shape["vocab_size"], (rows, length), generator=torch.Generator().manual_seed(0))
    forest, _ = Forest.from_rows(list(tokens))
    losses: dict[str, float] = {}

    def our_step() -> None:
        losses["ours"], _ = accumulate(ours, [forest], negative_logprob, 1.0, runtime)
        ours.zero_grad(set_to_none=True)

    def their_step() -> None:
        logits: Tensor = theirs(input_ids=tokens, use_cache=False).logits[:, :-1]
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        theirs.zero_grad(set_to_none=True)
        losses["theirs"] = float(loss.detach())

    steps = {"ours": our_step, "theirs": their_step}
    in_turns(steps, 1)  # one-time work
    times = in_turns(steps, turns)
    ratio = statistics.median(ours / theirs for ours, theirs in zip(times["ours"], times["theirs"]))
    speed = 3 * model_flops(ours.config, [forest]) / min(times["ours"])
    mfu = speed / matmul_peak(torch.device("cpu"), torch.float32)
    per_second = len(forest) / statistics.median(times["ours"])
    difference = abs(losses["ours"] - losses["theirs"]) / losses["theirs"]
    saved = f"{name}: tokens saved by shared prefixes (there should be next to none)"
    return [
        row(f"{name}: a token's time relative to transformers'", ratio, "×", 1.0),
        row(f"{name}: difference of losses", difference, "relative", 1e-5),
        row(f"{name}: our tokens, forward and backward", per_second, "per second", None, "higher"),
        row(f"{name}: model FLOP utilisation", mfu, "share", 0.7 if name == "135M" else None, "higher"),
        row(saved, rows * length - len(forest), "tokens"),
    ]


def run(quick: bool = False) -> list[dict]:
    logging.disable(logging.WARNING)
    found = []
    with Runtime.start() as runtime, tempfile.TemporaryDirectory() as scratch:
        for name, (*_, turns) in CASES.items():
            if not quick or name != "135M":
                found += measure(name, 3 if quick else turns, Path(scratch) / name, runtime)
    return found
