"""An engine that dies is told to everyone once, and ends its server; a server that is killed takes its engine along;
one that is told to end finishes what is being written.
"""

import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from dccot.serve.launch import DIED
from tests.serve.test_requests import chat, send
from tests.support.serve_faults import SLOW, STALLED
from tests.support.servers import dccot_serve, eventually

pytestmark = pytest.mark.slow


@pytest.fixture
def mortal(model, tmp_path):
    server = dccot_serve(model, tmp_path / "mortal", "--budget", "100", "--shutdown-timeout", "4").ready()
    yield server
    server.stop()


def engines(server) -> list[psutil.Process]:
    return psutil.Process(server.process.pid).children(recursive=True)


def test_when_the_engine_dies_every_open_request_gets_one_clear_error_and_the_server_ends_with_a_code(mortal):
    assert chat(mortal, seed=1)[0] == 200
    running = engines(mortal)
    for process in running:
        os.kill(process.pid, signal.SIGSTOP)  # so that nothing finishes
    with ThreadPoolExecutor(6) as pool:
        open_ones = [pool.submit(chat, mortal, seed=seed, stream=seed % 2 == 0) for seed in range(6)]
        assert eventually(lambda: mortal.metric("dccot_responses_running") == 6)
        for process in running:
            os.kill(process.pid, signal.SIGKILL)
        answers = [each.result() for each in open_ones]
    for seed, (status, answer) in enumerate(answers):
        if seed % 2 == 0:  # a stream, whose status has been sent
            assert status == 200
            [answer] = [json.loads(line[6:]) for line in answer.splitlines() if '"error"' in line]
        else:
            assert status == 503
        assert "the engine has died and this server ends" in answer["error"]["message"]
    assert mortal.process.wait(300) == DIED == 70
    said = mortal.log.read_text()
    assert said.count("dccot: the engine has died") == 1
    assert "request chatcmpl" not in said


def test_a_killed_server_leaves_no_engine_behind(mortal):
    running = engines(mortal)
    assert running
    mortal.process.kill()
    mortal.process.wait()
    assert eventually(lambda: not any(process.is_running() and process.status() != "zombie" for process in running), 60)


def test_a_server_that_is_told_to_end_finishes_what_is_written_and_answers_the_rest_with_503(mortal):
    running = engines(mortal)
    alone = chat(mortal, seed=SLOW, return_token_ids=True)[1]["choices"]
    with ThreadPoolExecutor(3) as pool:
        slow = pool.submit(chat, mortal, seed=SLOW, return_token_ids=True)  # has yet to begin
        stalled = [pool.submit(chat, mortal, seed=STALLED, stream=stream) for stream in (False, True)]
        assert eventually(lambda: mortal.metric("dccot_responses_running") == 3)
        for process in [psutil.Process(mortal.process.pid), *running]:
            if os.getpgid(process.pid) == os.getpgid(mortal.process.pid):
                process.send_signal(signal.SIGINT)  # as Ctrl-C in a terminal does
        assert eventually(lambda: send(mortal, "/health")[0] == 503)
        status, answer = chat(mortal, seed=1)
        assert (status, answer["error"]["code"]) == (503, 503)
        assert "shutting down" in answer["error"]["message"]
        assert slow.result()[1]["choices"] == alone
        for process in running:
            process.suspend()  # an engine that hangs is killed in the end
        whole, stream = (each.result() for each in stalled)
    assert whole[0] == 503
    assert "stopped before the response was finished" in whole[1]["error"]["message"]
    assert "stopped before the response was finished" in stream[1]
    assert mortal.process.wait(60) == 0
    said = mortal.log.read_text()
    assert "stopping: 3 responses may finish within 4 s" in said
    assert "stopped; 2 responses cut off" in said
    assert eventually(lambda: not any(process.is_running() and process.status() != "zombie" for process in running), 60)


def test_a_closed_terminal_does_not_keep_a_server_from_ending(monkeypatch):
    from dccot.serve import ending

    reader, writer = os.pipe()
    os.close(reader)
    monkeypatch.setattr("sys.stderr", os.fdopen(writer, "w", buffering=1, closefd=False))
    ending._say("stopped")
    os.close(writer)
