"""Phases are timed and named; an error says where it happened."""

import re
import time

import pytest
import torch

from dccot.core.runtime import Runtime
from dccot.train.metrics import memory_metrics
from dccot.train.phases import Phases

HERE = Runtime(rank=3, ranks=8, chosen=torch.device("cpu"), owned=False)


def test_seconds_of_a_phase_add_up_within_a_step_and_start_over_with_the_next():
    phases = Phases(HERE)
    phases.begin_step(0)
    for _ in range(2):
        with phases("update"):
            time.sleep(0.02)
    assert phases.seconds["update"] >= 0.04
    phases.begin_step(1)
    assert phases.seconds == {}


def test_an_error_names_rank_step_and_phase():
    phases = Phases(HERE)
    phases.begin_step(12)
    with pytest.raises(RuntimeError) as caught, phases("sync"):
        raise RuntimeError("collective timed out")
    assert re.match(r"rank 3, step 12, phase sync, after [\d.]+ s", caught.value.__notes__[0])


def test_each_phase_has_a_memory_peak_of_its_own_and_the_step_has_the_highest(monkeypatch):
    """A GPU's counters, which there is none to read: a peak that stays until it is reset, and what is allocated now."""
    counter = {"peak": 0, "now": 0}

    def allocate(size: int) -> None:
        counter["now"] += size
        counter["peak"] = max(counter.values())

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: counter["peak"])
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: counter.update(peak=counter["now"]))
    phases = Phases(HERE)
    for step, update in enumerate([50e9, 30e9]):
        phases.begin_step(step)
        with phases("rollout"):
            allocate(20e9)
            allocate(-15e9)
        for size in (update, 10e9):
            with phases("update"):
                allocate(size)
                allocate(-size)
        allocate(7e9)
        allocate(-7e9)
        allocate(-5e9)
        with phases("sync"):
            allocate(1e9)
            allocate(-1e9)
        peaks = {"memory/peak_rollout_gb": 20.0, "memory/peak_update_gb": 5 + update / 1e9, "memory/peak_sync_gb": 1.0}
        assert memory_metrics(phases.peaks) == {"memory/peak_gb": 5 + update / 1e9, **peaks}
