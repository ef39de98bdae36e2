"""Resolves a model path to a folder, and verifies it.

A model is a Hugging Face folder, a hub id (`owner/name` or `owner/name@revision`, hub.py), or a checkpoint of one of our
runs: `runs/hlp` is its newest, `runs/hlp@180` that of step 180, and `runs/hlp@best` the one with the best validation
accuracy. Each checkpoint has a manifest of sizes and checksums, which is written last.

    find_model(path)           the folder that `path` refers to; reads only names
    resolve_model(path)        the same, checked against its manifest: used by every command before it reads weights
    model_checksums(folder)    what is in it, for provenance
"""

from __future__ import annotations

import json
import logging
import math
import re
import socket
from dataclasses import dataclass
from pathlib import Path

from dccot.core.files import BadData, checksum, flush_to_disk, read_jsonl, write_atomic
from dccot.core.runtime import Runtime, on_rank_zero
from dccot.model.hub import hub_folder, is_hub_id, verify_hub_folder

log = logging.getLogger(__name__)
_STEP = re.compile(r"step_(\d{6,})")
_VERIFIED: dict[
    Path, tuple
] = {}  # folders already checked by this process, with their state: stages of a recipe reread the same model


def resolve_model(path: str | Path) -> Path:
    """The folder that `path` refers to, verified against its manifest. In a process group rank 0 checks, and all ranks
    get its result.
    """

    def resolve() -> Path:
        folder = hub_folder(path) if is_hub_id(path) else find_model(path)
        _verify_weights(folder)
        return folder

    return on_rank_zero(resolve)


def _verify_weights(folder: Path) -> None:
    """Reject a checkpoint's hf/ folder that has changed since it was written; a folder from elsewhere has no manifest
    to check.
    """
    if step_of(folder.parent) is None:
        folder = folder.resolve()  # a link to such a folder, or `.`
    step = folder.parent
    if folder.name != "hf" or step_of(step) is None:
        verify_hub_folder(folder)
        return
    if not (step / "manifest.json").is_file():
        log.warning("%s has no manifest.json: nothing shows whether its weights are what was written", step)
        return
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    now = tuple((str(path), path.stat().st_size, path.stat().st_mtime_ns, path.stat().st_ino) for path in files)
    if _VERIFIED.get(folder.resolve()) == now:
        return
    if damage := verify_manifest(step, "hf/"):
        others = [str(each) for each in kept_steps(step.parent.parent) if each != step_of(step)]
        remedy = (
            f"use another checkpoint of this run ({', '.join(others)})"
            if others
            else "restore it from a copy or train it again"
        )
        raise BadData(f"{step} is damaged ({damage}); {remedy}")
    _VERIFIED[folder.resolve()] = now


def find_model(path: str | Path) -> Path:
    """The Hugging Face folder that `path` refers to: itself, or a checkpoint of a run: `runs/hlp`, `runs/hlp@180` or
    `runs/hlp@best`.
    """
    if is_hub_id(path):
        return hub_folder(path, weights=False)
    path = Path(path)
    if (path / "config.json").is_file():
        return path
    run, chosen = run_and_checkpoint(path)
    if not (run / "latest").is_file():
        raise FileNotFoundError(
            f"{str(run)!r} is neither a Hugging Face folder (no config.json), a run with a checkpoint (no latest), "
            "nor a hub id (owner/name)"
        )
    if chosen is None:
        return _newest(run)
    return _checkpoint(run, best_checkpoint(run).step if chosen == "best" else chosen)


def _newest(run: Path) -> Path:
    named = (run / "latest").read_text().strip()
    folder = run / "checkpoints" / named / "hf"
    if step_of(Path(named)) is None or not (folder / "config.json").is_file():
        there = ", ".join(map(str, kept_steps(run))) or "none"
        problem = f"names {named!r}, which has no weights" if named else "is empty"
        raise FileNotFoundError(
            f"{run / 'latest'} {problem}; name a checkpoint yourself as {run}@STEP (there are {there})"
        )
    return folder


def model_checksums(folder: Path, runtime: Runtime | None = None) -> dict[str, str]:
    """File → sha256 of a model's folder: its manifest's, which resolve_model has compared, or else read; a machine's
    ranks share that.
    """
    if step_of(folder.parent) is not None and (folder.parent / "manifest.json").is_file():
        return {
            Path(name).name: each["sha256"]
            for name, each in _read_manifest(folder.parent).items()
            if name.startswith("hf/")
        }
    files = sorted(path for path in folder.iterdir() if path.is_file() and not path.name.startswith("."))
    if runtime is None or runtime.ranks == 1:
        return {path.name: checksum(path) for path in files}
    machines = [machine for [machine] in runtime.gather([socket.gethostname()])]
    here = [rank for rank, machine in enumerate(machines) if machine == machines[runtime.rank]]
    parts = runtime.gather([(path.name, checksum(path)) for path in files[here.index(runtime.rank) :: len(here)]])
    return dict(sorted(entry for rank in here for entry in parts[rank]))


def step_of(folder: Path) -> int | None:
    """The step whose checkpoint this is by its name; None for unrelated folders (`step_000010_keep`)."""
    match = _STEP.fullmatch(folder.name)
    return int(match[1]) if match else None


def run_and_checkpoint(path: str | Path) -> tuple[Path, str | None]:
    """`runs/hlp@180` → runs/hlp and 180; a path without @, or one that exists literally, is the run itself."""
    name, at, chosen = str(path).rpartition("@")
    return (Path(name), chosen) if at and not Path(path).exists() else (Path(path), None)


def explain_best(path: str | Path) -> str | None:
    """Which step `RUN@best` is and why, as a message; None for any other path."""
    run, chosen = run_and_checkpoint(path)
    if chosen != "best":
        return None
    best = best_checkpoint(run)
    return f"{path} is step {best.step}: validation accuracy {100 * best.accuracy:.2f}%, longest path {best.longest_path:,.0f} tokens"


def kept_steps(run: Path) -> list[int]:
    """Steps whose weights still exist, in order."""
    steps = (
        step_of(folder.parent) for folder in run.glob("checkpoints/step_*/hf") if (folder / "config.json").is_file()
    )
    return sorted(step for step in steps if step is not None)


def _checkpoint(run: Path, step: int | str) -> Path:
    steps = kept_steps(run)
    if not str(step).isdecimal() or int(step) not in steps:
        there = ", ".join(map(str, steps)) or "none"
        raise FileNotFoundError(
            f"{run} has no checkpoint {step!r}; there are {there} (checkpoint.keep_hf_every says which ones stay), or best"
        )
    return run / "checkpoints" / f"step_{int(step):06d}" / "hf"


@dataclass(frozen=True)
class Validated:
    """Validation results of the checkpoint of `step`."""

    step: int
    accuracy: float
    longest_path: float


def validated_checkpoints(run: Path) -> list[Validated]:
    """Validation of every step that has one, in order. A row of metrics.jsonl describes the weights after its step."""
    if not (run / "metrics.jsonl").is_file():
        return []
    rows = [row for _, row in read_jsonl(run / "metrics.jsonl") if row.get("step", 0) and "validation/accuracy" in row]
    return [
        Validated(row["step"] + 1, row["validation/accuracy"], row.get("validation/longest_path", math.nan))
        for row in rows
    ]


def best_checkpoint(run: Path) -> Validated:
    """The remaining checkpoint with the best validation accuracy; ties go to the shortest, then the first."""
    kept = set(kept_steps(run))
    found = [each for each in validated_checkpoints(run) if each.step in kept]
    if not found:
        raise FileNotFoundError(
            f"{run} has no checkpoint with a validation: name a step instead of best (there are {sorted(kept) or 'none'})"
        )
    return min(found, key=lambda each: (-each.accuracy, each.longest_path, each.step))


def verify_manifest(folder: Path, part: str = "", share: slice = slice(None)) -> str | None:
    """What is wrong with a checkpoint folder, or with the `part` of it ("hf/"), or None; ranks may `share` the
    files.
    """
    try:
        manifest = _read_manifest(folder)
    except (OSError, ValueError) as error:
        return f"manifest.json: {error}"
    listed = {name: expected for name, expected in manifest.items() if name.startswith(part)}
    if not listed:
        return f"manifest.json lists no file of {part or 'it'}"
    for name, expected in list(listed.items())[share]:
        path = folder / name
        if not path.resolve().is_relative_to(folder.resolve()):
            return f"{name} leads outside the checkpoint"
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != expected["size"]:
            return f"{name} has {path.stat().st_size:,} bytes instead of {expected['size']:,}"
        if checksum(path) != expected["sha256"]:
            return f"{name} has another checksum than when it was written"
    return None


def write_manifest(folder: Path) -> None:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    manifest = {
        str(path.relative_to(folder)): {"size": path.stat().st_size, "sha256": checksum(path)} for path in files
    }
    for path in [*files, *(path for path in folder.rglob("*") if path.is_dir())]:
        flush_to_disk(path)
    write_atomic(folder / "manifest.json", json.dumps(manifest, indent=1))


def keep_in_manifest(folder: Path, part: str) -> None:
    """Remove from the manifest everything not in `part`, before it is deleted."""
    kept = {name: expected for name, expected in _read_manifest(folder).items() if name.startswith(part)}
    write_atomic(folder / "manifest.json", json.dumps(kept, indent=1))


def _read_manifest(folder: Path) -> dict[str, dict]:
    """Name → size and sha256; ValueError if malformed."""
    manifest = json.loads((folder / "manifest.json").read_text())
    good = isinstance(manifest, dict) and all(
        isinstance(each, dict) and each.keys() >= {"size", "sha256"} for each in manifest.values()
    )
    if not good:
        raise ValueError("not a table of sizes and checksums")
    return manifest
