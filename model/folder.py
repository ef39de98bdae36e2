"""Which model folder is meant, and whether it is whole.

A model is a Hugging Face folder, or a checkpoint of a run of ours: `runs/hlp` is its newest, `runs/hlp@180` that of step 180, and
`runs/hlp@best` the one with the best validation accuracy. Each checkpoint has a manifest of sizes and checksums, which is written last.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from dataclasses import dataclass
from pathlib import Path

from dccot.files import flush_to_disk, read_jsonl


def resolve_model(path: str | Path) -> Path:
    """The Hugging Face folder meant by `path`: itself, or a checkpoint of a run: `runs/hlp`, `runs/hlp@180` or `runs/hlp@best`."""
    path = Path(path)
    if (path / "config.json").is_file():
        return path
    name, at, chosen = str(path).rpartition("@")
    run = Path(name) if at and not path.exists() else path
    if not (run / "latest").is_file():
        raise FileNotFoundError(f"{str(run)!r} is neither a Hugging Face folder (no config.json) nor a run with a checkpoint (no latest)")
    if run is path:
        return run / "checkpoints" / (run / "latest").read_text().strip() / "hf"
    return _checkpoint(run, best_checkpoint(run).step if chosen == "best" else chosen)


def kept_steps(run: Path) -> list[int]:
    """Steps whose weights are still there, in order."""
    names = [folder.parent.name.removeprefix("step_") for folder in run.glob("checkpoints/step_*/hf") if (folder / "config.json").is_file()]
    return sorted(int(name) for name in names if name.isdecimal())


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
    """What validation found when the checkpoint of `step` was current."""

    step: int
    accuracy: float
    longest_path: float


def validated_checkpoints(run: Path) -> list[Validated]:
    """Validation of every step that has one, in order. A row of metrics.jsonl tells of the weights after its step."""
    if not (run / "metrics.jsonl").is_file():
        return []
    rows = [row for _, row in read_jsonl(run / "metrics.jsonl") if row.get("step", 0) and "validation/accuracy" in row]
    return [Validated(row["step"] + 1, row["validation/accuracy"], row.get("validation/longest_path", math.nan)) for row in rows]


def best_checkpoint(run: Path) -> Validated:
    """Of the checkpoints that are still there, the one with the best validation accuracy; of equal ones the shortest, then the first."""
    kept = set(kept_steps(run))
    found = [each for each in validated_checkpoints(run) if each.step in kept]
    if not found:
        raise FileNotFoundError(
            f"{run} has no checkpoint with a validation: name a step instead of best (there are {sorted(kept) or 'none'})"
        )
    return min(found, key=lambda each: (-each.accuracy, each.longest_path, each.step))


def verify_manifest(folder: Path) -> str | None:
    """What is wrong with a checkpoint folder, or None."""
    try:
        manifest = json.loads((folder / "manifest.json").read_text())
    except (OSError, ValueError) as error:
        return f"manifest.json: {error}"
    for name, expected in manifest.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != expected["size"]:
            return f"{name} has {path.stat().st_size:,} bytes instead of {expected['size']:,}"
        if _checksum(path) != expected["sha256"]:
            return f"{name} has another checksum than when it was written"
    return None


def write_manifest(folder: Path) -> None:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    manifest = {str(path.relative_to(folder)): {"size": path.stat().st_size, "sha256": _checksum(path)} for path in files}
    for path in files:
        flush_to_disk(path)
    with open(folder / "manifest.json", "w") as out:
        json.dump(manifest, out, indent=1)
        out.flush()
        os.fsync(out.fileno())


def _checksum(path: Path) -> str:
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
