"""Reads compiled kernels: registers and spills, and the inner loops with their source lines.

An inner loop is a backward branch with no other backward branch inside. The ones that count do most of the kernel's
matrix products, or exponentials where it has none. Attention kernels have two, over unmasked and over masked tiles: the
shorter one is unmasked.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

CLASSES = ("matrix", "special", "memory", "integer", "float", "other")

# Mnemonics by class, first match wins.
NVIDIA = {
    "matrix": r"HMMA|HGMMA|UTC\w*MMA",
    "special": r"MUFU",
    "memory": r"LD|ST|UTMA",
    "float": r"F[A-Z0-9]|H[A-Z]|F2|I2F",
    "integer": r"U?(I[A-Z0-9]|LOP|LEA|SHF|SEL|PRMT|PLOP|MOV|VI|FLO|POPC|SGXT|P2|BMSK)|R2|CS2R|S2",
}
AMD = {
    "matrix": r"v_mfma",
    "special": r"v_(exp|log|rcp|rsq|sqrt|sin|cos)",
    "memory": r"global_|buffer_|ds_|scratch_|flat_|s_load|s_buffer",
    "float": r"v_(pk_)?(add|sub|mul|fma|fmac|mac|mad|max|min|max3|cvt|ldexp|med3)\w*_(f16|f32|f64|bf16|pk_\w+)|v_cvt",
    "integer": r"v_|s_(add|sub|mul|lshl|lshr|ashr|and|or|xor|cmp|mov|cselect|bfe|not|andn2|orn2|bfm|min|max)",
}
SERIALISED = {
    "C7510": "wgmma is serialised",
    "C7514": "wgmma is serialised: insufficient registers",
    "C7515": "wgmma is serialised: its accumulators are touched by other instructions while it runs",
}


@dataclass(frozen=True)
class Instruction:
    mnemonic: str
    operands: str
    line: int = 0  # in the Python source


@dataclass(frozen=True)
class Loop:
    """One inner loop: instructions by class and its loads."""

    mix: dict[str, int]
    load_bytes: dict[str, int] = field(default_factory=dict)  # width of a load in bytes → how many
    prefetch: int | None = None  # iterations whose loads are in flight while a tile's own are awaited
    fused_masked: list[int] = field(default_factory=list)  # source lines where a fused multiply-add uses a masked score


@dataclass(frozen=True)
class Code:
    registers: int
    stack: int  # bytes of stack frame: anything here is a spill
    spill_instructions: int  # loads and stores of local (scratch) memory
    matrix_instruction: str | None
    advisories: list[str]
    loops: list[Loop]  # over unmasked, over masked tiles
    shared_memory: int
    tensor_memory: int
    warps: int

    @classmethod
    def from_dict(cls, stored: dict[str, Any]) -> Code:
        return cls(**stored | {"loops": [Loop(**loop) for loop in stored["loops"]]})


def read(compiled: Any) -> Code:
    """`compiled` is what triton.compile returns."""
    metadata = compiled.metadata
    sizes = metadata.shared, getattr(metadata, "tmem_size", 0) or 0, metadata.num_warps
    return _read_amd(compiled.asm["amdgcn"], sizes) if "amdgcn" in compiled.asm else _read_nvidia(compiled, sizes)


def _read_nvidia(compiled: Any, sizes: tuple[int, int, int]) -> Code:
    from triton import knobs

    usage = _run_on(compiled.asm["cubin"], knobs.nvidia.cuobjdump.path, "-res-usage")
    registers, stack = map(int, _find(r"REG:(\d+) STACK:(\d+)", usage).groups())
    stream = nvidia_stream(disassemble(compiled.asm["cubin"]))
    used = re.search(r"tcgen05\.mma|wgmma\.mma_async|mma\.sync", compiled.asm["ptx"])
    distances = [*prefetch_distances(compiled.asm["ttgir"]), None, None]
    bodies = inner_loops(stream, NVIDIA, r"BRA")[:2]
    loops = [
        Loop(mix(body, NVIDIA), load_widths(body), distance, fused_masked(body))
        for body, distance in zip(bodies, distances)
    ]
    spills, said = count(stream, r"LDL|STL"), advisories(compiled)
    return Code(registers, stack, spills, used and used.group(), said, loops, *sizes)


def _read_amd(listing: str, sizes: tuple[int, int, int]) -> Code:
    value = lambda name: int(_find(rf"\.{name}:\s*(\d+)", listing).group(1))
    code = re.findall(r"^(\.LBB\w+):|^\s+([a-z]\w+)\s*(.*)$", listing, re.MULTILINE)
    stream = [label or Instruction(mnemonic, operands) for label, mnemonic, operands in code]
    used = re.search(r"v_mfma\w+", listing)
    loops = [Loop(mix(body, AMD)) for body in inner_loops(stream, AMD, r"s_c?branch")[:2]]
    stack, spills = value("private_segment_fixed_size"), count(stream, r"scratch_")
    return Code(value("vgpr_count"), stack, spills, used and used.group(), [], loops, *sizes)


def disassemble(cubin: bytes) -> str:
    """SASS with source lines."""
    from triton import knobs

    return _run_on(cubin, knobs.nvidia.nvdisasm.path, "-c", "-g")


def nvidia_stream(listing: str) -> list[str | Instruction]:
    """Labels and instructions in order; each instruction knows the source line above it."""
    label, source = r"^\s*(\.L_x_\d+):", r"^\s*//## File \"[^\"]*\", line (\d+)"
    instruction = r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)\s*(.*?);"
    stream: list[str | Instruction] = []
    line = 0
    for name, at, mnemonic, operands in re.findall(f"{label}|{source}|{instruction}", listing, re.MULTILINE):
        if at:
            line = int(at)
        else:
            stream.append(name or Instruction(mnemonic, operands, line))
    return stream


def advisories(compiled: Any) -> list[str]:
    """Performance advisories of ptxas: code and meaning."""
    from triton import knobs

    capability = compiled.metadata.target.arch
    ptxas = knobs.nvidia.ptxas_blackwell if capability >= 100 else knobs.nvidia.ptxas
    target = f"--gpu-name=sm_{capability}{'a' if capability >= 90 else ''}"
    said = _run_on(compiled.asm["ptx"].encode(), ptxas.path, "-v", target, "-o", "/dev/null")
    codes = sorted(set(re.findall(r"\bC7\d{3}\b", said)))
    return [f"{code}: {SERIALISED.get(code, 'see the PTX assembler’s manual')}" for code in codes]


def prefetch_distances(ttgir: str) -> list[int | None]:
    """Per inner loop, how many iterations' loads are in flight when a tile's own are awaited; None: none run ahead."""
    found: list[int | None] = []
    for match in re.finditer(r"^( *)\S+ = scf\.for .*?\n(.*?)^\1}", ttgir, re.MULTILINE | re.DOTALL):
        body = match.group(2)
        waits = [int(number) for number in re.findall(r"async_wait[^\n]*num = (\d+)", body)]
        groups = body.count("async_commit_group")
        distances = [min(waits) // groups] if waits and groups else []
        if "async_tma_copy_global_to_local" in body:
            rings = [int(number) for number in re.findall(r"memdesc<(\d+)x1xi64", ttgir[: match.start()] + body)]
            distances.append(max(rings, default=1) - 2)
        found.append(min(distances, default=None))
    return found


def load_widths(body: list[Instruction]) -> dict[str, int]:
    """Global loads by their width in bytes; a tensor descriptor's are whole tiles."""
    widths: Counter[str] = Counter()
    for item in body:
        if item.mnemonic.startswith("UTMALDG"):
            widths["tile"] += 1
        elif re.match(r"LDG(?!DEPBAR)", item.mnemonic):
            bits = re.search(r"\.(32|64|128|256)\b", item.mnemonic)
            widths[str(int(bits.group(1)) // 8 if bits else 4)] += 1
    return dict(widths)


def fused_masked(body: list[Instruction]) -> list[int]:
    """Lines where a fused multiply-add multiplies the result of a select with anything but 0."""
    masked: set[str] = set()
    lines = set()
    for item in body:
        registers = re.findall(r"\bR(?:\d+|Z)\b", item.operands)
        if item.mnemonic.startswith("FFMA") and masked & set(registers[1:3]):
            lines.add(item.line)
        if registers:
            masked.discard(registers[0])
            if item.mnemonic.startswith(("FSEL", "SEL")) and "RZ" not in registers:
                masked.add(registers[0])
    return sorted(lines)


def inner_loops(stream: list[str | Instruction], classes: dict[str, str], branch: str) -> list[list[Instruction]]:
    """The inner loops that matter, shortest first; the whole code if there is none."""
    labels = {item: index for index, item in enumerate(stream) if isinstance(item, str)}
    loops = []
    for index, item in enumerate(stream):
        if isinstance(item, Instruction) and re.match(branch, item.mnemonic):
            target = re.search(r"\.L(_x_\d+|BB\w+)", item.operands)
            start = labels.get(target.group(), index) if target else index
            if start < index - 1:  # a branch to itself only ends the listing
                loops.append((start, index))
    inner = [a for a in loops if not any(a != b and a[0] <= b[0] and b[1] <= a[1] for b in loops)]
    bodies = [[item for item in stream[start : stop + 1] if isinstance(item, Instruction)] for start, stop in inner]
    work = classes["matrix"] if count(stream, classes["matrix"]) else classes["special"]
    done = [count(body, work) for body in bodies]
    if 8 * max(done, default=0) < count(stream, work):  # the compiler unrolled the loop away
        return [[item for item in stream if isinstance(item, Instruction)]]
    return sorted((body for body, found in zip(bodies, done) if found == max(done)), key=len)


def mix(loop: list[Instruction], classes: dict[str, str]) -> dict[str, int]:
    found = dict.fromkeys(CLASSES, 0)
    for item in loop:
        found[next((name for name, pattern in classes.items() if re.match(pattern, item.mnemonic)), "other")] += 1
    return found


def count(stream: list[Any], pattern: str) -> int:
    return sum(isinstance(item, Instruction) and re.match(pattern, item.mnemonic) is not None for item in stream)


def _find(pattern: str, text: str) -> re.Match[str]:
    if found := re.search(pattern, text):
        return found
    raise ValueError(f"{pattern!r} is not in the compiler's output: {text[:200]!r}")


def _run_on(content: bytes, tool: str, *options: str) -> str:
    """What a tool of the CUDA toolkit says about a file with this content."""
    with tempfile.NamedTemporaryFile() as file:
        file.write(content)
        file.flush()
        done = subprocess.run([tool, *options, file.name], capture_output=True, text=True)
    if done.returncode:
        raise ValueError(f"{tool} failed: {(done.stderr or done.stdout)[-300:]}")
    return done.stdout + done.stderr
