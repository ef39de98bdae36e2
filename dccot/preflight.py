"""Checks what a recipe needs before any weights are read: `dccot pipeline RECIPE --check`, and the first step of every
start.

Every stage's configuration is resolved and checked; every file, benchmark, model and key that it will need exists or is
produced by an earlier stage; the run's output fits on disk, and training fits in memory. All problems are reported at
once, each with its stage and key. A finished stage needs nothing, but must match the recipe (marks.py).
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch

from dccot.core.config import ConfigError
from dccot.core.files import BadData, read_jsonl
from dccot.core.provenance import code_version, describe_code
from dccot.data.task import find_task
from dccot.marks import changes
from dccot.model.config import ModelConfig, read_config
from dccot.model.folder import find_model
from dccot.recipe import SHARED, Recipe, StagePlan
from dccot.stages import Need, kind_of, load_stage
from dccot.train.config import RLConfig, SFTConfig, check_context, open_folder
from dccot.train.memory import parameters
from dccot.train.plan import GB, checkpoint_bytes, training_peak


@dataclass(frozen=True)
class Fault:
    stage: str
    key: str
    message: str

    @property
    def place(self) -> str:
        return f"{self.stage}.{self.key}" if self.key else self.stage


class Unmet(ConfigError):
    """Everything that prevents a recipe from running, one line each."""

    def __init__(self, message: str):
        ValueError.__init__(self, message)


@dataclass
class Checked:
    """The result: every fault, and the resources the unfinished stages need."""

    faults: list[Fault]
    disk: float = 0.0  # bytes that training will write
    free: float = 0.0  # bytes on the disk of the recipe's output
    memory: dict[str, float] | None = None  # stage → bytes per rank at the peak of training
    stages: int = 0
    outdated: list[str] = field(default_factory=list)  # finished stages that no longer match the recipe
    other_code: list[str] = field(default_factory=list)  # finished stages made by other code

    def require(self) -> None:
        """Raise with every fault; stages that lack the same thing share a line."""
        places: dict[str, list[str]] = {}
        for fault in self.faults:
            places.setdefault(fault.message, []).append(fault.place)
        lines = [f"  {message}   ({', '.join(dict.fromkeys(found))})" for message, found in places.items()]
        if self.outdated:
            again = " ".join(f"--redo {name}" for name in self.outdated)
            lines.append(
                f"  restore it, change it for later stages only (STAGE.key=…), give the recipe another name, or: {again}"
            )
        if lines:
            raise Unmet(
                "\n".join([f"the recipe cannot run, {len(places)} things are missing or wrong (stage.key):", *lines])
            )

    def __str__(self) -> str:
        lines = [
            f"{self.stages} stages can run; checkpoints will take {self.disk / GB:,.1f} GB of {self.free / GB:,.1f} GB free"
        ]
        if self.memory:
            stage, peak = max(self.memory.items(), key=lambda each: each[1])
            lines.append(
                f"most memory: {stage}, {peak / GB:,.1f} GB per rank while training (estimated; `dccot plan` has the parts)"
            )
        return "\n".join([*lines, *self.remarks()])

    def remarks(self) -> list[str]:
        """Warnings that do not prevent the recipe from running."""
        by = f"made by other code than this ({describe_code(code_version())}): "
        return [by + ", ".join(self.other_code)] if self.other_code else []


def check_recipe(recipe: Recipe, plans: Sequence[StagePlan], ranks: int, redo: Collection[str] = ()) -> Checked:
    """Check every stage; for one that is finished and not in `redo`, only whether it still matches the recipe.

    Nothing is raised and nothing is written.
    """
    _fault_of.cache_clear()
    found = Checked([], memory={})
    existing = (
        recipe.folder
        if recipe.folder.exists()
        else next(parent for parent in recipe.folder.absolute().parents if parent.exists())
    )
    found.free = shutil.disk_usage(existing).free
    made: dict[str, Any] = {}  # stage → configuration, of earlier stages
    for plan in plans:
        mark = plan.home.finished() if plan.name not in redo else None
        try:
            config = load_stage(plan)
            needs = kind_of(plan.stage.run).needs(plan, config)
        except (ConfigError, BadData) as error:
            message = str(error).removeprefix(f"stage {plan.name}: ")
            found.faults.append(Fault(plan.name, "", message))
            made[plan.name] = None
            continue
        made_before = dict(made)
        made[plan.name] = config
        if mark is not None:
            _compare(found, plan, config, mark)
            continue
        found.stages += 1
        missing = [(need.key, _missing(need, recipe, made_before)) for need in needs]
        found.faults += [Fault(plan.name, key, message) for key, message in missing if message]
        _estimate(found, plan, config, _shape(plan, plans, made), ranks)
    if found.disk > found.free:
        message = f"checkpoints will take about {found.disk / GB:,.1f} GB, {found.free / GB:,.1f} GB are free in {existing}: make room, "
        found.faults.append(Fault("all", "output", message + "set output=…, or lower checkpoint.keep"))
    return found


def _compare(found: Checked, plan: StagePlan, config: Any, mark: dict[str, Any]) -> None:
    """Whether a finished stage still matches the recipe: different settings and inputs are faults, different code is
    only reported.
    """
    if changed := changes(plan, config, mark):
        key, what = changed[0]
        more = f", and {len(changed) - 1} more" if changed[1:] else ""
        found.faults.append(Fault(plan.name, key, f"{key} {what}{more}"))
        found.outdated.append(plan.name)
    code = mark.get("made_from", {}).get("code")
    if code and code != code_version():
        found.other_code.append(plan.name)


def _missing(need: Need, recipe: Recipe, made: dict[str, Any]) -> str | None:
    """What is wrong with something a stage needs; None if it exists or will."""
    for name in SHARED:
        if f"{{{name}}}" in need.path:
            return f"{name} is not set; give {name}=… on the command line"
    inside = Path(need.path).relative_to(recipe.folder) if Path(need.path).is_relative_to(recipe.folder) else None
    maker, _, step = inside.parts[0].partition("@") if inside else ("", "", "")
    if inside and maker in made:
        whole = need.what == "model" and len(inside.parts) == 1
        if whole and not kind_of(recipe.all_stages()[maker].run).trains:
            return f"stage {maker} trains no model; name one that does"
        return _step_is_kept(maker, step, made[maker]) if step else None
    if inside and maker in recipe.all_stages():
        return f"{need.path} is made by stage {maker}, which does not come before"
    return _fault_of(need.what, need.path, recipe.task)


@cache
def _fault_of(what: str, path: str, task: str) -> str | None:
    """The same file is needed by many stages and read once."""
    try:
        return CHECKS[what](path) if what != "problems" else _problems(path, task)
    except (ConfigError, BadData, OSError, ValueError) as error:
        return " ".join(str(error).split())


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


def _model(path: str) -> str | None:
    read_config(find_model(path))
    return None


def _problems(path: str, task: str) -> str | None:
    find_task(task)().problems(path, report=lambda message: None)
    return None


def _examples(path: str) -> str | None:
    row = next((row for _, row in read_jsonl(path, report=lambda message: None)), None)
    lacking = [name for name in ("question", "completion") if row is None or not isinstance(row.get(name), str)]
    return (
        f"{path} holds no row with {' and '.join(lacking)}; an SFT row has id, question and completion"
        if lacking
        else None
    )


def _file(path: str) -> str | None:
    return None if Path(path).is_file() else f"no file {path!r}"


CHECKS: dict[str, Callable[[str], str | None]] = {
    "model": _model,
    "examples": _examples,
    "file": _file,
}


# ---- resources ----


def _shape(plan: StagePlan, plans: Sequence[StagePlan], made: dict[str, Any]) -> tuple[Path, ModelConfig] | None:
    """The folder and shape of the model that a stage's training begins with, if it is on disk; training keeps the
    shape.
    """
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
    if model is None or not isinstance(config, RLConfig | SFTConfig):
        return
    folder, shape = model
    try:
        open_folder(folder, config.prompt, config.rollout.workers)
        if isinstance(config, RLConfig):
            check_context(config, shape)
    except (ConfigError, BadData) as error:
        found.faults.append(Fault(plan.name, "model.path", str(error)))
        return
    found.disk += checkpoint_bytes(parameters(shape), config)
    if isinstance(config, RLConfig) and found.memory is not None:
        peak = found.memory[plan.name] = training_peak(shape, config, ranks)
        room, where = _memory_per_rank()
        if peak > room:
            message = f"training needs about {peak / GB:,.1f} GB per rank, {where} has {room / GB:,.1f} GB: "
            message += (
                "lower it, rollout.budget or rollout.total_tokens (the largest response counts), or use more ranks"
            )
            found.faults.append(Fault(plan.name, "batch.token_budget", message))


def _memory_per_rank() -> tuple[float, str]:
    """What a rank may use here. A check on a machine without GPUs, for a run elsewhere, only reports what training will
    need.
    """
    if torch.cuda.is_available():
        return float(torch.cuda.get_device_properties(0).total_memory), "the GPU"
    if "RANK" not in os.environ:
        return math.inf, "this machine"
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / int(
        os.environ.get("LOCAL_WORLD_SIZE", "1")
    ), "this machine"
