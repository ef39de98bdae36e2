"""Checks what a recipe needs before any weights are read: `dccot pipeline RECIPE --check`, and the first step of every
start.

Every stage's configuration is resolved and checked; every file, benchmark, model and key that it will need exists or is
produced by an earlier stage; the run's output fits on disk, and training fits in memory. All problems are reported at
once, each with its stage and key.

A finished stage needs nothing, but its mark says what it was made from, and the recipe must still make the same:

    done.json    {"seconds": 12.3, "made_from": {"configuration", "inputs": {key: {file: {"sha256", "seen"}}}, "code"}}

Settings and the content of inputs count; the location of an input or of the recipe's folder does not, and deleted
inputs are not compared. A code change is reported, not rejected: otherwise nobody could work on one stage of a recipe,
and no checksum can tell whether a source change would affect a finished stage's result. An input is hashed again only
if its size or time has changed.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from dccot.core.config import ConfigError, one_of, require, to_plain, with_new_names
from dccot.core.files import BadData, checksum
from dccot.core.provenance import code_version, describe_code, differences
from dccot.core.run import Checkpoint
from dccot.core.runtime import gpu_bytes
from dccot.data.task import find_task
from dccot.memory import trained_parameters
from dccot.model.config import ModelConfig, read_config
from dccot.model.folder import find_model, model_checksums
from dccot.model.hub import hub_files, is_hub_id, require_hub_data
from dccot.plan import GB, GPUS, idle, remedy_for_idle, rollout_bytes, run_bytes, training_peak
from dccot.recipe import SHARED, Need, Recipe, StagePlan, unset
from dccot.stages import EvalStage
from dccot.train.config import RLConfig, SFTConfig, check_context, open_folder
from dccot.train.launch import check_demonstrations

WRITTEN = "checkpoints, rollouts and evaluations"
HINT = "restore it, change it for later stages only (STAGE.key=…), give the recipe another name, or:"


class Unmet(ConfigError):
    """Everything that prevents a recipe from running, one line each."""

    def __init__(self, message: str):
        ValueError.__init__(self, message)


@dataclass
class Checked:
    """The result: every fault, and the resources the unfinished stages need."""

    faults: list[tuple[str, str]] = field(default_factory=list)  # (stage.key, message)
    disk: float = 0.0  # bytes that training and evaluation will write
    free: float = 0.0  # bytes on the disk of the recipe's output
    memory: dict[str, float] = field(default_factory=dict)  # stage → bytes per rank at the peak of training
    stages: int = 0
    idle: dict[str, str] = field(default_factory=dict)  # stage → that it has ranks without work, and what to set
    outdated: list[str] = field(default_factory=list)  # finished stages that no longer match the recipe
    other_code: list[str] = field(default_factory=list)  # finished stages made by other code

    def fault(self, stage: str, key: str, message: str) -> None:
        self.faults.append((f"{stage}.{key}" if key else stage, message))

    def require(self) -> None:
        """Raise with every fault; stages that lack the same thing share a line."""
        places: dict[str, dict[str, None]] = {}
        for place, message in self.faults:
            places.setdefault(message, {})[place] = None
        lines = [f"  {message}   ({_few(list(found))})" for message, found in places.items()]
        if self.outdated:
            lines.append(" ".join([f"  {HINT}", *(f"--redo {name}" for name in self.outdated)]))
        if lines:
            things = "1 thing is" if len(places) == 1 else f"{len(places)} things are"
            count = f"the recipe cannot run, {things} missing or wrong (stage.key):"
            raise Unmet("\n".join([count, *lines]))

    def __str__(self) -> str:
        if not self.stages:
            return "\n".join(["every stage is finished", *self.remarks()])
        needed = f"{WRITTEN} will take {self.disk / GB:,.1f} GB of {self.free / GB:,.1f} GB free"
        lines = [f"{self.stages} {'stage' if self.stages == 1 else 'stages'} can run; {needed}"]
        if self.memory:
            stage, peak = max(self.memory.items(), key=lambda each: each[1])
            parts = "while training (estimated; `dccot plan` has the parts)"
            lines.append(f"most memory: {stage}, {peak / GB:,.1f} GB per rank {parts}")
        return "\n".join([*lines, *self.remarks()])

    def remarks(self) -> list[str]:
        """Warnings that do not prevent the recipe from running."""
        by = f"made by other code than this ({describe_code(code_version())}): "
        idle = [f"{stage}: {what}" for stage, what in self.idle.items()]
        return idle + ([by + ", ".join(self.other_code)] if self.other_code else [])


def _few(places: list[str]) -> str:
    return ", ".join(places) if len(places) <= 4 else f"{', '.join(places[:3])} and {len(places) - 3} more"


def check_recipe(recipe: Recipe, plans: Sequence[StagePlan], ranks: int, redo: Collection[str] = ()) -> Checked:
    """Check every stage; for one that is finished and not in `redo`, only whether it still matches the recipe.

    Nothing is raised and nothing is written.
    """
    _fault_of.cache_clear()
    existing = next(
        folder for folder in (recipe.folder.absolute(), *recipe.folder.absolute().parents) if folder.exists()
    )
    found = Checked(free=shutil.disk_usage(existing).free)
    made: dict[str, tuple[bool, Any]] = {}  # earlier stage → whether it trains, its configuration
    for plan in plans:
        mark = plan.home.finished() if plan.name not in redo else None
        config = None
        try:
            config = plan.load()
            needs = plan.needs(config)
            if mark is None:
                plan.kind.ready(plan, config)
        except (ConfigError, BadData) as error:
            found.fault(plan.name, "", str(error).removeprefix(f"stage {plan.name}: "))
        else:
            if mark is not None:
                _compare(found, plan, config, mark)
            else:
                found.stages += 1
                for need in needs:
                    if message := _missing(need, recipe, made, _columns(config)):
                        found.fault(plan.name, need.key, message)
                _estimate(found, plan, config, _shape(plan, plans), ranks)
        made[plan.name] = plan.kind.trains, config
    if found.disk > found.free:
        message = f"{WRITTEN} will take about {found.disk / GB:,.1f} GB, {found.free / GB:,.1f} GB are free in "
        found.fault("all", "output", f"{message}{existing}: make room, set output=…, or lower checkpoint.keep")
    return found


def checked_recipe(recipe: Recipe, plans: Sequence[StagePlan], ranks: int, redo: Sequence[str]) -> Checked:
    """The same, rejected if it cannot run."""
    for name in redo:
        one_of(name, [plan.name for plan in plans], "--redo")
    checked = check_recipe(recipe, plans, ranks, redo)
    checked.require()
    return checked


def _compare(found: Checked, plan: StagePlan, config: Any, mark: dict[str, Any]) -> None:
    """Whether a finished stage still matches the recipe: other settings and inputs are faults, other code a remark."""
    if changed := changes(plan, config, mark):
        key, what = changed[0]
        more = f", and {len(changed) - 1} more" if changed[1:] else ""
        found.fault(plan.name, key, f"{key} {what}{more}")
        found.outdated.append(plan.name)
    code = mark.get("made_from", {}).get("code")
    if code and code != code_version():
        found.other_code.append(plan.name)


Names = tuple[tuple[str, str], ...]  # field of a row → name of its column


def _columns(config: Any) -> Names:
    data: Any = getattr(config, "data", None)
    return tuple(sorted(data.named().items())) if data else ()


def _missing(need: Need, recipe: Recipe, made: dict[str, tuple[bool, Any]], columns: Names) -> str | None:
    """What is wrong with something a stage needs; None if it exists or will."""
    for name in SHARED:
        if f"{{{name}}}" in need.path:
            return unset(name)
    inside = Path(need.path).relative_to(recipe.folder) if Path(need.path).is_relative_to(recipe.folder) else None
    maker, _, step = inside.parts[0].partition("@") if inside else ("", "", "")
    if inside and maker in made:
        trains, config = made[maker]
        if need.what == "model" and len(inside.parts) == 1 and not trains:
            return f"stage {maker} trains no model; name one that does"
        return _step_is_kept(maker, step, config) if step else None
    if maker in recipe.all_stages():
        return f"{need.path} is produced by stage {maker}, which runs later"
    return _fault_of(need.what, need.path, recipe.task, columns)


@cache
def _fault_of(what: str, path: str, task: str, columns: Names) -> str | None:
    """The same file is needed by many stages and read once."""
    try:
        CHECKS[what](path, task, columns)
    except (ConfigError, BadData, OSError, ValueError) as error:
        return " ".join(str(error).split())
    return None


def _step_is_kept(stage: str, step: str, config: Any) -> str | None:
    """Whether the weights of a named step will exist when the stage is done."""
    if step == "best" or config is None:
        return None
    if not step.isdecimal():
        return f"{stage}@{step} names no step; write {stage}@NUMBER or {stage}@best"
    every = config.checkpoint.keep_hf_every
    if int(step) == config.steps or (every and int(step) % every == 0 and int(step) < config.steps):
        return None
    return f"{stage} will not keep step {step}: it has {config.steps} steps and checkpoint.keep_hf_every is {every}"


def _problems(path: str, task: str, columns: Names) -> None:
    asked = find_task(task)()
    asked.columns = dict(columns)
    asked.problems(path, report=lambda message: None)


def _file(path: str, *_: Any) -> None:
    require(Path(path).is_file(), f"no file {path!r}")


CHECKS: dict[str, Callable[[str, str, Names], object]] = {
    "model": lambda path, *_: read_config(find_model(path)),
    "problems": _problems,
    "examples": lambda path, task, columns: check_demonstrations(path, dict(columns)),
    "file": _file,
    "data set": lambda path, *_: require_hub_data(path) if is_hub_id(path) else _file(path),
}


# ---- what a finished stage was made from ----

Files = dict[str, dict[str, Any]]  # name → sha256, and size and time when it was computed


def made_from(plan: StagePlan, config: Any, before: dict[str, Any] | None = None) -> dict[str, Any]:
    """Everything that a stage's result depends on; checksums of unchanged files are those of `before`, a mark's."""
    needs, known = plan.needs(config), (before or {}).get("inputs", {})
    count, seen, inputs = Counter(need.key for need in needs), Counter[str](), {}
    for need in needs:
        key = need.key if count[need.key] == 1 else f"{need.key}[{seen[need.key]}]"
        seen[need.key] += 1
        inputs[key] = _files(need, known.get(key) or {}, download=before is None)
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


# settings added since, whose default is not what versions without them did
BEFORE = {"loss_mean": "tokens"}


def _completed(before: dict[str, Any], now: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """`before` with the defaults of settings added since, which describe the old behaviour, without those that went."""
    before = {name: value for name, value in before.items() if name in now or name in defaults or not defaults}
    groups = [name for name in before if isinstance(before[name], dict) and isinstance(now.get(name), dict)]
    inner = {name: _completed(before[name], now[name], defaults.get(name) or {}) for name in groups}
    added = {name: BEFORE.get(name, defaults[name]) for name in now if name in defaults and name not in before}
    named = {}
    if "task" in added:  # before tasks had names, a stage did what its task does, and `by` named the task's rewriting
        named = {name: now[name] for name in ("task", "by") if name == "task" or (name in now and now[name] is None)}
    return added | before | named | inner


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


def _files(need: Need, known: Files, download: bool) -> Files | None:
    """None if the input does not exist (any more). A finished stage's inputs are not downloaded again."""
    try:
        if need.what in ("model", "data set") and is_hub_id(need.path):
            files = hub_files(need.path, data=need.what == "data set", download=download)
        elif need.what != "model":
            files = {"": Path(need.path)}
        elif Checkpoint.of_weights(folder := find_model(need.path)):  # they are in its manifest
            return {name: {"sha256": found} for name, found in model_checksums(folder).items()}
        else:
            files = {path.name: path for path in sorted(folder.iterdir()) if path.is_file() and path.name[0] != "."}
        return {name: _seen(path, known.get(name)) for name, path in files.items()}
    except (FileNotFoundError, NotADirectoryError):
        return None


def _seen(path: Path, known: dict[str, Any] | None) -> dict[str, Any]:
    seen = [path.stat().st_size, path.stat().st_mtime_ns]
    return known if known and known.get("seen") == seen else {"sha256": checksum(path), "seen": seen}


# ---- resources ----


def _shape(plan: StagePlan, plans: Sequence[StagePlan]) -> tuple[Path, ModelConfig] | None:
    """Folder and shape of the model that a stage's training begins with, if on disk; training keeps the shape."""
    by_folder = {str(other.folder): other for other in plans}
    start = plan.start
    for _ in plans:
        other = by_folder.get(str(start).partition("@")[0])
        if other is None or other is plan:
            break
        start = other.start
    try:
        folder = find_model(str(start))
        return folder, read_config(folder)
    except (OSError, ValueError):
        return None


def _estimate(found: Checked, plan: StagePlan, config: Any, model: tuple[Path, ModelConfig] | None, ranks: int) -> None:
    if isinstance(config, EvalStage):
        sizes = [(_lines(each.file), each.samples) for each in config.resolved() if each.file.is_file()]
        answers = sum(min(lines, config.max_problems or lines) * n for lines, n in sizes)
        found.disk += rollout_bytes(answers, config.budget, compressed=False)
    if model is None or not isinstance(config, RLConfig | SFTConfig):
        return
    folder, shape = model
    try:
        open_folder(folder, config.prompt, config.rollout.workers)
        if isinstance(config, RLConfig):
            check_context(config, shape)
        config.sharding.check_ranks(ranks)
    except (ConfigError, BadData) as error:
        found.fault(plan.name, "model.path", str(error))
        return
    if without := idle(config, ranks):
        found.idle[plan.name] = f"{without}: {remedy_for_idle(shape, config, ranks, GPUS['H100'])}"
    found.disk += run_bytes(trained_parameters(shape, config.model.lora), config)
    if isinstance(config, RLConfig):
        peak = found.memory[plan.name] = training_peak(shape, config, ranks)
        room, where = _memory_per_rank()
        if peak > room:
            message = f"training needs about {peak / GB:,.1f} GB per rank, {where} has {room / GB:,.1f} GB: lower it, "
            message += "rollout.budget or rollout.total_tokens (the largest response counts), or use more ranks"
            found.fault(plan.name, "batch.token_budget", message)


def _lines(path: Path) -> int:
    with path.open("rb") as file:
        return sum(1 for _ in file)


def _memory_per_rank() -> tuple[float, str]:
    """What a rank may use here. A check for a run elsewhere, on a machine without GPUs, knows no limit."""
    if (found := gpu_bytes()) is not None:
        return float(found), "the GPU"
    if "RANK" not in os.environ:
        return math.inf, "this machine"
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return memory / int(os.environ.get("LOCAL_WORLD_SIZE", "1")), "this machine"
