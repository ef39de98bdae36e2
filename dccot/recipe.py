"""A recipe: which stages run in which order, what they share, and how each one's configuration is put together.

    name: paper
    model: MODEL                                    what everything starts from; set once, it reaches every stage
    train: runs/data/deepscaler.jsonl
    stages:
      sft: {run: sft, config: sft.yaml}             starts from the last stage that trained, or from the recipe's model
      eval_sft: {run: eval, set: {model: sft}}      a stage's name is its folder; sft@600 is a checkpoint of it

A stage's keys, later ones win: its own file, what the recipe gives every stage of its kind (name, folder, seed, model,
problems), `common.KIND`, its `set`, `settings.STAGE`, to which `STAGE.key=value` on the command line adds. In all
values {run} stands for the recipe's folder, {model}, {train} and {validation} for the recipe's own. A recipe that
extends another (`base:`) changes stages by name, and drops those that it lists in `without`, including their rows in
the report. Its keys under `quick` replace its own when it is run with --quick; the name must be among them, so that
neither takes the other's results for its own.

Each stage has its own seed, derived from the recipe's seed and its name: no two stages draw the same problems or
samples. What a stage does is its kind, an entry of stages.KINDS or your own:

    @kind(MyConfig, reads={"source": "file"})       in my_module.py; in the recipe, run: my_module:count_words
    def count_words(context, config): …
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from dccot.core.config import ConfigError, Seed, flat, load_config, one_of, require
from dccot.core.run import Run
from dccot.data.task import TaskName

SHARED = ("model", "train", "validation")  # keys of a recipe that its stages may name


@dataclass
class Stage:
    run: str = ""  # kind of stage: one of stages.KINDS, or your own my_package.my_module:my_kind
    config: str | None = None  # YAML file, relative to the recipe or to configs/
    # stage or folder of the model it starts from; None: the last stage that trained, or the recipe's model
    start: str | None = None
    set: dict[str, Any] = field(default_factory=dict)  # keys of the stage's configuration that the recipe sets


@dataclass
class Recipe:
    name: str = "pipeline"  # of the folder below `output`
    output: str = "runs"  # folder of all runs
    seed: Seed = 0  # of every stage that does not set its own
    task: TaskName = "math"  # what all stages are about, or your own: my_package.my_module:MyTask
    model: str | None = None  # the model that everything starts from
    train: str | None = None  # problems that training and the SFT set draw from
    validation: str | None = None  # problems for validation during RL
    # benchmarks to evaluate on: names of the paper's, or files of problems
    benchmarks: list[str] = field(default_factory=list)
    benchmark_folder: str = "runs/data"  # where the paper's benchmarks are, as `dccot data fetch` writes them
    # stages before all others, which make the model and the problems
    prepare: dict[str, Stage] = field(default_factory=dict)
    stages: dict[str, Stage] = field(default_factory=dict)  # name → stage, in the order in which they run
    # kind of stage → keys that all stages of this kind share
    common: dict[str, dict[str, Any]] = field(default_factory=dict)
    # stage → its keys: what a smaller version of a recipe changes
    settings: dict[str, dict[str, Any]] = field(default_factory=dict)
    without: list[str] = field(default_factory=list)  # stages of the extended recipe to drop
    quick: dict[str, Any] = field(default_factory=dict)  # keys of the recipe that --quick replaces; its name is one

    def check(self) -> None:
        require(bool(self.stages), "the recipe has no stages")
        require(bool(self.name.strip()), f"name is {self.name!r}; it names the recipe's folder below output")
        require("name" in self.quick or not self.quick, "quick has no name; give it one, so that results stay apart")
        for twice in set(self.prepare) & set(self.stages):
            raise ConfigError(f"{twice!r} is both in prepare and in stages; give each stage its own name")
        for name in self.all_stages():
            plain = re.fullmatch(r"\w[\w-]*", name) is not None
            require(plain, f"a stage is called {name!r}; a name is letters, digits, '_' and '-': it names a folder")
        for key, names in (("name in without", self.without), ("key of settings", self.settings)):
            for name in names:
                one_of(name, self.all_stages(), f"a {key}")

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
            gone = {report.get("rows", {}).pop(name, None) for name in self.without}
            pairs = report.get("baselines", {}).items()
            report["baselines"] = {row: other for row, other in pairs if not {row, other} & gone}
        self.without = []

    def filled_in(self, value: Any) -> Any:
        """With placeholders filled in; {model} may itself hold {run}. Unset ones stay: preflight reports them."""
        if isinstance(value, dict):
            return {key: self.filled_in(inner) for key, inner in value.items()}
        if isinstance(value, list):
            return [self.filled_in(inner) for inner in value]
        if not isinstance(value, str):
            return value
        for name in SHARED:
            value = value.replace(f"{{{name}}}", getattr(self, name) or f"{{{name}}}")
        return value.replace("{run}", str(self.folder))

    def place(self, name: str) -> str:
        """`stage`, `stage@step` or `stage/inside` as a path in the recipe's folder; anything else is a path already."""
        name = self.filled_in(name)
        return str(self.folder / name) if name.split("/")[0].split("@")[0] in self.all_stages() else name


@dataclass(frozen=True)
class Need:
    """Something a stage reads: the key that names it, its path, and what it must be (preflight.CHECKS)."""

    key: str
    path: str
    what: str


@dataclass(frozen=True)
class Kind:
    """What a stage does, and what it needs for that."""

    run: Callable[[Any, Any], None]  # (stages.Context, configuration)
    config: type
    # key → its value, in which {stage}, {folder}, {start} and the recipe's own placeholders are filled in
    given: Mapping[str, str] = field(default_factory=dict)
    reads: Mapping[str, str] = field(default_factory=dict)  # key that names an input → what it must be
    needs: Callable[[StagePlan, Any], list[Need]] = lambda plan, config: []  # inputs that no single key names
    # ConfigError if it cannot run here; a finished stage is not asked
    ready: Callable[[StagePlan, Any], None] = lambda plan, config: None
    trains: bool = False  # it produces a model, from which the next stage starts
    alone: bool = False  # only rank 0 runs it

    def __call__(self, context: Any, config: Any) -> None:
        if context.runtime.is_main or not self.alone:
            self.run(context, config)


def kind(config: type, **options: Any) -> Callable[[Callable[[Any, Any], None]], Kind]:
    """Makes a kind of stage of the function that runs it."""
    return lambda run: Kind(run, config, **options)


@dataclass
class StagePlan:
    """A stage as it will run: where it starts from, and its settings in order."""

    recipe: Recipe
    name: str
    stage: Stage
    kind: Kind
    start: str | None
    file: Path | None  # with settings of its own

    @property
    def folder(self) -> Path:
        return self.recipe.folder / self.name

    @property
    def home(self) -> Run:
        """Where its results go."""
        return Run(self.folder)

    def given(self) -> dict[str, Any]:
        """What the recipe gives to every stage of this kind. A key whose placeholder has no value stays unset."""
        recipe = self.recipe
        shared = vars(recipe) | {"seed": stage_seed(recipe.seed, self.name)}
        common = ("seed", "task", "benchmarks", "benchmark_folder")
        found = {each.name: shared[each.name] for each in fields(self.kind.config) if each.name in common}
        values = {"run": str(recipe.folder), "folder": str(self.folder), "stage": self.name, "start": self.start}
        values |= {name: getattr(recipe, name) for name in SHARED}
        for key, text in self.kind.given.items():
            if all(values[name] for name in re.findall(r"{(\w+)}", text)):
                found[key] = text.format(**values)
        return found

    def load(self) -> Any:
        """Its configuration, checked; an error names the stage."""
        recipe = self.recipe
        chosen = (recipe.common.get(self.stage.run, {}), self.stage.set, recipe.settings.get(self.name, {}))
        settings = [each for keys in (self.given(), *chosen) for each in recipe.filled_in(keys).items()]
        try:
            return load_config(self.kind.config, self.file, settings=settings)
        except ConfigError as error:
            said = str(error)
            if self.start is None and any(said.startswith(f"{key} is not set") for key in self._begun_with()):
                said = unset("model")
            raise ConfigError(f"stage {self.name}: {said}") from None

    def _begun_with(self) -> list[str]:
        return [key for key, text in self.kind.given.items() if text == "{start}"]

    def needs(self, config: Any) -> list[Need]:
        """What it reads; keys that are not set name nothing."""
        values = flat(config)
        named = [Need(key, str(values[key]), what) for key, what in self.kind.reads.items() if values[key]]
        return named + self.kind.needs(self, config)


def unset(name: str) -> str:
    return f"{name} is not set; give {name}=… on the command line"


def stage_seed(seed: int, stage: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}/{stage}".encode()).digest()[:6], "big")
