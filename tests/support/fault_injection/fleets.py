"""What befalls servers and trainer where responses outlive the weights they began with (`rollout.mode` partial or
asynchronous).

Such a run does not end in the bits of another. It must end with every step once, each on the next problems in the order
drawn and all their responses once, no token older than allowed, and each token's log-prob that of its own version's
weights: `unsound` says what of this does not hold.
"""

from __future__ import annotations

import os
import random
import signal
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx

from dccot.core.config import load_config
from dccot.core.files import read_jsonl
from dccot.data.problems import ProblemStream, load_problems
from dccot.lab.worlds.exact_task import TEMPERATURE, make_task, write_problems
from dccot.rollout.servers import Servers
from dccot.train.config import RLConfig
from tests.support.fault_injection.faults import Trial
from tests.support.fault_injection.rank import descendants
from tests.support.fault_injection.stops import Job
from tests.support.spans import gaps, responses_in, trained_in

STALENESS = 2
KEPT = ("checkpoint.every=1", "checkpoint.keep_hf_every=1", "keep_rollouts=100000")
STALE = (f"rollout.max_staleness={STALENESS}", *KEPT)
ENDLESS = 100_000  # steps
SAME = "every step once, in the order drawn, log-probs those of each token's own version"


def make_stale_task(out: Path) -> RLConfig:
    config = make_task(out)
    write_problems(out / "problems.jsonl", 400)
    return load_config(RLConfig, config)


def unsound(run: Path, config: RLConfig, steps: int) -> list[str]:
    """What is wrong with a run's first `steps` steps."""
    found, batch = [], config.batch
    rows = [row["step"] for _, row in read_jsonl(run / "metrics.jsonl")][:steps]
    if rows != list(range(steps)):
        found.append(f"metrics.jsonl holds steps {rows}")
    stream = ProblemStream(load_problems(config.data.train), config.seed, batch.prompts_rolled_out)
    for step in range(steps):
        drawn = [stream.next().id for _ in range(batch.prompts)]
        counts = Counter((row["problem"], row["sample"]) for row in trained_in(run, step))
        expected = Counter((problem, sample) for problem in drawn for sample in range(batch.group_size))
        if counts != expected:
            found.append(f"step {step}: lost {expected - counts}, too many {counts - expected}")
    ages = {step - v for step, response in responses_in(run) for s in response.segments() for v in s.versions}
    if not {0, 1} <= ages <= set(range(STALENESS + 1)):
        found.append(f"tokens are {sorted(ages)} versions old")
    if (worst := max(gaps(run, Path(config.model.path), TEMPERATURE).values())) > 1e-4:
        found.append(f"log-probs differ by {worst:.2g} from those of their versions' weights")
    return found


class Forward(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None: ...

    def do_POST(self) -> None:
        wire: Wire = self.server
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        fault = wire.fault_for(self.path)
        if fault is not None and fault is not nonsense:
            fault(wire)
            self.close_connection = True
            return
        passed = {name: self.headers[name] for name in ("authorization", "content-type") if name in self.headers}
        try:
            answer = wire.client.request(self.command, self.path, content=body, headers=passed)
        except httpx.HTTPError:
            self.close_connection = True
            return
        content = nonsense(answer.content) if fault is nonsense else answer.content
        self.send_response(answer.status_code)
        self.send_header("content-type", answer.headers.get("content-type", "application/json"))
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_POST


class Wire(ThreadingHTTPServer):
    """Between the trainer and one server. What is planned for a path happens to the next requests for it, once each."""

    daemon_threads, request_queue_size = True, 256

    def __init__(self, servers: Servers, number: int):
        super().__init__(("127.0.0.1", 0), Forward)
        self.servers, self.number, self.lock = servers, number, threading.Lock()
        self.client = httpx.Client(
            base_url=servers.urls[number], timeout=None, limits=httpx.Limits(max_connections=None), trust_env=False
        )
        self.planned: list[tuple[str, Callable]] = []
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    @property
    def pid(self) -> int:
        return self.servers.pids[self.number]

    def fault_for(self, path: str) -> Callable | None:
        with self.lock:
            for at, (where, fault) in enumerate(self.planned):
                if path.startswith(where):
                    del self.planned[at]
                    return fault
        return None

    def handle_error(self, *_: object) -> None:  # a client that hung up
        ...


def nonsense(content: bytes) -> bytes:
    """Not JSON, not an answer, or one without log-probs."""
    return random.choice([content[: len(content) // 2], b"{}", content.replace(b'"logprob":', b'"logprop":')])


def kill(wire: Wire) -> None:
    os.killpg(wire.pid, signal.SIGKILL)


def drop(wire: Wire) -> None:
    """The request is lost on its way."""


def stop(wire: Wire) -> None:
    """The whole server stands still."""
    os.killpg(wire.pid, signal.SIGSTOP)


def stop_engine(wire: Wire) -> None:
    """The process of its engine does; the one that answers requests does not."""
    for pid in descendants(wire.pid):
        os.kill(pid, signal.SIGSTOP)


def wake(wire: Wire) -> None:
    for pid in [wire.pid, *descendants(wire.pid)]:
        os.kill(pid, signal.SIGCONT)


HANGS = {"server hangs": stop, "engine of a server hangs": stop_engine}
PLANS: dict[str, list[tuple[str, Callable]]] = {
    "server answers nonsense": [("/inference/v1/generate", nonsense)] * 5,
    "server killed in the middle of a weight push": [("/update_weights", kill)],
    "weight push broken off before its end": [("/finish_weight_update", drop)],
    "weight push broken off after its end": [("/resume", drop)],
}
SERVER_FAULTS = ("server killed", *HANGS, *PLANS)


class FleetRun:
    """An asynchronous run on two ranks that does not end, and two servers of which the second has the faults."""

    def __init__(self, out: Path, servers: Servers, under: Sequence[str]):
        self.wires = [Wire(servers, number) for number in range(2)]
        self.victim = self.wires[1]
        urls = f"engine.url=[{','.join(wire.url for wire in self.wires)}]"
        patient = "--shutdown-timeout=120"
        given = ("rollout.mode=asynchronous", urls, *STALE)
        self.job = Job(out, "fleet", *given, steps=ENDLESS, under=under, torchrun=[patient])

    def up(self) -> int:
        """Whether the second server sampled with the current weights at the end of the last step."""
        rows = [row for _, row in read_jsonl(self.job.run / "metrics.jsonl")] if self.job.logged() else []
        return int(rows[-1]["server_1/up"]) if rows else 0

    def down(self) -> int:
        return 1 - self.up()

    def survives(self, fault: str) -> list[str]:
        """Do it, wait until the server is used again; what did not happen."""
        job, before = self.job, self.victim.pid
        if not job.until(self.up, 1):
            return [f"{fault}: the server was not in use before; see {job.log}"]
        if fault in HANGS:
            HANGS[fault](self.victim)
            noticed = job.until(self.down, 1)
            wake(self.victim)
        elif fault in PLANS:
            self.victim.planned += PLANS[fault]
            noticed = job.until(lambda: not self.victim.planned, 1)
        else:
            kill(self.victim)
            noticed = job.until(lambda: self.victim.pid != before, 1)
        steps = job.logged()
        returned = job.until(job.logged, steps + 2) and job.until(self.up, 1)
        said = {"never happened or was not noticed": noticed, "the server was not used again": returned}
        return [f"{fault}: {what}; see {job.log}" for what, good in said.items() if not good]


def servers(out: Path, under: Sequence[str]) -> list[Trial]:
    """Each fault of a server once, in one asynchronous run that continues."""
    config = make_stale_task(out)
    with ExitStack() as stack:
        stack.callback(os.environ.pop, "VLLM_API_KEY", None)
        opened = stack.enter_context(Servers(out / "model", config.engine, 2, logs=out))
        run = FleetRun(out, opened, under)
        stack.callback(run.job.wait)
        stack.callback(run.job.processes[0].terminate)
        problems = {fault: run.survives(fault) for fault in SERVER_FAULTS}
    steps = run.job.logged()
    wrong = unsound(run.job.run, config, steps)
    seen = f"its responses began again on the other, it came back with the current weights; {SAME} ({steps} steps)"
    trials = [Trial(fault, 1, int(not found and not wrong), seen, found) for fault, found in problems.items()]
    trials[-1].problems += wrong
    return trials
