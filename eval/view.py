"""One HTML page to browse rollouts: a list with filters and search, and every response as a tree drawn to scale with
its texts.

    dccot view runs/rl/rollouts/step_000010.jsonl.gz                     →  runs/rl/rollouts/step_000010.html
    dccot view a.jsonl b.jsonl --out page.html --model runs/rl --entropy

The page needs no server or network, and its policy forbids any request. Its data is compressed, as base64 in script
elements:

    index        one column per fact (problem, verdict, reward, lengths, …): what the list, filters and sorting need
    block 0…     the texts and log-probs of BLOCK responses each; unpacked when one of them is opened

Tokens are coloured one by one when their tokenizer is known: from --model, or from the run that contains the file.
Otherwise texts are split at the tags, and only the lanes of the tree can be coloured.
"""

from __future__ import annotations

import argparse
import base64
import gzip
import json
import math
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dccot.core.command import Parser, run_cleanly
from dccot.core.config import ConfigError
from dccot.core.files import BadData, read_jsonl, write_atomic
from dccot.core.progress import waiting
from dccot.core.run import Run, step_of
from dccot.data.task import settings_of
from dccot.eval.document import render
from dccot.eval.solve import answer_in
from dccot.model.folder import resolve_model
from dccot.model.tokenizer import open_decoder
from dccot.rollout.response import Response, Segment
from dccot.rollout.tags import SPAWN_CLOSE, SPAWN_OPEN, overshoots, worker_close, worker_open
from dccot.rollout.thread import Thread
from dccot.train.rewards import Graded

if TYPE_CHECKING:
    from dccot.eval.entropy import Scorer

BLOCK = 32  # responses that are unpacked together
HARDLY = 9999  # log-probs are kept as hundredths of a nat below zero, up to this

FIELDS: dict[Any, tuple[str, ...]] = {
    str: ("problem", "question", "text"),
    str | list: ("gold",),
    str | None: ("flaw", "verdict", "answer_verdict"),
    int: ("sample",),
    int | None: ("step",),
    int | float | None: ("reward", "advantage"),
}


def read_rollout(row: Any) -> Graded:
    """The rollout of a line, with every value of a type that the page can show; an error names the one that is not."""
    rollout = Graded.from_json(row)
    for kind, names in FIELDS.items():
        for name in names:
            if not isinstance(value := getattr(rollout, name), kind):
                raise TypeError(f"{name} is {value!r:.40}")
    for segment in rollout.response.segments():
        for name, kind in (("inserted", int), ("sampled", int), ("logprobs", int | float), ("versions", int)):
            values = getattr(segment, name)
            if not isinstance(values, list) or not all(isinstance(value, kind) for value in values):
                raise TypeError(f"{name} is {values!r:.40}")
        if len(segment.logprobs) not in (0, len(segment.sampled)):
            raise ValueError(f"{len(segment.logprobs)} logprobs of {len(segment.sampled)} sampled tokens")
    return rollout


def cut(text: str, response: Response) -> list[str]:
    """The text of every segment in reading order, based only on the tags; joined, they give the text again.

    A tag that a worker wrote out of place may mislead it: token ids would be more reliable, but need their tokenizer.
    """
    found, at = [], 0

    def until(position: int) -> None:
        nonlocal at
        position = len(text) if position < 0 else position
        found.append(text[at:position])
        at = position

    def walk(thread: Thread[Segment], number: int = 0, following: str = "") -> None:
        for _, fork in thread.parts():
            if fork:
                spawn = text.find(SPAWN_OPEN, at)
                until(text.find(worker_open(1), spawn) if spawn >= 0 else -1)
            elif number:
                closed = re.compile(rf"{worker_close(number)}\s*(?={following})").search(text, at)
                until(closed.end() if closed else text.find(following, at))
            else:
                until(-1)
            for i, worker in enumerate(fork, start=1):
                walk(worker, i, worker_open(i + 1) if i < len(fork) else SPAWN_CLOSE)

    walk(response)
    if found:
        found[-1] += text[at:]
    return found


class Pieces:
    """Token ids → the text that each stands for. A character made of several tokens belongs to the last of them."""

    LONGEST_CHARACTER = 8  # tokens

    def __init__(self, decode: Callable[[Sequence[int]], str]):
        self._decode = decode
        self._known: dict[int, str] = {}

    def __call__(self, ids: Sequence[int]) -> list[str]:
        pieces: list[str] = []
        pending: list[int] = []
        for token in ids:
            if token not in self._known:
                self._known[token] = self._decode([token])
            piece = self._known[token]
            if pending or piece.endswith("\N{REPLACEMENT CHARACTER}"):
                pending.append(token)
                whole = self._decode(pending)
                unfinished = whole.endswith("\N{REPLACEMENT CHARACTER}") and len(pending) < self.LONGEST_CHARACTER
                piece = "" if unfinished else whole
                pending = pending if unfinished else []
            pieces.append(piece)
        if pending:
            pieces[-1] = self._decode(pending)
        return pieces


def utf16_length(text: str) -> int:
    """Length as JavaScript counts it."""
    return len(text) if text.isascii() else len(text.encode("utf-16-le")) // 2


# ---- the page ----


@dataclass
class Page:
    """Collects rollouts and writes the page; `pieces` and `scorer` add what needs a model."""

    pieces: Pieces | None = None
    scorer: Scorer | None = None
    columns: dict[str, list] = field(default_factory=dict)
    problems: dict[tuple, int] = field(default_factory=dict)
    _waiting: list[tuple[Response, list[dict]]] = field(default_factory=list)
    _blocks: list[str] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.columns.get("problem", ()))

    def add(self, rollout: Graded) -> None:
        gold = rollout.gold if isinstance(rollout.gold, str) else " or ".join(rollout.gold)
        problem = (rollout.problem, rollout.question, gold)
        response = rollout.response
        details = self._details(rollout)  # steps that may fail come before any state changes
        if self.scorer:
            self.scorer.check(response)
        logprobs = [value for segment in response.segments() for value in segment.logprobs]
        row = {
            "problem": len(self.problems),
            "sample": rollout.sample,
            "step": rollout.step,
            "verdict": rollout.verdict,
            "flaw": rollout.flaw,
            "overshoots": overshoots(rollout.text),
            "finish": response.finish.value,
            "reward": _number(rollout.reward),
            "advantage": _number(rollout.advantage),
            "answer": answer_in(rollout.text),
            "longest": response.longest_path,
            "total": response.total_tokens,
            "logprob": _number(sum(logprobs) / len(logprobs)) if logprobs else None,
            "shape": _shape(response),
        }
        row["problem"] = self.problems.setdefault(problem, len(self.problems))
        for name, value in row.items():
            self.columns.setdefault(name, []).append(value)
        self._waiting.append((response, details))
        if len(self._waiting) == BLOCK:
            self._close_block()

    def write(self, path: str | Path, title: str) -> int:
        """Write the page, whole or not at all; its size in bytes."""
        if self._waiting:
            self._close_block()
        index = {"block": BLOCK, "tokens": self.pieces is not None, "problems": list(self.problems)}
        data = {"index": packed(index | {"columns": self.columns})}
        data |= {f"block-{number}": block for number, block in enumerate(self._blocks)}
        write_atomic(path, render("view.html", title=title, data=data))
        return Path(path).stat().st_size

    def _close_block(self) -> None:
        if self.scorer:
            for (_, details), entropies in zip(self._waiting, self.scorer([response for response, _ in self._waiting])):
                for row, values in zip(details, entropies):
                    row["entropies"] = [_centinats(value) for value in values]
        self._blocks.append(packed([details for _, details in self._waiting]))
        self._waiting = []

    def _details(self, rollout: Graded) -> list[dict]:
        """Per segment: its text, how many tokens were inserted, each token's length in the text, log-probs, and where
        other weights began to write.
        """
        texts = iter(cut(rollout.text, rollout.response) if self.pieces is None else ())
        rows = []
        for segment in rollout.response.segments():
            logprobs = [_centinats(-value) for value in segment.logprobs]
            row: dict[str, Any] = {"inserted": len(segment.inserted), "logprobs": logprobs}
            if self.pieces is None:
                row["text"] = next(texts)
            else:
                pieces = self.pieces(segment.tokens)
                row |= {"text": "".join(pieces), "lengths": [utf16_length(piece) for piece in pieces]}
            if changes := _changes(segment.versions):
                row["changes"] = changes
            rows.append(row)
        return rows


def _changes(versions: list[int]) -> list[list[int]]:
    """[sampled token, version] where a segment's weights change; of a whole one, its version."""
    return [[i, version] for i, version in enumerate(versions) if not i or version != versions[i - 1]]


def _shape(thread: Thread[Segment]) -> list:
    """Lengths in reading order: a number is the thread's own text, a list its workers; one that spawned is a shape."""
    shape: list = []
    for segment, fork in thread.parts():
        shape.append(len(segment))
        shape += [[_shape(worker) if worker.forks else worker.total() for worker in fork]] if fork else []
    return shape


def packed(content: Any) -> str:
    text = json.dumps(content, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return base64.b64encode(gzip.compress(text.encode(), 6, mtime=0)).decode()


def _number(value: float | None) -> float | None:
    return round(value, 4) if value is not None and math.isfinite(value) else None


def _centinats(nats: float) -> int:
    return round(100 * max(nats, -HARDLY / 100)) if nats < HARDLY / 100 else HARDLY  # nan also gives HARDLY


def collect(page: Page, paths: Sequence[Path], report=print) -> None:
    """Add every rollout of the files to the page; other lines are reported and skipped."""
    for path in paths:
        for line, row in read_jsonl(path, report=report):
            try:
                page.add(read_rollout(row))
            except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
                report(f"{path}:{line}: not a rollout ({type(error).__name__}: {error!s:.80}); line left out")


def build(paths: Sequence[Path], out: Path, model: str | Path | None, entropy: bool, report=print) -> tuple[int, int]:
    """Write the page of these files; (responses, bytes)."""
    run = Run(paths[0].absolute().parent.parent)  # whose rollouts/ holds the file, if it is a run with a checkpoint
    model = model or (run.folder if run.latest.is_file() else None)
    if entropy and model is None:
        raise ConfigError("--entropy computes with the policy's weights; name it with --model")
    pieces = scorer = None
    if model is not None:
        folder = resolve_model(model)
        pieces = Pieces(open_decoder(folder))
        if entropy:
            from dccot.eval.entropy import Scorer  # which needs torch

            scorer = Scorer(folder, settings_of(model)[1].temperature)
    page = Page(pieces, scorer)
    collect(page, paths, report)
    if not len(page):
        raise BadData(f"{paths[0]}: no rollout found; `dccot view` reads what rl, eval and rollout write")
    size = page.write(out, ", ".join(path.name for path in paths))
    if scorer:
        apart = f"{scorer.difference:.2g} on average at temperature {scorer.temperature:g}"
        report(f"recomputed log-probs differ from the recorded ones by {apart}")
    return len(page), size


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(
        "Make one HTML page to browse rollouts; it opens offline.", "dccot view runs/rl/rollouts/step_000010.jsonl.gz"
    )
    add = parser.add_argument
    add("rollouts", nargs="+", type=Path, help="JSONL files as rl, eval and rollout write them, or the folder of a run")
    add("--out", type=Path, metavar="FILE", help="default: the first file's name with .html")
    default = "default: the run that contains the file"
    add("--model", metavar="PATH", help=f"its tokenizer splits texts into tokens; {default}")
    add("--entropy", action="store_true", help="compute every token's entropy with the model's weights (slow)")
    return run_cleanly(lambda: _run(parser.read(argv)))


def files_of(path: Path) -> list[Path]:
    """The file itself; of a training run's folder the newest step's, of an evaluation's all."""
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise FileNotFoundError(f"{path} does not exist; name a file of rollouts (.jsonl or .jsonl.gz), or a run")
    folder = path / "rollouts" if (path / "rollouts").is_dir() else path
    found = sorted(file for file in folder.iterdir() if is_rollouts(file))
    if not found:
        runs = [str(each.parent) for each in sorted(path.glob("*/rollouts"))]
        inside = f"; name one of {', '.join(runs)}" if runs else "; name a file of rollouts (.jsonl or .jsonl.gz)"
        raise FileNotFoundError(f"{path} is a folder without rollouts{inside}")
    steps = [file for file in found if step_of(file) is not None]
    return steps[-1:] or found


def is_rollouts(file: Path) -> bool:
    """By its name: of a step, or of a rank of an evaluation."""
    return file.name.endswith((".jsonl", ".jsonl.gz")) and (step_of(file) is not None or ".rank" in file.name)


def _run(arguments: argparse.Namespace) -> None:
    arguments.rollouts = [file for path in arguments.rollouts for file in files_of(path)]
    first = arguments.rollouts[0]
    out = arguments.out or first.with_name(first.name.removesuffix(".gz")).with_suffix(".html")
    if out in arguments.rollouts or out.is_dir() or not out.absolute().parent.is_dir():
        raise ConfigError(f"--out {out} cannot be written; name a new .html file in a folder that exists")
    with waiting(f"reading {', '.join(file.name for file in arguments.rollouts)}"):
        responses, size = build(arguments.rollouts, out, arguments.model, arguments.entropy)
    print(f"{out}: {responses:,} responses of {first.name}, {size / 1e6:.1f} MB; open it in a browser")


if __name__ == "__main__":
    sys.exit(main())
