"""Two ranks that mean different folders by the same relative path, as with a disk that is not shared.

torchrun --nproc_per_node 2 -m tests.core.apart_program FOLDER
"""

import os
import sys
from pathlib import Path

from dccot.core import runtime as settings
from dccot.core.config import ConfigError
from dccot.core.runtime import Runtime, require_shared

if __name__ == "__main__":
    with Runtime.start(timeout_seconds=900) as runtime:
        home = Path(sys.argv[1]) / str(runtime.rank)
        (home / "run").mkdir(parents=True)
        os.chdir(home)
        try:
            settings.SHARED_SECONDS = 0.5
            require_shared(Path("run"), runtime)
        except ConfigError as refused:
            print(refused, flush=True)
