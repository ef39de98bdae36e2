"""A quality report on a finished SFT set: lengths, rounds, balance, faithfulness to the source, leaks.

dccot data check runs/data/sft.jsonl [--tokenizer MODEL] [--json]

balance     mean over blocks of shortest / longest worker, 1 = all equal
verbatim    share of a worker's words inside a run of five words that also occurs in the source
leak        a worker that names another worker, or states a result (`x = 5`) that another worker of this block reached first
            and that neither the question nor the director's text before the block contains
"""

from __future__ import annotations

import re
import statistics
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from dccot.core.files import BadData, read_jsonl
from dccot.rollout.tags import TAG_PATTERN, IllFormed, Parsed, parse

RUN = 5  # consecutive matching words that count as copied
NAMED_WORKER = re.compile(r"\bworkers?[ _#]?(\d+)\b|\b(?:the )?other workers?\b", re.IGNORECASE)
RESULT = re.compile(r"(?<![\w\\])([A-Za-z]\w*(?:_\{\w+\})?(?:\([^()=]{1,20}\))?)\s*=\s*(-?\d+(?:\.\d+)?(?:/\d+)?)")


@dataclass
class Spread:
    """Minimum, median, mean and maximum of a quantity."""

    values: list[float] = field(default_factory=list)

    def to_json(self) -> dict[str, float]:
        v = self.values
        return {"min": min(v), "median": statistics.median(v), "mean": statistics.fmean(v), "max": max(v)} if v else {}

    def __str__(self) -> str:
        return "   ".join(f"{name} {value:,.4g}" for name, value in self.to_json().items()) or "none"


@dataclass
class SetReport:
    unit: str = "words"
    examples: int = 0
    ill_formed: Counter = field(default_factory=Counter)
    rounds: Counter = field(default_factory=Counter)
    total: Spread = field(default_factory=Spread)
    longest_path: Spread = field(default_factory=Spread)
    parallelism: Spread = field(default_factory=Spread)
    balance: Spread = field(default_factory=Spread)
    verbatim: Spread = field(default_factory=Spread)
    leaks: list[str] = field(default_factory=list)  # "id, round, worker: what"

    def __str__(self) -> str:
        rounds = ", ".join(f"{count:,} × {number}" for number, count in sorted(self.rounds.items()))
        lines = [
            f"examples            {self.examples:,}",
            f"ill-formed          {sum(self.ill_formed.values()):,}"
            + "".join(f"   {flaw} {n:,}" for flaw, n in self.ill_formed.items()),
            f"rounds              {rounds or 'none'}",
            f"length              {self.total}   ({self.unit})",
            f"longest path        {self.longest_path}",
            f"parallelism         {self.parallelism}",
            f"worker balance      {self.balance}",
            f"verbatim in source  {self.verbatim}",
            f"leaks               {len(self.leaks):,}",
        ]
        return "\n".join(lines + [f"  {leak}" for leak in self.leaks[:10]] + (["  …"] if len(self.leaks) > 10 else []))

    def to_json(self) -> dict:
        return {name: value.to_json() if isinstance(value, Spread) else value for name, value in self.__dict__.items()}


def check_set(path: str | Path, *, workers: int = 3, tokenizer=None) -> SetReport:
    """Read an SFT set (id, question, completion, and source where known) and measure it."""
    report = SetReport("tokens" if tokenizer else "words")
    size = (
        (lambda text: len(tokenizer.encode(text, add_special_tokens=False)))
        if tokenizer
        else (lambda text: len(text.split()))
    )
    for line, row in read_jsonl(path):
        missing = [name for name in ("id", "question", "completion") if name not in row]
        if missing:
            raise BadData(f"{path}:{line}: no field {missing[0]!r}; an SFT row has id, question and completion")
        report.examples += 1
        try:
            parsed = parse(row["completion"], workers)
        except IllFormed as error:
            report.ill_formed[error.flaw.value] += 1
            continue
        _measure(report, parsed, row, size)
    if not report.examples:
        raise BadData(f"{path}: no example in it")
    return report


def _measure(report: SetReport, parsed: Parsed, row: dict, size: Callable[[str], int]) -> None:
    report.rounds[len(parsed.rounds)] += 1
    total = path = size(parsed.final)
    known = row["question"]
    source = word_runs(row["source"]) if row.get("source") else None
    for number, round_ in enumerate(parsed.rounds, start=1):
        texts = [TAG_PATTERN.sub("", text) for text in round_.workers]
        lengths = [size(text) for text in texts]
        total += size(round_.director) + sum(lengths)
        path += size(round_.director) + max(lengths)
        known += "\n" + round_.director
        report.balance.values.append(min(lengths) / max(1, max(lengths)))
        if source is not None:
            report.verbatim.values += [verbatim_share(text, source) for text in texts]
        report.leaks += [
            f"{row['id']}, round {number}, worker {worker}: {what}" for worker, what in leaks_in(texts, known)
        ]
        known += "\n" + "\n".join(texts)
    report.total.values.append(total)
    report.longest_path.values.append(path)
    report.parallelism.values.append(total / max(1, path))


def leaks_in(workers: list[str], known: str) -> Iterable[tuple[int, str]]:
    """(worker, what) for everything in a block's texts that its writer could not know. `known` is everything read
    before the block.
    """
    before = _results(known)
    reached: dict[str, int] = {}  # result → the first worker that states it
    for index, text in enumerate(workers, start=1):
        for match in NAMED_WORKER.finditer(text):
            if match.group(1) is None or int(match.group(1)) != index:
                yield index, f"names {match.group().strip()!r}"
        for result in _results(text) - before:
            first = reached.setdefault(result, index)
            if first != index:
                yield index, f"states {result!r}, which worker {first} reached"


def _results(text: str) -> set[str]:
    return {f"{name}={value}" for name, value in RESULT.findall(text)}


def _words(text: str) -> list[str]:
    return TAG_PATTERN.sub(" ", text).split()


def word_runs(text: str) -> set[tuple[str, ...]]:
    """Every run of five words in a text."""
    words = _words(text)
    return {tuple(words[i : i + RUN]) for i in range(len(words) - RUN + 1)}


def verbatim_share(text: str, source_runs: set[tuple[str, ...]]) -> float:
    """Share of the words of `text` that are covered by five-word runs of the source; 1 for a text too short to
    judge.
    """
    words = _words(text)
    if len(words) < RUN:
        return 1.0
    covered: set[int] = set()
    for start in range(len(words) - RUN + 1):
        if tuple(words[start : start + RUN]) in source_runs:
            covered.update(range(start, start + RUN))
    return len(covered) / len(words)
