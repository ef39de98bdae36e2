"""`dccot COMMAND …`: one entry point for everything, without remembering module names.

Each command is a module with `main(argv) -> int`, or a function of one, and its own --help. Warnings from dependencies
go to a log file, not to the terminal.
"""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from collections.abc import Callable, Sequence

from dccot import __version__
from dccot.core.command import as_typed, quiet

COMMANDS = {
    "demo": ("dccot.lab.worlds.demo", "the whole paper in miniature, on a CPU: base → SFT → RL → evaluation → report"),
    "pipeline": ("dccot.pipeline", "all stages of a training recipe, one after another"),
    "sft": ("dccot.train.launch:sft", "supervised fine-tuning"),
    "rl": ("dccot.train.launch:rl", "one stage of reinforcement learning"),
    "rollout": ("dccot.rollouts", "generate responses to a file of problems"),
    "eval": ("dccot.eval.evaluate", "accuracy and longest path on benchmarks; `dccot eval latency` for wall-clock"),
    "report": ("dccot.eval.report", "tables, plots and training curves of runs as one HTML page"),
    "solve": ("dccot.eval.solve", "one problem, live in the terminal, workers side by side"),
    "serve": ("dccot.serve.launch", "serve a model, workers included, through the OpenAI API, with a web page"),
    "view": ("dccot.eval.view", "a page to browse rollouts"),
    "export": ("dccot.export", "a trained model with a model card, to share or push to a hub"),
    "model": ("dccot.lab.model_check", "check a model folder, or create one from a GGUF file"),
    "data": ("dccot.data.cli", "problem sets and the SFT set"),
    "plan": ("dccot.cost", "memory of a run, or hours, disk and API tokens of a recipe, before it is launched"),
    "rehearse": ("dccot.lab.rehearsal.rehearse", "run the training step at its real size on fake GPUs"),
    "inspect": ("dccot.lab.critic.inspect", "registers, shared memory and instructions of the kernels, without a GPU"),
    "gpu-check": ("dccot.lab.gpu_check.checks", "check a machine with GPUs: independent checks, one report"),
    "bench": ("dccot.lab.bench.__main__", "every benchmark, or one of them"),
}
INSTEAD = {  # what others call it
    "train": ["sft", "rl", "pipeline"],
    "finetune": ["sft"],
    "grpo": ["rl"],
    "evaluate": ["eval"],
    "generate": ["rollout", "solve"],
    "chat": ["solve", "serve"],
    "download": ["data fetch"],
    "fetch": ["data fetch"],
    "check": ["pipeline RECIPE --check", "gpu-check", "model check"],
    "push": ["export RUN FOLDER --push NAME/MODEL"],
}


def usage() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {about}" for name, (_, about) in COMMANDS.items()]
    explained = as_typed("`dccot COMMAND --help` explains each, with an example.")
    return "\n".join(["usage: dccot COMMAND …", "", *lines, "", explained])


def main(argv: Sequence[str] | None = None) -> int:
    try:
        return dispatch(list(sys.argv[1:] if argv is None else argv))
    except KeyboardInterrupt:
        print("\nstopped; rerun the same command to resume", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `dccot … | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def dispatch(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(usage())
        return 0 if argv else 2
    if argv[0] == "--version":
        print(__version__)
        return 0
    if argv[0] not in COMMANDS:
        near = INSTEAD.get(argv[0]) or difflib.get_close_matches(argv[0], COMMANDS, n=1, cutoff=0.4)
        hint = f"did you mean `dccot {'` or `dccot '.join(near)}`?" if near else "`dccot --help` lists the commands."
        hint = as_typed(hint)
        print(f"dccot: no command {argv[0]!r}; {hint}", file=sys.stderr)
        return 2
    quiet()
    sys.argv = [f"dccot {argv[0]}", *argv[1:]]  # what --help and error messages show
    return command(argv[0])(argv[1:]) or 0


def command(name: str) -> Callable[[Sequence[str] | None], int]:
    module, _, function = COMMANDS[name][0].partition(":")
    return getattr(importlib.import_module(module), function or "main")


if __name__ == "__main__":
    sys.exit(main())
