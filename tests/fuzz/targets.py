"""What is read from outside: each function reads `data` as one kind of file, and may raise nothing but its refusal."""

from __future__ import annotations

import contextlib
import functools
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

from dccot.core.config import ConfigError, load_config
from dccot.core.files import BadData
from dccot.data.problems import load_problems
from dccot.data.prompts import PromptConfig, UnusablePrompt, rendered
from dccot.eval.view import Page, collect
from dccot.model.gguf import _read_metadata
from dccot.model.tokenizer import _ids_of_file, _no_panic
from dccot.model.weights import open_tensors
from dccot.stages import load_recipe
from dccot.train.batch import Batch
from dccot.train.config import RLConfig

REFUSALS = (ConfigError, BadData, UnusablePrompt, FileNotFoundError)


@functools.cache
def place() -> Path:
    """A folder in memory for the files of this process."""
    shared = Path("/dev/shm")
    return Path(tempfile.mkdtemp(prefix="dccot-fuzz-", dir=shared if os.access(shared, os.W_OK) else None))


def written(name: str, data: bytes) -> Path:
    (place() / name).write_bytes(data)
    return place() / name


def gguf(data: bytes) -> None:
    _read_metadata(written("model.gguf", data))


def safetensors(data: bytes) -> None:
    written("model.safetensors", data)
    with open_tensors(place()) as tensors:
        for slice_ in list(tensors.values())[:8]:
            slice_.get_shape(), slice_.get_dtype()


def tokenizer(data: bytes) -> None:
    written("tokenizer.json", data)
    with _no_panic(place()):
        _ids_of_file(place())


def template(data: bytes) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    def apply(turns: list, **_: object) -> str:
        return render_jinja_template([turns], chat_template=data.decode(), add_generation_prompt=True)[0][0]

    with contextlib.suppress(UnicodeDecodeError):
        data.decode()
        rendered(Chat(apply_chat_template=apply), "What is 1 + 1?")


class Chat(SimpleNamespace):
    name_or_path = "x"
    __hash__ = object.__hash__


def rollouts(data: bytes) -> None:
    path = written("step_000001.jsonl", data)
    with contextlib.suppress(*REFUSALS):
        Batch.replay(str(path), 1)
    page = Page(None, None)
    collect(page, [path], report=lambda text: None)


def recipe(data: bytes) -> None:
    path = written("recipe.yaml", data)
    with contextlib.suppress(*REFUSALS):
        load_config(RLConfig, path)
    with contextlib.suppress(*REFUSALS):
        load_config(PromptConfig, path)
    load_recipe(path)


def problems(data: bytes) -> None:
    load_problems(written("problems.jsonl", data), report=lambda text: None)


TARGETS: dict[str, Callable[[bytes], None]] = {
    each.__name__: each for each in (gguf, safetensors, tokenizer, template, rollouts, recipe, problems)
}


def refuses(name: str, data: bytes) -> str | None:
    """Read the data; what was refused, in one line. Anything else that is raised is a finding."""
    try:
        TARGETS[name](data)
    except REFUSALS as error:
        return str(error)
    return None
