"""The timeline of one response: who wrote when, and what every engine step had in its batch.

    timeline = Timeline()                             a Watch: pass it to generate(…, watch=timeline)
    timeline.write("solve.json")                      opens in https://ui.perfetto.dev and in chrome://tracing

    response   director  ███████           ██████     one slice per call, arrows where workers are spawned and read
               worker 1         ████████
               worker 2         █████
    engine     steps     ▏▏▏▏▏▏▏▏▏▏▏▏▏▏▏▏▏▏▏▏▏▏       one slice per step, with its batch; the batch also as a counter

The steps also give the cost of decoding alone: those with a single call in the batch, excluding prefills.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dccot.rollout.director import Call, Completion
from dccot.rollout.engine import Engine
from dccot.rollout.generate import Request, Watch

RESPONSE, ENGINE = 1, 2  # the trace's "processes"
DIRECTOR, STEPS = 10, 1000  # thread ids; workers follow. Unique over both: Perfetto knows threads by id only


@dataclass
class Lane:
    """One call to the engine. Times are seconds of the timeline's clock."""

    call: Call
    start: float
    ids: list[int] = field(default_factory=list)  # sampled so far
    end: float = 0.0
    completion: Completion | None = None  # None: still running

    @property
    def worker(self) -> int:
        """Its number among the workers of its fork; 0 is the director."""
        return self.call.thread[-1] if self.call.thread else 0


@dataclass
class Step:
    """One forward pass of the engine."""

    start: float
    end: float
    batch: int  # calls in it
    prefills: int  # calls that produced their first token
    tokens: int  # sampled in it


class Timeline(Watch):
    """Records one response. `show` is called on every change; its time is not counted as engine time."""

    def __init__(self, show: Callable[[Timeline], None] | None = None, clock: Callable[[], float] = time.perf_counter):
        self.lanes: list[Lane] = []
        self.steps: list[Step] = []
        self._show, self._clock, self._resumed = show or (lambda timeline: None), clock, 0.0

    def started(self, request: Request, call: Call) -> None:
        self.lanes.append(Lane(call, self._clock()))
        self._changed()

    def stepped(self, engine: Engine) -> None:
        now, sampled = self._clock(), engine.written()
        running = self.running
        step = Step(self._resumed, now, len(running), sum(not lane.ids for lane in running), 0)
        for key, call in engine.pending.items():
            lane = self._lane(call)
            step.tokens += len(sampled[key]) - len(lane.ids)
            lane.ids = sampled[key]
        self.steps.append(step)
        self._changed()

    def finished(self, request: Request, call: Call, completion: Completion) -> None:
        lane, step = self._lane(call), self.steps[-1]
        step.tokens += len(completion.ids) - len(lane.ids)
        lane.ids, lane.end, lane.completion = completion.ids, step.end, completion
        self._changed()

    @property
    def running(self) -> list[Lane]:
        return [lane for lane in self.lanes if lane.completion is None]

    @property
    def seconds(self) -> float:
        """Wall-clock from the first call to the last token."""
        return self.steps[-1].end - self.lanes[0].start if self.steps else 0.0

    @property
    def alone(self) -> list[Step]:
        """Steps that decoded a single sequence."""
        return [step for step in self.steps if step.batch == 1 and not step.prefills]

    @property
    def seconds_per_token_alone(self) -> float | None:
        """Seconds per token when nothing else is decoded; None if that never happened."""
        tokens = sum(step.tokens for step in self.alone)
        return sum(step.end - step.start for step in self.alone) / tokens if tokens else None

    def trace(self, about: Mapping[str, Any] | None = None) -> dict:
        """The timeline in Chrome's trace event format."""
        return {"traceEvents": list(self._events()), "displayTimeUnit": "ms", "otherData": dict(about or {})}

    def write(self, path: str | Path, about: Mapping[str, Any] | None = None) -> None:
        Path(path).write_text(json.dumps(self.trace(about), ensure_ascii=False), encoding="utf-8")

    def _lane(self, call: Call) -> Lane:
        return next(lane for lane in self.running if lane.call is call)

    def _changed(self) -> None:
        self._show(self)
        self._resumed = self._clock()

    def _events(self) -> Iterator[dict]:
        origin = self.lanes[0].start if self.lanes else 0.0

        def at(seconds: float) -> float:
            return round(1e6 * (seconds - origin), 3)

        def piece(name: str, process: int, thread: int, start: float, end: float, arguments: dict) -> dict:
            where = {"pid": process, "tid": thread, "ts": at(start), "dur": at(end) - at(start)}
            return {"ph": "X", "name": name, **where, "args": arguments}

        def named(kind: str, name: str, order: int, **where: int) -> Iterator[dict]:
            yield {"ph": "M", "name": f"{kind}_name", **where, "args": {"name": name}}
            yield {"ph": "M", "name": f"{kind}_sort_index", **where, "args": {"sort_index": order}}

        def batch(seconds: float, calls: int) -> dict:
            return {"ph": "C", "name": "batch", "pid": ENGINE, "ts": at(seconds), "args": {"calls": calls}}

        writers = dict(sorted((lane.call.thread[1::2], lane.call.writer) for lane in self.lanes))
        tids = {name: DIRECTOR + number for number, name in enumerate(writers.values())} | {"steps": STEPS}
        names = {thread: name for name, thread in tids.items()}
        for process, name in ((RESPONSE, "response"), (ENGINE, "engine")):
            yield from named("process", name, process, pid=process)
        for thread, name in names.items():
            yield from named("thread", name, thread, pid=ENGINE if thread == STEPS else RESPONSE, tid=thread)
        for lane in self.lanes:
            if not (completion := lane.completion):
                continue
            fork, first = lane.call.path[-2:]
            name = f"{lane.call.writer}, {'round' if first else 'part'} {fork + 1}"
            counts = {"sampled": len(lane.ids), "inserted": len(lane.call.inserted), "prompt": len(lane.call.prompt)}
            facts = counts | {"cached": completion.cached, "stop": completion.stop.value}
            yield piece(name, RESPONSE, tids[lane.call.writer], lane.start, lane.end, facts)
        for number, (source, target) in enumerate(_arrows([lane for lane in self.lanes if lane.completion])):
            arrow = {"name": "spawn" if target.call.path[-1] else "read", "cat": "tree", "id": number, "pid": RESPONSE}
            last_moment = at(source.end) - 0.001  # an arrow leaves from inside its slice
            yield {"ph": "s", "tid": tids[source.call.writer], "ts": last_moment, **arrow}
            yield {"ph": "f", "bp": "e", "tid": tids[target.call.writer], "ts": at(target.start), **arrow}
        for step in self.steps:
            counts = {"batch": step.batch, "prefills": step.prefills, "tokens": step.tokens}
            yield piece(f"batch {step.batch}", ENGINE, STEPS, step.start, step.end, counts)
            yield batch(step.start, step.batch)
        if self.steps:
            yield batch(self.steps[-1].end, 0)


def _arrows(lanes: list[Lane]) -> Iterator[tuple[Lane, Lane]]:
    """(from, to): a thread to each worker it spawned, the end of each worker to the thread that read it."""
    by_place = {(lane.call.thread, lane.call.number): lane for lane in lanes}
    last = {lane.call.thread: lane for lane in sorted(lanes, key=lambda lane: lane.call.path)}
    for thread, lane in last.items():
        if thread:
            *above, number, _ = thread
            yield by_place[tuple(above), number], by_place[thread, 0]
            if reader := by_place.get((tuple(above), number + 1)):
                yield lane, reader
