"""Real ranks: FSDP shards the weights, every rank has its engine, and neither waits for the other."""

import json
from pathlib import Path

import pytest

from dccot.model.weights import stored_parameters
from dccot.rollout.director import RolloutConfig
from dccot.rollout.generate import Request, generate
from tests.rollout.torchrun_program import soak
from tests.support import programs

pytestmark = pytest.mark.slow

PROGRAM = Path(__file__).with_name("torchrun_program.py")
PROMPT = [5, 6, 7]


@pytest.fixture(scope="module")
def out(checkpoints, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("torchrun")
    done = programs.finish(programs.torchrun(2, PROGRAM, checkpoints["single"], folder))
    (folder / "stderr").write_text(done.stderr)
    return folder


@pytest.fixture(scope="module")
def ranks(out) -> list[dict]:
    return [json.loads((out / f"rank{rank}.json").read_text()) for rank in range(2)]


@pytest.fixture(scope="module")
def fresh(out, build_engine):
    """An engine built from the weights that were synced, in a single process."""
    return build_engine(out / "synced")


def rolled_out(engine, samples: range, **settings) -> dict[str, list[int]]:
    requests = [Request("p", sample, PROMPT) for sample in samples]
    found = generate(engine, requests, RolloutConfig(**settings), seed=(0,))
    return {str(request.sample): response.as_read for request, response in found}


def test_each_rank_generates_its_own_share_in_its_own_number_of_steps(ranks):
    assert [(rank["replica"], rank["replicas"]) for rank in ranks] == [(0, 2), (1, 2)]
    assert [sorted(map(int, rank["sampled"])) for rank in ranks] == [list(range(3)), list(range(3, 11))]
    assert ranks[0]["steps"] != ranks[1]["steps"]


def test_sharded_weights_reach_every_ranks_engine(ranks, fresh):
    for rank, result in enumerate(ranks):
        assert result["greedy"] == rolled_out(fresh, range(rank, rank + 1), budget=60, temperature=0.0)


def test_a_rank_samples_what_a_single_process_would(ranks, fresh):
    assert ranks[0]["sampled"] == rolled_out(fresh, range(3), budget=40)
    assert ranks[1]["sampled"] == rolled_out(fresh, range(3, 11), budget=90)


def test_a_tensor_parallel_replica_samples_the_same(ranks, fresh):
    """Two ranks, one engine between them, weights streamed in from both."""
    expected = rolled_out(fresh, range(4), budget=60)
    assert [rank["tensor_parallel"] for rank in ranks] == [{"replica": 0, "replicas": 1, "sampled": expected}] * 2


def test_a_tensor_parallel_replica_survives_aborts_stops_and_other_weights(out, ranks, fresh):
    """Both ranks see what one process sees, call by call."""
    expected = soak(fresh, lambda: stored_parameters(out / "synced"))
    fresh.load(stored_parameters(out / "synced"))
    assert [rank["soak"] for rank in ranks] == [expected] * 2
    assert all(3 < len(done) < 9 for done in expected), "some finished and some were aborted"
    lengths = {len(ids) for done in expected for ids in done.values()}
    assert len(lengths) > 4


def test_the_console_stays_quiet(out):
    lines = [line for line in (out / "stderr").read_text().splitlines() if line.strip()]
    assert not [line for line in lines if "vllm" in line.lower() or "triton" in line.lower()], lines
