"""Our training step vs. the reference implementation: same weights, same responses, same loss.

    dccot bench train                                                  everything, each measurement in its own process
    python -m dccot.lab.bench.step ours 2048 MODEL REPEATS           one measurement, as JSON

    ours        responses packed as forests; tree attention; LM head, log-prob and entropy fused, on the rows that carry loss
    reference   transformers' model, one response per micro-batch, every worker twice, dense mask in SDPA, logits at every position

Both recompute activations in the backward and step AdamW, in fp32 on all cores. The model has 20M parameters and a
vocabulary of 32K; responses are like the paper's (three workers, prompts shared), 4K tokens of them per step, or one
where it is longer. Peak memory is the high-water mark of the whole process during its first step. The reference skips
FSDP and entropy, so the comparison favours it.

MFU counts only what the algorithm needs (flops.py), relative to the best matrix product in the same process, and
without recomputation, which is not needed at this size. Where the rest goes: matrix products of this width run below
the peak and the LM head's are repeated in the backward (logits are never kept), attention runs at about half of it, and
norms, rotation, SwiGLU and softmax are memory-bound. The rows named "share of our step" show how much each takes.
"""

from __future__ import annotations

import contextlib
import json
import logging
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM

from dccot.core.runtime import Runtime
from dccot.lab.bench.forest import paper_like_responses
from dccot.model.config import parse_config
from dccot.model.sharding import ShardingConfig, build_model
from dccot.model.transformer import Transformer
from dccot.model.weights import save_checkpoint
from dccot.rollout.response import Response, Segment
from dccot.train.flops import matmul_peak, model_flops, pair_cost
from dccot.train.forest import Forest, pack
from dccot.train.sft import negative_logprob
from dccot.train.update import OptimizerConfig, make_optimizer, update

STEP_TOKENS = 4096  # of all responses of a step together, unless one is longer
SIZES = (1024, 2048, 4096, 8192)
PROMPT_SHARE = 0.04
TEMPERATURE = 0.6
MODEL: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "vocab_size": 32_768, "hidden_size": 256, "intermediate_size": 1024,
    "num_hidden_layers": 12, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 16_384, "rope_theta": 1e6,
    "tie_word_embeddings": True, "rms_norm_eps": 1e-6, "hidden_act": "silu",
}  # fmt: skip


def step_responses(tokens: int) -> list[Response]:
    """The responses of one step, each of about `tokens` tokens."""
    count, prompt = max(1, STEP_TOKENS // tokens), round(PROMPT_SHARE * tokens)
    return paper_like_responses(count, tokens, prompt_tokens=prompt, vocabulary=MODEL["vocab_size"])


class Ours:
    """The trainer's own step: FSDP on one rank, forests, `update`."""

    def __init__(self, folder: Path, recompute: bool):
        self.runtime, self.config = Runtime.start(), OptimizerConfig(learning_rate=1e-6)
        self.model = build_model(folder, ShardingConfig(compute_dtype="float32", activation_checkpointing=recompute))
        self.optimizer = make_optimizer(self.model, self.config)

    def forests(self, responses: list[Response]) -> list[Forest]:
        plan = pack(responses, 4 * STEP_TOKENS, pair_cost=pair_cost(self.model.config))
        return plan.forests(0)

    def step(self, responses: list[Response]) -> float:
        forests = self.forests(responses)
        return update(
            self.model, self.optimizer, forests, negative_logprob, self.config, 0, TEMPERATURE, self.runtime
        ).loss


class Reference:
    """One response at a time through transformers' model, in the paper's layout."""

    def __init__(self, folder: Path):
        self.model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="sdpa"
        ).train()
        self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-6, weight_decay=0.01, fused=True)

    def step(self, responses: list[Response]) -> float:
        count, total = sum(response.sampled_tokens for response in responses), 0.0
        for response in responses:
            tokens, positions, mask, targets, rows = paper_layout(response)
            given = {
                "input_ids": tokens[None],
                "position_ids": positions[None],
                "attention_mask": mask[None, None],
                "use_cache": False,
            }
            logprobs = (self.model(**given).logits[0] / TEMPERATURE).log_softmax(-1)
            loss = -logprobs[rows, tokens[targets]].sum() / count
            loss.backward()
            total += float(loss.detach())
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return total


def paper_layout(response: Response) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """tokens, positions [N], mask [N, N], and for every sampled token its index and the row that predicts it."""
    spans: list[
        tuple[list[int], int, list[tuple[int, int]], int]
    ] = []  # ids, position, what it sees, where loss begins
    at = 0

    def lay(ids: list[int], position: int, sees: list[tuple[int, int]], inserted: int) -> tuple[int, int]:
        nonlocal at
        spans.append((ids, position, sees, inserted))
        at += len(ids)
        return at - len(ids), at

    def grow(segment: Segment, *, as_written: bool) -> None:
        trunk.append(lay(segment.tokens, depth(), list(trunk), len(segment.inserted) if as_written else len(segment)))

    def depth() -> int:
        return sum(stop - start for start, stop in trunk)

    trunk: list[tuple[int, int]] = []
    trunk.append(lay(response.prompt, 0, [], len(response.prompt)))
    for round_ in response.rounds:
        grow(round_.director, as_written=True)
        for worker in round_.workers:
            lay(worker.tokens, depth(), list(trunk), len(worker.inserted))
        for worker in round_.workers:
            grow(worker, as_written=False)
    if response.final is not None:
        grow(response.final, as_written=True)
    return _dense(spans, at)


def _dense(spans: list, size: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    mask, start, targets, rows = torch.zeros(size, size, dtype=torch.bool), 0, [], []
    for ids, _, sees, inserted in spans:
        stop = start + len(ids)
        for first, last in sees:
            mask[start:stop, first:last] = True
        mask[start:stop, start:stop] = torch.ones(len(ids), len(ids), dtype=torch.bool).tril()
        index = np.arange(start, stop)
        before = np.concatenate([[sees[-1][1] - 1 if sees else -1], index[:-1]])
        targets.append(index[inserted:])
        rows.append(before[inserted:])
        start = stop
    tokens = torch.tensor([token for ids, *_ in spans for token in ids])
    positions = torch.cat([torch.arange(position, position + len(ids)) for ids, position, *_ in spans])
    return tokens, positions, mask, torch.from_numpy(np.concatenate(targets)), torch.from_numpy(np.concatenate(rows))


@contextlib.contextmanager
def high_water_mark() -> Iterator[list[float]]:
    """The process's peak resident size inside the block, in bytes, as counted by the kernel."""
    Path("/proc/self/clear_refs").write_text("5")
    found: list[float] = []
    yield found
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    found.append(1024.0 * int(status["VmHWM"].split()[0]))


def measure(way: str, tokens: int, folder: Path, repeats: int) -> dict:
    """One way at one size: loss and peak bytes of the first step, best seconds; of "mfu", what it takes to work that
    out.
    """
    logging.disable(logging.WARNING)
    trainer: Reference | Ours = Reference(folder) if way == "reference" else Ours(folder, recompute=way == "ours")
    trainer.step(step_responses(256)[:1])  # one-time work happens here
    responses, seconds, losses, peaks = step_responses(tokens), [], [], []
    for _ in range(repeats):
        with high_water_mark() as peak:
            start = time.perf_counter()
            losses.append(trainer.step(responses))
            seconds.append(time.perf_counter() - start)
        peaks += peak
    found: dict[str, Any] = {
        "loss": losses[0],
        "seconds": min(seconds),
        "peak_bytes": peaks[0],
        "tokens": sum(r.total_tokens for r in responses),
    }
    if isinstance(trainer, Ours) and way == "mfu":
        found["flops"] = 3 * model_flops(trainer.model.config, trainer.forests(responses))
        found["peak_flops"] = matmul_peak(torch.device("cpu"), torch.float32)
        found["shares"] = shares(trainer, responses)
    return found


def shares(trainer: Ours, responses: list[Response]) -> dict[str, float]:
    """Where the time of a step goes."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        trainer.step(responses)
    kinds = dict.fromkeys(("matrix products", "attention", "everything else"), 0.0)
    for event in profiler.key_averages():
        attention = "flash_attention" in event.key or "tree_attention" in event.key
        products = event.key in ("aten::mm", "aten::addmm", "aten::bmm")
        kinds["attention" if attention else "matrix products" if products else "everything else"] += (
            event.self_cpu_time_total
        )
    return {kind: time_ / sum(kinds.values()) for kind, time_ in kinds.items()}


def make_model(folder: Path) -> None:
    model = Transformer(parse_config(MODEL))
    model.init_weights(seed=0)
    save_checkpoint(model, folder)


def in_own_process(way: str, tokens: int, folder: Path, repeats: int) -> dict:
    command = [sys.executable, "-m", "dccot.lab.bench.step", way, str(tokens), str(folder), str(repeats)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def run(quick: bool = False) -> list[dict]:
    sizes = SIZES[:2] if quick else SIZES
    repeats = {size: 1 if quick or size > 2048 else 2 for size in sizes}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "model"
        make_model(folder)
        found = {
            (way, size): in_own_process(way, size, folder, repeats[size])
            for size in sizes
            for way in ("ours", "reference")
        }
        mfu = in_own_process("mfu", 2048, folder, 1 if quick else 3)
    return compared(found, sizes) + utilisation(mfu)


def row(name: str, value: float, unit: str, target: float | None = None, better: str = "lower") -> dict:
    return {"name": name, "value": value, "unit": unit, "target": target, "better": better}


def compared(found: dict[tuple[str, int], dict], sizes: tuple[int, ...]) -> list[dict]:
    rows, faster, lighter = [], {2048: 1.5, 8192: 2.5}, {8192: 0.5}
    for size in sizes:
        ours, theirs, name = found["ours", size], found["reference", size], f"{size // 1024}K tokens per response"
        rows += [
            row(f"step, ours, {name}", ours["seconds"], "s"),
            row(f"step, reference, {name}", theirs["seconds"], "s"),
            row(
                f"speed against the reference, {name}",
                theirs["seconds"] / ours["seconds"],
                "×",
                faster.get(size),
                "higher",
            ),
            row(f"difference of losses, {name}", abs(ours["loss"] - theirs["loss"]) / theirs["loss"], "relative", 1e-5),
            row(f"peak memory, ours, {name}", ours["peak_bytes"] / 2**30, "GiB"),
            row(f"peak memory, reference, {name}", theirs["peak_bytes"] / 2**30, "GiB"),
            row(
                f"peak memory against the reference, {name}",
                ours["peak_bytes"] / theirs["peak_bytes"],
                "×",
                lighter.get(size),
            ),
        ]
    for way in ("ours", "reference"):
        first, last = (found[way, size] for size in (sizes[0], sizes[-1]))
        growth = (last["seconds"] / last["tokens"]) / (first["seconds"] / first["tokens"])
        rows.append(row(f"time per token, {sizes[-1] // 1024}K against {sizes[0] // 1024}K, {way}", growth, "×"))
    return rows


def utilisation(found: dict) -> list[dict]:
    mfu = found["flops"] / found["seconds"] / found["peak_flops"]
    return [
        row("matmul peak of this machine, fp32", found["peak_flops"] / 1e9, "GFLOP/s", None, "higher"),
        row("model FLOP utilisation of our step, 2K tokens per response", mfu, "share", 0.5, "higher"),
        *(row(f"share of our step: {kind}", share, "share") for kind, share in found["shares"].items()),
    ]


if __name__ == "__main__":
    way, tokens, folder, repeats = sys.argv[1:]
    print(json.dumps(measure(way, int(tokens), Path(folder), int(repeats))))
