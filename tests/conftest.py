"""For all rooms: which tests `make quick` leaves out; in CI examples from hypothesis that are the same in every run;
programs that tests start import tests.support like the tests themselves.
"""

import os
from pathlib import Path

import pytest
from hypothesis import settings
from xdist.scheduler import LoadScopeScheduling

from tests.support.programs import new_session

# A test is slow when it uses one of these fixtures, directly or through another, or when its name begins with one of
# these.
SLOW_FIXTURES = {
    "engine",
    "engines",
    "build_engine",
    "speaker_engine",
    "torchrun",
    "browser",
    "chromium",
    "servers",
    "fleet",
}
SLOW_TESTS = (
    "tests/system/",
    "tests/lab/test_gpu_check.py",
    "tests/kernels/test_interpreter.py",
    "tests/lab/test_inspect.py",
    "tests/lab/test_rehearse.py",
    "tests/model/test_sharding.py",
    "tests/eval/test_evaluate.py",
    "tests/data/test_judge_hostile.py",
    "tests/data/test_judge.py::test_five_hundred_verdicts",
    "tests/data/test_judge.py::test_worker_dies",
    "tests/data/test_rewrite.py",
    "tests/eval/test_latency.py",
    "tests/eval/test_sequential_solutions.py",
    "tests/core/test_provenance.py",
    "tests/front_door/test_made_from.py",
    "tests/core/test_runtime.py::test_ranks_that_work_apart",
    "tests/front_door/test_transformers.py",
    "tests/model/test_folder.py::test_ranks_started",
    "tests/model/test_vllm_roundtrip.py",
    "tests/rollout/test_engine_life.py",
    "tests/rollout/test_rollout_command.py",
    "tests/rollout/test_tag_soup.py",
    "tests/rollout/test_torchrun.py",
    "tests/test_docs.py::test_every_command",
    "tests/test_packaging.py",
    "tests/train/test_forest.py::test_forest_gives",
    "tests/train/test_metrics.py::test_weights_and_biases_gets",
    "tests/test_vllm_names.py",
    "tests/core/test_run.py",
    "tests/train/test_trace.py",
    "tests/train/test_watchdog.py",
)
# `make test` runs two tests at a time. Those of one file stay together, and those of these rooms, which share engines
# or servers; what takes longest starts first, so that neither process is left alone with it.
TOGETHER = ("tests/serve/", "tests/rollout/")
LONGEST = ("tests/serve/", "tests/system/test_demo.py", *SLOW_TESTS)

# how long an example takes says more about the machine than about the code
settings.register_profile("here", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True)
# before torch is imported, here and in programs: two tests at a time share two cores
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")]))
new_session()
settings.load_profile("ci" if os.environ.get("CI") else "here")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.nodeid.startswith(SLOW_TESTS) or SLOW_FIXTURES & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.slow)
    items.sort(
        key=lambda item: next(
            (place for place, name in enumerate(LONGEST) if item.nodeid.startswith(name)), len(LONGEST)
        )
    )


class TogetherScheduling(LoadScopeScheduling):
    def _split_scope(self, nodeid: str) -> str:
        return next((room for room in TOGETHER if nodeid.startswith(room)), nodeid.split("::")[0])


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log) -> TogetherScheduling:
    return TogetherScheduling(config, log)
