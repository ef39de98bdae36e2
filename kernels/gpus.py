"""The one table of GPUs: what `dccot plan`, `dccot inspect` and the benchmarks know about them.

Memory, bandwidth and TFLOP/s are the vendors' figures; the rest are limits and rates of one multiprocessor (AMD:
compute unit), rates per cycle. The clock follows from peak and multiprocessors, since that is the clock the peak is
stated for.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Gpu:
    arch: str
    memory: int  # GB
    bandwidth: int  # GB/s
    tflops: float  # bf16, dense
    multiprocessors: int
    max_warps: int
    threads_per_warp: int
    registers: int  # 32-bit, of the multiprocessor
    shared_memory: int  # bytes of the multiprocessor
    matrix_flops: int  # bf16, dense
    exponentials: int
    issue: int  # warp instructions
    l2_bytes: int

    @property
    def clock(self) -> float:
        """Cycles per second."""
        return self.tflops * 1e12 / (self.multiprocessors * self.matrix_flops)

    @property
    def dram_bytes(self) -> float:
        return self.bandwidth * 1e9 / (self.multiprocessors * self.clock)

    @property
    def shared_memory_per_program(self) -> int:
        return self.shared_memory - (1024 if self.threads_per_warp == 32 else 0)


KB = 1024
H100 = Gpu("sm_90", 80, 3350, 989, 132, 64, 32, 65536, 228 * KB, 4096, 16, 4, 48)
GPUS = {
    "A100": Gpu("sm_80", 80, 2039, 312, 108, 64, 32, 65536, 164 * KB, 2048, 16, 4, 48),
    "A6000": Gpu("sm_86", 48, 768, 155, 84, 48, 32, 65536, 100 * KB, 1024, 16, 4, 32),
    "H100": H100,
    "H200": replace(H100, memory=141, bandwidth=4800),
    "B200": Gpu("sm_100", 180, 8000, 2250, 148, 64, 32, 65536, 228 * KB, 8192, 16, 4, 48),
    "MI300X": Gpu("gfx942", 192, 5300, 1307, 304, 32, 64, 4 * 512 * 64, 64 * KB, 2048, 16, 4, 64),
}


def of_architecture(arch: str) -> Gpu:
    return next(gpu for gpu in GPUS.values() if gpu.arch == arch)
