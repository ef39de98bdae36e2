"""All stages of a recipe (recipe.py), one after another; a rerun resumes where it stopped.

    dccot pipeline configs/paper.yaml --check                                              what is missing, in seconds
    torchrun --standalone --nproc_per_node 8 -m dccot.pipeline configs/paper.yaml          the whole paper
    dccot pipeline configs/paper.yaml --until rewrite                                      the first stages only
    dccot pipeline configs/authors.yaml --quick                                            with its keys under `quick`

Every start checks all stages first (preflight.py). Stages share one process and, if the model's shape allows, one
engine: a new model is streamed into it. A finished stage leaves a mark that records what it was made from and is
skipped; if that has changed since, the start is rejected. `--redo STAGE` moves its results to replaced/ and runs it
again. Rewriting through an API keeps GPUs idle, so it is rejected on several ranks: run it with `--until` as one
process, without GPUs, between two starts on all of them.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from dccot.core.command import conclude, launch_parser, log_to_terminal, run_cleanly
from dccot.core.config import ConfigError, one_of, to_yaml
from dccot.core.files import write_atomic
from dccot.core.progress import waiting
from dccot.core.provenance import record
from dccot.core.runtime import PATIENCE, Runtime, free_memory, gpus, on_rank_zero, set_timeout
from dccot.preflight import Checked, changes, checked_recipe, made_from
from dccot.recipe import Recipe, StagePlan
from dccot.stages import Context, SharedEngine, load_recipe


def first_stages(plans: list[StagePlan], until: str | None) -> list[StagePlan]:
    """All up to and including stage `until`."""
    names = [plan.name for plan in plans]
    one_of(until or names[-1], names, "--until")
    return plans[: names.index(until or names[-1]) + 1]


def run_recipe(
    path: str | Path,
    overrides: Sequence[str] = (),
    redo: Sequence[str] = (),
    quick: bool = False,
    until: str | None = None,
) -> Recipe:
    """Check every stage, then run those that are not finished or are in `redo`; returns the resolved recipe."""
    recipe, plans = load_recipe(path, overrides, quick)
    plans = first_stages(plans, until)
    alone = int(os.environ.get("WORLD_SIZE", "1")) == 1
    if alone:  # what is rejected needs no torch
        _open(recipe, plans, 1, redo)
    with waiting("loading torch"):
        runtime = Runtime.start(PATIENCE)
    with runtime:
        if not alone:
            on_rank_zero(lambda: _open(recipe, plans, runtime.ranks, redo))
        record(recipe.folder, recipe, {}, runtime)
        with closing(SharedEngine(plans, recipe.folder)) as engines:
            for number, plan in enumerate(plans, start=1):
                _run_stage(plan, f"[{number}/{len(plans)}] {plan.name}", Context(plan, engines, runtime))
    return recipe


def _open(recipe: Recipe, plans: Sequence[StagePlan], ranks: int, redo: Sequence[str]) -> None:
    """Reject what cannot run, changing nothing; then lock the folder, write the recipe, move away what is redone."""
    checked = _checked(recipe, plans, ranks, redo)
    recipe.home.claim()
    write_atomic(recipe.home.recipe_file, to_yaml(recipe))
    for remark in checked.remarks():
        print(remark, flush=True)
    for plan in plans:
        # an unfinished one continues: it may be this very redo
        if plan.name in redo and plan.home.finished() and (moved := plan.home.move_aside()):
            print(f"{plan.name}: done again; what was there is in {moved}", flush=True)


def _checked(recipe: Recipe, plans: Sequence[StagePlan], ranks: int, redo: Sequence[str]) -> Checked:
    with waiting(f"{recipe.folder}: checking {len(plans)} stages"):
        return checked_recipe(recipe, plans, ranks, redo)


def _run_stage(plan: StagePlan, heading: str, context: Context) -> None:
    config = plan.load()
    if (seconds := on_rank_zero(lambda: _seconds_of_finished(plan, config))) is not None:
        context.say(f"{heading}: done before ({seconds:.0f} s)")
        return
    context.say(heading)
    source = on_rank_zero(lambda: made_from(plan, config))
    began = time.perf_counter()
    plan.kind(context, config)
    free_memory()  # before the next trainer starts next to an engine that is awake
    set_timeout(PATIENCE)  # single-rank work may take hours; training has set its own
    context.runtime.barrier()
    seconds = time.perf_counter() - began
    if context.runtime.is_main:
        plan.home.finish({"seconds": seconds, "made_from": source})
    context.runtime.barrier()
    context.say(f"{heading}: {seconds:.0f} s")


def _seconds_of_finished(plan: StagePlan, config: Any) -> float | None:
    """How long a finished stage took; an error if an earlier stage, run in this start, has changed its inputs."""
    mark = plan.home.finished()
    if mark is not None and (changed := changes(plan, config, mark)):
        key, what = changed[0]
        raise ConfigError(f"stage {plan.name}: {key} {what}; do it again with --redo {plan.name}")
    return mark["seconds"] if mark else None


def main(argv: Sequence[str] | None = None) -> int:
    parser = launch_parser("All stages of a recipe.", "dccot pipeline configs/paper.yaml --check")
    parser.add_argument("--check", action="store_true", help="report what is missing and what it needs, and stop")
    parser.add_argument("--quick", action="store_true", help="the recipe's own smaller version, in a folder of its own")
    again = "do a finished stage again; may be repeated"
    parser.add_argument("--redo", action="append", default=[], metavar="STAGE", help=again)
    parser.add_argument("--until", metavar="STAGE", help="stop after this stage; later ones are not checked either")
    arguments = parser.read(argv)
    log_to_terminal()

    def work() -> None:
        recipe, plans = load_recipe(arguments.config, arguments.overrides, arguments.quick)
        if arguments.print_config:
            print(to_yaml(recipe), end="")
            print("".join(f"\n# ---- stage {plan.name}\n{to_yaml(plan.load())}" for plan in plans), end="")
        elif arguments.check:
            ranks = int(os.environ.get("WORLD_SIZE", "0")) or gpus() or 8
            if not gpus():
                print(f"no GPU here: checked for {ranks} ranks, without their memory (`dccot plan`)", flush=True)
            print(_checked(recipe, first_stages(plans, arguments.until), ranks, arguments.redo))
        else:
            run_recipe(arguments.config, arguments.overrides, arguments.redo, arguments.quick, arguments.until)
            done, until = first_stages(plans, arguments.until), f" up to {arguments.until}" if arguments.until else ""
            trained = [f"dccot serve {plan.folder}" for plan in done if plan.kind.trains][-1:]
            conclude(f"{recipe.folder} is complete{until}", *trained, f"tensorboard --logdir {recipe.folder}")

    return run_cleanly(work)


if __name__ == "__main__":
    sys.exit(main())
