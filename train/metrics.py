"""Metrics of a run: numbers from rollouts and updates, written to TensorBoard, metrics.jsonl and the console.

Names are `section/what`. metrics.jsonl holds one row per step under these names and is what reports read; a resumed run
truncates it and TensorBoard to the step it continues from, so no step appears twice. TensorBoard sorts by name and is
read by people: the most important metrics are shown there under SHOWN's titles, numbered to come first, and explained
in a table; LAYOUT arranges the same curves as charts. With `wandb: PROJECT` Weights & Biases gets the rows of
metrics.jsonl as well.
"""

from __future__ import annotations

import math
import os
import re
import socket
import statistics
import time
import uuid
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter
from torch.utils.tensorboard import summary

from dccot.core.files import JsonlWriter, flush_to_disk, make_folder, read_jsonl, write_atomic, write_jsonl_atomic
from dccot.core.run import Run
from dccot.core.statistics import PERCENTILES, clustered_error, mean
from dccot.rollout.response import Finish, Rollout
from dccot.rollout.tags import OVERSHOOTS, Flaw, overshoots
from dccot.train.rewards import Graded

LEARNING, HEALTH = "1 learning", "2 health"
# name → TensorBoard's title and description; a title with parentheses would not be drawn among "custom scalars"
SHOWN = {
    "reward/correct": (f"{LEARNING}/answers right, share", "Training rollouts whose answer is right."),
    "reward/well_formed": (
        f"{LEARNING}/well-formed, share",
        "Training rollouts that keep every rule of the parallel format.",
    ),
    "reward/mean": (f"{LEARNING}/reward, mean", "Of training rollouts, length penalty included."),
    "length/longest_path": (
        f"{LEARNING}/longest path, tokens",
        "Director plus, per round, the longest worker: what latency follows.",
    ),
    "length/longest_path_correct": (
        f"{LEARNING}/right answers: longest path, tokens",
        "The same, of responses whose answer is right.",
    ),
    "length/longest_path_incorrect": (
        f"{LEARNING}/wrong answers: longest path, tokens",
        "The same, of responses whose answer is wrong.",
    ),
    "parallel/degree": (
        f"{LEARNING}/parallelism, total over longest path",
        "1: nothing runs in parallel; 3 workers can reach 3.",
    ),
    "parallel/spawn_rate": (f"{LEARNING}/spawns workers, share", "Responses that spawn at least once."),
    "validation/accuracy": (f"{LEARNING}/validation: answers right, share", "pass@1 on held-out problems."),
    "validation/longest_path": (f"{LEARNING}/validation: longest path, tokens", "On held-out problems."),
    "validation/loss": (f"{LEARNING}/validation: loss per token", "Negative log-prob on held-out demonstrations."),
    "policy/loss": (
        f"{LEARNING}/loss per token",
        "SFT: negative log-prob of demonstrations. RL: the objective, whose size says little.",
    ),
    "policy/entropy": (
        f"{HEALTH}/entropy, mean, nats",
        "Of the policy at sampled tokens. A fall to 0 ends exploration.",
    ),
    "policy/kl": (f"{HEALTH}/KL to the reference", "From the policy at the stage's start, per token (k3)."),
    "policy/grad_norm": (f"{HEALTH}/gradient norm, before clipping", "Largest of the step's updates."),
    "policy/clip_fraction": (f"{HEALTH}/clipped tokens, share", "Tokens whose ratio lies at the clip or cap."),
    "policy/learning_rate": (f"{HEALTH}/learning rate", "Of the last update."),
    "gap/kl": (
        f"{HEALTH}/KL of trainer and rollout",
        "Log-probs of the engine against the trainer's: should be near 0.",
    ),
    "length/truncated": (f"{HEALTH}/cut off, share", "Responses that ended for want of tokens, not with an answer."),
    **{
        f"policy/entropy_p{p}": (f"{HEALTH}/entropy, percentile {p:3}, nats", f"{p}% of sampled tokens have less.")
        for p in PERCENTILES
    },
}
LAYOUT = {  # TensorBoard's page "custom scalars": section → chart → curves
    "1 · Is it learning?": {
        "Accuracy and form (training rollouts)": ["reward/correct", "reward/well_formed", "reward/mean"],
        "Longest path (tokens)": [
            "length/longest_path",
            "length/longest_path_correct",
            "length/longest_path_incorrect",
        ],
        "Validation accuracy": ["validation/accuracy"],
        "Validation longest path (tokens)": ["validation/longest_path"],
        "Parallelism: total tokens / longest path": ["parallel/degree"],
        "Share of responses that spawn": ["parallel/spawn_rate"],
    },
    "2 · Is it healthy?": {
        "Entropy: mean and percentiles over tokens": ["policy/entropy", *(f"policy/entropy_p{p}" for p in PERCENTILES)],
        "KL to the reference": ["policy/kl"],
        "Gradient norm": ["policy/grad_norm"],
        "Share of tokens at the clip": ["policy/clip_fraction"],
        "Rollout against trainer: KL": ["gap/kl"],
        "Cut off by the budget": ["length/truncated"],
    },
    "3 · Where does the time go?": {
        "Seconds per phase": [
            "time/rollout",
            "time/grade",
            "time/old_logprob",
            "time/reference",
            "time/update",
            "time/sync",
        ],
        "Tokens per second": ["speed/rollout_tokens", "speed/trained_tokens"],
        "Model FLOP utilisation": ["speed/mfu"],
    },
}
SFT_LAYOUT = {
    "1 · Is it learning?": {"Loss per token: training and held-out": ["policy/loss", "validation/loss"]},
    "2 · Is it healthy?": {"Gradient norm": ["policy/grad_norm"], "Learning rate": ["policy/learning_rate"]},
    "3 · Where does the time go?": {
        "Tokens per second": ["speed/trained_tokens"],
        "Model FLOP utilisation": ["speed/mfu"],
    },
}


def tag_of(name: str) -> str:
    """A metric's name in TensorBoard."""
    return SHOWN[name][0] if name in SHOWN else name


def _charts(layout: dict[str, dict[str, list[str]]]) -> dict:
    """The layout in TensorBoard's format; tags are patterns there."""
    exactly = lambda names: ["Multiline", [f"^{re.escape(tag_of(name))}$" for name in names]]
    return {section: {chart: exactly(names) for chart, names in charts.items()} for section, charts in layout.items()}


def _legend(names: Iterable[str]) -> str:
    """A table of titles and descriptions: TensorBoard shows no descriptions next to curves."""
    rows = sorted(SHOWN[name] for name in names if name in SHOWN)
    return "\n".join(["| curve | meaning |", "|---|---|", *(f"| {title} | {about} |" for title, about in rows)])


def rollout_metrics(rollouts: Sequence[Graded]) -> dict[str, float]:
    """Reward, format, length and parallelism over all responses of a step."""
    responses = [r.response for r in rollouts]
    spawning = [r for r in responses if r.rounds]
    workers = [length for r in spawning for lengths in r.worker_lengths for length in lengths]
    flaws = {f"format/{flaw.value}": mean([r.flaw == flaw for r in rollouts]) for flaw in Flaw}
    overshot = sum((overshoots(r.text) for r in rollouts), Counter())
    return {
        "reward/mean": mean([r.reward for r in rollouts if r.reward is not None]),
        "reward/correct": mean([r.correct for r in rollouts]),
        "reward/well_formed": mean([r.well_formed for r in rollouts]),
        "reward/unjudged": mean([not r.judged for r in rollouts]),
        "reward/unparsable": mean([r.verdict == "unparsable" for r in rollouts]),
        **flaws,
        **{f"format/overshoot_{kind}": overshot[kind] / max(1, len(rollouts)) for kind in OVERSHOOTS},
        "length/longest_path": mean([r.longest_path for r in responses]),
        "length/longest_path_correct": mean([r.response.longest_path for r in rollouts if r.correct]),
        "length/longest_path_incorrect": mean([r.response.longest_path for r in rollouts if not r.correct]),
        "length/total_tokens": mean([r.total_tokens for r in responses]),
        "length/truncated": mean([r.finish != Finish.ANSWERED for r in responses]),
        "parallel/degree": mean([r.parallelism for r in responses]),
        "parallel/rounds": mean([len(r.rounds) for r in responses]),
        "parallel/spawn_rate": len(spawning) / max(1, len(responses)),
        "parallel/worker_length": mean(workers),
        "parallel/worker_length_max": float(max(workers, default=0)),
    }


def validation_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    by_problem: dict[str, list[Rollout]] = {}
    for rollout in rollouts:
        by_problem.setdefault(rollout.problem, []).append(rollout)
    correct = [[float(r.correct) for r in group] for group in by_problem.values()]
    length = [[float(r.response.longest_path) for r in group] for group in by_problem.values()]
    return {
        "validation/accuracy": mean([statistics.fmean(c) for c in correct]),
        "validation/accuracy_stderr": clustered_error(correct),
        "validation/longest_path": mean([statistics.fmean(n) for n in length]),
        "validation/longest_path_stderr": clustered_error(length),
        "validation/well_formed": mean([r.well_formed for r in rollouts]),
        "validation/parallelism": mean([r.response.parallelism for r in rollouts]),
        "validation/spawn_rate": mean([bool(r.response.rounds) for r in rollouts]),
        "validation/truncated": mean([r.response.finish != Finish.ANSWERED for r in rollouts]),
    }


def open_wandb(run: Run, project: str, settings: Mapping[str, Any]) -> Any:
    """A Weights & Biases run for this run folder; restarts continue it. Keys and offline mode come from the environment
    (WANDB_…).
    """
    import wandb

    file = run.wandb_id
    if not file.is_file():
        write_atomic(file, uuid.uuid4().hex[:8])
    quiet = wandb.Settings(console="off", disable_git=True, disable_code=True, silent=True)
    online = wandb.init(
        project=project,
        name=run.name,
        id=file.read_text(),
        resume="allow",
        dir=run,
        config=dict(settings),
        settings=quiet,
    )
    online.define_metric("*", step_metric="step")  # its own counter cannot go back to a checkpoint's step
    return online


class EventFile:
    """Event file of one start of a run, which continues from `first_step`. TensorBoard reads files in the order of
    their names, so each is numbered higher than those before it, regardless of the clock."""

    def __init__(self, folder: Path, first_step: int):
        make_folder(folder)
        numbers = [
            int(match[1])
            for path in folder.iterdir()
            if (match := re.match(r"events\.out\.tfevents\.(\d+)\.", path.name))
        ]
        number = max(int(time.time()), *(number + 1 for number in numbers), 0)
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


class Recorder:
    """Writes metrics on rank 0; a no-op elsewhere. `wandb` is a Weights & Biases project that also gets them, with the
    `settings`.
    """

    def __init__(
        self,
        run: Run,
        first_step: int,
        active: bool,
        wandb: str | None = None,
        settings: Mapping[str, Any] | None = None,
    ):
        self.writer = self.online = None
        if not active:
            return
        self.path = run.metrics_file
        if self.path.exists():
            kept = [row for _, row in read_jsonl(self.path) if row["step"] < first_step]
            write_jsonl_atomic(self.path, kept)
        self.lines = JsonlWriter(self.path)
        self.writer = EventFile(run.tensorboard, first_step)
        self.arranged = False
        if wandb:
            self.online = open_wandb(run, wandb, settings or {})

    def write(self, step: int, metrics: dict[str, float], texts: dict[str, str] | None = None) -> None:
        if self.writer is None:
            return
        finite = {name: value for name, value in metrics.items() if not math.isnan(value)}
        if not self.arranged:
            self.writer.add(
                summary.custom_scalars(
                    _charts(LAYOUT if any(name.startswith("reward/") for name in finite) else SFT_LAYOUT)
                )
            )
            self.writer.add(summary.text("what the curves mean", _legend(finite)), step)
            self.arranged = True
        self.writer.add(
            Summary(value=[Summary.Value(tag=tag_of(name), simple_value=value) for name, value in finite.items()]), step
        )
        for name, text in (texts or {}).items():
            self.writer.add(summary.text(name, text), step)
        self.lines.write({"step": step, **finite})
        if self.online is not None:
            self.online.log({"step": step, **finite})

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


def memory_metrics(peaks: dict[str, int]) -> dict[str, float]:
    """Peak GPU memory of the step and of each phase; without a GPU, the process's current memory."""
    if peaks:
        by_phase = {f"memory/peak_{name}_gb": peak / 1e9 for name, peak in peaks.items() if name}
        return {"memory/peak_gb": max(peaks.values()) / 1e9, **by_phase}
    with open(f"/proc/{os.getpid()}/statm") as statm:
        return {"memory/resident_gb": int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e9}


def sample_text(rollout: Graded) -> str:
    """A rollout as TensorBoard text: the facts, the question, the verbatim response."""
    facts = f"verdict **{rollout.verdict}**, form **{rollout.flaw or 'well-formed'}**, reward **{rollout.reward}**, "
    facts += f"longest path **{rollout.response.longest_path}** of {rollout.response.total_tokens} tokens"
    body = f"QUESTION\n{rollout.question}\n\nRESPONSE\n{rollout.text}"
    return facts + "\n\n" + "\n".join("    " + line for line in body.splitlines())


def console_line(step: int, steps: int, metrics: dict[str, Any]) -> str:
    """One human-readable line per step."""

    def show(name: str, label: str, form: str) -> str:
        value = metrics.get(name, math.nan)
        return "" if math.isnan(value) else f"{label} {value:{form}}  "

    parts = [
        show("reward/mean", "reward", ".3f"),
        show("reward/correct", "correct", ".1%"),
        show("reward/well_formed", "well-formed", ".1%"),
        show("length/longest_path", "longest path", ".0f"),
        show("parallel/degree", "parallelism", ".2f"),
        show("policy/loss", "loss", ".4f"),
        show("policy/entropy", "entropy", ".3f"),
        show("policy/grad_norm", "grad", ".3f"),
        show("validation/accuracy", "| validation", ".1%"),
        show("validation/longest_path", "at", ".0f"),
        show("time/step", "|", ".1f"),
    ]
    return f"step {step:>4}/{steps}  " + "".join(parts).rstrip() + (" s" if "time/step" in metrics else "")
