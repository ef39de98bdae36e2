"""When workers start, under load: `dccot serve` with each of its three policies, in turns, on one server.

    dccot bench load

Requests arrive at random (Poisson) at five rates, from a tenth of what the server can answer to twice that. All
policies get the same requests at the same times, and give the same tokens. An answer is good if it took at most 1.5
times what it takes alone on the idle server with all workers at once. Three settings:

- tiny: a small model whose texts fork like those of the paper's models, shortened;
- mixed: the same with eight sequences at once, as where memory is short; of four requests three want no workers;
- smollm2: like mixed, with a model of SmolLM2-135M's depth and width.

And the joins: texts of 500 tokens and more, with and without reading workers before their fork has ended. And the ids:
500 requests with each policy, a tenth of them cancelled, must give those of offline `generate`.

    python -m dccot.lab.bench.load tiny mixed        some of its parts: tiny, mixed, smollm2, joins, ids
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
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import psutil
import torch

from dccot.core.command import run_cleanly
from dccot.lab.bench.harness import FOLDER, row, table, write
from dccot.lab.bench.serve import CHANCES as STORMY
from dccot.lab.bench.serve import family, is_right, jobs, metric, offline, running, say, server, storm, until
from dccot.lab.worlds import bigram
from dccot.rollout.engine import EngineConfig, open_engine

POLICIES = ("never", "eager", "adaptive")
RATES = (0.1, 0.4, 0.7, 1.0, 2.0)  # of the capacity
GOOD = 1.5  # times the time alone
SOME = 0.1  # a share of good answers below it is not compared
CONTEXT = 4096
PAPER_LIKE = bigram.Chances(spawn=1 / 50, close=1 / 40, eos=1 / 50)
SHORTER = bigram.Chances(spawn=1 / 25, close=1 / 20, eos=1 / 25)
LONG = bigram.Chances(spawn=1 / 200, close=1 / 2400, eos=1 / 1500)  # workers of 520 tokens
TURNS = 2  # of each policy, at each rate; the second in reverse order
CLIENTS = 48  # at once, to measure the capacity and to soak


@dataclass(frozen=True)
class Setting:
    name: str
    seconds: float  # of arrivals in a turn
    sequences: int = 256  # in a batch, at most
    plain: float = 0.0  # share of the requests without workers
    chances: bigram.Chances = PAPER_LIKE
    layers: int = 2
    width: int = 0  # at least


SETTINGS = (
    Setting("tiny", 4.0),
    Setting("mixed", 8.0, sequences=8, plain=0.75),
    Setting("smollm2", 8.0, sequences=8, plain=0.75, chances=SHORTER, layers=30, width=576),
)


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
    alone: float = math.inf  # seconds

    @property
    def parallelism(self) -> float:
        return self.tokens / self.path

    @property
    def good(self) -> bool:
        return self.seconds <= GOOD * self.alone


class Client:
    def __init__(self, session: aiohttp.ClientSession):
        self._session = session

    async def ask(self, asked: Asked, branching: str, alone: float = math.inf) -> Answered:
        start = time.perf_counter()
        async with self._session.post("/v1/chat/completions", json=asked.body(branching)) as answer:
            usage = json.loads(await answer.read())["usage"]
        seconds, details = time.perf_counter() - start, usage["completion_tokens_details"]
        return Answered(seconds, usage["completion_tokens"], details["longest_path_tokens"], alone)

    async def one_by_one(self, work: Sequence[Asked], branching: str) -> list[Answered]:
        return [await self.ask(asked, branching) for asked in work]

    async def capacity(self, work: Sequence[Asked], seconds: float) -> float:
        """Answers per second with `CLIENTS` at once, after a third of the time."""
        waiting, done, start = cycle(work), list[float](), time.perf_counter()

        async def one() -> None:
            while time.perf_counter() < start + seconds:
                await self.ask(next(waiting), "eager")
                done.append(time.perf_counter() - start)

        await asyncio.gather(*(one() for _ in range(CLIENTS)))
        return sum(seconds / 3 < at < seconds for at in done) / (seconds * 2 / 3)

    async def arriving(self, work: Sequence[tuple[Asked, float]], rate: float, branching: str, seed: str) -> list:
        rng, tasks, due = random.Random(seed), [], time.perf_counter()
        for asked, alone in work:
            due += rng.expovariate(rate)
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            tasks.append(asyncio.create_task(self.ask(asked, branching, alone)))
        return await asyncio.gather(*tasks)


def questions(count: int, plain: float) -> list[Asked]:
    rng = random.Random(5)
    return [Asked(number, rng.random() < plain) for number in range(count)]


def session_with(address: str, seconds: float | None) -> aiohttp.ClientSession:
    """A connection for each request: a slow client may find that the server has just closed an idle one."""
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    return aiohttp.ClientSession(address, connector=connector, timeout=aiohttp.ClientTimeout(total=seconds))


async def under_load(address: str, setting: Setting, quick: bool) -> list[dict]:
    rates, seconds = (RATES[1:2], 2.0) if quick else (RATES, setting.seconds)
    async with session_with(address, seconds=600) as session:
        client, name, pool = Client(session), setting.name, questions(12 if quick else 60, setting.plain)
        await client.capacity(pool, seconds)  # warm
        capacity = await client.capacity(pool, 2 * seconds)
        say(f"{name}: {capacity:.2f} answers/s")
        alone = {branching: await client.one_by_one(pool, branching) for branching in ("never", "eager")}
        rows = [row(f"{name}: capacity, {CLIENTS} at once", capacity, "answers/s", None, "higher")]
        rows += alone_rows(name, alone["never"], alone["eager"])
        known = cycle([(asked, quiet.seconds) for asked, quiet in zip(pool, alone["eager"], strict=True)])
        gains = []
        for rate in rates:
            count = max(12, round(seconds * rate * capacity))
            found: dict[str, list[Answered]] = {branching: [] for branching in POLICIES}
            taken = dict.fromkeys(POLICIES, 0.0)
            for turn in range(TURNS):
                work = [next(known) for _ in range(count)]
                for branching in POLICIES[:: -1 if turn % 2 else 1]:
                    start = time.perf_counter()
                    found[branching] += await client.arriving(work, rate * capacity, branching, f"{rate} {turn}")
                    taken[branching] += time.perf_counter() - start
            rows += rate_rows(f"{name}, load {rate:g}", found, taken)
            good = {branching: statistics.mean(answer.good for answer in found[branching]) for branching in POLICIES}
            if (best := max(good["never"], good["eager"])) >= SOME:
                gains.append(good["adaptive"] / best)
        rows.append(
            row(
                f"{name}: adaptive's good answers over both others', best load",
                max(gains, default=None),
                "×",
                1.2,
                "higher",
            )
        )
    steps = [1000 * metric(address, f"dccot_step_seconds_{part}") for part in ("base", "per_sequence")]
    rows += [row(f"{name}: learnt, a step without its sequences", steps[0], "ms")]
    return [*rows, row(f"{name}: learnt, each sequence of a step", steps[1], "ms")]


def alone_rows(name: str, never: list[Answered], eager: list[Answered]) -> list[dict]:
    ratios = [(e.seconds / n.seconds, e.parallelism) for n, e in zip(never, eager, strict=True)]
    chosen = [ratio for ratio, parallelism in ratios if 1.6 <= parallelism <= 2.0]
    mean = sum(answer.tokens for answer in eager) / sum(answer.path for answer in eager)
    found = statistics.median(chosen) if chosen else None
    return [
        row(f"{name}: parallelism of the texts, tokens per one on the longest path", mean, "", None, "higher"),
        row(f"{name}, alone: eager's seconds over never's at parallelism 1.6 to 2.0", found, "×", 0.75),
    ]


def rate_rows(name: str, found: dict[str, list[Answered]], taken: dict[str, float]) -> list[dict]:
    rows, median, good = list[dict](), dict[str, float](), dict[str, float]()
    for branching, answers in found.items():
        times = sorted(answer.seconds for answer in answers)
        median[branching], p95 = statistics.median(times), times[math.ceil(0.95 * len(times)) - 1]
        good[branching] = statistics.mean(answer.good for answer in answers)
        speed = sum(answer.tokens for answer in answers) / taken[branching]
        said = f"{median[branching]:.3f} s, p95 {p95:.3f} s, {speed:,.0f} tokens/s, {good[branching]:.3f} good"
        say(f"{name}, {len(answers)} answers, {branching}: {said}")
        rows += [
            row(f"{name}, {branching}: time to answer, median", median[branching], "s"),
            row(f"{name}, {branching}: time to answer, p95", p95, "s"),
            row(f"{name}, {branching}: speed", speed, "tokens/s", None, "higher"),
            row(f"{name}, {branching}: answers within {GOOD} of the time alone", good[branching], "", None, "higher"),
        ]
    better = min(("never", "eager"), key=median.__getitem__)
    pairs = zip(found["adaptive"], found[better], strict=True)
    slower = statistics.median(mine.seconds / other.seconds for mine, other in pairs)
    rows += [row(f"{name}: adaptive's seconds over {better}'s, the same request, median", slower, "×", 1.05)]
    if (best := max(good["never"], good["eager"])) >= SOME:
        share = good["adaptive"] / best
        rows += [row(f"{name}: adaptive's good answers over the better of the two", share, "×", 0.95, "higher")]
    return rows


def served(folder: Path, setting: Setting, quick: bool) -> list[dict]:
    sizes = {"layers": setting.layers, "width": setting.width}
    model = bigram.save(folder / setting.name, "spelled", setting.chances, context=CONTEXT, **sizes)
    command = ["dccot.cli", "serve", str(model), "--budget", "600", "--max-requests", "2000"]  # nothing is refused
    with server(command, folder, max_num_seqs=setting.sequences, max_model_len=CONTEXT) as (address, _):
        rows = asyncio.run(under_load(address, setting, quick))
        until(lambda: running(address) == 0, 30)
        return rows


def join_rows(folder: Path, count: int) -> list[dict]:
    """Seconds from a fork's last worker to the next token: the same responses, in turns of two servers."""
    model = bigram.save(folder / "long", "spelled", LONG, context=2 * CONTEXT)
    command = ["dccot.cli", "serve", str(model), "--budget", "3000", "--prefill-joins"]
    with ExitStack() as stack:
        servers = [server([*command, tokens], folder, max_model_len=2 * CONTEXT) for tokens in ("0", "128")]
        both = [stack.enter_context(each)[0] for each in servers]

        def counted() -> list[list[float]]:
            names = [f"dccot_join_seconds_{name}" for name in ("sum", "count")]
            return [[metric(address, name) for name in names] for address in both]

        warm = counted()
        for number in range(count + 1):
            for address in both:
                body = Asked(number, False).body("eager") | {"stream": True}
                httpx.post(f"{address}/v1/chat/completions", json=body, timeout=600).raise_for_status()
            warm = warm if number else counted()
            say(f"joins: {number} of {count} responses, {counted()}")
        taken = [[now - then for now, then in zip(*pair, strict=True)] for pair in zip(counted(), warm, strict=True)]
    without, with_ = (1000 * seconds / joins for seconds, joins in taken)
    return [
        row("joins of long workers", taken[0][1], ""),
        row("joins of long workers: mean from the last worker to the next token", without, "ms"),
        row("joins of long workers: the same, read before their fork has ended", with_, "ms"),
        row("joins of long workers: with over without", with_ / without, "×", 0.5),
    ]


def run(quick: bool = False, parts: Sequence[str] = ()) -> list[dict]:
    known = {setting.name: partial(served, setting=setting, quick=quick) for setting in SETTINGS}
    known |= {
        "joins": partial(join_rows, count=2 if quick else 12),
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
    """All policies at once, one request in twenty cancelled."""
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

    async with session_with(address, seconds=None) as session:
        await asyncio.gather(watch(), *(client(session, first) for first in range(CLIENTS)))
    idle = until(lambda: running(address) == 0, 60)
    say(f"idle after {idle:.1f} s; {metric(address, 'dccot_workers_waiting'):.0f} workers wait")


def main(asked: Sequence[str]) -> None:
    if asked[0] != "soak":
        for part in asked:
            write(rows := run(parts=[part]), FOLDER / f"load_{part}.json")
            print(table(rows), flush=True)
        return
    with tempfile.TemporaryDirectory() as name:
        model = bigram.save(Path(name) / "tiny", "spelled", PAPER_LIKE, context=CONTEXT)
        command = ["dccot.cli", "serve", str(model), "--budget", "600"]
        with server(command, Path(name), max_model_len=CONTEXT) as (address, process):
            asyncio.run(soak(address, process, float(asked[1])))


if __name__ == "__main__":
    sys.exit(run_cleanly(lambda: main(sys.argv[1:])))  # so that a signal ends the servers as well
