"""Times each kernel against its alternatives, and counts the work that the tile schedule saves.

    dccot bench attention                 # paper-like trees; CPU backends here, Triton kernels where there is a GPU
    dccot bench attention --tree runs/x/rollouts/step_000010.jsonl.gz --tokens 16384 --profile
    dccot bench logprob --rows 8192 --vocabulary 151936

Results are printed as a table and written below runs/bench as JSON; with --profile also a trace that opens in Perfetto.
Compared functions alternate in one process and the fastest of several runs counts.
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.profiler import record_function

from dccot.core.command import Parser
from dccot.kernels import lm_head, schedule
from dccot.kernels.mask import TreeMask, positions
from dccot.kernels.reference import dense_mask
from dccot.kernels.tree_attention import tree_attention
from dccot.kernels.tuning import TABLE
from dccot.lab.bench import trees
from dccot.lab.bench.harness import FOLDER, fastest, peak_memory, row, table, write

THREADS = min(4, os.cpu_count() or 1)
WORK_TOKENS = 16_384  # packed tokens for which the share of useful work has a target
GPU = torch.cuda.is_available()
# of the paper's model; of a CPU
TOKENS, HEADS, HEAD_DIM, HIDDEN = (WORK_TOKENS, (12, 2), 128, 1536) if GPU else (4096, (4, 2), 64, 256)

BACKWARD = 2.5
PASSES = {"forward": 1.0, "backward": BACKWARD}  # pass → its work over that of the forward
CPU_CANDIDATES = OURS, _, PAPERS = "cpu", "SDPA with a dense mask, same tree", "SDPA with a dense mask, paper's layout"
FASTER = "attention: cpu, times faster than dense SDPA on the paper's layout"
QUICK = {  # targets of --quick, whose trees have 2,048 tokens
    "attention: wanted pairs": 0.75,
    "attention: edge tiles": 0.4,
    "schedule: times faster": 20,
    "schedule: growth": 4,
}


def run(quick: bool = False) -> list[dict]:
    """Everything that has a target; `quick` uses smaller sizes, to check that it runs."""
    torch.set_num_threads(THREADS)
    tokens = 2048 if quick else WORK_TOKENS
    rows = work_rows("paper", tokens) + schedule_rows(tokens)
    head = (256, 4096, 64) if quick and not GPU else (8192, 151_936, HIDDEN)
    if GPU:
        return rows + attention_rows("paper", tokens, *HEADS, HEAD_DIM) + logprob_rows(*head)
    seeds = range(1 if quick else 3)
    return rows + attention_rows("paper", 512 if quick else TOKENS, *HEADS, HEAD_DIM, seeds) + logprob_rows(*head)


def work_rows(tree: str, tokens: int) -> list[dict]:
    """How much of the Triton kernels' work is useful, over all shipped tiles: the worst one counts."""
    visible_until = trees.tree(tree, tokens)
    pairs = int((positions(visible_until) + 1).sum())
    efficiency, edges = [], []
    shipped = [tiles for by_head_dim in TABLE.values() for tiles in by_head_dim.values()]
    for q, k, by_key in {(tile.block_q, tile.block_k, i == 2) for tiles in shipped for i, tile in enumerate(tiles)}:
        built = schedule.build(visible_until, q, k)
        efficiency.append(pairs / (built.visited * q * k))
        edges.append(built.edges[by_key] / built.visited)
    what = f"of visited ones, {len(visible_until):,} tokens, worst tile"
    useful = row(f"attention: wanted pairs {what}", min(efficiency), "share", 0.85, "higher")
    return [useful, row(f"attention: edge tiles {what}", max(edges), "share", 0.15)]


def schedule_rows(tokens: int) -> list[dict]:
    """Building mask and schedule against FlexAttention's block mask, and how the time grows."""
    from torch.nn.attention.flex_attention import create_block_mask

    half, whole, twice = (trees.forest(trees.shapes("paper", size)) for size in (tokens // 2, tokens, 2 * tokens))
    visible = lambda b, h, q, k: (k <= q) & (q < whole[k])
    length = len(whole)
    functions: dict[str, Callable] = {
        "ours": lambda: schedule.build(TreeMask(whole).visible_until, 128, 64),
        "theirs": lambda: create_block_mask(visible, None, None, length, length, device="cpu", BLOCK_SIZE=128),
    }
    functions["ours"]()
    times = fastest(functions)
    growing = {"half": lambda: schedule.build(half, 128, 64), "twice": lambda: schedule.build(twice, 128, 64)}
    grown = fastest(growing, repeats=20)
    faster, growth = times["theirs"] / times["ours"], (grown["twice"] / grown["half"]) ** 0.5
    return [
        row(f"schedule: mask and schedule of {tokens:,} tokens", 1e3 * times["ours"], "ms"),
        row("schedule: times faster than create_block_mask", faster, "×", 20, "higher"),
        row("schedule: growth of time when tokens double", growth, "×", 4),
    ]


def attention_inputs(
    tokens: int, query_heads: int, key_heads: int, dim: int, device: str = "cpu", dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    """q, k, v and a gradient of the output."""
    generator = torch.Generator(device=device).manual_seed(tokens)
    draw = lambda heads: torch.randn(tokens, heads, dim, generator=generator, device=device, dtype=dtype)
    return [*(draw(heads).requires_grad_() for heads in (query_heads, key_heads, key_heads)), draw(query_heads)]


def forward_backward(attention: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> Callable:
    """Both passes, as ranges of these names in a trace."""

    def both() -> tuple[Tensor, ...]:
        with record_function("attention forward"):
            out = attention(q, k, v)
        with record_function("attention backward"):
            return torch.autograd.grad(out, (q, k, v), grad)

    return both


def flops(visible_until: Tensor, heads: int, dim: int) -> float:
    """Of the forward pass, for unmasked pairs only; the backward has BACKWARD times as many."""
    return 4.0 * dim * heads * int((positions(visible_until) + 1).sum())


def dense_sdpa(visible_until: Tensor) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    mask = dense_mask(visible_until)[None, None]

    def attention(*qkv: Tensor) -> Tensor:
        q, k, v = (x.transpose(0, 1)[None] for x in qkv)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)[0].transpose(0, 1)

    return attention


def attention_rows(
    tree: str, tokens: int, query_heads: int, key_heads: int, dim: int, seeds: Sequence[int] = (0,)
) -> list[dict]:
    """On a CPU `cpu` on the tree against SDPA with a dense mask, on the same tree and on the paper's layout; fp32."""
    if GPU:
        from dccot.lab.bench import kernels_on_gpu

        return kernels_on_gpu.attention_rows(tree, tokens, query_heads, key_heads, dim)
    seconds: Counter[str] = Counter()
    work = 0.0
    for seed in seeds:
        packed = trees.tree(tree, tokens, seed)
        work += flops(packed, query_heads, dim)
        duplicates = trees.forest(trees.shapes(tree, tokens, seed), duplicates=True)
        ours = functools.partial(tree_attention, mask=TreeMask(packed), backend="cpu")
        given, repeated = (attention_inputs(len(x), query_heads, key_heads, dim) for x in (packed, duplicates))
        ways: list[Callable[..., Tensor]] = [ours, dense_sdpa(packed), dense_sdpa(duplicates)]
        functions: dict[str, Callable] = {}
        for name, attention, inputs in zip(CPU_CANDIDATES, ways, (given, given, repeated)):
            functions[f"{name}, forward"] = functools.partial(attention, *inputs[:3])
            functions[f"{name}, both"] = forward_backward(attention, *inputs)
        functions[f"{OURS}, both"]()
        seconds.update(fastest(functions))
    rows = []
    for name in CPU_CANDIDATES:
        seconds[f"{name}, backward"] = seconds[f"{name}, both"] - seconds[f"{name}, forward"]
        rows += [
            row(f"attention: {name}, {what}", 1e3 * seconds[f"{name}, {what}"] / len(seeds), "ms") for what in PASSES
        ]
    where = f"{tokens:,}-token {Path(tree).name} tree, {THREADS} threads"
    for what, factor in PASSES.items():
        speed = factor * work / seconds[f"{OURS}, {what}"] / 1e12
        rows.append(row(f"attention: {OURS}, {what}, {where}", speed, "TFLOP/s", better="higher"))
    unknown = {"reason": "no peak is known for a CPU"}
    rows.append({**row(f"attention: {OURS}, share of peak", None, "share", better="higher"), **unknown})
    faster = seconds[f"{PAPERS}, both"] / seconds[f"{OURS}, both"]
    return [*rows, row(FASTER, faster, "×", 3, "higher")]


class Materialised(torch.autograd.Function):
    """The leanest LM head that keeps its logits: one M×V matrix, turned into its own gradient in the backward."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        logits, statistics = hidden @ weight.t(), hidden.new_zeros(4, len(hidden))
        statistics[0] = -torch.inf
        for rows in lm_head._slices(len(hidden), max(1, lm_head.STRIP_ELEMENTS // len(weight))):
            lm_head.Strips.update_statistics(logits[rows].clone(), targets[rows], statistics[:, rows], 1 / temperature)
        largest, total, weighted, chosen = statistics
        lse, entropy = largest + total.log(), total.log() - weighted / total
        ctx.save_for_backward(hidden, weight, targets, lse, entropy)
        ctx.temperature, ctx.logits = temperature, logits
        return chosen - lse, entropy

    @staticmethod
    def backward(ctx: Any, grad_logprob: Tensor, grad_entropy: Tensor):
        hidden, weight, targets, lse, entropy = ctx.saved_tensors
        values = torch.stack([lse, entropy, grad_logprob, grad_entropy])
        gradient = lm_head.Strips.logits_to_gradient(ctx.logits, targets, values, 1 / ctx.temperature)
        ctx.logits = None
        return gradient @ weight, gradient.t() @ hidden, None, None


def logprob_rows(rows: int, vocabulary: int, dim: int, temperature: float = 0.6) -> list[dict]:
    """The fused LM head against one that keeps its logits; on a CPU time, memory, and whether they agree."""
    if GPU:
        from dccot.lab.bench import kernels_on_gpu

        return kernels_on_gpu.logprob_rows(rows, vocabulary, dim)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(rows, dim, generator=generator).requires_grad_()
    weight = (torch.randn(vocabulary, dim, generator=generator) * dim**-0.5).requires_grad_()
    targets = torch.randint(vocabulary, (rows,), generator=generator)
    results: dict[str, list[Tensor]] = {}
    memory: dict[str, int] = {}

    def measured(name: str, head: Callable) -> None:
        with peak_memory() as peak:
            outputs = head(hidden, weight, targets, temperature)
            gradients = torch.autograd.grad(outputs[0].sum() + 0.1 * outputs[1].sum(), (hidden, weight))
        memory[name] = max(1, peak.most - peak.before - sum(x.nbytes for x in gradients))
        results[name] = [*(x.detach() for x in outputs), *gradients]

    heads = {"fused": lm_head.linear_logprob, "materialised": Materialised.apply}
    times = fastest({name: functools.partial(measured, name, head) for name, head in heads.items()}, 2)
    relative = lambda a, b: ((a - b).abs().max() / b.abs().max().clamp(min=1e-3)).item()
    error = max(map(relative, *results.values()))
    slower, smaller = times["fused"] / times["materialised"], memory["materialised"] / memory["fused"]
    return [
        row(f"logprob: fused, M {rows:,}, V {vocabulary:,}, d {dim}, {THREADS} threads", times["fused"], "s"),
        row("logprob: materialised logits", times["materialised"], "s"),
        row("logprob: time of fused over materialised", slower, "×", 1.35),
        row("logprob: extra memory of fused", memory["fused"] / 2**20, "MB"),
        row("logprob: times less extra memory than materialised", smaller, "×", 8, "higher"),
        row("logprob: largest relative difference of log-prob, entropy, gradients", error, "", 1e-5),
    ]


def profile(function: Callable[[], object], file: Path) -> None:
    """One call under the torch profiler, whose trace opens in Perfetto, and on a GPU one under Proton."""
    function()
    with torch.profiler.profile(record_shapes=True) as profiler:
        function()
    profiler.export_chrome_trace(str(file))
    if GPU:
        import triton.profiler as proton

        proton.start(str(file.with_suffix(".proton")))
        function()
        proton.finalize()


SIZES = {
    "attention": {"tokens": TOKENS, "heads": HEADS[0], "key-heads": HEADS[1], "head-dim": HEAD_DIM},
    "logprob": {"rows": 8192, "vocabulary": 151_936, "hidden": HIDDEN},
}


def parser() -> Parser:
    top = Parser("Time a kernel against its alternatives.", "dccot bench attention --profile", prog="dccot bench")
    kinds = top.add_subparsers(dest="kernel", required=True)
    for name, sizes in SIZES.items():
        kind = kinds.add_parser(name, description=top.description, example=f"dccot bench {name} --profile")
        if name == "attention":
            kind.add_argument("--tree", default="paper", help=f"{', '.join(trees.KINDS)}, or a rollout JSONL")
        for option, default in sizes.items():
            kind.add_argument(f"--{option}", type=int, default=default, help="(default: %(default)s)")
        kind.add_argument("--profile", action="store_true", help="also a trace for Perfetto (on a GPU also Proton's)")
        kind.add_argument("--output", type=Path, default=FOLDER, help="folder for JSON and traces (%(default)s)")
    return top


def main(argv: list[str] | None = None) -> int:
    arguments = parser().parse_args(argv)
    torch.set_num_threads(THREADS)
    try:
        rows, to_profile = _attention(arguments) if arguments.kernel == "attention" else _logprob(arguments)
    except ValueError as error:
        print(f"dccot bench: {error}", file=sys.stderr)
        return 2
    print(table(rows))
    file = arguments.output / f"{arguments.kernel}.json"
    write(rows, file)
    if arguments.profile:
        profile(to_profile, file.with_suffix(".trace.json"))
    print(f"written to {', '.join(str(path) for path in sorted(arguments.output.glob(arguments.kernel + '.*')))}")
    return 0


def _attention(arguments: argparse.Namespace) -> tuple[list[dict], Callable]:
    size = arguments.heads, arguments.key_heads, arguments.head_dim
    rows = work_rows(arguments.tree, max(arguments.tokens, WORK_TOKENS))
    rows += attention_rows(arguments.tree, arguments.tokens, *size)
    device, dtype = ("cuda", torch.bfloat16) if GPU else ("cpu", torch.float32)
    mask = TreeMask(trees.tree(arguments.tree, arguments.tokens).to(device))
    inputs = attention_inputs(len(mask), *size, device, dtype)
    return rows, forward_backward(functools.partial(tree_attention, mask=mask), *inputs)


def _logprob(arguments: argparse.Namespace) -> tuple[list[dict], Callable]:
    rows = logprob_rows(arguments.rows, arguments.vocabulary, arguments.hidden)
    device = "cuda" if GPU else "cpu"
    hidden = torch.randn(arguments.rows, arguments.hidden, device=device, requires_grad=True)
    weight = torch.randn(arguments.vocabulary, arguments.hidden, device=device, requires_grad=True)
    targets = torch.randint(arguments.vocabulary, (arguments.rows,), device=device)

    def both() -> None:
        with record_function("logprob forward"):
            total = lm_head.linear_logprob(hidden, weight, targets)[0].sum()
        with record_function("logprob backward"):
            total.backward()

    return rows, both


if __name__ == "__main__":
    sys.exit(main())
