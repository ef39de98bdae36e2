"""All stages of a recipe (recipe.py), one after another; run again, it continues where it stopped.

    dccot pipeline configs/paper.yaml model=MODEL --check                                  what is missing, in seconds
    torchrun --nproc_per_node 8 -m dccot.pipeline configs/paper.yaml model=MODEL           the whole paper

Every start checks all stages first (preflight.py). Stages share one process and, where the model's shape allows, one engine: a new model is
streamed into it. A stage that is finished leaves a mark and is passed over.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import torch

from dccot.command import run_cleanly
from dccot.config import to_yaml
from dccot.files import write_atomic
from dccot.preflight import check_recipe
from dccot.recipe import Recipe, StagePlan, load_recipe
from dccot.runtime import PATIENCE, Runtime, free_memory, set_timeout
from dccot.stages import KINDS, Context, SharedEngine, load_stage
from dccot.train.run import launch_parser, log_to_terminal


def run_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Check every stage, then run those that are not finished; returns the recipe as resolved."""
    recipe, plans = load_recipe(path, overrides)
    with Runtime.start(PATIENCE) as runtime:
        checked = runtime.broadcast(check_recipe(recipe, plans, runtime.ranks) if runtime.is_main else None)
        checked.require()
        if runtime.is_main:
            write_atomic(recipe.folder / "recipe.yaml", to_yaml(recipe))
        with closing(SharedEngine(plans, recipe.folder)) as engines:
            for number, plan in enumerate(plans, start=1):
                _run_stage(plan, f"[{number}/{len(plans)}] {plan.name}", Context(plan, engines, runtime))
    return recipe


def _run_stage(plan: StagePlan, heading: str, context: Context) -> None:
    if plan.mark.is_file():
        context.say(f"{heading}: done before ({json.loads(plan.mark.read_text())['seconds']:.0f} s)")
        return
    context.say(heading)
    began = time.perf_counter()
    KINDS[plan.stage.run].run(context, load_stage(plan))
    free_memory()  # before the next trainer comes, beside an engine that is awake
    set_timeout(PATIENCE)  # what one rank does alone may take hours; training has set its own
    context.runtime.barrier()
    seconds = time.perf_counter() - began
    if context.runtime.is_main:
        write_atomic(plan.mark, json.dumps({"seconds": seconds}))
    context.runtime.barrier()
    context.say(f"{heading}: {seconds:.0f} s")


def main(argv: Sequence[str] | None = None) -> int:
    parser = launch_parser("All stages of a recipe.", "dccot pipeline configs/paper.yaml model=MODEL --check")
    parser.add_argument("--check", action="store_true", help="say what is missing, what it will take, and stop")
    arguments = parser.parse_intermixed_args(argv)
    log_to_terminal()

    def work() -> None:
        recipe, plans = load_recipe(arguments.config, arguments.overrides)
        if arguments.print_config:
            print(to_yaml(recipe), end="")
            print("".join(f"\n# ---- stage {plan.name}\n{to_yaml(load_stage(plan))}" for plan in plans), end="")
        elif arguments.check:
            checked = check_recipe(recipe, plans, int(os.environ.get("WORLD_SIZE", "0")) or torch.cuda.device_count() or 8)
            checked.require()
            print(checked)
        else:
            run_recipe(arguments.config, arguments.overrides)

    return run_cleanly(work)


if __name__ == "__main__":
    sys.exit(main())
