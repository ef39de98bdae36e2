"""One trace per profiled step over all ranks, for https://ui.perfetto.dev.

    python -m dccot.train.trace runs/NAME/profile/step_000010      →  step_000010.trace.json.gz in that folder

    phases         rank 0   rollout ████████ grade ██ old_logprob ███ reference ███ update ██████ sync █
                   rank 1   rollout ██████ …                            one lane per rank: who waits for whom
    rank 0 · CPU   threads with every operator, phases around them      as torch's profiler wrote them
    rank 0 · GPU 0 streams with every kernel
    rank 1 · CPU   …

Every rank writes its own trace (rank0.pt.trace.json, …). Here the ids of processes, threads and arrows are made unique
over all ranks, and times start at the same moment; ranks on several machines are aligned as well as the machines'
clocks.
"""

from __future__ import annotations

import io
import json
import logging
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

from dccot.core.command import run_cleanly
from dccot.core.files import BadData, atomic_file

log = logging.getLogger(__name__)

PHASES = 1  # the process that holds one lane of phases per rank
THREADS = 1_000_000  # thread ids per rank
MOST_RANKS = 4096
Event = dict[str, Any]


def merge(step_folder: str | Path) -> Path:
    """Merge the traces of all ranks in `step_folder`; the path of the merged one, written whole or not at all."""
    folder = Path(step_folder)
    ranks = {int(path.name.removeprefix("rank").split(".")[0]): path for path in folder.glob("rank*.pt.trace.json")}
    if not ranks:
        raise FileNotFoundError(f"{folder} holds no rank*.pt.trace.json; profile.steps says which steps leave traces")
    target = folder / f"{folder.name}.trace.json.gz"
    with atomic_file(target) as file:
        out = io.TextIOWrapper(file, encoding="utf-8")
        _write(out, dict(sorted(ranks.items())))
        out.detach()  # flushed, and open for the rest of its format
    return target


def _write(out: TextIO, ranks: dict[int, Path]) -> None:
    """All ranks' events, one rank in memory at a time."""
    base, world = None, 1
    phases = json.dumps(_metadata("process_name", PHASES, name="phases"))
    out.write('{"displayTimeUnit": "ms", "traceEvents": [' + phases)
    for rank, path in ranks.items():
        trace = _read(path)
        if base is None:
            base, world = trace.get("baseTimeNanoseconds", 0), trace.get("distributedInfo", {}).get("world_size", 1)
        out.write("," + json.dumps(list(_events_of(trace, rank, base)))[1:-1])
    out.write("]}")
    if len(ranks) < world:
        log.warning("%s: traces of %d of %d ranks; the others wrote none", path.parent, len(ranks), world)


def _read(path: Path) -> dict:
    try:
        return json.loads(path.read_bytes())
    except ValueError as error:
        raise BadData(f"{path} is not a whole trace ({error}); its rank stopped while writing it") from None


def _events_of(trace: dict, rank: int, base: int) -> Iterator[Event]:
    """One rank's events with ids that no other rank uses, on the clock of the rank whose base is given."""
    events: list[Event] = trace["traceEvents"]
    late = (trace.get("baseTimeNanoseconds", 0) - base) / 1000  # ts is in µs since the base
    labels = {e["pid"]: e["args"]["labels"] for e in events if e["ph"] == "M" and e["name"] == "process_labels"}
    # other ids are the profiler's own bookkeeping
    used = {e["pid"] for e in events if e["ph"] != "M" and isinstance(e["pid"], int)}
    ordered = sorted(used, key=lambda pid: (labels.get(pid) != "CPU", pid))
    pids = {pid: 1000 * (rank + 1) + number for number, pid in enumerate(ordered)}
    tids: dict[tuple, int] = {}  # unique over all ranks as well: Perfetto identifies threads by id only
    for pid, new in pids.items():
        yield _metadata("process_name", new, name=f"rank {rank} · {labels.get(pid, pid)}")
        yield _metadata("process_sort_index", new, sort_index=new)
    lane = THREADS * (rank + 1)
    yield _metadata("thread_name", PHASES, lane, name=f"rank {rank}")
    for start, end, name in _phases(events):
        placed = {"pid": PHASES, "tid": lane, "ts": start + late, "dur": end - start}
        yield {"ph": "X", "cat": "phase", "name": name, **placed}
    for event in events:
        if event["pid"] not in pids or (event["ph"] == "M" and event["name"].startswith("process")):
            continue
        tid = tids.setdefault((event["pid"], event["tid"]), lane + 1 + len(tids))
        moved = {**event, "pid": pids[event["pid"]], "tid": tid, "ts": event["ts"] + late}
        if "id" in event:
            moved["id"] = event["id"] * MOST_RANKS + rank
        yield moved


def _phases(events: Sequence[Event]) -> Iterator[tuple[float, float, str]]:
    """(start, end, name) of the outermost named ranges of a rank's main thread, whose id is that of its process."""
    mine = [e for e in events if e.get("cat") == "user_annotation" and e["pid"] == e["tid"]]
    until = float("-inf")
    for event in sorted(mine, key=lambda e: (e["ts"], -e["dur"])):
        if event["ts"] >= until:
            until = event["ts"] + event["dur"]
            yield event["ts"], until, event["name"]


def _metadata(kind: str, pid: int, tid: int = 0, **arguments: Any) -> Event:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": arguments}


if __name__ == "__main__":
    sys.exit(run_cleanly(lambda: print(*map(merge, sys.argv[1:]))))
