"""`make torture`: everything that kills long runs, done to a miniature one on purpose.

    make torture [--kills N] [--output runs/torture] [--seed 0]        an hour or less on two cores

The heart of it: one RL run on two ranks, with a real engine in each, is killed again and again with SIGKILL, one rank
or the whole job, at random moments of every phase and of writing a checkpoint; now and then its newest checkpoint is
damaged, and once the disk is full. The same command continues each time, or torchrun restarts it. In the end it must
equal a run that nobody touched: weights and optimizer to the bit, every step once in metrics.jsonl and in TensorBoard,
the same rollouts. The other faults are in faults.py, folders.py and power.py, what a cluster does in stops.py.

Interrupted and run again, it keeps the trials that were finished, unless the code, the seed or the kills are others.

    report.json   one row per fault: how often it was tried, how often survived, what was seen
    NAME.json     the rows of one trial, written when it has finished
    NAME/         its runs, and in logs/ what they printed
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path

from dccot.core.files import read_jsonl, write_atomic
from dccot.core.provenance import code_version, describe_code
from dccot.core.run import Checkpoint
from dccot.lab.worlds.exact_task import make_task
from dccot.rollout.servers import Servers
from tests.support.fault_injection.compare import SETTINGS, differences
from tests.support.fault_injection.faults import FAULTS, PLANTED, Trial, planted_keys_in
from tests.support.fault_injection.fleets import SAME, STALE, make_stale_task, servers, unsound
from tests.support.fault_injection.folders import flip_a_bit, folders
from tests.support.fault_injection.power import power_cuts
from tests.support.fault_injection.rank import FILES, FULL_DISK, PHASES, Kill
from tests.support.fault_injection.stops import STOPS
from tests.support.fault_injection.storms import storms

RANKS = 2
MADE_HERE = ".torture"  # marks a folder that may be emptied
DAMAGES = ("a flipped bit", "a file cut short", "a missing file", "a broken manifest")


ROSTER = [(phase, victim) for phase in PHASES[:4] for victim in ("rank 0", "rank 1", "job")]
ROSTER += [("checkpoint", "rank 1"), ("writing shards", "rank 0"), ("writing shards", "rank 1")]
ROSTER += [("writing weights", "rank 0"), ("writing the manifest", "rank 0"), ("before the rename", "job")]
ROSTER += [("between rename and latest", "rank 0"), ("moving latest", "rank 0"), ("moving latest", "job")]
ROSTER += [("deleting an old one", "rank 0")]
EXACT = ("before the rename", "between rename and latest", "moving latest")  # a delay would be past them


def draw_kills(count: int, seed: int) -> list[Kill]:
    """The roster in random order, each at a random moment of its phase."""
    rng = random.Random(seed)
    pairs = (rng.sample(ROSTER, len(ROSTER)) * (count // len(ROSTER) + 1))[:count]
    return [Kill(moment, victim, 0.0 if moment in EXACT else round(rng.random(), 3)) for moment, victim in pairs]


def in_launches(kills: Sequence[Kill], seed: int) -> list[list[Kill]]:
    """Kills that follow one another under one torchrun. A killed job ends a launch, a killed rank now and then: others
    are restarted.
    """
    rng = random.Random(seed)
    launches: list[list[Kill]] = [[]]
    for kill in kills:
        launches[-1].append(kill)
        if kill.victim == "job" or rng.random() < 0.2:
            launches.append([])
    return [launch for launch in launches if launch]


class FaultInjection:
    """The faulted run and the whole one, below one folder that holds the task (task.py)."""

    def __init__(
        self, out: Path, steps: int, settings: Sequence[str] = SETTINGS, under: Sequence[str] = (), run=subprocess.run
    ):
        self.out, self.steps, self.settings, self.under, self._start = out, steps, settings, under, run
        self.run, self.whole, self.log = out / "faulted", out / "whole", out / "kills.jsonl"
        self.problems: list[str] = []
        self.damaged: list[tuple[int, str, int]] = []  # number of kills before it, how, step it must go back to
        self.launches = 0
        (out / "logs").mkdir(parents=True)

    def launch(self, name: str, kills: Sequence[Kill] = (), restarts: int = 0) -> int:
        """`dccot rl` on two ranks until it ends; returns its exit code. What it prints goes to logs/."""
        module = ["dccot.train.rl"] if name == "whole" else ["tests.support.fault_injection.rank", str(self.log)]
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={RANKS}"]
        command += [
            f"--max-restarts={restarts}",
            "-m",
            *module,
            str(self.out / "rl.yaml"),
            f"name={name}",
            f"steps={self.steps}",
            *self.settings,
        ]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
        environment["DCCOT_KILLS"] = json.dumps([asdict(kill) for kill in kills])
        self.launches += 1
        with open(self.out / "logs" / f"{self.launches:02d}_{name}.log", "w") as said:
            return self._start([*self.under, *command], env=environment, stdout=said, stderr=said).returncode

    def kills(self) -> list[dict]:
        return [row for _, row in read_jsonl(self.log)] if self.log.exists() else []

    def inject(self, kills: Sequence[Kill], restarts: int) -> None:
        """One launch with these kills, of which the last ends it if torchrun may restart no more."""
        before, start = len(self.kills()), time.monotonic()
        code = self.launch("faulted", kills, restarts)
        rows = self.kills()[before:]
        meant = [kill for kill in kills if kill.moment != FULL_DISK]
        happened = [Kill(row["moment"], row["victim"], row["fraction"]) for row in rows]
        if happened != meant:
            self.problems.append(f"launch {self.launches}: {len(happened)} of {len(meant)} kills came")
        finishes = restarts >= len(kills)
        if finishes != (code == 0):
            self.problems.append(f"launch {self.launches} ended with exit code {code}; see logs/")
        self._no_orphans(rows)
        newest = self.newest()
        if newest is not None and (damage := Checkpoint(newest).damage()):
            self.problems.append(f"launch {self.launches}: {newest.name} is damaged ({damage})")
        did = ", ".join(f"{kill.moment} ({kill.victim})" for kill in kills) or "nobody"
        at = newest.name if newest else "the start"
        took = f"{time.monotonic() - start:.0f} s"
        print(f"  launch {self.launches:>2}, {took}: killed at {did}; now at {at}", flush=True)

    def _no_orphans(self, rows: Sequence[dict]) -> None:
        """What ran beside a killed rank must be gone: nobody is left to end it."""
        deadline = time.monotonic() + 20
        while left := [pid for row in rows for pid in row["pids"] if _is_ours(pid, row["time"])]:
            if time.monotonic() > deadline:
                self.problems.append(f"launch {self.launches}: processes {left} outlived it")
                return
            time.sleep(0.2)

    def newest(self) -> Path | None:
        latest = self.run / "latest"
        return self.run / "checkpoints" / latest.read_text().strip() if latest.exists() else None

    def damage_newest(self, how: str) -> bool:
        """Only if there is one before it, that is the promise; says whether there was."""
        steps = (self.run / "checkpoints").glob("step_*")
        folders = sorted(path for path in steps if Checkpoint(path).damage() is None)
        if len(folders) < 2:
            return False
        damage(folders[-1], how)
        self.damaged.append((len(self.kills()), how, int(folders[-2].name.removeprefix("step_"))))
        print(f"  {folders[-1].name}: {how}", flush=True)
        return True

    # what must be true in the end

    def lost(self) -> list[str]:
        """Restarts that continued from further back than the newest checkpoint that was there when the one before was
        killed.
        """
        rows, found = self.kills(), []
        for number in range(1, len(rows)):
            back_to = [step for kills, _, step in self.damaged if kills == number]
            newest = back_to[-1] if back_to else rows[number - 1]["newest"]
            if (first := rows[number]["first"]) < newest:
                found.append(f"kill {number}: step {newest} was saved, the next restart began at {first}")
        return found

    def differences(self) -> list[str]:
        """In what the faulted run differs from the whole one."""
        return differences(self.run, self.whole, self.steps)


def _is_ours(pid: int, since: float) -> bool:
    """Whether a process that was there at `since` still is; a number may have been given to another one."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        boot = int(Path("/proc/stat").read_text().partition("btime ")[2].split()[0])
    except OSError:
        return False
    return state != "Z" and boot + int(fields[18]) / os.sysconf("SC_CLK_TCK") < since + 1


def damage(folder: Path, how: str) -> None:
    """Spoil a checkpoint as disks and people do."""
    victim = next((folder / "dcp").glob("*.distcp"))
    if how == "a flipped bit":
        flip_a_bit(victim)
    elif how == "a file cut short":
        victim.write_bytes(victim.read_bytes()[:-1])
    elif how == "a missing file":
        victim.unlink()
    else:
        (folder / "manifest.json").write_text("{")


def kill_again_and_again(out: Path, kills: Sequence[Kill], seed: int, under: Sequence[str] = ()) -> list[Trial]:
    """Put one run through all `kills`, damage its newest checkpoint now and then, let the disk be full, compare with a
    whole run.
    """
    make_task(out)
    injection = FaultInjection(out, steps=2 * len(kills) + 6, under=under)
    if injection.launch("whole"):
        raise RuntimeError(f"the run that nobody touches failed; see {out / 'logs'}")
    launches, ways = in_launches(kills, seed), list(DAMAGES)
    for launch in launches:
        injection.inject(launch, restarts=len(launch) - 1)
        if ways and injection.damage_newest(ways[0]):
            del ways[0]
    if ways and len(launches) > len(DAMAGES):
        injection.problems.append(f"never tried on a checkpoint: {', '.join(ways)}")
    injection.inject([Kill(FULL_DISK, "rank 0")], restarts=1)
    return judge(injection)


STALE_KILLS = [("rollout", "rank 0"), ("update", "rank 1"), ("sync", "rank 0"), ("checkpoint", "job")]
STALE_KILLS += [("sync", "job"), ("rollout", "job")]


def stale_kills(mode: str, out: Path, under: Sequence[str]) -> list[Trial]:
    """A partial or asynchronous trainer killed in every phase. Servers outlive it, whatever it was doing to them."""
    kills = [Kill(moment, victim, 0.5) for moment, victim in STALE_KILLS]
    out.mkdir(parents=True)
    config = make_stale_task(out)
    with ExitStack() as stack:
        given = [f"rollout.mode={mode}"]
        if mode == "asynchronous":
            stack.callback(os.environ.pop, "VLLM_API_KEY", None)
            urls = stack.enter_context(Servers(out / "model", config.engine, 2, logs=out)).urls
            given += [f"engine.url=[{','.join(urls)}]"]
        injection = FaultInjection(out, 3 * len(kills) + 4, (*SETTINGS, *STALE, *given), under)
        for launch in in_launches(kills, 0):
            injection.inject(launch, restarts=len(launch) - 1)
        injection.inject([], restarts=0)
    wrong = injection.problems + injection.lost() + unsound(injection.run, config, injection.steps)
    tried = len(injection.kills())
    where = ", ".join(f"{row['moment']} ({row['victim']})" for row in injection.kills())
    return [Trial(f"SIGKILL: {mode} trainer", tried, 0 if wrong else tried, f"{where}; {SAME}", wrong)]


def judge(injection: FaultInjection) -> list[Trial]:
    rows, logs = injection.kills(), sorted((injection.out / "logs").glob("*_faulted.log"))
    said = "".join(path.read_text() for path in logs)
    wrong = injection.problems + injection.lost() + injection.differences()
    end = "final weights, optimizer, rollouts, metrics and TensorBoard series are those of the whole run"
    trials = []
    for moment in (*PHASES, *FILES):
        hit = [row for row in rows if row["moment"] == moment]
        if hit:
            victims = ", ".join(sorted(row["victim"] for row in hit))
            trials.append(Trial(f"SIGKILL: {moment}", len(hit), 0 if wrong else len(hit), victims))
    trials.append(Trial("all kills together", len(rows), 0 if wrong else len(rows), end, wrong))
    if injection.damaged:
        tried, ways = len(injection.damaged), ", ".join(how for _, how, _ in injection.damaged)
        noticed = min(said.count("is damaged"), tried)
        trials.append(Trial("newest checkpoint damaged", tried, noticed, f"{ways}: reported, the one before used"))
    if failed := said.count("was not written"):
        seen = "a message each time; training continued, the next one was written"
        trials.append(Trial("disk full while a checkpoint is written", failed, 0 if wrong else failed, seen))
    return trials


TRIALS = {**FAULTS, **STOPS, "folders": folders, "power": power_cuts, "storms": storms, "servers": servers}
TRIALS |= {f"{mode}_kills": partial(stale_kills, mode) for mode in ("partial", "asynchronous")}


def table(trials: Sequence[Trial]) -> str:
    """For people, in a terminal and in docs/reliability.md."""
    rows = [("fault", "tried", "survived", "what was seen")]
    rows += [(trial.fault, f"{trial.tried:,}", f"{trial.survived:,}", trial.seen) for trial in trials]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    lines = ["| " + " | ".join(text.ljust(width) for text, width in zip(row, widths)) + " |" for row in rows]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)


def open_folder(out: Path, made_by: str) -> None:
    """A new folder in place of one that was made here, unless `made_by` is the same; anything else that lies there is
    somebody's work.
    """
    mark = out / MADE_HERE
    if out.exists() and not mark.is_file() and any(out.iterdir()):
        remedy = "choose another --output, or empty it yourself"
        raise SystemExit(f"{out} holds files that make torture did not write; {remedy}")
    if not mark.is_file() or mark.read_text() != made_by:
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir(parents=True)
        mark.write_text(made_by)


def once(out: Path, name: str, trial: Callable[[Path], list[Trial]]) -> list[Trial]:
    """The rows of a trial that has finished before, or of one that starts anew."""
    rows = out / f"{name}.json"
    if rows.is_file():
        print(f"{name}: finished before", flush=True)
        return [Trial(**row) for row in json.loads(rows.read_text())]
    shutil.rmtree(out / name, ignore_errors=True)
    print(f"[{time.strftime('%H:%M:%S')}] {name}", flush=True)
    began = time.monotonic()
    found = trial(out / name)
    found[-1].seconds = time.monotonic() - began
    write_atomic(rows, json.dumps(list(map(asdict, found)), ensure_ascii=False))
    return found


def main(argv: Sequence[str] | None = None) -> int:
    about = "Kills, damages and starves a miniature run; says what it survived."
    parser = argparse.ArgumentParser(prog="make torture", description=about)
    parser.add_argument("--kills", type=int, default=len(ROSTER))
    emptied = "emptied if make torture made it with other code"
    parser.add_argument("--output", type=Path, default=Path("runs/torture"), help=emptied)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", choices=["kills", *TRIALS], help="some of the trials")
    prefix = "what every long command is started with, e.g. 'nice -n 19'"
    parser.add_argument("--under", default="", metavar="COMMAND", help=prefix)
    arguments = parser.parse_args(argv)
    out, under = arguments.output.resolve(), shlex.split(arguments.under)
    kills = draw_kills(arguments.kills, arguments.seed)
    open_folder(out, f"{describe_code(code_version())} {kills}")
    os.environ.update(PLANTED)  # every process of the trials sees the keys; no file may
    trials: list[Trial] = []
    for name in arguments.only or ["kills", *TRIALS]:
        trial = TRIALS.get(name) or (lambda folder, under: kill_again_and_again(folder, kills, arguments.seed, under))
        trials += once(out, name, lambda folder, trial=trial: trial(folder, under))
    trials.append(planted_keys_in(out))
    seconds = sum(trial.seconds for trial in trials)
    good = all(trial.good for trial in trials)
    report = {"good": good, "seconds": round(seconds), "cores": os.cpu_count(), "seed": arguments.seed}
    report["trials"] = list(map(asdict, trials))
    (out / "report.json").write_text(json.dumps(report, indent=1, ensure_ascii=False))
    print(f"\n{table(trials)}\n")
    for problem in (problem for trial in trials for problem in trial.problems):
        print(f"PROBLEM: {problem}")
    print(f"{'all survived' if good else 'NOT all survived'}, {seconds / 60:.1f} minutes; {out / 'report.json'}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
