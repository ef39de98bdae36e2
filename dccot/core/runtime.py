"""Where this process runs: its rank, its device, and the few collectives that the loops need.

Under `torchrun` there are as many ranks as it starts; without it there is one, which still has a process group, so that
one code path serves both. Objects are sent over gloo, tensors over nccl on GPUs. No other file starts a process group.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import hashlib
import os
import pickle
import signal
import socket
import sys
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from dccot.core.config import ConfigError
from dccot.core.lazy import Lazy
from dccot.core.plugins import PluginError

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist
    from torch import Tensor
else:
    torch, dist = Lazy("torch"), Lazy("torch.distributed")

T = TypeVar("T")

# seconds that ranks wait for the slowest one when each works independently; torchrun notices dead ranks
PATIENCE = 7 * 24 * 3600.0
SAYING = 30.0  # seconds for one rank to print what all of them have found
SHARED_SECONDS = 60.0  # for a new file to show on all machines; NFS caches folders for up to 60
START_UP = 1800.0  # seconds for all ranks to start and find each other, whatever a collective may take later
ALLOCATOR, EXPANDABLE = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"), "expandable_segments:True"
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
MMAP_FROM, TRIM_FROM = 2**30, 2**31 - 1  # bytes
# for processes yet to start
KEEP_FREED_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(MMAP_FROM), "MALLOC_TRIM_THRESHOLD_": str(TRIM_FROM)}


@dataclass(frozen=True)
class Runtime:
    rank: int
    ranks: int
    chosen: torch.device | None = None  # None: the first GPU, if there is one
    owned: bool = True  # this Runtime made the process group, and ends it

    @property
    def device(self) -> torch.device:
        return self.chosen or torch.device("cuda" if torch.cuda.is_available() else "cpu")

    @classmethod
    def start(cls, timeout_seconds: float = 1800) -> Runtime:
        """Join torchrun's process group, or create one of size 1. Its collectives have this timeout from now on."""
        cuda = torch.cuda.is_available()
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if cuda else torch.device("cpu")
        if cuda:
            prepare_gpu(os.environ)
            torch.cuda.set_device(device)
        else:
            keep_freed_memory()
        owned = not dist.is_initialized()
        if owned:
            _join("cpu:gloo,cuda:nccl" if cuda else "gloo", device if cuda else None)
        runtime = cls(dist.get_rank(), dist.get_world_size(), device, owned)
        if owned:
            runtime.barrier()  # all are here before the shorter timeout counts
        set_timeout(timeout_seconds)
        return runtime

    @classmethod
    def of_workers(cls) -> Runtime:
        """For ranks that work independently and meet at the end, however late. A single process gets no group."""
        return cls.start(PATIENCE) if int(os.environ.get("WORLD_SIZE", "1")) > 1 else cls.alone()

    @classmethod
    def alone(cls) -> Runtime:
        return cls(0, 1, owned=False)

    def __enter__(self) -> Runtime:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over ranks, in place."""
        dist.all_reduce(tensor)
        return tensor

    def gather(self, mine: list[Any]) -> list[list[Any]]:
        """Every rank's list, in rank order, on every rank."""
        if self.ranks == 1:
            return [mine]
        everybody: list[list[Any]] = [[] for _ in range(self.ranks)]
        dist.all_gather_object(everybody, mine)
        return everybody

    def exchange(self, parcels: Sequence[Any]) -> list[Any]:
        """What each rank has for this one, in rank order; `parcels[r]` is for rank r, and nobody else gets it."""
        if self.ranks == 1:
            return list(parcels)
        pickled = lambda parcel: pickle.dumps(parcel, pickle.HIGHEST_PROTOCOL)
        sent = [b"" if rank == self.rank else pickled(parcel) for rank, parcel in enumerate(parcels)]
        sizes = torch.tensor([len(parcel) for parcel in sent])
        theirs = torch.empty_like(sizes)
        dist.all_to_all_single(theirs, sizes)
        received = torch.empty(int(theirs.sum()), dtype=torch.uint8)
        given = torch.frombuffer(bytearray().join(sent), dtype=torch.uint8)
        dist.all_to_all_single(received, given, theirs.tolist(), sizes.tolist())
        parts = enumerate(received.split(theirs.tolist()))
        own = parcels[self.rank]
        return [own if rank == self.rank else pickle.loads(part.numpy().tobytes()) for rank, part in parts]

    def guarded(self, work: Callable[[], T]) -> T:
        """The result of `work`; where it fails on one rank, all raise: none waits for it in vain."""
        found: list[T] = []
        self.together(lambda: found.append(work()))
        return found[0]

    def together(self, work: Callable[[], T]) -> list[T]:
        """The same, every rank's result on every rank."""
        mine, failed = None, None
        try:
            mine = work()
        except Exception as error:
            failed = error
        sent = failed if isinstance(failed, PluginError | None) else RuntimeError(f"rank {self.rank}: {failed!r}")
        everybody = self.gather([mine, sent])
        for rank, (_, theirs) in enumerate(everybody):  # the first one's error, on all of them
            if theirs is not None:
                raise failed if rank == self.rank and failed else theirs
        return [theirs for theirs, _ in everybody]

    def broadcast(self, value: Any) -> Any:
        """Rank 0's value, on every rank."""
        if self.ranks == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def barrier(self) -> None:
        """Over gloo: an nccl barrier would keep every GPU busy until the slowest rank is done."""
        self.sum(torch.zeros(1))

    def stop(self) -> None:
        if self.owned and in_group():  # an engine that shuts down destroys the group
            dist.destroy_process_group()


def prepare_gpu(environment: MutableMapping[str, str]) -> None:
    """Settings that must exist before CUDA and NCCL start; yours come first.

    Segments that grow lose little memory to fragmentation. NCCL must not register CUDA graphs: a sleeping engine may
    move them to the host.
    """
    if not any(environment.get(name) for name in ALLOCATOR):
        environment[ALLOCATOR[0]] = EXPANDABLE
    environment.setdefault("NCCL_GRAPH_REGISTER", "0")


@contextmanager
def fixed_segments() -> Iterator[None]:
    """The allocator without expandable segments, which cannot be in a pool that sleeps.

    vLLM does the same around its pools of weights and KV cache, but not around that of CUDA graphs. torch resets every
    setting that is not in the string it is given.
    """
    settings = next((found for name in ALLOCATOR if (found := os.environ.get(name))), "")
    parts = [part for part in settings.split(",") if part and not part.strip().startswith("expandable_segments")]
    torch._C._accelerator_setAllocatorSettings(",".join([*parts, "expandable_segments:False"]))
    try:
        yield
    finally:
        torch._C._accelerator_setAllocatorSettings(settings)


def keep_freed_memory() -> None:
    """Keep large tensors on glibc's heap, which keeps freed memory: otherwise the kernel zeroes every page of every
    activation again. A tenth of a CPU training step was spent on page faults, and nearly half the time of sampling.
    """
    if hasattr(libc := ctypes.CDLL(None), "mallopt"):
        libc.mallopt(M_MMAP_THRESHOLD, MMAP_FROM)
        libc.mallopt(M_TRIM_THRESHOLD, TRIM_FROM)


def set_timeout(seconds: float) -> None:
    """Timeout of the default group's collectives from now on."""
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds))


def inherit_timeout(groups: Iterable[dist.ProcessGroup]) -> None:
    """Give groups the default group's timeout; torch gives new ones its own, 10 minutes for nccl."""
    assert dist.group.WORLD is not None
    options = dist.group.WORLD._get_backend(torch.device("cpu")).options
    if options is not None:  # not in a rehearsal
        for group in groups:
            dist.distributed_c10d._set_pg_timeout(options._timeout, group)


def free_memory() -> None:
    """Collect reference cycles and release their GPU memory: what comes next may need all of it."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def gpus() -> int:
    """How many there are; without a driver, that is known without importing torch."""
    drivers = any(Path("/dev", name).exists() for name in ("nvidiactl", "kfd", "dxg"))
    return torch.cuda.device_count() if drivers or "torch" in sys.modules else 0


def gpu_bytes() -> int | None:
    """Memory of the first GPU; None without one."""
    return torch.cuda.get_device_properties(0).total_memory if gpus() else None


def in_group() -> bool:
    """Whether this process has joined a process group; without torch it has not."""
    return "torch.distributed" in sys.modules and dist.is_initialized()


def on_rank_zero(work: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
    """The result or exception of `work` on rank 0, on every rank: what is read from a shared disk must not differ.

    It may take longer than a collective: the others poll the store until it is done. All ranks of `group` call this.
    """
    if not in_group() or dist.get_world_size() == 1:
        return work()
    group = group or dist.group.WORLD
    assert group is not None
    store = dist.distributed_c10d._get_default_store()
    key = f"dccot/{group.group_name}/{next(_turns[group.group_name])}"
    box: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            box[0] = work()
        except Exception as error:
            box[1] = error
        store.set(key, "done")
    else:
        while not store.check([key]):
            time.sleep(0.1)
    dist.broadcast_object_list(box, src=0, group=group)
    if box[1] is not None:
        raise box[1]
    return box[0]


def gathered_on_rank_zero(mine: T, group: dist.ProcessGroup) -> list[T]:
    """Every rank's value, on rank 0; an empty list elsewhere. As `on_rank_zero`, however long the slowest takes."""
    ranks = group.size()
    if ranks == 1:
        return [mine]
    store = dist.distributed_c10d._get_default_store()
    key = f"dccot/{group.group_name}/{next(_turns[group.group_name])}"
    store.add(key, 1)
    while store.add(key, 0) < ranks:
        time.sleep(0.1)
    values: list[Any] = [None] * ranks if dist.get_rank() == 0 else []
    dist.gather_object(mine, values or None, dst=0, group=group)
    return values


_turns: dict[str, Iterator[int]] = defaultdict(count)  # per group: number of calls so far


def say_once(message: str) -> None:
    """Print what several ranks of torchrun have found out, as one of them. The others wait until it is there: the first
    to exit gets the rest killed.
    """
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    key = f"dccot/said/{restart}/{hashlib.sha256(message.encode()).hexdigest()}"
    with contextlib.suppress(RuntimeError, OSError):  # torchrun has gone
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=SAYING))
        if store.add(key, 1) > 1:
            store.wait([f"{key}/printed"])
        else:
            print(message, file=sys.stderr, flush=True)
            store.set(f"{key}/printed", "yes")
        return
    print(message, file=sys.stderr, flush=True)


def require_shared(folder: Path, runtime: Runtime) -> None:
    """Reject a folder that not all ranks share. A network file system may take a while to show a new file."""
    if runtime.ranks == 1:
        return
    name = runtime.broadcast(f".seen-by-all-{uuid.uuid4().hex}")
    if runtime.is_main:
        (folder / name).touch()
    deadline = time.monotonic() + SHARED_SECONDS
    runtime.barrier()
    while not (seen := (folder / name).exists()) and time.monotonic() < deadline:
        time.sleep(0.1)
    me = f"rank {runtime.rank} on {socket.gethostname()}"
    everybody = runtime.gather([me, seen])
    if runtime.is_main:
        (folder / name).unlink(missing_ok=True)
    if blind := [who for who, sees in everybody if not sees]:
        raise ConfigError(
            f"{folder} of {everybody[0][0]} is not the folder of {', '.join(blind)}; choose one on a disk that all "
            "machines share"
        )


def _join(backend: str, bound: torch.device | None) -> None:
    """Start the process group, bound to a GPU: vLLM and HSDP can only split a bound group."""
    timeout = timedelta(seconds=START_UP)
    group: dict[str, Any] = {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        ctypes.CDLL(None).prctl(1, signal.SIGINT)  # PR_SET_PDEATHSIG: no rank may outlive torchrun
        rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        group = {"store": _fresh_store(rank, ranks, timeout), "rank": rank, "world_size": ranks}
    elif "RANK" in os.environ:
        group = {}  # torch reads the environment
    dist.init_process_group(backend, timeout=timeout, device_id=bound, **group)


def _fresh_store(rank: int, ranks: int, timeout: timedelta) -> dist.Store:
    """torchrun's store; each restart uses its own key prefix.

    torchrun keeps its store across a restart (torch 2.13), and with it the addresses of dead ranks: a rank that joins
    through them waits forever. Restarts cannot be counted, because nodes count them differently. So rank 0 chooses the
    prefix, and each of the others continues only when rank 0 has answered its unique greeting.
    """
    agent = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, timeout=timeout)
    if rank == 0:
        prefix = uuid.uuid4().hex
        agent.set("prefix", prefix)
        for other in range(1, ranks):
            greeting = agent.get(f"{prefix}/{other}").decode()
            agent.set(f"{prefix}/{greeting}", "welcome")
        return dist.PrefixStore(prefix, agent)
    greeting, deadline = uuid.uuid4().hex, time.monotonic() + timeout.total_seconds()
    while time.monotonic() < deadline:
        prefix = agent.get("prefix").decode()
        agent.set(f"{prefix}/{rank}", greeting)
        time.sleep(0.05)
        if agent.check([f"{prefix}/{greeting}"]):
            return dist.PrefixStore(prefix, agent)
    waited = f"{timeout.total_seconds():.0f} s"
    raise TimeoutError(f"rank {rank}: rank 0 did not answer within {waited}; see what it printed")
