"""Runs checks of `dccot gpu-check` in a process that checks.py starts, watches and may kill.

    python -m dccot.lab.gpu_check.worker FOLDER DEVICE MODEL SECONDS MODULE:CHECK:LABEL…

leaves FOLDER/LABEL.json for each, and LABEL.rankN.json for every other rank that failed. A check is a function that
returns its findings, a summary line followed by details, or raises.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

from dccot.core.files import write_atomic


@dataclass(frozen=True)
class Context:
    folder: Path  # for files of the check
    device: str  # "cuda" or "cpu"
    model: str = ""  # a folder; without one a tiny model is built

    @property
    def cuda(self) -> bool:
        return self.device == "cuda"


def work(context: Context, names: list[str]) -> int:
    """Run checks one after another; end at the first that fails, since it may leave this process in any state."""
    for name in names:
        module, check, label = name.split(":")
        began, found = time.perf_counter(), {}
        print(f"{label} …", flush=True)  # the last line of the log is what the console shows
        try:
            found["found"] = getattr(importlib.import_module(module), check)(context)
        except BaseException as error:
            found["error"] = f"{type(error).__name__}: {error}"
            found["trace"] = traceback.format_exc()
        rank = int(os.environ.get("RANK", "0"))
        if rank == 0 or "error" in found:
            # one rank's success must not overwrite another's failure
            file = f"{label}.rank{rank}.json" if rank else f"{label}.json"
            write_atomic(context.folder / file, json.dumps(found | {"seconds": time.perf_counter() - began}))
        if "error" in found:
            print(found["trace"], file=sys.stderr, flush=True)
            return 1
    return 0


if __name__ == "__main__":
    faulthandler.enable()
    folder, device, model, limit, *names = sys.argv[1:]
    faulthandler.dump_traceback_later(max(1.0, float(limit) - 3), exit=False)  # where it hung, for the log
    code = work(Context(Path(folder), device, model), names)
    sys.stdout.flush()
    sys.stderr.flush()
    if device == "cuda":
        os._exit(code)  # whatever state the driver and NCCL are in: the findings are already written
    sys.exit(code)  # on a CPU, ranks of one engine leak shared memory unless they exit in order
