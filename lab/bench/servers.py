"""Real servers on this machine for benchmarks: started, watched, measured, ended."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil

CONTEXT = 2048
OPTIONS = [
    "--dtype",
    "float32",
    "--max-model-len",
    str(CONTEXT),
    "--kv-cache-memory-bytes",
    str(2**30),
    "--max-num-seqs",
    "256",
]
began = time.perf_counter()


def say(text: str) -> None:
    print(f"[bench serve {time.perf_counter() - began:4.0f} s] {text}", file=sys.stderr, flush=True)


def row(name: str, value: float, unit: str = "", target: float | None = None, better: str = "lower") -> dict:
    return {"name": name, "value": value, "unit": unit, "target": target, "better": better}


@contextmanager
def server(command: list[str], folder: Path) -> Iterator[tuple[str, psutil.Process]]:
    """A server process in a group of its own; its address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = folder / f"{port}.log"
    arguments = [sys.executable, "-m", *command, "--host", "127.0.0.1", "--port", str(port), *OPTIONS]
    environment = os.environ | {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR", "OMP_NUM_THREADS": "1"}
    with open(log, "w") as out:
        process = subprocess.Popen(arguments, stdout=out, stderr=out, env=environment, start_new_session=True)
    address = f"http://127.0.0.1:{port}"
    try:
        if until(lambda: _answers(address, process, log), 300) > 300:
            raise RuntimeError(f"the server was not ready after 300 s:\n{log.read_text()[-2000:]}")
        yield address, psutil.Process(process.pid)
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)


def _answers(address: str, process: subprocess.Popen, log: Path) -> bool:
    if process.poll() is not None:
        raise RuntimeError(f"the server ended:\n{log.read_text()[-2000:]}")
    try:
        return httpx.get(f"{address}/health", timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


def until(holds: Callable[[], bool], limit: float) -> float:
    """Seconds until it holds; more than the limit if it does not."""
    start = time.perf_counter()
    while not holds() and time.perf_counter() - start <= limit:
        time.sleep(0.05)
    return time.perf_counter() - start


def metric(address: str, name: str) -> float:
    text = httpx.get(f"{address}/metrics", timeout=30).text
    return sum(float(value) for value in re.findall(rf"^{re.escape(name)}(?:{{.*}})? (\S+)$", text, re.MULTILINE))


def running(address: str) -> float:
    return sum(
        metric(address, name)
        for name in ("vllm:num_requests_running", "vllm:num_requests_waiting", "dccot_responses_running")
    )


def memory(process: psutil.Process) -> float:
    """MB of a server with its children."""
    return sum(member.memory_info().rss for member in (process, *process.children(recursive=True))) / 1e6


def cpu_seconds(process: psutil.Process) -> float:
    """Of a process with its children."""
    return sum(sum(member.cpu_times()[:2]) for member in (process, *process.children(recursive=True)))
