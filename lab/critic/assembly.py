"""Reads compiled kernels: registers and spills, the inner loops with their source lines, and what a GPU would wait for
in them.

An inner loop is a backward branch with no other backward branch inside. The ones that count do most of the kernel's
matrix products, or exponentials where it has none. Attention kernels have two, over unmasked and over masked tiles: the
shorter one is unmasked. Of a warp-specialised kernel the loops of the warps that take the softmax are read; what the
other warps do is only named.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

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
    """One inner loop: instructions by class, how many of them overlap with a matrix product, and the loads in
    flight.
    """

    mix: dict[str, int]
    overlapped: int
    load_bytes: dict[str, int]  # width of a load in bytes → how many
    prefetch: int | None = None  # iterations whose loads are in flight while a tile's own are awaited
    fused_masked: list[int] = field(default_factory=list)  # source lines where a fused multiply-add uses a masked score
    shared_bytes: int = 0  # that the instructions of one warp move to and from shared memory, matrix products aside
    shared_left: int = 0  # matrix products that read their left operand, too, from shared memory


@dataclass(frozen=True)
class Partition:
    """Warps of a warp-specialised loop that do one part of its work, beside those of the other partitions."""

    work: str
    warps: int
    registers: int  # of a thread


@dataclass(frozen=True)
class Code:
    registers: int
    stack: int
    spill_instructions: int
    matrix_instruction: str | None
    advisories: list[str]
    loop: Loop
    edge: Loop | None
    partitions: list[list[Partition]] = field(default_factory=list)  # of each warp-specialised loop, in source order

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, stored: dict[str, Any]) -> Code:
        loops = {name: Loop(**stored[name]) if stored[name] else None for name in ("loop", "edge")}
        partitions = [[Partition(**each) for each in loop] for loop in stored["partitions"]]
        return cls(**{**stored, **loops, "partitions": partitions})


def read(compiled: Any) -> Code:
    """`compiled` is what triton.compile returns."""
    return _read_amd(compiled.asm["amdgcn"]) if "amdgcn" in compiled.asm else _read_nvidia(compiled)


def _read_nvidia(compiled: Any) -> Code:
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = _run(knobs.nvidia.cuobjdump.path, "-res-usage", file.name)
    registers, stack = map(int, _find(r"REG:(\d+) STACK:(\d+)", usage).groups())
    stream = nvidia_stream(disassemble(compiled.asm["cubin"]))
    used = re.search(r"tcgen05\.mma|wgmma\.mma_async|mma\.sync", compiled.asm["ptx"])
    partitions = read_partitions(compiled.asm["ttgir"], compiled.asm["ptx"], registers)
    distances = [] if partitions else prefetch_distances(compiled.asm["ttgir"])
    counted = NVIDIA | {"matrix": NVIDIA["special"]} if partitions else NVIDIA
    loops = [
        Loop(
            mix(body, NVIDIA),
            overlapped(body),
            load_widths(body),
            distance,
            fused_masked(body),
            shared_bytes(body),
            shared_left(body),
        )
        for body, distance in zip(inner_loops(stream, counted, r"BRA"), [*distances, None, None])
    ]
    spills = spill_count(stream, r"LDL|STL")
    edge = loops[1] if len(loops) > 1 else None
    return Code(registers, stack, spills, used and used.group(), advisories(compiled), loops[0], edge, partitions)


def read_partitions(ttgir: str, ptx: str, launched: int) -> list[list[Partition]]:
    """Per warp-specialised loop: the kernel's own warps, then the partitions.

    TTGIR has their warps. PTX has their registers: the kernel's own warps set theirs between the two barriers that
    start and release the others, and those wait in a loop and branch to their partition, which sets its own. Where PTX
    sets none, all keep the `launched` ones.
    """
    regions = re.findall(r"ttg\.warp_specialize\(.*?^ *\} : \(", ttgir, re.MULTILINE | re.DOTALL)
    if not regions:
        return []
    barrier, assign = r"barrier\.sync\s+1;\s+", r"setmaxnreg\.\w+\.sync\.aligned\.u32\s+(\d+);\s+"
    own_registers = re.findall(barrier + assign + barrier, ptx) or [launched] * len(regions)
    targets = re.findall(r"\$\w+", _find(r"\.branchtargets([^;]*);", ptx).group(1))[:-1]  # the last one ends the kernel
    per_region = len(targets) // len(regions)  # one may be for warps that only fill up a group of four
    own_warps, found = int(_find(r'"ttg\.num-warps" = (\d+)', ttgir).group(1)), []
    for number, (region, own) in enumerate(zip(regions, own_registers, strict=True)):
        bodies = re.split(r"^ *partition\d+\(", region, flags=re.MULTILINE)
        partitions = [Partition(_work(bodies[0]), own_warps, int(own))]
        for body, target in zip(bodies[1:], targets[number * per_region :]):
            entered = ptx.index(f"\n{target}:")
            assigned = re.search(assign, ptx[entered : ptx.index("barrier.sync", entered)])
            warps = int(_find(r"num_warps\((\d+)\)", body).group(1))
            partitions.append(Partition(_work(body), warps, int(assigned.group(1)) if assigned else launched))
        found.append(partitions)
    return found


def _work(ttgir: str) -> str:
    known = {"products": "gen5_mma", "softmax": "math.exp2", "loads": "async_tma_copy_global_to_local"}
    return " and ".join(name for name, operation in known.items() if operation in ttgir) or "arithmetic"


def disassemble(cubin: bytes) -> str:
    """SASS with source lines."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return _run(knobs.nvidia.nvdisasm.path, "-c", "-g", file.name)


def nvidia_stream(listing: str) -> list[str | Instruction]:
    """Labels and instructions in order; each instruction knows the source line above it."""
    pattern = r"^\s*(\.L_x_\d+):|^\s*//## File \"[^\"]*\", line (\d+)|^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)\s*(.*?);"
    stream: list[str | Instruction] = []
    line = 0
    for label, source, mnemonic, operands in re.findall(pattern, listing, re.MULTILINE):
        if source:
            line = int(source)
        else:
            stream.append(label or Instruction(mnemonic, operands, line))
    return stream


def advisories(compiled: Any) -> list[str]:
    """Performance advisories of ptxas: code and meaning."""
    from triton import knobs

    capability = compiled.metadata.target.arch
    ptxas = knobs.nvidia.ptxas_blackwell if capability >= 100 else knobs.nvidia.ptxas
    with tempfile.NamedTemporaryFile(suffix=".ptx", mode="w") as file:
        file.write(compiled.asm["ptx"])
        file.flush()
        name = f"sm_{capability}{'a' if capability >= 90 else ''}"
        said = subprocess.run(
            [ptxas.path, "-v", f"--gpu-name={name}", file.name, "-o", "/dev/null"], capture_output=True, text=True
        )
    if said.returncode:
        raise ValueError(f"ptxas rejects its own kernel: {said.stderr[-300:]}")
    codes = sorted(set(re.findall(r"\bC7\d{3}\b", said.stdout + said.stderr)))
    return [f"{code}: {SERIALISED.get(code, 'see the PTX assembler’s manual')}" for code in codes]


def prefetch_distances(ttgir: str) -> list[int | None]:
    """Per inner loop, how many iterations' loads are in flight when a tile's own are awaited; None where nothing is
    loaded ahead.
    """
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


def overlapped(body: list[Instruction]) -> int:
    """Instructions issued while a matrix product is in flight and not yet waited for; walks the loop twice to carry
    over.
    """
    pending: set[str] = set()
    count = 0
    for second in (False, True):
        for item in body:
            if re.match(NVIDIA["matrix"], item.mnemonic):
                pending.add("issued")
            elif item.mnemonic.startswith("UTCBAR"):
                pending.discard("issued")
                pending.add(item.operands.split(",")[0])
            elif item.mnemonic.startswith("WARPGROUP.DEPBAR") and item.operands.rstrip().endswith("0x0"):
                pending.clear()
            elif item.mnemonic.startswith("SYNCS.PHASECHK"):
                barrier = item.operands.split(",")[1].strip()
                pending = pending - {barrier} if barrier in pending else set()
            elif second and pending:
                count += 1
    return 0 if any(item.mnemonic.startswith("HMMA") for item in body) else count


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


def shared_bytes(body: list[Instruction]) -> int:
    """Bytes that a warp moves to and from shared memory: 32 threads each, or matrices of 8×8 numbers of 2 bytes."""
    total = 0
    for item in body:
        if found := re.match(r"(?:LDSM|STSM)\.16\.M?T?M?88(?:\.([24]))?", item.mnemonic):
            total += 128 * int(found.group(1) or 1)
        elif re.match(r"(?:LDS|STS|LDGSTS)(?!M)", item.mnemonic):
            bits = re.search(r"\.(64|128)\b", item.mnemonic)
            total += 4 * int(bits.group(1) if bits else 32)
    return total


def amd_shared_bytes(body: list[Instruction]) -> int:
    """The same for a wave of 64 threads."""
    found = [re.match(r"ds_(?:read|write)(2)?(?:st64)?_b(\d+)", item.mnemonic) for item in body]
    return sum(8 * int(match.group(2)) * (2 if match.group(1) else 1) for match in found if match)


def shared_left(body: list[Instruction]) -> int:
    """Of a warp group's product the operand after the destination is the left one, of tcgen05's the first; the right
    one always is.
    """
    left = [
        item.operands.split(",")[item.mnemonic.startswith("HGMMA")]
        for item in body
        if re.match(r"HGMMA|UTC\w*MMA", item.mnemonic)
    ]
    return sum(operand.strip().startswith("gdesc") for operand in left)


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


def _read_amd(listing: str) -> Code:
    value = {
        name: int(_find(rf"\.{name}:\s*(\d+)", listing).group(1))
        for name in ("vgpr_count", "private_segment_fixed_size")
    }
    code = re.findall(r"^(\.LBB\w+):|^\s+([a-z]\w+)\s*(.*)$", listing, re.MULTILINE)
    stream = [label or Instruction(mnemonic, operands) for label, mnemonic, operands in code]
    used = re.search(r"v_mfma\w+", listing)
    loops = [
        Loop(mix(body, AMD), 0, {}, shared_bytes=amd_shared_bytes(body))
        for body in inner_loops(stream, AMD, r"s_c?branch")
    ]
    spills = spill_count(stream, r"scratch_")
    edge = loops[1] if len(loops) > 1 else None
    return Code(
        value["vgpr_count"], value["private_segment_fixed_size"], spills, used and used.group(), [], loops[0], edge
    )


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


def inner_loops(stream: list[str | Instruction], classes: dict[str, str], branch: str) -> list[list[Instruction]]:
    """The inner loops that matter, shortest first; the whole code if there is none."""
    labels = {item: index for index, item in enumerate(stream) if isinstance(item, str)}
    loops = []
    for index, item in enumerate(stream):
        target = (
            re.search(r"\.L(_x_\d+|BB\w+)", item.operands)
            if isinstance(item, Instruction) and _is(item, branch)
            else None
        )
        if (
            target and (start := labels.get(target.group(), index)) < index - 1
        ):  # a branch to itself only ends the listing
            loops.append((start, index))
    inner = [a for a in loops if not any(a != b and a[0] <= b[0] and b[1] <= a[1] for b in loops)]
    bodies = [[item for item in stream[start : stop + 1] if isinstance(item, Instruction)] for start, stop in inner]
    everything = [item for item in stream if isinstance(item, Instruction)]
    work = classes["matrix"] if any(_is(item, classes["matrix"]) for item in everything) else classes["special"]
    done = [sum(_is(item, work) for item in body) for body in [*bodies, everything]]
    most = max(done[:-1], default=0)
    if 8 * most < done[-1]:
        return [everything]  # the compiler unrolled the loop away
    return sorted((body for body, count in zip(bodies, done, strict=False) if count == most), key=len)


def mix(loop: list[Instruction], classes: dict[str, str]) -> dict[str, int]:
    mix = dict.fromkeys(CLASSES, 0)
    for item in loop:
        mix[next((name for name, pattern in classes.items() if re.match(pattern, item.mnemonic)), "other")] += 1
    return mix
