"""Where this process runs: its rank, its device, and the few collectives that the loops need.

Launched by `torchrun` there are as many ranks as it says; launched plainly there is one, and it still has a process group, so that one
code path serves both. Objects travel over gloo, tensors over nccl where there are GPUs.
"""
from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


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
            alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
            dist.init_process_group(backend, timeout=timedelta(seconds=timeout_seconds), **alone)
        return cls(dist.get_rank(), dist.get_world_size(), device, owned)

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

    def concatenated(self, tensor: Tensor) -> Tensor:
        """One-dimensional tensors of all ranks behind one another, on the CPU."""
        return torch.cat([torch.as_tensor(part) for [part] in self.gather([tensor.detach().float().cpu().numpy()])])

    def share(self, value: Any) -> Any:
        """Rank 0's value, on every rank."""
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def barrier(self) -> None:
        dist.barrier()

    def stop(self) -> None:
        if self.owned and dist.is_initialized():  # an engine that shuts down takes the group with it
            dist.destroy_process_group()
