"""The endpoint and the fleet under load, on real servers on this machine.

    dccot bench serve

- 64 clients, 500 requests of mixed lengths, half of them streamed; one in ten is cancelled, one in twenty is hostile.
  Every other answer must have the token ids of offline `generate`, and the hostile ones are refused. Throughput: tokens
  that the server sampled per second, against `generate` with the same requests, 64 at a time. A machine's speed changes
  by the minute, so both take turns, four times, and the median of the four ratios counts. The model computes with one
  thread in both, so that there is a core for the API and the clients where there are only two. CPU time per token says
  the same on a shared machine.
- 50 streams cancelled half-way: seconds until the engine runs nothing.
- A fleet: 200 problems on one plain server, on two, and on two of which one is killed (-9) half-way; the same token ids
  each time. The cores allow at most cores × seconds / CPU seconds (of servers and driver) times one server's speed.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import signal
import socket
import statistics
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

from dccot.core.runtime import START_UP
from dccot.data.prompts import PromptConfig
from dccot.lab.bench.harness import row
from dccot.lab.worlds import bigram as tiny
from dccot.rollout.director import Call, RolloutConfig
from dccot.rollout.engine import ONE_PROCESS, Engine, EngineConfig, as_flags, open_engine, vllm_options
from dccot.rollout.generate import Request, Watch, generate, seed_of

CLIENTS, LIMIT = 64, 900.0  # seconds that each part may take
PAIRS = 4  # storms, each followed by the same requests offline; oneDNN and malloc keep something for each new size
CONFIG = RolloutConfig(budget=200)
CHANCES = tiny.Chances(spawn=1 / 40, close=1 / 25, eos=1 / 60)  # 3 to 600 tokens per response
CONTEXT = 2048
SIZES = {"dtype": "float32", "max_model_len": CONTEXT, "kv_cache_memory_bytes": 2**30, "max_num_seqs": 256}
PLAIN = as_flags(vllm_options(on_gpu=False) | {"distributed_executor_backend": ONE_PROCESS})  # as `dccot serve`
CANCELLED = 'dccot_responses_total{finish="cancelled"}'


def _question(text: str, **more: Any) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": text}], **more}).encode()


HOSTILE = (
    b"{",
    b"[" * 50_000,
    b'{"messages": 7, "tools": [1]}',
    b'{"messages": [{"role": "user", "content": "x"}], "seed": 1e400}',
    _question("\ud800"),
    _question("x" * 1_000_000),
    _question("<｜Assistant｜>"),
    _question("x", n=1000),
)


# ---- servers: started, watched, measured, ended ----

began = time.perf_counter()


def say(text: str) -> None:
    print(f"[bench serve {time.perf_counter() - began:4.0f} s] {text}", file=sys.stderr, flush=True)


@contextmanager
def server(command: list[str], folder: Path, **sizes: int) -> Iterator[tuple[str, psutil.Process]]:
    """A server process in a group of its own; its address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log, address = folder / f"{port}.log", f"http://127.0.0.1:{port}"
    arguments = [sys.executable, "-m", *command, *as_flags({"host": "127.0.0.1", "port": port, **SIZES, **sizes})]
    environment = os.environ | {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR", "OMP_NUM_THREADS": "1"}
    with open(log, "w") as out:
        process = subprocess.Popen(arguments, stdout=out, stderr=out, env=environment, start_new_session=True)

    def answers() -> bool:
        if process.poll() is not None:
            raise RuntimeError(f"the server ended:\n{log.read_text()[-2000:]}")
        try:
            return httpx.get(f"{address}/health", timeout=5).status_code == 200
        except httpx.HTTPError:
            return False

    try:
        if until(answers, START_UP) > START_UP:
            raise RuntimeError(f"the server was not ready after {START_UP:.0f} s:\n{log.read_text()[-2000:]}")
        yield address, psutil.Process(process.pid)
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)


def until(holds: Callable[[], bool], limit: float) -> float:
    """Seconds until it holds; more than the limit if it does not."""
    start = time.perf_counter()
    while not holds() and time.perf_counter() - start <= limit:
        time.sleep(0.05)
    return time.perf_counter() - start


def metric(address: str, name: str) -> float:
    text = httpx.get(f"{address}/metrics", timeout=30).text
    return sum(float(value) for value in re.findall(rf"^{re.escape(name)}(?:{{.*}})? (\S+)$", text, re.MULTILINE))


def running(address: str) -> float:
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "dccot_responses_running")
    return sum(metric(address, name) for name in names)


def family(process: psutil.Process) -> list[psutil.Process]:
    return [process, *process.children(recursive=True)]


def cpu_seconds(process: psutil.Process) -> float:
    return sum(sum(member.cpu_times()[:2]) for member in family(process))


# ---- the storm ----


@dataclass(frozen=True)
class Job:
    number: int
    question: str
    kind: str  # whole, stream, cancelled or hostile
    branching: str = "eager"

    @property
    def body(self) -> bytes:
        if self.kind == "hostile":
            return HOSTILE[self.number % len(HOSTILE)]
        more = {"return_token_ids": True, "stream": self.kind != "whole", "branching": self.branching}
        return _question(self.question, seed=self.number, **more)


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


@dataclass(frozen=True)
class Alone:
    """Requests generated by the in-process engine."""

    found: dict[int, list[int]]
    tokens: int
    seconds: float
    used: float  # CPU seconds
    steps: int


class Steps(Watch):
    count = 0

    def stepped(self, engine: Engine) -> None:
        self.count += 1


def offline(engine: Engine, work: list[Job]) -> Alone:
    requests = [Request(str(job.number), 0, PromptConfig().ids(engine.tokenizer, job.question)) for job in work]
    as_served, steps = cast(Engine, AsServed(engine)), Steps()
    sampled, used, start = engine.sampled_tokens, time.process_time(), time.perf_counter()
    responses = generate(as_served, requests, CONFIG, seed=(), watch=steps, concurrency=CLIENTS)
    found = {int(request.problem): response.as_read for request, response in responses}
    seconds, used = time.perf_counter() - start, time.process_time() - used
    return Alone(found, engine.sampled_tokens - sampled, seconds, used, steps.count)


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
    if status != 200:
        return False
    whole = job.kind == "whole"
    return (json.loads(body)["choices"][0]["token_ids"] if whole else _streamed(body)) == expected[job.number]


def _streamed(body: bytes) -> list[int]:
    lanes: dict[tuple[int, int], list[int]] = {}
    for event in body.decode().split("\n\n"):
        for choice in json.loads(event[6:])["choices"] if event.startswith("data: {") else ():
            if "worker" in choice["delta"]:
                lanes.setdefault((choice["delta"]["round"], choice["delta"]["worker"]), []).extend(choice["token_ids"])
    return [token for lane in sorted(lanes) for token in lanes[lane]]


@dataclass(frozen=True)
class Pair:
    """One storm and, right after it, the same requests offline."""

    wrong: list[int]  # answers other than offline, or not refused
    tokens: float  # that the server sampled
    seconds: float
    engine: float  # CPU seconds
    front: float  # CPU seconds of the API
    steps: float  # of the engine
    memory: float  # MB, afterwards
    alone: Alone

    @property
    def ratio(self) -> float:
        """Tokens per second, served over offline."""
        return self.tokens / self.seconds / (self.alone.tokens / self.alone.seconds)


def one_pair(engine: Engine, address: str, process: psutil.Process, work: list[Job]) -> Pair:
    def counted() -> tuple[float, float, float, float]:
        names = ("vllm:generation_tokens_total", "vllm:iteration_tokens_total_count")
        return *(metric(address, name) for name in names), cpu_seconds(process), sum(process.cpu_times()[:2])

    before, start = counted(), time.perf_counter()
    answers = asyncio.run(storm(address, work))
    seconds = time.perf_counter() - start
    until(lambda: running(address) == 0, 30)
    tokens, steps, used, front = (now - then for now, then in zip(counted(), before, strict=True))
    alone = offline(engine, [job for job in work if job.kind in ("whole", "stream")])
    wrong = [job.number for job in work if not is_right(job, answers[job.number], alone.found)]
    memory = sum(member.memory_info().rss for member in family(process)) / 1e6
    pair = Pair(wrong, tokens, seconds, used - front, front, steps, memory, alone)
    say(f"served {tokens:,.0f} tokens in {seconds:.1f} s, offline {alone.tokens:,} in {alone.seconds:.1f} s")
    say(f"{pair.ratio:.2f}×; {memory:,.0f} MB; wrong: {wrong[:5] or 'none'}")
    return pair


def storm_rows(folder: Path, model: Path, engine: Engine, work: list[Job], cancelled: int) -> list[dict]:
    with server(["dccot.cli", "serve", str(model), "--budget", str(CONFIG.budget)], folder) as (address, process):
        say(f"{CLIENTS} clients, {len(work)} requests, {PAIRS} times")
        warm = [job for job in work if job.kind in ("whole", "stream")][:CLIENTS]
        asyncio.run(storm(address, warm))
        offline(engine, warm)
        gone, pairs = metric(address, CANCELLED), []
        for again in range(PAIRS):
            shifted = [replace(job, number=job.number + 504 * again) for job in work]  # a multiple of len(HOSTILE)
            pairs.append(one_pair(engine, address, process, shifted))
        left, gone = running(address), metric(address, CANCELLED) - gone
        say(f"{cancelled} streams cancelled, one after another")
        idle = [cancel_one(address, number) for number in range(cancelled)]

    def per(of: Callable[[Pair], float]) -> float:
        return statistics.median(map(of, pairs))

    wrong, ratios = sum(len(pair.wrong) for pair in pairs), [pair.ratio for pair in pairs]
    speed, alone = per(lambda p: p.tokens / p.seconds), per(lambda p: p.alone.tokens / p.alone.seconds)
    added = per(lambda p: 1e6 * (p.seconds / p.tokens - p.alone.seconds / p.alone.tokens))
    return [
        row(f"{PAIRS} × {len(work)} requests: answers other than offline, or not refused", wrong, "", 0),
        row("requests cancelled while they ran", gone, "", PAIRS * len(work) // 50, "higher"),
        row("requests still running afterwards", left, "", 0),
        row(f"memory grown in the last of {PAIRS} such storms", pairs[-1].memory - pairs[-2].memory, "MB", 32),
        row("memory grown since the first of them", pairs[-1].memory - pairs[0].memory, "MB"),
        row(f"{len(idle)} cancelled streams: until idle, at most", max(idle), "s", 2.0),
        row("offline: CPU time per token", per(lambda p: 1e6 * p.alone.used / p.alone.tokens), "µs"),
        row("served: CPU time per token, engine", per(lambda p: 1e6 * p.engine / p.tokens), "µs"),
        row("served: CPU time per token, API", per(lambda p: 1e6 * p.front / p.tokens), "µs"),
        row("offline: tokens per engine step", per(lambda p: p.alone.tokens / p.alone.steps), "", None, "higher"),
        row("served: tokens per engine step", per(lambda p: p.tokens / p.steps), "", None, "higher"),
        row(f"offline, {CLIENTS} at a time", alone, "tokens/s", None, "higher"),
        row(f"served, {CLIENTS} clients", speed, "tokens/s", None, "higher"),
        row(f"served over offline, median of {PAIRS} pairs", statistics.median(ratios), "×", 0.9, "higher"),
        row("served over offline, lowest", min(ratios), "×", None, "higher"),
        row("served over offline, highest", max(ratios), "×", None, "higher"),
        row("served: added to each token", added, "µs"),
    ]


def cancel_one(address: str, number: int) -> float:
    """Seconds from closing a stream until the engine runs nothing."""
    body = _question("what is it", seed=number, stream=True, n=4)
    with httpx.stream("POST", f"{address}/v1/chat/completions", content=body, timeout=60) as answer:
        lines = answer.iter_lines()
        for _ in range(10 + number % 40):
            next(lines, None)
    return until(lambda: running(address) == 0, 30)


# ---- the fleet ----


def problems(engine: Engine, count: int) -> list[Request]:
    prompts = [PromptConfig().ids(engine.tokenizer, "what is it " * times) for times in range(1, 41)]
    return [Request(f"p{i}", 0, prompts[i % 40]) for i in range(count)]


def on_fleet(model: Path, urls: list[str], count: int, half_way: Callable[[], None]) -> tuple[float, list]:
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
    plain = ["vllm.entrypoints.openai.api_server", "--model", str(model), *PLAIN]
    cores, rows, seconds = len(os.sched_getaffinity(0)), [], {}
    with ExitStack() as stack:
        (first, _), (second, victim) = (stack.enter_context(server(plain, folder)) for _ in range(2))
        for name in ("one server", "two servers", "two, one killed half-way"):
            say(f"a fleet of {name}, {len(expected)} problems")
            urls, used = [first] if name == "one server" else [first, second], cpu_seconds(psutil.Process())
            kill = (lambda: os.killpg(victim.pid, signal.SIGKILL)) if "killed" in name else (lambda: None)
            seconds[name], found = on_fleet(model, urls, len(expected), kill)
            if name == "one server":
                allowed = cores * seconds[name] / (cpu_seconds(psutil.Process()) - used)
            twice = sum(times - 1 for times in Counter(problem for problem, _ in found).values())
            wrong = twice + sum(dict(found).get(problem) != ids for problem, ids in expected.items())
            rows += [row(f"fleet, {name}: lost, twice or different", wrong, "", 0)]
            rows += [row(f"fleet, {name}", seconds[name], "s")]
            say(f"{seconds[name]:.1f} s, {wrong} wrong")
    times, enough = seconds["one server"] / seconds["two servers"], allowed >= 1.6 / 0.9
    rows += [row("fleet: two servers over one", times, "×", 1.6 if enough else None, "higher")]
    return [*rows, row(f"fleet: what {cores} cores allow, at most", allowed, "×", None, "higher")]


def run(quick: bool = False) -> list[dict]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = tiny.save(folder / "model", "spelled", CHANCES, context=CONTEXT)
        work, count = jobs(100 if quick else 500), 40 if quick else 200
        torch.set_num_threads(1)
        with open_engine(model, EngineConfig(dtype="float32", context=CONTEXT)) as engine:
            rows = storm_rows(folder, model, engine, work, 10 if quick else 50)
            responses = generate(engine, problems(engine, count), CONFIG, seed=(0,))
            solved = {request.problem: response.as_read for request, response in responses}
        return rows + fleet_rows(folder, model, solved)
