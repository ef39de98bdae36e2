"""What `dccot serve` shows while it starts: what it is waiting for, and in one line why it could not.

Until the server is ready its output and vLLM's go to a file; that of the engine's process always does.
"""

from __future__ import annotations

import logging
import os
import re
import sys
import threading
import time
from pathlib import Path

EVERY = 15.0  # seconds between two lines where no terminal can show one that changes
CAUSE = re.compile(r"\b((?:\w+\.)*\w*(?:Error|Exception|Interrupt)): (.+)")
NOT_THE_CAUSE = ("Engine core initialization failed", "1 validation error")


class Starting:
    def __init__(self, log: Path):
        self.log, self.over = log, False
        self._began, self._ready = time.monotonic(), threading.Event()
        self._console = os.dup(2)
        self._kept = {1: os.dup(1), 2: self._console}
        self._thread = threading.Thread(target=self._show, name="starting", daemon=True)

    def begin(self) -> None:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o644)
        sys.stdout.flush()
        sys.stderr.flush()
        for number in self._kept:
            os.dup2(file, number)
        os.close(file)
        self._thread.start()

    def end(self) -> None:
        """Everything is shown again, except what the engine's process writes."""
        if self.over:
            return
        self.over = True
        self._ready.set()
        self._thread.join()
        sys.stdout.flush()
        sys.stderr.flush()
        for number, kept in self._kept.items():
            os.dup2(kept, number)
        if "VLLM_LOGGING_LEVEL" not in os.environ:
            logging.getLogger("vllm").setLevel(logging.ERROR)

    def why(self, error: BaseException) -> str:
        """The cause of a failure in one line; of an engine that did not start, the file knows it."""
        found = [match for line in self._lines() if (match := CAUSE.search(line))]
        causes = [f"{match[2].strip()}" for match in found if not match[2].startswith(NOT_THE_CAUSE)]
        told = " ".join(str(error).split())
        wrapped = re.search(r"Value error, (.+?)(?: \[type=|$)", told)
        cause = wrapped[1] if wrapped else causes[-1] if causes and NOT_THE_CAUSE[0] in told else told
        return f"the server did not start: {cause or type(error).__name__} (all of it: {self.log})"

    def _lines(self) -> list[str]:
        return self.log.read_text(errors="replace").splitlines() if self.log.is_file() else []

    def _show(self) -> None:
        terminal, told = os.isatty(self._console), self._began
        while not self._ready.wait(1.0):
            seconds = time.monotonic() - self._began
            line = f"starting vLLM and the engine: {seconds:.0f} s"
            if terminal:
                os.write(self._console, f"\r\033[K{line}".encode())
            elif time.monotonic() - told > EVERY:
                told = time.monotonic()
                last = next((text for text in reversed(self._lines()) if text.strip()), "no message of vLLM yet")
                os.write(self._console, f"{line}; {last.strip()[:120]}\n".encode())
        if terminal:
            os.write(self._console, b"\r\033[K")


starting: Starting | None = None  # of this process
