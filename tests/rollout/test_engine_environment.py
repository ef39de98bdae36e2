"""What vLLM changes in the environment while an engine starts is undone, and other threads never see it half undone."""

import os
import threading

from dccot.rollout.vllm_engine import restore_environment


def test_only_what_changed_is_restored_and_nothing_is_ever_missing(monkeypatch):
    monkeypatch.setenv("DCCOT_KEPT", "1")
    monkeypatch.setenv("DCCOT_CHANGED", "before")
    monkeypatch.setenv("DCCOT_REMOVED", "before")
    before, missing, done = dict(os.environ), [], threading.Event()

    def read() -> None:
        while not done.is_set():
            if os.environ.get("DCCOT_KEPT") != "1":
                missing.append(1)

    reader = threading.Thread(target=read)
    reader.start()
    for _ in range(300):
        os.environ["DCCOT_CHANGED"], os.environ["DCCOT_ADDED"] = "after", "1"
        del os.environ["DCCOT_REMOVED"]
        restore_environment(before)
        assert dict(os.environ) == before
    done.set()
    reader.join()
    assert not missing
