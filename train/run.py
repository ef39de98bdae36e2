"""What SFT and RL runs have in common: the command line, the run folder.

runs/<name>/config.yaml  provenance.json  data.jsonl  metrics.jsonl  tensorboard/  rollouts/  checkpoints/  latest
profile/
"""

from __future__ import annotations

import dataclasses
import difflib
import fcntl
import logging
import math
import os
import socket
import time
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any, TextIO

from dccot.core.config import to_yaml
from dccot.core.files import (
    LEASE_SECONDS,
    BadData,
    checksum,
    make_folder,
    read_jsonl,
    take_lock,
    write_atomic,
    write_jsonl_atomic,
)
from dccot.core.provenance import record
from dccot.core.runtime import Runtime, on_rank_zero, require_shared
from dccot.model.folder import model_checksums

log = logging.getLogger("dccot")


_CLAIMS: dict[Path, TextIO] = {}  # a lock lives as long as its file is open: to the end of the process, however it ends


def claim(run: Path, patience: float = LEASE_SECONDS) -> str | None:
    """Lock the folder for this process; returns what prevents that, or None. Two jobs in one folder would corrupt each
    other's files.

    A lock held by a live process on this machine is final. Another machine may be dead, so its lock is retried for a
    while.
    """
    make_folder(run)
    if run.resolve() in _CLAIMS:
        return None
    file = open(run / ".lock", "a+")  # noqa: SIM115 (stays open)
    deadline, told = time.monotonic() + patience, -math.inf
    while not take_lock(file, fcntl.lockf):  # unlike flock's, not inherited by children, which may outlive a killed job
        file.seek(0)
        holder, age = file.read().strip() or "another process", time.time() - os.stat(file.fileno()).st_mtime
        if holder.endswith(f" on {socket.gethostname()}") or time.monotonic() > deadline:
            file.close()
            return f"{run} is being written by {holder}, since {age:.0f} s ago; wait for it, end it, or choose another name"
        if time.monotonic() - told > 20:
            told = time.monotonic()
            log.warning(
                "%s is locked by %s, since %.0f s ago; waiting up to %.0f s in case it is dead",
                run,
                holder,
                age,
                patience,
            )
        time.sleep(min(1.0, patience / 10))
    _CLAIMS[run.resolve()] = file
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
    file.flush()
    return None


def open_run(config: Any, runtime: Runtime, source: Path, rows: Sequence[tuple[str, str]]) -> Path:
    """Create the run folder; write the resolved configuration and the provenance. Logs what changed if the
    configuration differs.

    `rows` are (id, checksum) of its data: a run that has a checkpoint resumes only with the same rows.
    """
    run = Path(config.output) / config.name
    if taken := on_rank_zero(lambda: claim(run)):
        raise FileExistsError(taken)
    require_shared(run, runtime)
    on_rank_zero(lambda: _keep_rows(run, rows))
    read = (
        {"replay": config.replay}
        if config.replay
        else {"data.train": config.data.train, "data.validation": config.data.validation}
    )
    data = {key: {Path(file).name: checksum(file)} for key, file in read.items() if file}
    record(run, config, {"model.path": model_checksums(source, runtime), **data}, runtime)
    if runtime.is_main:
        path, text = run / "config.yaml", to_yaml(config)
        if path.exists() and path.read_text() != text:
            changed = list(difflib.unified_diff(path.read_text().splitlines(), text.splitlines(), n=0, lineterm=""))
            log.warning("%s continues with another configuration than before:\n%s", run, "\n".join(changed[2:]))
        write_atomic(path, text)
    runtime.barrier()
    return run


def _keep_rows(run: Path, rows: Sequence[tuple[str, str]]) -> None:
    """Reject data that differs from the checkpoints', naming the first differing row; without a checkpoint, record it
    as the run's data.
    """
    file = run / "data.jsonl"
    if not (run / "latest").exists():
        write_jsonl_atomic(file, ({"id": id, "sha256": found} for id, found in rows))
    elif file.exists() and rows:
        known = [(row["id"], row["sha256"]) for _, row in read_jsonl(file)] if file.stat().st_size else []
        for number, (before, now) in enumerate(zip_longest(known, rows), start=1):
            if before != now:
                was, is_ = ("missing" if row is None else f"{row[0]!r}" for row in (before, now))
                what = f"was {was} and is {is_}" if was != is_ else f"{is_} has another content"
                raise BadData(
                    f"{run} was trained on other data: row {number} {what}; continue with that data, or choose another name"
                )


def flat(config: Any, prefix: str = "") -> dict[str, Any]:
    """The configuration as dotted keys, for logs and tests."""
    found: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            found |= flat(value, f"{prefix}{field.name}.")
        else:
            found[prefix + field.name] = value
    return found
