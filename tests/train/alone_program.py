"""Rank 0 works alone for longer than any collective may take.

torchrun --nproc_per_node 2 -m tests.train.alone_program
"""

import time

from dccot.core.runtime import Runtime, on_rank_zero

TIMEOUT_SECONDS = 3.0


def work() -> int:
    time.sleep(2 * TIMEOUT_SECONDS)
    return 42


if __name__ == "__main__":
    with Runtime.start(timeout_seconds=TIMEOUT_SECONDS) as runtime:
        runtime.barrier()
        print(f"rank 0 has found {on_rank_zero(work)}", flush=True)
        runtime.barrier()
