"""All stages of a recipe, one after another, each from the one before; run again, it goes on where it stopped.

    dccot pipeline configs/dc_cot.yaml model=MODEL sft.data.train=sft.jsonl             # one process
    torchrun --nproc_per_node 8 -m dccot.pipeline configs/dc_cot.yaml model=MODEL …     # one per GPU

A recipe lists stages; `stage.key=value` on the command line sets a key of one stage, anything else a key of the recipe. In the values of
a recipe {run} stands for its folder. Stages share one process and, where the model's shape allows, one engine: a new model is
streamed into it. A stage that is finished leaves a mark and is passed over.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dccot.command import run_cleanly
from dccot.config import find_config, load_config, one_of, read_yaml, require, to_yaml
from dccot.files import write_atomic
from dccot.rollout.settings import EngineConfig
from dccot.runtime import Runtime
from dccot.stages import KINDS, TRAINING

if TYPE_CHECKING:
    from dccot.rollout.engine import Engine

log = logging.getLogger("dccot")


@dataclass
class Stage:
    name: str
    run: str  # what is done: one of stages.KINDS
    config: str | None = None  # YAML file, relative to the recipe
    start: str | None = None  # stage or folder of the model it starts from; None: the last stage that trained, or the recipe's model
    set: dict[str, Any] = field(default_factory=dict)  # keys of the stage's configuration that the recipe sets


@dataclass
class Recipe:
    name: str = "pipeline"
    output: str = "runs"
    seed: int = 0
    model: str | None = None  # where the first stage starts from
    stages: list[Stage] = field(default_factory=list)
    common: dict[str, Any] = field(default_factory=dict)  # kind of stage → keys that all stages of this kind share
    settings: dict[str, Any] = field(default_factory=dict)  # stage → its keys: what a shorter version of a recipe changes

    def check(self) -> None:
        require(bool(self.stages), "the recipe has no stages")
        names = [stage.name for stage in self.stages]
        for stage in self.stages:
            one_of(stage.run, KINDS, f"run of stage {stage.name}")
            require(names.count(stage.name) == 1, f"two stages are called {stage.name!r}; give each its own name")
        for section, known in (("common", KINDS), ("settings", names)):
            for name, keys in getattr(self, section).items():
                one_of(name, known, f"a key of {section}")
                require(isinstance(keys, dict), f"{section}.{name} is {keys!r}; it must be keys and values of a stage's configuration")

    @property
    def folder(self) -> Path:
        return Path(self.output) / self.name


class SharedEngine:
    """One engine for all stages. A model of the same shape is streamed into it; another shape makes a new engine."""

    def __init__(self) -> None:
        self.engine: Engine | None = None
        self._shape: tuple | None = None

    def on(self, model: Path, config: EngineConfig) -> Engine:
        from dccot.model.checkpoint_io import stored_parameters
        from dccot.rollout.engine import Engine

        shape = (json.loads((model / "config.json").read_text()), (model / "tokenizer.json").read_bytes(), asdict(config))
        if self.engine is not None and self._shape == shape:
            self.engine.load(stored_parameters(model))
            return self.engine
        self.close()
        self.engine, self._shape = Engine(model, config), shape
        return self.engine

    def close(self) -> None:
        if self.engine is not None:
            self.engine.shutdown()
        self.engine = self._shape = None


@dataclass
class Context:
    """What a stage may use."""

    recipe: Recipe
    stage: Stage
    config: Path | None
    start: str | None  # where its model comes from
    overrides: list[str]
    engines: SharedEngine
    runtime: Runtime

    @property
    def folder(self) -> Path:
        return self.recipe.folder / self.stage.name

    def load(self, kind: type) -> Any:
        return load_config(kind, self.config, self.overrides)

    def place(self, name: str) -> str:
        """`stage` or `stage/inside` as a path in the recipe's folder; anything else is a path already."""
        return str(self.recipe.folder / name) if name.split("/")[0] in {stage.name for stage in self.recipe.stages} else name

    def say(self, message: object) -> None:
        if self.runtime.is_main and message is not None:
            print(message, flush=True)


def stage_overrides(recipe: Recipe, stage: Stage, start: str | None, extra: dict[str, list[str]]) -> list[str]:
    """The `key=value` list of a stage: where it starts from, what the recipe sets, what the command line says; later ones win."""
    found = [f"model.path={start}"] if start and stage.run in TRAINING else []
    chosen = recipe.common.get(stage.run, {}) | stage.set | recipe.settings.get(stage.name, {})
    for key, value in chosen.items():
        text = value if isinstance(value, str) else json.dumps(value)
        found.append(f"{key}={text.replace('{run}', str(recipe.folder))}")
    return found + extra.get(stage.name, [])


def load_recipe(path: str | Path, overrides: Sequence[str]) -> tuple[Recipe, dict[str, list[str]], Path]:
    """The recipe, the overrides of each stage, and the folder that stage files are relative to."""
    file = find_config(path)
    names = [stage.get("name") for stage in read_yaml(file).get("stages") or [] if isinstance(stage, dict)]
    own, extra = [], {}
    for override in overrides:
        stage, dot, rest = override.partition(".")
        if dot and stage in names:
            extra.setdefault(stage, []).append(rest)
        else:
            own.append(override)
    return load_config(Recipe, file, own), extra, file.parent


def run_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Run every stage that is not finished; returns the recipe as resolved."""
    recipe, extra, beside = load_recipe(path, overrides)
    runtime = Runtime.start()
    engines = SharedEngine()
    recipe.folder.mkdir(parents=True, exist_ok=True)
    (recipe.folder / "recipe.yaml").write_text(to_yaml(recipe))
    start = recipe.model
    try:
        for number, stage in enumerate(recipe.stages, start=1):
            mark = recipe.folder / stage.name / "done.json"
            config = find_config(beside / stage.config) if stage.config else None
            context = Context(recipe, stage, config, None, [], engines, runtime)
            context.start = context.place(stage.start) if stage.start else start
            context.overrides = stage_overrides(recipe, stage, context.start, extra)
            heading = f"[{number}/{len(recipe.stages)}] {stage.name}"
            if mark.is_file():
                context.say(f"{heading}: done before ({json.loads(mark.read_text())['seconds']:.0f} s)")
            else:
                context.say(heading)
                began = time.perf_counter()
                KINDS[stage.run](context)
                _leave_mark(mark, {"seconds": time.perf_counter() - began}, runtime)
                context.say(f"{heading}: {time.perf_counter() - began:.0f} s")
            if stage.run in TRAINING:
                start = str(recipe.folder / stage.name)
    finally:
        engines.close()
        runtime.stop()
    return recipe


def _leave_mark(mark: Path, content: dict, runtime: Runtime) -> None:
    runtime.barrier()
    if runtime.is_main:
        write_atomic(mark, json.dumps(content))
    runtime.barrier()


def main(argv: Sequence[str] | None = None) -> int:
    from dccot.train.run import launch_arguments

    arguments = launch_arguments(argv, "All stages of a recipe.", "dccot pipeline configs/dc_cot.yaml model=MODEL sft.data.train=sft.jsonl")
    logging.basicConfig(level=logging.INFO if os.environ.get("RANK", "0") == "0" else logging.WARNING, format="%(message)s")

    def work() -> None:
        if arguments.print_config:
            print(to_yaml(load_recipe(arguments.config, arguments.overrides)[0]), end="")
        else:
            run_recipe(arguments.config, arguments.overrides)

    return run_cleanly(work)


if __name__ == "__main__":
    sys.exit(main())
