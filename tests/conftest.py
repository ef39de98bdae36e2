"""For all rooms: which tests `make quick` leaves out, and in CI examples from hypothesis that are the same in every run."""

import os
from pathlib import Path

import pytest
from hypothesis import settings

HERE = Path(__file__).parent
# A test is slow when it uses one of these fixtures, directly or through another, or is in one of these files and folders.
SLOW_FIXTURES = {"engine", "engines", "build_engine", "speaker_engine", "torchrun", "driver", "browser", "session"}
SLOW_PATHS = {
    "kernels/test_inspect.py",
    "kernels/test_interpreter.py",
    "model/test_sharding.py",
    "model/test_vllm_roundtrip.py",
    "system",
    "test_packaging.py",
}

settings.register_profile("ci", derandomize=True)
if os.environ.get("CI"):
    settings.load_profile("ci")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        path = item.path.relative_to(HERE)
        in_slow_path = any(str(place) in SLOW_PATHS for place in (path, *path.parents))
        if in_slow_path or SLOW_FIXTURES & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.slow)
