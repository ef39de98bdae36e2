"""Tiles and backend of tree attention, measured on the GPU at hand; the table of tuning.py is the fallback.

The first time that a shape appears (heads, head dim, dtype; a tree or plain causal), each candidate must agree with the
dense oracle on a small forest and is then timed on the very tensors; the fastest is used from then on, and kept in the
user's cache per GPU, shape and versions. Candidates are up to eight tiles per kernel, then, for forward and backward
together, FlexAttention on the same tiles (`flash`) and, where the tree is plain causal, torch's own FlashAttention
(`sdpa`). `dccot inspect --tune` does it ahead of time; DCCOT_TUNE=0 leaves everything to the table.

    backend_for(q, k, v, mask, scale)        what tree_attention asks
    tune(q, k, v, mask, scale, clock)        the search itself; tests give it a stand-in clock
"""

from __future__ import annotations

import logging
import os
import statistics
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from dccot.core.files import change_cache, read_cache
from dccot.kernels.mask import TreeMask
from dccot.kernels.reference import attention_errors, with_gradients
from dccot.kernels.tuning import ATTENTION_KERNELS, CHOSEN, Tile, architecture, shape_of, tile_for

log = logging.getLogger(__name__)

MIN_TOKENS = 4096  # of a forest that is worth timing
FILE = "attention.json"
SAMPLE = torch.tensor([330] * 60 + [150] * 90 + [240] * 90 + [330] * 90)  # a trunk with two branches
OTHERS = (
    *((128, 32, 4, 3), (128, 64, 4, 3), (128, 64, 8, 3), (128, 128, 8, 2)),
    *((64, 32, 4, 3), (64, 64, 4, 3), (64, 128, 8, 3), (32, 64, 4, 3), (32, 128, 4, 3)),
)
Attend = Callable[[Tensor, Tensor, Tensor, TreeMask, float], Tensor]
Clock = Callable[[str, Callable[[], object]], float]  # (name of a candidate, runs it) → seconds


@dataclass(frozen=True)
class Choice:
    backend: str
    tiles: dict[str, Tile]  # by kernel
    seconds: dict[str, float]  # of every candidate that agreed


_CHOICES: dict[tuple, Choice | None] = {}  # of this process; None: not measured yet, so the table


def backend_for(q: Tensor, k: Tensor, v: Tensor, mask: TreeMask, scale: float) -> str:
    """The backend for tensors on a GPU; its tiles are in force."""
    if torch.compiler.is_compiling() or isinstance(q, FakeTensor) or os.environ.get("DCCOT_TUNE") == "0":
        return "triton"
    if mask.share is not None:  # a part of the queries: other backends are compared on whole forests
        return "triton"
    shape = shape_of(q, k, mask)
    if shape not in _CHOICES:
        _CHOICES[shape] = None
        if found := stored(shape, q.device):
            _use(shape, found)
    if _CHOICES[shape] is None and len(q) >= MIN_TOKENS and q.dtype != torch.float32:
        given = q.detach(), k.detach(), v.detach(), mask, scale
        torch.cuda.synchronize(q.device)
        # in a thread of its own: nothing of autograd, checkpointing or dispatch modes here sees what it does
        with ThreadPoolExecutor(1) as alone:
            found = alone.submit(_tuned_on, q.device, *given).result()
        _use(shape, keep(shape, q.device, found))
    choice = _CHOICES[shape]
    return choice.backend if choice else "triton"


def _tuned_on(device: torch.device, q: Tensor, k: Tensor, v: Tensor, mask: TreeMask, scale: float) -> Choice:
    with torch.cuda.device(device):
        return tune(q, k, v, mask, scale, _gpu_seconds, other_backends(mask))


def other_backends(mask: TreeMask) -> dict[str, Attend]:
    from dccot.kernels import attention_flex

    flash: dict[str, Attend] = {"flash": attention_flex.attend}
    return flash | {"sdpa": attend_causally} if mask.is_causal else flash


def attend_causally(q: Tensor, k: Tensor, v: Tensor, mask: TreeMask, scale: float) -> Tensor:
    """torch's own attention, FlashAttention on a GPU: for one plain causal sequence."""
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    attend = torch.nn.functional.scaled_dot_product_attention
    return attend(q, k, v, is_causal=True, scale=scale, enable_gqa=True)[0].transpose(0, 1)


def tune(
    q: Tensor, k: Tensor, v: Tensor, mask: TreeMask, scale: float, clock: Clock, others: Mapping[str, Attend]
) -> Choice:
    """The fastest tile of each kernel, and the fastest backend, among those that agree with the oracle."""
    from dccot.kernels import attention_triton

    out, lse = attention_triton.forward(q, k, v, mask, scale)
    grad = torch.randn_like(out)
    forward = lambda: attention_triton.forward(q, k, v, mask, scale)
    backward = lambda: attention_triton.backward(grad, q, k, v, out, lse, mask, scale)
    shape, agrees = shape_of(q, k, mask), _oracle(q, k, scale, mask.is_causal)
    tiles: dict[str, Tile] = {}
    seconds: dict[str, float] = {}
    for kernel in ATTENTION_KERNELS:
        found: dict[Tile, float] = {}
        for tile in candidates(kernel, architecture(q.device), q.shape[-1], q.dtype):
            name = f"{kernel} {tile}"
            with _in_force(shape, tiles | {kernel: tile}):
                took = _measure(name, agrees, _ours, clock, forward if kernel == "forward" else backward)
            if took is not None:
                found[tile] = seconds[name] = took
        if found:
            tiles[kernel] = min(found, key=lambda tile: found[tile])
    totals: dict[str, float] = {}
    for name, attend in {"triton": _ours, **others}.items():

        def step(attend: Attend = attend, again: bool = name != "triton") -> None:
            if again:  # a block's backward recomputes everything except our own attention
                attend(q, k, v, mask, scale)
            with_gradients(lambda q, k, v: attend(q, k, v, mask, scale), [q, k, v, grad])

        with _in_force(shape, tiles):
            took = _measure(name, agrees, attend, clock, step)
        totals |= {} if took is None else {name: took}
    backend = min(totals, key=lambda name: totals[name]) if totals else "triton"
    return Choice(backend, tiles, seconds | totals)


def candidates(kernel: str, arch: str, head_dim: int, dtype: torch.dtype) -> list[Tile]:
    """The table's tile, with and without TMA where there is any, and others around it: at most eight."""
    first = tile_for(kernel, arch, head_dim, dtype)
    tma = [replace(first, tma=not first.tma)] if arch in ("sm_90", "sm_100") else []
    others = [Tile(*sizes) for sizes in OTHERS if Tile(*sizes) != replace(first, tma=False)]
    return [first, *tma, *others][:8]


def _measure(name: str, agrees: Callable[[Attend], bool], attend: Attend, clock: Clock, run: Callable) -> float | None:
    """Seconds of a candidate; None if it does not agree with the oracle, or does not run at all."""
    try:
        if agrees(attend):
            return clock(name, run)
        log.warning("%s disagrees with the dense oracle on this GPU: not used", name)
    except Exception as error:  # too much shared memory, a compiler that gives up, …
        log.info("%s does not run here (%s)", name, " ".join(str(error).split())[:200])
    return None


def _ours(q: Tensor, k: Tensor, v: Tensor, mask: TreeMask, scale: float) -> Tensor:
    from dccot.kernels.tree_attention import tree_attention

    return tree_attention(q, k, v, mask, scale=scale, backend="triton")


def _oracle(q: Tensor, k: Tensor, scale: float, causal: bool) -> Callable[[Attend], bool]:
    """Whether attention over a small forest is as exact as dense PyTorch, up to a factor."""
    ends = torch.full_like(SAMPLE, len(SAMPLE)) if causal else SAMPLE
    mask, generator = TreeMask(ends, q.device), torch.Generator().manual_seed(0)
    sizes = [(len(ends), heads, q.shape[-1]) for heads in (q.shape[1], k.shape[1], k.shape[1], q.shape[1])]
    tensors = [torch.randn(size, generator=generator).to(q) for size in sizes]
    errors = attention_errors(mask.visible_until, tensors, scale)
    return lambda attend: all(share <= 1 for share in errors(lambda q, k, v: attend(q, k, v, mask, scale)).values())


@contextmanager
def _in_force(shape: tuple, tiles: Mapping[str, Tile]) -> Iterator[None]:
    before = CHOSEN.get(shape)
    CHOSEN[shape] = dict(tiles)
    try:
        yield
    finally:
        CHOSEN.pop(shape)
        if before is not None:
            CHOSEN[shape] = before


def _use(shape: tuple, choice: Choice) -> None:
    _CHOICES[shape], CHOSEN[shape] = choice, choice.tiles


def _gpu_seconds(name: str, run: Callable[[], object]) -> float:
    """Median of seven runs, after two that compile and warm up."""
    times = []
    for _ in range(9):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) / 1e3)
    return statistics.median(times[2:])


# ---- the cache: GPU and versions → shape → choice ----


def machine(device: torch.device) -> str:
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return f"{gpu}, dccot {version('dccot')}, triton {version('triton')}, torch {torch.__version__}"


def stored(shape: tuple, device: torch.device) -> Choice | None:
    found = read_cache(FILE).get(machine(device), {}).get(str(shape))
    return _parse(found) if found else None


def keep(shape: tuple, device: torch.device, choice: Choice) -> Choice:
    """Store a choice unless another process was faster; returns what is stored, so that all ranks use the same."""
    of_machine = lambda everything: everything.setdefault(machine(device), {})
    return _parse(change_cache(FILE, lambda found: of_machine(found).setdefault(str(shape), asdict(choice))))


def _parse(found: dict[str, Any]) -> Choice:
    tiles = {kernel: Tile(**tile) for kernel, tile in found["tiles"].items()}
    return Choice(found["backend"], tiles, found["seconds"])
