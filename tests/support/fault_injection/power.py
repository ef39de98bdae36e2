"""Power cuts: a run on a file system of its own, whose disk is copied at random moments, without a sync.

The file system is ext4 in an image on a loop device. The copy holds what had reached the "disk" at that moment and
nothing of what was still in the page cache, as after a power cut. The run is stopped meanwhile, and a copy counts only
if the device took no write. The mount options take away what ext4 does for careless programs: data is written because
somebody asked for it, or not at all.

Of every copy, mounted: each checkpoint matches its manifest, `latest` names one, no step that it stands for is missing
in metrics.jsonl, and whatever the run had reported as complete is there. Some copies are continued to the end and must
equal the run that nobody cut off. What a disk loses that confirms a flush without doing it is not tried; nobody can
promise anything there.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from dccot.core.files import read_jsonl
from dccot.core.run import Checkpoint, step_of
from tests.support.fault_injection.faults import Trial, run
from tests.support.fault_injection.sft_task import make_sft_task

MEGABYTES = 48
OPTIONS = "loop,noauto_da_alloc,commit=300,data=writeback"
STEPS = 40
PROGRAM = ("-m", "dccot.train.sft")
WITHOUT_FSYNC = (
    "import os, sys\nos.fsync = lambda file: None\nfrom dccot.train.sft import main\nsys.exit(main(sys.argv[1:]))"
)
CARELESS = ("-c", WITHOUT_FSYNC)


class CannotMount(Exception): ...


@contextlib.contextmanager
def mounted(image: Path, place: Path, options: str = OPTIONS) -> Iterator[Path]:
    place.mkdir(exist_ok=True)
    done = subprocess.run(["mount", "-o", options, str(image), str(place)], capture_output=True, text=True)
    if done.returncode:
        raise CannotMount(done.stderr.strip())
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


def make_image(image: Path) -> None:
    if os.geteuid() != 0 or not shutil.which("mkfs.ext4"):
        raise CannotMount("mounting an image needs root and mkfs.ext4")
    with image.open("wb") as file:
        file.truncate(MEGABYTES << 20)
    subprocess.run(["mkfs.ext4", "-q", "-m", "0", str(image)], check=True)


def device_of(place: Path) -> str:
    mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    return next(Path(device).name for device, where, *_ in mounts if where == str(place))


def copy_as_after_a_cut(image: Path, copy: Path, device: str) -> bool:
    """Whether the copy is that of one moment: the device took no write meanwhile and had none under way."""

    def writes() -> tuple[str, str]:
        fields = Path(f"/sys/block/{device}/stat").read_text().split()
        return fields[4], fields[8]

    before = writes()
    shutil.copyfile(image, copy)
    return before == writes() and before[1] == "0"


def settings_of(out: Path, disk: Path) -> list[str]:
    return [str(out / "sft.yaml"), "name=run", f"output={disk}", f"steps={STEPS}"]


def cut_off(
    out: Path, copies: int, seed: int, under: Sequence[str], program: Sequence[str] = PROGRAM
) -> list[tuple[Path, int]]:
    """Train on the image and copy it now and then; each copy with the last step that the run had reported as complete
    by then.
    """
    rng, found = random.Random(seed), list[tuple[Path, int]]()

    def reported() -> int:
        steps = re.findall(r"checkpoint of step (\d+) is complete", (out / "run.log").read_text())
        return max(map(int, steps), default=0)

    make_image(out / "disk.img")
    with mounted(out / "disk.img", out / "disk") as disk, (out / "run.log").open("w") as log:
        command = [*under, sys.executable, *program, *settings_of(out, disk)]
        training = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        while training.poll() is None and not (disk / "run" / "metrics.jsonl").exists():
            time.sleep(0.01)
        while training.poll() is None and len(found) < copies:
            if reported() < len(found) * (STEPS - 5) // copies:
                time.sleep(0.01)
                continue
            time.sleep(rng.uniform(0, 0.5))
            os.killpg(training.pid, signal.SIGSTOP)
            try:
                copy = out / f"copy_{len(found):02d}.img"
                complete = reported()
                if any(copy_as_after_a_cut(out / "disk.img", copy, device_of(disk)) for _ in range(20)):
                    found.append((copy, complete))
            finally:
                os.killpg(training.pid, signal.SIGCONT)
        if training.wait():
            said = (out / "run.log").read_text()[-300:]
            raise ValueError(f"the run on the image ended with exit code {training.returncode}: {said}")
        shutil.copytree(disk / "run", out / "whole", symlinks=True)
    return found


def wrong_with(run_folder: Path, reported: int) -> list[str]:
    """What a run's folder breaks of the promises after a power cut."""
    found = []
    latest = run_folder / "latest"
    step = (step_of(Path(latest.read_text().strip())) or -1) if latest.exists() else 0
    if step < reported:
        found.append(f"step {reported} was reported as complete, latest says {step}")
    checkpoints = [each for each in (run_folder / "checkpoints").glob("step_*") if step_of(each) is not None]
    found += [f"{each.name}: {damage}" for each in checkpoints if (damage := Checkpoint(each).damage())]
    if step and not (run_folder / "checkpoints" / f"step_{step:06d}").is_dir():
        found.append(f"latest names step {step}, which is not there")
    metrics = run_folder / "metrics.jsonl"
    written = read_jsonl(metrics, report=lambda text: None) if metrics.exists() and metrics.stat().st_size else ()
    rows = [row["step"] for _, row in written]
    if rows[:step] != list(range(step)):
        found.append(f"checkpoint of step {step}, but metrics.jsonl holds steps {rows}")
    return found


def power_cuts(out: Path, under: Sequence[str], copies: int = 20, continued: int = 3, control: int = 5) -> list[Trial]:
    """The run as it is, and for a control the same without any fsync, of which copies must be broken."""
    fault = "power cut, disk image copied without sync"
    try:
        (out / "careless").mkdir(parents=True)
        make_sft_task(out)
        shutil.copyfile(out / "sft.yaml", out / "careless" / "sft.yaml")
        careless = cut_off(out / "careless", control, 1, under, CARELESS)
        broken = [copy for copy, wrong, _ in judged(out / "careless", careless) if wrong]
        taken = cut_off(out, copies, 0, under)
    except CannotMount as error:
        return [Trial(fault, 0, 0, f"not tried here: {error}")]
    problems, steps = [], []
    for number, (copy, wrong, reported) in enumerate(judged(out, taken)):
        if number % max(1, len(taken) // continued) == 0 and not wrong:
            with mounted(copy, out / "disk") as disk:
                wrong = continues_to_the_same_end(out, disk, copy.name, under)
        problems += [f"{copy.name}: {each}" for each in wrong]
        steps.append(reported)
    bad = len({problem.split(":")[0] for problem in problems})
    if control and not broken:
        problems.append("the control, a run without fsync, survived as well: the trial shows nothing")
    seen = f"steps {min(steps)} to {max(steps)} complete at the cut, all there, no row missing; {continued} continued "
    seen += f"to the same bits; without fsync {len(broken)} of {control} are broken"
    return [Trial(fault, len(taken), len(taken) - bad, seen, problems)]


def judged(out: Path, taken: Sequence[tuple[Path, int]]) -> Iterator[tuple[Path, list[str], int]]:
    """Each copy, what is wrong with it, and the step that was complete."""
    for copy, reported in taken:
        with mounted(copy, out / "disk") as disk:
            nothing = [f"no run, step {reported} reported"] * bool(reported)
            wrong = wrong_with(disk / "run", reported) if (disk / "run").exists() else nothing
        yield copy, wrong, reported
        copy.unlink()


def continues_to_the_same_end(out: Path, disk: Path, name: str, under: Sequence[str]) -> list[str]:
    code, said = run([*PROGRAM, *settings_of(out, disk)], under, out / "logs" / f"{name}.log")
    last = f"checkpoints/step_{STEPS:06d}/hf/model.safetensors"
    if code or (disk / "run" / last).read_bytes() != (out / "whole" / last).read_bytes():
        return [f"continued with exit code {code}, or to another end: {said[-300:]}"]
    rows = [row["step"] for _, row in read_jsonl(disk / "run" / "metrics.jsonl")]
    return [] if rows == list(range(STEPS)) else [f"metrics.jsonl holds steps {rows} in the end"]
