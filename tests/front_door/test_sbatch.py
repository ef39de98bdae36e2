"""The batch script of docs/machines.md, with stand-ins for SLURM's commands and for the ranks: what it does with their
exit codes.
"""

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "train.sbatch"
SRUN = """#!/bin/bash
shift
for SLURM_PROCID in 0 1; do export SLURM_PROCID SLURM_LOCALID=$SLURM_PROCID SLURM_NTASKS=2; "$@"; code=$?; done
exit $code
"""
RANK = """#!/bin/bash
echo "rank $RANK of $WORLD_SIZE on $LOCAL_RANK at $MASTER_ADDR: $*" >> said
read -r code < codes; [ "$RANK" = 1 ] && sed -i 1d codes
exit $code
"""


@pytest.fixture
def submit(tmp_path):
    scontrol = '#!/bin/bash\n[ "$1" = show ] && echo node1 || echo "$*" >> asked\n'
    for name, text in {"srun": SRUN, "scontrol": scontrol, "python": RANK}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)

    def run(*codes: int) -> tuple[int, int, bool]:
        """Exit code, how often the ranks were started, whether the job went back to the queue."""
        (tmp_path / "codes").write_text("".join(f"{code}\n" for code in codes))
        environment = {
            **os.environ,
            "PATH": f"{tmp_path}:{os.environ['PATH']}",
            "SLURM_JOB_ID": "7",
            "SLURM_JOB_NODELIST": "node[1-2]",
        }
        done = subprocess.run(
            ["bash", SCRIPT, "dccot.train.rl", "a b.yaml", "x=1"], cwd=tmp_path, env=environment, timeout=600
        )
        said = (tmp_path / "said").read_text().splitlines()
        assert said[:2] == [f"rank {rank} of 2 on {rank} at node1: -m dccot.train.rl a b.yaml x=1" for rank in (0, 1)]
        return (
            done.returncode,
            len(said) // 2,
            (tmp_path / "asked").exists() and (tmp_path / "asked").read_text() == "requeue 7\n",
        )

    return run


@pytest.mark.parametrize(
    "codes, expected",
    [
        ([0], (0, 1, False)),
        ([75], (0, 1, True)),
        ([2], (2, 1, False)),
        ([1, 70, 0], (0, 3, False)),
        ([1, 75], (0, 2, True)),
        ([1, 1, 1, 1, 1, 1], (1, 5, False)),
    ],
)
def test_a_run_that_was_stopped_is_queued_again_and_one_that_crashed_is_started_again(submit, codes, expected):
    assert submit(*codes) == expected
