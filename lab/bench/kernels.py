"""Times each kernel against its alternatives, and counts the work that the tile schedule saves.

    dccot bench attention                                  # paper-like trees; CPU backends here, Triton kernels where there is a GPU
    dccot bench attention --tree runs/x/rollouts/step_000010.jsonl --tokens 16384 --profile
    dccot bench logprob --rows 8192 --vocabulary 151936

Results are printed as a table and written below runs/bench (JSON and PNG; with --profile also a trace that opens in
Perfetto). Compared functions alternate in one process and the fastest of several runs counts, so that a busy machine
affects all equally.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from dccot.kernels import lm_head as fused
from dccot.kernels import schedule
from dccot.kernels.mask import TreeMask, positions
from dccot.kernels.reference import dense_mask
from dccot.kernels.tree_attention import tree_attention
from dccot.kernels.tuning import TABLE
from dccot.lab.bench import trees

OUTPUT = Path("runs/bench")
THREADS = min(4, os.cpu_count() or 1)
WORK_TOKENS = 16_384  # packed tokens for which the share of useful work has a target
GPU = torch.cuda.is_available()
# of the paper's model; of a CPU
TOKENS, HEADS, HEAD_DIM, HIDDEN = (WORK_TOKENS, (12, 2), 128, 1536) if GPU else (4096, (4, 2), 64, 256)


def row(name: str, value: float, unit: str, target: float | None = None, better: str = "higher") -> dict:
    return {"name": name, "value": value, "unit": unit, "target": target, "better": better}


def run(quick: bool = False) -> list[dict]:
    """Everything that has a target; `quick` uses smaller sizes, to check that it runs."""
    torch.set_num_threads(THREADS)
    tokens = 2048 if quick else WORK_TOKENS
    rows = (
        work_rows("paper", tokens)
        + schedule_rows(tokens)
        + balance_rows(trees.MEASURED[:1] if quick else trees.MEASURED)
    )
    if GPU:
        from dccot.lab.bench import kernels_on_gpu as bench_gpu

        return (
            rows
            + bench_gpu.attention_rows("paper", tokens, *HEADS, HEAD_DIM)
            + bench_gpu.logprob_rows(8192, 151_936, HIDDEN)
        )
    rows += attention_rows("paper", 512 if quick else TOKENS, *HEADS, HEAD_DIM, seeds=1 if quick else 3)
    return rows + (logprob_rows(256, 4096, 64) if quick else logprob_rows(8192, 151_936, HIDDEN))


def fastest(functions: dict[str, Callable[[], object]], repeats: int = 3) -> dict[str, float]:
    """Seconds of each function, run alternately."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(repeats):
        for name, function in functions.items():
            start = time.perf_counter()
            function()
            times[name].append(time.perf_counter() - start)
    return {name: min(values) for name, values in times.items()}


def work_rows(tree: str, tokens: int) -> list[dict]:
    """How much of the Triton kernels' work is useful, over all shipped tiles: the worst one counts."""
    visible_until = trees.tree(tree, tokens)
    pairs = int((positions(visible_until) + 1).sum())
    efficiency, edges = [], []
    shipped = [tiles for by_head_dim in TABLE.values() for tiles in by_head_dim.values()]
    for block_q, block_k, by_key in {
        (tile.block_q, tile.block_k, i == 2) for tiles in shipped for i, tile in enumerate(tiles)
    }:
        built = schedule.build(visible_until, block_q, block_k)
        efficiency.append(pairs / (built.visited * block_q * block_k))
        edges.append(built.edges[by_key] / built.visited)
    return [
        row(
            f"attention: wanted pairs of visited ones, {len(visible_until):,} tokens, worst tile",
            min(efficiency),
            "share",
            0.85,
        ),
        row(
            f"attention: edge tiles of visited ones, {len(visible_until):,} tokens, worst tile",
            max(edges),
            "share",
            0.15,
            "lower",
        ),
    ]


def balance_rows(measured: Sequence[tuple[str, int]]) -> list[dict]:
    """Simulated share of busy multiprocessors, the worst of three GPUs and three models: forward, dQ and dK/dV."""
    rows = []
    for kind, tokens in measured:
        visible_until = trees.tree(kind, tokens)
        for name, blocks in (("forward", (128, 128)), ("dQ", (128, 64)), ("dK/dV", (64, 128))):
            built = schedule.build(visible_until, *blocks)
            busy = [
                schedule.plan(
                    *(
                        (built.by_key, gpu, key_heads, heads // key_heads)
                        if name == "dK/dV"
                        else (built.by_query, gpu, heads, 1)
                    )
                ).busy
                for gpu in (108, 132, 148)
                for heads, key_heads in ((12, 2), (28, 4), (32, 8))
            ]
            rows.append(
                row(f"attention: balance of {name}, {kind}, {len(visible_until):,} tokens", min(busy), "share", 0.95)
            )
    return rows


def schedule_rows(tokens: int) -> list[dict]:
    """Building mask and schedule against FlexAttention's block mask, and how the time grows."""
    from torch.nn.attention.flex_attention import create_block_mask

    visible_until = trees.forest(trees.shapes("paper", tokens))
    length = len(visible_until)
    visible = lambda b, h, q, k: (k <= q) & (q < visible_until[k])
    functions = {
        "ours": lambda: schedule.build(TreeMask(visible_until).visible_until, 128, 64),
        "theirs": lambda: create_block_mask(visible, None, None, length, length, device="cpu", BLOCK_SIZE=128),
    }
    functions["ours"]()
    times = fastest(functions)
    half, twice = (trees.forest(trees.shapes("paper", size)) for size in (tokens // 2, 2 * tokens))
    growing = fastest(
        {"half": lambda: schedule.build(half, 128, 64), "twice": lambda: schedule.build(twice, 128, 64)}, repeats=20
    )
    return [
        row(f"schedule: mask and schedule of {tokens:,} tokens", 1e3 * times["ours"], "ms", better="lower"),
        row("schedule: times faster than create_block_mask", times["theirs"] / times["ours"], "×", 20),
        row(
            "schedule: growth of time when tokens double", (growing["twice"] / growing["half"]) ** 0.5, "×", 4, "lower"
        ),
    ]


def attention_inputs(
    tokens: int, query_heads: int, key_heads: int, dim: int, device: str = "cpu", dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    generator = torch.Generator(device=device).manual_seed(tokens)
    draw = lambda heads: torch.randn(tokens, heads, dim, generator=generator, device=device, dtype=dtype)
    return [
        draw(query_heads).requires_grad_(),
        draw(key_heads).requires_grad_(),
        draw(key_heads).requires_grad_(),
        draw(query_heads),
    ]


def forward_backward(
    attention: Callable[[Tensor, Tensor, Tensor], Tensor], q: Tensor, k: Tensor, v: Tensor, grad: Tensor
) -> Callable:
    return lambda: torch.autograd.grad(attention(q, k, v), (q, k, v), grad)


def dense_sdpa(visible_until: Tensor) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    mask = dense_mask(visible_until)[None, None]

    def attention(*qkv: Tensor) -> Tensor:
        q, k, v = (x.transpose(0, 1)[None] for x in qkv)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)[0].transpose(0, 1)

    return attention


def attention_rows(tree: str, tokens: int, query_heads: int, key_heads: int, dim: int, seeds: int = 1) -> list[dict]:
    """CPU: `cpu` on the tree against SDPA with a dense mask, on the same tree and on the paper's layout; fp32, forward
    + backward.
    """
    seconds = {"cpu": 0.0, "dense": 0.0, "duplicates": 0.0}
    for seed in range(seeds):
        shapes = trees.shapes(tree, tokens, seed)
        packed, duplicates = trees.tree(tree, tokens, seed), trees.forest(shapes, duplicates=True)
        mask = TreeMask(packed)
        inputs = attention_inputs(len(packed), query_heads, key_heads, dim)
        functions = {
            "cpu": forward_backward(functools.partial(tree_attention, mask=mask, backend="cpu"), *inputs),
            "dense": forward_backward(dense_sdpa(packed), *inputs),
            "duplicates": forward_backward(
                dense_sdpa(duplicates), *attention_inputs(len(duplicates), query_heads, key_heads, dim)
            ),
        }
        functions["cpu"]()
        for name, value in fastest(functions).items():
            seconds[name] += value / seeds
    what = f"{tokens:,}-token {Path(tree).name} tree, {THREADS} threads"
    return [
        row(f"attention: cpu, {what}", 1e3 * seconds["cpu"], "ms", better="lower"),
        row("attention: SDPA with a dense mask, same tree", 1e3 * seconds["dense"], "ms", better="lower"),
        row("attention: SDPA with a dense mask, paper's layout", 1e3 * seconds["duplicates"], "ms", better="lower"),
        row(
            "attention: cpu, times faster than dense SDPA on the paper's layout",
            seconds["duplicates"] / seconds["cpu"],
            "×",
            3,
        ),
    ]


class Materialised(torch.autograd.Function):
    """The leanest LM head that keeps its logits: one M×V matrix, turned into its own gradient in the backward."""

    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        logits = hidden @ weight.t()
        statistics = hidden.new_zeros(4, len(hidden))
        statistics[0] = -torch.inf
        for rows in fused._slices(len(hidden), max(1, fused.STRIP_ELEMENTS // len(weight))):
            fused.Strips.update_statistics(logits[rows].clone(), targets[rows], statistics[:, rows], 1 / temperature)
        largest, total, weighted, chosen = statistics
        lse, entropy = largest + total.log(), total.log() - weighted / total
        ctx.temperature = temperature
        ctx.save_for_backward(hidden, weight, targets, lse, entropy)
        ctx.logits = logits
        return chosen - lse, entropy

    @staticmethod
    def backward(ctx, grad_logprob: Tensor, grad_entropy: Tensor):
        hidden, weight, targets, lse, entropy = ctx.saved_tensors
        gradient = ctx.logits
        fused.Strips.logits_to_gradient(
            gradient, targets, torch.stack([lse, entropy, grad_logprob, grad_entropy]), 1 / ctx.temperature
        )
        ctx.logits = None
        return gradient @ weight, gradient.t() @ hidden, None, None


def logprob_rows(rows: int, vocabulary: int, dim: int, temperature: float = 0.6) -> list[dict]:
    """CPU: the fused LM head against one that keeps its logits; time, memory, and whether they agree."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(rows, dim, generator=generator).requires_grad_()
    weight = (torch.randn(vocabulary, dim, generator=generator) * dim**-0.5).requires_grad_()
    targets = torch.randint(vocabulary, (rows,), generator=generator)
    results, memory = {}, {}

    def measured(name: str, head: Callable) -> Callable[[], None]:
        def run_once() -> None:
            before = reset_peak_memory()
            outputs = head(hidden, weight, targets, temperature)
            gradients = torch.autograd.grad(outputs[0].sum() + 0.1 * outputs[1].sum(), (hidden, weight))
            memory[name] = max(1, peak_memory() - before - sum(x.nbytes for x in gradients))
            results[name] = [*(x.detach() for x in outputs), *gradients]

        return run_once

    times = fastest(
        {
            "fused": measured("fused", fused.linear_logprob),
            "materialised": measured("materialised", Materialised.apply),
        },
        2,
    )
    errors = [
        ((a - b).abs().max() / b.abs().max().clamp(min=1e-3)).item() for a, b in zip(*results.values(), strict=True)
    ]
    return [
        row(
            f"logprob: fused, M {rows:,}, V {vocabulary:,}, d {dim}, {THREADS} threads",
            times["fused"],
            "s",
            better="lower",
        ),
        row("logprob: materialised logits", times["materialised"], "s", better="lower"),
        row("logprob: time of fused over materialised", times["fused"] / times["materialised"], "×", 1.35, "lower"),
        row("logprob: extra memory of fused", memory["fused"] / 2**20, "MB", better="lower"),
        row("logprob: times less extra memory than materialised", memory["materialised"] / memory["fused"], "×", 8),
        row("logprob: largest relative difference of log-prob, entropy, gradients", max(errors), "", 1e-5, "lower"),
    ]


def reset_peak_memory() -> int:
    """Resets this process's peak memory; returns its current memory in bytes.  Linux only."""
    Path("/proc/self/clear_refs").write_text("5")
    return peak_memory()


def peak_memory() -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return 1024 * int(line.split()[1])


def draw(rows: list[dict], file: Path) -> None:
    """Bars of everything measured in time."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    timed = [r for r in rows if r["unit"] in ("ms", "s", "TFLOP/s")]
    figure, axes = pyplot.subplots(figsize=(9, 1 + 0.5 * len(timed)), layout="constrained")
    axes.barh([r["name"] for r in timed], [r["value"] for r in timed], color="#4c72b0")
    axes.invert_yaxis()
    axes.set_xlabel(" / ".join(sorted({r["unit"] for r in timed})))
    for position, r in enumerate(timed):
        axes.text(r["value"], position, f" {r['value']:,.3g} {r['unit']}", va="center")
    figure.savefig(file, dpi=120)
    pyplot.close(figure)


def profile(function: Callable[[], object], file: Path) -> None:
    """One call under the torch profiler, whose trace opens in Perfetto, and on a GPU one under Proton."""
    function()
    with torch.profiler.profile(record_shapes=True) as profiler:
        function()
    profiler.export_chrome_trace(str(file))
    if torch.cuda.is_available():
        import triton.profiler as proton

        proton.start(str(file.with_suffix(".proton")))
        function()
        proton.finalize()


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="dccot bench", description="Time a kernel against its alternatives.")
    kinds = top.add_subparsers(dest="kernel", required=True)
    attention = kinds.add_parser(
        "attention", epilog="example: dccot bench attention --tree paper --tokens 16384 --profile"
    )
    attention.add_argument(
        "--tree", default="paper", help="paper, one, shared-7x200, packs, causal, or a rollout JSONL"
    )
    attention.add_argument("--tokens", type=int, default=TOKENS, help="packed tokens (default: %(default)s)")
    attention.add_argument("--heads", type=int, default=HEADS[0], help="query heads (default: %(default)s)")
    attention.add_argument("--key-heads", type=int, default=HEADS[1])
    attention.add_argument("--head-dim", type=int, default=HEAD_DIM)
    logprob = kinds.add_parser("logprob", epilog="example: dccot bench logprob --rows 2048")
    logprob.add_argument("--rows", type=int, default=8192)
    logprob.add_argument("--vocabulary", type=int, default=151_936)
    logprob.add_argument("--hidden", type=int, default=HIDDEN)
    for kind in (attention, logprob):
        kind.add_argument(
            "--profile", action="store_true", help="also write a trace for Perfetto (and a Proton profile on a GPU)"
        )
        kind.add_argument(
            "--output", type=Path, default=OUTPUT, help="folder for JSON, PNG and traces (default: %(default)s)"
        )
    return top


def main(argv: list[str] | None = None) -> int:
    arguments = parser().parse_args(argv)
    torch.set_num_threads(THREADS)
    try:
        rows, to_profile = _attention(arguments) if arguments.kernel == "attention" else _logprob(arguments)
    except ValueError as error:
        print(f"dccot bench: {error}", file=sys.stderr)
        return 2
    from dccot.lab.bench.__main__ import table

    print(table(rows))
    arguments.output.mkdir(parents=True, exist_ok=True)
    file = arguments.output / f"{arguments.kernel}.json"
    file.write_text(json.dumps(rows, indent=1) + "\n")
    draw(rows, file.with_suffix(".png"))
    if arguments.profile:
        profile(to_profile, file.with_suffix(".trace.json"))
    print(f"written to {', '.join(str(path) for path in sorted(arguments.output.glob(arguments.kernel + '.*')))}")
    return 0


def _attention(arguments: argparse.Namespace) -> tuple[list[dict], Callable]:
    size = arguments.heads, arguments.key_heads, arguments.head_dim
    rows = work_rows(arguments.tree, max(arguments.tokens, WORK_TOKENS))
    if torch.cuda.is_available():
        from dccot.lab.bench import kernels_on_gpu as bench_gpu

        rows += bench_gpu.attention_rows(arguments.tree, arguments.tokens, *size)
    else:
        rows += attention_rows(arguments.tree, arguments.tokens, *size)
    device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
    mask = TreeMask(trees.tree(arguments.tree, arguments.tokens).to(device))
    return rows, forward_backward(
        lambda q, k, v: tree_attention(q, k, v, mask), *attention_inputs(len(mask), *size, device, dtype)
    )


def _logprob(arguments: argparse.Namespace) -> tuple[list[dict], Callable]:
    if torch.cuda.is_available():
        from dccot.lab.bench import kernels_on_gpu as bench_gpu

        rows = bench_gpu.logprob_rows(arguments.rows, arguments.vocabulary, arguments.hidden)
    else:
        rows = logprob_rows(arguments.rows, arguments.vocabulary, arguments.hidden)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    hidden = torch.randn(arguments.rows, arguments.hidden, device=device, requires_grad=True)
    weight = torch.randn(arguments.vocabulary, arguments.hidden, device=device, requires_grad=True)
    targets = torch.randint(arguments.vocabulary, (arguments.rows,), device=device)
    return rows, lambda: fused.linear_logprob(hidden, weight, targets)[0].sum().backward()


if __name__ == "__main__":
    sys.exit(main())
