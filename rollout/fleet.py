"""A fleet of plain `vllm serve` processes as the `Engine` of engine.py: `engine.url=[http://a:8000,http://b:8000]`.

    add(key, call, …) ─► waiting, by priority ─► POST /v1/completions: token ids in, ids and log-probs out ─► step()

All calls of one response go to one server, whose prefix cache holds what they share; a new response goes to the least
loaded server. If a server stops responding, its calls are rerun elsewhere with the same prompts and seeds; when it
comes back it is used again. A call finishes exactly once in any case. Requests run on their own thread; `step` returns
what has arrived.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import queue
import sys
import threading
from collections.abc import Coroutine, Iterable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from pathlib import Path
from statistics import fmean
from typing import Any

import httpx

from dccot.core.config import ConfigError, warn_of_plain_http
from dccot.model.tokenizer import open_tokenizer
from dccot.rollout.director import Call, Completion
from dccot.rollout.engine import EngineConfig, Pending, Sampling
from dccot.rollout.tags import PROBE

PULSE, RETRY = 10.0, 1.0  # seconds between checks of a healthy server, of a lost one
PATIENCE = 30.0  # seconds that a check may take
ATTEMPTS = 8
HOMES = 50_000  # responses that are remembered with where they run
SAME_WEIGHTS = 0.1  # mean difference of log-probs, at most; two implementations differ by 0.02 in bf16
logging.getLogger("httpx").setLevel(logging.WARNING)  # it logs every request
NEUTRAL = {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}  # ignore the model folder's defaults


@dataclass(order=True)
class _Job:
    priority: int
    order: int
    key: str = field(compare=False)
    call: Call = field(compare=False)
    body: dict = field(compare=False)
    attempts: int = field(compare=False, default=0)
    dropped: bool = field(compare=False, default=False)  # aborted: nobody waits for it

    @property
    def response(self) -> str:
        return self.key.rpartition("/")[0] or self.key


class _Server:
    def __init__(self, url: str):
        self.url = url.rstrip("/").removesuffix("/v1")
        key = os.environ.get("VLLM_API_KEY")
        self.client = httpx.AsyncClient(
            base_url=self.url,
            headers={"Authorization": f"Bearer {key}"} if key else {},
            limits=httpx.Limits(max_connections=None, keepalive_expiry=2.0),
            timeout=httpx.Timeout(None, connect=PATIENCE),
            trust_env=False,
        )
        self.model, self.context, self.up = "", 0, False
        self.version: int | None = None  # of the weights that a trainer gave it, if all went well
        self.updating = asyncio.Lock()  # held while it gets weights
        self.tasks: dict[int, asyncio.Task] = {}  # by the order of their jobs
        self.waiting: list[_Job] = []  # of responses that have begun here
        self.doubted = asyncio.Event()

    async def post(self, path: str, body: dict, seconds: float) -> dict:
        answer = await self.client.post(path, json=body, timeout=seconds)
        answer.raise_for_status()
        return answer.json()

    async def identify(self) -> None:
        """Learn the name of its model; raises httpx.HTTPError where there is no such server."""
        answer = await self.client.get("/v1/models", timeout=PATIENCE)
        answer.raise_for_status()
        card = answer.json()["data"][0]
        self.model, self.context = card["id"], int(card["max_model_len"])

    async def answers(self, path: str) -> bool:
        try:
            return (await self.client.get(path, timeout=PATIENCE)).status_code == 200
        except httpx.HTTPError:
            return False


class Fleet:
    route = "/v1/completions"

    def __init__(self, model: str | Path, config: EngineConfig):
        self.config = config
        self.tokenizer = open_tokenizer(model)
        self.replica, self.replicas = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        self.context, self.sampled_tokens, self.pending = 0, 0, Pending(config)
        self._sampling = Sampling(self.tokenizer)
        self._jobs: dict[str, _Job] = {}
        self._results: queue.SimpleQueue[tuple[_Job, Completion | Exception]] = queue.SimpleQueue()
        self._servers: list[_Server] = []
        self._guards: list[asyncio.Task] = []
        self._waiting: list[_Job] = []  # of responses that have no server yet
        self._home: dict[str, _Server] = {}  # response → where it runs
        self._order = itertools.count()
        self._weights: list[float] = []  # the first server's log-probs of the probe's tokens
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="fleet", daemon=True)
        self._thread.start()
        try:
            self._wait(self._open(config.url))
        except BaseException:
            self.shutdown()
            raise
        self.context = min(config.context or sys.maxsize, *(server.context for server in self._servers))

    # ---- the caller's side ----

    def add(
        self, key: str, call: Call, *, seed: int, temperature: float, top_p: float = 1.0, priority: int = 0
    ) -> None:
        self.pending.begin(key, call)
        rule = self._sampling.parameters(call, seed=seed, temperature=temperature, top_p=top_p)
        body = self._body(call, {"logprobs": 0} | rule | NEUTRAL, priority)
        self._jobs[key] = job = _Job(priority, next(self._order), key, call, body)
        self._loop.call_soon_threadsafe(self._enqueue, job)

    def step(self) -> list[tuple[str, Completion]]:
        """Wait a little for calls to finish; returns those that did."""
        arrived = []
        with contextlib.suppress(queue.Empty):
            arrived.append(self._results.get(timeout=0.1))
            while True:
                arrived.append(self._results.get_nowait())
        finished = []
        for job, result in arrived:
            if self._jobs.get(job.key) is not job:  # aborted meanwhile
                continue
            if isinstance(result, Exception):
                raise result
            del self._jobs[job.key]
            finished.append((job.key, result))
            self.sampled_tokens += len(result.ids)
        self.pending.after_step((key for key, _ in finished), self.state)
        return finished

    @property
    def running(self) -> int:
        return sum(len(server.tasks) for server in self._servers)

    def written(self) -> dict[str, list[int]]:
        """Nothing, for every pending call: a server returns text only when a call has finished."""
        return {key: [] for key in self._jobs}

    def abort(self, keys: Iterable[str]) -> None:
        jobs = [self._jobs.pop(key) for key in list(keys) if key in self._jobs]
        for job in jobs:
            del self.pending[job.key]
        if not self._loop.is_closed():  # a generator may be collected after its engine was shut down
            self._loop.call_soon_threadsafe(self._drop, jobs)

    def forget_prefixes(self) -> None:
        """The servers keep theirs, which others may be using: it affects timing, and tokens only by rounding."""

    def shutdown(self) -> None:
        self.abort(list(self._jobs))
        with contextlib.suppress(Exception):
            self._wait(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(PATIENCE)
        if not self._loop.is_running():
            self._loop.close()

    def _wait(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def state(self) -> str:
        """Every server, in one line."""
        states = [("up" if server.up else "does not answer", len(server.tasks)) for server in self._servers]
        return ", ".join(f"{s.url} ({state}, {calls} calls)" for s, (state, calls) in zip(self._servers, states))

    def _body(self, call: Call, sampling: dict, priority: int) -> dict:
        return {"prompt": call.prompt, "priority": priority, "return_token_ids": True} | sampling

    # ---- the fleet's side: everything below runs on its thread ----

    async def _open(self, urls: list[str]) -> None:
        self._servers = [_Server(url) for url in urls]
        for server in self._servers:
            warn_of_plain_http(server.url, "engine.url")
            await self._examine(server)
            server.up = await self._ready(server)
        self._guards = [asyncio.create_task(self._guard(server)) for server in self._servers]

    async def _ready(self, server: _Server) -> bool:
        """Whether a server that was examined may sample."""
        return True

    async def _examine(self, server: _Server) -> None:
        """ConfigError if a server cannot take part."""
        start = "start it: vllm serve MODEL"
        try:
            await server.identify()
            fault = await self._fault(server)
        except httpx.HTTPStatusError as error:
            key = error.response.status_code == 401
            remedy = "; it wants a key: set VLLM_API_KEY" if key else f": {error.response.text[:200]}"
            fault = f"answers {error.response.status_code}{remedy}"
        except httpx.HTTPError as error:
            fault = f"does not answer ({type(error).__name__}); {start}"
        except Exception as error:  # whatever it answered
            fault = f"does not answer as vLLM does ({error!r}); {start}"
        if fault:
            raise ConfigError(f"engine.url: {server.url} {fault}")

    async def _fault(self, server: _Server) -> str | None:
        """None if tokens mean the same there, weights are the same, and log-probs are at the sampling temperature."""
        if server.context < self.context:
            return f"holds {server.context:,} tokens; it held {self.context:,}: --max-model-len"
        ours = self.tokenizer.encode(PROBE, add_special_tokens=False)
        told = await server.post("/tokenize", {"prompt": PROBE, "add_special_tokens": False}, PATIENCE)
        if told["tokens"] != ours:
            return f"serves {server.model}, whose tokenizer differs from the given model's"
        # the likeliest tokens at two temperatures; not just the first, which a trained model may be certain of
        tops = []
        body = {"model": server.model, "prompt": ours, "max_tokens": 1, "seed": 0, "logprobs": 5, "prompt_logprobs": 0}
        for temperature in (0.5, 2.0):  # the first one warms it up
            told = await server.post("/v1/completions", body | {"temperature": temperature}, 10 * PATIENCE)
            choice = told["choices"][0]
            tops.append(sorted(choice["logprobs"]["top_logprobs"][0].values(), reverse=True)[:3])
        if all(abs(cold - hot) < 1e-6 for cold, hot in zip(*tops, strict=True)):
            return "reports raw log-probs; start it with --logprobs-mode processed_logprobs"
        return self._other_weights(server, choice["prompt_logprobs"])

    def _other_weights(self, server: _Server, prompt_logprobs: list[dict]) -> str | None:
        weights = [token["logprob"] for tokens in prompt_logprobs[1:] for token in tokens.values()]
        self._weights = self._weights or weights
        differ = fmean(abs(one - other) for one, other in zip(self._weights, weights, strict=True))
        if differ > SAME_WEIGHTS:
            first = f"log-probs differ by {differ:.2g} on average from those of {self._servers[0].url}"
            return f"serves {server.model} with other weights: {first}; serve one model"
        return None

    async def _close(self) -> None:
        """Cancels more than once: in Python 3.11, `wait_for` loses a cancellation that comes with its result."""
        calls = lambda: (task for server in self._servers for task in server.tasks.values())
        while running := [task for task in (*self._guards, *calls()) if not task.done()]:
            for task in running:
                task.cancel()
            await asyncio.wait(running, timeout=RETRY)
        for server in self._servers:
            await server.client.aclose()

    def _enqueue(self, job: _Job) -> None:
        home = self._home.get(job.response)
        heappush(home.waiting if home is not None else self._waiting, job)
        self._dispatch()

    def _dispatch(self) -> None:
        """Start waiting calls where there is room, the least busy server first."""
        while True:
            free = [server for server in self._servers if server.up and len(server.tasks) < self.config.max_sequences]
            for server in sorted(free, key=lambda server: len(server.tasks)):
                heaps = [heap for heap in (server.waiting, self._waiting) if heap]
                if heaps:
                    self._start(server, heappop(min(heaps, key=lambda heap: heap[0])))
                    break
            else:
                return

    def _start(self, server: _Server, job: _Job) -> None:
        if job.dropped:
            return
        self._home.pop(job.response, None)
        self._home[job.response] = server
        if len(self._home) > HOMES:
            del self._home[next(iter(self._home))]  # the one that has begun no call for longest
        task = asyncio.create_task(self._run(server, job))
        server.tasks[job.order] = task
        task.add_done_callback(lambda done: self._ended(server, job, done))

    def _ended(self, server: _Server, job: _Job, task: asyncio.Task) -> None:
        if server.tasks.get(job.order) is task:  # unless it has restarted meanwhile
            del server.tasks[job.order]
        self._dispatch()

    async def _run(self, server: _Server, job: _Job) -> None:
        try:
            answer = await server.client.post(self.route, json=job.body | {"model": server.model})
            if answer.status_code in (429, 503):  # overloaded, but healthy
                await asyncio.sleep(float(answer.headers.get("retry-after", RETRY)))
                self._enqueue(job)
                return
            if answer.status_code == 200:
                self._results.put((job, self._completion(job.call, answer.json()["choices"][0])))
                return
            if answer.status_code == 400:  # the others say something about the server, not about the call
                refused = f"{server.url} refused call {job.key!r}: {answer.text[:300]}"
                self._results.put((job, RuntimeError(refused)))
                return
            fault = f"answered {answer.status_code}: {answer.text[:200]}"
        except asyncio.CancelledError:  # dropped, or its server was lost
            fault = "does not answer"
        except Exception as error:  # whatever it answered: the caller hears of it after the last attempt
            fault = f"{type(error).__name__}: {error}"
        if job.dropped:
            return
        job.attempts += 1
        if job.attempts == ATTEMPTS:
            failed = f"call {job.key!r} failed {ATTEMPTS} times; the last time {server.url} {fault}"
            self._results.put((job, RuntimeError(failed)))
            return
        server.up = False  # until the next check
        server.doubted.set()
        self._home.pop(job.response, None)
        self._enqueue(job)

    def _completion(self, call: Call, choice: dict) -> Completion:
        stop = self._sampling.stop_of(call, choice["finish_reason"], choice["stop_reason"])
        return Completion(choice["token_ids"], choice["logprobs"]["token_logprobs"], stop)

    async def _guard(self, server: _Server) -> None:
        """Monitor one server: lost when it does not answer, used again when it does and has not changed."""
        lost, said = False, ""
        while True:
            server.doubted.clear()
            fault = "" if await self._healthy(server) else "does not answer: its calls run elsewhere"
            if not fault and not server.up:
                try:
                    await self._examine(server)
                except ConfigError as error:
                    fault = f"is not used: {error}"
            ready = bool(fault) or server.up or await self._ready(server)
            server.up = not fault and ready and not server.doubted.is_set()
            news, lost = fault or ("answers again" if lost else ""), bool(fault)
            if news and news != said:
                print(f"[fleet] {server.url} {news}", file=sys.stderr)
                said = news
            if lost:
                self._leave(server)
            self._dispatch()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(server.doubted.wait(), PULSE if server.up else RETRY)

    async def _healthy(self, server: _Server) -> bool:
        return await server.answers("/health")

    def _leave(self, server: _Server) -> None:
        """Reassign a lost server's calls to the others."""
        for task in server.tasks.values():
            task.cancel()
        self._home = {response: home for response, home in self._home.items() if home is not server}
        waiting, server.waiting = server.waiting, []
        for job in waiting:
            heappush(self._waiting, job)

    def _drop(self, jobs: list[_Job]) -> None:
        for job in jobs:
            job.dropped = True
            for server in self._servers:
                if job.order in server.tasks:
                    server.tasks[job.order].cancel()
        if not self._jobs:
            self._home.clear()
