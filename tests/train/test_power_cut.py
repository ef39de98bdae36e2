"""What is on the disk, and in which order it got there: a checkpoint never stands above anything that a power cut could
take away.

`make torture` cuts the power of a real file system; here the calls of a real run are watched.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dccot.train.sft import main
from tests.support.fault_injection.sft_task import make_sft_task


@pytest.fixture
def events(tmp_path, monkeypatch) -> list[tuple[str, str, int]]:
    """(call, path below the run, size) of every fsync and rename of a run of two steps."""
    seen: list[tuple[str, str, int]] = []
    fsync, replace = os.fsync, os.replace

    def below(path: str | os.PathLike) -> str:
        return os.path.relpath(path, tmp_path / "run")

    def watched_fsync(file: int) -> None:
        fsync(file)
        seen.append(("fsync", below(os.readlink(f"/proc/self/fd/{file}")), os.fstat(file).st_size))

    def watched_replace(source: str, target: str) -> None:
        replace(source, target)
        seen.append(("rename", below(target), 0))

    monkeypatch.setattr(os, "fsync", watched_fsync)
    monkeypatch.setattr(os, "replace", watched_replace)
    assert main([str(make_sft_task(tmp_path)), "name=run", "steps=2"]) == 0
    return seen


def test_everything_in_a_checkpoint_and_every_row_before_it_is_flushed_before_it_gets_its_name(events, tmp_path):
    run = tmp_path / "run"
    for step in (1, 2):
        named = events.index(("rename", f"checkpoints/step_{step:06d}", 0))
        flushed = {path for call, path, _ in events[:named] if call == "fsync"}
        partial, final = f"checkpoints/.step_{step:06d}.partial", run / "checkpoints" / f"step_{step:06d}"
        inside = [path.relative_to(final) for path in final.rglob("*") if path.name != "manifest.json"]
        assert len(inside) > 5 and {f"{partial}/{path}" for path in inside} <= flushed  # files and folders
        assert partial in flushed  # the name of the manifest, which was flushed before it got it
        lengths = [len(line) for line in (run / "metrics.jsonl").read_bytes().splitlines(keepends=True)]
        sizes = [size for call, path, size in events[:named] if (call, path) == ("fsync", "metrics.jsonl")]
        assert sum(lengths[:step]) in sizes, "every row of the steps that it stands for"
        assert any(Path(path).name.startswith("events.out.tfevents") for path in flushed)


def test_latest_moves_after_the_checkpoints_name_is_on_the_disk_and_is_there_itself(events):
    for step in (1, 2):
        named = events.index(("rename", f"checkpoints/step_{step:06d}", 0))
        after = [(call, path) for call, path, _ in events[named + 1 :]]
        moved = after.index(("rename", "latest"))
        assert ("fsync", "checkpoints") in after[:moved] and ("fsync", ".") in after[moved:]
