"""When workers start, under load: `dccot serve` with each of its three policies, in turns, on one server.

    dccot bench load

Requests arrive at random (Poisson) at five rates, from a tenth of what the server can answer to twice that. All
policies get the same requests at the same times, and give the same tokens. An answer is good if it took at most 1.5
times what it takes alone on the idle server with all workers at once. Two settings:

- tiny: a small model whose texts fork like those of the paper's models, shortened;
- mixed: the small model with eight sequences at once, as if its memory were full; of four requests three are answered
  without workers.

And the joins: texts of 500 tokens and more, with and without reading workers before their fork has ended. And the ids:
500 requests with each policy, a tenth of them cancelled, must give those of offline `generate`.

    python -m dccot.lab.bench.load tiny joins        some of its parts: tiny, mixed, joins, ids
    python -m dccot.lab.bench.load soak 30           30 minutes at capacity, one line per minute
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import torch

from dccot.lab.bench.harness import row, table
from dccot.lab.bench.serve import CHANCES as STORMY
from dccot.lab.bench.serve import family, is_right, jobs, metric, offline, running, say, server, storm, until
from dccot.lab.worlds import bigram
from dccot.rollout.engine import EngineConfig, open_engine

POLICIES = ("never", "eager", "adaptive")
RATES = (0.1, 0.4, 0.7, 1.0, 2.0)  # of the capacity
GOOD = 1.5  # times the time alone
CONTEXT = 4096
PAPER_LIKE = bigram.Chances(spawn=1 / 50, close=1 / 40, eos=1 / 50)
LONG = bigram.Chances(spawn=1 / 200, close=1 / 2400, eos=1 / 1500)  # workers of 520 tokens
SECONDS, TURNS = 8.0, 2  # of arrivals in a turn of each policy; turns
CLIENTS = 48  # at once, to measure the capacity


@dataclass(frozen=True)
class Setting:
    name: str
    sequences: int = 256  # in a batch, at most
    plain: float = 0.0  # share of the requests without workers


SETTINGS = (Setting("tiny"), Setting("mixed", sequences=8, plain=0.75))


@dataclass(frozen=True)
class Asked:
    number: int
    plain: bool

    def body(self, branching: str) -> dict[str, Any]:
        question = {"role": "user", "content": "what is it " * (1 + self.number % 5)}
        effort = {"reasoning_effort": "none"} if self.plain else {}
        return {"messages": [question], "seed": self.number, "branching": branching, **effort}


@dataclass(frozen=True)
class Answered:
    seconds: float
    tokens: int
    path: int

    @property
    def parallelism(self) -> float:
        return self.tokens / self.path


class Client:
    def __init__(self, session: aiohttp.ClientSession):
        self._session = session

    async def ask(self, asked: Asked, branching: str) -> Answered:
        start = time.perf_counter()
        async with self._session.post("/v1/chat/completions", json=asked.body(branching)) as answer:
            usage = json.loads(await answer.read())["usage"]
        seconds, details = time.perf_counter() - start, usage["completion_tokens_details"]
        return Answered(seconds, usage["completion_tokens"], details["longest_path_tokens"])

    async def one_by_one(self, work: Sequence[Asked], branching: str) -> list[Answered]:
        return [await self.ask(asked, branching) for asked in work]

    async def rate(self, work: Sequence[Asked]) -> float:
        """Answers per second with `CLIENTS` at once."""
        waiting = iter(work)

        async def one() -> None:
            for asked in waiting:
                await self.ask(asked, "eager")

        start = time.perf_counter()
        await asyncio.gather(*(one() for _ in range(CLIENTS)))
        return len(work) / (time.perf_counter() - start)

    async def arriving(self, work: Sequence[Asked], rate: float, branching: str) -> list[Answered]:
        rng, tasks, due = random.Random(f"{rate:.3g}"), [], time.perf_counter()
        for asked in work:
            due += rng.expovariate(rate)
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            tasks.append(asyncio.create_task(self.ask(asked, branching)))
        return await asyncio.gather(*tasks)


@dataclass(frozen=True)
class Cell:
    """One rate with one policy."""

    median: float
    p95: float
    speed: float  # tokens per second
    good: float

    @staticmethod
    def of(answers: Sequence[Answered], alone: Sequence[Answered], seconds: float) -> Cell:
        times = sorted(answer.seconds for answer in answers)
        good = [answer.seconds <= GOOD * quiet.seconds for answer, quiet in zip(answers, alone, strict=True)]
        speed = sum(answer.tokens for answer in answers) / seconds
        return Cell(statistics.median(times), times[math.ceil(0.95 * len(times)) - 1], speed, statistics.mean(good))


def questions(count: int, plain: float) -> list[Asked]:
    rng = random.Random(5)
    return [Asked(number, rng.random() < plain) for number in range(count)]


async def under_load(address: str, setting: Setting, rates: Sequence[float], seconds: float) -> list[dict]:
    limits = aiohttp.ClientTimeout(total=600)
    session = aiohttp.ClientSession(address, connector=aiohttp.TCPConnector(limit=0), timeout=limits)
    async with session:
        client, pool = Client(session), questions(60, setting.plain)
        await client.rate(pool)  # warm
        capacity = await client.rate(pool * 2)
        alone = {branching: await client.one_by_one(pool, branching) for branching in ("never", "eager")}
        say(f"{setting.name}: {capacity:.2f} answers/s")
        rows = [row(f"{setting.name}: capacity, {CLIENTS} at once", capacity, "answers/s", None, "higher")]
        rows += alone_rows(setting.name, alone["never"], alone["eager"])
        for rate in rates:
            count = max(15, round(seconds * rate * capacity))
            work = [pool[number % len(pool)] for number in range(count)]
            quiet = [alone["eager"][number % len(pool)] for number in range(count)]
            found: dict[str, list[Answered]] = {branching: [] for branching in POLICIES}
            taken = dict.fromkeys(POLICIES, 0.0)
            for turn in range(TURNS):
                for branching in POLICIES[:: 1 if turn % 2 else -1]:
                    start = time.perf_counter()
                    found[branching] += await client.arriving(work, rate * capacity, branching)
                    taken[branching] += time.perf_counter() - start
            cells = {name: Cell.of(answers, quiet * TURNS, taken[name]) for name, answers in found.items()}
            for branching, cell in cells.items():
                say(f"{setting.name}, load {rate:g}, {TURNS} × {count} answers, {branching}: {cell}")
            rows += rate_rows(f"{setting.name}, load {rate:g}", cells)
    steps = [1000 * metric(address, f"dccot_step_seconds_{name}") for name in ("base", "per_sequence")]
    rows += [row(f"{setting.name}: learnt, a step without its sequences", steps[0], "ms")]
    return [*rows, row(f"{setting.name}: learnt, each sequence of a step", steps[1], "ms")]


def alone_rows(name: str, never: list[Answered], eager: list[Answered]) -> list[dict]:
    ratios = [(e.seconds / n.seconds, e.parallelism) for n, e in zip(never, eager, strict=True)]
    chosen = [ratio for ratio, parallelism in ratios if 1.6 <= parallelism <= 2.0]
    mean = sum(answer.tokens for answer in eager) / sum(answer.path for answer in eager)
    found = statistics.median(chosen) if chosen else None
    return [
        row(f"{name}: parallelism of the texts, tokens per one on the longest path", mean, "", None, "higher"),
        row(f"{name}, alone: eager's seconds over never's at parallelism 1.6 to 2.0", found, "×", 0.75),
    ]


def rate_rows(name: str, cells: dict[str, Cell]) -> list[dict]:
    rows = []
    for branching in POLICIES:
        cell = cells[branching]
        rows += [
            row(f"{name}, {branching}: time to answer, median", cell.median, "s"),
            row(f"{name}, {branching}: time to answer, p95", cell.p95, "s"),
            row(f"{name}, {branching}: speed", cell.speed, "tokens/s", None, "higher"),
            row(f"{name}, {branching}: answers within {GOOD} of the time alone", cell.good, "", None, "higher"),
        ]
    adaptive, others = cells["adaptive"], (cells["never"], cells["eager"])
    worse = adaptive.median / min(cell.median for cell in others)
    best = max(cell.good for cell in others)
    return [
        *rows,
        row(f"{name}: adaptive's median over the better of the two", worse, "×", 1.05),
        row(f"{name}: adaptive's good answers over the better of the two", adaptive.good / best, "×", 0.95, "higher")
        if best
        else row(f"{name}: good answers of adaptive, where the others have none", adaptive.good, "", None, "higher"),
    ]


def served(folder: Path, setting: Setting, rates: Sequence[float], seconds: float) -> list[dict]:
    made = folder / setting.name
    model = bigram.save(made, "spelled", PAPER_LIKE, context=CONTEXT)
    sizes = {"max_num_seqs": setting.sequences, "max_model_len": CONTEXT}
    command = ["dccot.cli", "serve", str(model), "--budget", "600", "--max-requests", "2000"]  # nothing is refused
    with server(command, folder, **sizes) as (address, _):
        rows = asyncio.run(under_load(address, setting, rates, seconds))
        until(lambda: running(address) == 0, 30)
        return rows


def join_rows(folder: Path, count: int) -> list[dict]:
    """Seconds from a fork's last worker to the next token, one response at a time, in turns of two servers."""
    model = bigram.save(folder / "long", "spelled", LONG, context=2 * CONTEXT)
    found: dict[int, list[float]] = {}
    for tokens in (0, 256, 0, 256):
        command = ["dccot.cli", "serve", str(model), "--budget", "3000", "--prefill-joins", str(tokens)]
        with server(command, folder, max_model_len=2 * CONTEXT) as (address, _):
            say(f"joins, prefilled from {tokens} tokens on")

            async def ask(address: str = address) -> None:
                async with aiohttp.ClientSession(address) as session:
                    for number in range(count):
                        body = Asked(number, False).body("eager") | {"stream": True}
                        async with session.post("/v1/chat/completions", json=body) as answer:
                            await answer.read()

            asyncio.run(ask())
            total, joins = (metric(address, f"dccot_join_seconds_{name}") for name in ("sum", "count"))
            found.setdefault(tokens, []).append(total / joins)
            say(f"{joins:.0f} joins, {1000 * total / joins:.1f} ms each")
    without, with_ = (1000 * statistics.mean(found[tokens]) for tokens in (0, 256))
    return [
        row("joins of long workers: mean from the last worker to the next token", without, "ms"),
        row("joins of long workers: the same, read before their fork has ended", with_, "ms"),
        row("joins of long workers: with over without", with_ / without, "×", 0.5),
    ]


def run(quick: bool = False, parts: Sequence[str] = ()) -> list[dict]:
    rates, seconds = (RATES[1:2], 5.0) if quick else (RATES, SECONDS)
    known = {setting.name: partial(served, setting=setting, rates=rates, seconds=seconds) for setting in SETTINGS}
    known |= {
        "joins": partial(join_rows, count=2 if quick else 6),
        "ids": partial(id_rows, count=60 if quick else 500),
    }
    with tempfile.TemporaryDirectory() as name:
        return [row for part in parts or known for row in known[part](Path(name))]


def id_rows(folder: Path, count: int) -> list[dict]:
    """Answers with each policy that are not those of offline `generate`."""
    model = bigram.save(folder / "storm", "spelled", STORMY, context=CONTEXT)
    torch.set_num_threads(1)
    work, answers = jobs(count), {}
    with server(["dccot.cli", "serve", str(model), "--budget", "200", "--prefill-joins", "1"], folder) as (address, _):
        for branching in POLICIES:
            say(f"{count} requests, {branching}")
            asked = [replace(job, branching=branching) for job in work]
            answers[branching] = asyncio.run(storm(address, asked))
            until(lambda: running(address) == 0, 30)
        left = running(address)
    with open_engine(model, EngineConfig(dtype="float32", context=CONTEXT // 2)) as engine:
        found = offline(engine, [job for job in work if job.kind in ("whole", "stream")]).found
    say("compared with offline")
    wrong = {name: sum(not is_right(job, got[job.number], found) for job in work) for name, got in answers.items()}
    rows = [row(f"{count} requests, {name}: answers other than offline", wrong[name], "", 0) for name in POLICIES]
    return [*rows, row("requests still running afterwards", left, "", 0)]


async def soak(address: str, process: psutil.Process, minutes: float) -> None:
    """All policies at once, one request in ten cancelled."""
    ends, done, failed = time.monotonic() + 60 * minutes, 0, 0

    async def client(session: aiohttp.ClientSession, first: int) -> None:
        nonlocal done, failed
        for number in range(first, 10**9, CLIENTS):
            if time.monotonic() > ends:
                return
            body = Asked(number, False).body(POLICIES[number % 3]) | {"stream": number % 2 == 0}
            async with session.post("/v1/chat/completions", json=body) as answer:
                if number % 20 == 0:
                    await answer.content.readany()
                    answer.close()
                elif answer.status != 200 or b'"error"' in await answer.read():
                    failed += 1
            done += 1

    async def watch() -> None:
        while time.monotonic() < ends:
            await asyncio.sleep(min(60.0, 60 * minutes / 4))
            processes = family(process)
            memory = sum(each.memory_info().rss for each in processes) / 1e6
            files = sum(each.num_fds() for each in processes)
            now = running(address)
            say(f"{done} answers, {failed} failed, {memory:,.0f} MB, {files} descriptors, {now:.0f} running")

    limits = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(address, connector=aiohttp.TCPConnector(limit=0), timeout=limits) as session:
        await asyncio.gather(watch(), *(client(session, first) for first in range(CLIENTS)))
    idle = until(lambda: running(address) == 0, 60)
    say(f"idle after {idle:.1f} s; {metric(address, 'dccot_workers_waiting'):.0f} workers wait")


def main(asked: Sequence[str]) -> None:
    if asked[0] != "soak":
        return print(table(run(parts=asked)))
    with tempfile.TemporaryDirectory() as name:
        model = bigram.save(Path(name) / "tiny", "spelled", PAPER_LIKE, context=CONTEXT)
        command = ["dccot.cli", "serve", str(model), "--budget", "600"]
        with server(command, Path(name), max_model_len=CONTEXT) as (address, process):
            asyncio.run(soak(address, process, float(asked[1])))


if __name__ == "__main__":
    main(sys.argv[1:])
