"""The merged trace of a step: real profiler traces of two ranks, and small ones by hand."""

import gzip
import json
import sys
from collections import Counter
from pathlib import Path

import pytest

from dccot.core.files import BadData
from dccot.train.trace import merge
from tests.support import programs

pytestmark = pytest.mark.slow

PROGRAM = """
import sys, torch, torch.distributed as dist
from pathlib import Path
from dccot.train.phases import Phases, ProfileConfig, profiled
from dccot.core.runtime import Runtime
runtime = Runtime.start(60)
phases = Phases(runtime)
with profiled(ProfileConfig(steps=[10], phases=["rollout", "update"]), 10, Path(sys.argv[1]), runtime, phases):
    with phases("rollout"):
        torch.randn(64, 64) @ torch.randn(64, 64)
    with phases("grade"):
        torch.zeros(3).cumsum(0)
    with phases("update"), torch.profiler.record_function("inner"):
        weight = torch.randn(8, 8, requires_grad=True)
        (weight @ weight).sum().backward()
        dist.all_reduce(weight.grad)
with profiled(ProfileConfig(steps=[10]), 11, Path(sys.argv[1]), runtime, phases):
    torch.zeros(3).sum()
runtime.stop()
"""


def opened(path: Path) -> list[dict]:
    return json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]


def names(events: list[dict], kind: str) -> dict[int, str]:
    return {e["tid" if kind == "thread_name" else "pid"]: e["args"]["name"] for e in events if e["name"] == kind}


@pytest.fixture(scope="module")
def step_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("profile")
    program = folder / "program.py"
    program.write_text(PROGRAM)
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node",
        "2",
        str(program),
        str(folder),
    ]
    ran = programs.run(command, capture_output=True, text=True, timeout=900)
    assert ran.returncode == 0, ran.stderr
    return folder / "step_000010"


@pytest.fixture(scope="module")
def merged(step_folder):
    return opened(step_folder / "step_000010.trace.json.gz")  # made by the ranks themselves


def test_ranks_are_named_processes_and_phases_have_a_lane_each(merged):
    assert sorted(names(merged, "process_name").values()) == ["phases", "rank 0 · CPU", "rank 1 · CPU"]
    lanes = names(merged, "thread_name")
    shown = sorted((lanes[e["tid"]], e["ts"], e["name"]) for e in merged if e.get("cat") == "phase")
    assert [(lane, name) for lane, _, name in shown] == [
        (f"rank {r}", name) for r in (0, 1) for name in ("rollout", "update")
    ]


def test_only_chosen_steps_leave_traces(step_folder):
    assert [folder.name for folder in step_folder.parent.iterdir() if folder.is_dir()] == ["step_000010"]
    assert sorted(path.name for path in step_folder.iterdir()) == [
        "rank0.pt.trace.json",
        "rank1.pt.trace.json",
        "step_000010.trace.json.gz",
    ]


def test_no_operator_is_lost(step_folder, merged):
    processes = names(merged, "process_name")
    kinds = ("cpu_op", "user_annotation")
    for rank in (0, 1):
        alone = json.loads((step_folder / f"rank{rank}.pt.trace.json").read_text())["traceEvents"]
        expected = Counter(e["name"] for e in alone if e.get("cat") in kinds)
        found = Counter(
            e["name"] for e in merged if processes[e["pid"]] == f"rank {rank} · CPU" and e.get("cat") in kinds
        )
        assert found == expected and found["aten::mm"]


def test_a_collective_runs_on_both_ranks_at_the_same_time(merged):
    [one, other] = [e for e in merged if e["name"] == "gloo:all_reduce"]
    assert one["pid"] != other["pid"]
    assert one["ts"] < other["ts"] + other["dur"] and other["ts"] < one["ts"] + one["dur"]


def test_arrows_stay_within_their_rank(merged):
    ends: dict[int, set[int]] = {}
    for event in merged:
        if event["ph"] in "sf":
            assert isinstance(event["id"], int)  # Perfetto reads nothing else, but for hexadecimal strings
            ends.setdefault(event["id"], set()).add(event["pid"])
    assert ends and all(len(pids) == 1 for pids in ends.values())


def by_hand(folder: Path, rank: int, base_ns: int, *events: dict, world: int = 2) -> None:
    content = {"baseTimeNanoseconds": base_ns, "distributedInfo": {"world_size": world}, "traceEvents": list(events)}
    (folder / f"rank{rank}.pt.trace.json").write_text(json.dumps(content))


def labelled(pid: int, label: str) -> dict:
    return {"ph": "M", "name": "process_labels", "pid": pid, "tid": 0, "ts": 0, "args": {"labels": label}}


def operator(name: str, ts: float, pid: int = 5, tid: int = 5, cat: str = "cpu_op") -> dict:
    return {"ph": "X", "cat": cat, "name": name, "pid": pid, "tid": tid, "ts": ts, "dur": 1.0}


def test_clocks_with_different_bases_are_aligned(tmp_path):
    by_hand(tmp_path, 0, 7_000_000_000, labelled(5, "CPU"), operator("early", 30.0))
    by_hand(tmp_path, 1, 9_000_000_000, labelled(5, "CPU"), operator("late", 30.0))
    ts = {e["name"]: e["ts"] for e in opened(merge(tmp_path)) if e["ph"] == "X"}
    assert ts == {"early": 30.0, "late": 30.0 + 2e6}


def test_processes_with_the_same_id_on_two_machines_stay_apart_and_gpus_are_named(tmp_path):
    for rank in (0, 1):
        labels = labelled(5, "CPU"), labelled(0, "GPU 0"), labelled(1, "GPU 1")
        by_hand(tmp_path, rank, 0, *labels, operator("launch", 1.0), operator("kernel", 2.0, pid=rank, tid=7))
    events = opened(merge(tmp_path))
    processes = names(events, "process_name")
    assert sorted((processes[e["pid"]], e["name"]) for e in events if e["ph"] == "X") == [
        ("rank 0 · CPU", "launch"), ("rank 0 · GPU 0", "kernel"), ("rank 1 · CPU", "launch"), ("rank 1 · GPU 1", "kernel"),
    ]  # fmt: skip


def test_threads_with_the_same_id_on_two_ranks_get_different_ones(tmp_path):
    for rank in (0, 1):
        events = operator("main", 1.0), operator("loader", 1.0, tid=6), operator("main", 3.0)
        by_hand(tmp_path, rank, 0, labelled(5, "CPU"), *events)
    threads = {(e["pid"], e["name"]): e["tid"] for e in opened(merge(tmp_path)) if e["ph"] == "X"}
    assert len(threads) == len(set(threads.values())) == 4


def test_only_outermost_ranges_of_the_main_thread_are_phases(tmp_path):
    outer = {**operator("update", 10.0, cat="user_annotation"), "dur": 50.0}
    at = {"inner": (20.0, 5), "gloo:send": (0.0, 6), "sync": (60.0, 5)}
    others = [operator(name, ts, tid=tid, cat="user_annotation") for name, (ts, tid) in at.items()]
    by_hand(tmp_path, 0, 0, labelled(5, "CPU"), others[0], outer, *others[1:])
    phases = [(e["name"], e["ts"], e["dur"]) for e in opened(merge(tmp_path)) if e.get("cat") == "phase"]
    assert phases == [("update", 10.0, 50.0), ("sync", 60.0, 1.0)]


def test_a_rank_that_left_no_trace_is_reported(tmp_path, caplog):
    by_hand(tmp_path, 0, 0, operator("alone", 1.0), world=8)
    merge(tmp_path)
    assert "traces of 1 of 8 ranks" in caplog.text


def test_an_empty_folder_and_a_cut_trace_are_refused_by_name_and_nothing_is_written(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"holds no rank\*.pt.trace.json"):
        merge(tmp_path)
    (tmp_path / "rank0.pt.trace.json").write_text('{"traceEvents": [')
    with pytest.raises(BadData, match=r"rank0\.pt\.trace\.json is not a whole trace"):
        merge(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["rank0.pt.trace.json"]
