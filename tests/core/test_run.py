"""One job at a time writes to a run's folder, and all of it is trained on the same data."""

import os
import signal
import socket
import subprocess
import sys
import threading
from dataclasses import dataclass

import pytest

from dccot.core import files
from dccot.core.files import BadData
from dccot.core.provenance import record
from dccot.core.run import Run
from dccot.core.runtime import Runtime
from tests.support import programs

pytestmark = pytest.mark.slow

HOLD = """
import sys, time
from dccot.core.run import Run
print(Run(sys.argv[1]).claim(), flush=True)
time.sleep(900)
"""


def test_a_folder_that_a_living_job_writes_to_is_refused_and_that_of_a_killed_one_is_not(tmp_path):
    run = Run(tmp_path / "run")
    other = programs.Popen([sys.executable, "-c", HOLD, run.folder], stdout=subprocess.PIPE, text=True)
    try:
        assert other.stdout.readline() == "None\n"
        with pytest.raises(BadData, match=f"^{run} is being written by process {other.pid} on "):
            run.claim()
    finally:
        other.send_signal(signal.SIGKILL)
        other.wait()
        other.stdout.close()
    run.claim()
    run.claim()  # the same process may open its run again
    assert f"process {os.getpid()} on" in (run.folder / ".lock").read_text()


def test_a_run_with_a_checkpoint_refuses_other_data_and_names_the_first_row_that_differs(tmp_path):
    rows = [("p0", "aa"), ("p1", "bb"), ("p2", "cc")]
    Run(tmp_path).keep_rows(rows)
    Run(tmp_path).keep_rows(rows[:2])  # nothing was trained yet: this is its data
    (tmp_path / "latest").write_text("step_000001")
    Run(tmp_path).keep_rows(rows[:2])
    for other, said in {
        (("p0", "aa"), ("p1", "xx")): "row 2 'p1' has changed",
        (("p9", "aa"), ("p1", "bb")): "row 1 was 'p0' and is 'p9'",
        tuple(rows): "row 3 was missing and is 'p2'",
        (("p0", "aa"),): "row 2 was 'p1' and is missing",
    }.items():
        with pytest.raises(
            BadData,
            match=f"{tmp_path} was trained on other data: {said}; continue with that data, or choose another name",
        ):
            Run(tmp_path).keep_rows(other)
    assert (tmp_path / "data.jsonl").read_text().count("\n") == 2


def test_a_lock_of_another_machine_is_waited_for_with_its_owner_and_age_and_taken_when_it_is_given_up(
    tmp_path, monkeypatch, caplog
):
    """Only /proc/locks tells the two apart: here it is said to know of no lock."""
    monkeypatch.setattr(files, "held_here", lambda file: False)
    run = Run(tmp_path / "run")
    elsewhere = HOLD.replace("import sys", "import socket; socket.gethostname = lambda: 'node7'\nimport sys")
    other = programs.Popen([sys.executable, "-c", elsewhere, run.folder], stdout=subprocess.PIPE, text=True)
    try:
        assert other.stdout.readline() == "None\n"
        owner = f"process {other.pid} on node7"
        with pytest.raises(BadData, match=f"^{run} is being written by {owner}, last "):
            run.claim(patience=0.5)
        assert f"{run} is locked by {owner} on another machine, last written " in caplog.text
        threading.Timer(0.5, other.kill).start()
        run.claim(patience=60)
    finally:
        other.kill()
        other.wait()
        other.stdout.close()


def test_a_file_system_without_locks_is_put_up_with_everywhere(tmp_path):
    """The kernel itself refuses this process every lock, as it does on a network file system that has none."""
    program = """
import fcntl, os, sys
from pathlib import Path
from tests.support.no_locks import refuse_locks
from dccot.core.files import JsonlWriter
from dccot.core.run import Run
refuse_locks()
out = Path(sys.argv[1])
with open(out / "any", "w") as file:
    for lock in (fcntl.flock, fcntl.lockf):
        try:
            lock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            print(error)
print(Run(out / "run").claim())
with JsonlWriter(out / "rows.jsonl") as rows:
    rows.write({"a": 1})
print((out / "rows.jsonl").read_text(), end="")
"""
    done = programs.finish([sys.executable, "-c", program, tmp_path])
    assert done.stdout.splitlines() == ["[Errno 37] No locks available"] * 2 + ["None", '{"a": 1}'], done.stderr


def test_ranks_that_do_not_share_the_folder_are_refused_by_name(tmp_path):
    said = programs.finish(programs.torchrun(2, "tests.core.apart_program", tmp_path), code=None)
    here = socket.gethostname()
    refusal = f"run of rank 0 on {here} is not the folder of rank 1 on {here}; choose one"
    assert (said.stdout + said.stderr).count(refusal) == 2, "both ranks say so, and end"


def recorded(run: Run) -> None:
    record(run.folder, {}, {}, Runtime.alone())


@dataclass
class Group:
    workers: int = 3


@pytest.mark.parametrize(
    ("file", "content", "read", "said"),
    [
        ("metrics.jsonl", None, Run.rows, "metrics.jsonl is a folder; move it away"),
        (
            "config.yaml",
            b"seed: \xff\n",
            Run.settings,
            "copy the configuration from provenance.json, or delete the file",
        ),
        ("config.yaml", None, Run.settings, "copy the configuration from provenance.json, or delete the file"),
        ("config.yaml", b"rollout: 3\n", lambda run: run.group(Group, "rollout"), "it must be a group of settings"),
        ("done.json", b'{"steps": ', Run.finished, "delete it to run the stage again"),
        ("done.json", b"[]", Run.finished, "delete it to run the stage again"),
        ("done.json", b"{}", Run.finished, "delete it to run the stage again"),
        ("done.json", b'{"seconds": 1, "made_from": {}}', Run.finished, "delete it to run the stage again"),
        ("provenance.json", b'{"starts": [{', recorded, "delete it: the next start writes a new one"),
        ("provenance.json", b'{"start": []}', recorded, "delete it: the next start writes a new one"),
        ("provenance.json", b"\xff", recorded, "delete it: the next start writes a new one"),
        ("provenance.json", None, recorded, "delete it: the next start writes a new one"),
    ],
)
def test_a_damaged_file_is_refused_in_one_line_with_the_remedy(tmp_path, file, content, read, said):
    if content is None:
        (tmp_path / file).mkdir()
    else:
        (tmp_path / file).write_bytes(content)
    with pytest.raises(BadData) as refused:
        read(Run(tmp_path))
    line = str(refused.value)
    assert str(tmp_path / file) in line and said in line and "\n" not in line


def test_a_row_of_metrics_without_a_step_is_named_and_left_out(tmp_path, caplog):
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n{"loss": 1.0}\n{"step": 1}\n{"step": 2}\n')
    run = Run(tmp_path)
    run.keep_metrics_before(2)
    assert caplog.messages == [f"{tmp_path / 'metrics.jsonl'}:2: the row has no step; it is left out"]
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 0}\n{"step": 1}\n'
