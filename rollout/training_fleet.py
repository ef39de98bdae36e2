"""A fleet that samples for training: its weights are replaced while requests run, and every token tells its version.

    load(parameters, version)       safetensors to `folder` (or NCCL, rollout/vllm_nccl.py), then into every server:
                                    pause, keeping requests ─► update ─► label with the version ─► compare ─► resume

A server samples only while it has the current weights. One where any of this fails, or that does not answer, is left:
its calls begin again elsewhere. When it comes back it gets the current weights before its first call, however old its
own are; so does every server when a trainer starts, whatever an earlier one left there. Weights are compared by
checksum (`/weight_checker`) whenever a server joins: all must have the same bits.

Requests go to `/inference/v1/generate`, the only route that returns versions.
"""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import torch
from torch import Tensor

from dccot.core.config import ConfigError
from dccot.model.weights import open_tensors
from dccot.rollout.director import Call, Completion
from dccot.rollout.engine import EngineConfig, versions_of
from dccot.rollout.fleet import PATIENCE, Fleet, _Server

if TYPE_CHECKING:
    from dccot.rollout.engine import Parameters
    from dccot.rollout.vllm_nccl import NcclLink

log = logging.getLogger(__name__)
PUSH_SECONDS = 600.0  # that a server may take for new weights


class TrainingFleet(Fleet):
    route = "/inference/v1/generate"

    def __init__(self, model: str | Path, config: EngineConfig, folder: Path):
        self.dtype = torch.float32 if config.dtype == "auto" else getattr(torch, config.dtype)
        self.folder, self.version = folder, -1  # where weights are written; the version that every server should have
        self._given: Path | dict[str, Tensor] | None = None  # the current weights
        self._links: dict[str, NcclLink] = {}
        self._nccl, self._pushing, self._comparing = asyncio.Lock(), asyncio.Lock(), asyncio.Lock()
        with open_tensors(model) as tensors:
            self._names = set(tensors)
        self._tied = bool(json.loads((Path(model) / "config.json").read_text()).get("tie_word_embeddings"))
        if config.weight_transfer == "nccl" and not torch.cuda.is_available():
            raise ConfigError("engine.weight_transfer is nccl, and this machine has no GPU: set it to file")
        super().__init__(model, config)

    # ---- the caller's side ----

    def load(self, parameters: Parameters, version: int | None = None) -> None:
        """Give all servers that answer these weights; returns when they sample with them. The others get them when
        they come back; if none is left, this waits for one.
        """
        assert version is not None
        weights = self._checked(parameters)
        given = self._write(weights, version) if self.config.weight_transfer == "file" else weights
        self._wait(self._push_all(given, version))
        for old in self.folder.glob("version_*.safetensors"):
            if old != given:
                old.unlink(missing_ok=True)

    def sleep(self) -> None:
        """Servers have GPUs of their own."""

    def wake(self) -> None: ...

    def health(self) -> dict[str, float]:
        """Per server: 1 if it samples with the current weights, its calls."""
        told = {}
        for number, server in enumerate(self._servers):
            told[f"server_{number}/up"] = float(server.up)
            told[f"server_{number}/calls"] = float(len(server.tasks))
            told[f"server_{number}/version"] = float(-1 if server.version is None else server.version)
        return told

    def state(self) -> str:
        told = [(server, "?" if server.version is None else server.version) for server in self._servers]
        calls = [f"{len(server.tasks)} calls" if server.up else "not used" for server in self._servers]
        return "; ".join(f"{server.url} version {version}, {doing}" for (server, version), doing in zip(told, calls))

    def _checked(self, parameters: Parameters) -> dict[str, Tensor]:
        """All of the model's weights, in the engine's precision if it was chosen."""
        place = "cpu" if self.config.weight_transfer == "file" else None
        tensors = {name: tensor.detach().to(place, self.dtype).contiguous() for name, tensor in parameters}
        if self._tied and "lm_head.weight" in self._names:
            tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        if missing := sorted(self._names - set(tensors)):
            raise ValueError(f"{len(missing)} weights of the model were not given: {', '.join(missing[:20])}")
        for name, tensor in tensors.items():
            if not tensor.isfinite().all():
                raise ValueError(f"{name} holds {int((~tensor.isfinite()).sum()):,} values that are not finite")
        return tensors

    def _write(self, tensors: dict[str, Tensor], version: int) -> Path:
        from safetensors.torch import save_file

        self.folder.mkdir(parents=True, exist_ok=True)
        file = self.folder / f"version_{version}.safetensors"
        save_file(tensors, part := file.with_suffix(".part"))
        part.rename(file)
        return file

    # ---- the fleet's side ----

    async def _push_all(self, given: Path | dict[str, Tensor], version: int) -> None:
        current = [server for server in self._servers if server.up or self._given is None]
        self._given, self.version = given, version
        for server in current:
            server.up = False
        async with self._pushing:
            if current and current[0].version != version - 1:
                await self._push_or_leave(current.pop(0))  # the others are compared with this one
            await asyncio.gather(*(self._push_or_leave(server) for server in current))
        while not any(server.up for server in self._servers):  # the guards bring one up as soon as it answers
            await asyncio.sleep(0.1)
        self._dispatch()

    async def _push_or_leave(self, server: _Server) -> None:
        server.up = await self._takes(server)
        if not server.up:
            server.doubted.set()  # its guard looks at it now
            self._leave(server)

    async def _ready(self, server: _Server) -> bool:
        """Give a server that joins the current weights, when the others have them, with which it is compared."""
        async with self._pushing:
            pass
        return self._given is not None and await self._takes(server)

    async def _takes(self, server: _Server) -> bool:
        assert self._given is not None
        async with server.updating:
            before, server.version, version = server.version, None, self.version
            try:
                if before != version or await self._label(server) != str(version):  # it may have been started again
                    await self._push(server, self._given, version, compare=before != version - 1)
            except Exception as error:  # whatever it answered
                self._links.pop(server.url, None)
                server.version = None
                log.warning("%s did not take the weights of version %d: %s", server.url, version, _said(error))
                return False
            server.version = version if version == self.version else None  # there may be newer ones meanwhile
            return server.version is not None

    def _leave(self, server: _Server) -> None:
        """It gets the current weights when it comes back, and until then nobody is compared with it."""
        server.version = None
        super()._leave(server)

    async def _healthy(self, server: _Server) -> bool:
        """Its engine is asked as well: that may hang while /health answers. Not while it takes weights."""
        async with server.updating:
            return await server.answers("/weight_info")

    async def _fault(self, server: _Server) -> str | None:
        """It may be paused, where an earlier trainer died: then it would not answer."""
        async with server.updating:
            await self._ask(server, "/resume", seconds=PATIENCE)
            return await super()._fault(server)

    async def _push(self, server: _Server, given: Path | dict[str, Tensor], version: int, compare: bool) -> None:
        await self._ask(server, "/pause?mode=keep&clear_cache=true", seconds=PATIENCE)
        answer = await server.client.post("/start_weight_update", timeout=PATIENCE)
        if answer.status_code not in (200, 500):  # 500: an update was begun there and never finished
            answer.raise_for_status()
        if isinstance(given, Path):
            await self._ask(server, "/update_weights", {"update_info": {"path": str(given)}})
        else:
            await self._broadcast(server, given, new=compare)
        await self._ask(server, "/finish_weight_update", {"weight_version": str(version)})
        if compare:
            await self._compare(server, version)
        if (label := await self._label(server)) != str(version):
            raise ValueError(f"it says that it has version {label}")
        await self._ask(server, "/resume", seconds=PATIENCE)

    async def _broadcast(self, server: _Server, tensors: dict[str, Tensor], new: bool) -> None:
        """Over the server's own communicator; one that joins gets a `new` one. A thread that waits for a server that is
        gone is given up with its communicator.
        """
        from dccot.rollout.vllm_nccl import NcclLink

        async with self._nccl:  # one at a time
            if new or server.url not in self._links:
                await server.client.post("/shutdown_weight_transfer_engine", timeout=PATIENCE)  # an earlier trainer's
                answer = await server.client.get("/get_world_size", timeout=PATIENCE)
                link = NcclLink(server.url, answer.json()["world_size"])
                joined = self._ask(server, "/init_weight_transfer_engine", {"init_info": link.joins})
                await asyncio.wait_for(asyncio.gather(joined, asyncio.to_thread(link.join)), PUSH_SECONDS)
                self._links[server.url] = link
            link = self._links[server.url]
            updated = self._ask(server, "/update_weights", {"update_info": link.describe(tensors)})
            await asyncio.wait_for(asyncio.gather(updated, asyncio.to_thread(link.send, tensors)), PUSH_SECONDS)

    async def _compare(self, server: _Server, version: int) -> None:
        """Raise if its weights differ from those of a server that has this version already."""
        async with self._comparing:
            for other in [other for other in self._servers if other.version == version][:1]:
                ask = {"action": "checksum"}
                mine, theirs = [
                    (await self._ask(each, "/weight_checker", ask))["checksums"] for each in (server, other)
                ]
                if wrong := sorted(name for name in mine.keys() | theirs.keys() if mine.get(name) != theirs.get(name)):
                    raise ValueError(f"{len(wrong)} weights differ from those of {other.url}: {', '.join(wrong[:5])}")
            server.version = version

    async def _label(self, server: _Server) -> str:
        answer = await server.client.get("/weight_info", timeout=PATIENCE)
        answer.raise_for_status()
        return answer.json()["weight_version"]

    async def _ask(self, server: _Server, path: str, body: dict | None = None, seconds: float = PUSH_SECONDS) -> Any:
        answer = await server.client.post(path, json=body, timeout=seconds)
        answer.raise_for_status()
        return answer.json()

    def _other_weights(self, server: _Server, prompt_logprobs: list[dict]) -> str | None:
        """It gets the right ones before it samples."""
        return None

    def _body(self, call: Call, sampling: dict, priority: int) -> dict:
        rule = {name: value for name, value in sampling.items() if value is not None}
        return {"token_ids": call.prompt, "priority": priority, "sampling_params": rule}

    def _completion(self, call: Call, choice: dict) -> Completion:
        stop = self._sampling.stop_of(call, choice["finish_reason"], choice["stop_reason"])
        logprobs = [token["logprob"] for token in choice["logprobs"]["content"]]
        ids, versions = choice["token_ids"], versions_of(choice["weight_versions"])
        if not 0 < len(ids) == len(logprobs) == len(versions) <= call.max_tokens:
            sizes = f"{len(ids)} ids, {len(logprobs)} log-probs and {len(versions)} versions"
            raise ValueError(f"nonsense: {sizes} for a call of at most {call.max_tokens} tokens")
        return Completion(ids, logprobs, stop, versions=versions)


def _said(error: Exception) -> str:
    if isinstance(error, httpx.HTTPStatusError):
        return f"{error.request.url.path} answered {error.response.status_code}: {error.response.text[:200]}"
    return f"{type(error).__name__}: {error}"
