"""Real vLLM servers on loopback, in processes of their own."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import httpx

from dccot.rollout.engine import ONE_PROCESS, as_flags, vllm_options
from tests.support import programs

ROOT = Path(__file__).parents[2]
KEY = "a key for tests"
SIZES = {"dtype": "float32", "max_model_len": 1024, "kv_cache_memory_bytes": 2**27, "max_num_seqs": 64}
PLAIN = vllm_options(on_gpu=False) | {"distributed_executor_backend": ONE_PROCESS} | SIZES
PLUGINS = {"dccot": "dccot.serve.plugin:Plugin", "dccot_faults": "tests.support.serve_faults:Plugin"}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def eventually(holds: Callable[[], bool], seconds: float = 300.0) -> bool:
    deadline = time.monotonic() + seconds
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.05)
    return holds()


class Server:
    """A server process; `address` is where it listens. Its output is in `log`."""

    def __init__(self, command: Sequence[str], log: Path, environment: dict[str, str], port: int):
        self.port, self.address, self.log = port, f"http://127.0.0.1:{port}", log
        paths = [environment.get("PYTHONPATH"), str(ROOT), os.environ.get("PYTHONPATH")]
        kept = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")}
        kept |= environment | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
        kept |= {"OMP_NUM_THREADS": "1"}  # enough for tiny models; servers do not wait for each other's threads
        with open(log, "w") as out:
            streams = {"stdout": out, "stderr": subprocess.STDOUT}
            self.process = programs.Popen(command, **streams, cwd=log.parent, env=kept, start_new_session=True)

    def ready(self, seconds: float = 900) -> Server:
        def answers() -> bool:
            assert self.process.poll() is None, f"the server ended:\n{self.log.read_text()[-3000:]}"
            try:
                return httpx.get(f"{self.address}/health", timeout=60).status_code == 200
            except httpx.HTTPError:
                return False

        assert eventually(answers, seconds), f"not ready after {seconds} s:\n{self.log.read_text()[-3000:]}"
        return self

    def metric(self, name: str) -> float:
        """Sum of a metric over its labels."""
        text = httpx.get(f"{self.address}/metrics", timeout=300, headers={"Authorization": f"Bearer {KEY}"}).text
        return sum(float(value) for value in re.findall(rf"^{re.escape(name)}(?:{{.*}})? (\S+)$", text, re.MULTILINE))

    def running(self) -> float:
        return self.metric("vllm:num_requests_running") + self.metric("vllm:num_requests_waiting")

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(300)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def plugins(folder: Path) -> str:
    """A folder for PYTHONPATH that registers the plugins, so that no installation is needed."""
    info = folder / "dccot_tests-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: dccot-tests\nVersion: 0\n")
    points = "".join(f"{name} = {where}\n" for name, where in PLUGINS.items())
    general = "[vllm.general_plugins]\ndccot = dccot.serve.orphan:end_with_parent\n"
    (info / "entry_points.txt").write_text(f"[vllm.endpoint_plugins]\n{points}{general}")
    return str(folder)


def dccot_serve(model: Path | str, folder: Path, *options: str, **variables: str) -> Server:
    """`dccot serve`, with the plugin that injects faults in addition to ours."""
    folder.mkdir(parents=True, exist_ok=True)
    port = free_port()
    command = [sys.executable, "-m", "dccot.cli", "serve", str(model), "--port", str(port), *as_flags(SIZES), *options]
    environment = {"PYTHONPATH": plugins(folder / "plugins"), "VLLM_PLUGINS": "dccot_faults", "VLLM_API_KEY": KEY}
    environment |= {"VLLM_SERVER_DEV_MODE": "1"}  # with the routes for development, too
    environment |= variables
    return Server(command, folder / "server.log", environment, port)


def vllm_serve(
    model: Path, folder: Path, *, port: int | None = None, plugin: str | None = None, processed: bool = True
) -> Server:
    """vLLM's own command; `plugin`: the settings of ours, if it is to be there. Log-probs are `processed` or raw."""
    folder.mkdir(parents=True, exist_ok=True)
    port = port or free_port()
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--host", "127.0.0.1"]
    environment = {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_API_KEY": KEY}
    if plugin is not None:
        environment |= {"PYTHONPATH": plugins(folder / "plugins"), "VLLM_PLUGINS": "dccot", "DCCOT_SERVE": plugin}
    flags = as_flags(PLAIN | {"port": port} | ({} if processed else {"logprobs_mode": "raw_logprobs"}))
    return Server([*command, *flags], folder / "server.log", environment, port)
