"""Which model folder is meant, and whether it is whole.

A model is a Hugging Face folder, or a run of ours: its newest checkpoint's hf/ folder is meant then. Each checkpoint has a manifest of
sizes and checksums, which is written last.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

from dccot.files import flush_to_disk


def resolve_model(path: str | Path) -> Path:
    """The Hugging Face folder meant by `path`: itself, or that of the newest checkpoint if `path` is a run."""
    path = Path(path)
    if (path / "config.json").is_file():
        return path
    if (path / "latest").is_file():
        return path / "checkpoints" / (path / "latest").read_text().strip() / "hf"
    raise FileNotFoundError(f"{str(path)!r} is neither a Hugging Face folder (no config.json) nor a run with a checkpoint (no latest)")


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
