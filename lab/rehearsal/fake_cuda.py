"""CUDA without a GPU, for rehearsals: torch sees a device `cuda:0` that holds nothing and computes nothing.

    load()                  before torch is imported; compiles fake_cuda.cpp once per torch version (seconds)
    stand_in(name, card, gpu)  the functions of torch.cuda, and Triton's launches (dry_launch.py), that must not look for a driver

Only for use in a separate process (rehearsal.py): nothing here can be undone.
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
# A torch without CUDA decomposes these, because it has no kernel for them; one with CUDA has a kernel, which allocates
# only its result.
ONE_KERNEL = ("silu_backward", "_fused_rms_norm", "_fused_rms_norm_backward")
KERNELS: list[Any] = []  # registrations last as long as these


def load() -> None:
    """Give this process a fake CUDA device. A torch that was built with CUDA has its own hooks and needs none of
    ours.
    """
    if "torch" in sys.modules:
        raise RuntimeError(
            "torch is imported already: a rehearsal needs a process of its own (python -m dccot.lab.rehearsal.step)"
        )
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
    identity = hashlib.sha256(
        SOURCE.read_bytes() + (torch / "version.py").read_bytes() + str(torch).encode()
    ).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dccot"
    library = cache / f"fake_cuda-{identity}.so"
    if not library.exists():
        compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
        if compiler is None:
            raise RuntimeError("a rehearsal compiles one small C++ file and found no compiler: install g++ or set CXX")
        cache.mkdir(parents=True, exist_ok=True)
        partial = library.with_suffix(f".{os.getpid()}.partial")
        include = [f"-I{torch}/include", f"-I{torch}/include/torch/csrc/api/include"]
        done = subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-std=c++20", *include, str(SOURCE), "-o", str(partial)],
                              capture_output=True, text=True)  # fmt: skip
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
    """Replace functions that need a driver: `card` is one of train/plan.py's GPUS, `gpu` counts synchronisations and
    memory (fake_gpu.py).
    """
    import torch

    from dccot.lab.rehearsal.dry_launch import check_instead_of_launching

    class Stream(_Stream):
        def synchronize(self) -> None:
            gpu.synchronised("a stream or an event is waited for")

    capability = divmod(int(card.arch.removeprefix("sm_")), 10)
    properties = SimpleNamespace(
        name=name, major=capability[0], minor=capability[1], multi_processor_count=card.multiprocessors
    )
    replaced: dict[str, Any] = {
        "Stream": Stream,
        "Event": Stream,
        "current_stream": Stream,
        "default_stream": Stream,
        "stream": Stream,
        "current_device": lambda: 0,
        "device_count": lambda: 8,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "set_device": lambda device: None,
        "synchronize": lambda device=None: gpu.synchronised("torch.cuda.synchronize"),
        "get_device_capability": lambda device=None: capability,
        "get_device_properties": lambda device=None: properties,
        "get_device_name": lambda device=None: name,
        "empty_cache": lambda: None,
        "max_memory_allocated": lambda device=None: gpu.phase_peak,
        "memory_allocated": lambda device=None: gpu.total,
        "reset_peak_memory_stats": lambda device=None: None,
    }
    for function, stand_in_for_it in replaced.items():
        setattr(torch.cuda, function, stand_in_for_it)
    check_instead_of_launching()
    for operator in ONE_KERNEL:
        KERNELS.append(torch.library.Library("aten", "IMPL"))
        KERNELS[-1].impl(operator, _unreachable, "CUDA")


def _unreachable(*args: object) -> None:
    raise AssertionError("a fake tensor reached a CUDA kernel")
