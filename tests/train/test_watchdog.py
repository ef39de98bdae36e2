"""A rank that hangs says where while it hangs, and is ended when it hangs for too long."""

import itertools
import re
import sys
import time
from pathlib import Path

import pytest
import torch

from dccot.core.runtime import Runtime
from dccot.train.phases import STALLED, Phases, Watchdog
from tests.support import programs

pytestmark = pytest.mark.slow

HERE = Runtime(rank=3, ranks=8, chosen=torch.device("cpu"), owned=False)
PROGRAM = Path(__file__).with_name("hang_program.py")


@pytest.fixture
def phases(monkeypatch) -> Phases:
    monkeypatch.setattr(Watchdog, "LEAST_SECONDS", 0.05)
    phases = Phases(HERE)
    phases.begin_step(4)
    return phases


def wait_for(condition) -> None:
    deadline = time.monotonic() + 300
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)


def test_a_phase_far_slower_than_usual_is_reported_again_and_again_with_its_place_in_the_code_and_pending_calls(
    phases, caplog
):
    phases.pending = lambda: ["p1/0/0.0"]
    with phases("rollout"):
        pass
    with Watchdog(phases, stall_seconds=1e9), phases("rollout"):
        wait_for(lambda: len(caplog.records) >= 3)
    assert len(caplog.records) >= 3
    for message in (record.getMessage() for record in caplog.records):
        running = r"rank 3, step 4: rollout has been running for \d+ s, usually [\d.]+ s"
        assert re.match(rf"{running}; last progress \d+ s ago; 1 pending: p1", message)
        assert "in wait_for" in message


def test_a_phase_that_ends_while_it_is_reported_does_not_end_the_watch(monkeypatch, caplog):
    """The main thread moves on between any two reads: what a new phase usually takes is not known."""
    monkeypatch.setattr(Watchdog, "LEAST_SECONDS", 0.05)
    known = itertools.chain([0.001, 0.001], itertools.repeat(None))

    class Moving(Phases):
        usual = property(lambda self: next(known), lambda self, value: None)

    phases = Moving(HERE)
    phases.since -= 1
    with Watchdog(phases, stall_seconds=1e9) as watchdog:
        wait_for(lambda: caplog.records or not watchdog._thread.is_alive())
        assert watchdog._thread.is_alive() and "usually 0.0 s" in caplog.text


def test_phases_that_end_in_time_are_not_reported(phases, caplog):
    with phases("grade"):
        pass
    watchdog = Watchdog(phases, stall_seconds=1e9)
    with phases("grade"):
        watchdog._look(phases.since + 0.04)
        assert caplog.text == ""
        watchdog._look(phases.since + 0.06)
    assert "grade has been running" in caplog.text


def test_signs_of_life_keep_a_rank_alive_in_a_phase_that_takes_longer_than_stall_seconds(phases, monkeypatch):
    ended: list[int] = []
    monkeypatch.setattr("os._exit", ended.append)
    monkeypatch.setattr("logging.shutdown", lambda: None)
    watchdog = Watchdog(phases, stall_seconds=0.2)
    with phases("update"):
        phases.since -= 100
        phases.beat()
        watchdog._look(phases.last_beat + 0.1)
        assert ended == []
        watchdog._look(phases.last_beat + 0.3)
    assert ended == [STALLED]


@pytest.mark.parametrize(
    "hang, place, code",
    [
        ("lock", "lock.acquire()", STALLED),
        ("thread", "in hang_in_a_lock", STALLED),
        ("without Python", "in hang_without_python", 1),
    ],
)
def test_a_rank_that_hangs_is_ended_after_stall_seconds_and_says_where(hang, place, code):
    """The last never lets Python's other threads run: no report is possible, but it ends all the same."""
    done = programs.finish([sys.executable, PROGRAM, hang], code=code)
    assert place in done.stderr
    if code == STALLED:
        assert done.stderr.count("rank 0, step 7: rollout has been running") >= 2
        assert "ended after stall_seconds=2 without progress" in done.stderr


def test_a_rank_that_hangs_in_a_collective_is_ended(torchrun):
    """Rank 1 is alive and never comes; the collective's own time-out is far away."""
    said = torchrun(2, PROGRAM, "collective", code=1)
    assert "rank 0, step 7: rollout has been running" in said and "runtime.barrier()" in said
    assert f"exitcode  : {STALLED}" in said
