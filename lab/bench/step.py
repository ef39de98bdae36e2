"""Our training step vs. the reference implementation: same weights, same responses, same loss.

    dccot bench train                                           everything, each measurement in its own process
    python -m dccot.lab.bench.step ours 2048 MODEL REPEATS      one measurement, as JSON

    ours        responses packed as forests; tree attention; fused LM head on the rows that carry loss
    reference   transformers' model, one response per micro-batch, every worker twice, dense mask in SDPA, all logits

Both recompute activations in the backward and step AdamW, in fp32 on all cores. The model has 20M parameters and a
vocabulary of 32K; responses are like the paper's (three workers, prompts shared), 4K tokens of them per step, or one
where it is longer. Peak memory is the high-water mark of the whole process during its first step. The reference skips
FSDP and entropy, so the comparison favours it.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from dccot.core.runtime import Runtime
from dccot.kernels.mask import parents, positions
from dccot.kernels.reference import dense_mask
from dccot.lab.bench.forest import paper_like_responses
from dccot.lab.bench.harness import peak_memory, row
from dccot.model.config import parse_config
from dccot.model.context import ContextGroup
from dccot.model.sharding import ShardingConfig, build_model
from dccot.model.transformer import Transformer
from dccot.model.weights import save_checkpoint
from dccot.rollout.response import Response
from dccot.train.flops import pair_cost
from dccot.train.forest import pack
from dccot.train.sft import negative_logprob
from dccot.train.update import OptimizerConfig, make_optimizer, update

STEP_TOKENS = 4096  # of all responses of a step together, unless one is longer
SIZES = (1024, 2048, 4096, 8192)
PROMPT_SHARE = 0.04
TEMPERATURE = 0.6
MODEL: dict[str, Any] = {
    **{"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_act": "silu", "rms_norm_eps": 1e-6},
    **{"vocab_size": 32_768, "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 12},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True},
    **{"max_position_embeddings": 16_384, "rope_theta": 1e6},
}


def step_responses(tokens: int) -> list[Response]:
    """The responses of one step, each of about `tokens` tokens."""
    count, prompt = max(1, STEP_TOKENS // tokens), round(PROMPT_SHARE * tokens)
    return paper_like_responses(count, tokens, prompt_tokens=prompt, vocabulary=MODEL["vocab_size"])


Step = Callable[[list[Response]], float]  # one training step; returns its loss


def our_step(folder: Path) -> Step:
    """The trainer's own step: FSDP, forests, `update`; on one rank, or on all that torchrun started and that share
    every forest.
    """
    runtime, config = Runtime.start(), OptimizerConfig(learning_rate=1e-6)
    group = ContextGroup.join(runtime.ranks, runtime.device)
    model = build_model(folder, ShardingConfig(compute_dtype="float32", activation_checkpointing=True))
    optimizer = make_optimizer(model, config)

    def step(responses: list[Response]) -> float:
        packing = pack(responses, 4 * STEP_TOKENS, pair_cost=pair_cost(model.config))
        forests = [forest.shared(group) for forest in packing.forests(0)]
        return update(model, optimizer, forests, negative_logprob, config, 0, TEMPERATURE, runtime).loss

    return step


def reference_step(folder: Path) -> Step:
    """One response at a time through transformers' model, in the paper's layout."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, weight_decay=0.01, fused=True)

    def step(responses: list[Response]) -> float:
        count, total = sum(response.sampled_tokens for response in responses), 0.0
        for response in responses:
            tokens, visible_until, targets = paper_layout(response)
            given = {"input_ids": tokens[None], "position_ids": positions(visible_until)[None], "use_cache": False}
            logits = model(**given, attention_mask=dense_mask(visible_until)[None, None]).logits[0]
            logprobs = (logits / TEMPERATURE).log_softmax(-1)
            loss = -logprobs[parents(visible_until)[targets], tokens[targets]].sum() / count
            loss.backward()
            total += float(loss.detach())
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return total

    return step


def paper_layout(response: Response) -> tuple[Tensor, Tensor, Tensor]:
    """tokens and visible_until [N] with every worker as written, on its own branch, and as read, on the trunk; and the
    indices of the sampled tokens.
    """
    tokens: list[int] = []
    ends: list[int] = []  # of a branch; 0 on the trunk
    targets: list[int] = []

    def lay(ids: list[int], inserted: int, branch: bool = False) -> None:
        start, stop = len(tokens), len(tokens) + len(ids)
        tokens.extend(ids)
        ends.extend([stop if branch else 0] * len(ids))
        targets.extend(range(start + inserted, stop))

    lay(response.prompt, len(response.prompt))
    for segment, fork in response.parts():
        lay(segment.tokens, len(segment.inserted))
        for [worker] in (thread.trunk for thread in fork):
            lay(worker.tokens, len(worker.inserted), branch=True)
        for [worker] in (thread.trunk for thread in fork):
            lay(worker.tokens, len(worker))
    visible_until = torch.tensor([end or len(tokens) for end in ends])
    return torch.tensor(tokens), visible_until, torch.tensor(targets)


def measure(way: str, tokens: int, folder: Path, repeats: int) -> dict[str, float]:
    """One way at one size: loss and peak bytes of the first step, best seconds."""
    logging.disable(logging.WARNING)
    step = reference_step(folder) if way == "reference" else our_step(folder)
    step(step_responses(256)[:1])  # one-time work happens here
    responses, found = step_responses(tokens), []
    for _ in range(repeats):
        with peak_memory() as peak:
            start = time.perf_counter()
            loss = step(responses)
            seconds = time.perf_counter() - start
        found.append((loss, seconds, peak.most))
    size, (loss, _, most) = sum(response.total_tokens for response in responses), found[0]
    return {"loss": loss, "seconds": min(each[1] for each in found), "peak_bytes": most, "tokens": size}


def make_model(shape: dict[str, Any], folder: Path) -> None:
    model = Transformer(parse_config(shape))
    model.init_weights(seed=0)
    save_checkpoint(model, folder)


def in_own_process(way: str, tokens: int, folder: Path, repeats: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "dccot.lab.bench.step", way, str(tokens), str(folder), str(repeats)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def run(quick: bool = False) -> list[dict]:
    sizes = SIZES[:2] if quick else SIZES
    ways = [(way, size) for size in sizes for way in ("ours", "reference")]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "model"
        make_model(MODEL, folder)
        found = {(way, size): in_own_process(way, size, folder, 1 if quick or size > 2048 else 2) for way, size in ways}
    return compared(found, sizes)


def compared(found: dict[tuple[str, int], dict], sizes: tuple[int, ...]) -> list[dict]:
    rows, faster, lighter = [], {2048: 1.5, 8192: 2.5}, {8192: 0.5}
    for size in sizes:
        ours, theirs, name = found["ours", size], found["reference", size], f"{size // 1024}K tokens per response"
        speed, peak = theirs["seconds"] / ours["seconds"], ours["peak_bytes"] / theirs["peak_bytes"]
        rows += [
            row(f"step, ours, {name}", ours["seconds"], "s"),
            row(f"step, reference, {name}", theirs["seconds"], "s"),
            row(f"speed against the reference, {name}", speed, "×", faster.get(size), "higher"),
            row(f"difference of losses, {name}", abs(ours["loss"] - theirs["loss"]) / theirs["loss"], "relative", 1e-5),
            row(f"peak memory, ours, {name}", ours["peak_bytes"] / 2**30, "GiB"),
            row(f"peak memory, reference, {name}", theirs["peak_bytes"] / 2**30, "GiB"),
            row(f"peak memory against the reference, {name}", peak, "×", lighter.get(size)),
        ]
    for way in ("ours", "reference"):
        first, last = (found[way, size] for size in (sizes[0], sizes[-1]))
        growth = (last["seconds"] / last["tokens"]) / (first["seconds"] / first["tokens"])
        rows.append(row(f"time per token, {sizes[-1] // 1024}K against {sizes[0] // 1024}K, {way}", growth, "×"))
    return rows


if __name__ == "__main__":
    way, tokens, folder, repeats = sys.argv[1:]
    measured = measure(way, int(tokens), Path(folder), int(repeats))
    if os.environ.get("RANK", "0") == "0":
        print(json.dumps(measured))
