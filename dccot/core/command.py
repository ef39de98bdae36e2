"""What every command shares: exit codes instead of stack traces, stop signals, command lines, tables, last words.

    with listening(): …                a command: SIGTERM (pre-emption, a time limit) raises Stopped, SIGINT
                                       KeyboardInterrupt
        with listening(wait=True): …   training: both are recorded in `asked`; the loop stops where it can save, and a
                                       second SIGINT ends it; SIGUSR1 saves and continues

A command that was stopped exits with CONTINUE: nothing is wrong, run it again.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import logging
import os
import re
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from rich import box
from rich.console import Console
from rich.table import Table

from dccot.core.config import ConfigError
from dccot.core.files import BadData
from dccot.core.limits import LACKING, lacking, lost_rank
from dccot.core.plugins import PluginError
from dccot.core.progress import first_rank

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
            if first_rank():  # not print: the signal may have interrupted one
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
        said = str(error)
        if isinstance(error, OSError) and error.strerror and error.filename:
            said = f"{error.filename}: {error.strerror}"
        _say(as_typed(f"{getattr(error, 'trace', '')}dccot: {said}"))
        return 2
    except Exception as error:
        lacks = lacking(error)
        if not (line := lacks or lost_rank(error)) or os.environ.get("DCCOT_DEBUG"):
            raise
        _say(f"dccot: {line}")
        return LACKING if lacks else 1
    except KeyboardInterrupt as stopped:
        if first_rank():
            print("\nstopped; rerun the same command to resume", file=sys.stderr)
        return CONTINUE if isinstance(stopped, Stopped) else 130
    return 0


def as_typed(text: str) -> str:
    """With every command in it, at its start or after a backtick, as this user can type it: as long as the environment
    is not activated, they are found by their path only.
    """
    return re.sub(r"(?:^|(?<=`))(?:dccot|hf|tensorboard|wandb)(?= )", lambda found: _program(found[0]), text)


@cache
def _program(name: str) -> str:
    here, found = Path(sys.executable).with_name(name), shutil.which(name)
    if not here.is_file() or (found and os.path.samefile(found, here)):
        return name
    return str(here.relative_to(Path.cwd()) if here.is_relative_to(Path.cwd()) else here)


def conclude(made: object, *commands: str) -> None:
    """A command's last words: what it has made, and commands that do something with it."""
    if first_rank():
        print("\n".join([f"{made}", *(f"  {as_typed(command)}" for command in commands)]), flush=True)


def _say(message: str) -> None:
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        from dccot.core.runtime import say_once  # torch takes seconds to import

        say_once(message)
    else:
        print(message, file=sys.stderr)


def log_to_terminal() -> None:
    level = logging.INFO if first_rank() else logging.WARNING
    logging.basicConfig(level=level, format="%(message)s")
    for client in ("httpx", "httpx2"):  # they log every request to the hub
        logging.getLogger(client).setLevel(logging.WARNING)


class Parser(argparse.ArgumentParser):
    """A command line with an example, which a mistake shows in one line. Options may be anywhere between words."""

    def __init__(self, description: str, example: str, **more: Any):
        super().__init__(description=description, epilog=f"example: {as_typed(example)}", **more)
        self.example = as_typed(example)

    def error(self, message: str) -> NoReturn:
        message = message.replace(", key=value", "")  # of which there may be none
        unknown, _, words = message.partition("unrecognized arguments: --")
        if not unknown and words:
            message += self._instead(*re.split("[= ]", words)[:2])
        _say(f"{self.prog}: {message}; for example: {self.example}")
        self.exit(2)

    def _instead(self, name: str, value: str = "") -> str:
        options = [option.lstrip("-") for option in self._option_string_actions]
        if close := difflib.get_close_matches(name, options, n=1, cutoff=0.6):
            return f"; did you mean --{close[0]}?"
        settings = any(action.metavar == "key=value" for action in self._actions)
        return f"; settings have no dashes: {name.replace('-', '_')}={value or '…'}" if settings else ""

    def read(self, argv: Sequence[str] | None) -> argparse.Namespace:
        return self.parse_intermixed_args(argv)


def launch_parser(description: str, example: str) -> Parser:
    parser = Parser(description, example)
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
