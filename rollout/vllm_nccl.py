"""Weights over NCCL from the trainer's rank 0 into the workers of one server: `engine.weight_transfer: nccl`.

    link = NcclLink(server, workers)
    link.joins ─► /init_weight_transfer_engine       while join() waits for the workers
    link.describe(tensors) ─► /update_weights        while send(tensors) broadcasts

Every server has a communicator of its own, so one that dies takes no other with it; its link is dropped and it gets a
new one when it comes back. Written against the sources of vLLM 0.32 and not run yet: it needs GPUs.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

import torch
from torch import Tensor
from vllm.distributed.weight_transfer.nccl_common import trainer_init
from vllm.distributed.weight_transfer.packed_tensor import packed_nccl_broadcast_producer


class NcclLink:
    def __init__(self, url: str, workers: int):
        server = urlsplit(url)
        with socket.create_connection((server.hostname or "", server.port or 80)) as seen:
            address = seen.getsockname()[0]  # by which the server reaches us
        with socket.socket() as free:
            free.bind((address, 0))
            port = free.getsockname()[1]
        place = {"master_address": address, "master_port": port, "world_size": 1 + workers}
        self.joins: dict[str, Any] = place | {"rank_offset": 1, "packed": True}
        self._place, self._device = place, torch.cuda.current_device()
        self._group: Any = None

    def join(self) -> None:
        torch.cuda.set_device(self._device)  # of this thread
        self._group = trainer_init(self._place)

    @staticmethod
    def describe(tensors: Mapping[str, Tensor]) -> dict[str, list]:
        return {
            "names": list(tensors),
            "dtype_names": [str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()],
            "shapes": [list(tensor.shape) for tensor in tensors.values()],
        }

    def send(self, tensors: Mapping[str, Tensor]) -> None:
        torch.cuda.set_device(self._device)
        packed_nccl_broadcast_producer(
            iterator=iter(tensors.items()), group=self._group, src=0, post_iter_func=lambda item: item[1]
        )
        torch.cuda.synchronize()
