"""`make fuzz`: coverage-guided fuzzing (atheris) of everything that is read from outside.

    python -m tests.fuzz all --seconds 600        every target for so many seconds of CPU, one after another
    python -m tests.fuzz gguf --seconds 60        one of them

It starts from tests/fuzz/corpus/TARGET and keeps what it finds on the way in runs/fuzz/TARGET. An input that raises
anything but a refusal, takes more than SLOW seconds of CPU or more than 4 GB is kept there as crash-…, timeout-… or
oom-…: once it is fixed, it belongs in the corpus, which tests/test_fuzz.py reads through in every `make test`.
"""

from __future__ import annotations

import argparse
import itertools
import os
import subprocess
import sys
import time
from pathlib import Path

CORPUS, FOUND = Path(__file__).parent / "corpus", Path("runs/fuzz")
NAMES = ("gguf", "safetensors", "tokenizer", "template", "rollouts", "recipe", "problems")
SLOW = 20.0
LIMITS = ["-timeout=1800", "-rss_limit_mb=4096", "-max_len=20000"]


def fuzz(name: str, seconds: int) -> None:
    """In this process, which ends here."""
    import atheris

    with atheris.instrument_imports(include=["dccot", "json", "gguf", "jinja2"]):
        import gguf  # noqa: F401  (imported where they are needed, which is too late here)
        import jinja2.sandbox  # noqa: F401

        from tests.fuzz.targets import refuses

    inputs = itertools.count(1)

    def one(data: bytes) -> None:
        began, number = time.process_time(), next(inputs)
        refuses(name, data)
        if (took := time.process_time() - began) > SLOW:
            raise TimeoutError(f"{took:.0f} s of CPU")
        if (spent := sum(os.times()[:4])) > seconds:  # with the processes that it started
            print(f"[fuzz] {name}: nothing found in {number:,} inputs, {spent:.0f} s of CPU", flush=True)
            os._exit(0)

    (FOUND / name).mkdir(parents=True, exist_ok=True)
    folders = [str(FOUND / name), str(CORPUS / name)]
    found = f"-artifact_prefix={FOUND / name}/"
    atheris.Setup([sys.argv[0], *folders, *LIMITS, found], one)
    atheris.Fuzz()


def main() -> int:
    parser = argparse.ArgumentParser(prog="make fuzz", description="Fuzz everything that is read from outside.")
    parser.add_argument("target", choices=["all", *NAMES])
    parser.add_argument("--seconds", type=int, default=600)
    arguments = parser.parse_args()
    if arguments.target != "all":
        fuzz(arguments.target, arguments.seconds)
        return 0
    failed = []
    for name in NAMES:
        print(f"[fuzz] {name}, {arguments.seconds} s of CPU", flush=True)
        command = [sys.executable, "-m", "tests.fuzz", name, "--seconds", str(arguments.seconds)]
        if subprocess.run(command).returncode:
            failed.append(name)
    print(f"[fuzz] findings in {', '.join(failed)}: see {FOUND}" if failed else "[fuzz] nothing found", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
