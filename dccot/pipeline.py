"""All stages of a recipe, one after another, each from the one before; run again, it continues where it stopped.

    dccot pipeline configs/dc_cot.yaml model=MODEL sft.data.train=sft.jsonl             # one process
    torchrun --nproc_per_node 8 -m dccot.pipeline configs/dc_cot.yaml model=MODEL …     # one per GPU

A recipe lists stages; `stage.key=value` on the command line sets a key of one stage, anything else a key of the recipe. In the values of
a recipe {run} is its folder. All stages are configured and checked before the first one starts. They share one process and,
where the model's shape allows, one engine: a new model is streamed into it. A stage that is finished leaves a mark and is skipped.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dccot.command import run_cleanly
from dccot.config import ConfigError, find_config, load_config, one_of, read_yaml, require, to_yaml
from dccot.files import write_atomic
from dccot.model.folder import resolve_model
from dccot.rollout.interface import Engine, open_engine
from dccot.rollout.settings import EngineConfig
from dccot.runtime import Runtime
from dccot.stages import KINDS

log = logging.getLogger("dccot")


@dataclass
class Stage:
    name: str
    run: str  # its kind: one of stages.KINDS
    config: str | None = None  # YAML file, relative to the recipe
    start: str | None = None  # stage or folder whose model it starts from; None: the last stage that trained, or the recipe's model
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
        require(bool(self.name.strip()), f"name is {self.name!r}; it names the recipe's folder below output")
        require(0 <= self.seed < 2**63, f"seed is {self.seed}; it must be in [0, 2^63)")
        names = self.names
        for stage in self.stages:
            plain = re.fullmatch(r"\w[\w.-]*", stage.name)
            require(plain is not None, f"a stage is called {stage.name!r}; a name is letters, digits, '_', '-' and '.': it names a folder")
            one_of(stage.run, KINDS, f"run of stage {stage.name}")
            require(names.count(stage.name) == 1, f"two stages are called {stage.name!r}; give each its own name")
        for section, known in (("common", KINDS), ("settings", names)):
            for name, keys in getattr(self, section).items():
                one_of(name, known, f"a key of {section}")
                require(isinstance(keys, dict), f"{section}.{name} is {keys!r}; it must be keys and values of a stage's configuration")

    @property
    def folder(self) -> Path:
        return Path(self.output) / self.name

    @property
    def names(self) -> list[str]:
        return [stage.name for stage in self.stages]


class SharedEngine:
    """One engine for all stages. A model of the same shape is streamed into it; another shape makes a new engine."""

    def __init__(self) -> None:
        self.engine: Engine | None = None
        self._shape: tuple | None = None
        self._stack = ExitStack()

    def on(self, model: Path, config: EngineConfig) -> Engine:
        from dccot.model.checkpoint_io import stored_parameters

        shape = (json.loads((model / "config.json").read_text()), (model / "tokenizer.json").read_bytes(), asdict(config))
        if self.engine is not None and self._shape == shape:
            self.engine.load(stored_parameters(model))
            return self.engine
        self.close()
        self.engine, self._shape = self._stack.enter_context(open_engine(model, config)), shape
        return self.engine

    def close(self) -> None:
        self._stack.close()
        self.engine = self._shape = None


@dataclass
class Context:
    """A stage of a recipe, everything about it resolved."""

    recipe: Recipe
    stage: Stage
    earlier: dict[str, str]  # stages before it → their kinds
    start: str | None  # where its model comes from
    config: Any = None  # of the class that KINDS names

    @property
    def folder(self) -> Path:
        return self.recipe.folder / self.stage.name

    @property
    def mark(self) -> Path:
        """Written when the stage is finished."""
        return self.folder / "done.json"

    def model(self, name: str, key: str) -> str:
        """Where a model is: `stage`, `stage@best` or `stage/inside` in the recipe's folder; anything else is a path already."""
        stage = re.split("[/@]", name)[0]
        if stage not in self.recipe.names:
            if not Path(name).is_relative_to(self.recipe.folder) and not self.mark.exists():
                resolve_model(name)
            return name
        require(stage in self.earlier, f"{key} is {name!r}, which does not come before stage {self.stage.name}; change their order")
        inside = "/" in name
        require(inside or KINDS[self.earlier[stage]].trains, f"{key} is {name!r}, a stage that trains no model; name one that does")
        return str(self.recipe.folder / name)

    def overrides(self, extra: Sequence[str]) -> list[str]:
        """The stage's `key=value` list: what the recipe knows, what it sets, what the command line says (`extra`); later ones win."""
        recipe, stage, kind = self.recipe, self.stage, KINDS[self.stage.run]
        known = {"stage": stage.name, "run": recipe.folder, "folder": self.folder, "seed": recipe.seed, "start": self.start}
        found = [f"{key}={text.format(**known)}" for key, text in kind.fills.items() if self.start or text != "{start}"]
        for key, value in (recipe.common.get(stage.run, {}) | stage.set | recipe.settings.get(stage.name, {})).items():
            text = value if isinstance(value, str) else json.dumps(value)
            for name in re.findall(r"\{run\}/([^/\"',}\]]+)", text):
                there = name in self.earlier or (name not in recipe.names and (recipe.folder / name).exists())
                require(there, f"{key} reads {{run}}/{name}, which no stage before it makes; those are {', '.join(self.earlier)}")
            found.append(f"{key}={text.replace('{run}', str(recipe.folder))}")
        return [*found, *extra]


class Session:
    """What the stages of a run share: process group, engine, and rank 0's voice."""

    def __init__(self, runtime: Runtime):
        self.runtime, self.engines = runtime, SharedEngine()

    def say(self, message: object) -> None:
        if self.runtime.is_main and message is not None:
            print(message, flush=True)


def load_recipe(path: str | Path, overrides: Sequence[str]) -> tuple[Recipe, dict[str, list[str]], Path]:
    """The recipe, the overrides of each stage, and the folder that stage files are relative to."""
    file = find_config(path)
    names = [stage.get("name") for stage in read_yaml(file).get("stages") or [] if isinstance(stage, dict)]
    own: list[str] = []
    extra: dict[str, list[str]] = {}
    for override in overrides:
        stage, dot, rest = override.partition(".")
        if dot and stage in names:
            extra.setdefault(stage, []).append(rest)
        else:
            own.append(override)
    return load_config(Recipe, file, own), extra, file.parent


def prepare(path: str | Path, overrides: Sequence[str] = ()) -> tuple[Recipe, list[Context]]:
    """The recipe and all its stages, configured and checked: what cannot run is refused before the first of them starts."""
    recipe, extra, beside = load_recipe(path, overrides)
    if recipe.model:
        resolve_model(recipe.model)
    contexts: list[Context] = []
    earlier: dict[str, str] = {}
    start = recipe.model
    for stage in recipe.stages:
        context = Context(recipe, stage, dict(earlier), start)
        kind = KINDS[stage.run]
        try:
            context.start = context.model(stage.start, "start") if stage.start else start
            file = find_config(beside / stage.config) if stage.config else None
            context.config = load_config(kind.config, file, context.overrides(extra.get(stage.name, ())))
            if kind.check:
                kind.check(context, context.config)
        except (ConfigError, FileNotFoundError) as error:
            raise ConfigError(f"stage {stage.name}: {error}") from None
        contexts.append(context)
        earlier[stage.name] = stage.run
        start = str(context.folder) if kind.trains else start
    return recipe, contexts


def run_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Run every stage that is not finished; returns the recipe as resolved."""
    recipe, contexts = prepare(path, overrides)
    session = Session(Runtime.start())
    try:
        if session.runtime.is_main:
            write_atomic(recipe.folder / "recipe.yaml", to_yaml(recipe))
        for number, context in enumerate(contexts, start=1):
            heading = f"[{number}/{len(contexts)}] {context.stage.name}"
            if context.mark.is_file():
                session.say(f"{heading}: done before ({json.loads(context.mark.read_text())['seconds']:.0f} s)")
                continue
            session.say(heading)
            began = time.perf_counter()
            KINDS[context.stage.run].run(session, context, context.config)
            _leave_mark(context.mark, {"seconds": time.perf_counter() - began}, session.runtime)
            session.say(f"{heading}: {time.perf_counter() - began:.0f} s")
    finally:
        session.engines.close()
        session.runtime.stop()
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
