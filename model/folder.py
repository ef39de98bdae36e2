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

import fcntl
import json
import logging
import socket
from pathlib import Path

from dccot.core.files import BadData, checksum, write_atomic
from dccot.core.run import Checkpoint, Run
from dccot.core.runtime import Runtime, on_rank_zero
from dccot.model.config import read_config
from dccot.model.hub import hub_folder, is_hub_id, verify_hub_folder
from dccot.model.lora import ADAPTER_CONFIG, LoraConfig, merged_parameters, read_base
from dccot.model.sharding import meta_model
from dccot.model.weights import STORED, open_tensors, write_folder

log = logging.getLogger(__name__)
# folders that this process has checked, with their state: stages of a recipe read the same model again
_VERIFIED: dict[Path, tuple] = {}


def resolve_model(path: str | Path) -> Path:
    """The folder that `path` refers to, verified; in a process group rank 0 checks, and all ranks get its result."""
    return on_rank_zero(lambda: _resolve(path))


def _resolve(path: str | Path) -> Path:
    folder = hub_folder(path) if is_hub_id(path) else find_model(path)
    _verify_weights(folder)
    return _merged(folder) if (folder / ADAPTER_CONFIG).is_file() else folder


def _merged(folder: Path) -> Path:
    """A plain model of the adapters in `folder` and their base."""
    name = "merged" if Checkpoint.of_weights(folder) else f"{folder.resolve().name}-merged"
    place = (folder if folder.name else folder.absolute()).with_name(name)
    made_from = model_checksums(folder)
    mark = place.with_name(f"{name}.json")
    with open(place.with_name(f".{name}.lock"), "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another process may be merging
        if mark.is_file() and place.is_dir():
            made = json.loads(mark.read_text())
            if made["from"] == made_from and (_unchanged(place) or made["files"] == _checksums(place)):
                _VERIFIED[place.resolve()] = _state(place)
                return place
        base, lora = _base_of(folder)
        log.info("merging the adapters in %s with %s", folder, base)
        with open_tensors(base) as tensors:
            dtype = STORED[next(iter(tensors.values())).get_dtype()]
            shape = meta_model(read_config(base), dtype, dtype)
            stored = ((name, tensors[name][:]) for name, _ in shape.named_parameters())
            write_folder(shape, merged_parameters(stored, folder, lora), place, source=folder)
        write_atomic(mark, json.dumps({"from": made_from, "files": _checksums(place)}, indent=1))
    return place


def _base_of(folder: Path) -> tuple[Path, LoraConfig]:
    """The model that adapters belong to, verified: where it was, or next to their run if both were moved."""
    wanted = read_base(folder)
    recorded = Path(wanted.path)
    places = [recorded, *(above / Path(*recorded.parts[-4:]) for above in folder.absolute().parents[3:4])]
    places = [place.with_name("hf") if place.name == "merged" else place for place in places]
    place = next((place for place in places if (place / "config.json").is_file()), None)
    if place is None:
        raise FileNotFoundError(f"{folder} holds adapters of {recorded}, which is gone: put that model back there")
    base = _resolve(place)
    if model_checksums(base) != wanted.files:
        raise BadData(f"{folder} holds adapters of {base}, which has changed since: restore that model")
    return base, wanted.lora


def _verify_weights(folder: Path) -> None:
    """Reject a checkpoint's hf/ folder that has changed since it was written; other folders have no manifest."""
    checkpoint = Checkpoint.of_weights(folder) or Checkpoint.of_weights(folder.resolve())  # a link to one, or `.`
    if checkpoint is None:
        verify_hub_folder(folder)
        return
    if not checkpoint.manifest.is_file():
        log.warning("%s has no manifest.json: its weights cannot be verified", checkpoint.folder)
        return
    if _unchanged(folder):
        return
    if damage := checkpoint.damage("hf/"):
        others = ", ".join(str(each) for each in checkpoint.run.steps() if each != checkpoint.step)
        again = "restore it from a copy or train it again"
        remedy = f"use another checkpoint of this run ({others})" if others else again
        raise BadData(f"{checkpoint.folder} is damaged ({damage}); {remedy}")
    _VERIFIED[folder.resolve()] = _state(folder)


def _state(folder: Path) -> tuple:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return tuple((str(path), path.stat().st_size, path.stat().st_mtime_ns, path.stat().st_ino) for path in files)


def _unchanged(folder: Path) -> bool:
    """Since this process has verified it."""
    return _VERIFIED.get(folder.resolve()) == _state(folder)


def find_model(path: str | Path) -> Path:
    """The Hugging Face folder that `path` refers to: itself, of a hub id, or a checkpoint of a run."""
    if is_hub_id(path):
        return hub_folder(path, weights=False)
    path = Path(path)
    if (path / "config.json").is_file():
        return path
    run, chosen = Run.parse(path)
    if not run.latest.is_file():
        raise FileNotFoundError(
            f"{str(run)!r} is neither a Hugging Face folder (no config.json), a run with a checkpoint (no latest), "
            "nor a hub id (owner/name)"
        )
    if chosen is None:
        return run.newest().hf
    return run.checkpoint(run.best().step if chosen == "best" else chosen).hf


def model_checksums(folder: Path, runtime: Runtime | None = None) -> dict[str, str]:
    """File → sha256 of a model's folder: its manifest's, which resolve_model has compared, or else computed.

    With a `runtime` the ranks of a machine share that work.
    """
    checkpoint = Checkpoint.of_weights(folder)
    if checkpoint is not None and checkpoint.manifest.is_file():
        return checkpoint.checksums()
    if runtime is None or runtime.ranks == 1:
        return _checksums(folder)
    files = _files(folder)
    machines = [machine for [machine] in runtime.gather([socket.gethostname()])]
    here = [rank for rank, machine in enumerate(machines) if machine == machines[runtime.rank]]
    parts = runtime.gather([(path.name, checksum(path)) for path in files[here.index(runtime.rank) :: len(here)]])
    return dict(sorted(entry for rank in here for entry in parts[rank]))


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_file() and not path.name.startswith("."))


def _checksums(folder: Path) -> dict[str, str]:
    return {path.name: checksum(path) for path in _files(folder)}


def explain_best(path: str | Path) -> str | None:
    """Which step `RUN@best` is and why, as a message; None for any other path."""
    run, chosen = Run.parse(path)
    if chosen != "best":
        return None
    best = run.best()
    accuracy, length = f"{100 * best.accuracy:.2f}%", f"{best.longest_path:,.0f} tokens"
    return f"{path} is step {best.step}: validation accuracy {accuracy}, longest path {length}"
