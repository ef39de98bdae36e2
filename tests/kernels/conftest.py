"""Makes the helpers of this folder importable; tests in `interpreted` need a process with TRITON_INTERPRET=1
(test_interpreter.py).
"""

import os
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
collect_ignore = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["interpreted"]
