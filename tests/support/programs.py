"""`run` and `Popen` as in subprocess, for programs that import torch or vLLM: forked from one warm process.

    programs.run([sys.executable, "-m", "dccot.cli", "eval", …], capture_output=True, text=True, timeout=600)

Importing torch, transformers and vLLM takes 10 to 14 seconds of CPU time; one process per test session, started when
it is first needed, does it once, without threads, and forks for every program. It imports nothing of dccot, which each
program imports as usual. A forked program has its own session, environment, working folder and standard streams, and
ends as `python` does: exit codes, tracebacks, atexit. Under `python -m torch.distributed.run` the launcher is real and
its ranks are forked as well. A fresh process is started instead when the command is not Python's, has an option other
than -u, or has environment variables that were read during the imports (TRITON_INTERPRET, OMP_NUM_THREADS, …), and on
machines with GPUs. What differs: all programs of a session share one seed for Python's hashes.

    python -m tests.support.programs SOCKET PID      the warm process, which lasts as long as process PID
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib
import io
import json
import multiprocessing.process
import os
import runpy
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from tests.support import hub

ROOT = Path(__file__).parents[2]
SOCKET, OWNER = "DCCOT_TESTS_SOCKET", "DCCOT_TESTS_OWNER"  # set once per session, inherited by pytest's workers
PATIENCE = 600.0  # seconds to import everything, on a busy machine
# Not pyarrow, which starts a thread.
IMPORTED = {
    "torch": "_dynamo distributed.fsdp distributed.tensor distributed.checkpoint.state_dict distributed.run profiler"
    " distributed.checkpoint.hf_storage nn.attention.flex_attention utils.tensorboard",
    "transformers": "models.auto",
    "vllm": "engine.arg_utils v1.engine.llm_engine v1.engine.async_llm v1.worker.cpu_worker"
    " entrypoints.openai.api_server v1.attention.backends.cpu_attn v1.executor.uniproc_executor"
    " model_executor.models.llama model_executor.models.qwen2 model_executor.models.qwen3",
    "": "safetensors.torch pydantic rich.live rich.progress rich.table math_verify matplotlib.pyplot jinja2 openai"
    " psutil fastapi huggingface_hub",
}
# Variables that the imports may read; a program with other values of them gets a fresh process.
READ = ("TRITON_", "OMP_", "MKL_", "KMP_", "OPENBLAS_", "TORCH", "PYTORCH_", "CUDA_", "HF_", "LD_", "PYTHON", "MALLOC_")
READ += ("VLLM_", "TRANSFORMERS_", "CXX")
LATE = ("TORCHELASTIC_", "TORCH_NCCL_", "TRITON_CACHE_DIR", "TRANSFORMERS_VERBOSITY", "PYTHONPATH", "PYTHONUNBUFFERED")
LATE += ("VLLM_PLUGINS", "VLLM_API_KEY", "VLLM_LOGGING_LEVEL", "VLLM_NO_USAGE_STATS", "VLLM_CONFIGURE_LOGGING")
LATE += ("VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_SERVER_DEV_MODE", "VLLM_ENGINE_READY_TIMEOUT_S")
FRESH = 0  # instead of a process id: this program needs a fresh process


class Forked(subprocess.Popen):
    """A program forked by the warm process, which is its parent and reports how it ended."""

    def _execute_child(self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *others):
        p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite = others[3:9]
        streams = [fd if fd >= 0 else own for own, fd in enumerate((p2cread, c2pwrite, errwrite))]
        request = {
            "command": list(map(os.fspath, args)),
            "cwd": os.path.abspath(cwd or os.getcwd()),
            "environment": {os.fsdecode(k): os.fsdecode(v) for k, v in (os.environ if env is None else env).items()},
        }
        data = json.dumps(request).encode()
        self._warm = connect()
        socket.send_fds(self._warm, [struct.pack("q", len(data))], streams)
        self._warm.sendall(data)
        self.pid = struct.unpack("q", exactly(self._warm, 8))[0]
        if self.pid == FRESH:
            self._warm.close()
            super()._execute_child(args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *others)
            return
        self._child_created = True
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)

    def _try_wait(self, wait_flags):
        if self._warm.fileno() < 0:
            return super()._try_wait(wait_flags)
        if wait_flags & os.WNOHANG and not select.select([self._warm], [], [], 0)[0]:
            return 0, 0
        try:
            status = struct.unpack("q", exactly(self._warm, 8))[0]
        except ConnectionError:  # nobody knows how it ended
            status = signal.SIGKILL
        return self.pid, status

    def _internal_poll(self, _deadstate=None, **_):
        if self.returncode is None and self._waitpid_lock.acquire(False):
            try:
                if self.returncode is None:
                    pid, status = self._try_wait(os.WNOHANG)
                    if pid == self.pid:
                        self._handle_exitstatus(status)
            finally:
                self._waitpid_lock.release()
        return self.returncode


def Popen(command: Sequence[Any], **options: Any) -> subprocess.Popen:
    """As subprocess.Popen; the program is forked from the warm process where that is possible."""
    return (Forked if program_of(command) else subprocess.Popen)(list(map(str, command)), **options)


def run(command: Sequence[Any], *, input=None, capture_output=False, timeout=None, check=False, **options):
    """As subprocess.run; when the time is over, everything that the program started in its session ends with it."""
    if input is not None:
        options["stdin"] = subprocess.PIPE
    if capture_output:
        options |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with Popen(command, **options) as process:
        try:
            stdout, stderr = process.communicate(input, timeout=timeout)
        except BaseException:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL) if isinstance(process, Forked) else process.kill()
            raise
    done = subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)
    if check:
        done.check_returncode()
    return done


def finish(command: Sequence[Any], *, code: int | None = 0, **options: Any) -> subprocess.CompletedProcess:
    """As `run`, with the output as text; an error with what was said if the program ends with another code."""
    done = run(command, capture_output=True, text=True, timeout=900, **options)
    if code not in (None, done.returncode):
        raise AssertionError(f"{command} ended with {done.returncode}\n{done.stdout[-4000:]}\n{done.stderr[-8000:]}")
    return done


def torchrun(ranks: int, program: str | Path, *arguments: Any) -> list[str]:
    """The command that runs a module (str) or a file (Path) on so many ranks of this machine."""
    target = ["-m", program] if isinstance(program, str) else [str(program)]
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    return [*launch, *target, *map(str, arguments)]


def new_session() -> None:
    """Called once, before pytest starts its workers: one warm process for all of them."""
    if os.environ.get(OWNER, "") == "":
        os.environ |= {SOCKET: new_address(), OWNER: str(os.getpid())}


def new_address() -> str:
    """For a socket: short, as its kind must be, and gone when this process ends, not one that it forked."""
    folder, owner = tempfile.mkdtemp(prefix="dccot-", dir="/tmp"), os.getpid()
    atexit.register(lambda: shutil.rmtree(folder, ignore_errors=True) if os.getpid() == owner else None)
    return f"{folder}/socket"


def program_of(command: Sequence[Any]) -> tuple[str, str, list[str]] | None:
    """("-m", module, arguments), ("-c", code, arguments) or ("", file, arguments); None: not a plain Python program."""
    words = list(map(str, command))
    if words[0] != sys.executable:
        return None
    words = words[2:] if words[1:2] == ["-u"] else words[1:]
    if words and words[0] in ("-m", "-c"):
        return words[0], words[1], words[2:]
    return ("", words[0], words[1:]) if words and words[0].endswith(".py") else None


def connect() -> socket.socket:
    """A connection to the warm process, which the first one who needs it starts."""
    new_session()
    address = os.environ[SOCKET]
    with open(f"{address}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with contextlib.suppress(OSError):
            return _connected(address)
        command = [sys.executable, "-m", "tests.support.programs", address, os.environ[OWNER]]
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("VLLM_", "RANK", "WORLD_SIZE"))}
        environment |= {"OMP_NUM_THREADS": "1", "VLLM_CONFIGURE_LOGGING": "0"}
        with open(f"{address}.log", "w") as log:
            warm = subprocess.Popen(
                command,
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        deadline = time.monotonic() + PATIENCE
        while warm.poll() is None and time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                connection = _connected(address)
                Path(log.name).unlink()
                return connection
            time.sleep(0.05)
        raise RuntimeError(f"the warm process did not start:\n{Path(log.name).read_text()[-4000:]}")


def _connected(address: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(address)
    except OSError:
        connection.close()
        raise
    return connection


def exactly(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        if not (more := connection.recv(size - len(data))):
            raise ConnectionError("the warm process ended")
        data += more
    return data


# The warm process


def warm_up(address: str, owner: int) -> None:
    given = dict(os.environ)
    for package, modules in IMPORTED.items():
        for name in modules.split():
            importlib.import_module(f"{package}.{name}".lstrip("."))
    torch = sys.modules["torch"]
    threads = len(os.listdir("/proc/self/task"))
    fork = threads == 1 and not torch.cuda.is_available()
    gc.collect()
    gc.freeze()
    request = serve(address, owner, given if fork else None)
    become(*request, given)


def serve(address: str, owner: int, given: dict[str, str] | None) -> tuple[dict, list[int]]:
    """Fork for every request until the owner ends. Returns in the forked processes only."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address + ".new")
    listener.listen(64)
    os.rename(address + ".new", address)
    ended = os.pidfd_open(owner)
    running: dict[int, tuple[int, socket.socket]] = {}  # process's pidfd → its id, who asked for it
    while True:
        ready, _, _ = select.select([listener, ended, *running], [], [])
        for pidfd in running.keys() & set(ready):
            pid, connection = running.pop(pidfd)
            status = os.waitpid(pid, 0)[1]
            with contextlib.suppress(OSError), connection:
                connection.sendall(struct.pack("q", status))
            os.close(pidfd)
        if ended in ready:
            for pid, _ in running.values():
                with contextlib.suppress(OSError):
                    os.killpg(pid, signal.SIGKILL)
            os._exit(0)
        if listener not in ready:
            continue
        connection, _ = listener.accept()
        try:
            head, streams, _, _ = socket.recv_fds(connection, 8, 3)
            request = json.loads(exactly(connection, struct.unpack("q", head)[0]))
        except (OSError, struct.error):
            connection.close()
            continue
        if given is None or not forkable(request["environment"], given):
            connection.sendall(struct.pack("q", FRESH))
            connection.close()
        elif (pid := os.fork()) == 0:
            for taken in (listener, connection, *(other for _, other in running.values())):
                taken.close()
            for fd in (ended, *running):
                os.close(fd)
            return request, streams
        else:
            running[os.pidfd_open(pid)] = pid, connection
            with contextlib.suppress(OSError):
                connection.sendall(struct.pack("q", pid))
        for fd in streams:
            os.close(fd)


def forkable(wanted: dict[str, str], given: dict[str, str]) -> bool:
    """Whether the imports would have read the same variables: as they were before them, or as they left them."""
    late = (*LATE, *hub.environment("", Path())) if {"HF_ENDPOINT", "HF_HOME"} <= wanted.keys() else LATE
    names = {name for name in {*wanted, *given} if name.startswith(READ) and not name.startswith(late)}
    return all(wanted.get(name) in (given.get(name), os.environ.get(name)) for name in names)


def become(request: dict, streams: list[int], given: dict[str, str]) -> NoReturn:
    """Be the program, in a process that has just been forked, and end as it does."""
    os.setsid()
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        with contextlib.suppress(OSError, ValueError):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # as Python starts: a file that grows too large is an OSError
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    for fd, stream in enumerate(streams):
        os.dup2(stream, fd)
        os.close(stream)
    os.chdir(request["cwd"])
    command, wanted = request["command"], request["environment"]
    left_by_imports = {k: v for k, v in os.environ.items() if given.get(k) != v and k not in wanted}
    os.environ.clear()
    os.environ |= wanted | left_by_imports
    kind, program, arguments = program_of(command)  # type: ignore[misc]
    open_streams(unbuffered="-u" in command[1:2] or bool(wanted.get("PYTHONUNBUFFERED")))
    set_paths(kind, program, given, wanted)
    if arguments[:1] == ["serve"] or program.startswith("vllm.entrypoints"):
        sys.modules["vllm.logger"]._configure_vllm_root_logger()
        # vLLM forks its engine, too, where there is no reason not to; on a CPU it gives none
        sys.modules["vllm.v1.engine.utils"].get_mp_context = lambda: multiprocessing.get_context("fork")  # type: ignore[attr-defined]
    if {"HF_ENDPOINT", "HF_HOME"} <= wanted.keys():
        found = hub.constants_for(wanted["HF_ENDPOINT"], Path(wanted["HF_HOME"]))
        vars(sys.modules["huggingface_hub.constants"]).update(found)
    sys.modules["transformers.utils.logging"]._reset_library_root_logger()  # TRANSFORMERS_VERBOSITY is read again
    multiprocessing.process.ORIGINAL_DIR = os.getcwd()  # type: ignore[attr-defined]
    if program == "torch.distributed.run" or (program == "dccot.cli" and arguments[:1] == ["demo"]):
        fork_ranks(given)
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__builtins__ = __builtins__  # type: ignore[attr-defined]
    sys.argv = [{"": program}.get(kind, kind), *arguments]
    sys.orig_argv = command
    if kind == "-m":
        sys.modules.pop(program, None)
        runpy._run_module_as_main(program)  # type: ignore[attr-defined]
    elif kind == "-c":
        exec(compile(program, "<string>", "exec"), main.__dict__)
    else:
        main.__file__ = program
        exec(compile(Path(program).read_bytes(), program, "exec"), main.__dict__)
    sys.exit()


def open_streams(unbuffered: bool) -> None:
    def opened(fd: int, mode: str, **options):
        raw = open(  # noqa: SIM115
            fd, f"{mode}b", buffering=0 if unbuffered and mode == "w" else -1, closefd=False
        )
        lines = not unbuffered and (fd == 2 or os.isatty(fd))
        return io.TextIOWrapper(raw, line_buffering=lines, write_through=unbuffered, **options)

    sys.stdin = sys.__stdin__ = opened(0, "r", encoding="utf-8")
    sys.stdout = sys.__stdout__ = opened(1, "w", encoding="utf-8")
    sys.stderr = sys.__stderr__ = opened(2, "w", encoding="utf-8", errors="backslashreplace")


def set_paths(kind: str, program: str, given: dict[str, str], wanted: dict[str, str]) -> None:
    first = {"-m": os.getcwd(), "-c": "", "": os.path.dirname(os.path.abspath(program))}[kind]
    before, now = (list(filter(None, env.get("PYTHONPATH", "").split(os.pathsep))) for env in (given, wanted))
    sys.path[:] = [first, *now, *(path for path in sys.path[1:] if path not in before)]
    importlib.invalidate_caches()


def fork_ranks(given: dict[str, str]) -> None:
    """This process becomes a launcher: a warm process of its own forks its ranks, and dies with it, before them."""
    address, launcher = new_address(), os.getpid()
    if os.fork() == 0:
        os.setsid()
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        for fd in range(3):
            os.dup2(os.open(os.devnull, os.O_RDWR), fd)
        become(*serve(address, launcher, given), given)
    os.environ[SOCKET] = address
    while not os.path.exists(address):
        time.sleep(0.01)
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    subprocess_handler.Popen = lambda args, **options: Popen(args, **options)


if __name__ == "__main__":
    warm_up(sys.argv[1], int(sys.argv[2]))
