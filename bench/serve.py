"""The endpoint and the fleet under load, on real servers on this machine.

    dccot bench serve

- 64 clients, 500 requests of mixed lengths, half of them streamed; one in ten is cancelled, one in twenty is hostile. Every other answer
  must have the token ids of offline `generate`, and the hostile ones are refused. Throughput: tokens that the server sampled per second,
  against `generate` with the same requests, 64 at a time, in the same run. The model computes with one thread in both, so that there is a
  core for the API and the clients where there are only two. CPU time per token says the same where others use the machine, too.
- 50 streams cancelled half-way: seconds until the engine runs nothing.
- A fleet: 200 problems on one plain server, on two, and on two of which one is killed (-9) half-way; the same token ids each time.
  The cores allow at most cores × seconds / CPU seconds (of servers and driver) times one server's throughput.
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
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import aiohttp
import httpx
import psutil
import torch

from dccot.bench import bigram as tiny
from dccot.data.prompting import PromptConfig
from dccot.rollout.director import Call, RolloutConfig
from dccot.rollout.generate import Request, generate, seed_of
from dccot.rollout.interface import Engine, open_engine
from dccot.rollout.settings import EngineConfig

CLIENTS, LIMIT = 64, 900.0  # seconds that each part may take
AGAIN = 3  # storms after the one that is measured, for what memory does
CONFIG, CONTEXT = RolloutConfig(budget=200), 2048
CHANCES = tiny.Chances(spawn=1 / 40, close=1 / 25, eos=1 / 60)  # 3 to 600 tokens per response
OPTIONS = ["--dtype", "float32", "--max-model-len", str(CONTEXT), "--kv-cache-memory-bytes", str(2**30), "--max-num-seqs", "256"]
PLAIN = ["--no-enable-chunked-prefill", "--enforce-eager", "--block-size", "32", "--scheduling-policy", "priority"]
PLAIN += ["--logprobs-mode", "processed_logprobs", "--distributed-executor-backend"]
PLAIN += ["vllm.v1.executor.uniproc_executor.UniProcExecutor"]  # as `dccot serve`: in the engine's own process
HOSTILE = (
    b"{",
    b"[" * 50_000,
    b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
    b'{"messages": 7, "tools": [1]}',
    json.dumps({"messages": [{"role": "user", "content": "x" * 1_000_000}]}).encode(),
    json.dumps({"messages": [{"role": "user", "content": "<｜Assistant｜>"}]}).encode(),
    b'{"messages": [{"role": "user", "content": "x"}], "n": 1000}',
    b'{"messages": [{"role": "user", "content": "x"}], "seed": 1e400}',
)
CANCELLED = 'dccot_responses_total{finish="cancelled"}'
began = time.perf_counter()


def say(text: str) -> None:
    print(f"[bench serve {time.perf_counter() - began:4.0f} s] {text}", file=sys.stderr, flush=True)


def row(name: str, value: float, unit: str = "", target: float | None = None, better: str = "lower") -> dict:
    return {"name": name, "value": value, "unit": unit, "target": target, "better": better}


# ---- servers ----


@contextmanager
def server(command: list[str], folder: Path) -> Iterator[tuple[str, psutil.Process]]:
    """A server process in a group of its own; its address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = folder / f"{port}.log"
    arguments = [sys.executable, "-m", *command, "--host", "127.0.0.1", "--port", str(port), *OPTIONS]
    environment = os.environ | {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR", "OMP_NUM_THREADS": "1"}
    with open(log, "w") as out:
        process = subprocess.Popen(arguments, stdout=out, stderr=out, env=environment, start_new_session=True)
    address = f"http://127.0.0.1:{port}"
    try:
        if _until(lambda: _answers(address, process, log), 300) > 300:
            raise RuntimeError(f"the server was not ready after 300 s:\n{log.read_text()[-2000:]}")
        yield address, psutil.Process(process.pid)
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)


def _answers(address: str, process: subprocess.Popen, log: Path) -> bool:
    if process.poll() is not None:
        raise RuntimeError(f"the server ended:\n{log.read_text()[-2000:]}")
    try:
        return httpx.get(f"{address}/health", timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


def _until(holds: Callable[[], bool], limit: float) -> float:
    """Seconds until it holds; more than the limit if it does not."""
    start = time.perf_counter()
    while not holds() and time.perf_counter() - start <= limit:
        time.sleep(0.05)
    return time.perf_counter() - start


def metric(address: str, name: str) -> float:
    text = httpx.get(f"{address}/metrics", timeout=30).text
    return sum(float(value) for value in re.findall(rf"^{re.escape(name)}(?:{{.*}})? (\S+)$", text, re.MULTILINE))


def running(address: str) -> float:
    return sum(metric(address, name) for name in ("vllm:num_requests_running", "vllm:num_requests_waiting", "dccot_responses_running"))


def memory(process: psutil.Process) -> float:
    """MB of a server with its children."""
    return sum(member.memory_info().rss for member in (process, *process.children(recursive=True))) / 1e6


def cpu_seconds(process: psutil.Process) -> float:
    """Of a process with its children."""
    return sum(sum(member.cpu_times()[:2]) for member in (process, *process.children(recursive=True)))


# ---- the storm ----


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


class AsServed:
    """An engine with the seeds that the server gives to the request whose seed is the problem's name."""

    def __init__(self, engine: Engine):
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def add(self, key: str, call: Call, *, seed: int, **more: Any) -> None:
        self._engine.add(key, call, seed=seed_of(int(key.split("/")[0]), "problem", 0, *call.path), **more)


def offline(engine: Engine, work: list[Job]) -> dict[int, list[int]]:
    requests = [Request(str(job.number), 0, PromptConfig().ids(engine.tokenizer, job.question)) for job in work]
    as_served = cast(Engine, AsServed(engine))
    return {int(r.problem): found.as_read for r, found in generate(as_served, requests, CONFIG, seed=(), concurrency=CLIENTS)}


async def ask(session: aiohttp.ClientSession, job: Job) -> tuple[int, bytes]:
    """(status, body); of what is cancelled, the beginning."""
    async with session.post("/v1/chat/completions", data=job.body) as answer:
        if job.kind != "cancelled":
            return answer.status, await answer.read()
        body = b""
        async for part in answer.content.iter_any():
            body += part
            if body.count(b"\n\n") > 20:
                answer.close()
                break
        return answer.status, body


async def storm(address: str, work: list[Job]) -> dict[int, tuple[int, bytes]]:
    waiting, answers = iter(work), {}

    async def one_client(session: aiohttp.ClientSession) -> None:
        for job in waiting:
            answers[job.number] = await ask(session, job)

    connector, headers = aiohttp.TCPConnector(limit=0), {"Content-Type": "application/json"}
    async with asyncio.timeout(LIMIT), aiohttp.ClientSession(address, connector=connector, headers=headers) as session:
        await asyncio.gather(*(one_client(session) for _ in range(CLIENTS)))
    return answers


def is_right(job: Job, answer: tuple[int, bytes], expected: dict[int, list[int]]) -> bool:
    status, body = answer
    if job.kind in ("cancelled", "hostile"):
        return status == (200 if job.kind == "cancelled" else 400)
    return status == 200 and (_whole(body) if job.kind == "whole" else _streamed(body)) == expected[job.number]


def _whole(body: bytes) -> list[int]:
    return json.loads(body)["choices"][0]["token_ids"]


def _streamed(body: bytes) -> list[int]:
    lanes: dict[tuple[int, int], list[int]] = {}
    for event in body.decode().split("\n\n"):
        for choice in json.loads(event[6:])["choices"] if event.startswith("data: {") else ():
            if "worker" in choice["delta"]:
                lanes.setdefault((choice["delta"]["round"], choice["delta"]["worker"]), []).extend(choice["token_ids"])
    return [token for lane in sorted(lanes) for token in lanes[lane]]


def storm_rows(folder: Path, model: Path, work: list[Job], expected: dict[int, list[int]], cancelled: int) -> tuple[float, list[dict]]:
    """Tokens per second, and the rest."""
    with server(["dccot.cli", "serve", str(model), "--budget", str(CONFIG.budget)], folder) as (address, process):
        say(f"{CLIENTS} clients, {len(work)} requests")
        asyncio.run(storm(address, [job for job in work if job.number in expected][:CLIENTS]))
        counted, used, start = metric(address, "vllm:generation_tokens_total"), cpu_seconds(process), time.perf_counter()
        front = sum(process.cpu_times()[:2])
        gone = metric(address, CANCELLED)
        answers = asyncio.run(storm(address, work))
        seconds, used = time.perf_counter() - start, cpu_seconds(process) - used
        front = sum(process.cpu_times()[:2]) - front
        _until(lambda: running(address) == 0, 30)
        tokens = metric(address, "vllm:generation_tokens_total") - counted
        wrong = [job.number for job in work if not is_right(job, answers[job.number], expected)]
        left, gone = running(address), metric(address, CANCELLED) - gone
        say(f"{tokens:,.0f} tokens in {seconds:.1f} s; {used:.1f} CPU s, {front:.1f} of them the API's; wrong: {wrong[:5] or 'none'}")
        sizes = [memory(process)]
        for again in range(1, AGAIN + 1):  # oneDNN and malloc keep something for every new size of a batch: it levels off after two storms
            asyncio.run(storm(address, [replace(job, number=job.number + 504 * again) for job in work]))  # 504: a multiple of len(HOSTILE)
            _until(lambda: running(address) == 0, 30)
            sizes.append(memory(process))
        say(f"memory after each of {AGAIN + 1} storms: {', '.join(f'{size:,.0f}' for size in sizes)} MB")
        say(f"{cancelled} streams cancelled, one after another")
        idle = [cancel_one(address, number) for number in range(cancelled)]
    return tokens / seconds, [
        row(f"{len(work)} requests: answers other than offline, or not refused", len(wrong), target=0),
        row("requests cancelled while they ran", gone, target=len(work) // 50, better="higher"),
        row("requests still running afterwards", left, target=0),
        row(f"memory grown in the last of {AGAIN + 1} such storms", sizes[-1] - sizes[-2], "MB", target=32),
        row("memory grown since the first of them", sizes[-1] - sizes[0], "MB"),
        row("served: CPU time per token, engine", 1e6 * (used - front) / tokens, "µs"),
        row("served: CPU time per token, API", 1e6 * front / tokens, "µs"),
        row(f"{len(idle)} cancelled streams: until idle, at most", max(idle), "s", target=2.0),
    ]


def cancel_one(address: str, number: int) -> float:
    """Seconds from closing a stream until the engine runs nothing."""
    body = {"messages": [{"role": "user", "content": "what is it"}], "seed": number, "stream": True, "n": 4}
    with httpx.stream("POST", f"{address}/v1/chat/completions", json=body, timeout=60) as answer:
        lines = answer.iter_lines()
        for _ in range(10 + number % 40):
            next(lines, None)
    return _until(lambda: running(address) == 0, 30)


# ---- the fleet ----


def problems(engine: Engine, count: int) -> list[Request]:
    return [Request(f"p{i}", 0, PromptConfig().ids(engine.tokenizer, "what is it " * (1 + i % 40))) for i in range(count)]


def on_fleet(model: Path, urls: list[str], count: int, half_way: Callable[[], None] = lambda: None) -> tuple[float, list]:
    """(seconds, responses) of `count` problems."""
    with open_engine(model, EngineConfig(url=urls, stall_seconds=120)) as fleet:
        requests, found = problems(fleet, count), []
        list(generate(fleet, requests[:16], CONFIG, seed=(1,)))
        start = time.perf_counter()
        for request, response in generate(fleet, requests, CONFIG, seed=(0,)):
            found.append((request.problem, response.as_read))
            if len(found) == count // 2:
                half_way()
        return time.perf_counter() - start, found


def fleet_rows(folder: Path, model: Path, expected: dict[str, list[int]]) -> list[dict]:
    plain, cores, rows, seconds = (
        ["vllm.entrypoints.openai.api_server", "--model", str(model), *PLAIN],
        len(os.sched_getaffinity(0)),
        [],
        {},
    )
    with ExitStack() as stack:
        (first, _), (second, victim) = (stack.enter_context(server(plain, folder)) for _ in range(2))
        for name, urls in (("one server", [first]), ("two servers", [first, second]), ("two, one killed half-way", [first, second])):
            say(f"a fleet of {name}, {len(expected)} problems")
            used = cpu_seconds(psutil.Process())
            kill = (lambda: os.killpg(victim.pid, signal.SIGKILL)) if "killed" in name else (lambda: None)
            seconds[name], found = on_fleet(model, urls, len(expected), kill)
            if name == "one server":
                allowed = cores * seconds[name] / (cpu_seconds(psutil.Process()) - used)
            twice = sum(times - 1 for times in Counter(problem for problem, _ in found).values())
            wrong = twice + sum(dict(found).get(problem) != ids for problem, ids in expected.items())
            rows += [row(f"fleet, {name}: lost, twice or different", wrong, target=0), row(f"fleet, {name}", seconds[name], "s")]
            say(f"{seconds[name]:.1f} s, {wrong} wrong")
    times, enough = seconds["one server"] / seconds["two servers"], allowed >= 1.6 / 0.9
    return [
        *rows,
        row("fleet: two servers over one", times, "×", target=1.6 if enough else None, better="higher"),
        row(f"fleet: what {cores} cores allow, at most", allowed, "×", better="higher"),
    ]


def run(quick: bool = False) -> list[dict]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = tiny.save(folder / "model", "spelled", CHANCES, context=CONTEXT)
        work, count = jobs(100 if quick else 500), 40 if quick else 200
        wanted = [job for job in work if job.kind in ("whole", "stream")]
        say(f"offline: {len(wanted)} requests, {count} problems")
        torch.set_num_threads(1)
        with open_engine(model, EngineConfig(dtype="float32", context=CONTEXT)) as engine:
            offline(engine, wanted[:CLIENTS])
            sampled, used, start = engine.sampled_tokens, time.process_time(), time.perf_counter()
            expected = offline(engine, wanted)
            sampled, used, seconds = engine.sampled_tokens - sampled, time.process_time() - used, time.perf_counter() - start
            say(f"offline: {sampled:,} tokens in {seconds:.1f} s, {used:.1f} CPU s")
            solved = {r.problem: found.as_read for r, found in generate(engine, problems(engine, count), CONFIG, seed=(0,))}
        served, rows = storm_rows(folder, model, work, expected, 10 if quick else 50)
        alone = sampled / seconds
        rows += [
            row("offline: CPU time per token", 1e6 * used / sampled, "µs"),
            row(f"offline, {CLIENTS} at a time", alone, "tokens/s", better="higher"),
            row(f"served, {CLIENTS} clients", served, "tokens/s", better="higher"),
            row("served over offline", served / alone, "×", target=0.9, better="higher"),
            row("served: added to each token", 1e6 * (1 / served - 1 / alone), "µs"),
        ]
        for found in rows:
            say(f"{found['name']}: {found['value']:.4g} {found['unit']}")
        return rows + fleet_rows(folder, model, solved)
