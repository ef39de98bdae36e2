"""A general plugin of vLLM, loaded in each of its processes: those of the engine end with the server.

`kill -9` gives a server no time to stop its engine, which would keep its memory and its GPUs; vLLM watches for the
death of an engine and of its workers, but not for that of the server.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time

LOOK_SECONDS = 1.0


def end_with_parent() -> None:
    """In a process that multiprocessing has started, kill it once its parent is gone; elsewhere, nothing."""
    parent = multiprocessing.parent_process()
    if parent is None or parent.pid is None:
        return

    def watch(pid: int) -> None:
        while os.getppid() == pid:
            time.sleep(LOOK_SECONDS)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, args=(parent.pid,), name="end-with-parent", daemon=True).start()
