"""CUDA without a GPU, for rehearsals: torch sees a device `cuda:0` that holds nothing and computes nothing.

    load()                     before torch is imported; compiles fake_cuda.cpp once per torch version (seconds)
    stand_in(name, card, gpu)  for functions of torch.cuda and Triton's launches, which must not look for a driver

Only for use in a separate process (step.py): nothing here can be undone.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

SOURCE = Path(__file__).with_suffix(".cpp")
# A torch without CUDA has no kernel for these and decomposes them; CUDA's kernels allocate only their result.
ONE_KERNEL = ("silu_backward", "_fused_rms_norm", "_fused_rms_norm_backward")
KERNELS: list[Any] = []  # registrations last as long as these


def load() -> None:
    """Give this process a fake CUDA device; a torch that was built with CUDA has its own hooks and needs none."""
    if "torch" in sys.modules:
        own = "python -m dccot.lab.rehearsal.step"
        raise RuntimeError(f"torch is imported already: a rehearsal needs a process of its own ({own})")
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.origin is not None
    folder = Path(spec.origin).parent
    if (folder / "lib" / "libtorch_cuda.so").exists():
        return
    for library in ("libc10.so", "libtorch_cpu.so"):
        ctypes.CDLL(str(folder / "lib" / library), mode=ctypes.RTLD_GLOBAL)
    ctypes.CDLL(str(_compiled(folder)))


def _compiled(torch: Path) -> Path:
    """The library, from the user's cache if this source was already compiled for this torch."""
    content = SOURCE.read_bytes() + (torch / "version.py").read_bytes() + str(torch).encode()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dccot"
    library = cache / f"fake_cuda-{hashlib.sha256(content).hexdigest()[:16]}.so"
    if library.exists():
        return library
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        raise RuntimeError("a rehearsal compiles one small C++ file and found no compiler: install g++ or set CXX")
    cache.mkdir(parents=True, exist_ok=True)
    partial = library.with_suffix(f".{os.getpid()}.partial")
    include = [f"-I{torch}/include", f"-I{torch}/include/torch/csrc/api/include"]
    command = [compiler, "-shared", "-fPIC", "-O1", "-std=c++20", *include, str(SOURCE), "-o", str(partial)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{compiler} could not compile {SOURCE}:\n{done.stderr[-2000:]}")
    os.replace(partial, library)
    return library


class _Stream:
    """A stream or an event: everything enqueued on it completes immediately."""

    cuda_stream = 0

    def __init__(self, *args: object, **kwargs: object):
        import torch

        self.device = torch.device("cuda", 0)

    def __getattr__(self, name: str) -> Callable:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: self

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def query(self) -> bool:
        return True


def stand_in(name: str, card: Any, gpu: Any) -> None:
    """Replace functions that need a driver: `card` is one of dccot/plan.py's GPUS, `gpu` counts waits and memory."""
    import torch

    from dccot.lab.rehearsal.dry_launch import check_instead_of_launching

    class Stream(_Stream):
        def synchronize(self) -> None:
            gpu.synchronised("a stream or an event is waited for")

    major, minor = divmod(int(card.arch.removeprefix("sm_")), 10)
    properties = SimpleNamespace(name=name, major=major, minor=minor, multi_processor_count=card.multiprocessors)
    replaced: dict[str, Any] = dict.fromkeys(("Stream", "Event", "current_stream", "default_stream", "stream"), Stream)
    replaced |= {
        "current_device": lambda: 0,
        "device_count": lambda: 8,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "set_device": lambda device: None,
        "synchronize": lambda device=None: gpu.synchronised("torch.cuda.synchronize"),
        "get_device_capability": lambda device=None: (major, minor),
        "get_device_properties": lambda device=None: properties,
        "get_device_name": lambda device=None: name,
        "empty_cache": lambda: None,
        "max_memory_allocated": lambda device=None: gpu.phase_peak,
        "memory_allocated": lambda device=None: gpu.total,
        "reset_peak_memory_stats": lambda device=None: None,
    }
    for function, replacement in replaced.items():
        setattr(torch.cuda, function, replacement)
    check_instead_of_launching()
    for operator in ONE_KERNEL:
        KERNELS.append(torch.library.Library("aten", "IMPL"))
        KERNELS[-1].impl(operator, _unreachable, "CUDA")


def _unreachable(*args: object) -> None:
    raise AssertionError("a fake tensor reached a CUDA kernel")
