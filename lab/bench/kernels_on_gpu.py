"""What kernels.py measures on a GPU: Triton kernels against dense-mask SDPA, FlexAttention, every FlashAttention.

TFLOP/s count unmasked pairs only (kernels.py: `flops`), so that work on masked pairs lowers them. A candidate that is
not installed, does not fit or fails becomes a row that says so, and the others are still measured. Deliberately thin:
it only prepares inputs and passes functions to triton.testing.do_bench. It has never been run: no GPU was available.
"""

from __future__ import annotations

import functools
import gc
import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dccot.kernels.lm_head import linear_logprob
from dccot.kernels.mask import TreeMask
from dccot.kernels.reference import dense_logprob
from dccot.kernels.tree_attention import tree_attention
from dccot.lab.bench import trees
from dccot.lab.bench.harness import row
from dccot.lab.bench.kernels import BACKWARD, attention_inputs, dense_sdpa, flops, forward_backward
from dccot.plan import GPUS

Attention = Callable[[Tensor, Tensor, Tensor], Any]
CAUSAL, TREE = "own kernel, plain causal", "tree"
PASSES = {"forward": 1.0, "backward": BACKWARD, "forward + backward": 1 + BACKWARD}
FLASH = {  # name → module with flash_attn_varlen_func; vLLM's has no backward
    "FlashAttention 2": "flash_attn",
    "FlashAttention 3": "flash_attn_interface",
    "FlashAttention 4": "flash_attn.cute",
    "vLLM's FlashAttention": "vllm.vllm_flash_attn",
}


def attention_rows(tree: str, tokens: int, query_heads: int, key_heads: int, dim: int) -> list[dict]:
    visible_until = trees.tree(tree, tokens).cuda()
    causal, mask = TreeMask.causal([len(visible_until)], device="cuda"), TreeMask(visible_until)
    inputs = attention_inputs(len(visible_until), query_heads, key_heads, dim, device="cuda", dtype=torch.bfloat16)
    ours = functools.partial(tree_attention, mask=mask)
    candidates: dict[str, Callable[[], Attention]] = {
        TREE: lambda: ours,
        CAUSAL: lambda: functools.partial(tree_attention, mask=causal),
        "SDPA with a dense mask": lambda: dense_that_fits(visible_until),
        "FlexAttention with our tiles, FLASH where installed": lambda: functools.partial(ours, backend="flash"),
    }
    for name, module in FLASH.items():
        candidates[f"{name} varlen, prefixes gathered"] = functools.partial(flash_attention, visible_until, module)
    work = dict.fromkeys(candidates, flops(visible_until, query_heads, dim))
    work[CAUSAL] = flops(causal.visible_until, query_heads, dim)
    rows, speed = compared(candidates, inputs, work)
    peak = next((gpu.tflops for name, gpu in GPUS.items() if name in torch.cuda.get_device_name()), None)
    if peak is None:
        unknown = {"reason": f"no peak is known for {torch.cuda.get_device_name()}: lacks a row in dccot/plan.py"}
        rows.append({**row("attention: tree, share of peak", None, "share", better="higher"), **unknown})
    for what in PASSES:
        for against, other in (("peak", peak), ("own causal kernel", speed.get((CAUSAL, what)))):
            if other and (TREE, what) in speed:
                share = speed[TREE, what] / other
                rows.append(row(f"attention: tree, {what}, share of {against}", share, "share", better="higher"))
    return rows


def compared(
    candidates: Mapping[str, Callable[[], Attention]], inputs: Sequence[Tensor], work: Mapping[str, float]
) -> tuple[list[dict], dict[tuple[str, str], float]]:
    """TFLOP/s of every candidate and pass, as rows and by name; what cannot run is a row with the reason. The backward
    is what both take less the forward.
    """
    rows, speed = [], {}
    for name, build in candidates.items():
        times: dict[str, float] = {}
        for what in ("forward", "forward + backward"):
            try:
                attention = build()
                both = forward_backward(attention, *inputs)
                times[what] = _milliseconds(both if "backward" in what else functools.partial(attention, *inputs[:3]))
            except Exception as error:
                rows.append(missing(f"attention: {name}, {what}", error))
                _free()
        if len(times) == 2:
            times["backward"] = times["forward + backward"] - times["forward"]
        for what, milliseconds in times.items():
            speed[name, what] = PASSES[what] * work[name] / (milliseconds * 1e9)
            rows.append(row(f"attention: {name}, {what}", speed[name, what], "TFLOP/s", better="higher"))
    return rows, speed


def missing(name: str, error: Exception) -> dict:
    """A row without a value."""
    reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    verdict = "not run" if isinstance(error, ModuleNotFoundError | DoesNotFit) else f"failed: {type(error).__name__}"
    return {**row(name, None, "", better="higher"), "reason": f"{verdict}: {reason[:160]}"}


class DoesNotFit(Exception):
    pass


def dense_that_fits(visible_until: Tensor) -> Attention:
    """SDPA converts the mask to numbers in the inputs' precision, in addition to our boolean one."""
    needed, (free, _) = 3 * len(visible_until) ** 2, torch.cuda.mem_get_info()
    if needed > free:
        room = f"{needed / 1e9:.1f} GB at {len(visible_until):,} tokens, {free / 1e9:.1f} GB are free"
        raise DoesNotFit(f"the mask alone takes {room}")
    return dense_sdpa(visible_until)


def flash_attention(visible_until: Tensor, module: str) -> Attention:
    """Every strip of tokens with equal visible_until is one sequence whose keys are its prefix and itself."""
    varlen = importlib.import_module(module).flash_attn_varlen_func
    ends = visible_until.cpu().numpy()
    strips = [np.flatnonzero(ends == end) for end in np.unique(ends)]
    seen = [np.concatenate([np.flatnonzero(ends[: strip[0]] > strip[0]), strip]) for strip in strips]
    rows, keys = (torch.from_numpy(np.concatenate(parts)).to(visible_until.device) for parts in (strips, seen))
    lengths: dict[str, Any] = {}
    for side, parts in (("q", strips), ("k", seen)):
        past = np.cumsum([0, *map(len, parts)])
        lengths[f"cu_seqlens_{side}"] = torch.tensor(past, dtype=torch.int32, device=visible_until.device)
        lengths[f"max_seqlen_{side}"] = max(map(len, parts))
    back = rows.argsort()

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = varlen(q[rows], k[keys], v[keys], **lengths, causal=True)
        return (out[0] if isinstance(out, tuple) else out)[back]

    return attention


def logprob_rows(rows: int, vocabulary: int, dim: int) -> list[dict]:
    hidden = torch.randn(rows, dim, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(vocabulary, dim, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    targets = torch.randint(vocabulary, (rows,), device="cuda")
    found = []
    for name, head in (("fused", linear_logprob), ("plain PyTorch", dense_logprob)):
        function = lambda head=head: torch.autograd.grad(head(hidden, weight, targets, 0.6)[0].sum(), (hidden, weight))
        try:
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            function()
            peak = torch.cuda.max_memory_allocated() - before
            found.append(row(f"logprob: {name}, forward + backward", _milliseconds(function), "ms"))
            found.append(row(f"logprob: {name}, extra memory", peak / 2**20, "MB"))
        except Exception as error:
            found.append(missing(f"logprob: {name}", error))
            _free()
    return found


def _free() -> None:
    """Frees what a failed candidate held."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _milliseconds(function: Callable[[], object]) -> float:
    from triton.testing import do_bench

    return do_bench(function, return_mode="median")
