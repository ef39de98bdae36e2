"""Servers in memory that answer as `vllm serve` does for training, and die, hang, lie and come back at random.

with stub_servers(seed, count, tokenizer) as stubs:      in the place of the network
    train(… engine.url=[stub.url for stub in stubs] …)
    stubs[0].violations                                   what a trainer must never do
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import random
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from unittest.mock import patch

import httpx

from dccot.rollout import fleet

MIXTURE = "mixture"


class Stub:
    def __init__(self, number: int, chance: random.Random, tokenizer, faults: float):
        self.url, self.chance, self.tokenizer, self.faults = f"http://stub{number}:8000", chance, tokenizer, faults
        self.violations: list[str] = []
        self.happened: list[str] = []
        self.sampled = self.lives = 0
        self.engine_hangs_after = math.inf  # calls
        self.damage = ""  # of the weights that it takes
        self.start()

    def start(self) -> None:
        """As the process starts: with the weights of its folder, which have no number."""
        self.label, self.weights, self.paused, self.updating, self.dead_until = "default", "folder", False, False, 0.0
        self.lives += 1

    async def answer(self, request: httpx.Request) -> httpx.Response:
        loop = asyncio.get_running_loop()
        if loop.time() < self.dead_until:
            raise httpx.ConnectError("it is dead")
        if self.sampled >= self.engine_hangs_after and request.url.path != "/health":
            await asyncio.sleep(1.0 if request.extensions["timeout"]["read"] else 3600)
            raise httpx.ReadTimeout("its engine hangs")
        await self._misfortune(request.url.path)
        body = json.loads(request.content) if request.content else {}
        act = getattr(self, "on_" + request.url.path.strip("/").replace("/", "_"))
        return await act(body)

    async def _misfortune(self, path: str) -> None:
        if (
            path in ("/health", "/v1/models", "/tokenize", "/v1/completions", "/resume")
            or self.chance.random() > self.faults
        ):
            return
        kind = self.chance.choice(["dies", "fails", "hangs"])
        self.happened.append(f"{kind} at {path}")
        if kind == "dies":
            self.start()
            self.dead_until = asyncio.get_running_loop().time() + self.chance.random() * 0.3
            raise httpx.ReadError("the connection was closed")
        if kind == "hangs":
            await asyncio.sleep(self.chance.random() * 0.2)
            return
        if path == "/update_weights":
            self.weights, self.updating = MIXTURE, False
        raise httpx.ReadError("broken pipe")

    # ---- vLLM's routes ----

    async def on_health(self, body: dict) -> httpx.Response:
        return httpx.Response(200)

    async def on_v1_models(self, body: dict) -> httpx.Response:
        return httpx.Response(200, json={"data": [{"id": "stub", "max_model_len": 256}]})

    async def on_tokenize(self, body: dict) -> httpx.Response:
        return httpx.Response(200, json={"tokens": self.tokenizer.encode(body["prompt"], add_special_tokens=False)})

    async def on_v1_completions(self, body: dict) -> httpx.Response:
        while self.paused:
            await asyncio.sleep(0.01)
        tops = {letter: -index / body["temperature"] for index, letter in enumerate("abc")}
        choice = {"logprobs": {"top_logprobs": [tops]}, "prompt_logprobs": [None]}
        return httpx.Response(200, json={"choices": [choice]})

    async def on_pause(self, body: dict) -> httpx.Response:
        self.paused = True
        return httpx.Response(200, json={})

    async def on_resume(self, body: dict) -> httpx.Response:
        self.paused = False
        return httpx.Response(200, json={})

    async def on_start_weight_update(self, body: dict) -> httpx.Response:
        if self.updating:
            return httpx.Response(500, text="a weight update is already active")
        self.updating = True
        return httpx.Response(200, json={})

    async def on_update_weights(self, body: dict) -> httpx.Response:
        if not self.paused or not self.updating:
            self.violations.append("weights replaced under running calls")
        self.weights = MIXTURE
        await asyncio.sleep(self.chance.random() * 0.02)
        self.weights = hashlib.sha256(Path(body["update_info"]["path"]).read_bytes()).hexdigest() + self.damage
        return httpx.Response(200, json={})

    async def on_finish_weight_update(self, body: dict) -> httpx.Response:
        self.label, self.updating = body["weight_version"], False
        return httpx.Response(200, json={})

    async def on_weight_info(self, body: dict) -> httpx.Response:
        return httpx.Response(200, json={"weight_version": self.label})

    async def on_weight_checker(self, body: dict) -> httpx.Response:
        return httpx.Response(200, json={"checksums": {"all": self.weights}})

    async def on_inference_v1_generate(self, body: dict) -> httpx.Response:
        """Some tokens, each with the version of its time; then a tag, or the end."""
        rule = body["sampling_params"]
        ids, versions, life = [], [], self.lives
        last = self.chance.choice([self.tokenizer.eos_token_id, *(rule.get("stop_token_ids") or [])])
        wanted = min(rule["max_tokens"], self.chance.randrange(2, 12))
        while len(ids) < wanted:
            await asyncio.sleep(self.chance.random() * 0.01)
            if self.paused:
                continue
            if self.lives != life:
                raise httpx.ReadError("it died")
            if self.weights == MIXTURE or (self.label.isdigit() and self.weights == "folder"):
                self.violations.append(f"sampled with {self.weights} as version {self.label}")
            ids.append(5)
            versions.append(self.label)
        ids[-1] = last
        self.sampled += 1
        spans = [{"version": version, "start": i, "end": i + 1} for i, version in enumerate(versions)]
        choice = {"token_ids": ids, "weight_versions": spans, "finish_reason": "stop"}
        choice["stop_reason"] = None if last == self.tokenizer.eos_token_id else last
        choice["logprobs"] = {"content": [{"logprob": -1.0} for _ in ids]}
        if self.chance.random() < self.faults:
            self.happened.append("nonsense")
            choice = self.chance.choice([{}, choice | {"token_ids": []}, choice | {"weight_versions": None}])
        return httpx.Response(200, json={"choices": [choice]})


@contextmanager
def stub_servers(seed: int, count: int, tokenizer, faults: float = 0.02) -> Iterator[list[Stub]]:
    stubs = [Stub(number, random.Random(f"{seed}/{number}"), tokenizer, faults) for number in range(count)]
    by_host = {httpx.URL(stub.url).host: stub for stub in stubs}
    network = httpx.MockTransport(lambda request: by_host[request.url.host].answer(request))
    client = partial(httpx.AsyncClient, transport=network)
    quick = {"PULSE": 0.05, "RETRY": 0.02, "PATIENCE": 5.0, "ATTEMPTS": 1000}
    with patch.multiple(fleet, **quick), patch.object(fleet.httpx, "AsyncClient", client):
        yield stubs
