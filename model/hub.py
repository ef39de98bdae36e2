"""A model or a data set by its hub id: downloaded once, pinned by a revision, verified before use.

    hub_folder("amahanka/DC-CoT")              the newest revision at its first use; later, the one in the cache
    hub_folder("amahanka/DC-CoT@3f1c9e2…")     this commit, branch or tag
    hub_folder(…, weights=False)               only the small files: enough to check a recipe in seconds
    hub_files("amahanka/…", data=True)         name → file of a data set; no scripts
    require_hub_data("amahanka/…")             whether there is such a data set; downloads nothing
    verify_hub_folder(folder)

Files are in huggingface_hub's cache (HF_HOME), which the ranks of all machines must share. There a file's name is its
checksum (sha256 of large files, git's hash of small ones), so it is verified without asking the hub again.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any

from dccot.core.config import ConfigError, require
from dccot.core.files import BadData, checksum

SMALL = ["*.json", "*.txt", "*.jinja", "*.model", "LICENSE*"]  # of a model; no pickles, no code
DATA = ["*.jsonl", "*.json", "*.parquet"]


def is_hub_id(name: str | Path) -> bool:
    """`owner/name` or `owner/name@revision`, unless there is such a path or it is the name of a data file."""
    text = str(name)
    return re.fullmatch(r"[\w.-]+/[\w.-]+(@[\w./-]+)?", text) is not None and not _exists(text)


def _exists(text: str) -> bool:
    path = text.partition("@")[0]
    named = path.startswith((".", "runs/", "configs/")) or any(fnmatch(path, pattern) for pattern in DATA)
    return named or Path(path).exists()


def hub_folder(name: str | Path, *, weights: bool = True, data: bool = False, download: bool = True) -> Path:
    """The folder with all files of a hub id; downloads what the cache lacks, with a progress bar.

    Without `download` it is a FileNotFoundError if the cache lacks any of them.
    """
    from huggingface_hub.errors import LocalEntryNotFoundError

    wanted = _snapshot(name, _patterns(weights, data), data)
    try:
        return Path(wanted(local_files_only=True))
    except LocalEntryNotFoundError:
        if not download:
            raise FileNotFoundError(f"{name} is not in the cache") from None
    except Exception as error:
        raise _refused(name, data, error) from None
    try:
        return Path(wanted())
    except Exception as error:
        raise _refused(name, data, error) from None


def hub_files(name: str | Path, *, data: bool = False, download: bool = True) -> dict[str, Path]:
    """Name → file, of those that we use: the cache may hold others that another program downloaded."""
    folder = hub_folder(name, data=data, download=download)
    names = {str(path.relative_to(folder)): path for path in sorted(folder.rglob("*")) if path.is_file()}
    wanted = _patterns(True, data)
    return {name: path for name, path in names.items() if any(fnmatch(name, pattern) for pattern in wanted)}


def require_hub_data(name: str | Path) -> None:
    """Reject a data set that is neither in the cache nor on the hub, or that holds no file that we read."""
    from huggingface_hub import HfApi

    repo, _, revision = str(name).partition("@")
    try:
        hub_folder(name, data=True, download=False)
        return
    except FileNotFoundError:
        pass
    try:
        siblings = HfApi().dataset_info(repo, revision=revision or None).siblings or []
    except Exception as error:
        raise _refused(name, True, error) from None
    found = any(fnmatch(file.rfilename, pattern) for file in siblings for pattern in DATA)
    require(found, f"the data set {name} holds no {', '.join(DATA)}: name one that does, or a file")


def hub_name(folder: Path) -> str | None:
    """Name and commit of a folder in the cache; None for any other folder."""
    if folder.parent.name != "snapshots":
        return None
    return f"{folder.parents[1].name.split('--')[-1]}-{folder.name[:7]}"


def _patterns(weights: bool, data: bool) -> list[str]:
    return DATA if data else [*SMALL, "*.safetensors"] if weights else SMALL


def _snapshot(name: str | Path, patterns: list[str], data: bool) -> Callable[..., Any]:
    from huggingface_hub import snapshot_download

    repo, _, revision = str(name).partition("@")
    kind = "dataset" if data else "model"
    return partial(snapshot_download, repo, repo_type=kind, revision=revision or None, allow_patterns=patterns)


def _refused(name: str | Path, data: bool, error: Exception) -> ConfigError:
    """What to do about it; what the hub library's HTTP client raises is not a part of its interface."""
    from huggingface_hub.errors import RepositoryNotFoundError

    repo, _, revision = str(name).partition("@")
    what, here = ("data set", "file") if data else ("model", "folder")
    if isinstance(error, RepositoryNotFoundError) or isinstance(error.__cause__, RepositoryNotFoundError):
        return ConfigError(f"{repo!r} is neither a {here} here nor a {what} on the hub; a private one needs HF_TOKEN")
    reason = " ".join(str(error.__cause__ or error).split())[:200]
    get = f"hf download {repo}{f' --revision {revision}' if revision else ''}{' --repo-type dataset' if data else ''}"
    return ConfigError(
        f"{name} is not in the cache and cannot be downloaded ({reason}); on a machine with a network run `{get}`, "
        f"copy its HF_HOME here and set HF_HOME to it, or name a {here}"
    )


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
