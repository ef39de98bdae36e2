"""One place starts process groups; how long ranks wait for each other is what the work at hand says."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dccot.core.runtime import fixed_segments, prepare_gpu
from tests.support import programs

ROOT = Path(__file__).parents[2]
APART = """
import os, time
from dccot.model.sharding import _mesh
from dccot.core.runtime import Runtime
import torch

def say(*words):                       # in one piece, whatever the other rank says at the same time
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())

if os.environ["RANK"] == "1":
    time.sleep(4)                                                       # starting may take longer than any collective
with Runtime.start(2.0) as outer:                                       # a training run's group, with little patience
    mesh = _mesh(torch.device("cpu"), 2)
    say("mesh", [g._get_backend(torch.device("cpu")).options._timeout.total_seconds() for g in mesh.get_all_groups()])
    with Runtime.of_workers() as runtime:                               # the same group, for ranks that work apart
        if runtime.is_main:
            time.sleep(4)
        say("together", runtime.gather([runtime.rank]))
        say("exchanged", runtime.rank, runtime.exchange([f"{runtime.rank} to {rank}" * rank for rank in range(2)]))
    with Runtime.start(1.0) as runtime:                                 # a stage of its own
        if runtime.is_main:
            time.sleep(4)
        try:
            runtime.barrier()
        except RuntimeError as error:
            say("timed out", runtime.rank)
            os._exit(0)
"""


ALONE = """
import torch
import torch.distributed as dist
from dccot.core.runtime import PATIENCE, Runtime, set_timeout

def timeout():
    return dist.group.WORLD._get_backend(torch.device("cpu")).options._timeout.total_seconds()

with Runtime.of_workers() as runtime:                                   # one worker needs no group
    assert runtime.gather(["mine"]) == [["mine"]]
    assert not dist.is_initialized()
with Runtime.start(PATIENCE) as pipeline:
    assert pipeline.owned and timeout() == PATIENCE
    with Runtime.start(120.0) as stage:
        assert not stage.owned and timeout() == 120.0
    assert dist.is_initialized()
    set_timeout(PATIENCE)
    assert timeout() == PATIENCE
assert not dist.is_initialized()
"""


def test_only_the_runtime_starts_process_groups():
    """The rehearsal's are not real."""
    calls = [
        str(path.relative_to(ROOT))
        for room in ("dccot", "kernels", "model", "rollout", "data", "train", "eval", "serve", "lab")
        for path in (ROOT / room).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "init_process_group"
    ]
    assert set(calls) == {"dccot/core/runtime.py", "lab/rehearsal/step.py"}


def test_one_worker_needs_no_group_and_a_group_that_exists_takes_the_time_out_of_each_stage():
    """In a process of its own: engines of other tests leave a group in this one."""
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    subprocess.run([sys.executable, "-c", ALONE], check=True, timeout=900, env=environment)


@pytest.mark.slow
def test_late_ranks_and_ranks_that_work_apart_are_waited_for_and_those_of_a_stage_only_so_long(tmp_path):
    program = tmp_path / "apart.py"
    program.write_text(APART)
    done = programs.finish(programs.torchrun(2, program), code=None)
    lines = done.stdout.splitlines()
    assert lines.count("mesh [2.0, 2.0]") == 2, done.stderr[-3000:]
    assert lines.count("together [[0], [1]]") == 2
    assert {"exchanged 0 ['', '']", "exchanged 1 ['0 to 1', '1 to 1']"} <= set(lines)
    assert "timed out 1" in lines


def test_settings_for_gpus_are_there_before_cuda_and_nccl_start_and_yours_come_first():
    found: dict[str, str] = {}
    prepare_gpu(found)
    assert found == {"PYTORCH_ALLOC_CONF": "expandable_segments:True", "NCCL_GRAPH_REGISTER": "0"}
    yours = {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:512", "NCCL_GRAPH_REGISTER": "1"}
    found = dict(yours)
    prepare_gpu(found)
    assert found == yours


def test_segments_are_fixed_for_a_while_with_every_other_setting_kept(monkeypatch):
    told = []
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", told.append)
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True,max_split_size_mb:512")
    with fixed_segments():
        assert told == ["max_split_size_mb:512,expandable_segments:False"]
    assert told[1:] == ["expandable_segments:True,max_split_size_mb:512"]
