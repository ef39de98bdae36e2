"""Writes a step's rollouts to disk while the model trains on them.

    saver.save(batch, folder, step, keep)     collective: each rank's thread encodes what it holds, rank 0's writes it
    saver.wait()                              before a checkpoint: what it covers is on disk; raises what went wrong

The file is the same as one rank would write, whole or not there (core/files.py). Ranks talk over a process group of
their own, so that nothing mixes with the collectives of training.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch.distributed as dist

from dccot.core.files import atomic_file, json_line
from dccot.core.run import step_name, step_of
from dccot.core.runtime import Runtime, inherit_timeout
from dccot.train.batch import Batch
from dccot.train.rewards import Graded

log = logging.getLogger(__name__)


class RolloutSaver:
    def __init__(self, runtime: Runtime):
        self.runtime = runtime
        self._group = dist.new_group(backend="gloo") if runtime.ranks > 1 else None
        if self._group is not None:
            inherit_timeout([self._group])
        self._thread = ThreadPoolExecutor(1, "rollouts")
        self._underway: Future[None] | None = None

    def save(self, batch: Batch, folder: Path, step: int, keep: int) -> None:
        """Start writing what the step trains on, for inspection and for `replay`; the newest `keep` files stay."""
        self.wait()
        mine = batch.trained_here(self.runtime.rank)
        self._underway = self._thread.submit(self._save, mine, batch.ranks(), folder, step, keep)

    def wait(self) -> None:
        """Until everything is written."""
        underway, self._underway = self._underway, None
        if underway is not None:
            underway.result()

    def close(self) -> None:
        """Finish what is being written before the process group is destroyed, even after an error."""
        try:
            self.wait()
        except Exception as error:
            log.error("the rollouts being written were lost: %s", error)
        self._thread.shutdown()
        if self._group is not None and dist.is_initialized():
            dist.destroy_process_group(self._group)

    def _save(self, mine: Sequence[Graded], ranks: Sequence[int], folder: Path, step: int, keep: int) -> None:
        lines = [json_line(graded.to_json()) for graded in mine]
        parts = [lines]
        if self._group is not None:
            gathered: list[list[bytes]] | None = [[]] * self.runtime.ranks if self.runtime.is_main else None
            dist.gather_object(lines, gathered, dst=0, group=self._group)
            parts = gathered or []
        if self.runtime.is_main:
            written = [iter(part) for part in parts]
            write_step(folder, step, [next(written[rank]) for rank in ranks], keep)


def write_step(folder: Path, step: int, lines: Sequence[bytes], keep: int) -> None:
    """One file of a run's rollouts/ or bad/, in which the newest `keep` stay."""
    with atomic_file(folder / f"{step_name(step)}.jsonl.gz") as file:
        file.writelines(lines)
    kept = [path for path in folder.glob("step_*.jsonl*") if step_of(path) is not None]
    for old in sorted(kept, key=lambda path: (step_of(path), path.name))[:-keep]:
        old.unlink()
