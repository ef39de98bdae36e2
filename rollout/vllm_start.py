"""Engine startup: vLLM's output goes to a log, the console shows that it is alive, and nothing else in this process
changes.

    with undisturbed(), logged(runs/NAME/engine.rank0.log): engine = LLMEngine(…)

Starting takes minutes on a GPU (weights, compilation, CUDA graphs), and the cause of a failure is usually logged long
before the exception.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

HEARTBEAT_SECONDS = 15.0
LINES_OF_A_FAILURE = 60
FORMAT = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")


def log_file(folder: Path) -> Path:
    """This rank's log file in a run's folder."""
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"engine.rank{os.environ.get('RANK', '0')}.log"


@contextlib.contextmanager
def logged(log: Path | None) -> Iterator[None]:
    """Append stderr and vLLM's messages to `log`, or to a temporary file; if startup fails, the console shows the end
    of it.

    vLLM's messages continue to go to `log` until `end_log`.
    """
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(open(log, "ab") if log else tempfile.NamedTemporaryFile())  # noqa: SIM115
        handler = logging.FileHandler(file.name)
        handler.setFormatter(FORMAT)
        logging.getLogger("vllm").addHandler(handler)
        if log is None:
            stack.callback(end_log, Path(file.name))
        console = stack.enter_context(_stderr_into(file.fileno()))
        began = stack.enter_context(_heartbeat(console, Path(file.name)))
        try:
            yield
        except BaseException:
            sys.stderr.flush()
            lines = Path(file.name).read_text(errors="replace").splitlines()[-LINES_OF_A_FAILURE:]
            heading = f"the engine did not start ({time.monotonic() - began:.0f} s)" + (
                f"; the end of {log}:" if log else ":"
            )
            os.write(console, "\n".join([heading, *lines, ""]).encode())
            end_log(Path(file.name))
            raise


def end_log(log: Path) -> None:
    for handler in list(logging.getLogger("vllm").handlers):
        if isinstance(handler, logging.FileHandler) and handler.baseFilename == str(log.absolute()):
            logging.getLogger("vllm").removeHandler(handler)
            handler.close()


@contextlib.contextmanager
def _stderr_into(target: int) -> Iterator[int]:
    """Redirects file descriptor 2 to `target`; yields a descriptor for its original destination."""
    sys.stderr.flush()
    console = os.dup(2)
    os.dup2(target, 2)
    try:
        yield console
    finally:
        sys.stderr.flush()
        os.dup2(console, 2)
        os.close(console)


@contextlib.contextmanager
def _heartbeat(console: int, log: Path) -> Iterator[float]:
    """The first rank periodically reports that the engine is still starting, with vLLM's last line."""
    done, began = threading.Event(), time.monotonic()

    def beat() -> None:
        while not done.wait(HEARTBEAT_SECONDS):
            words = log.read_text(errors="replace").split("\n")
            last = next((line.strip() for line in reversed(words) if line.strip()), "nothing said yet")
            os.write(console, f"starting the engine: {time.monotonic() - began:.0f} s; {last[:160]}\n".encode())

    thread = threading.Thread(target=beat, daemon=True)
    if os.environ.get("RANK", "0") == "0":
        thread.start()
    try:
        yield began
    finally:
        done.set()
        if thread.ident:
            thread.join()


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """vLLM seeds every global generator, edits the environment and replaces torch.set_num_threads; none of that may
    leak.
    """
    environment, set_num_threads = dict(os.environ), torch.set_num_threads
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.set_num_threads = set_num_threads
        torch.set_rng_state(states[0])
        np.random.set_state(states[1])
        random.setstate(states[2])
        restore_environment(environment)


def restore_environment(before: dict[str, str]) -> None:
    """Undo changes one by one: other threads may read the environment meanwhile and must never find it empty."""
    for name in set(os.environ) - set(before):
        del os.environ[name]
    for name, value in before.items():
        if os.environ.get(name) != value:
            os.environ[name] = value
