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
    """A process that vLLM has spawned ends once its parent is gone. So do those that this one forks, which do not load
    plugins again; but only where we are asked for by name: other programs' children are none of our business.
    """
    by_name = "dccot" in os.environ.get("VLLM_PLUGINS", "").split(",")
    if (parent := multiprocessing.parent_process()) is not None and parent.pid is not None:
        _watch(parent.pid, by_name)
    elif by_name:
        os.register_at_fork(after_in_child=lambda: _watch(os.getppid(), True))


def _watch(parent: int, apart: bool) -> None:
    if apart:
        os.setpgrp()  # Ctrl-C is for the server alone, which needs its engine to finish what is being written

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(LOOK_SECONDS)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="end-with-parent", daemon=True).start()
