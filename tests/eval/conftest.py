"""Shared by the tests of evaluation and pages: a model whose answers are sometimes right, one engine on it, a
browser.
"""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request

import pytest

from dccot.lab.worlds import bigram as tiny
from dccot.rollout.engine import EngineConfig

ENGINE = EngineConfig(dtype="float32", context=1024, max_sequences=16, kv_cache_gb=0.1)


@pytest.fixture(scope="session")
def speaker(tmp_path_factory):
    """An untrained model that spawns workers and writes the digits 1 and 2, so that some of its answers are right."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny, "LETTERS", "12" + tiny.SPACE)
        chances = tiny.Chances(spawn=1 / 40, close=1 / 12, eos=1 / 24)
        return tiny.save(tmp_path_factory.mktemp("models") / "speaker", chances=chances, context=1024)


@pytest.fixture(scope="session")
def speaker_engine(speaker):
    from dccot.rollout.vllm_engine import VllmEngine

    engine = VllmEngine(speaker, ENGINE)
    yield engine
    engine.shutdown()


@pytest.fixture(scope="session")
def sums(tmp_path_factory):
    """A file of six problems that the speaker answers rightly now and then."""
    file = tmp_path_factory.mktemp("problems") / "sums.jsonl"
    rows = [
        {"id": f"p{i}", "question": f"What is {i} + {i}?", "gold": ["1", "2", "12", "21"] if i % 2 else ["1", "22"]}
        for i in range(6)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


class Browser:
    """A headless Chromium, spoken to over WebDriver. Every address that a page asks for is in `requested()`."""

    def __init__(self, port: int, dark: bool):
        self.address = f"http://127.0.0.1:{port}"
        # the pages are files and ask for nothing; a proxy that does not exist keeps the browser's own errands off the
        # wire
        arguments = [
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--proxy-server=127.0.0.1:9",
        ]
        arguments += [f"--blink-settings=preferredColorScheme={0 if dark else 1}", "--window-size=1280,1600"]
        options = {
            "goog:chromeOptions": {"args": arguments},
            "goog:loggingPrefs": {"performance": "ALL", "browser": "ALL"},
        }
        session = self._send("POST", "/session", {"capabilities": {"alwaysMatch": options}})
        self.address += f"/session/{session['sessionId']}"

    def _send(self, method: str, path: str, body: dict | None = None):
        data = json.dumps(body).encode() if body is not None else None
        request = urllib.request.Request(self.address + path, data, {"Content-Type": "application/json"}, method=method)
        with urllib.request.urlopen(request, timeout=120) as answer:
            return json.loads(answer.read())["value"]

    def open(self, page) -> None:
        self._send("POST", "/url", {"url": page.resolve().as_uri()})

    def run(self, script: str):
        return self._send("POST", "/execute/sync", {"script": script, "args": []})

    def requested(self) -> list[str]:
        events = [
            json.loads(entry["message"])["message"] for entry in self._send("POST", "/se/log", {"type": "performance"})
        ]
        return [event["params"]["request"]["url"] for event in events if event["method"] == "Network.requestWillBeSent"]

    def complaints(self) -> list[str]:
        return [entry["message"] for entry in self._send("POST", "/se/log", {"type": "browser"})]

    def close(self) -> None:
        self._send("DELETE", "")


@pytest.fixture(scope="session")
def driver():
    """The port of a running chromedriver."""
    program = shutil.which("chromedriver")
    assert program, "chromedriver was not found: apt-get install chromium chromium-driver"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen([program, f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 30
    while True:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/status", timeout=5).close()
            break
        except (urllib.error.URLError, ConnectionError):
            assert time.monotonic() < deadline, "chromedriver did not answer within 30 s"
            time.sleep(0.1)
    yield port
    process.terminate()
    process.wait()


@pytest.fixture(scope="session", params=["light", "dark"])
def browser(driver, request):
    opened = Browser(driver, dark=request.param == "dark")
    yield opened
    opened.close()
