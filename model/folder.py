"""Resolves a model path to a folder, and verifies it.

A model is a Hugging Face folder, a hub id (`owner/name` or `owner/name@revision`, hub.py), or a checkpoint of one of
our runs: `runs/hlp` is its newest, `runs/hlp@180` that of step 180, and `runs/hlp@best` the one with the best
validation accuracy. Each checkpoint has a manifest of sizes and checksums, which is written last. One that holds
adapters (lora.py) is merged with the model that they belong to into merged/ next to it, the first time that somebody
needs it: everybody else reads plain models.

    find_model(path)           the folder that `path` refers to; reads only names
    resolve_model(path)        the same, checked against its manifest: used by every command before it reads weights
    model_checksums(folder)    what is in it, for provenance
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterable
from pathlib import Path

from dccot.core.files import BadData, checksum
from dccot.core.run import Checkpoint, Run
from dccot.core.runtime import Runtime, on_rank_zero
from dccot.model.hub import hub_folder, is_hub_id, verify_hub_folder

ADAPTER_CONFIG = "adapter_config.json"  # a folder with it holds adapters (lora.py)
log = logging.getLogger(__name__)
# folders that this process has checked, with their state: stages of a recipe read the same model again
_VERIFIED: dict[Path, tuple] = {}


def resolve_model(path: str | Path) -> Path:
    """The folder that `path` refers to, verified; in a process group rank 0 checks, and all ranks get its result."""
    return on_rank_zero(lambda: _resolve(path))


def _resolve(path: str | Path) -> Path:
    folder = hub_folder(path) if is_hub_id(path) else find_model(path)
    _verify_weights(folder)
    if not (folder / ADAPTER_CONFIG).is_file():
        return folder
    from dccot.model.merged import merged  # which needs torch

    return merged(folder, _resolve)


def _verify_weights(folder: Path) -> None:
    """Reject a checkpoint's hf/ folder that has changed since it was written; other folders have no manifest."""
    checkpoint = Checkpoint.of_weights(folder) or Checkpoint.of_weights(folder.resolve())  # a link to one, or `.`
    if checkpoint is None:
        verify_hub_folder(folder)
        return
    if not checkpoint.manifest.is_file():
        log.warning("%s has no manifest.json: its weights cannot be verified", checkpoint.folder)
        return
    if unchanged(folder):
        return
    if damage := checkpoint.damage("hf/"):
        others = ", ".join(str(each) for each in checkpoint.run.steps() if each != checkpoint.step)
        again = "restore it from a copy or train it again"
        remedy = f"use another checkpoint of this run ({others})" if others else again
        raise BadData(f"{checkpoint.folder} is damaged ({damage}); {remedy}")
    remember(folder)


def remember(folder: Path) -> None:
    """As it is now, it is what it should be."""
    _VERIFIED[folder.resolve()] = state_of(folder)


def state_of(folder: Path) -> tuple:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return tuple((str(path), path.stat().st_size, path.stat().st_mtime_ns, path.stat().st_ino) for path in files)


def unchanged(folder: Path) -> bool:
    """Since this process has verified it."""
    return _VERIFIED.get(folder.resolve()) == state_of(folder)


def find_model(path: str | Path) -> Path:
    """The Hugging Face folder that `path` refers to: itself, of a hub id, or a checkpoint of a run."""
    if is_hub_id(path):
        return hub_folder(path, weights=False)
    path = Path(path)
    if (path / "config.json").is_file():
        return path
    run, chosen = Run.parse(path)
    if not run.latest.is_file():
        kinds = "a Hugging Face folder (no config.json), a run with a checkpoint (no latest), nor a hub id (owner/name)"
        raise FileNotFoundError(f"{str(run)!r} is neither {kinds}{_runs_inside(path)}")
    if chosen is None:
        return run.newest().hf
    return run.checkpoint(run.best().step if chosen == "best" else chosen).hf


def _runs_inside(folder: Path) -> str:
    found = sorted(map(str, (latest.parent for latest in folder.glob("*/latest"))))
    return f"; runs in it: {', '.join(found)}" if found else ""


def model_checksums(folder: Path, runtime: Runtime | None = None) -> dict[str, str]:
    """File → sha256 of a model's folder: its manifest's, which resolve_model has compared, or else computed.

    With a `runtime` the ranks of a machine share that work.
    """
    checkpoint = Checkpoint.of_weights(folder)
    if checkpoint is not None and checkpoint.manifest.is_file():
        return checkpoint.checksums()
    if runtime is None or runtime.ranks == 1:
        return checksums_in(folder)
    files = _files(folder)
    machines = [machine for [machine] in runtime.gather([socket.gethostname()])]
    here = [rank for rank, machine in enumerate(machines) if machine == machines[runtime.rank]]
    parts = runtime.gather([(path.name, checksum(path)) for path in files[here.index(runtime.rank) :: len(here)]])
    return dict(sorted(entry for rank in here for entry in parts[rank]))


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_file() and not path.name.startswith("."))


def checksums_in(folder: Path) -> dict[str, str]:
    return {path.name: checksum(path) for path in _files(folder)}


def explain_best(path: str | Path) -> str | None:
    """Which step `RUN@best` is and why, as a message; None for any other path."""
    run, chosen = Run.parse(path)
    if chosen != "best":
        return None
    best = run.best()
    accuracy, length = f"{100 * best.accuracy:.2f}%", f"{best.longest_path:,.0f} tokens"
    return f"{path} is step {best.step}: validation accuracy {accuracy}, longest path {length}"


def require_inside(folder: Path, files: Iterable[Path]) -> None:
    """Reject links out of a model folder before files are copied from it: they could copy anything."""
    home = folder.resolve()
    # a hub's cache links to its own blobs/
    homes = [home, home.parents[1] / "blobs"] if home.parent.name == "snapshots" else [home]
    for path in files:
        if not any(path.resolve().is_relative_to(each) for each in homes):
            outside = f"{path.resolve()}, outside its model's folder"
            raise BadData(f"{path} is a link to {outside}; replace it by a copy if you trust it")
