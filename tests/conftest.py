"""For all rooms: hypothesis draws the same examples in every CI run, so that a red run is red again; programs that tests start import
tests.support like the tests themselves.
"""

import os
from pathlib import Path

from hypothesis import settings

settings.register_profile("ci", derandomize=True)
if os.environ.get("CI"):
    settings.load_profile("ci")
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")]))
