"""Compiles kernels for GPUs that are not present.  Triton needs no GPU for that, and its package includes ptxas,
cuobjdump and nvdisasm.

What is read from a compiled kernel (assembly.py) is cached next to it in Triton's cache.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dccot.kernels.tuning import ATTENTION_KERNELS, STRETCH, STRETCH_WARPS, TABLE, Tile, check
from dccot.lab.critic import assembly

GROUP = 6  # query heads per key head; affects only two divisions in the compiled code
STRIDES = ("_n", "_h", "_stride", "width")
TENSORS = ("Q", "K", "V", "GRAD")
INTEGERS = (
    "visible_until",
    "subtree",
    "starts",
    "stops",
    "slots",
    "firsts",
    "middles",
    "lasts",
    "tile_start",
    "tile_stop",
)


@dataclass(frozen=True)
class Configuration:
    kernel: str
    arch: str
    head_dim: int = 0  # 0: the LM head's kernels have none
    tile: Tile | None = None
    dtype: str = "bf16"

    def __str__(self) -> str:
        if self.tile is None:
            return f"{self.arch} {self.kernel}"
        return f"{self.arch} {self.kernel} head_dim {self.head_dim} {self.tile.block_q}×{self.tile.block_k}"

    @property
    def warps(self) -> int:
        return self.tile.warps if self.tile else STRETCH_WARPS


@dataclass(frozen=True)
class Examined:
    code: assembly.Code
    shared_memory: int
    tensor_memory: int
    warps: int  # of all partitions


def configurations(archs: Iterable[str]) -> list[Configuration]:
    """Everything that ships: the attention table for each architecture, and the two kernels of the LM head."""
    found = []
    for arch in archs:
        if arch not in TABLE:
            raise ValueError(f"unknown architecture {arch!r}: choose from {', '.join(TABLE)}")
        for head_dim, tiles in TABLE[arch].items():
            found += [
                Configuration(kernel, arch, head_dim, tile)
                for kernel, tile in zip(ATTENTION_KERNELS, tiles, strict=True)
            ]
        found += [Configuration("statistics", arch), Configuration("gradient", arch)]
    return found


def examine(config: Configuration) -> Examined:
    from triton.runtime.cache import get_cache_manager

    compiled = compile_kernel(config)
    reader = hashlib.sha256(Path(assembly.__file__).read_bytes()).hexdigest()[:16]
    cache, name = get_cache_manager(compiled.metadata.hash), f"dccot-{reader}.json"
    if (stored := cache.get_file(name)) is None:
        stored = cache.put(json.dumps(assembly.read(compiled).as_dict()), name, binary=False)
    code = assembly.Code.from_dict(json.loads(Path(stored).read_text()))
    metadata = compiled.metadata
    return Examined(code, metadata.shared, getattr(metadata, "tmem_size", 0) or 0, metadata.num_warps)


def compile_kernel(config: Configuration) -> Any:
    import triton
    from triton.backends.compiler import GPUTarget

    from dccot.kernels import attention_triton
    from dccot.kernels import lm_head_triton as logprob_triton

    module = attention_triton if config.tile else logprob_triton
    kernel = getattr(module, f"{config.kernel}_kernel")
    signature = {name: _type(name, config) for name in kernel.arg_names}
    # What the launcher infers about its arguments: tensors and their strides are multiples of 16, the rest can be
    # anything.
    known = [p.name for p in kernel.params if not p.do_not_specialize]
    aligned = [name for name in known if signature[name][0] == "*" or name.endswith(STRIDES)]
    constants = {"BLOCK": STRETCH}
    if config.tile:
        check(config.kernel, config.tile)
        sizes = {"D": config.head_dim, "BLOCK_Q": config.tile.block_q, "BLOCK_K": config.tile.block_k}
        constants = {
            "GROUP": GROUP,
            "UPCAST": False,
            "TMA": config.tile.tma,
            "WARP_SPECIALIZE": config.tile.warp_specialize,
        } | sizes
    source = triton.compiler.ASTSource(
        kernel, signature,
        {name: value for name, value in constants.items() if name in signature},
        {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )  # fmt: skip
    target = (
        GPUTarget("hip", config.arch, 64)
        if config.arch.startswith("gfx")
        else GPUTarget("cuda", int(config.arch[3:]), 32)
    )
    options = {"num_warps": config.warps} | ({"num_stages": config.tile.stages} if config.tile else {})
    return triton.compile(source, target=target, options=options)


def _type(argument: str, config: Configuration) -> str:
    """Triton's type of a kernel argument, by the naming rule of the kernels: UPPER tensors of numbers, lower
    integers.
    """
    if argument in TENSORS and config.tile and config.tile.tma:
        rows = config.tile.block_k if argument in ("K", "V") else config.tile.block_q
        return f"tensordesc<{config.dtype}[{rows}, {config.head_dim}]>"
    if argument in (*TENSORS, "OUT", "DQ", "DK", "DV", "GRADIENT"):
        return f"*{config.dtype}"
    if argument in ("LSE", "DELTA", "LOGITS", "STATISTICS", "ROW_VALUES") or argument.startswith("PART"):
        return "*fp32"
    if argument in INTEGERS:
        return "*i32"
    if argument == "targets":
        return "*i64"
    if argument in ("scale", "inverse_temperature"):
        return "fp32"
    return "i32" if argument == "N" or argument.islower() or argument.endswith(("_n", "_h")) else "constexpr"
