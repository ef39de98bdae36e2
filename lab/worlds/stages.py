"""The miniature worlds as kinds of stages: `run: dccot.lab.worlds.stages:arithmetic` in a recipe."""

from __future__ import annotations

from dataclasses import dataclass

from dccot.core.config import Positive, Seed
from dccot.lab.worlds.countdown import CountdownWorld, make_countdown
from dccot.lab.worlds.exact_task import make_model, write_problems
from dccot.lab.worlds.lists import ListsConfig, make_lists
from dccot.lab.worlds.parts import PartsConfig, make_parts
from dccot.lab.worlds.world import WorldConfig, make_world
from dccot.recipe import kind
from dccot.stages import Context


@kind(WorldConfig, alone=True)
def arithmetic(context: Context, config: WorldConfig) -> None:
    """Problems, base demonstrations and an untrained model of the arithmetic world."""
    make_world(config, context.folder)


@kind(ListsConfig, alone=True)
def lists(context: Context, config: ListsConfig) -> None:
    """Problems in plain English for a pretrained model, and sequential solutions."""
    make_lists(config, context.folder)


@kind(PartsConfig, alone=True)
def parts(context: Context, config: PartsConfig) -> None:
    """Problems of 2 to 12 parts, or of sums of sums, base demonstrations and an untrained model."""
    make_parts(config, context.folder)


@kind(CountdownWorld, alone=True)
def countdown(context: Context, config: CountdownWorld) -> None:
    """Countdown problems, searches written down and, if its shape is configured, an untrained model."""
    make_countdown(config, context.folder)


@dataclass
class ExactConfig:
    seed: Seed = 0
    problems: Positive = 200


@kind(ExactConfig, alone=True)
def exact(context: Context, config: ExactConfig) -> None:
    """A question with one right answer of four, and a model that knows how to write, but not which."""
    make_model(context.folder / "model")
    for split in ("train", "test"):
        write_problems(context.folder / f"{split}.jsonl", config.problems)
