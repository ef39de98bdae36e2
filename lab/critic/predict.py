"""From machine code to TFLOP/s: what a kernel would reach on a GPU that is not present.  A prediction, never a
measurement.

Cycles of one iteration of an inner loop, per multiprocessor (rates from gpus.py, instructions from assembly.py):

    matrix       matrix products / peak rate
    exponential  special-function instructions / their rate
    issue        all instructions / instructions per cycle
    memory       bytes of the streamed tile / L2 bandwidth
    shared       bytes to and from shared memory / its bandwidth; what wgmma and tcgen05 read there is most of it, and more for small tiles
    in sequence  max(matrix, shared) + max(exponential, issue) − what the code issues while a product is in flight + BARRIERS, over the
                 resident programs; nothing is hidden where ptxas serialises the products, and loads that do not run ahead are waited for

The largest bounds the iteration. It is applied to the simulated schedule of a tree (balance.py), with masked tiles at
their own loop's cost. Peak rates are never sustained: SUSTAINED is the share that large matrix products reach (power
limits the clock).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from dccot.kernels import balance, schedule
from dccot.kernels.gpus import Gpu
from dccot.kernels.mask import positions
from dccot.kernels.tuning import STRETCH
from dccot.lab.critic.assembly import Loop
from dccot.lab.critic.compiling import Configuration, Examined

SUSTAINED = 0.70
BARRIERS = 100  # cycles that an iteration waits at barriers and for the last bits of its products: an estimate
SHARED_BANDWIDTH = 128  # bytes per cycle and multiprocessor, on all of them
PRODUCTS = {"forward": 2, "grad_query": 3, "grad_key": 4}
COUNTED_BACKWARD = 5  # products counted for dQ and dK/dV together, by convention; 7 are computed


@dataclass(frozen=True)
class Prediction:
    """One attention kernel over one tree."""

    seconds: float
    tflops: float  # on visible pairs, counting this kernel's own products
    busy: float  # share of busy multiprocessors
    useful: float  # share of computed pairs that are visible, masked tiles at their own cost
    edge_cost: float  # cost of a masked tile relative to an unmasked one


def cycles(config: Configuration, gpu: Gpu, loop: Loop, programs: int, serialised: bool = False) -> dict[str, float]:
    """Estimated cycles of a multiprocessor per iteration, by what they are spent on."""
    scalar = {
        "exponential": loop.mix["special"] * config.warps * gpu.threads_per_warp / gpu.exponentials,
        "issue": sum(loop.mix.values()) * config.warps / gpu.issue,
    }
    if config.tile is None:
        return scalar | {"memory": 4 * STRETCH * (1.5 if config.kernel == "gradient" else 1) / gpu.dram_bytes}
    flops = 2 * PRODUCTS[config.kernel] * config.tile.block_q * config.tile.block_k * config.head_dim
    own, streamed = (config.tile.block_q, config.tile.block_k)[:: -1 if config.kernel == "grad_key" else 1]
    loaded = 2 * 2 * streamed * config.head_dim  # bytes of the streamed tile
    moved = loop.shared_bytes * config.warps + loaded * config.tile.tma + _operand_bytes(config, loop, flops, own)
    matrix, memory, shared = flops / gpu.matrix_flops, loaded / gpu.l2_bytes, moved / SHARED_BANDWIDTH
    product = max(matrix, shared)
    hidden = 0 if serialised else min(product, loop.overlapped * config.warps / gpu.issue)
    waited = memory if loop.prefetch == 0 else 0
    in_sequence = (product + max(scalar.values()) - hidden + waited + BARRIERS) / max(programs, 1)
    return scalar | {"matrix": matrix, "memory": memory, "shared": shared, "in sequence": in_sequence}


def _operand_bytes(config: Configuration, loop: Loop, flops: int, own: int) -> float:
    """What the products of an iteration read from shared memory themselves.

    An instruction multiplies `rows` × 16 by 16 × some columns: all columns of all instructions follow from the flops,
    and for each of them 16 numbers of 2 bytes are read.
    """
    if config.arch not in ("sm_90", "sm_100"):
        return 0.0
    rows, groups = (64, config.warps // 4) if config.arch == "sm_90" else (min(128, own), 1)
    return 32 * (flops / (2 * rows * 16) + rows * loop.shared_left * groups)


def predict(
    config: Configuration,
    examined: Examined,
    programs: int,
    gpu: Gpu,
    visible_until: Tensor,
    heads: int,
    key_heads: int,
) -> Prediction:
    assert config.tile is not None
    code = examined.code
    iteration, edge = (
        max(cycles(config, gpu, each, programs, bool(code.advisories)).values())
        for each in (code.loop, code.edge or code.loop)
    )
    built = schedule.build(visible_until, config.tile.block_q, config.tile.block_k)
    by_key = config.kernel == "grad_key"
    lists, copies, repeat = (built.by_key, key_heads, heads // key_heads) if by_key else (built.by_query, heads, 1)
    plan = balance.plan(lists, gpu.multiprocessors, copies, repeat)
    _, _, slot, first, middle, last = (column.numpy() for column in plan.programs[:6])
    overhead = balance.PROGRAM_COST + balance.SLOT_COST * (slot >= 0)
    costs = iteration * ((middle - first) + overhead) + edge * (last - middle)
    busy, makespan = balance.simulate(costs, gpu.multiprocessors, copies)
    pairs = int((positions(visible_until) + 1).sum())
    seconds = makespan / (gpu.clock * SUSTAINED)
    flops = 2.0 * PRODUCTS[config.kernel] * config.head_dim * heads * pairs
    visits = np.array([built.visited - built.edges[by_key], built.edges[by_key]]) @ [1, edge / iteration]
    useful = pairs / (float(visits) * config.tile.block_q * config.tile.block_k)
    return Prediction(seconds, flops / seconds / 1e12, busy, useful, edge / iteration)


def backward_tflops(predictions: dict[str, Prediction]) -> float:
    """dQ and dK/dV together, with the products that published figures count."""
    counted = (
        COUNTED_BACKWARD / PRODUCTS["grad_query"] * predictions["grad_query"].tflops * predictions["grad_query"].seconds
    )
    return counted / (predictions["grad_query"].seconds + predictions["grad_key"].seconds)
