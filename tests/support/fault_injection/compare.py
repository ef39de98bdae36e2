"""What must be true of a run after everything that was done to it: it is one that nobody touched."""

from __future__ import annotations

import hashlib
from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.util import tb_logging

from dccot.core.files import read_jsonl

SETTINGS = ("optimizer.learning_rate=0.0003", "checkpoint.keep=2", "checkpoint.keep_hf_every=null", "profile.steps=[]")
OF_THE_MACHINE = ("time/", "speed/", "memory/", "checkpoint/")  # metrics that differ from run to run


def differences(run: Path, whole: Path, steps: int) -> list[str]:
    """In what a run differs from the whole one."""
    last = f"step_{steps:06d}"
    if not (run / "checkpoints" / last).is_dir():
        return [f"there is no {last}"]
    found = []
    for folder in ("hf", "dcp"):
        ours, theirs = (_files(each / "checkpoints" / last / folder) for each in (run, whole))
        if not ours or ours != theirs:
            found.append(f"{folder}/ of {last} is not bit-identical")
    ours, theirs = (_files(each / "rollouts") for each in (run, whole))
    found += [
        f"rollouts/{name} differs or is missing" for name in sorted({n for n, _ in ours.items() ^ theirs.items()})
    ]
    ours, theirs = (_comparable([row for _, row in read_jsonl(each / "metrics.jsonl")]) for each in (run, whole))
    if [row["step"] for row in ours] != list(range(steps)):
        found.append(f"metrics.jsonl holds steps {[row['step'] for row in ours]}")
    elif ours != theirs:
        found.append("metrics.jsonl holds other values")
    ours, theirs = (series(each) for each in (run, whole))
    for name in sorted(ours.keys() | theirs.keys()):
        if name.startswith("time/checkpoint_"):  # told once per checkpoint, some of which were killed
            continue
        mine, other = ours.get(name, []), theirs.get(name, [])
        same_steps = [step for step, _ in mine] == [step for step, _ in other]
        if not same_steps or (not name.startswith(OF_THE_MACHINE) and mine != other):
            found.append(f"TensorBoard series {name} differs: steps {[step for step, _ in mine]}")
    return found


def series(run: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard shows of a run."""
    tb_logging.get_logger().setLevel("ERROR")  # it warns of every restart that it has understood
    events = EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    return {name: [(event.step, event.value) for event in events.Scalars(name)] for name in events.Tags()["scalars"]}


def _comparable(rows: list[dict]) -> list[dict]:
    return [{name: value for name, value in row.items() if not name.startswith(OF_THE_MACHINE)} for row in rows]


def _files(folder: Path) -> dict[str, str]:
    """Name → checksum; without torch's index, which is pickled."""
    files = [path for path in folder.glob("*") if path.name != ".metadata"]
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
