"""Problems: an id, a question, a gold answer, from JSONL or parquet, whatever their fields are called.

    load_problems("train.jsonl")                                           fields id, question, gold
    load_problems("rows.parquet", fields=Fields(question="problem", gold="answer"))
    load_problems("runs/data/aime24.jsonl")                                as `dccot data fetch aime24` wrote it

A row without an id gets its index in the file, counted from 0 over good and bad rows alike, so skipping a row does not
rename others.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from dccot.core.files import BadData, read_jsonl, write_jsonl_atomic
from dccot.core.plugins import shown

Report = Callable[[str], None]


@dataclass(frozen=True)
class Problem:
    id: str
    question: str
    gold: str | list[str]  # several golds: any of them is right


@dataclass(frozen=True)
class Fields:
    """A file's names for the three fields we need; a missing id is generated."""

    id: str = "id"
    question: str = "question"
    gold: str = "gold"
    gold_after: str | None = None  # the gold is the text after this mark in its field, without commas


@dataclass
class Columns:
    """What a configuration says of a file whose fields are called otherwise."""

    question: str | None = None  # name of the column with the question; None: question
    gold: str | None = None  # name of the column with the right answer; None: gold

    def named(self) -> dict[str, str]:
        return {name: found for name in ("question", "gold") if (found := getattr(self, name))}


@dataclass(frozen=True)
class HubSet:
    """A problem set on the Hugging Face hub, read from the parquet version that the hub makes of every public set."""

    repo: str
    split: str
    about: str
    count: int | None  # problems in it
    fields: Fields
    config: str = "default"

    @property
    def file(self) -> str:
        return f"{self.config}/{self.split}/0000.parquet"


_PROBLEM, _QUESTION = Fields(question="problem", gold="answer"), Fields(gold="answer")
_HMMT, _MATH = Fields("problem_idx", "problem", "answer"), Fields("unique_id", "problem", "answer")
_OLYMPIAD, _GSM8K = Fields(gold="final_answer"), Fields(gold="answer", gold_after="####")
HUB_SECONDS = 30.0  # for the hub to answer at all; without an answer the cache is used
_ENGLISH = "English, text only, open-ended"
PRESETS = {
    "deepscaler": HubSet("agentica-org/DeepScaleR-Preview-Dataset", "train", "training", None, _PROBLEM),
    "aime24": HubSet("HuggingFaceH4/aime_2024", "train", "AIME 2024", 30, _PROBLEM),
    "amc23": HubSet("math-ai/amc23", "test", "AMC 23", 40, _QUESTION),
    "hmmt25": HubSet("MathArena/hmmt_feb_2025", "train", "HMMT Feb 2025", 30, _HMMT),
    "math500": HubSet("HuggingFaceH4/MATH-500", "test", "MATH-500", 500, _MATH),
    "minerva": HubSet("math-ai/minervamath", "test", "Minerva Math", 272, _QUESTION),
    "olympiadbench": HubSet("Hothan/OlympiadBench", "train", _ENGLISH, 674, _OLYMPIAD, "OE_TO_maths_en_COMP"),
    "gsm8k": HubSet("openai/gsm8k", "train", "grade school, training", 7473, _GSM8K, "main"),
}


def load_problems(
    path: str | Path,
    *,
    fields: Fields | None = None,
    preset: str | None = None,
    columns: Mapping[str, str] | None = None,
    strict: bool = False,
    report: Report = print,
) -> list[Problem]:
    """Problems of a JSONL or parquet file in file order. Bad rows and repeated ids are reported and skipped; `strict`
    raises. `columns` rename fields in rows that have them; others may be as `dccot data fetch` wrote them.

    `preset` sets the field names of a raw file of that set; a count that differs from the set's is reported. A file
    with no usable row is always an error.
    """
    path, known = Path(path), hub_set(preset) if preset else None
    fields = fields or (known.fields if known else Fields())
    renamed = replace(fields, **columns) if columns else fields
    faults: list[str] = []
    problems: dict[str, Problem] = {}
    skipped = 0
    if not path.is_file():
        hint = f"; `dccot data fetch {path.stem}` downloads it" if path.stem in PRESETS else ""
        raise BadData(f"no problem file {str(path)!r}{hint}")
    for place, index, row in read_rows(path, strict, report):
        try:
            problem = problem_in(row, renamed if renamed.question in row else fields, index)
            if problem.id in problems:
                raise BadData(f"id {problem.id!r} occurs twice")
            problems[problem.id] = problem
        except BadData as fault:
            if strict:
                raise BadData(f"{place}: {fault}") from None
            skipped += 1
            faults.append(f"{place}: {fault}")
            if skipped <= 20:
                report(f"{place}: {fault}; row skipped")
    found = f"{path}: {len(problems):,} problems"
    if skipped:
        report(f"{found}, {skipped:,} rows skipped")
    if not problems:
        why = f"no usable row ({faults[0]})" if faults else "no usable row"
        named = "columns with other names: data.question=… data.gold=…"
        raise BadData(f"{path}: {why}; a row has {fields.question} and {fields.gold}, {named}")
    if known and known.count not in (None, len(problems)):
        report(f"{found}, {preset} usually has {known.count:,}; compare results with that in mind")
    return list(problems.values())


def read_rows(path: Path, strict: bool = False, report: Report = print) -> Iterator[tuple[str, int, dict]]:
    """(place for messages, index, row) of every row of a JSONL or parquet file, or of a JSON file with a list."""
    if path.suffix == ".json" and (listed := _listed(path)) is not None:
        yield from ((f"{path} row {index}", index, row) for index, row in enumerate(listed))
        return
    if path.suffix != ".parquet":
        for line, row in read_jsonl(path, strict=strict, report=report):
            yield f"{path}:{line}", line - 1, row
        return
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as table:
            rows = (row for batch in table.iter_batches(1024) for row in batch.to_pylist())
            for index, row in enumerate(rows):
                yield f"{path} row {index}", index, row
    except pyarrow.ArrowException as error:
        raise BadData(f"{path}: not a parquet file that can be read ({str(error).splitlines()[0]})") from None


def _listed(path: Path) -> list[dict] | None:
    """The objects of a JSON file that is one list; None if it is not: the hub has JSON lines under this name, too."""
    with path.open("rb") as file:
        if not file.read(1024).lstrip().startswith(b"["):
            return None
    try:
        found = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise BadData(f"{path}: not a JSON file that can be read ({error})") from None
    if not all(isinstance(row, dict) for row in found):
        raise BadData(f"{path}: it must be a list of objects")
    return found


def problem_in(row: dict, fields: Fields, index: int) -> Problem:
    """The problem in a row; raises if the row is bad."""
    for name in (fields.question, fields.gold):
        if row.get(name) is None:
            raise BadData(f"no field {name!r} (the row has {', '.join(map(repr, row)) or 'none'})")
    question, gold, id_ = row[fields.question], row[fields.gold], row.get(fields.id)
    if not isinstance(question, str) or not question.strip():
        raise BadData(f"field {fields.question!r} must be a text that is not empty, found {shown(question, 60)}")
    golds = [_gold(value, fields) for value in (gold if isinstance(gold, list) else [gold])]
    if not golds or None in golds:
        raise BadData(f"field {fields.gold!r} must be a number, a text or a list of them, found {shown(gold, 60)}")
    if id_ is not None and not isinstance(id_, str | int):
        raise BadData(f"field {fields.id!r} must be a text or an integer, found {shown(id_, 60)}")
    texts = [text for text in golds if text is not None]
    return Problem(str(index if id_ is None else id_), question, texts if isinstance(gold, list) else texts[0])


def _gold(value: Any, fields: Fields) -> str | None:
    """A gold answer as text; None if it is none. Whole floats are integers, which parquet may store as floats."""
    if fields.gold_after is not None:  # a solution that ends with it, e.g. `… #### 1,234`
        _, found, after = value.rpartition(fields.gold_after) if isinstance(value, str) else ("", "", "")
        if not found:
            raise BadData(f"field {fields.gold!r} has no {fields.gold_after!r}, found {shown(value, 60)}")
        value = after.replace(",", "")
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return None
    if isinstance(value, float):
        if not math.isfinite(value):
            return None
        value = int(value) if value.is_integer() else value
    return str(value).strip() or None


def hub_set(name: str) -> HubSet:
    if name not in PRESETS:
        raise BadData(f"unknown problem set {name!r}; known are {', '.join(PRESETS)}")
    return PRESETS[name]


def fetch(name: str, folder: str | Path = "runs/data", *, report: Report = print) -> Path:
    """Download a preset and write it as `folder/name.jsonl` with the fields id, question, gold."""
    wanted, target = hub_set(name), Path(folder) / f"{name}.jsonl"
    problems = load_problems(_download(wanted, target), preset=name, report=report)
    write_jsonl_atomic(target, map(asdict, problems))
    return target


def _download(wanted: HubSet, target: Path) -> Path:
    from huggingface_hub import constants, hf_hub_download
    from huggingface_hub.utils import get_session

    online = not constants.HF_HUB_OFFLINE
    if online:  # tried once: the hub's own client retries for minutes
        try:
            get_session().head(constants.ENDPOINT, timeout=HUB_SECONDS)
        except Exception:  # whatever HTTP client the hub library uses
            online = False
    place: dict[str, Any] = {"repo_type": "dataset", "revision": "refs/convert/parquet"}
    try:
        return Path(hf_hub_download(wanted.repo, wanted.file, **place, local_files_only=not online))
    except Exception as error:
        if online:
            raise BadData(f"cannot download {wanted.file} of {wanted.repo}: {str(error).splitlines()[0]}") from None
        remedy = f"run this where there is a network and copy the file it writes to {target}"
        raise BadData(f"cannot reach {constants.ENDPOINT} to download {wanted.repo}; {remedy}") from None


# ---- the order in which training draws them ----


class HasId(Protocol):
    @property
    def id(self) -> str: ...


P = TypeVar("P", bound=HasId)


class ProblemStream(Generic[P]):
    """An endless shuffled stream of problems, or of anything else with an id, that can be stopped and resumed anywhere.

    Epoch e is a permutation drawn from (seed, e) alone, so the state is two integers and the order does not depend on
    how many ranks read it: every rank draws the same batch and takes its own part, e.g. `batch[rank::ranks]`. Batches
    can cross epoch boundaries.
    """

    def __init__(self, problems: Sequence[P], seed: int, batch: int):
        if not problems:
            raise ValueError("the stream has no problems")
        if batch < 1:
            raise ValueError(f"batch is {batch}; it must be at least 1")
        self.problems, self.seed, self.batch = list(problems), seed, batch
        self.epoch, self.position = 0, 0
        self._order = self._shuffled()
        contents = [repr(problem).encode("utf-8", "backslashreplace") for problem in self.problems]
        self.rows = [
            (problem.id, _digest(row)) for problem, row in zip(self.problems, contents)
        ]  # id, checksum of each
        ids = "\n".join(problem.id for problem in self.problems)
        self._made_of = {"seed": seed, "problems": _digest(ids.encode()), "content": _digest(b"".join(contents))}

    def _shuffled(self) -> list[int]:
        order = list(range(len(self.problems)))
        random.Random(f"{self.seed}/{self.epoch}").shuffle(order)
        return order

    def next_batch(self) -> list[P]:
        """The next `batch` problems. A problem can occur twice in a batch only across an epoch boundary."""
        return [self.next() for _ in range(self.batch)]

    def next(self) -> P:
        if self.position == len(self._order):
            self.epoch, self.position = self.epoch + 1, 0
            self._order = self._shuffled()
        self.position += 1
        return self.problems[self._order[self.position - 1]]

    def state(self) -> dict:
        return {**self._made_of, "epoch": self.epoch, "position": self.position}

    def restore(self, state: dict) -> None:
        """Continue right after the last problem drawn when `state` was taken."""
        for name, ours in self._made_of.items():
            if state.get(name, ours) != ours:  # states from older versions have no content
                saved = f"the saved stream position belongs to {name} {state[name]}, this run has {ours}"
                raise BadData(f"{saved}; resume with the same problem file and seed, or start a new run")
        self.epoch, self.position = state["epoch"], state["position"]
        self._order = self._shuffled()


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]
