"""Too many clients, and rude ones, on a real server: `make torture` asks a bystander how it was meanwhile."""

from __future__ import annotations

import contextlib
import itertools
import json
import resource
import socket
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil

from dccot.lab.worlds import bigram as tiny
from dccot.serve.gate import MAX_BODY, MAX_VALUES
from tests.serve.test_requests import WITHOUT_KEY
from tests.support.fault_injection.faults import Trial
from tests.support.servers import KEY, Server, dccot_serve, eventually

CONNECTIONS, SLOW, HALF_OPEN, DISCONNECTS = 1000, 50, 200, 100
ASKED = {"messages": [{"role": "user", "content": "how many"}], "max_tokens": 100}
HEADERS = {"Authorization": f"Bearer {KEY}"}


class Crowd:
    """Sockets that are opened together and closed together."""

    def __init__(self, server: Server):
        self.server, self.sockets = server, list[socket.socket]()

    def open(self, sent: bytes = b"", read: int = 0, buffer: int | None = None) -> socket.socket:
        opened = socket.socket()
        if buffer:
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
        opened.settimeout(300)
        opened.connect(("127.0.0.1", self.server.port))
        self.sockets.append(opened)
        if sent:
            opened.sendall(sent)
        if read:
            opened.recv(read)
        return opened

    def close(self) -> None:
        for each in self.sockets:
            each.close()


def request(stream: bool, **more: object) -> bytes:
    body = json.dumps(ASKED | {"stream": stream} | more).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {KEY}\r\n"
    return f"{head}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


def idle(crowd: Crowd) -> None:
    for _ in range(CONNECTIONS):
        crowd.open()


def half_open(crowd: Crowd) -> None:
    whole = request(stream=False)
    for number in range(HALF_OPEN):
        crowd.open(whole[: len(whole) * number // HALF_OPEN])


def slow_readers(crowd: Crowd) -> None:
    for seed in range(SLOW):
        crowd.open(request(stream=True, seed=seed, n=4, return_token_ids=True), read=1, buffer=2048)


def disconnects(crowd: Crowd) -> None:
    for seed in range(DISCONNECTS):
        crowd.open(request(stream=True, seed=seed), read=200).close()


Attack = tuple[str, bytes, str]  # path, body, key
NESTED = b"[" * 900 + b"]" * 900
CHAT, COMPLETIONS, BATCH = "/v1/chat/completions", "/v1/completions", "/v1/chat/completions/batch"


def filled(start: bytes, item: bytes, end: bytes) -> bytes:
    """As large as a request may be."""
    return start + item * ((MAX_BODY - len(start) - len(end)) // len(item)) + end


ASK = b'{"messages": [{"role": "user", "content": "x"}], '
ATTACKS: dict[str, list[Attack]] = {
    "ordinary requests": [(CHAT, json.dumps(ASKED | {"seed": 3}).encode(), KEY)],
    "huge stop strings": [
        (CHAT, filled(ASK + b'"stop": "', b"s", b'"}'), KEY),
        (COMPLETIONS, filled(b'{"prompt": "x", "max_tokens": 8, "stop": "', b"s", b'"}'), KEY),
    ],
    "nested JSON": [
        (path, filled(start + b'"%s": [' % field, NESTED + b",", b"1]}"), KEY)
        for path, start, field in [(CHAT, ASK, b"x"), (CHAT, b"{", b"messages"), (COMPLETIONS, b"{", b"prompt")]
    ],
    "millions of values": [
        (path, filled(b'{"%s": [' % field, item, b"{}]}"), KEY)
        for path, field in [
            (CHAT, b"messages"),
            (BATCH, b"messages"),
            (COMPLETIONS, b"prompt"),
            ("/tokenize", b"prompt"),
        ]
        for item in (b"1,", b"{},")
    ],
    "long texts": [
        (CHAT, filled(b'{"messages": [{"role": "user", "content": "', b"s", b'"}]}'), KEY),
        (COMPLETIONS, filled(b'{"max_tokens": 1, "prompt": "', b"s ", b'"}'), KEY),
        (COMPLETIONS, filled(b'{"max_tokens": 1, "prompt": [', b"1,", b"1]}"), KEY),
    ],
    "the largest of what is let in": [
        (path, json.dumps({"messages": [{}] * (MAX_VALUES - 2)}).encode(), KEY)
        for path in (CHAT, BATCH, "/v1/messages", "/tokenize")
    ],
    "large requests without the key": [(path, filled(b'"', b"s", b'"'), "") for path in (CHAT, COMPLETIONS, "/pause")],
    "every route without the key": [(route.split()[1], b"{}", "") for route in WITHOUT_KEY],
}


def sent(server: Server, attack: Attack) -> int:
    path, body, key = attack
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    try:
        return httpx.post(f"{server.address}{path}", content=body, headers=headers, timeout=600).status_code
    except httpx.HTTPError:  # hung up before it had read everything
        return 0


def beside(server: Server, name: str, attacks: Sequence[Attack], rounds: int = 5) -> Trial:
    """How much longer a bystander's answers take while a client sends the attacks, one after another, than before."""

    def asked() -> float:
        start = time.monotonic()
        answers.append([answer(server, seed) for seed in range(4)])
        return time.monotonic() - start

    answers, ratios, statuses, stop = list[list](), list[float](), Counter[int](), threading.Event()

    def attack() -> None:
        for each in itertools.cycle(attacks):
            if stop.is_set():
                return
            statuses[sent(server, each)] += 1

    for _ in range(rounds):
        alone = asked()
        stop.clear()
        with ThreadPoolExecutor(1) as pool:
            pool.submit(attack)
            try:
                ratios.append(asked() / alone)
            finally:
                stop.set()
    ratio = statistics.median(ratios)
    said = ", ".join(f"{count} × {status}" for status, count in sorted(statuses.items()))
    seen = f"a bystander took {ratio:.1f} times as long as alone ({min(ratios):.1f} to {max(ratios):.1f}); {said}"
    same = all(each == answers[0] for each in answers)
    return Trial.once(f"beside {name}", seen, ratio <= 2 and same, seen if same else "other answers")


STORMS: dict[str, Callable[[Crowd], None]] = {
    f"{CONNECTIONS:,} idle connections": idle,
    f"{HALF_OPEN} requests that never end": half_open,
    f"{SLOW} readers that do not read": slow_readers,
    f"{DISCONNECTS} disconnects in mid-stream": disconnects,
}


@contextlib.contextmanager
def many_descriptors() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(before[0], min(8192, before[1])), before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def memory_mb(server: Server) -> float:
    leader = psutil.Process(server.process.pid)
    return sum(process.memory_info().rss for process in [leader, *leader.children(recursive=True)]) / 2**20


def answer(server: Server, seed: int = 7) -> object:
    """What a bystander gets; the server is asked again while it says that it is busy."""
    for _ in range(1000):
        asked = ASKED | {"seed": seed, "return_token_ids": True}
        got = httpx.post(f"{server.address}/v1/chat/completions", json=asked, headers=HEADERS, timeout=600)
        if got.status_code != 503:
            return got.json()["choices"][0]["token_ids"] if got.status_code == 200 else got.text
    return "always busy"


def storms(out: Path, under: Sequence[str]) -> list[Trial]:
    out.mkdir(parents=True)
    model = tiny.save(out / "model", "mixed", tiny.Chances(spawn=1 / 16, eos=1 / 20, answer=1 / 16), context=1024)
    server, trials = dccot_serve(model, out / "server", "--budget", "100"), []
    try:
        server.ready()
        expected = answer(server)
        with ThreadPoolExecutor(16) as pool:  # warm: buffers, caches, threads
            list(pool.map(lambda seed: answer(server, seed), range(64)))
        trials += [beside(server, name, attacks) for name, attacks in ATTACKS.items()]
        with many_descriptors():
            for name, storm in STORMS.items():
                trials.append(_weathered(server, name, storm, expected))
    finally:
        server.stop()
    return trials


def _weathered(server: Server, name: str, storm: Callable[[Crowd], None], expected: object) -> Trial:
    before, crowd, problems = memory_mb(server), Crowd(server), []
    with ThreadPoolExecutor(1) as pool:
        bystander = pool.submit(lambda: [answer(server) for _ in range(3)])
        storm(crowd)
        during = memory_mb(server)
        answers = [*bystander.result(), answer(server)]
        crowd.close()
    if any(each != expected for each in answers):
        problems.append(f"the bystander got {[str(each)[:80] for each in answers]}")
    idle_again = lambda: server.running() == server.metric("dccot_responses_running") == 0
    if not eventually(idle_again):
        problems.append(f"{server.running()} calls still run")
    if answer(server) != expected:
        problems.append("the next answer is another one")
    if (after := memory_mb(server)) > before + 200:
        problems.append(f"memory {before:.0f} → {after:.0f} MB")
    seen = f"bystander unharmed, nothing left running; memory {before:.0f} → {during:.0f} → {after:.0f} MB"
    return Trial.once(f"storm: {name}", seen, not problems, "; ".join(problems))
