"""`dccot data COMMAND`: problem sets and the SFT set, step by step.

dccot data fetch deepscaler aime24                                       download and normalise
dccot data problems my.jsonl --question problem --gold answer            what is in a file, and what is wrong with it
dccot data sequential configs/data/sequential.yaml model=… problems=…    one correct sequential solution per problem
dccot data rewrite configs/data/rewrite.yaml source=…                    into the parallel format, by a stronger model
dccot data import-sft amahanka/DC-CoT-SFT-Dataset                        a published set instead of the last two
dccot data check runs/data/sft.jsonl                                     report on a finished set
"""

from __future__ import annotations

import asyncio
import json
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console

from dccot.core.command import Parser, conclude, positive, run_cleanly
from dccot.core.config import load_config, to_yaml
from dccot.core.progress import Progress, first_rank, waiting
from dccot.data.problems import PRESETS, Fields, fetch, load_problems
from dccot.rollout.tags import width


def parsers() -> tuple[Parser, dict[str, Parser]]:
    """That of `dccot data`, and its commands'."""
    top = Parser("Problem sets and the SFT set.", "dccot data fetch aime24 math500")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, run: Callable[[Namespace], None], about: str, example: str) -> Callable[..., Any]:
        made = commands.add_parser(name, help=about, description=about, example=f"dccot data {name} {example}")
        made.set_defaults(run=run)
        return made.add_argument

    add = command("fetch", _fetch, "download problem sets from the Hugging Face hub", "aime24")
    sizes = {name: f", {wanted.count:,}" if wanted.count else "" for name, wanted in PRESETS.items()}
    known = "; ".join(f"{name} ({wanted.about}{sizes[name]})" for name, wanted in PRESETS.items())
    add("names", nargs="+", metavar="NAME", help=known)
    add("--folder", default="runs/data", help="where NAME.jsonl is written (default: %(default)s)")

    add = command("problems", _problems, "look at a file of problems", "train.jsonl --strict")
    add("file", help="JSONL or parquet")
    for name in ("id", "question", "gold"):
        add(f"--{name}", default=name, help=f"the field that holds the {name} (default: %(default)s)")
    add("--strict", action="store_true", help="stop at the first bad row")

    rewritten = "sequential solutions rewritten into the parallel format by a stronger model"
    for name, run, about in (
        ("sequential", _sequential, "sequential solutions by rejection sampling"),
        ("rewrite", _rewrite, rewritten),
    ):
        add = command(name, run, about, f"configs/data/{name}.yaml first=100")
        add("config", help="YAML file")
        add("overrides", nargs="*", metavar="key=value", help="settings that override the file")
        add("--print-config", action="store_true", help="show the resolved configuration and stop")

    about = "a published SFT set, checked like our own"
    add = command("import-sft", _import, about, "amahanka/DC-CoT-SFT-Dataset problems=runs/data/deepscaler.jsonl")
    add("source", help="a data set on the Hugging Face hub (owner/name, owner/name@revision), or a file")
    add("overrides", nargs="*", metavar="key=value", help="settings, e.g. output=sft.jsonl workers=2")
    add("--print-config", action="store_true", help="show the resolved configuration and stop")

    add = command("check", _check, "report on a finished SFT set", "runs/data/sft.jsonl")
    add("file")
    add("--tokenizer", help="count tokens of this model instead of words")
    add("--workers", type=width, default=3, help="of every block: 3, or [1,8] if tasks are listed (default: 3)")
    add("--depth", type=positive, default=1, help="levels of workers (default: 1)")
    add("--json", action="store_true", help="for programs")
    return top, commands.choices


def _fetch(arguments: Namespace) -> None:
    for name in arguments.names:
        with waiting(f"downloading {name}"):
            path = fetch(name, arguments.folder)
        conclude(f"{path}: {len(load_problems(path)):,} problems", f"dccot data problems {path}")


def _problems(arguments: Namespace) -> None:
    fields = Fields(arguments.id, arguments.question, arguments.gold)
    problems = load_problems(arguments.file, fields=fields, strict=arguments.strict)
    first = f"{problems[0].id}: {problems[0].question[:100]!r} → {problems[0].gold!r}"
    print(f"{arguments.file}: {len(problems):,} problems; the first is {first}")


def _sequential(arguments: Namespace) -> None:
    from dccot.data.sft_set import SequentialConfig, solve_sequentially

    work = lambda config, show: solve_sequentially(config, progress=show)
    _run(SequentialConfig, arguments, "solved", work, "dccot data rewrite configs/data/rewrite.yaml source={}")


def _rewrite(arguments: Namespace) -> None:
    from dccot.data.sft_set import RewriteConfig, rewrite

    _run(RewriteConfig, arguments, "rewritten", lambda config, show: asyncio.run(rewrite(config, show)), TRAIN)


def _import(arguments: Namespace) -> None:
    from dccot.data.import_sft import ImportConfig, import_sft

    _run(ImportConfig, arguments, "checked", import_sft, TRAIN, source=arguments.source)


Work = Callable[[Any, Callable[..., None]], Any]
TRAIN = "dccot sft configs/sft.yaml model.path=MODEL data.train={}"


def _run(kind: type, arguments: Namespace, title: str, work: Work, following: str, **settings: str) -> None:
    """Do the work with a progress bar on rank 0 and print its summary; or only print the configuration."""
    file = None if settings else arguments.config
    config: Any = load_config(kind, file, arguments.overrides, settings.items())
    if arguments.print_config:
        print(to_yaml(config), end="")
        return
    is_main, console = first_rank(), Console(stderr=True, highlight=False)
    with Progress(title, active=is_main, console=console) as progress:
        summary = work(config, lambda done, total, text="": progress.show(done, text, total=total))
    if summary is not None:
        conclude(f"{summary}\n→ {config.output}", following.format(config.output))


def _check(arguments: Namespace) -> None:
    from dccot.data.sft_set import check_set

    tokenizer = None
    if arguments.tokenizer:
        from dccot.model.tokenizer import open_tokenizer

        tokenizer = open_tokenizer(arguments.tokenizer)
    report = check_set(arguments.file, workers=arguments.workers, depth=arguments.depth, tokenizer=tokenizer)
    print(json.dumps(report.to_json()) if arguments.json else report)


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    top, commands = parsers()
    # argparse itself allows no options between the words of a subcommand
    arguments = commands[words[0]].read(words[1:]) if words and words[0] in commands else top.parse_args(words)
    return run_cleanly(lambda: arguments.run(arguments))


if __name__ == "__main__":
    sys.exit(main())
