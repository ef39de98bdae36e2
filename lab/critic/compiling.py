"""Compiles kernels for GPUs that are not present: Triton needs none, and its package has ptxas, cuobjdump and nvdisasm.

What is read from a compiled kernel (assembly.py) is cached next to it in Triton's cache.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dccot.kernels.tuning import ATTENTION_KERNELS, HEAD_COLUMNS, HEAD_WARPS, TABLE, Tile
from dccot.lab.critic import assembly

GROUP = 6  # query heads per key head; affects only two divisions in the compiled code
STRIDES = ("_n", "_h", "_stride", "width")
TENSORS = ("Q", "K", "V", "GRAD")
TYPES = {  # of the arguments that are not integers or compile-time constants; upper-case tensors hold numbers
    **dict.fromkeys(("LSE", "DELTA", "LOGITS", "STATISTICS", "ROW_VALUES"), "*fp32"),
    **dict.fromkeys(("PART", "PART_LSE", "PART_K", "PART_V"), "*fp32"),
    **dict.fromkeys(("visible_until", "subtree", "starts", "stops", "slots"), "*i32"),
    **dict.fromkeys(("firsts", "middles", "lasts", "tile_start", "tile_stop", "rows", "tile_rows"), "*i32"),
    **{"targets": "*i64", "scale": "fp32", "inverse_temperature": "fp32", "M": "i32", "N": "i32"},
}


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


def configurations(archs: Iterable[str]) -> list[Configuration]:
    """Everything that ships: the attention table for each architecture, and the two kernels of the LM head."""
    found = []
    for arch in archs:
        if arch not in TABLE:
            raise ValueError(f"unknown architecture {arch!r}: choose from {', '.join(TABLE)}")
        for head_dim, tiles in TABLE[arch].items():
            found += [Configuration(name, arch, head_dim, tile) for name, tile in zip(ATTENTION_KERNELS, tiles)]
        found += [Configuration("statistics", arch), Configuration("gradient", arch)]
    return found


def examine(config: Configuration) -> assembly.Code:
    from triton.runtime.cache import get_cache_manager

    compiled = compile_kernel(config)
    reader = hashlib.sha256(Path(assembly.__file__).read_bytes()).hexdigest()[:16]
    cache, name = get_cache_manager(compiled.metadata.hash), f"dccot-{reader}.json"
    if (stored := cache.get_file(name)) is None:
        stored = cache.put(json.dumps(asdict(assembly.read(compiled))), name, binary=False)
    return assembly.Code.from_dict(json.loads(Path(stored).read_text()))


def compile_kernel(config: Configuration) -> Any:
    import triton
    from triton.backends.compiler import GPUTarget

    from dccot.kernels import attention_triton, lm_head_triton

    tile = config.tile
    kernel = getattr(attention_triton if tile else lm_head_triton, f"{config.kernel}_kernel")
    signature = {parameter.name: _type(parameter, config) for parameter in kernel.params}
    # What the launcher infers about its arguments: tensors and their strides are multiples of 16, the rest can be
    # anything.
    known = [p.name for p in kernel.params if not p.do_not_specialize]
    aligned = [name for name in known if signature[name][0] == "*" or name.endswith(STRIDES)]
    attributes = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    constants: dict[str, Any] = {"BLOCK": HEAD_COLUMNS}
    options = {"num_warps": HEAD_WARPS}
    if tile:
        sizes = {"D": config.head_dim, "BLOCK_Q": tile.block_q, "BLOCK_K": tile.block_k}
        constants = {"GROUP": GROUP, "UPCAST": False, "TMA": tile.tma, **sizes}
        options = {"num_warps": tile.warps, "num_stages": tile.stages}
    source = triton.compiler.ASTSource(kernel, signature, constants, attributes)
    amd = config.arch.startswith("gfx")
    target = GPUTarget("hip", config.arch, 64) if amd else GPUTarget("cuda", int(config.arch[3:]), 32)
    return triton.compile(source, target=target, options=options)


def _type(parameter: Any, config: Configuration) -> str:
    """Triton's type of a kernel's argument."""
    name, tile = parameter.name, config.tile
    if parameter.is_constexpr:
        return "constexpr"
    if name in TENSORS and tile and tile.tma:
        return f"tensordesc<{config.dtype}[{tile.block_k if name in ('K', 'V') else tile.block_q}, {config.head_dim}]>"
    return TYPES.get(name) or (f"*{config.dtype}" if name.isupper() else "i32")
