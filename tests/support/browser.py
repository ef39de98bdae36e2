"""A browser for tests of pages, driven through chromedriver's own protocol."""

from __future__ import annotations

import base64
import contextlib
import json
import shutil
import socket
import subprocess
import time
import urllib.request
from pathlib import Path

KEYS = {"ArrowDown": "\ue015", "ArrowUp": "\ue013", "End": "\ue010", "Home": "\ue011", "Escape": "\ue00c"}
KEYS |= {"PageDown": "\ue00f"}
OPTIONS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--window-size=1400,900")
MISSING = "chromedriver was not found: apt-get install chromium chromium-driver (`make setup` does so where it may)"


class Browser:
    """A headless Chromium, and the few calls of the WebDriver protocol that tests need."""

    def __init__(self):
        driver = shutil.which("chromedriver")
        assert driver, MISSING
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self.process = subprocess.Popen([driver, f"--port={port}"], **silent)
        self.address = f"http://127.0.0.1:{port}"
        self.until(lambda: self.call("GET", "/status")["ready"])
        wanted = {"browserName": "chrome", "goog:chromeOptions": {"args": OPTIONS}}
        wanted["goog:loggingPrefs"] = {"performance": "ALL", "browser": "ALL"}
        opened = self.call("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})
        self.address += f"/session/{opened['sessionId']}"

    def call(self, method: str, path: str, content: dict | None = None):
        body = None if content is None else json.dumps(content).encode()
        request = urllib.request.Request(self.address + path, body, {"Content-Type": "application/json"}, method=method)
        with urllib.request.urlopen(request, timeout=600) as answer:
            return json.load(answer)["value"]

    def go(self, address: str) -> None:
        self.call("POST", "/url", {"url": address})

    def screen(self, scheme: str) -> None:
        """Show pages as on a screen that prefers this colour scheme, light or dark."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        command = {"cmd": "Emulation.setEmulatedMedia", "params": {"features": features}}
        self.call("POST", "/goog/cdp/execute", command)

    def js(self, code: str, *arguments):
        return self.call("POST", "/execute/sync", {"script": code, "args": list(arguments)})

    def press(self, *keys: str) -> None:
        strokes = [{"type": kind, "value": KEYS.get(key, key)} for key in keys for kind in ("keyDown", "keyUp")]
        self.call("POST", "/actions", {"actions": [{"type": "key", "id": "keyboard", "actions": strokes}]})

    def text(self, name: str) -> str:
        return self.js("return document.getElementById(arguments[0]).textContent", name)

    def picture(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.call("GET", "/screenshot")))

    def requested(self) -> list[str]:
        """Every address that pages have asked for since the last call."""
        events = [json.loads(entry["message"])["message"] for entry in self.log("performance")]
        return [event["params"]["request"]["url"] for event in events if event["method"] == "Network.requestWillBeSent"]

    def log(self, kind: str) -> list[dict]:
        return self.call("POST", "/se/log", {"type": kind})

    @staticmethod
    def until(holds, seconds: float = 300.0):
        """What `holds` gives as soon as it is true."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            with contextlib.suppress(OSError):
                if found := holds():
                    return found
            time.sleep(0.05)
        raise AssertionError("the page did not come to it in time")

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.call("DELETE", "")
        self.process.terminate()
        self.process.wait()
