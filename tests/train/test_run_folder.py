"""One job at a time writes to a run's folder, and all of it is trained on the same data."""

import os
import signal
import subprocess
import sys

import pytest

from dccot.files import BadData
from dccot.train.run import _keep_rows, claim

HOLD = """
import sys, time
from pathlib import Path
from dccot.train.run import claim
print(claim(Path(sys.argv[1])), flush=True)
time.sleep(60)
"""


def test_a_folder_that_a_living_job_writes_to_is_refused_and_that_of_a_killed_one_is_not(tmp_path):
    run = tmp_path / "run"
    other = subprocess.Popen([sys.executable, "-c", HOLD, run], stdout=subprocess.PIPE, text=True)
    try:
        assert other.stdout.readline() == "None\n"
        assert claim(run).startswith(f"{run} is being written by process {other.pid} on ")
    finally:
        other.send_signal(signal.SIGKILL)
        other.wait()
        other.stdout.close()
    assert claim(run) is None
    assert claim(run) is None, "the same process may open its run again"
    assert f"process {os.getpid()} on" in (run / ".lock").read_text()


def test_a_run_with_a_checkpoint_refuses_other_data_and_names_the_first_row_that_differs(tmp_path):
    rows = [("p0", "aa"), ("p1", "bb"), ("p2", "cc")]
    _keep_rows(tmp_path, rows)
    _keep_rows(tmp_path, rows[:2])  # nothing was trained yet: this is its data
    (tmp_path / "latest").write_text("step_000001")
    _keep_rows(tmp_path, rows[:2])
    for other, said in {
        (("p0", "aa"), ("p1", "xx")): "row 2 'p1' has another content",
        (("p9", "aa"), ("p1", "bb")): "row 1 was 'p0' and is 'p9'",
        tuple(rows): "row 3 was missing and is 'p2'",
        (("p0", "aa"),): "row 2 was 'p1' and is missing",
    }.items():
        with pytest.raises(BadData, match=f"{tmp_path} was trained on other data: {said}; continue with that data, or choose another name"):
            _keep_rows(tmp_path, other)
    assert (tmp_path / "data.jsonl").read_text().count("\n") == 2
