"""A run's folder below runs/: layout, lock, settings, checkpoints, metrics, mark. Only this file knows the names.

runs/hlp/config.yaml  provenance.json                     resolved settings; what each start was made from
         data.jsonl                                       id and checksum of every row it trains on
         metrics.jsonl  tensorboard/                      one row per step
         rollouts/step_000010.jsonl.gz  bad/  profile/    of steps: responses, batches with a skipped update, traces
         checkpoints/step_000010/{dcp/, hf/, state.json, manifest.json}
         latest                                           name of the newest complete checkpoint
         done.json  .lock                                 a finished stage's mark; held by the process that writes here
runs/paper/recipe.yaml  STAGE/  replaced/STAGE-1/         of a recipe, whose stages are runs themselves
"""

from __future__ import annotations

import dataclasses
import fcntl
import json
import logging
import math
import os
import re
import shutil
import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile, zip_longest
from pathlib import Path
from typing import Any, TextIO, TypeVar

from dccot.core.config import ConfigError, read_yaml, to_plain, to_yaml, with_new_names
from dccot.core.files import (
    LEASE_SECONDS,
    BadData,
    checksum,
    flush_to_disk,
    make_folder,
    read_json,
    read_jsonl,
    wait_for_lock,
    write_atomic,
    write_jsonl_atomic,
)
from dccot.core.plugins import shown
from dccot.core.provenance import Checksums, differences, record
from dccot.core.runtime import Runtime, on_rank_zero

log = logging.getLogger("dccot")
METRICS, RECIPE = "metrics.jsonl", "recipe.yaml"
C = TypeVar("C")
_STEP = re.compile(r"step_(\d{6,})")
_CLAIMS: dict[Path, TextIO] = {}  # a lock lives as long as its file is open: to the end of the process, however it ends


def step_name(step: int) -> str:
    return f"step_{step:06d}"


def step_of(path: Path) -> int | None:
    """The step that a file or folder belongs to by its name; None for anything else (`step_000010_keep`)."""
    match = _STEP.fullmatch(path.name.removesuffix(".gz").removesuffix(".jsonl"))
    return int(match[1]) if match else None


class Checkpoint:
    """One folder of a run's checkpoints/. The manifest lists size and checksum of its files, and is written last."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.dcp, self.hf, self.state = folder / "dcp", folder / "hf", folder / "state.json"
        self.manifest = folder / "manifest.json"

    @classmethod
    def of_weights(cls, folder: Path) -> Checkpoint | None:
        """The checkpoint whose hf/ or merged/ this is; None for a model from elsewhere."""
        return cls(folder.parent) if folder.name in ("hf", "merged") and step_of(folder.parent) is not None else None

    @property
    def step(self) -> int:
        return int(self.folder.name.removeprefix("step_"))

    @property
    def run(self) -> Run:
        return Run(self.folder.parent.parent)

    def listed(self, files: Iterable[Path]) -> dict[str, dict]:
        """Flush files to disk; the rows of the manifest that describe them."""
        rows = {}
        for path in files:
            flush_to_disk(path)
            rows[str(path.relative_to(self.folder))] = {"size": path.stat().st_size, "sha256": checksum(path)}
        return rows

    def write_manifest(self, known: Mapping[str, dict] | None = None) -> None:
        """Flush every file to disk, then list it; `known` are the rows of files that other ranks have `listed`."""
        known, found = known or {}, sorted(self.folder.rglob("*"))
        for name, row in known.items():
            there = (self.folder / name).stat().st_size
            if there != row["size"]:
                written = f"and {row['size']:,} where it was written"
                raise OSError(f"{name} has {there:,} bytes on rank 0 {written}: all machines must share the disk")
        files = [path for path in found if path.is_file()]
        rows = {**known, **self.listed(path for path in files if str(path.relative_to(self.folder)) not in known)}
        for path in found:
            if path.is_dir():
                flush_to_disk(path)
        names = [str(path.relative_to(self.folder)) for path in files]
        write_atomic(self.manifest, json.dumps({name: rows[name] for name in names}, indent=1))

    def keep_weights_only(self) -> None:
        """Delete everything but hf/, from the manifest first."""
        kept = {name: expected for name, expected in self._listed().items() if name.startswith("hf/")}
        write_atomic(self.manifest, json.dumps(kept, indent=1))
        shutil.rmtree(self.dcp)

    def checksums(self) -> Checksums:
        """Of the files in hf/."""
        return {Path(name).name: it["sha256"] for name, it in self._listed().items() if name.startswith("hf/")}

    def damage(self, part: str = "", share: slice = slice(None)) -> str | None:
        """How the folder, or the `part` of it ("hf/"), differs from its manifest; ranks may `share` the files."""
        try:
            listed = {name: expected for name, expected in self._listed().items() if name.startswith(part)}
        except (OSError, ValueError) as error:
            return f"manifest.json: {error}"
        if not listed:
            return f"manifest.json lists no file of {part or 'it'}"
        for name, expected in list(listed.items())[share]:
            path = self.folder / name
            if not path.resolve().is_relative_to(self.folder.resolve()):
                return f"{name} leads outside the checkpoint"
            if not path.is_file():
                return f"{name} is missing"
            if path.stat().st_size != expected["size"]:
                return f"{name} has {path.stat().st_size:,} bytes instead of {expected['size']:,}"
            if checksum(path) != expected["sha256"]:
                return f"the checksum of {name} does not match the manifest"
        return None

    def _listed(self) -> dict[str, dict]:
        """Name → size and sha256; ValueError if malformed."""
        manifest = json.loads(self.manifest.read_text())
        rows = manifest.values() if isinstance(manifest, dict) else [None]
        if not all(isinstance(each, dict) and each.keys() >= {"size", "sha256"} for each in rows):
            raise ValueError("not a table of sizes and checksums")
        return manifest


@dataclass(frozen=True)
class Validated:
    """Validation results of the checkpoint of `step`."""

    step: int
    accuracy: float
    longest_path: float


class Run:
    def __init__(self, folder: str | Path):
        self.folder = folder = Path(folder)
        self.config_file, self.recipe_file, self.data_file = (
            folder / "config.yaml",
            folder / RECIPE,
            folder / "data.jsonl",
        )
        self.metrics_file, self.tensorboard = folder / METRICS, folder / "tensorboard"
        self.rollouts, self.bad, self.profile = folder / "rollouts", folder / "bad", folder / "profile"
        self.checkpoints, self.latest = folder / "checkpoints", folder / "latest"
        self.mark, self.wandb_id = folder / "done.json", folder / "wandb_id"

    def __repr__(self) -> str:
        return str(self.folder)

    @classmethod
    def parse(cls, path: str | Path) -> tuple[Run, str | None]:
        """`runs/hlp@180` → runs/hlp and 180; a path without @, or one that exists literally, is the run itself."""
        name, at, chosen = str(path).rpartition("@")
        return (cls(name), chosen) if at and not Path(path).exists() else (cls(path), None)

    @property
    def name(self) -> str:
        return self.folder.name

    # ---- writing to it ----

    def claim(self, patience: float = LEASE_SECONDS) -> None:
        """Lock the folder for this process; BadData if another one has. Two jobs would corrupt each other's files."""
        make_folder(self.folder)
        if self.folder.resolve() in _CLAIMS:
            return
        file = open(self.folder / ".lock", "a+")  # noqa: SIM115 (stays open)
        try:  # unlike flock's, not inherited by children, which may outlive a killed job
            wait_for_lock(file.fileno(), self.folder, patience, fcntl.lockf, owner=self.folder / ".lock")
        except BaseException:
            file.close()
            raise
        _CLAIMS[self.folder.resolve()] = file
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()

    def record(self, config: Any, inputs: Mapping[str, Checksums], runtime: Runtime) -> None:
        """Write provenance and settings; logs how the settings differ from the last start's. All ranks call this."""
        record(self.folder, config, inputs, runtime)

        def write() -> None:
            now = to_plain(config)
            before = with_new_names(self._saved_settings(), now) if self.config_file.exists() else now
            changed = [f"{key}: was {was!r}, is {new!r}" for key, was, new in differences(before, now)]
            if changed:
                log.warning("%s continues with a changed configuration:\n%s", self, "\n".join(changed))
            write_atomic(self.config_file, to_yaml(config))

        on_rank_zero(write)

    def keep_rows(self, rows: Sequence[tuple[str, str]]) -> None:
        """(id, checksum) of the data: rejected if a checkpoint was trained on others, naming the first that differs."""
        if not self.latest.exists():
            write_jsonl_atomic(self.data_file, ({"id": id, "sha256": found} for id, found in rows))
        elif self.data_file.exists() and rows:
            found = read_jsonl(self.data_file) if self.data_file.is_file() and self.data_file.stat().st_size else ()
            known = [(row.get("id"), row.get("sha256")) for _, row in found]
            for number, (before, now) in enumerate(zip_longest(known, rows), start=1):
                if before != now:
                    was, is_ = ("missing" if row is None else f"{row[0]!r}" for row in (before, now))
                    what = f"was {was} and is {is_}" if was != is_ else f"{is_} has changed"
                    remedy = "continue with that data, or choose another name"
                    raise BadData(f"{self} was trained on other data: row {number} {what}; {remedy}")

    def finish(self, facts: dict[str, Any]) -> None:
        """Flush all results to disk, then mark the run as finished."""
        for path in self.folder.rglob("*"):
            if path.is_file() or path.is_dir():
                flush_to_disk(path)
        write_atomic(self.mark, json.dumps(facts, indent=1, ensure_ascii=False))

    def finished(self) -> dict[str, Any] | None:
        """The facts it was marked with: its seconds and, unless an old version wrote them, what it was made from."""
        if not self.mark.exists():
            return None
        remedy, groups = "delete it to run the stage again", ("configuration", "inputs", "code")
        facts = read_json(self.mark, remedy)
        source = facts.get("made_from", {name: {} for name in groups})
        whole = isinstance(source, dict) and all(isinstance(source.get(name), dict) for name in groups)
        if not whole or not isinstance(facts.get("seconds"), int | float):
            raise BadData(f"{self.mark} is damaged (it lacks seconds, or what it was made from); {remedy}")
        return facts

    def move_aside(self) -> Path | None:
        """Move the folder to replaced/ next to it; returns where it is now. Nothing is deleted."""
        if not self.folder.exists():
            return None
        place = self.folder.parent / "replaced"
        place.mkdir(exist_ok=True)
        number = next(n for n in range(1, 1_000_000) if not (place / f"{self.name}-{n}").exists())
        return Path(shutil.move(self.folder, place / f"{self.name}-{number}"))

    # ---- reading it ----

    def settings(self) -> dict[str, Any]:
        """Its configuration as a tree, with today's names for keys; empty if it has none."""
        return with_new_names(self._saved_settings()) if self.config_file.exists() else {}

    def _saved_settings(self) -> dict[str, Any]:
        try:
            return read_yaml(self.config_file)
        except ConfigError as error:
            remedy = "copy the configuration from provenance.json, or delete the file: a start writes it anew"
            raise BadData(f"{error}; {remedy}") from None

    def group(self, kind: type[C], key: str) -> C:
        """One group of its settings, without keys that have gone since."""
        known = {field.name for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
        found = self.settings().get(key) or {}
        if not isinstance(found, dict):
            raise BadData(f"{self.config_file}: {key} is {found!r}; it must be a group of settings")
        return kind(**{name: value for name, value in found.items() if name in known})

    def rows(self) -> list[dict[str, Any]]:
        """Of metrics.jsonl: one per step, without values that are null: a number that was none."""
        if not self.metrics_file.exists() or self._empty(self.metrics_file):
            return []
        found = []
        for line, row in read_jsonl(self.metrics_file, report=log.warning):
            if isinstance(row.get("step"), int):
                found.append({name: value for name, value in row.items() if value is not None})
            else:
                log.warning("%s:%d: the row has no step; it is left out", self.metrics_file, line)
        return found

    @staticmethod
    def _empty(file: Path) -> bool:
        if file.is_dir():
            raise BadData(f"{file} is a folder; move it away: the run writes a file of that name")
        return not file.stat().st_size

    def keep_metrics_before(self, step: int) -> None:
        """Truncate metrics.jsonl to the step that a start continues from, so that no step appears twice."""
        if self.metrics_file.exists():
            write_jsonl_atomic(self.metrics_file, (row for row in self.rows() if row["step"] < step))

    def all_checkpoints(self) -> list[Checkpoint]:
        """In order. Anything else in the folder (such as `step_000010_keep`) is neither read nor deleted."""
        folders = self.checkpoints.glob("step_*")
        found = [Checkpoint(path) for path in folders if step_of(path) is not None and path.is_dir()]
        return sorted(found, key=lambda each: each.step)

    def partial(self, step: int) -> Checkpoint:
        """A checkpoint while it is written, under a name that nobody takes for a complete one."""
        return Checkpoint(self.checkpoints / f".{step_name(step)}.partial")

    def partial_checkpoints(self) -> list[Path]:
        """Left over by a crash."""
        return list(self.checkpoints.glob(".step_*.partial"))

    def checkpoint_folder(self, step: int) -> Checkpoint:
        return Checkpoint(self.checkpoints / step_name(step))

    def steps(self) -> list[int]:
        """Steps whose weights still exist, in order."""
        return [each.step for each in self.all_checkpoints() if (each.hf / "config.json").is_file()]

    def checkpoint(self, step: int | str) -> Checkpoint:
        """The checkpoint of a step, which must have weights."""
        steps = self.steps()
        if not str(step).isdecimal() or int(step) not in steps:
            there = f"there are {', '.join(map(str, steps)) or 'none'}"
            raise FileNotFoundError(
                f"{self} has no checkpoint {step!r}; {there} (checkpoint.keep_hf_every says which ones stay), or best"
            )
        return self.checkpoint_folder(int(step))

    def newest(self) -> Checkpoint:
        """The checkpoint that `latest` names, or the last one before it that has weights for inference."""
        name = self.latest.read_text(errors="replace").strip()
        found, step = Checkpoint(self.checkpoints / name), step_of(Path(name))
        for earlier in reversed(self.steps() if step is not None and found.dcp.is_dir() else ()):
            if earlier < (step or 0) and not found.hf.exists():
                return self.checkpoint_folder(earlier)
        if step is None or not (found.hf / "config.json").is_file():
            there = ", ".join(map(str, self.steps())) or "none"
            problem = f"names {shown(name)}, which has no weights" if name else "is empty"
            raise FileNotFoundError(f"{self.latest} {problem}; choose a checkpoint as {self}@STEP (there are {there})")
        return found

    def validated(self) -> list[Validated]:
        """Validation of every step that has one, in order. A row of metrics describes the weights after its step."""
        rows = [row for row in self.rows() if row.get("step", 0) and "validation/accuracy" in row]
        lengths = [row.get("validation/longest_path", math.nan) for row in rows]
        return [Validated(row["step"] + 1, row["validation/accuracy"], n) for row, n in zip(rows, lengths)]

    def best(self) -> Validated:
        """The remaining checkpoint with the best validation accuracy; ties go to the shortest, then the first."""
        kept = set(self.steps())
        found = [each for each in self.validated() if each.step in kept]
        if not found:
            raise FileNotFoundError(
                f"{self} has no checkpoint with a validation: name a step instead of best (there are "
                f"{sorted(kept) or 'none'})"
            )
        return min(found, key=lambda each: (-each.accuracy, each.longest_path, each.step))


def trained_by(model: str | Path, beside: Path | None = None) -> tuple[Run, int | None]:
    """The run that a run's folder, run@STEP or weights belong to, and the step if it is named. A run that is no longer
    in its place is looked for in the folder `beside`: recipes are moved as a whole.
    """
    saved = Checkpoint.of_weights(Path(model))
    run, at = (saved.run, str(saved.step)) if saved else Run.parse(model)
    if beside and not run.folder.exists():
        run = Run(beside / run.name)
    return run, int(at) if at and at.isdecimal() else None


def history(model: str | Path) -> Iterator[tuple[dict[str, Any], int]]:
    """Settings of the runs that led to a model, the last one first, and how many steps of each."""
    seen = set[Path]()
    run, step = trained_by(model)
    while run.folder not in seen and "steps" in (settings := run.settings()):
        seen.add(run.folder)
        saved = step_of(Path(run.latest.read_text(errors="replace").strip())) if run.latest.is_file() else None
        yield settings, step or saved or settings["steps"]
        run, step = trained_by(settings["model"]["path"], run.folder.parent)


def steps_until(model: str | Path, rl: bool | None = None) -> int:
    """Steps of training that led to this model through runs of one kind, of RL or of SFT; 0 for what is no run."""
    known = [("reward" in settings, steps) for settings, steps in history(model)]
    kind = known[0][0] if known and rl is None else rl
    return sum(steps for _, steps in takewhile(lambda each: each[0] == kind, known))
