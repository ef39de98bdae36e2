"""The batch scripts in examples/, with stand-ins for SLURM's commands, for ranks and for servers: what they start, and
what they do with exit codes.
"""

import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

from tests.support.servers import eventually

EXAMPLES = Path(__file__).parents[2] / "examples"
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
            ["bash", EXAMPLES / "train.sbatch", "dccot.train.rl", "a b.yaml", "x=1"],
            cwd=tmp_path,
            env=environment,
            timeout=600,
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


TASKS = """#!/bin/bash
while [[ $1 == --* ]]; do [[ $1 == --ntasks=* ]] && export SLURM_NTASKS=${1#*=}; shift; done
trap 'kill $(jobs -p)' TERM
for SLURM_PROCID in $(seq 0 $((SLURM_NTASKS - 1))); do export SLURM_PROCID; "$@" & done
wait; wait $!
"""
TASK = """#!/bin/bash
echo "$VLLM_API_KEY $RANK $CUDA_VISIBLE_DEVICES ${*:2}" >> said
trap 'kill $!; exit 75' TERM
sleep 60 & wait
"""


def test_servers_and_trainer_agree_on_settings_addresses_and_key_and_a_signal_stops_the_trainer(tmp_path):
    scontrol = '#!/bin/bash\n[ "$1" = show ] && printf "node%s\\n" 1 2 3 || echo "$*" >> asked\n'
    for name, text in {"srun": TASKS, "scontrol": scontrol, "python": TASK, "curl": "#!/bin/bash\n"}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    command = ["bash", EXAMPLES / "asynchronous.sbatch", "runs/sft", "rl.yaml", "engine.context=9216", "steps=3"]
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    environment["SLURM_JOB_NODELIST"] = "node[1-3]"
    said = lambda: (tmp_path / "said").read_text().splitlines() if (tmp_path / "said").exists() else []
    job = subprocess.Popen(command, cwd=tmp_path, env=environment, start_new_session=True)
    try:
        assert eventually(lambda: len(said()) == 24)
        job.send_signal(signal.SIGTERM)
        assert job.wait(60) == 75
    finally:
        os.killpg(job.pid, signal.SIGKILL)
    assert (tmp_path / "asked").read_text() == "requeue 7\n"
    asked = "dccot.rollout.servers runs/sft engine.context=9216 --config rl.yaml --host {} --port {}"
    [key] = {line.split()[0] for line in said()}
    assert re.fullmatch(r"\w{30,}", key)
    places = [(f"node{host}", 8000 + gpu, gpu) for host in (2, 3) for gpu in range(8)]
    servers = [f"{key}  {gpu} {asked.format(host, port)}" for host, port, gpu in places]
    urls = ",".join(f"http://{host}:{port}" for host, port, _ in places)
    given = "rl.yaml model.path=runs/sft engine.context=9216 steps=3 rollout.mode=asynchronous"
    train = f"dccot.train.rl {given} engine.url=[{urls}]"
    assert sorted(said()) == sorted([*servers, *(f"{key} {rank}  {train}" for rank in range(8))])
