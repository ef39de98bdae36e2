"""Runs SFT several times in one process per rank: one line of arguments per run, as `dccot sft` takes them.

torchrun --nproc_per_node 2 tests/system/sft_program.py ARGUMENTS.json
"""

import json
import sys
from pathlib import Path

from dccot.core.runtime import Runtime
from dccot.train.sft import main

if __name__ == "__main__":
    runtime = Runtime.start()
    for arguments in json.loads(Path(sys.argv[1]).read_text()):
        assert main(arguments) == 0, arguments
    runtime.stop()
