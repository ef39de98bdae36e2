"""For all rooms: in CI the examples that hypothesis draws are the same in every run, so that a red run is red again."""

import os

from hypothesis import settings

settings.register_profile("ci", derandomize=True)
if os.environ.get("CI"):
    settings.load_profile("ci")
