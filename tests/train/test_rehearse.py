"""`dccot rehearse` on a model of the 1.5B shape with two layers: what it says, and that it catches planted faults.

Each rehearsal is a process of its own, because torch must not be imported before the fake device is there. A planted fault is a few lines
of Python that run before a rehearsal.
"""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dccot.train.plan import SHAPES
from dccot.train.rehearse import main

SMALL = ["rollout.budget=1000", "reward.cutoff=500", "batch.token_budget=2048", "prompt.max_prompt_tokens=256"]


@pytest.fixture(scope="module")
def two_layers(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("two_layers")
    (folder / "config.json").write_text(json.dumps(SHAPES["1.5B"] | {"num_hidden_layers": 2}))
    return folder


@pytest.fixture(scope="module")
def rehearsed(two_layers, tmp_path_factory) -> dict:
    """RL on 8 ranks and on 1,024 in copies of 8, and SFT."""
    folder = tmp_path_factory.mktemp("found")
    commands = {
        "8 ranks": ["configs/rl/stage1.yaml", "--gpus", "8", *SMALL],
        "1,024 ranks": ["configs/rl/stage4.yaml", "--gpus", "1024", "--replicate", "128", *SMALL, "sharding.reduce_once=false"],
        "sft": ["configs/sft.yaml", "--gpus", "8", "token_budget=2048", "data.max_tokens=2048"],
    }

    def one(name: str) -> dict:
        assert main([*commands[name], "--model", str(two_layers), "--json", str(folder / name)]) == 0, name
        return json.loads((folder / name).read_text())["rehearsals"][0]

    with ThreadPoolExecutor(2) as pool:
        return dict(zip(commands, pool.map(one, commands)))


CASES = ("8 ranks", "1,024 ranks", "sft")


@pytest.mark.parametrize("case", CASES)
def test_what_is_always_there_is_as_planned_to_the_byte(case, rehearsed):
    steady, planned = rehearsed[case]["steady"], rehearsed[case]["planned_steady"]
    assert {kind: steady.get(kind, 0) for kind in planned} == planned
    assert sum(steady.values()) - sum(planned.values()) < 1024  # the rotation's frequencies


@pytest.mark.parametrize("case", CASES)
def test_the_plan_meets_the_peak_within_10_percent(case, rehearsed):
    peak = max(phase["total"] for phase in rehearsed[case]["peaks"].values())
    assert rehearsed[case]["planned"] == pytest.approx(peak, rel=0.1)


def test_master_weights_are_four_bytes_per_parameter_over_the_ranks_of_a_copy(rehearsed):
    vocabulary, d, inner, kv = 151936, 1536, 8960, 256
    block = 2 * d * d + d + 2 * (d * kv + kv) + 3 * d * inner + 2 * d
    expected = 4 * (2 * vocabulary * d + d + 2 * block) / 8
    assert rehearsed["8 ranks"]["steady"]["master weights"] == expected
    assert rehearsed["1,024 ranks"]["steady"]["master weights"] == expected


@pytest.mark.parametrize("case", CASES)
def test_the_host_waits_for_the_gpu_less_than_three_times_per_micro_batch(case, rehearsed):
    waits = sum(rehearsed[case]["syncs"]["update"].values()) / rehearsed[case]["micro_batches"]["update"]
    assert waits < 3, rehearsed[case]["syncs"]["update"]


FAULTS = {
    "a tensor left on the CPU": """
import dccot.model.transformer as t
plain = t.cos_sin
t.cos_sin = lambda position, *rest: tuple(x.cpu() for x in plain(position, *rest))
""",
    "a wrong dtype": """
import dccot.model.transformer as t
plain = t.rotate
t.rotate = lambda x, cos, sin: plain(x, cos, sin).float() if x.shape[1] == 12 else plain(x, cos, sin)
""",
    "a forgotten gather": """
r.full_parameters = lambda model: ((name, p.to_local()) for name, p in model.named_parameters())
""",
    "a shape that only the GPU knows": """
import dccot.train.forest as f
f.Forest.targets = property(lambda forest: forest.sampled.nonzero().squeeze(1))
f.Forest.to = lambda forest, device: f.Forest(*(getattr(forest, x).to(device) for x in forest.__dataclass_fields__))
""",
}
PROGRAM = """
import json, os, sys
import dccot.train.rehearsal as r
spec, faults = json.load(sys.stdin)
for fault in faults:
    if child := os.fork():
        os.waitpid(child, 0)
        continue
    exec(fault)
    try:
        r.rehearse(spec)
        error = "nothing"
    except Exception as caught:
        error = f"{type(caught).__name__}: {caught}"
    print(json.dumps(error), flush=True)
    os._exit(0)
"""


@pytest.fixture(scope="module")
def caught(two_layers) -> dict[str, str]:
    """Fault → what a rehearsal with it ends in; each in a fork of one process that has imported everything."""
    spec = {"config": "configs/rl/stage1.yaml", "overrides": SMALL, "ranks": 8, "gpu": "H100"}
    spec["shape"] = json.loads((two_layers / "config.json").read_text())
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    given = json.dumps([spec, list(FAULTS.values())])
    done = subprocess.run([sys.executable, "-c", PROGRAM], input=given, capture_output=True, text=True, env=environment, timeout=300)
    assert len(done.stdout.splitlines()) == len(FAULTS), done.stderr[-3000:]
    return dict(zip(FAULTS, map(json.loads, done.stdout.splitlines())))


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("a tensor left on the CPU", ["FakeTensorDeviceMismatchError", "cpu", "cuda"]),
        ("a wrong dtype", ["q, k and v must share one floating-point dtype"]),
        ("a forgotten gather", ["embed_tokens.weight reaches the engine as", "gather it"]),
        ("a shape that only the GPU knows", ["numbers that are on the GPU"]),
    ],
)
def test_a_planted_fault_is_caught(fault, said, caught):
    assert all(words in caught[fault] for words in said), caught[fault]


def test_a_batch_that_cannot_fit_is_refused_with_what_it_needs(tmp_path, capsys):
    """4.8 billion parameters on one GPU: 16 bytes each are 77 GB before the first activation."""
    (tmp_path / "config.json").write_text(json.dumps(SHAPES["32B"] | {"num_hidden_layers": 7}))
    settings = ["token_budget=2048", "data.max_tokens=2048"]
    assert main(["configs/sft.yaml", "--model", str(tmp_path), "--gpus", "1", *settings]) == 1
    said = capsys.readouterr().out
    assert "update: backward needs" in said and "a GPU has 80" in said and "does not fit" in said


def test_configurations_that_ask_the_same_are_rehearsed_once(two_layers):
    from dccot.train.plan import read_shape
    from dccot.train.rehearse import prepare

    groups = prepare([f"configs/rl/{name}.yaml" for name in ("stage1", "stage2a", "stage2b", "stage3")], [], read_shape(str(two_layers)), 8)
    assert [group.configs for group in groups] == [["stage1"], ["stage2a", "stage2b", "stage3"]]
