"""`dccot rl` whose rank 1 hangs for real: in step 2 inside its engine, after a restart in step 4 altogether, and then
no more.

torchrun --max-restarts 2 … -m tests.support.fault_injection.hang CONFIG …
"""

from __future__ import annotations

import os
import signal
import sys
import threading

import dccot.train.rl as rl

RESTART, RANK = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")), os.environ.get("RANK", "0")


class Hanging(rl.RL):
    def roll_out(self):
        if (RESTART, RANK, self.phases.step) == (0, "1", 2):
            self.engine._engine.step = never_return
        return super().roll_out()

    def grade(self):
        if (RESTART, RANK, self.phases.step) == (1, "1", 4):
            os.kill(os.getpid(), signal.SIGSTOP)
        return super().grade()


def never_return() -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


if __name__ == "__main__":
    rl.RL = Hanging
    sys.exit(rl.main(sys.argv[1:]))
