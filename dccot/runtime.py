"""Where this process runs: its rank, its device, and the few collectives that the loops need.

Launched by `torchrun` there are as many ranks as it says; launched plainly there is one, and it still has a process group, so that one
code path serves both. Objects travel over gloo, tensors over nccl where there are GPUs.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")


@dataclass(frozen=True)
class Runtime:
    rank: int
    ranks: int
    device: torch.device
    owned: bool = True  # this Runtime made the process group, and ends it

    @classmethod
    def start(cls, timeout_seconds: float = 1800) -> Runtime:
        """Join the process group that torchrun announces, or make one of size 1."""
        cuda = torch.cuda.is_available()
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if cuda else torch.device("cpu")
        if cuda:
            torch.cuda.set_device(device)
        owned = not dist.is_initialized()
        if owned:
            backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
            timeout = timedelta(seconds=timeout_seconds)
            rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
            if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
                store = _fresh_store(rank, ranks, timeout)
                dist.init_process_group(backend, timeout=timeout, store=store, rank=rank, world_size=ranks)
            elif "RANK" in os.environ:
                dist.init_process_group(backend, timeout=timeout)
            else:
                dist.init_process_group(backend, timeout=timeout, store=dist.HashStore(), rank=0, world_size=1)
        return cls(dist.get_rank(), dist.get_world_size(), device, owned)

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

    def broadcast(self, value: Any) -> Any:
        """Rank 0's value, on every rank."""
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def barrier(self) -> None:
        dist.barrier()

    def stop(self) -> None:
        if self.owned and dist.is_initialized():  # an engine that shuts down takes the group with it
            dist.destroy_process_group()


def on_rank_zero(work: Callable[[], T]) -> T:
    """What `work` returns or raises on rank 0, on every rank: what is read from a shared disk must not differ from rank to rank."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return work()
    box: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            box[0] = work()
        except Exception as error:
            box[1] = error
    dist.broadcast_object_list(box, src=0)
    if box[1] is not None:
        raise box[1]
    return box[0]


def _fresh_store(rank: int, ranks: int, timeout: timedelta) -> dist.Store:
    """torchrun's store; each restart uses its own key prefix.

    torchrun keeps its store over a restart (torch 2.13), and with it the addresses of ranks that are dead: a rank that joins through them
    waits for ever. Restarts cannot be counted, because nodes count them differently. So rank 0 chooses the prefix, and each of the others
    continues only when rank 0 has answered a greeting that nobody can have seen before.
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
    raise TimeoutError(f"rank {rank}: rank 0 did not answer within {timeout.total_seconds():.0f} s; see what it printed")
