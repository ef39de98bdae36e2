"""The miniature worlds as kinds of stages: `run: dccot.lab.worlds.stages:arithmetic` in a recipe."""

from __future__ import annotations

from dccot.lab.worlds.lists import ListsConfig, make_lists
from dccot.lab.worlds.world import WorldConfig, make_world
from dccot.stages import Context, Kind, seed_setting


def arithmetic() -> Kind:
    """Problems, base demonstrations and an untrained model of the arithmetic world."""

    def run(context: Context, config: WorldConfig) -> None:
        if context.runtime.is_main:
            make_world(config, context.folder)

    return Kind(WorldConfig, run, lambda plan: [seed_setting(plan)])


def lists() -> Kind:
    """Problems in plain English for a pretrained model, and sequential solutions."""

    def run(context: Context, config: ListsConfig) -> None:
        if context.runtime.is_main:
            make_lists(config, context.folder)

    return Kind(ListsConfig, run, lambda plan: [seed_setting(plan)])
