"""A model or a data set by its hub id: downloaded once, pinned by a revision, verified before use.

    hub_folder("amahanka/DC-CoT")              the newest revision at its first use; later, the one in the cache
    hub_folder("amahanka/DC-CoT@3f1c9e2…")     this commit, branch or tag
    hub_folder(…, weights=False)               only the small files: enough to check a recipe in seconds
    verify_hub_folder(folder)

Files are in huggingface_hub's cache (HF_HOME), which the ranks of all machines must share. There a file's name is its
checksum (sha256 of large files, git's hash of small ones), so it is verified without asking the hub again.
"""

from __future__ import annotations

import hashlib
import re
from functools import partial
from pathlib import Path

from dccot.core.config import ConfigError
from dccot.core.files import BadData, checksum

SMALL = ["*.json", "*.txt", "*.jinja", "*.model", "LICENSE*"]  # of a model; no pickles, no code
DATA = ["*.jsonl", "*.json", "*.parquet"]


def is_hub_id(name: str | Path) -> bool:
    """`owner/name` or `owner/name@revision`, unless there is such a path."""
    text = str(name)
    return re.fullmatch(r"[\w.-]+/[\w.-]+(@[\w./-]+)?", text) is not None and not _exists(text)


def _exists(text: str) -> bool:
    path = text.partition("@")[0]
    return Path(path).exists() or path.startswith((".", "runs/", "configs/"))


def hub_folder(name: str | Path, *, weights: bool = True, data: bool = False) -> Path:
    """The folder with all files of a hub id; downloads what the cache lacks, with a progress bar."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError, RepositoryNotFoundError

    repo, _, revision = str(name).partition("@")
    wanted = partial(
        snapshot_download,
        repo,
        repo_type="dataset" if data else "model",
        revision=revision or None,
        allow_patterns=DATA if data else [*SMALL, "*.safetensors"] if weights else SMALL,
    )
    try:
        try:
            return Path(wanted(local_files_only=True))
        except LocalEntryNotFoundError:
            return Path(wanted())
    except RepositoryNotFoundError:
        what = "data set" if data else "model"
        raise ConfigError(
            f"{repo!r} is neither a folder here nor a {what} on the hub; a private one needs HF_TOKEN"
        ) from None
    except Exception as error:  # what its HTTP client raises is not a part of its interface
        reason = " ".join(str(error.__cause__ or error).split())[:200]
        get = (
            f"hf download {repo}{f' --revision {revision}' if revision else ''}{' --repo-type dataset' if data else ''}"
        )
        raise ConfigError(
            f"{name} is not in the cache and cannot be downloaded ({reason}); on a machine with a network run `{get}`, "
            "copy its HF_HOME here and set HF_HOME to it, or name a folder"
        ) from None


def verify_hub_folder(folder: Path) -> None:
    """Raise if a file in the hub's cache is not what was downloaded; other folders are not looked at."""
    if folder.parent.name != "snapshots":
        return
    for file in sorted(folder.rglob("*")):
        if file.is_file() and (problem := _damage(file)):
            raise BadData(f"{file} is damaged: {problem}; delete {file.resolve()} and run the same command again")


def _damage(file: Path) -> str | None:
    """Why a cached file is not what its name in the cache says; None if it is, or if the name is no checksum."""
    expected = file.resolve().name
    if re.fullmatch(r"[0-9a-f]{64}", expected):
        return None if checksum(file) == expected else "its sha256 does not match the hub's"
    if re.fullmatch(r"[0-9a-f]{40}", expected):
        content = file.read_bytes()
        found = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
        return None if found == expected else "its content does not match the hub's"
    return None
