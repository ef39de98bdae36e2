"""For all rooms: which tests `make quick` leaves out, and the order in which `make test` runs them."""

import os
import sys
from pathlib import Path

import pytest
from hypothesis import settings
from xdist.scheduler import LoadScopeScheduling

from tests.support.programs import new_session

# A test that uses one of these is slow, as are those that their file marks so.
SLOW_FIXTURES = {"engine", "engines", "build_engine", "speaker_engine", "torchrun", "browser", "chromium"}
SLOW_FIXTURES |= {"servers", "fleet", "measured"}
# Tests of one file stay together, and those of rooms that share engines or servers. What takes longest starts first, so
# that no process is left alone with it; quick tests fill the end.
TOGETHER = ("tests/serve/", "tests/rollout/", "tests/eval/")
LONGEST = (
    "tests/system/",
    "tests/eval/",
    "tests/rollout/",
    "tests/serve/",
    "tests/kernels/test_interpreter",
    "tests/lab/",
)

# before torch is imported, here and in programs: several tests at a time share few cores
os.environ["OMP_NUM_THREADS"] = "1"
# programs import tests.support like the tests themselves
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")]))
# as in an activated environment: commands are shown by their names
os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
new_session()
# how long an example takes says more about the machine than about the code
settings.register_profile("here", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "here")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if SLOW_FIXTURES & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.slow)

    slow_files = {scope(item.nodeid) for item in items if item.get_closest_marker("slow")}
    places = {name: place for place, name in enumerate(LONGEST)}

    def rank(item: pytest.Item) -> tuple[bool, int]:
        long = (place for name, place in places.items() if item.nodeid.startswith(name))
        return scope(item.nodeid) not in slow_files, next(long, len(places))

    items.sort(key=rank)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Files that are left out as a whole are not even imported: some import vLLM."""
    if collection_path.name == "real" and "not thorough" in config.option.markexpr:
        return True
    quick = "not slow" in config.option.markexpr and collection_path.suffix == ".py"
    return True if quick and "\npytestmark = pytest.mark.slow\n" in collection_path.read_text() else None


def scope(nodeid: str) -> str:
    return next((room for room in TOGETHER if nodeid.startswith(room)), nodeid.split("::")[0])


class TogetherScheduling(LoadScopeScheduling):
    _split_scope = staticmethod(scope)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log) -> TogetherScheduling:
    return TogetherScheduling(config, log)
