"""What a finished stage was made from, and whether the recipe would still make the same.

    done.json    {"seconds": 12.3, "made_from": {"configuration": …, "inputs": {key: {file: {"sha256", "seen"}}}, "code": …}}

Settings and the content of inputs count; the location of an input or of the recipe's folder does not, and deleted
inputs are not compared. A code change is reported, not rejected: otherwise nobody could work on one stage of a recipe,
and no checksum can tell whether a source change would affect a finished stage's result. An input is hashed again only
if its size or time has changed.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from dccot.core.config import to_plain, with_new_names
from dccot.core.files import checksum
from dccot.core.provenance import code_version, differences
from dccot.core.run import Checkpoint
from dccot.model.folder import find_model, model_checksums
from dccot.recipe import Need, StagePlan

Files = dict[str, dict[str, Any]]  # name → sha256, and size and time when it was computed


def made_from(plan: StagePlan, config: Any, before: dict[str, Any] | None = None) -> dict[str, Any]:
    """Everything that a stage's result depends on, as it is now; checksums are reused from `before`, a mark's, if files
    are unchanged.
    """
    needs, known = plan.needs(config), (before or {}).get("inputs", {})
    count, seen, inputs = Counter(need.key for need in needs), Counter[str](), {}
    for need in needs:
        key = need.key if count[need.key] == 1 else f"{need.key}[{seen[need.key]}]"
        seen[need.key] += 1
        inputs[key] = _files(need, known.get(key) or {})
    return {"configuration": _settings(plan, config, needs), "inputs": inputs, "code": code_version()}


def changes(plan: StagePlan, config: Any, mark: dict[str, Any]) -> list[tuple[str, str]]:
    """(key, what differs) of what a finished stage was made from; empty for a mark of a version that did not say."""
    before = mark.get("made_from")
    if before is None:
        return []
    now, defaults = made_from(plan, config, before), to_plain(plan.kind.config())
    saved = _completed(with_new_names(before["configuration"], defaults), now["configuration"], defaults)
    settings = differences(saved, now["configuration"])
    found = [(key, f"was {was!r} when the stage was finished and is {new!r} now") for key, was, new in settings]
    for key, files in now["inputs"].items():
        known = before["inputs"].get(key, {})
        if files is None or known is None:  # an input that is gone
            continue
        sums = [{name: file["sha256"] for name, file in each.items()} for each in (files, known)]
        for name in sorted(name for name in files.keys() | known.keys() if sums[0].get(name) != sums[1].get(name))[:1]:
            found.append((key, f"has changed since the stage was finished{f' ({name})' if name else ''}"))
    return found


def _completed(before: dict[str, Any], now: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """`before` with the defaults of settings added since, which describe the old behaviour, without those that went."""
    before = {name: value for name, value in before.items() if name in now or name in defaults or not defaults}
    groups = [name for name in before if isinstance(before[name], dict) and isinstance(now.get(name), dict)]
    inner = {name: _completed(before[name], now[name], defaults.get(name) or {}) for name in groups}
    added = {name: defaults[name] for name in now if name in defaults and name not in before}
    named = {"task": now["task"]} if "task" in added else {}  # before tasks had names, a stage did what its task does
    return added | named | before | inner


def _settings(plan: StagePlan, config: Any, needs: list[Need]) -> dict[str, Any]:
    """The resolved configuration without the paths of inputs, which are compared by content."""
    plain = json.loads(json.dumps(to_plain(config)).replace(str(plan.recipe.folder), "{run}"))
    for need in needs:
        *groups, last = need.key.split(".")
        inner = plain
        for group in groups:
            inner = inner[group]
        if isinstance(inner.get(last), str):
            del inner[last]
    return plain


def _files(need: Need, known: Files) -> Files | None:
    """None if the input does not exist (any more)."""
    try:
        if need.what != "model":
            return {"": _seen(Path(need.path), known.get(""))}
        folder = find_model(need.path)
        if Checkpoint.of_weights(folder):  # they are in its manifest
            return {name: {"sha256": found} for name, found in model_checksums(folder).items()}
        files = sorted(path for path in folder.iterdir() if path.is_file() and not path.name.startswith("."))
        return {path.name: _seen(path, known.get(path.name)) for path in files}
    except (FileNotFoundError, NotADirectoryError):
        return None


def _seen(path: Path, known: dict[str, Any] | None) -> dict[str, Any]:
    seen = [path.stat().st_size, path.stat().st_mtime_ns]
    return known if known and known.get("seen") == seen else {"sha256": checksum(path), "seen": seen}
