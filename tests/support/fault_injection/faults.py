"""Faults other than kills, each done for real and looked at from outside: what `make torture` tries after the kills.

Every function takes a folder of its own and what to start long commands with, and returns its trials.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from dccot.core.files import read_jsonl, write_jsonl_atomic
from dccot.lab.worlds.exact_task import make_task
from tests.support.programs import torchrun
from tests.support.tag_soup import disagreements

KEY = "sk-planted-9b2e7c41d6"
PLANTED = dict.fromkeys(("ANTHROPIC_API_KEY", "OPENAI_API_KEY", "HF_TOKEN", "WANDB_API_KEY"), KEY)


@dataclass
class Trial:
    """One kind of fault."""

    fault: str
    tried: int
    survived: int
    seen: str  # what showed that it was survived
    problems: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def good(self) -> bool:
        return self.tried == self.survived and not self.problems

    @classmethod
    def once(cls, fault: str, seen: str, good: bool, otherwise: object) -> Trial:
        """A fault that was tried once."""
        return cls(fault, 1, int(good), seen, [] if good else [str(otherwise)])

    @classmethod
    def each(cls, fault: str, seen: str, tried: int, problems: list[str]) -> Trial:
        """One that was tried several times, with a problem for each that was not survived."""
        return cls(fault, tried, tried - len(problems), seen, problems[:5])


def run(command: Sequence[str], under: Sequence[str], log: Path, **environment: str) -> tuple[int, str]:
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as out:
        everything = {**os.environ, "OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "ERROR", **environment}
        code = subprocess.run([*under, sys.executable, *command], env=everything, stdout=out, stderr=out).returncode
    return code, log.read_text()


def numbers_and_stalls(out: Path, under: Sequence[str]) -> list[Trial]:
    out.mkdir(parents=True)
    make_task(out)
    code, said = run(torchrun(2, "tests.support.fault_injection.inside", out)[1:], under, out / "said.log")
    trials = [Trial(**row) for _, row in read_jsonl(out / "trials.jsonl")] if (out / "trials.jsonl").exists() else []
    return trials + (
        [Trial.once("bad numbers and stalls", "", False, f"exit code {code}: {said[-500:]}")] if code else []
    )


def hostile_answers(out: Path, under: Sequence[str]) -> list[Trial]:
    code = (
        "import json, sys\nfrom dccot.data.judge import GradingConfig\n"
        "from tests.support.hostile_answers import endure\n"
        "limits = GradingConfig(workers=2, seconds=0.25, memory_mb=128)\nseen = endure(20_000, 0.05, limits)\n"
        "print(json.dumps([seen.faults(limits), seen.lost, seen.processes, seen.memory_mb]), flush=True)"
    )
    _, said = run(["-c", code], under, out / "said.log")
    try:
        faults, lost, processes, memory = json.loads(said.splitlines()[-1])
    except (IndexError, ValueError):
        return [Trial("hostile answers to the grader", 20_000, 0, "", [said[-300:]])]
    seen = f"5% hostile; processes {processes[0]} → {processes[1]}, memory {memory[0]:.0f} → {memory[1]:.0f} MB"
    return [Trial("hostile answers to the grader", 20_000, 20_000 - lost, seen, faults)]


def monsters(out: Path, under: Sequence[str]) -> list[Trial]:
    """200 answers of the worst kinds at once, among 800 good ones, a CPU second for each."""
    code = (
        "import json\nfrom dccot.data.judge import GradingConfig\nfrom tests.support.hostile_answers import storm\n"
        "seen = storm(200, 800, GradingConfig(seconds=1))\n"
        "print(json.dumps([seen.monsters, seen.good, seen.peak_mb, seen.seconds]), flush=True)"
    )
    _, said = run(["-c", code], under, out / "said.log")
    name = "towers, a million digits, 10,000 fractions deep"
    try:
        worst, good, peak, seconds = json.loads(said.splitlines()[-1])
    except (IndexError, ValueError):
        return [Trial(name, 1000, 0, "", [said[-300:]])]
    counts = ", ".join(f"{count} {verdict}" for verdict, count in worst.items())
    seen = f"{counts}; the other {good.get('correct', 0)} correct; at most {peak:.0f} MB, {seconds:.0f} s"
    wrong = (
        [] if good == {"correct": 800} and "correct" not in worst and peak < 4 * 1200 else [str((worst, good, peak))]
    )
    return [Trial(name, 1000, 1000 if not wrong else 0, seen, wrong)]


def tag_soups(out: Path, under: Sequence[str], count: int = 200_000) -> list[Trial]:
    wrong, well_formed = disagreements(count)
    seen = f"parser and an independent oracle agree; {well_formed:,} were well-formed"
    return [Trial.each("tag soups", seen, count, [f"K={k}: {text!r}: {a} / {b}" for text, k, a, b in wrong])]


class Unfriendly(BaseHTTPRequestHandler):
    """A model's endpoint that fails in turn, and repeats the key it was given in every error."""

    protocol_version = "HTTP/1.1"
    counter = 0

    def log_message(self, *_: object) -> None:
        pass

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        Unfriendly.counter += 1
        key = self.headers.get("x-api-key") or self.headers.get("authorization")
        status = self.server.statuses[Unfriendly.counter % len(self.server.statuses)]
        body = json.dumps({"type": "error", "error": {"type": "trouble", "message": f"the key {key} is not welcome"}})
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.send_header("retry-after", "0.1")
        self.end_headers()
        self.wfile.write(body.encode())


class Endpoint(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, statuses: Sequence[int]):
        super().__init__(("127.0.0.1", 0), Unfriendly)
        self.statuses = statuses
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def handle_error(self, *_: object) -> None:  # a client that hung up is no news here
        pass


def rewriting_with_a_key(out: Path, under: Sequence[str]) -> list[Trial]:
    """Both protocols, every kind of error, the SDKs' debug logs on: the key reaches the server and nothing else."""
    out.mkdir(parents=True)
    row = {"question": "q", "gold": "7", "solution": "<think>\nso</think>\\boxed{7}"}
    write_jsonl_atomic(out / "source.jsonl", [{"id": f"p{n}"} | row for n in range(6)])
    (out / "rewrite.yaml").write_text("attempts: 2\n")
    problems, tried = [], 0
    for protocol, variable in (("openai", "OPENAI_API_KEY"), ("anthropic", "ANTHROPIC_API_KEY")):
        for name, statuses in {"refused": [401], "mixed": [500, 429, 400, 529], "lost": [404]}.items():
            server, tried, before = Endpoint(statuses), tried + 1, Unfriendly.counter
            url = f"http://127.0.0.1:{server.server_port}" + ("/v1" if protocol == "openai" else "")
            settings = [f"source={out / 'source.jsonl'}", f"output={out / f'{protocol}_{name}.jsonl'}"]
            settings += [
                f"endpoint.protocol={protocol}",
                f"endpoint.base_url={url}",
                f"endpoint.key_variable={variable}",
            ]
            settings += ["endpoint.model=m", "endpoint.patience_seconds=10"]
            command = ["-m", "dccot.data.cli", "rewrite", str(out / "rewrite.yaml"), *settings]
            debug = {"OPENAI_LOG": "debug", "ANTHROPIC_LOG": "debug", "PYTHONASYNCIODEBUG": "1", **PLANTED}
            _, said = run(command, (), out / f"{protocol}_{name}.log", **debug)
            server.shutdown()
            if Unfriendly.counter == before:
                problems.append(f"{protocol} {name}: the server was never asked: {said[-200:]}")
            if KEY in said:
                problems.append(f"{protocol} {name}: the key is in what was printed")
    seen = "never printed, with the SDKs' debug logs on"
    return [Trial.each("planted key, endpoint that repeats it in errors", seen, tried, problems)]


def planted_keys_in(out: Path) -> Trial:
    """Search every byte that the trials have left for the keys that all its processes had in their environment."""
    files = [path for path in out.rglob("*") if path.is_file()]
    holding = [str(path) for path in files if KEY.encode() in path.read_bytes()]
    seen = "no file, log, checkpoint or trace of these trials holds the key"
    return Trial.each("planted key in any file", seen, len(files), holding)


FAULTS: dict[str, Callable[[Path, Sequence[str]], list[Trial]]] = {
    "numbers": numbers_and_stalls,
    "grader": hostile_answers,
    "monsters": monsters,
    "soups": tag_soups,
    "secrets": rewriting_with_a_key,
}
