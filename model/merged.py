"""A plain model of adapters and the model that they belong to, written once, next to the adapters."""

from __future__ import annotations

import fcntl
import json
import logging
from collections.abc import Callable
from pathlib import Path

from dccot.core.files import BadData, write_atomic
from dccot.core.run import Checkpoint
from dccot.model.config import read_config
from dccot.model.folder import checksums_in, model_checksums, remember, unchanged
from dccot.model.lora import merged_parameters, read_base
from dccot.model.settings import LoraConfig
from dccot.model.sharding import meta_model
from dccot.model.weights import STORED, open_tensors, write_folder

log = logging.getLogger(__name__)


def merged(folder: Path, resolve: Callable[[Path], Path]) -> Path:
    """A plain model of the adapters in `folder` and their base."""
    name = "merged" if Checkpoint.of_weights(folder) else f"{folder.resolve().name}-merged"
    place = (folder if folder.name else folder.absolute()).with_name(name)
    made_from = model_checksums(folder)
    mark = place.with_name(f"{name}.json")
    with open(place.with_name(f".{name}.lock"), "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another process may be merging
        if mark.is_file() and place.is_dir():
            made = json.loads(mark.read_text())
            if made["from"] == made_from and (unchanged(place) or made["files"] == checksums_in(place)):
                remember(place)
                return place
        base, lora = _base_of(folder, resolve)
        log.info("merging the adapters in %s with %s", folder, base)
        with open_tensors(base) as tensors:
            dtype = STORED[next(iter(tensors.values())).get_dtype()]
            shape = meta_model(read_config(base), dtype, dtype)
            stored = ((name, tensors[name][:]) for name, _ in shape.named_parameters())
            write_folder(shape, merged_parameters(stored, folder, lora), place, source=folder)
        write_atomic(mark, json.dumps({"from": made_from, "files": checksums_in(place)}, indent=1))
    return place


def _base_of(folder: Path, resolve: Callable[[Path], Path]) -> tuple[Path, LoraConfig]:
    """The model that adapters belong to, verified: where it was, or next to their run if both were moved."""
    wanted = read_base(folder)
    recorded = Path(wanted.path)
    places = [recorded, *(above / Path(*recorded.parts[-4:]) for above in folder.absolute().parents[3:4])]
    places = [place.with_name("hf") if place.name == "merged" else place for place in places]
    place = next((place for place in places if (place / "config.json").is_file()), None)
    if place is None:
        raise FileNotFoundError(f"{folder} holds adapters of {recorded}, which is gone: put that model back there")
    base = resolve(place)
    if model_checksums(base) != wanted.files:
        raise BadData(f"{folder} holds adapters of {base}, which has changed since: restore that model")
    return base, wanted.lora
