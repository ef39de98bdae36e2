"""A rank that hangs in one of four ways under a watchdog with stall_seconds=2.

python tests/train/hang_program.py lock
"""

import ctypes
import logging
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

from dccot.core.runtime import Runtime
from dccot.train.phases import Phases, Watchdog


def hang_in_a_lock(runtime: Runtime, phases: Phases) -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def hang_in_another_thread(runtime: Runtime, phases: Phases) -> None:
    with ThreadPoolExecutor(1) as thread:
        thread.submit(hang_in_a_lock, runtime, phases).result()


def hang_without_python(runtime: Runtime, phases: Phases) -> None:
    ctypes.PyDLL(None).sleep(1000)  # unlike CDLL, keeps the interpreter's lock


def hang_in_a_collective(runtime: Runtime, phases: Phases) -> None:
    while runtime.rank == 1:
        time.sleep(0.1)
        phases.beat()
    runtime.barrier()


HANGS = {"lock": hang_in_a_lock, "without Python": hang_without_python, "collective": hang_in_a_collective}
HANGS["thread"] = hang_in_another_thread


def main(how: str) -> None:
    logging.basicConfig(format="%(message)s")
    with Runtime.start(timeout_seconds=600) as runtime:
        phases = Phases(runtime)
        phases.begin_step(7)
        with Watchdog(phases, stall_seconds=2.0), phases("rollout"):
            threading.Event().wait(0.5)
            HANGS[how](runtime, phases)


if __name__ == "__main__":
    main(sys.argv[1])
