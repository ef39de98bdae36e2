"""Signals end a command at once, and training where it can save."""

import os
import signal
import threading

import pytest

from dccot.core.command import CONTINUE, Stopped, asked, listening, run_cleanly


def send(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


def test_signals_end_a_command_with_the_codes_that_queues_and_terminals_expect(capsys):
    assert run_cleanly(lambda: send(signal.SIGTERM)) == CONTINUE == 75
    assert "rerun the same command to resume" in capsys.readouterr().err
    assert run_cleanly(lambda: send(signal.SIGINT)) == 130
    assert run_cleanly(lambda: send(signal.SIGUSR1)) == 0 and not asked.save  # there is nothing to save


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_training_is_told_and_continues_until_it_can_save(number):
    with pytest.raises(Stopped), listening(wait=True):
        send(number)
        assert asked.stop
        raise Stopped
    assert not asked.stop


def test_sigterm_may_come_twice_and_a_second_sigint_stops_at_once():
    with pytest.raises(KeyboardInterrupt), listening(wait=True):
        send(signal.SIGTERM)
        send(signal.SIGTERM)
        assert asked.stop
        send(signal.SIGINT)
        pytest.fail("it went on")


def test_a_signal_after_the_last_look_is_not_lost():
    with pytest.raises(Stopped), listening(wait=True):
        send(signal.SIGTERM)


def test_handlers_are_put_back():
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)]
    with listening(), listening(wait=True):
        assert signal.getsignal(signal.SIGTERM) not in before
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)] == before


def test_a_thread_can_also_run_a_command():
    codes = []
    thread = threading.Thread(target=lambda: codes.append(run_cleanly(lambda: None)))
    thread.start()
    thread.join()
    assert codes == [0]
