"""One job at a time writes to a run's folder."""

import os
import signal
import subprocess
import sys

from dccot.train.run import claim

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
