"""Loads and saves weights, safetensors only, in the format of transformers and vLLM.

    load_weights(model, folder)                  each rank reads its own rows of each tensor, straight into its shard
    full_parameters(model, dtype)                every full parameter, one at a time, with its adapters merged: for
                                                 the engine and for saving
    save_checkpoint(model, folder, source=...)   config, weights, tokenizer, generation config; loads anywhere unchanged
    write_folder(model, parameters, folder)      the same from tensors of any origin
    create_checkpoint(config, folder, ...)       a new model with random weights

A checkpoint is written under a temporary name and renamed when complete: its final name always refers to a whole one.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from dccot.core.files import BadData, flush_to_disk
from dccot.model.config import parse_config
from dccot.model.folder import require_inside
from dccot.model.lora import LoraLinear, own_parameters, whole
from dccot.model.transformer import Transformer

SINGLE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
LFS_POINTER = b"version https://git-lfs"
STORED = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
MAX_SHARD_BYTES = 5 * 10**9
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
# the files that a checkpoint takes over from the model it was trained from
COMPANIONS = ["tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt"]
COMPANIONS += ["chat_template*", "generation_config.json"]


def load_weights(model: Transformer, folder: str | Path, dtype: torch.dtype | None = None) -> None:
    """Fills `model`, sharded or not, from `folder`; values are cast to `dtype`, or to the parameters' own dtype.

    Missing, unexpected and mis-shaped tensors are one BadData that lists them all, before anything is overwritten.
    """
    if dtype is not None:
        model.to(dtype)
    reshard(model)
    parameters = dict(own_parameters(model))
    with open_tensors(folder) as tensors:
        _compare(parameters, tensors, tied=model.config.tied_embeddings, where=folder)
        with torch.no_grad():
            for name, parameter in parameters.items():
                local, rows = _local_rows(parameter)
                if local.numel():
                    stored = tensors[name][rows]
                    if not bool(stored.isfinite().all()):
                        raise BadData(f"{folder}: {name} holds values that are not finite; use another checkpoint")
                    local.copy_(stored)


@contextlib.contextmanager
def open_tensors(folder: str | Path) -> Iterator[dict]:
    """Name → safetensors slice (shape and dtype known, data read when indexed) of a checkpoint in one or more files."""
    folder = Path(folder)
    files = _listed(folder / INDEX_FILE) if (folder / INDEX_FILE).is_file() else [SINGLE_FILE]
    if outside := [name for name in files if name != Path(name).name]:
        raise BadData(f"{folder / INDEX_FILE} names {outside[0]!r}; weights are files of the checkpoint's own folder")
    if absent := [name for name in files if not (folder / name).is_file()]:
        raise FileNotFoundError(f"{folder} holds no {', '.join(absent)}: weights are read from safetensors only")
    with contextlib.ExitStack() as stack:
        opened = [stack.enter_context(_opened(folder / name)) for name in files]
        yield {name: file.get_slice(name) for file in opened for name in file.offset_keys()}


def _listed(index: Path) -> list[str]:
    """The files that hold a checkpoint's tensors."""
    try:
        return sorted({str(name) for name in json.loads(index.read_text())["weight_map"].values()})
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        found = f"{type(error).__name__}: {error}"
        raise BadData(f"{index} does not say which file holds which tensor ({found}); fetch it again") from None


def _opened(file: Path) -> safe_open:
    with open(file, "rb") as stream:
        if stream.read(len(LFS_POINTER)) == LFS_POINTER:
            raise BadData(f"{file} is a git-LFS pointer, not the weights: run `git lfs pull` in the folder")
    try:
        return safe_open(file, framework="pt", device="cpu")
    except SafetensorError as error:
        raise BadData(f"{file} is damaged or cut short ({error}); fetch it again") from None


def stored_parameters(folder: str | Path) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of a checkpoint on disk, read one at a time."""
    with open_tensors(folder) as tensors:
        for name, stored in tensors.items():
            yield name, stored[:]


def _compare(parameters: Mapping[str, Tensor], tensors: Mapping, *, tied: bool, where: str | Path) -> None:
    def redundant(name: str) -> bool:  # some checkpoints hold tensors that follow from the others
        embedding = "model.embed_tokens.weight"
        copied = tied and name == "lm_head.weight" and embedding in tensors
        return name.endswith("rotary_emb.inv_freq") or (copied and torch.equal(tensors[name][:], tensors[embedding][:]))

    problems = [f"missing: {name}" for name in sorted(parameters.keys() - tensors.keys())]
    unexpected = sorted(tensors.keys() - parameters.keys())
    problems += [f"unexpected: {name}" for name in unexpected if not redundant(name)]
    for name in sorted(parameters.keys() & tensors.keys()):
        has, needs = tuple(tensors[name].get_shape()), tuple(parameters[name].shape)
        dtype = tensors[name].get_dtype()
        if has != needs:
            problems.append(f"{name} has shape {has}, the model needs {needs}")
        elif dtype not in STORED:
            problems.append(f"{name} is {dtype}, the model needs one of {', '.join(STORED)}")
    if problems:
        raise BadData(f"the weights in {where} do not fit the model of its config.json:\n  " + "\n  ".join(problems))


def _local_rows(parameter: Tensor) -> tuple[Tensor, slice]:
    """This rank's part of a parameter and the rows of the full tensor it covers: FSDP shards the first dimension."""
    if not isinstance(parameter, DTensor):
        return parameter, slice(0, parameter.shape[0])
    shape, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return parameter.to_local(), slice(offset[0], offset[0] + shape[0])


def reshard(model: nn.Module) -> None:
    """FSDP may leave gathered compute-precision copies in place of parameters; this puts the shards back."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


@torch.no_grad()
def full_parameters(model: Transformer, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
    """(name, whole tensor) of each parameter, gathered one at a time, and merged with its adapters if it has any.
    Collective: every rank iterates to the end.

    Shards are cast to `dtype` before they are gathered: half the bytes, if it is half as wide as the master weights.
    """
    reshard(model)
    for name, parameter in own_parameters(model):
        layer, _, kind = name.rpartition(".")
        module = model.get_submodule(layer)
        if isinstance(module, LoraLinear) and kind == "weight":
            yield name, module.merge(whole(parameter)).to(dtype or parameter.dtype)
        else:
            yield name, whole(parameter.detach().to(dtype or parameter.dtype))


def save_checkpoint(model: Transformer, folder: str | Path, **options: Any) -> None:
    """Writes `model` to `folder`, with the options of `write_folder`. Collective; rank 0 writes."""
    gathered = full_parameters(model)
    if not dist.is_initialized() or dist.get_rank() == 0:
        write_folder(model, gathered, folder, **options)
    for _ in gathered:  # the other ranks help to gather
        pass


def write_folder(
    model: Transformer,
    parameters: Iterator[tuple[str, Tensor]],
    folder: str | Path,
    *,
    source: str | Path | Mapping[str, bytes] | None = None,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """One process writes `parameters` (name, whole tensor) as a checkpoint; `model` gives names, shapes, dtype, config.

    Tokenizer and generation config come from `source`. No more than `max_shard_bytes` of weights are held in memory at
    a time, and files are no larger.
    """
    with written_whole(folder) as partial:
        _write(model, parameters, partial, dtype, max_shard_bytes)
        for name, content in (source if isinstance(source, Mapping) else read_companions(source)).items():
            (partial / name).write_bytes(content)


def create_checkpoint(
    config: Mapping,
    folder: str | Path,
    *,
    tokenizer,
    seed: int,
    prepare: Callable[[Transformer], None] = lambda model: None,
) -> None:
    """A new checkpoint with random fp32 weights from the contents of a config.json and a tokenizer of transformers'.

    `prepare` may change the random weights before they are written.
    """
    model = Transformer(parse_config(config))
    model.init_weights(seed)
    prepare(model)
    with written_whole(folder) as partial:
        _write(model, full_parameters(model), partial, None, MAX_SHARD_BYTES)
        _write_tokenizer(tokenizer, partial)
        token_ids = {key: config[key] for key in TOKEN_IDS if config.get(key) is not None}
        _write_json(partial / "generation_config.json", token_ids)


@contextlib.contextmanager
def written_whole(folder: str | Path) -> Iterator[Path]:
    """A temporary folder that replaces `folder` when the block ends; after an exception or a kill the old one remains.

    A folder cannot be replaced in one step: the old one is called `.<name>.old` until the new one is in place.
    """
    folder = Path(folder)
    partial, old = folder.with_name(f".{folder.name}.partial"), folder.with_name(f".{folder.name}.old")
    shutil.rmtree(partial, ignore_errors=True)  # left by a writer that was killed
    partial.mkdir(parents=True)
    try:
        yield partial
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    for path in (*partial.iterdir(), partial):
        flush_to_disk(path)
    if folder.exists():
        shutil.rmtree(old, ignore_errors=True)
        folder.rename(old)
    partial.rename(folder)
    flush_to_disk(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def _write(
    model: Transformer, parameters: Iterator[tuple[str, Tensor]], folder: Path, dtype: torch.dtype | None, limit: int
) -> None:
    files = weight_files(model, dtype, limit)
    last_of = {names[-1]: file for file, names in files.items()}
    held: dict[str, Tensor] = {}
    for name, tensor in parameters:
        held[name] = tensor.to(device="cpu", dtype=dtype).contiguous()
        if name in last_of:
            write_weights(held, folder / last_of[name])
            held = {}
    write_config(model, folder, files, dtype)


def weight_files(
    model: Transformer, dtype: torch.dtype | None = None, max_bytes: int = MAX_SHARD_BYTES
) -> dict[str, list[str]]:
    """File → names of its tensors: consecutive ones share a file as long as it stays below the limit."""
    files, room = list[list[str]](), 0
    for name, size in _sizes(model, dtype).items():
        if not files or size > room:
            files, room = [*files, []], max_bytes
        files[-1].append(name)
        room -= size
    if len(files) == 1:
        return {SINGLE_FILE: files[0]}
    return {f"model-{n:05d}-of-{len(files):05d}.safetensors": names for n, names in enumerate(files, start=1)}


def _sizes(model: Transformer, dtype: torch.dtype | None) -> dict[str, int]:
    return {name: p.numel() * (dtype or p.dtype).itemsize for name, p in own_parameters(model)}


def write_weights(tensors: dict[str, Tensor], path: Path) -> None:
    save_file(tensors, path, metadata={"format": "pt"})


def write_config(
    model: Transformer, folder: Path, files: Mapping[str, Sequence[str]], dtype: torch.dtype | None = None
) -> None:
    """config.json and, if there are several files of weights, their index."""
    if len(files) > 1:
        weight_map = {name: file for file, names in files.items() for name in names}
        total = sum(_sizes(model, dtype).values())
        _write_json(folder / INDEX_FILE, {"metadata": {"total_size": total}, "weight_map": weight_map})
    saved = dtype or next(model.parameters()).dtype
    raw = {key: value for key, value in model.config.raw.items() if key != "torch_dtype"}  # the older name of `dtype`
    _write_json(folder / "config.json", raw | {"dtype": str(saved).removeprefix("torch.")})


def _write_tokenizer(tokenizer, folder: Path) -> None:
    from transformers import AutoTokenizer  # takes a second to import

    tokenizer.save_pretrained(folder)
    reopened = AutoTokenizer.from_pretrained(folder)
    if reopened.backend_tokenizer.to_str() != tokenizer.backend_tokenizer.to_str():
        raise ValueError(
            f"transformers opens the tokenizer of this model_type as a {type(reopened).__name__}, which splits text "
            "differently from the one given: give a tokenizer of that class, or use model_type qwen3 or llama"
        )


def read_companions(source: str | Path | None) -> dict[str, bytes]:
    """Tokenizer and generation config of a model folder, by name."""
    if source is None:
        return {}
    files = [path for pattern in COMPANIONS for path in Path(source).glob(pattern) if path.is_file()]
    require_inside(Path(source), files)
    return {path.name: path.read_bytes() for path in files}


def _write_json(path: Path, content: Mapping) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n")
