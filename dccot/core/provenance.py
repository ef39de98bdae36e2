"""What a result was made from: `provenance.json` in its folder, `NAME.provenance.json` next to a `NAME.jsonl`.

    {"starts": [{"time", "code", "python", "packages", "command", "configuration", "inputs", "ranks", "machines"}, …]}

The newest start is last; one equal to the previous one is not repeated, so the file shows if a run continued with other
code, packages, settings or data. Everything except time and machines must be the same on every rank, or the start is
rejected. No secret is written: anything in the environment that looks like one, and anything before the @ of a URL, is
removed.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.metadata import distributions
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dccot import __version__
from dccot.core.config import ConfigError, hide_credentials, to_plain
from dccot.core.files import BadData, checksum, read_json, write_atomic
from dccot.core.lazy import Lazy
from dccot.core.runtime import Runtime, on_rank_zero

if TYPE_CHECKING:
    import torch
else:
    torch = Lazy("torch")

Checksums = dict[str, str]  # file → sha256
SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSW|CREDENTIAL", re.IGNORECASE)  # in the name of an environment variable
OF_ONE_RANK = ("time", "machines")
GIT_SECONDS = 120.0  # for an answer from git, on a slow disk; without one the commit is unknown


@cache
def code_version() -> dict[str, Any]:
    """Release, commit and whether files differ from it (None outside a checkout), checksum of the running source."""
    package = Path(__file__).resolve().parents[1]
    walk = ((Path(folder, name), name) for folder, _, names in os.walk(package, followlinks=True) for name in names)
    kinds = (".py", ".yaml", ".txt", ".cpp")
    files = sorted((str(path.relative_to(package)), path) for path, name in walk if name.endswith(kinds))
    source = hashlib.sha256("\n".join(f"{name} {checksum(file)}" for name, file in files).encode()).hexdigest()
    # not the checkout of a project that installed us
    ours = _git(package, "ls-files", "--error-unmatch", "__init__.py") is not None
    commit = _git(package, "rev-parse", "HEAD") if ours else None
    dirty = bool(_git(package, "status", "--porcelain", "--untracked-files=no", ":/")) if commit else None
    return {"version": __version__, "commit": commit, "dirty": dirty, "sha256": source}


def describe_code(code: Mapping[str, Any]) -> str:
    commit = f"commit {code['commit'][:8]}{' with changes' if code['dirty'] else ''}, " if code["commit"] else ""
    return f"dccot {code['version']}, {commit}source {code['sha256'][:8]}"


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=GIT_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def provenance(configuration: Any, inputs: Mapping[str, Checksums], ranks: int = 1) -> dict[str, Any]:
    """This start, as this rank sees it. `configuration` is a dataclass, or a dict of plain values."""
    facts = {
        "time": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "code": code_version(),
        "python": platform.python_version(),
        "packages": _packages(),
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "configuration": configuration if isinstance(configuration, dict) else to_plain(configuration),
        "inputs": dict(inputs),
        "ranks": ranks,
        "machines": [_machine()],
    }
    return json.loads(without_secrets(json.dumps(facts, ensure_ascii=False)))


@cache
def _packages() -> dict[str, str]:
    return {each.name: each.version for each in sorted(distributions(), key=lambda each: each.name) if each.name}


@cache
def _machine() -> dict[str, Any]:
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    facts = {"host": platform.node(), "system": platform.platform(), "cores": os.cpu_count()}
    return facts | {"memory_gb": round(memory, 1), "gpus": gpus, "cuda": torch.version.cuda}


def without_secrets(text: str) -> str:
    """With user and password of any URL, and the value of any environment variable named like a secret, removed."""
    for name, value in os.environ.items():
        if SECRET.search(name) and len(value) >= 8:
            text = text.replace(value, f"[{name}]")
    return hide_credentials(text)


def record(result: Path, configuration: Any, inputs: Mapping[str, Checksums], runtime: Runtime) -> None:
    """Reject ranks that disagree; then rank 0 adds this start to the file in the result's folder, or next to a file."""
    file = result / "provenance.json" if result.is_dir() else result.with_suffix(".provenance.json")
    facts = provenance(configuration, inputs, runtime.ranks)
    require_agreement(facts, runtime)
    machines = [machine for [machine] in runtime.gather([_machine()])]

    def write() -> None:
        facts["machines"] = [each for number, each in enumerate(machines) if each not in machines[:number]]
        starts = read_starts(file)
        if not starts or _lasting(starts[-1]) != _lasting(facts):
            write_atomic(file, json.dumps({"starts": [*starts, facts]}, indent=1, ensure_ascii=False) + "\n")

    on_rank_zero(write) if runtime.ranks > 1 else write()


def read_starts(file: Path) -> list[dict[str, Any]]:
    if not file.exists():
        return []
    remedy = "delete it: the next start writes a new one, without the starts before it"
    starts = read_json(file, remedy).get("starts")
    if not isinstance(starts, list) or not all(isinstance(start, dict) for start in starts):
        raise BadData(f"{file} is damaged (no list of starts); {remedy}")
    return starts


def _lasting(facts: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in facts.items() if key not in OF_ONE_RANK}


def require_agreement(facts: dict[str, Any], runtime: Runtime) -> None:
    """Every rank's facts must equal rank 0's, except time and machine; otherwise all raise, naming a difference."""
    expected = runtime.broadcast(facts)
    mine = next(differences(_lasting(expected), _lasting(facts)), None)
    for rank, [found] in enumerate(runtime.gather([mine])):
        if found is not None:
            key, first, other = found
            both = f"{key} is {other!r} on rank {rank} and {first!r} on rank 0"
            raise ConfigError(f"ranks disagree: {both}; every rank must run the same")


def differences(before: Any, after: Any, key: str = "") -> Iterator[tuple[str, Any, Any]]:
    """(dotted key, before, after) of everything that differs between two trees of plain values; None means missing."""
    if isinstance(before, dict) and isinstance(after, dict):
        for name in [*before, *(name for name in after if name not in before)]:
            yield from differences(before.get(name), after.get(name), f"{key}.{name}" if key else str(name))
    elif before != after:
        yield key, before, after
