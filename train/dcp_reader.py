"""Reads dcp/ without executing anything in it.

torch's `.metadata` is a pickle, and so are the optimizer's numbers inside the shards; a pickle can have any function
called. Here the metadata may name only the classes that torch itself writes into it, and the numbers are read with
`weights_only`. A checkpoint from elsewhere can hold wrong values, but it cannot run code.
"""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader, Metadata
from torch.distributed.checkpoint.planner import ReadItem

from dccot.core.files import BadData

_METADATA = "Metadata MetadataIndex StorageMeta TensorProperties _MEM_FORMAT_ENCODING BytesStorageMetadata"
ALLOWED = {
    *(("torch.distributed.checkpoint.metadata", name) for name in _METADATA.split()),
    *(("torch.distributed.checkpoint.metadata", f"{kind}StorageMetadata") for kind in ("Chunk", "Tensor")),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    ("pathlib", "PosixPath"),
}


def load_shards(state: dict[str, Any], folder: Path, *, no_dist: bool = False) -> None:
    """Fill `state` from a dcp/ folder, in place; the same as dcp.load, but nothing in the folder is executed."""
    reader = _Reader(folder)
    reader.read_metadata()  # refused here, in one line; inside dcp.load it would be a trace of every rank
    dcp.load(state, storage_reader=reader, planner=_Planner(), no_dist=no_dist)


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        module = module.removesuffix("._local")  # where Python 3.13 has its paths
        a_dtype = module == "torch" and isinstance(vars(torch).get(name), torch.dtype)
        if not a_dtype and (module, name) not in ALLOWED:
            foreign = "which no checkpoint of ours holds: do not use this folder"
            raise pickle.UnpicklingError(f"it names {module}.{name}, {foreign}")
        return super().find_class(module, name)


class _Reader(FileSystemReader):
    _metadata: Metadata | None = None

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        if self._metadata is None:
            self._metadata = self._read()
        return self._metadata

    def _read(self) -> Metadata:
        file = Path(self.path) / ".metadata"
        try:
            metadata = _Unpickler(io.BytesIO(file.read_bytes())).load()
            if not isinstance(metadata, Metadata):
                raise pickle.UnpicklingError(f"it holds a {type(metadata).__name__}")
            for place in (str(info.relative_path) for info in metadata.storage_data.values()):
                if Path(place).name != place:
                    raise pickle.UnpicklingError(f"it leads to {place!r}, outside its folder")
        except OSError:
            raise
        except Exception as error:  # a broken pickle raises nearly anything
            raise BadData(f"{file} is refused: {error}") from None
        if metadata.storage_meta is None:
            metadata.storage_meta = dcp.metadata.StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _Planner(DefaultLoadPlanner):
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        plain = io.BytesIO()
        torch.save(torch.load(value, weights_only=True), plain)  # what passes holds numbers and names only
        plain.seek(0)
        super().load_bytes(read_item, plain)
