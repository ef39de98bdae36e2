"""Where a run's metrics go: TensorBoard, metrics.jsonl, the console and, with `wandb: PROJECT`, Weights & Biases.

Names are `section/what`, the same everywhere, and explained in train/charts.py. metrics.jsonl holds one row per step
and is what reports read; a resumed run truncates it and TensorBoard to the step it continues from, so no step appears
twice. In TensorBoard and Weights & Biases a stage's steps are counted from the end of the stage of its kind that it
started from (`before`), so the stages of a recipe follow one another, each a run with a colour of its own.
"""

from __future__ import annotations

import math
import os
import re
import socket
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.summary.writer.record_writer import RecordWriter
from torch.utils.tensorboard import summary

from dccot.core.files import JsonlWriter, flush_to_disk, make_folder, write_atomic
from dccot.core.run import Run
from dccot.train.charts import arranged, legend, meaning
from dccot.train.rewards import Graded

JUDGED_BY = ("validation/accuracy", "validation/longest_path", "policy/loss")  # among the hyperparameters
CONSOLE = {  # metric → what precedes it, its format
    "reward/mean": ("reward", ".3f"),
    "reward/correct": ("correct", ".1%"),
    "reward/well_formed": ("well-formed", ".1%"),
    "length/longest_path": ("longest path", ".0f"),
    "parallel/degree": ("parallelism", ".2f"),
    "policy/loss": ("loss", ".4f"),
    "policy/entropy": ("entropy", ".3f"),
    "policy/grad_norm": ("grad", ".3f"),
    "validation/accuracy": ("| validation", ".1%"),
    "validation/longest_path": ("at", ".0f"),
    "time/step": ("|", ".1f"),
}


def open_wandb(run: Run, project: str, settings: Mapping[str, Any]) -> Any:
    """Its run for this folder, which restarts continue. Keys and offline mode come from the environment (WANDB_…)."""
    import wandb

    if not run.wandb_id.is_file():
        write_atomic(run.wandb_id, uuid.uuid4().hex[:8])
    quiet = wandb.Settings(console="off", disable_git=True, disable_code=True, silent=True)
    known: dict[str, Any] = {
        "id": run.wandb_id.read_text(),
        "name": run.name,
        "dir": run.folder,
        "config": dict(settings),
    }
    online = wandb.init(project=project, resume="allow", settings=quiet, **known)
    online.define_metric("*", step_metric="step")  # its own counter cannot go back to a checkpoint's step
    return online


class EventFile:
    """Event file of one start of a run, which continues from `first_step`. TensorBoard reads files in the order of
    their names, so each is numbered higher than those before it, regardless of the clock; torch's SummaryWriter numbers
    them by the clock.
    """

    def __init__(self, folder: Path, first_step: int):
        make_folder(folder)
        named = [re.match(r"events\.out\.tfevents\.(\d+)\.", path.name) for path in folder.iterdir()]
        number = max(int(time.time()), 0, *(int(match[1]) + 1 for match in named if match))
        self.path = folder / f"events.out.tfevents.{number:010d}.{socket.gethostname()}.{os.getpid()}"
        self._file = self.path.open("xb")
        self._records = RecordWriter(self._file)
        self._write(file_version="brain.Event:2")
        # TensorBoard discards everything from there on
        self._write(step=first_step, session_log=SessionLog(status=SessionLog.START))

    def add(self, summary: Summary, step: int = 0) -> None:
        self._write(summary=summary, step=step)

    def _write(self, **what: Any) -> None:
        self._records.write(Event(wall_time=time.time(), **what).SerializeToString())
        self._file.flush()

    def flush(self) -> None:
        os.fsync(self._file.fileno())
        flush_to_disk(self.path.parent)

    def close(self) -> None:
        self._file.close()


def scalars(values: Mapping[str, float]) -> Summary:
    """Curves with their meaning."""
    about = {name: SummaryMetadata(summary_description=meaning(name) or "") for name in values}
    found = [Summary.Value(tag=name, simple_value=value, metadata=about[name]) for name, value in values.items()]
    return Summary(value=found)


def hyperparameters(settings: Mapping[str, Any]) -> tuple[Summary, ...]:
    """For TensorBoard's page "hparams"."""
    plain = {name: value if isinstance(value, int | float | str) else str(value) for name, value in settings.items()}
    return summary.hparams(plain, dict.fromkeys(JUDGED_BY, 0.0))


class Recorder:
    """Writes metrics on rank 0; a no-op elsewhere. `wandb` is a project that also gets them, with the `settings`."""

    def __init__(
        self,
        run: Run,
        first_step: int,
        active: bool,
        wandb: str | None = None,
        settings: Mapping[str, Any] | None = None,
        before: int = 0,
    ):
        self.writer = self.online = None
        if not active:
            return
        self.before, self.settings, self.begun = before, settings or {}, False
        self.lines = JsonlWriter(run.metrics_file)
        self.writer = EventFile(run.tensorboard, before + first_step)
        if wandb:
            self.online = open_wandb(run, wandb, self.settings)

    def write(self, step: int, metrics: dict[str, float], texts: dict[str, str] | None = None) -> None:
        if self.writer is None:
            return
        finite = {name: value for name, value in metrics.items() if not math.isnan(value)}
        shown = self.before + step
        if not self.begun:
            for each in (summary.custom_scalars(arranged(finite)), *hyperparameters(self.settings)):
                self.writer.add(each)
            self.writer.add(summary.text("what the curves mean", legend(finite)), shown)
            self.begun = True
        self.writer.add(scalars(finite), shown)
        for name, text in (texts or {}).items():
            self.writer.add(summary.text(name, text), shown)
        self.lines.write({"step": step, **finite})
        if self.online is not None:
            self.online.log({"step": shown, **finite})

    def flush(self) -> None:
        """Everything so far survives a power cut."""
        if self.writer is not None:
            self.writer.flush()
            self.lines.flush()

    def close(self) -> None:
        if self.writer is not None:
            self.writer.close()
            self.lines.close()
        if self.online is not None:
            self.online.finish()


def sample_text(rollout: Graded) -> str:
    """A rollout as TensorBoard text: the facts, the question, the verbatim response."""
    facts = f"verdict **{rollout.verdict}**, form **{rollout.flaw or 'well-formed'}**, reward **{rollout.reward}**, "
    facts += f"longest path **{rollout.response.longest_path}** of {rollout.response.total_tokens} tokens"
    body = f"QUESTION\n{rollout.question}\n\nRESPONSE\n{rollout.text}"
    return facts + "\n\n" + "\n".join("    " + line for line in body.splitlines())


def console_line(step: int, steps: int, metrics: dict[str, float]) -> str:
    """One human-readable line per step, counted from 0 as in files and TensorBoard."""
    there = {name: value for name in CONSOLE if not math.isnan(value := metrics.get(name, math.nan))}
    parts = [f"{CONSOLE[name][0]} {value:{CONSOLE[name][1]}}" for name, value in there.items()]
    return f"step {step:>4} of {steps}  " + "  ".join(parts) + (" s" if "time/step" in metrics else "")
