"""`dccot rl` and `dccot sft`. What can be rejected without torch is, within a second; then the training is imported.

A run that is finished already says so, and ends well.
"""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from dccot.core.command import conclude, launch_parser, log_to_terminal, run_cleanly
from dccot.core.config import find_config, load_config, read_yaml, require, to_yaml
from dccot.core.files import BadData, read_jsonl
from dccot.core.progress import first_rank, waiting
from dccot.core.run import Run, step_of
from dccot.data.task import task_of
from dccot.model.config import read_config
from dccot.model.folder import find_model
from dccot.train.config import RLConfig, SFTConfig, check_context, lacking
from dccot.train.rewards import try_own

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Training:
    """A command that trains: its settings, the module with `train(config)`, what --help says."""

    config: type
    module: str
    about: str
    example: str

    def __call__(self, argv: Sequence[str] | None = None, train: Callable[[Any], None] | None = None) -> int:
        """`train` if it is imported already."""
        arguments = launch_parser(self.about, self.example).read(argv)
        log_to_terminal()

        def work() -> None:
            recipe = "stages" in read_yaml(find_config(arguments.config))
            also = "is a recipe, which has several stages"
            require(not recipe, f"{arguments.config} {also}: run it with `dccot pipeline {arguments.config}`")
            config: Any = load_config(self.config, arguments.config, arguments.overrides)
            if arguments.print_config:
                print(to_yaml(config), end="")
                return
            run = Run(Path(config.output) / config.name)
            if finished(run, config):
                said = f"{run} is finished already: {config.steps} steps; steps=… continues it, name=… starts another"
            else:
                said = f"{run} is finished: {config.steps} steps"
                check_inputs(config)
                log.info("%s: %d steps from %s", run, config.steps, config.model.path)
                with waiting("loading torch"):
                    start = train or importlib.import_module(self.module).train
                start(config)
            more = [f"dccot serve {run}"]
            if isinstance(config, RLConfig):
                problems = config.data.validation or config.data.train
                more = [f"dccot eval {run} --problems {problems}", f"dccot view {run}"]
            conclude(said, *more, f"tensorboard --logdir {run}")

        return run_cleanly(work)


def finished(run: Run, config: RLConfig | SFTConfig) -> bool:
    """Whether its newest checkpoint is that of the last step."""
    if config.checkpoint.resume == "never" or not run.latest.is_file():
        return False
    name = run.latest.read_text(errors="replace").strip()
    step = step_of(Path(name))
    return step is not None and step >= config.steps and (run.checkpoints / name / "hf/config.json").is_file()


def check_inputs(config: RLConfig | SFTConfig) -> None:
    """Reject what training would, as far as that is known without torch and a tokenizer."""
    model = read_config(find_model(config.model.path))
    read = [config.replay] if config.replay is not None else [config.data.train, config.data.validation]
    for file in filter(None, read):
        if config.replay is not None:
            require(Path(file).is_file(), f"replay is {file!r}; there is no such file")
        elif isinstance(config, SFTConfig):
            check_demonstrations(file, config.data.named())
        else:
            task = task_of(config)
            problems = task.problems(file, preset=config.data.preset, report=lambda message: None)
            try_own(config, problems[0], task.reward)
    if isinstance(config, RLConfig):
        check_context(config, model)
    if config.wandb is not None and first_rank():
        check_wandb(config.wandb)


def check_wandb(project: str) -> None:
    """That it can log in; its own question would wait for an answer until the engine is there."""
    if os.environ.get("WANDB_MODE") in ("offline", "disabled", "dryrun") or os.environ.get("WANDB_API_KEY"):
        return
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    file = Path(os.environ.get("NETRC", "~/.netrc")).expanduser()
    known = file.is_file() and host in file.read_text(errors="replace").split()
    token = os.environ.get("WANDB_IDENTITY_TOKEN_FILE")
    remedy = "run `wandb login`, set WANDB_API_KEY, or WANDB_MODE=offline"
    require(bool(known or token), f"wandb is {project!r}, and nobody is logged in to {host}: {remedy}")


def check_demonstrations(path: str, columns: Mapping[str, str]) -> None:
    """That there is a row to train on; whether it is well-formed is known when all are read."""
    made = "`dccot data rewrite` and `dccot data import-sft` write such sets"
    require(Path(path).is_file(), f"no SFT set {path!r}; {made}")
    row = next((row for _, row in read_jsonl(path, report=lambda message: None)), {})
    if missing := lacking(row, columns):
        raise BadData(f"{path}: {missing}")


rl = Training(
    RLConfig,
    "dccot.train.rl",
    "Reinforcement learning, one stage.",
    "dccot rl configs/rl/stage1.yaml model.path=runs/sft data.train=deepscaler.jsonl",
)
sft = Training(
    SFTConfig,
    "dccot.train.sft",
    "Supervised fine-tuning.",
    "dccot sft configs/sft.yaml model.path=… data.train=sft.jsonl",
)
