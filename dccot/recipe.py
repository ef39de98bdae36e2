"""A recipe: which stages run in which order, what they share, and how each one's configuration is put together.

    name: paper
    model: MODEL                                    what everything starts from; set once here, like the problems, it reaches every stage
    train: runs/data/deepscaler.jsonl
    stages:
      sft: {run: sft, config: sft.yaml}             starts from the last stage that trained, or from the recipe's model
      eval_sft: {run: eval, set: {model: sft}}      a stage's name is its folder below the recipe's; sft@600 is a checkpoint of it

A stage's keys, later ones win: its own file, what the pipeline gives every stage of its kind (name, folder, seed,
model, problems), `common.KIND`, its `set`, `settings.STAGE`, `STAGE.key=value` on the command line. In all values {run}
stands for the recipe's folder, {model}, {train} and {validation} for the recipe's own. A recipe that extends another
(`base:`) changes stages by name, and drops those that it lists in `without`, including their rows in the report.

Each stage has its own seed, derived from the recipe's seed and its name: no two stages draw the same problems or
samples.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from dccot.core.config import ConfigError, Seed, find_config, load_config, one_of, read_yaml, require
from dccot.core.run import Run
from dccot.data.task import TaskName

C = TypeVar("C")
SHARED = ("model", "train", "validation")  # keys of a recipe that its stages may name


@dataclass
class Stage:
    run: str = ""  # kind of stage: one of stages.KINDS
    config: str | None = None  # YAML file, relative to the recipe or to configs/
    # stage or folder of the model it starts from; None: the last stage that trained, or the recipe's model
    start: str | None = None
    set: dict[str, Any] = field(default_factory=dict)  # keys of the stage's configuration that the recipe sets


@dataclass
class Recipe:
    name: str = "pipeline"
    output: str = "runs"
    seed: Seed = 0
    task: TaskName = "math"  # what all stages are about, or your own: my_package.my_module:MyTask
    model: str | None = None  # the model that everything starts from
    train: str | None = None  # problems that training and the SFT set draw from
    validation: str | None = None  # problems for validation during RL
    # benchmarks to evaluate on: names of the paper's, or files of problems
    benchmarks: list[str] = field(default_factory=list)
    benchmark_folder: str = "runs/data"  # where the paper's benchmarks are, as `dccot data fetch` writes them
    # stages before all others, which make the model and the problems
    prepare: dict[str, Stage] = field(default_factory=dict)
    stages: dict[str, Stage] = field(default_factory=dict)
    # kind of stage → keys that all stages of this kind share
    common: dict[str, dict[str, Any]] = field(default_factory=dict)
    # stage → its keys: what a smaller version of a recipe changes
    settings: dict[str, dict[str, Any]] = field(default_factory=dict)
    without: list[str] = field(default_factory=list)  # stages of the extended recipe to drop

    def check(self) -> None:
        from dccot.stages import KINDS, kind_of

        require(bool(self.stages), "the recipe has no stages")
        require(bool(self.name.strip()), f"name is {self.name!r}; it names the recipe's folder below output")
        for twice in set(self.prepare) & set(self.stages):
            raise ConfigError(f"{twice!r} is both in prepare and in stages; give each stage its own name")
        for name, stage in self.all_stages().items():
            plain = re.fullmatch(r"\w[\w-]*", name)
            require(
                plain is not None,
                f"a stage is called {name!r}; a name is letters, digits, '_' and '-': it names a folder",
            )
            kind_of(stage.run)
        for name in self.without:
            one_of(name, self.all_stages(), "a name in without")
        for section, known in (
            ("common", {stage.run for stage in self.all_stages().values()} | set(KINDS)),
            ("settings", self.all_stages()),
        ):
            for name in getattr(self, section):
                one_of(name, known, f"a key of {section}")

    @property
    def folder(self) -> Path:
        return Path(self.output) / self.name

    @property
    def home(self) -> Run:
        return Run(self.folder)

    def all_stages(self) -> dict[str, Stage]:
        return self.prepare | self.stages

    def leave_out(self) -> None:
        """Without the dropped stages, their settings, and their rows in the report."""
        for section in (self.prepare, self.stages, self.settings):
            for name in set(self.without) & set(section):
                del section[name]
        for report in (stage.set for stage in self.stages.values() if stage.run == "report"):
            gone = [report.get("rows", {}).pop(name, None) for name in self.without]
            report["baselines"] = {
                row: other
                for row, other in report.get("baselines", {}).items()
                if row not in gone and other not in gone
            }

    def filled_in(self, text: str) -> str:
        """A value with its placeholders filled in; {model} may itself hold {run}. Unset ones stay: preflight reports
        them.
        """
        for name in SHARED:
            text = text.replace(f"{{{name}}}", getattr(self, name) or f"{{{name}}}")
        return text.replace("{run}", str(self.folder))

    def place(self, name: str) -> str:
        """`stage`, `stage@step` or `stage/inside` as a path in the recipe's folder; anything else is a path already."""
        name = self.filled_in(name)
        return str(self.folder / name) if name.split("/")[0].split("@")[0] in self.all_stages() else name


@dataclass
class StagePlan:
    """A stage as it will run: where it starts from, and its settings in order."""

    recipe: Recipe
    name: str
    stage: Stage
    file: Path | None
    start: str | None
    overrides: list[str]

    @property
    def folder(self) -> Path:
        return self.recipe.folder / self.name

    @property
    def home(self) -> Run:
        """Where its results go."""
        return Run(self.folder)

    def load(self, kind: type[C]) -> C:
        return load_config(kind, self.file, self.overrides)


def stage_seed(seed: int, stage: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}/{stage}".encode()).digest()[:6], "big")


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> tuple[Recipe, list[StagePlan]]:
    """The recipe and its stages in order. Settings of a stage are not checked here: loading its configuration does
    that.
    """
    from dccot.stages import kind_of

    file = find_config(path)
    tree = read_yaml(file)
    names = [name for section in ("prepare", "stages") if isinstance(tree.get(section), dict) for name in tree[section]]
    own: list[str] = []
    extra: dict[str, list[str]] = {}
    for override in overrides:
        stage, dot, rest = override.partition(".")
        if dot and stage in names:
            extra.setdefault(stage, []).append(rest)
        else:
            own.append(override)
    recipe = load_config(Recipe, file, own)
    recipe.leave_out()
    plans, trained = [], None
    for name, each in recipe.all_stages().items():
        start = (
            recipe.place(each.start)
            if each.start
            else trained or (recipe.filled_in(recipe.model) if recipe.model else None)
        )
        config = _config_file(file.parent, each.config, name) if each.config else None
        plan = StagePlan(recipe, name, each, config, start, [])
        shared = [f"task={recipe.task}"] if "task" in vars(kind_of(each.run).config()) else []
        plan.overrides = shared + kind_of(each.run).given(plan) + _chosen(recipe, name, each) + extra.get(name, [])
        if kind_of(each.run).trains and name in recipe.stages:
            trained = str(plan.folder)
        plans.append(plan)
    return recipe, plans


def _config_file(beside: Path, name: str, stage: str) -> Path:
    try:
        return beside / name if (beside / name).is_file() else find_config(name)
    except ConfigError as error:
        raise ConfigError(f"stage {stage}: {error}") from None


def _chosen(recipe: Recipe, name: str, stage: Stage) -> list[str]:
    found = []
    for keys in (recipe.common.get(stage.run, {}), stage.set, recipe.settings.get(name, {})):
        for key, value in keys.items():
            found.append(f"{key}={recipe.filled_in(json.dumps(value, ensure_ascii=False))}")
    return found
