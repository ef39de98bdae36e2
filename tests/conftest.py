"""For all rooms: which tests `make quick` leaves out; in CI examples from hypothesis that are the same in every run; programs that tests
start import tests.support like the tests themselves.
"""

import os
from pathlib import Path

import pytest
from hypothesis import settings

# A test is slow when it uses one of these fixtures, directly or through another, or when its name begins with one of these.
SLOW_FIXTURES = {"engine", "engines", "build_engine", "speaker_engine", "torchrun", "driver", "browser", "session", "servers"}
SLOW_TESTS = (
    "tests/data/test_grading.py::test_five_hundred_verdicts",
    "tests/data/test_grading.py::test_worker_dies",
    "tests/data/test_grading_hostile.py",
    "tests/data/test_rewrite.py::test_killed",
    "tests/data/test_rewrite.py::test_rerun",
    "tests/eval/test_latency.py",
    "tests/eval/test_run.py",
    "tests/eval/test_sequential_solutions.py",
    "tests/kernels/test_inspect.py",
    "tests/kernels/test_interpreter.py",
    "tests/model/test_sharding.py",
    "tests/model/test_vllm_roundtrip.py",
    "tests/rollout/test_rollout_command.py",
    "tests/rollout/test_tag_soup.py",
    "tests/system/",
    "tests/test_packaging.py",
    "tests/train/test_run_folder.py",
    "tests/train/test_timeline.py",
)

settings.register_profile("here", deadline=None)  # how long an example takes says more about the machine than about the code
settings.register_profile("ci", deadline=None, derandomize=True)
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")]))
settings.load_profile("ci" if os.environ.get("CI") else "here")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.nodeid.startswith(SLOW_TESTS) or SLOW_FIXTURES & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.slow)
