"""The endpoint and the fleet under load, on real servers on this machine.

    dccot bench serve

- 64 clients, 500 requests of mixed lengths, half of them streamed; one in ten is cancelled, one in twenty is hostile. Every other answer
  must have the token ids of the in-process engine. Throughput: tokens that the server sampled per second, against the same requests on
  the in-process engine, 64 at a time, in the same run.
- 50 streams cancelled half-way: seconds until the engine runs nothing.
- A fleet: 200 responses on one plain server, on two, and on two of which one is killed half-way; the same token ids each time.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

from dccot.bench import bigram as tiny
from dccot.data.prompting import PromptConfig
from dccot.rollout.director import Director, RolloutConfig
from dccot.rollout.generate import Request, generate, seed_of
from dccot.rollout.interface import Engine, open_engine
from dccot.rollout.protocol import TagIds
from dccot.rollout.settings import EngineConfig

CLIENTS, BUDGET, CONTEXT = 64, 400, 2048
CHANCES = tiny.Chances(spawn=1 / 60, close=1 / 40, eos=1 / 120)
OPTIONS = ["--dtype", "float32", "--max-model-len", str(CONTEXT), "--kv-cache-memory-bytes", str(2**30), "--max-num-seqs", "256"]
PLAIN = ["--no-enable-chunked-prefill", "--enforce-eager", "--block-size", "32", "--scheduling-policy", "priority"]
HOSTILE = (b"{", b"[" * 50_000, b'{"messages": [{"role": "user", "content": "\\ud800"}]}', b'{"messages": 7, "tools": [1]}')


@contextmanager
def server(command: list[str], folder: Path) -> Iterator[tuple[str, subprocess.Popen]]:
    """A server process in a group of its own; its address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = os.environ | {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    with open(folder / f"{port}.log", "w") as log:
        arguments = [sys.executable, "-m", *command, "--host", "127.0.0.1", "--port", str(port), *OPTIONS]
        process = subprocess.Popen(arguments, stdout=log, stderr=log, env=environment, start_new_session=True)
    address = f"http://127.0.0.1:{port}"
    try:
        _until(lambda: _answers(address, process, folder / f"{port}.log"), 600)
        yield address, process
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(60)


def _answers(address: str, process: subprocess.Popen, log: Path) -> bool:
    if process.poll() is not None:
        raise RuntimeError(f"the server ended:\n{log.read_text()[-2000:]}")
    try:
        return httpx.get(f"{address}/health", timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


def _until(holds, seconds: float) -> float:
    """Seconds until it holds."""
    start = time.perf_counter()
    while not holds():
        if time.perf_counter() - start > seconds:
            raise RuntimeError(f"nothing after {seconds} s")
        time.sleep(0.05)
    return time.perf_counter() - start


def metric(address: str, name: str) -> float:
    text = httpx.get(f"{address}/metrics", timeout=30).text
    return sum(float(value) for value in re.findall(rf"^{re.escape(name)}(?:{{.*}})? (\S+)$", text, re.MULTILINE))


def running(address: str) -> float:
    return sum(metric(address, name) for name in ("vllm:num_requests_running", "vllm:num_requests_waiting", "dccot_responses_running"))


def memory(process: subprocess.Popen) -> float:
    """MB of a server with its children."""
    family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    return sum(member.memory_info().rss for member in family) / 1e6


@dataclass(frozen=True)
class Job:
    number: int
    question: str
    kind: str  # whole, stream, cancelled or hostile

    @property
    def body(self) -> bytes:
        if self.kind == "hostile":
            return HOSTILE[self.number % len(HOSTILE)]
        stream = self.kind != "whole"
        asked = {"messages": [{"role": "user", "content": self.question}], "seed": self.number, "return_token_ids": True, "stream": stream}
        return json.dumps(asked).encode()


def jobs(count: int) -> list[Job]:
    rng = random.Random(7)
    kinds = ["cancelled"] * (count // 10) + ["hostile"] * (count // 20)
    kinds += [("whole", "stream")[i % 2] for i in range(count - len(kinds))]
    rng.shuffle(kinds)
    return [Job(i, "what is it " * rng.randint(1, 40), kind) for i, kind in enumerate(kinds)]


async def ask(client: httpx.AsyncClient, job: Job) -> list[int] | None:
    """Token ids of the answer; None for what was cancelled or refused."""
    async with client.stream("POST", "/v1/chat/completions", content=job.body) as answer:
        if job.kind == "hostile":
            if answer.status_code != 400:
                raise RuntimeError(f"hostile request {job.number} was answered {answer.status_code}")
            return None
        answer.raise_for_status()
        if job.kind == "whole":
            return json.loads(await answer.aread())["choices"][0]["token_ids"]
        return await _streamed(answer, cut=20 if job.kind == "cancelled" else None)


async def _streamed(answer: httpx.Response, cut: int | None) -> list[int] | None:
    lanes: dict[tuple[int, int], list[int]] = {}
    events = 0
    async for line in answer.aiter_lines():
        if not line.startswith("data: {"):
            continue
        events += 1
        if events == cut:
            return None
        for choice in json.loads(line[6:])["choices"]:
            if "worker" in choice["delta"]:
                lane = choice["delta"]["round"], choice["delta"]["worker"]
                lanes.setdefault(lane, []).extend(choice["token_ids"])
    return None if cut else [token for lane in sorted(lanes) for token in lanes[lane]]


async def storm(address: str, work: list[Job]) -> dict[int, list[int] | None]:
    waiting, answers = iter(work), {}

    async def one_client() -> None:
        async with httpx.AsyncClient(base_url=address, timeout=600) as client:
            for job in waiting:
                answers[job.number] = await ask(client, job)

    await asyncio.gather(*(one_client() for _ in range(CLIENTS)))
    return answers


def offline(engine: Engine, work: list[Job], config: RolloutConfig) -> dict[int, list[int]]:
    """The same requests with the same seeds on the in-process engine, `CLIENTS` at a time."""
    tags, prompt = TagIds.of(engine.tokenizer, config.workers), PromptConfig()
    waiting, calls, answers = iter(work), {}, {}

    def add(job: Job, director: Director, following: list) -> None:
        for call in following:
            key = f"{job.number}/{call.path}"
            engine.add(key, call, seed=seed_of(job.number, "problem", 0, *call.path), temperature=config.temperature, priority=job.number)
            calls[key] = job, director, call

    def begin() -> None:
        for job in waiting:
            director = Director(prompt.ids(engine.tokenizer, job.question), config, tags, engine.context)
            return add(job, director, director.start())

    for _ in range(CLIENTS):
        begin()
    while calls:
        for key, completion in engine.step():
            job, director, call = calls.pop(key)
            add(job, director, director.finished(call, completion))
            if director.done:
                answers[job.number] = director.response.as_read
                begin()
    return answers


def storm_rows(folder: Path, model: Path, quick: bool) -> list[dict]:
    config = RolloutConfig(budget=BUDGET)
    work = jobs(100 if quick else 500)
    wanted = [job for job in work if job.kind in ("whole", "stream")]
    with open_engine(model, EngineConfig(dtype="float32", context=CONTEXT)) as engine:
        offline(engine, wanted[:32], config)  # warms up
        sampled, start = engine.sampled_tokens, time.perf_counter()
        expected = offline(engine, wanted, config)
        alone = (engine.sampled_tokens - sampled) / (time.perf_counter() - start)
    serve = ["dccot.cli", "serve", str(model), "--budget", str(BUDGET)]
    with server(serve, folder) as (address, process):
        asyncio.run(storm(address, wanted[:64]))
        before, counted, start = memory(process), metric(address, "vllm:generation_tokens_total"), time.perf_counter()
        answers = asyncio.run(storm(address, work))
        seconds = time.perf_counter() - start
        served = (metric(address, "vllm:generation_tokens_total") - counted) / seconds
        wrong = [job.number for job in wanted if answers[job.number] != expected[job.number]]
        left, grown = running(address), memory(process) - before
        cancelled = [cancel_one(address, number) for number in range(10 if quick else 50)]
    return [
        {"name": f"answers of {len(wanted)} that differ from offline", "value": len(wrong), "unit": "", "target": 0, "better": "lower"},
        {"name": "requests still running afterwards", "value": left, "unit": "", "target": 0, "better": "lower"},
        {"name": "memory grown meanwhile", "value": grown, "unit": "MB", "target": None, "better": "lower"},
        {"name": "served, 64 clients", "value": served, "unit": "tokens/s", "target": None, "better": "higher"},
        {"name": "offline, 64 at a time", "value": alone, "unit": "tokens/s", "target": None, "better": "higher"},
        {"name": "served over offline", "value": served / alone, "unit": "×", "target": 0.9, "better": "higher"},
        {"name": "served: added to each token", "value": 1e6 * (1 / served - 1 / alone), "unit": "µs", "target": None, "better": "lower"},
        {"name": f"{len(cancelled)} cancelled streams: until idle", "value": max(cancelled), "unit": "s", "target": 2.0, "better": "lower"},
    ]


def cancel_one(address: str, number: int) -> float:
    """Seconds from closing a stream until the engine runs nothing."""
    body = {"messages": [{"role": "user", "content": "what is it"}], "seed": number, "stream": True, "n": 4}
    with httpx.stream("POST", f"{address}/v1/chat/completions", json=body, timeout=60) as answer:
        lines = answer.iter_lines()
        for _ in range(10 + number % 40):
            next(lines, None)
    return _until(lambda: running(address) == 0, 30)


def fleet_rows(folder: Path, model: Path, quick: bool) -> list[dict]:
    config, count = RolloutConfig(budget=BUDGET), 40 if quick else 200
    plain = ["vllm.entrypoints.openai.api_server", "--model", str(model), "--logprobs-mode", "processed_logprobs", *PLAIN]
    with ExitStack() as stack:
        (first, _), (second, victim) = (stack.enter_context(server(plain, folder)) for _ in range(2))
        engine = stack.enter_context(open_engine(model, EngineConfig(dtype="float32", context=CONTEXT)))
        prompt = PromptConfig()
        requests = [Request(f"p{i}", 0, prompt.ids(engine.tokenizer, "what is it " * (1 + i % 40))) for i in range(count)]
        expected = {r.problem: response.as_read for r, response in generate(engine, requests, config, seed=(0,))}
        seconds, differing = {}, {}
        for name, urls, kill in (("one", [first], False), ("two", [first, second], False), ("killed", [first, second], True)):
            with open_engine(model, EngineConfig(url=urls)) as fleet:
                list(generate(fleet, requests[:16], config, seed=(1,)))
                start, found = time.perf_counter(), []
                for request, response in generate(fleet, requests, config, seed=(0,)):
                    found.append((request.problem, response.as_read))
                    if kill and len(found) == count // 2:
                        os.killpg(victim.pid, signal.SIGKILL)
                seconds[name] = time.perf_counter() - start
            twice = sum(times - 1 for times in Counter(problem for problem, _ in found).values())
            differing[name] = twice + sum(dict(found).get(problem) != ids for problem, ids in expected.items())
    return [
        *(
            {"name": f"fleet, {name}: lost, twice or different", "value": wrong, "unit": "", "target": 0, "better": "lower"}
            for name, wrong in differing.items()
        ),
        {"name": "two servers over one", "value": seconds["one"] / seconds["two"], "unit": "×", "target": None, "better": "higher"},
        *({"name": f"fleet, {name}", "value": value, "unit": "s", "target": None, "better": "lower"} for name, value in seconds.items()),
    ]


def run(quick: bool = False) -> list[dict]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = tiny.save(folder / "model", "spelled", CHANCES, context=CONTEXT, layers=4)
        return storm_rows(folder, model, quick) + fleet_rows(folder, model, quick)
