"""The merged trace of a step, from small traces made by hand; test_two_ranks.py has real ones."""

import gzip
import json
from pathlib import Path

import pytest

from dccot.core.files import BadData
from dccot.train.trace import merge

pytestmark = pytest.mark.slow


def opened(path: Path) -> list[dict]:
    return json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]


def names(events: list[dict], kind: str) -> dict[int, str]:
    return {e["tid" if kind == "thread_name" else "pid"]: e["args"]["name"] for e in events if e["name"] == kind}


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
    of_rank = [[(f"rank {rank} · CPU", "launch"), (f"rank {rank} · GPU {rank}", "kernel")] for rank in (0, 1)]
    assert sorted((processes[e["pid"]], e["name"]) for e in events if e["ph"] == "X") == of_rank[0] + of_rank[1]


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
