"""Reads compiled kernels: registers and spills, and the instruction mix of the inner loop, from NVIDIA and AMD disassembly.

An inner loop is a backward branch with no other backward branch inside. The one that counts does most of the kernel's matrix products, or
exponentials where it has none. Attention kernels have two such loops, over unmasked and over masked tiles: the shorter one is unmasked.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass

CLASSES = ("matrix", "special", "memory", "integer", "float", "other")

# Mnemonics by class, first match wins.
NVIDIA = {
    "matrix": r"HMMA|HGMMA|UTC\w*MMA",
    "special": r"MUFU",
    "memory": r"LD|ST|UTMA",
    "float": r"F[A-Z0-9]|H[A-Z]|F2|I2F",
    "integer": r"U?I[A-Z0-9]|U?LOP|U?LEA|U?SHF|U?SEL|U?PRMT|U?PLOP|U?MOV|U?VI|U?FLO|U?POPC|U?SGXT|R2|P2|U?P2|U?BMSK|CS2R|S2",
}
AMD = {
    "matrix": r"v_mfma",
    "special": r"v_(exp|log|rcp|rsq|sqrt|sin|cos)",
    "memory": r"global_|buffer_|ds_|scratch_|flat_|s_load|s_buffer",
    "float": r"v_(pk_)?(add|sub|mul|fma|fmac|mac|mad|max|min|max3|cvt|ldexp|med3)\w*_(f16|f32|f64|bf16|f32_\w+|pk_\w+)|v_cvt",
    "integer": r"v_|s_(add|sub|mul|lshl|lshr|ashr|and|or|xor|cmp|mov|cselect|bfe|not|andn2|orn2|bfm|min|max)",
}


@dataclass(frozen=True)
class Code:
    registers: int
    stack: int
    spill_instructions: int
    matrix_instruction: str | None
    loop: dict[str, int]


@dataclass(frozen=True)
class Instruction:
    mnemonic: str
    operands: str


def read(compiled) -> Code:
    """`compiled` is what triton.compile returns."""
    return _read_amd(compiled.asm["amdgcn"]) if "amdgcn" in compiled.asm else _read_nvidia(compiled.asm["cubin"], compiled.asm["ptx"])


def _read_nvidia(cubin: bytes, ptx: str) -> Code:
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = _run(knobs.nvidia.cuobjdump.path, "-res-usage", file.name)
        listing = _run(knobs.nvidia.nvdisasm.path, "-c", file.name)
    registers, stack = map(int, _find(r"REG:(\d+) STACK:(\d+)", usage).groups())
    stream = nvidia_stream(listing)
    used = re.search(r"tcgen05\.mma|wgmma\.mma_async|mma\.sync", ptx)
    return Code(registers, stack, spill_count(stream, r"LDL|STL"), used and used.group(), mix(inner_loop(stream, NVIDIA, r"BRA"), NVIDIA))


def nvidia_stream(listing: str) -> list[str | Instruction]:
    """Labels and instructions in order."""
    code = re.findall(r"^\s*(\.L_x_\d+):|^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)\s*(.*?);", listing, re.MULTILINE)
    return [label or Instruction(mnemonic, operands) for label, mnemonic, operands in code]


def _read_amd(listing: str) -> Code:
    value = {name: int(_find(rf"\.{name}:\s*(\d+)", listing).group(1)) for name in ("vgpr_count", "private_segment_fixed_size")}
    code = re.findall(r"^(\.LBB\w+):|^\s+([a-z]\w+)\s*(.*)$", listing, re.MULTILINE)
    stream = [label or Instruction(mnemonic, operands) for label, mnemonic, operands in code]
    used = re.search(r"v_mfma\w+", listing)
    loop = mix(inner_loop(stream, AMD, r"s_c?branch"), AMD)
    return Code(value["vgpr_count"], value["private_segment_fixed_size"], spill_count(stream, r"scratch_"), used and used.group(), loop)


def spill_count(stream: list[str | Instruction], pattern: str) -> int:
    return sum(_is(item, pattern) for item in stream)


def _find(pattern: str, text: str) -> re.Match[str]:
    if found := re.search(pattern, text):
        return found
    raise ValueError(f"{pattern!r} is not in the compiler's output: {text[:200]!r}")


def _run(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _is(item: str | Instruction, pattern: str) -> bool:
    return isinstance(item, Instruction) and re.match(pattern, item.mnemonic) is not None


def inner_loop(stream: list[str | Instruction], classes: dict[str, str], branch: str) -> list[Instruction]:
    """The inner loop that matters, or everything where there is none."""
    labels = {item: index for index, item in enumerate(stream) if isinstance(item, str)}
    loops = []
    for index, item in enumerate(stream):
        target = re.search(r"\.L(_x_\d+|BB\w+)", item.operands) if isinstance(item, Instruction) and _is(item, branch) else None
        if target and (start := labels.get(target.group(), index)) < index - 1:  # a branch to itself only ends the listing
            loops.append((start, index))
    inner = [a for a in loops if not any(a != b and a[0] <= b[0] and b[1] <= a[1] for b in loops)]
    bodies = [[item for item in stream[start : stop + 1] if isinstance(item, Instruction)] for start, stop in inner]
    everything = [item for item in stream if isinstance(item, Instruction)]
    work = classes["matrix"] if any(_is(item, classes["matrix"]) for item in everything) else classes["special"]
    done = [sum(_is(item, work) for item in body) for body in [*bodies, everything]]
    most = max(done[:-1], default=0)
    if 8 * most < done[-1]:
        return everything  # the compiler unrolled the loop away
    return min((body for body, count in zip(bodies, done, strict=False) if count == most), key=len)


def mix(loop: list[Instruction], classes: dict[str, str]) -> dict[str, int]:
    mix = dict.fromkeys(CLASSES, 0)
    for item in loop:
        mix[next((name for name, pattern in classes.items() if re.match(pattern, item.mnemonic)), "other")] += 1
    return mix
