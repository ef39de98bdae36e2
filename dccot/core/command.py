"""What every command shares: exit codes instead of stack traces, stop signals, the command line of training, tables.

    with listening(): …                a command: SIGTERM (pre-emption, a time limit) raises Stopped, SIGINT
                                       KeyboardInterrupt
        with listening(wait=True): …   training: both are recorded in `asked`; the loop stops where it can save, and a
                                       second SIGINT ends it; SIGUSR1 saves and continues

A command that was stopped exits with CONTINUE: nothing is wrong, run it again.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from dccot.core.config import ConfigError, load_config, to_yaml
from dccot.core.files import BadData
from dccot.core.limits import LACKING, lacking, lost_rank
from dccot.core.plugins import PluginError

UNREADABLE = (FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError, PermissionError)
EXPECTED = (ConfigError, BadData, PluginError, *UNREADABLE)
CONTINUE = 75  # EX_TEMPFAIL of sysexits.h
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class Stopped(KeyboardInterrupt):
    """The command was told to stop and has stopped; the same command resumes."""


@dataclass
class Asked:
    """Signals received by this process. All ranks must agree before they act on them."""

    wait: bool = False
    stop: bool = False
    save: bool = False

    def hear(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGUSR1:
            self.save = self.wait  # otherwise there is nothing to save, and the default would kill the process
        elif number == signal.SIGINT and (self.stop or not self.wait):
            raise KeyboardInterrupt
        elif not self.wait:
            raise Stopped
        else:
            self.stop = True
            if os.environ.get("RANK", "0") == "0":  # not print: the signal may have interrupted one
                os.write(2, b"\nstopping as soon as everything can be saved; a second Ctrl-C stops at once\n")


asked = Asked()  # signals belong to the process


@contextlib.contextmanager
def listening(wait: bool = False) -> Iterator[Asked]:
    """Handle SIGNALS; only a process's main thread can, so elsewhere this does nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return
    outside = asked.wait
    handlers = {number: signal.signal(number, asked.hear) for number in SIGNALS}
    asked.wait, asked.stop, asked.save = wait, False, False
    try:
        yield asked
    finally:
        unheeded = asked.stop
        asked.wait, asked.stop, asked.save = outside, False, False
        for number, handler in handlers.items():
            signal.signal(number, handler)
    if unheeded and not outside:  # it arrived after the last check
        raise Stopped


def run_cleanly(work: Callable[[], object]) -> int:
    """Exit code of a command: invalid input gives one line, not a stack trace; an interruption says how to continue."""
    try:
        with listening():
            work()
    except EXPECTED as error:
        _say(f"{getattr(error, 'trace', '')}dccot: {error}")
        return 2
    except Exception as error:
        lacks = lacking(error)
        if not (line := lacks or lost_rank(error)) or os.environ.get("DCCOT_DEBUG"):
            raise
        _say(f"dccot: {line}")
        return LACKING if lacks else 1
    except KeyboardInterrupt as stopped:
        if os.environ.get("RANK", "0") == "0":
            print("\nstopped; rerun the same command to resume", file=sys.stderr)
        return CONTINUE if isinstance(stopped, Stopped) else 130
    return 0


def _say(message: str) -> None:
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        from dccot.core.runtime import say_once  # torch takes seconds to import

        say_once(message)
    else:
        print(message, file=sys.stderr)


def launch(kind: type, train: Callable[[Any], None], argv: Sequence[str] | None, description: str, example: str) -> int:
    """Read the configuration named on the command line and train with it."""
    arguments = launch_parser(description, example).parse_args(argv)
    log_to_terminal()

    def work() -> None:
        config: Any = load_config(kind, arguments.config, arguments.overrides)
        if arguments.print_config:
            print(to_yaml(config), end="")
        else:
            train(config)

    return run_cleanly(work)


def log_to_terminal() -> None:
    level = logging.INFO if os.environ.get("RANK", "0") == "0" else logging.WARNING
    logging.basicConfig(level=level, format="%(message)s")
    for client in ("httpx", "httpx2"):  # they log every request to the hub
        logging.getLogger(client).setLevel(logging.WARNING)


def launch_parser(description: str, example: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, epilog=f"example: {example}")
    parser.add_argument("config", help="YAML file, e.g. one of configs/")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings that override the file")
    parser.add_argument("--print-config", action="store_true", help="show the resolved configuration and stop")
    return parser


def quiet() -> None:
    """Send warnings from dependencies to runs/dccot.log. DCCOT_DEBUG=1 keeps everything on the terminal."""
    if os.environ.get("DCCOT_DEBUG"):
        return
    for name, value in {"TRANSFORMERS_VERBOSITY": "error", "TOKENIZERS_PARALLELISM": "false"}.items():
        os.environ.setdefault(name, value)
    # vLLM reads its variable only when an engine starts, not while it is imported
    logging.getLogger("vllm").setLevel(logging.ERROR)
    logging.captureWarnings(True)
    noise = logging.getLogger("py.warnings")
    noise.propagate = False
    try:
        Path("runs").mkdir(exist_ok=True)
        noise.addHandler(logging.FileHandler("runs/dccot.log", delay=True))
    except OSError:  # an unwritable folder should not stop `dccot inspect`
        noise.addHandler(logging.NullHandler())


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def print_table(title: str, columns: Iterable[str], rows: Iterable[Iterable[str]]) -> None:
    """The first column holds names, the others numbers."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left")
    for row in rows:
        table.add_row(*row)
    console = Console()
    (console if console.is_terminal else Console(width=160)).print(table)
