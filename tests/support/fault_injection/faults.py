"""Faults other than kills, each done for real and looked at from outside: what `make torture` tries after the kills.

Every function takes a folder of its own and what to start long commands with, and returns its trials.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from dccot.core.config import ConfigError, load_config
from dccot.core.files import BadData, read_jsonl, write_jsonl_atomic
from dccot.data.problems import load_problems
from dccot.lab.worlds.exact_task import make_task
from tests.support.programs import torchrun
from tests.support.tag_soup import disagreements

KEY = "sk-planted-9b2e7c41d6"
PLANTED = dict.fromkeys(("ANTHROPIC_API_KEY", "OPENAI_API_KEY", "HF_TOKEN", "WANDB_API_KEY"), KEY)
MUTATED = 5_000  # configurations, and as many problem files
JUNK = (b"{", b"}", b"[", b'"', b"\n", b"&a", b"*a", b"!!", b": ", b"\x00", b"null", b"1e999", b"\\ud800")


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


def refused(main: Callable, argv: list[str]) -> tuple[int | None, str, float]:
    """Exit code, what was printed to stderr, seconds."""
    said, start = io.StringIO(), time.monotonic()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        try:
            code = main(argv)
        except SystemExit as exit:
            code = exit.code
        except Exception as error:
            code = None
            said.write(f"{type(error).__name__}: {error}")
    return code, said.getvalue(), time.monotonic() - start


def configurations(out: Path, under: Sequence[str]) -> list[Trial]:
    """Each in one line and with exit code 2, from folders without any weights."""
    from dccot.train.rl import main

    out.mkdir(parents=True)
    config = str(make_task(out))
    for path in (out / "model").glob("*.safetensors"):
        path.unlink()
    for name, change in {"small": {"vocab_size": 100}, "odd": {"model_type": "bert"}}.items():
        shutil.copytree(out / "model", out / name)
        raw = json.loads((out / name / "config.json").read_text())
        (out / name / "config.json").write_text(json.dumps(raw | change))
    shutil.copytree(out / "model", out / "untagged")
    tokenizer = json.loads((out / "untagged" / "tokenizer.json").read_text())
    tokenizer["added_tokens"] = [token for token in tokenizer["added_tokens"] if "User" not in token["content"]]
    (out / "untagged" / "tokenizer.json").write_text(json.dumps(tokenizer))
    cases = {
        "batch.promts=8": "unknown key batch.promts; did you mean 'prompts'?",
        "steps=many": "steps is 'many'",
        "reward.cutoff=60": "reward.cutoff is 60, which is not below rollout.budget 60",
        "batch.optimizer_steps=3": "batch.prompts is 8, which batch.optimizer_steps 3 does not divide",
        "rollout.budget=4000": "the model's context is 256",
        "rollout.workers=40": "",
        "data.train=nowhere.jsonl": "nowhere.jsonl",
        f"model.path={out / 'nowhere'}": "is neither a Hugging Face folder",
        f"model.path={out / 'small'}": "the model embeds 100; use the tokenizer that belongs to the model",
        f"model.path={out / 'odd'}": "bert",
        f"model.path={out / 'untagged'}": "User",
        "objective.kind=ppo": "ppo",
        "sharding.compute_dtype=float31": "float31",
    }
    problems, slowest = [], 0.0
    for override, expected in cases.items():
        code, said, seconds = refused(main, [config, override])
        slowest = max(slowest, seconds)
        if code != 2 or said.count("\n") != 1 or expected not in said or "Traceback" in said:
            problems.append(f"{override}: exit code {code}, said {said[:200]!r}")
    seen = f"one line each, before any weight is read; slowest {slowest:.1f} s"
    return [Trial.each("configurations that cannot run", seen, len(cases), problems)]


def data_files(out: Path, under: Sequence[str]) -> list[Trial]:
    """Bad lines are reported as file:line and passed over; a file without one good line is refused in a sentence."""
    out.mkdir(parents=True)
    good = b'{"id": "%d", "question": "q", "gold": "1"}\n'
    lines = {
        "not JSON": b'{"id": "x", \n',
        "not UTF-8": b'{"id": "\xff\xfe"}\n',
        "not an object": b"[1, 2]\n",
        "a 10 MB line": b'{"q": "' + b"x" * (10 << 20) + b'"}\n',
        "no question": b'{"id": "y", "gold": "1"}\n',
        "the same id again": good % 0,
        "nested 100,000 deep": b'{"a":' * 100_000 + b"\n",
    }
    files = {"an empty file": b"", "only bad lines": b"[]\n" * 50, "binary": bytes(range(256)) * 100}
    problems = []
    for name, line in lines.items():
        path = out / "some.jsonl"
        path.write_bytes(good % 0 + line + good % 1)
        said: list[str] = []
        try:
            found = load_problems(path, report=said.append)
        except Exception as error:
            problems.append(f"{name}: {type(error).__name__}: {error}")
            continue
        if [problem.id for problem in found] != ["0", "1"] or not any(f"{path}:2" in text for text in said):
            problems.append(f"{name}: {len(found)} problems, reported {said}")
    for name, content in files.items():
        path = out / "none.jsonl"
        path.write_bytes(content)
        try:
            load_problems(path, report=lambda text: None)
            problems.append(f"{name} was taken")
        except BadData as error:
            if "\n" in str(error) or str(path) not in str(error):
                problems.append(f"{name}: {error}")
    seen = "file and line named, no stack trace"
    return [Trial.each("data files that are broken", seen, len(lines) + len(files), problems)]


def tag_soups(out: Path, under: Sequence[str], count: int = 200_000) -> list[Trial]:
    wrong, well_formed = disagreements(count)
    seen = f"parser and an independent oracle agree; {well_formed:,} were well-formed"
    return [Trial.each("tag soups", seen, count, [f"K={k}: {text!r}: {a} / {b}" for text, k, a, b in wrong])]


def mutated_files(out: Path, under: Sequence[str]) -> list[Trial]:
    """Configurations and problem files with random damage: what comes out is a result or our own one-line error, and
    soon.
    """
    from dccot.train.config import RLConfig

    out.mkdir(parents=True)
    rng, trials = random.Random(0), []
    rows = b"".join(b'{"id": "%d", "question": "What is %d?", "gold": ["%d", 1.5]}\n' % (n, n, n) for n in range(20))
    loaders = {
        "mutated configurations": (make_task(out).read_bytes(), lambda path: load_config(RLConfig, path), ConfigError),
        "mutated JSONL files": (rows, lambda path: load_problems(path, report=lambda text: None), BadData),
    }
    for name, (content, load, refusal) in loaders.items():
        problems, slowest = [], 0.0
        for _ in range(MUTATED):
            spoiled = bytearray(content)
            for _ in range(rng.randint(1, 6)):
                at = rng.randrange(len(spoiled))
                spoiled[at : at + rng.randint(0, 3)] = rng.choice((rng.randbytes(rng.randint(0, 3)), rng.choice(JUNK)))
            path = out / f"mutated{'.yaml' if refusal is ConfigError else '.jsonl'}"
            path.write_bytes(bytes(spoiled))
            start = time.monotonic()
            try:
                load(path)
            except refusal as error:
                if "\n" in str(error):
                    problems.append(f"{bytes(spoiled)!r}: {error}")
            except Exception as error:
                problems.append(f"{type(error).__name__} from {bytes(spoiled)!r}")
            slowest = max(slowest, time.monotonic() - start)
        seen = f"a result or one clear line; slowest {slowest:.2f} s"
        trials.append(Trial.each(name, seen, MUTATED, problems))
    return trials


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
            settings += ["endpoint.model=m", "endpoint.patience_seconds=2"]
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
    "configurations": configurations,
    "data": data_files,
    "soups": tag_soups,
    "mutations": mutated_files,
    "secrets": rewriting_with_a_key,
}
