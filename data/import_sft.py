"""A published SFT set, checked like our own and written as the file that `dccot sft` trains on.

    dccot data import-sft amahanka/DC-CoT-SFT-Dataset                    a data set on the hub, pinned with @revision
    dccot data import-sft rows.parquet output=runs/data/sft.jsonl        or a file: JSONL, JSON or parquet

Fields may be called as in the release's scripts or as in our own sets (FIELDS). A row is left out, and counted by
reason, if it lacks a field, repeats another, is ill-formed, has a wrong answer, or is too long. Answers are checked
against the row's own gold or, if it has none, against the problem with the same question in `problems`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from dccot.core.config import Positive, required
from dccot.core.files import BadData, checksum, write_jsonl_atomic
from dccot.core.provenance import record
from dccot.core.runtime import Runtime
from dccot.data.judge import GradingConfig, Judge
from dccot.data.problems import Fields, Problem, problem_in, read_rows
from dccot.data.prompts import PromptConfig, UnusablePrompt
from dccot.data.sft_set import accept
from dccot.data.task import TaskName, task_of
from dccot.model.folder import find_model
from dccot.model.hub import hub_files, hub_folder, is_hub_id, verify_hub_folder
from dccot.model.tokenizer import open_tokenizer
from dccot.rollout.tags import TagIds, flaw_of, parse
from dccot.rollout.thread import Thread

FIELDS = {
    "id": ("id",),
    "question": ("problem", "question"),
    "completion": (
        "parallel_rewritten_completion",
        "completion",
    ),  # the first that is there
    "gold": ("gold", "answer", "ground_truth", "final_answer"),
}


@dataclass
class ImportConfig:
    source: Annotated[str, required("name a hub id or a file")] = ""  # hub id, or a JSONL, JSON or parquet file
    output: str = "runs/data/sft.jsonl"  # file of the checked set
    task: TaskName = "math"  # or your own: my_package.my_module:MyTask
    workers: Positive = 3  # of every block
    problems: str | None = None  # problems whose golds check rows that have none, found by their question
    model: str | None = None  # whose tokenizer counts tokens; None: lengths are left to `dccot sft`
    max_tokens: Positive = 10_000  # of an example, with its prompt and every worker twice
    prompt: PromptConfig = field(default_factory=lambda: PromptConfig(open_think=False))
    grading: GradingConfig = field(default_factory=GradingConfig)


@dataclass
class ImportSummary:
    rows: int
    kept: int
    unchecked: int  # of those kept: answers without a gold
    reasons: dict[str, int]  # why rows were left out → how many

    def __str__(self) -> str:
        lines = [f"{self.kept:,} of {self.rows:,} rows kept"]
        if self.unchecked:
            lines.append(f"  {self.unchecked:>6,} of them without a gold: the answer was not checked (problems=FILE)")
        return "\n".join(lines + [f"  {count:>6,} left out: {reason}" for reason, count in self.reasons.items()])


def import_sft(config: ImportConfig, progress: Callable[[int, int], None] = lambda done, total: None) -> ImportSummary:
    """Read, check, write. One process does it."""
    files, task = _files(config.source), task_of(config)
    rows = [row for path in files for _, _, row in read_rows(path)]
    known = task.problems(config.problems, report=lambda message: None) if config.problems else []
    golds = {_plain(problem.question): problem.gold for problem in known}
    tokenizer = open_tokenizer(find_model(config.model)) if config.model else None
    reasons, kept, seen = Counter[str](), dict[str, dict](), set[tuple[str, str]]()
    with task.open_judge() as judge:
        for number, row in enumerate(rows):
            try:
                found = _example(row, number, golds)
                if (text := (_plain(found["question"]), found["completion"])) in seen:
                    raise BadData("repeats an earlier row")
                if found["id"] in kept:
                    raise BadData("its id occurs twice")
                if reason := _fault(found, judge, config.workers) or too_long(found, config, tokenizer):
                    raise BadData(reason)
            except BadData as fault:
                reasons[str(fault)] += 1
            else:
                seen.add(text)
                kept[found["id"]] = found
            progress(number + 1, len(rows))
    unchecked = sum("gold" not in row for row in kept.values())
    summary = ImportSummary(len(rows), len(kept), unchecked, dict(reasons.most_common()))
    if not kept:
        raise BadData(f"{config.source}: no usable row. {' '.join(str(summary).split())}")
    record(Path(config.output), config, {"source": {path.name: checksum(path) for path in files}}, Runtime.alone())
    write_jsonl_atomic(config.output, kept.values())
    return summary


def _files(source: str) -> list[Path]:
    """What is read of a source: a file, or the data files of a hub id, those for training if it names some so."""
    if not is_hub_id(source):
        if not Path(source).is_file():
            raise BadData(
                f"no file {source!r}; name a JSONL, JSON or parquet file, or a data set on the hub, owner/name"
            )
        return [Path(source)]
    verify_hub_folder(hub_folder(source, data=True))
    found = {name: path for name, path in hub_files(source, data=True).items() if not name.startswith("dataset_info")}
    training = [path for name, path in found.items() if "train" in name]
    if not found:
        raise BadData(f"the data set {source} holds no JSONL, JSON or parquet file; name one that does")
    return training or list(found.values())


def _example(row: dict, number: int, golds: dict[str, Any]) -> dict:
    """A row with our names for its fields."""
    values: dict[str, Any] = {
        name: next((row[key] for key in keys if row.get(key) is not None), None) for name, keys in FIELDS.items()
    }
    for name in ("question", "completion"):
        if not isinstance(values[name], str) or not values[name].strip():
            raise BadData(f"no text in {' or '.join(FIELDS[name])}")
    question, completion = values["question"], values["completion"].strip()
    found = {"id": str(number if values["id"] is None else values["id"]), "question": question}
    if values["gold"] is None:
        values["gold"] = golds.get(_plain(question))
    if values["gold"] is not None:
        try:
            found["gold"] = problem_in(values | {"id": None}, Fields(), number).gold
        except BadData:
            raise BadData("its gold is neither a number, a text nor a list of them") from None
    return found | {"completion": completion}


def _fault(row: dict, judge: Judge, workers: int) -> str | None:
    if "gold" in row:
        return accept(Problem(row["id"], row["question"], row["gold"]), row["completion"], judge, workers)
    flaw = flaw_of(row["completion"], workers)
    return f"ill-formed: {flaw.value}" if flaw else None


def too_long(row: dict, config: ImportConfig, tokenizer: Any) -> str | None:
    """As `dccot sft` counts: prompt, director, and each worker as written and as read."""
    if tokenizer is None:
        return None
    tags, parsed = TagIds.of(tokenizer, config.workers), parse(row["completion"], config.workers)

    def written(thread: Thread[str]) -> int:
        """Tokens of its text and of the tags that inference inserts into it."""
        opened = (len(tag) for fork in thread.all_forks() for tag, _ in zip(tags.worker_open, fork))
        closed = sum(len(tags.spawn_close) for _ in thread.all_forks())
        return thread.total(lambda text: len(tokenizer.encode(text, add_special_tokens=False))) + sum(opened) + closed

    forks = [zip(tags.worker_open, fork) for fork in parsed.all_forks()]
    read_again = sum(len(tag) + written(worker) for fork in forks for tag, worker in fork)
    try:
        prompt = task_of(config).prompting.ids(tokenizer, row["question"])
    except UnusablePrompt:
        return "its prompt cannot be used"
    tokens = len(prompt) + written(parsed) + 1 + read_again
    return f"longer than {config.max_tokens:,} tokens" if tokens > config.max_tokens else None


def _plain(question: str) -> str:
    return " ".join(question.split())
