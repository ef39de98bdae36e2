"""`dccot data COMMAND`: problem sets and the SFT set, step by step.

dccot data fetch deepscaler aime24                                       download and normalise
dccot data problems my.jsonl --question problem --gold answer            what is in a file, and what is wrong with it
dccot data sequential configs/data/sequential.yaml model=… problems=…    one correct sequential solution per problem
dccot data rewrite configs/data/rewrite.yaml source=…                    into the parallel format, by a stronger model
dccot data check runs/data/sft.jsonl                                     report on a finished set
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from collections.abc import Sequence
from typing import TypeVar

from rich.console import Console

from dccot.core.command import run_cleanly
from dccot.core.config import load_config, to_yaml
from dccot.core.progress import Progress
from dccot.data.problems import PRESETS, Fields, fetch, load_problems

C = TypeVar("C")


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        description="Problem sets and the SFT set.", epilog="example: dccot data fetch aime24 math500"
    )
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")

    known = "; ".join(
        f"{name} ({wanted.about}{f', {wanted.count:,}' if wanted.count else ''})" for name, wanted in PRESETS.items()
    )
    one = commands.add_parser(
        "fetch", help="download problem sets from the Hugging Face hub", epilog="example: dccot data fetch aime24"
    )
    one.add_argument("names", nargs="+", metavar="NAME", help=known)
    one.add_argument("--folder", default="runs/data", help="where NAME.jsonl is written (default: %(default)s)")
    one.set_defaults(run=_fetch)

    one = commands.add_parser(
        "problems", help="look at a file of problems", epilog="example: dccot data problems train.jsonl --strict"
    )
    one.add_argument("file", help="JSONL or parquet")
    for name in ("id", "question", "gold"):
        one.add_argument(f"--{name}", default=name, help=f"the field that holds the {name} (default: %(default)s)")
    one.add_argument("--strict", action="store_true", help="stop at the first bad row")
    one.set_defaults(run=_problems)

    for name, run, about in (
        ("sequential", _sequential, "sequential solutions by rejection sampling"),
        ("rewrite", _rewrite, "sequential solutions rewritten into the parallel format by a stronger model"),
    ):
        one = commands.add_parser(
            name, help=about, epilog=f"example: dccot data {name} configs/data/{name}.yaml first=100"
        )
        one.add_argument("config", help="YAML file")
        one.add_argument("overrides", nargs="*", metavar="key=value", help="settings that override the file")
        one.add_argument("--print-config", action="store_true", help="show the resolved configuration and stop")
        one.set_defaults(run=run)

    one = commands.add_parser(
        "check", help="report on a finished SFT set", epilog="example: dccot data check runs/data/sft.jsonl"
    )
    one.add_argument("file")
    one.add_argument("--tokenizer", help="count tokens of this model instead of words")
    one.add_argument("--workers", type=int, default=3)
    one.add_argument("--json", action="store_true", help="for programs")
    one.set_defaults(run=_check)
    return top


def _fetch(arguments: argparse.Namespace) -> None:
    for name in arguments.names:
        path = fetch(name, arguments.folder)
        print(f"{path}: {len(load_problems(path)):,} problems")


def _problems(arguments: argparse.Namespace) -> None:
    fields = Fields(arguments.id, arguments.question, arguments.gold)
    problems = load_problems(arguments.file, fields=fields, strict=arguments.strict)
    first = problems[0]
    print(
        f"{arguments.file}: {len(problems):,} problems; the first is {first.id}: {first.question[:100]!r} → {first.gold!r}"
    )


def _sequential(arguments: argparse.Namespace) -> None:
    from dccot.data.sft_set import SequentialConfig, solve_sequentially

    config = _config(SequentialConfig, arguments)
    if config is not None:
        with _progress("solved") as progress:
            summary = solve_sequentially(config, progress=lambda done, total: progress.show(done, total=total))
        if summary is not None:
            print(f"{summary}\n→ {config.output}")


def _rewrite(arguments: argparse.Namespace) -> None:
    from dccot.data.sft_set import RewriteConfig, rewrite

    config = _config(RewriteConfig, arguments)
    if config is not None:
        with _progress("rewritten") as progress:
            summary = asyncio.run(rewrite(config, lambda done, total: progress.show(done, total=total)))
        print(f"{summary}\n→ {config.output}")


def _check(arguments: argparse.Namespace) -> None:
    from dccot.data.sft_set import check_set

    tokenizer = None
    if arguments.tokenizer:
        from dccot.model.tokenizer import open_tokenizer

        tokenizer = open_tokenizer(arguments.tokenizer)
    report = check_set(arguments.file, workers=arguments.workers, tokenizer=tokenizer)
    print(json.dumps(report.to_json()) if arguments.json else report)


def _config(kind: type[C], arguments: argparse.Namespace) -> C | None:
    """The resolved configuration; None if it was only printed."""
    config = load_config(kind, arguments.config, arguments.overrides)
    if arguments.print_config:
        print(to_yaml(config), end="")
        return None
    return config


def _progress(title: str) -> Progress:
    return Progress(title, active=os.environ.get("RANK", "0") == "0", console=Console(stderr=True, highlight=False))


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parser().parse_args(argv)
    return run_cleanly(lambda: arguments.run(arguments))


if __name__ == "__main__":
    sys.exit(main())
