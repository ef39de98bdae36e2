"""Phases are timed and named; one that takes too long says so while it runs; an error says where it happened."""

import time

import pytest
import torch

from dccot.runtime import Runtime
from dccot.train.phases import Phases

HERE = Runtime(rank=3, ranks=8, device=torch.device("cpu"), owned=False)


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
    assert caught.value.__notes__[0].startswith("rank 3, step 12, phase sync, after 0.0 s")


def test_a_phase_far_slower_than_usual_says_so_while_it_still_runs(caplog):
    phases = Phases(HERE)
    phases.LEAST_SECONDS = 0.05
    phases.begin_step(4)
    with phases("rollout"):
        pass
    with phases("rollout"):
        deadline = time.monotonic() + 10
        while "rollout has been running" not in caplog.text and time.monotonic() < deadline:
            time.sleep(0.01)
    assert "rank 3, step 4: rollout has been running for 0 s, usually 0.0 s" in caplog.text


def test_a_phase_that_ends_in_time_says_nothing(caplog):
    phases = Phases(HERE)
    phases.LEAST_SECONDS = 0.05
    for _ in range(2):
        with phases("grade"):
            pass
    time.sleep(0.1)
    assert caplog.text == ""
