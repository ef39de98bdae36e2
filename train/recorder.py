"""Where a run's metrics go: TensorBoard, metrics.jsonl, the console and, with `wandb: PROJECT`, Weights & Biases.

Names are `section/what`. metrics.jsonl holds one row per step under these names and is what reports read; a resumed run
truncates it and TensorBoard to the step it continues from, so no step appears twice. TensorBoard sorts by name and is
read by people: the most important metrics are shown there under SHOWN's titles, numbered to come first, and explained
in a table; LAYOUT arranges the same curves as charts. Weights & Biases gets the rows of metrics.jsonl.
"""

from __future__ import annotations

import math
import os
import re
import socket
import time
import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter
from torch.utils.tensorboard import summary

from dccot.core.files import JsonlWriter, flush_to_disk, make_folder, write_atomic
from dccot.core.run import Run
from dccot.core.statistics import PERCENTILES
from dccot.train.rewards import Graded

# name | TensorBoard's title | description; a title with parentheses would not be drawn among "custom scalars"
_SHOWN = """
reward/correct | 1 learning/answers right, share | Training rollouts whose answer is right.
reward/well_formed | 1 learning/well-formed, share | Training rollouts that keep every rule of the parallel format.
reward/mean | 1 learning/reward, mean | Of training rollouts, length penalty included.
length/longest_path | 1 learning/longest path, tokens | Director and each round's longest worker: latency follows.
length/longest_path_correct | 1 learning/right answers: longest path, tokens | If the answer is right.
length/longest_path_incorrect | 1 learning/wrong answers: longest path, tokens | If the answer is wrong.
parallel/degree | 1 learning/parallelism, total over longest path | 1: nothing runs in parallel; 3 workers can reach 3.
parallel/spawn_rate | 1 learning/spawns workers, share | Responses that spawn at least once.
validation/accuracy | 1 learning/validation: answers right, share | pass@1 on held-out problems.
validation/longest_path | 1 learning/validation: longest path, tokens | On held-out problems.
validation/loss | 1 learning/validation: loss per token | Negative log-prob on held-out demonstrations.
policy/loss | 1 learning/loss per token | SFT: negative log-prob. RL: the objective, whose size says little.
policy/entropy | 2 health/entropy, mean, nats | Of the policy at sampled tokens. A fall to 0 ends exploration.
policy/kl | 2 health/KL to the reference | From the policy at the stage's start, per token (k3).
policy/grad_norm | 2 health/gradient norm, before clipping | Largest of the step's updates.
policy/clip_fraction | 2 health/clipped tokens, share | Tokens whose ratio lies at the clip or cap.
policy/learning_rate | 2 health/learning rate | Of the last update.
gap/kl | 2 health/KL of trainer and rollout | Log-probs of the engine against the trainer's: should be near 0.
gap/mean_abs_logprob | 2 health/gap of trainer and rollout, mean, nats | Mean distance of their log-probs.
gap/max_abs_logprob | 2 health/gap of trainer and rollout, largest, nats | Largest distance of their log-probs.
gap/perplexity_ratio | 2 health/perplexity, trainer over rollout | Of what the rollout sampled: should be near 1.
gap/effective_sample_size | 2 health/effective sample size, share | 1: correcting for the gap weighs all tokens alike.
gap/truncated | 2 health/gap weights at their cap, share | Tokens with trainer over rollout above rollout_ratio_cap.
gap/masked | 2 health/masked for their gap, share | Tokens of responses that rollout_correction leaves out.
length/truncated | 2 health/cut off, share | Responses that hit the token limit before they gave an answer.
staleness/mean | 2 health/staleness, mean, versions | How many updates of the weights ago a trained token was sampled.
staleness/max | 2 health/staleness, oldest token, versions | At most rollout.max_staleness.
pool/waiting | 3 time/queue, groups | Complete and kept, not yet trained on.
pool/unfinished | 3 time/carried over, groups | Unfinished when the step's batch was full.
pool/started | 3 time/started, groups | In this step.
pool/too_old | 3 time/dropped for their age, groups | 0 unless an engine had weights that it should not have had.
"""
SHOWN: dict[str, tuple[str, str]] = {
    **{name: (title, about) for name, title, about in (line.split(" | ") for line in _SHOWN.strip().splitlines())},
    **{
        f"policy/entropy_p{p}": (f"2 health/entropy, percentile {p:3}, nats", f"{p}% of sampled tokens have less.")
        for p in PERCENTILES
    },
}
TIMES = ["rollout", "grade", "old_logprob", "reference", "update", "sync"]
LEARNING, HEALTH, TIME = "1 · Is it learning?", "2 · Is it healthy?", "3 · Where does the time go?"
LAYOUT = {  # TensorBoard's page "custom scalars": section → chart → curves
    LEARNING: {
        "Accuracy and form (training rollouts)": ["reward/correct", "reward/well_formed", "reward/mean"],
        "Longest path (tokens)": [f"length/longest_path{of}" for of in ("", "_correct", "_incorrect")],
        "Validation accuracy": ["validation/accuracy"],
        "Validation longest path (tokens)": ["validation/longest_path"],
        "Parallelism: total tokens / longest path": ["parallel/degree"],
        "Share of responses that spawn": ["parallel/spawn_rate"],
    },
    HEALTH: {
        "Entropy: mean and percentiles over tokens": ["policy/entropy", *(f"policy/entropy_p{p}" for p in PERCENTILES)],
        "KL to the reference": ["policy/kl"],
        "Gradient norm": ["policy/grad_norm"],
        "Share of tokens at the clip": ["policy/clip_fraction"],
        "Rollout against trainer: KL": ["gap/kl"],
        "Rollout against trainer: effective sample size, truncated, masked": [
            "gap/effective_sample_size",
            "gap/truncated",
            "gap/masked",
        ],
        "Cut off by the budget": ["length/truncated"],
    },
    TIME: {
        "Seconds per phase": [f"time/{phase}" for phase in TIMES],
        "Tokens per second": ["speed/rollout_tokens", "speed/trained_tokens"],
        "Model FLOP utilisation": ["speed/mfu"],
        "Waiting, share of the step": ["time/engines_wait", "time/trainer_waits"],
        "Groups: queue, carried over, started": ["pool/waiting", "pool/unfinished", "pool/started", "pool/too_old"],
        "Staleness of trained tokens (versions)": ["staleness/mean", "staleness/max"],
        "Trained tokens by age (share)": [f"staleness/tokens_{age}_old" for age in range(5)],
    },
}
SFT_LAYOUT = {
    LEARNING: {"Loss per token: training and held-out": ["policy/loss", "validation/loss"]},
    HEALTH: {"Gradient norm": ["policy/grad_norm"], "Learning rate": ["policy/learning_rate"]},
    TIME: {"Tokens per second": ["speed/trained_tokens"], "Model FLOP utilisation": ["speed/mfu"]},
}
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


class Recorder:
    """Writes metrics on rank 0; a no-op elsewhere. `wandb` is a project that also gets them, with the `settings`."""

    def __init__(
        self, run: Run, first_step: int, active: bool, wandb: str | None = None, settings: Mapping | None = None
    ):
        self.writer = self.online = None
        if not active:
            return
        self.lines = JsonlWriter(run.metrics_file)
        self.writer = EventFile(run.tensorboard, first_step)
        self.arranged = False
        if wandb:
            self.online = open_wandb(run, wandb, settings or {})

    def write(self, step: int, metrics: dict[str, float], texts: dict[str, str] | None = None) -> None:
        if self.writer is None:
            return
        finite = {name: value for name, value in metrics.items() if not math.isnan(value)}
        if not self.arranged:
            layout = LAYOUT if any(name.startswith("reward/") for name in finite) else SFT_LAYOUT
            self.writer.add(summary.custom_scalars(_charts(layout)))
            self.writer.add(summary.text("what the curves mean", _legend(finite)), step)
            self.arranged = True
        values = [Summary.Value(tag=tag_of(name), simple_value=value) for name, value in finite.items()]
        self.writer.add(Summary(value=values), step)
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
