"""`dccot rl` with a killer inside: what every rank of a faulted run executes.

    export DCCOT_KILLS='[{"moment": "update", "victim": "rank 1", "fraction": 0.4}]'
    torchrun … -m tests.support.fault_injection.rank KILL_LOG

One kill per restart: torchrun's n-th restart gets the n-th kill of the list, and a restart after the last one runs to
the end. The training code is not touched. Phases are watched as they begin; what happens to files is seen by an audit
hook. Both only ever add a SIGKILL. A kill whose moment is "full disk" is none: for two steps no file of that rank may
grow as large as a checkpoint's.
"""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import dccot.train.rl as rl
import dccot.train.trainer as trainer
from dccot.train.phases import Phases

PHASES = ("rollout", "grade", "update", "sync", "checkpoint")
FILES = {  # moment → (audit event, the path it is about): the kill comes just before it happens
    "writing shards": ("open", r"\.partial/dcp/"),
    "writing weights": ("open", r"\.partial/hf/"),
    "writing the manifest": ("open", r"\.partial/\.manifest\.json\.\d+\.part$"),
    "before the rename": ("os.rename", r"checkpoints/\.step_\d+\.partial$"),
    "between rename and latest": ("open", r"\.latest\.\d+\.part$"),
    "moving latest": ("os.rename", r"\.latest\.\d+\.part$"),
    "deleting an old one": ("shutil.rmtree", r"checkpoints/step_\d+$"),
}
FULL_DISK = "full disk"


@dataclass(frozen=True)
class Kill:
    moment: str
    victim: str  # rank 0, rank 1, job (all ranks and torchrun)
    fraction: float = 0.0  # how far into the phase, or into the few milliseconds after a file event


def descendants(pid: int) -> list[int]:
    """All processes below `pid`, the nearest first."""
    found = [pid]
    for parent in found:
        for task in Path(f"/proc/{parent}/task").glob("*/children"):
            try:
                found += [int(child) for child in task.read_text().split()]
            except OSError:  # gone in between
                continue
    return found[1:]


class Killer(Phases):
    """The phases of a run, one of which does not end: after one whole step since the restart, at its moment, the victim
    is killed.
    """

    FILE_SECONDS = 0.02
    FULL_DISK_BYTES = 300_000  # rollouts and metrics of the task are smaller, weights and shards larger
    kill: Kill | None = None
    log: Path

    def __init__(self, runtime):
        super().__init__(runtime)
        self.first: int | None = None
        strikes = self.kill is not None and self.kill.victim in (f"rank {self.rank}", "job" if self.rank == 0 else "")
        self.armed = strikes
        if strikes and self.kill.moment in FILES:
            sys.addaudithook(self._see)

    def begin_step(self, step: int) -> None:
        self.first = step if self.first is None else self.first
        super().begin_step(step)
        if self.armed and self.kill.moment == FULL_DISK:
            full, unlimited = step in (self.first + 1, self.first + 2), resource.RLIM_INFINITY
            resource.setrlimit(resource.RLIMIT_FSIZE, (self.FULL_DISK_BYTES if full else unlimited, unlimited))

    @property
    def warm(self) -> bool:
        return self.first is not None and self.step > self.first

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        if self.armed and self.warm and name == self.kill.moment:
            self.strike(self.kill.fraction * self._history[name][-1])
        with super().__call__(name):
            yield

    def _see(self, event: str, arguments: tuple) -> None:
        wanted, path = FILES[self.kill.moment]
        if event == wanted and self.armed and self.warm and re.search(path, str(arguments[0])):
            self.strike(self.kill.fraction * self.FILE_SECONDS)

    def strike(self, delay: float) -> None:
        self.armed = False
        if delay > 0:
            threading.Timer(delay, self.end).start()
        else:
            self.end()

    def end(self) -> None:
        agent = os.getppid()
        below = [pid for pid in descendants(agent) if pid != os.getpid()]
        latest = self.log.parent / "faulted" / "latest"
        newest = int(latest.read_text().removeprefix("step_")) if latest.exists() else 0
        row = asdict(self.kill) | {"first": self.first, "step": self.step, "newest": newest}
        row |= {"time": time.time(), "pids": below}
        out = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.write(out, json.dumps(row).encode() + b"\n")
        if self.kill.victim == "job":
            for pid in [agent, *(pid for pid in below if Path(f"/proc/{pid}").exists() and _parent(pid) == agent)]:
                os.kill(pid, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def main(argv: list[str]) -> int:
    kills = json.loads(os.environ.get("DCCOT_KILLS", "[]"))
    restart = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    Killer.log = Path(argv[0])
    Killer.kill = Kill(**kills[restart]) if restart < len(kills) else None
    trainer.Phases = Killer
    return rl.main(argv[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
