"""What a cluster does to a run every day, done to a real one on two ranks: signals, hangs, disks that are not shared,
other rank counts.

Each run must end as if nobody had touched it; `whole`, made once, is that run.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from safetensors.torch import load_file

from dccot.core.files import read_jsonl, write_jsonl_atomic
from dccot.lab.worlds.exact_task import make_task
from dccot.train.phases import STALLED
from tests.support.fault_injection.compare import SETTINGS, differences
from tests.support.fault_injection.faults import Trial
from tests.support.fault_injection.rank import descendants
from tests.support.servers import free_port

PATIENCE = 1200.0  # seconds for anything to happen; on a busy machine a start alone takes minutes
STEPS = 60
RL, SFT = ({"module": f"dccot.train.{name}", "config": f"{name}.yaml"} for name in ("rl", "sft"))
BY_SIGNALS = ("checkpoint.every=100000",)  # nothing else saves before the end
END = "ends in the bits of the run that nobody touched, every step once"


class Job:
    """`dccot rl`, or another module with its configuration, on some ranks in the background, under torchrun or, as with
    srun, without.
    """

    def __init__(
        self,
        out: Path,
        name: str,
        *settings: str,
        ranks: int = 2,
        steps: int = STEPS,
        module: str = "dccot.train.rl",
        config: str = "rl.yaml",
        under: Sequence[str] = (),
        torchrun: Sequence[str] | None = (),  # its options
        wrap: Sequence[str] = (),  # what ranks other than 0 are started with
    ):
        self.run, self.log = out / name, out / f"{name}.log"
        self.before = self.said()
        command = ["-m", module, str(out / config), f"name={name}", f"steps={steps}", *SETTINGS, *settings]
        variables = {**os.environ, "OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
        launcher += torchrun or ()
        with self.log.open("a") as said:
            streams = {"stdout": said, "stderr": said}
            if torchrun is not None:
                self.processes = [subprocess.Popen([*under, *launcher, *command], env=variables, **streams)]
            else:
                variables |= {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
                self.processes = []
                for rank in range(ranks):
                    own = variables | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                    started = [*under, *(wrap if rank else ()), sys.executable, *command]
                    self.processes.append(subprocess.Popen(started, env=own, **streams))

    def ranks(self) -> list[int]:
        """Process ids of the ranks."""
        below = [pid for process in self.processes for pid in [process.pid, *descendants(process.pid)]]
        found = {}
        for pid in below:
            try:
                lines = Path(f"/proc/{pid}/environ").read_text().split("\0")
                variables = dict(line.split("=", 1) for line in lines if "=" in line)
                executable = Path(f"/proc/{pid}/cmdline").read_text()
            except OSError:
                continue
            if "RANK" in variables and ".yaml" in executable:
                found.setdefault(int(variables["RANK"]), pid)
        return [found[rank] for rank in sorted(found)]

    def said(self) -> str:
        return self.log.read_text()[len(getattr(self, "before", "")) :] if self.log.exists() else ""

    def logged(self) -> int:
        """Whole steps in metrics.jsonl."""
        path = self.run / "metrics.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def newest(self) -> int:
        latest = self.run / "latest"
        return int(latest.read_text().strip().removeprefix("step_")) if latest.exists() else 0

    def until(self, progress: Callable[[], int], wanted: int) -> bool:
        """Wait until `progress` has come to `wanted`; False if the job ended before, or nothing came of it."""
        deadline = time.monotonic() + PATIENCE
        alive = lambda: all(process.poll() is None for process in self.processes)
        while progress() < wanted and time.monotonic() < deadline and alive():
            time.sleep(0.02)
        return progress() >= wanted

    def wait(self) -> list[int]:
        """Exit codes; what does not end by itself is killed."""
        deadline = time.monotonic() + 2 * PATIENCE
        for process in self.processes:
            try:
                process.wait(max(1.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
        return [process.wait() for process in self.processes]


def whole_run(out: Path, under: Sequence[str], steps: int = STEPS, kind: dict[str, str] = RL) -> Path:
    if (out / "whole" / "checkpoints" / f"step_{steps:06d}").is_dir():
        return out / "whole"
    out.mkdir(parents=True, exist_ok=True)
    make_task(out)
    make_demonstrations(out)
    job = Job(out, "whole", *BY_SIGNALS, steps=steps, under=under, **kind)
    if any(job.wait()):
        raise RuntimeError(f"the run that nobody touches failed; see {job.log}")
    return job.run


def make_demonstrations(out: Path) -> None:
    """SFT on the task's model: no engine has to start."""
    workers = "".join(f"<worker_{i}>{letter}</worker_{i}>" for i, letter in enumerate("klm", 1))
    completion = f"<think>\na<spawn_workers>{workers}</spawn_workers>z</think><answer>\\boxed{{3}}</answer>"
    rows = [{"id": str(i), "question": f"Say 3, case {i}.", "completion": completion} for i in range(40)]
    write_jsonl_atomic(out / "demonstrations.jsonl", rows)
    config = {"output": str(out), "threads": 1, "checkpoint": {"every": 1}, "sharding": {"compute_dtype": "float32"}}
    config |= {"model": {"path": str(out / "model")}, "data": {"train": str(out / "demonstrations.jsonl")}}
    config |= {"batch": {"examples": 8, "token_budget": 300}}
    (out / "sft.yaml").write_text(json.dumps(config))


def signals(out: Path, under: Sequence[str], launches: int = 7, seed: int = 0, steps: int = STEPS) -> list[Trial]:
    """Twice SIGUSR1, then SIGTERM, at random moments, to torchrun, to all ranks (as SLURM does), or to one; again; then
    to the end.
    """
    whole, rng = whole_run(out, under, steps), random.Random(seed)
    problems, sent = list[str](), {"SIGUSR1": 0, "SIGTERM": 0}
    for launch in range(launches):
        job = Job(out, "signalled", *BY_SIGNALS, steps=steps, under=under, torchrun=["--shutdown-timeout=120"])
        began = job.logged()
        for number in (signal.SIGUSR1, signal.SIGUSR1, signal.SIGTERM):
            wanted = max(began, job.logged()) + rng.randint(1, 2)
            if not job.until(job.logged, wanted):
                problems.append(f"launch {launch}: it ended before {number.name}; see {job.log}")
                break
            time.sleep(rng.random() * 0.5)
            newest, victims = job.newest(), rng.choice(["torchrun", "all ranks", "one rank"])
            pids = job.ranks()
            if victims == "torchrun" and number == signal.SIGTERM:
                pids = [job.processes[0].pid]
            elif victims != "all ranks":
                pids = [rng.choice(pids)]
            for pid in pids:
                os.kill(pid, number)
            sent[number.name] += 1
            if number == signal.SIGUSR1 and not job.until(job.newest, newest + 1):
                problems.append(f"launch {launch}: nothing was saved after SIGUSR1")
        else:
            job.wait()
            if job.newest() != job.logged() or "stopped; rerun the same command to resume" not in job.said():
                problems.append(f"launch {launch}: {job.logged()} steps were done, {job.newest()} saved; see {job.log}")
    if any(Job(out, "signalled", *BY_SIGNALS, steps=steps, under=under).wait()):
        problems.append("the last launch failed")
    problems += differences(out / "signalled", whole, steps)
    good = 0 if problems else 1
    return [
        Trial("SIGUSR1", sent["SIGUSR1"], good * sent["SIGUSR1"], "saved after the step, training continued"),
        Trial("SIGTERM", sent["SIGTERM"], good * sent["SIGTERM"], f"saved and stopped, no step lost; {END}", problems),
    ]


def hangs(out: Path, under: Sequence[str], steps: int = 8) -> list[Trial]:
    """The engine of rank 1 never returns; then rank 1 itself stands still while rank 0 waits for it in a collective."""
    whole = whole_run(out, under, steps)
    options, module = ["--max-restarts=2", "--shutdown-timeout=5"], "tests.support.fault_injection.hang"
    settings = "stall_seconds=30", "checkpoint.every=1"
    job = Job(out, "hung", *settings, steps=steps, under=under, module=module, torchrun=options)
    [code], said = job.wait(), job.said()
    problems = [] if code == 0 else [f"exit code {code}; see {job.log}"]
    problems += differences(job.run, whole, steps)
    expected = {
        "hang in engine.step()": (
            f"exitcode: {STALLED}",
            "rollout has been running",
            " pending: ",
            "/p",
            "in never_return",
        ),
        "hang in a collective": ("grade has been running", "in gather", "without progress"),
    }
    trials = []
    for fault, signs in expected.items():
        missing = [sign for sign in signs if sign not in said]
        good = not missing and not problems
        seen = "place and pending ids said while it hung; ended, restarted by torchrun, same bits in the end"
        trials.append(Trial(fault, 1, int(good), seen, [f"{fault}: not said: {missing}"] if missing else []))
    trials[-1].problems += problems
    return trials


def unshared(out: Path, under: Sequence[str], steps: int = 200) -> list[Trial]:
    """Rank 1 in a mount namespace of its own: another disk from the start, then one that goes away during the run."""
    if subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode:
        return [Trial("ranks that do not share a disk", 0, 0, "not tried: unshare -m needs root")]
    whole, problems = whole_run(out, under, steps, SFT), list[str]()
    (out / "apart").mkdir()
    apart = ["unshare", "-m", "sh", "-c", f'mount -t tmpfs tmpfs "{out / "apart"}" && exec "$@"', "sh"]
    job = Job(out, "apart", steps=steps, torchrun=None, wrap=apart, under=under, **SFT)
    if set(job.wait()) != {2} or "is not the folder of rank 1 on" not in job.said():
        problems.append(f"another disk from the start was not refused; see {job.log}")
    refused = not problems
    job = Job(out, "lost", steps=steps, torchrun=None, wrap=["unshare", "-m"], under=under, **SFT)
    job.until(job.newest, 3)
    mount = ["-m", "mount", "-t", "tmpfs", "tmpfs", str(job.run / "checkpoints")]
    subprocess.run(["nsenter", "-t", str(job.ranks()[1]), *mount], check=True)
    codes, said = job.wait(), job.said()
    signs = "4 checkpoints in a row were not written (checkpoint.max_failures is 3)", "__1_0.distcp"
    if 0 in codes or not all(sign in said for sign in signs):
        problems.append(f"exit codes {codes} when the disk went away; see {job.log}")
    if list((job.run / "checkpoints").glob(".*.partial")) or job.newest() < 3:
        problems.append("something half-written was left")
    if any(Job(out, "lost", steps=steps, under=under, torchrun=None, **SFT).wait()):
        problems.append("it did not continue when the disk was back")
    problems += differences(job.run, whole, steps)
    seen = f"ended after max_failures with the missing file named; {END}"
    return [
        Trial("ranks that do not share a disk", 1, int(refused), "refused at the start; rank and machine named"),
        Trial("a disk that one rank loses", 1, int(not problems), seen, problems),
    ]


def rank_counts(out: Path, under: Sequence[str], steps: int = 30) -> list[Trial]:
    """A run that continues on 1, 2 and 1 ranks: nothing is lost; sums are taken in another order, so the last bits may
    differ.
    """
    whole, problems, moved = whole_run(out, under, steps, SFT), list[str](), out / "moved"
    for ranks, end in ((1, steps // 3), (2, 2 * steps // 3), (1, steps)):
        if any(Job(out, "moved", steps=end, ranks=ranks, under=under, **SFT).wait()):
            problems.append(f"{ranks} ranks, to step {end}: failed; see {out / 'moved.log'}")
    ours, theirs = ([row for _, row in read_jsonl(run / "metrics.jsonl")] for run in (moved, whole))
    if [row["step"] for row in ours] != list(range(steps)):
        problems.append(f"metrics.jsonl holds steps {[row['step'] for row in ours]}")
    loss = max(abs(a["policy/loss"] / b["policy/loss"] - 1) for a, b in zip(ours, theirs))
    mine, other = (load_file(run / f"checkpoints/step_{steps:06d}/hf/model.safetensors") for run in (moved, whole))
    furthest = max(float((mine[name] - other[name]).abs().max()) for name in other)
    seen = f"every step once; losses within {loss:.0e} and weights within {furthest:.0e} of those of 2 ranks (SFT)"
    if loss > 1e-4 or furthest > 1e-3:
        problems.append(f"further away than rounding explains: {seen}")
    return [Trial("ranks on resume 1 → 2 → 1", 2, 0 if problems else 2, seen, problems)]


SMALLEST = ("batch.prompts_rolled_out=1", "batch.prompts=1", "batch.group_size=2", "batch.optimizer_steps=1")
SMALLEST += ("rollout.budget=44", "checkpoint.every=100", "keep_rollouts=20")


def long_run(out: Path, under: Sequence[str], steps: int = 2000) -> list[Trial]:
    """Memory, descriptors and threads of a rank over a long run of the smallest steps there are: nothing may grow."""
    out.mkdir(parents=True)
    make_task(out)
    job = Job(out, "long", *SMALLEST, steps=steps, ranks=1, under=under)
    samples: list[tuple[int, int, int, int]] = []
    job.until(job.logged, 1)
    while job.processes[0].poll() is None:
        if (pids := job.ranks()) and (taken := _resources(pids[0])):
            samples.append((job.logged(), *taken))
        time.sleep(2)
    [code] = job.wait()
    settled = [each for each in samples if steps // 10 <= each[0] < steps]
    (out / "samples.json").write_text(json.dumps(samples))
    if code or len(settled) < 4:
        return [Trial("a long run", steps, 0, "", [f"exit code {code}, {len(settled)} samples; see {job.log}"])]
    quarter = len(settled) // 4
    most = lambda part: [max(each[column] for each in part) for column in (1, 2, 3)]
    (rss, fds, threads), (rss_end, fds_end, threads_end) = most(settled[:quarter]), most(settled[-quarter:])
    seen = f"memory {rss} → {rss_end} MB, descriptors {fds} → {fds_end}, threads {threads} → {threads_end} "
    seen += "(first and last quarter, most)"
    flat = rss_end <= 1.02 * rss and fds_end <= fds and threads_end <= threads
    problems = [] if flat else [f"something grows: {seen}"]
    return [Trial("a long run", steps, 0 if problems else steps, seen, problems)]


def _resources(pid: int) -> tuple[int, int, int] | None:
    """Resident memory in MB, open descriptors, threads."""
    try:
        resident = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20
        return resident, len(os.listdir(f"/proc/{pid}/fd")), len(os.listdir(f"/proc/{pid}/task"))
    except OSError:
        return None


STOPS = {trial.__name__: trial for trial in (signals, hangs, unshared, rank_counts, long_run)}
