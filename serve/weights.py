"""What a `vllm serve` that samples for training needs beyond vLLM: weights from a file, and a lock on every route.

    VLLM_SERVER_DEV_MODE=1 VLLM_API_KEY=… vllm serve MODEL --enable-scale-out
        --weight-transfer-config '{"backend": "file"}' --worker-extension-cls dccot.serve.weights.Extension
        --middleware dccot.serve.weights.Guard

`rollout/servers.py` starts servers so. vLLM's own backends (nccl, ipc) need CUDA; `file` works on any device, and
between machines that share a disk: the trainer writes safetensors, every worker of a server loads them in place. The
file is read as a whole before a weight is touched, so a damaged one changes nothing.

vLLM's key protects /v1 and /inference alone; the routes that pause a server and replace its weights are open. `Guard`
wants the key for everything except /health.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Awaitable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.platforms import current_platform

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

OPEN = ("/health",)


class Guard:
    """Answers 401 without `Authorization: Bearer $VLLM_API_KEY`; a server without a key does not start."""

    def __init__(self, app: ASGIApp):
        self.app, self.expected = app, f"Bearer {os.environ.get('VLLM_API_KEY', '')}".encode()
        if self.expected == b"Bearer ":
            raise ValueError("VLLM_API_KEY is not set: whoever reaches this server could replace its weights")

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        given = dict(scope.get("headers") or ()).get(b"authorization", b"")
        known = scope["type"] == "lifespan" or scope["path"] in OPEN or secrets.compare_digest(given, self.expected)
        return self.app(scope, receive, send) if known else self._refuse(send)

    async def _refuse(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 401, "headers": []})
        await send({"type": "http.response.body", "body": b"Unauthorized"})


@dataclass
class Init(WeightTransferInitInfo):
    """Nothing to agree on."""


@dataclass
class Update(WeightTransferUpdateInfo):
    path: str = ""


class FileWeights(WeightTransferEngine):
    init_info_cls, update_info_cls = Init, Update

    def init_transfer_engine(self, init_info: Any) -> None: ...

    def start_weight_update(self) -> None: ...

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Without the base class's wait for an accelerator: there may be none."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: Any) -> None:
        from safetensors.torch import load

        tensors = load(Path(update_info.path).read_bytes())
        initialize_layerwise_reload(self.model)
        self.model.load_weights(tensors.items())
        finalize_layerwise_reload(self.model, self.model_config)
        if current_platform.is_cpu() and self.model_config.hf_config.tie_word_embeddings:
            # weights are repacked for CPU kernels, and a tied head is not loaded
            head: Any = self.model.lm_head
            head.quant_method.process_weights_after_loading(head)

    def finish_weight_update(self) -> None: ...

    def shutdown(self) -> None: ...


class Extension:
    """Named on the command line so that every worker imports this file."""


if "file" not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine("file", FileWeights)
