"""`dccot rehearse` on a model of the 1.5B shape with two layers: what it says, and that it catches planted faults.

A rehearsal needs a process in which torch was not imported before the fake device was there. One such process is
started and forks for every case and every planted fault, which is a few lines of Python that run before the rehearsal.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from dccot.lab.rehearsal.rehearse import Rehearsal, main, prepare
from dccot.plan import SHAPES, read_shape

pytestmark = pytest.mark.slow

SMALL = ["rollout.budget=1000", "reward.cutoff=500", "batch.token_budget=2048", "prompt.max_prompt_tokens=256"]
CASES = {  # configuration, ranks, overrides
    "8 ranks": ("configs/rl/stage1.yaml", 8, SMALL),
    "1,024 ranks": (
        "configs/rl/stage4.yaml",
        1024,
        ["sharding.replicate=128", "sharding.context_parallel=4", *SMALL, "sharding.reduce_once=false"],
    ),
    "lora": ("configs/rl/stage1.yaml", 8, ["model.lora.rank=16", *SMALL]),
    "sft": ("configs/sft.yaml", 8, ["batch.token_budget=2048", "data.max_tokens=2048"]),
}
FAULTS = {  # lines that plant it → words that the rehearsal says
    "a tensor left on the CPU": (
        """
import dccot.model.transformer as t
plain = t.cos_sin
t.cos_sin = lambda position, *rest: tuple(x.cpu() for x in plain(position, *rest))
""",
        ["FakeTensorDeviceMismatchError", "cpu", "cuda"],
    ),
    "a wrong dtype": (
        """
import dccot.model.transformer as t
plain = t.rotate
t.rotate = lambda x, cos, sin: plain(x, cos, sin).float() if x.shape[1] == 12 else plain(x, cos, sin)
""",
        ["q, k and v must share one floating-point dtype"],
    ),
    "a forgotten gather": (
        "r.full_parameters = lambda model, dtype: ((name, p.to_local()) for name, p in model.named_parameters())",
        ["embed_tokens.weight reaches the engine as", "gather it"],
    ),
    "a shape that only the GPU knows": (
        """
import dccot.train.forest as f
f.Forest.targets = property(lambda forest: forest.sampled.nonzero().squeeze(1))
fields = "tokens", "visible_until", "sampled", "response", "logprob"
f.Forest.to = lambda forest, device: f.Forest(*(getattr(forest, x).to(device) for x in fields))
""",
        ["numbers that are on the GPU"],
    ),
}
PROGRAM = """
import json, os, sys
import dccot.lab.rehearsal.step as r
for spec, fault in json.load(sys.stdin):
    if child := os.fork():
        os.waitpid(child, 0)
        continue
    exec(fault)
    try:
        found = r.rehearse(spec)
    except Exception as caught:
        found = f"{type(caught).__name__}: {caught}"
    print(json.dumps(found), flush=True)
    os._exit(0)
"""


@pytest.fixture(scope="module")
def two_layers(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("two_layers")
    (folder / "config.json").write_text(json.dumps(SHAPES["1.5B"] | {"num_hidden_layers": 2}))
    return folder


@pytest.fixture(scope="module")
def found(two_layers) -> dict:
    """Case → what the rehearsal found; fault → what the first case ends in with it."""
    tried = {case: (case, "") for case in CASES} | {fault: ("8 ranks", lines) for fault, (lines, _) in FAULTS.items()}
    shape = json.loads((two_layers / "config.json").read_text())
    specs = {
        case: {"config": path, "overrides": overrides, "shape": shape, "ranks": ranks, "gpu": "H100"}
        for case, (path, ranks, overrides) in CASES.items()
    }
    given = json.dumps([(specs[case], lines) for case, lines in tried.values()])
    done = subprocess.run([sys.executable, "-c", PROGRAM], input=given, capture_output=True, text=True, timeout=600)
    assert len(done.stdout.splitlines()) == len(tried), done.stderr[-3000:]
    return dict(zip(tried, map(json.loads, done.stdout.splitlines())))


@pytest.fixture(params=CASES)
def rehearsal(request, found, two_layers) -> Rehearsal:
    path, ranks, overrides = CASES[request.param]
    [prepared] = prepare([path], overrides, read_shape(str(two_layers)), ranks)
    assert isinstance(found[request.param], dict), found[request.param]
    prepared.found = found[request.param]
    return prepared


def test_steady_memory_is_as_planned_to_the_byte_and_the_peak_within_10_percent(rehearsal):
    steady, planned = rehearsal.found["steady"], rehearsal.planned.persistent
    assert {kind: steady.get(kind, 0) for kind in planned} == planned
    assert sum(steady.values()) - sum(planned.values()) < 1024  # the rotation's frequencies
    assert rehearsal.planned_peak == pytest.approx(rehearsal.peak, rel=0.1)


def test_the_host_waits_for_the_gpu_less_than_three_times_per_micro_batch(rehearsal):
    assert rehearsal.waits_per_micro_batch < 3, rehearsal.found["syncs"]["update"]


def test_master_weights_are_four_bytes_per_parameter_over_the_ranks_of_a_copy(found):
    vocabulary, d, inner, kv = 151936, 1536, 8960, 256
    block = 2 * d * d + d + 2 * (d * kv + kv) + 3 * d * inner + 2 * d
    expected = 4 * (2 * vocabulary * d + d + 2 * block) / 8
    assert found["8 ranks"]["steady"]["master weights"] == expected
    assert found["1,024 ranks"]["steady"]["master weights"] == expected


def test_frozen_weights_are_two_bytes_per_parameter_without_moments_or_a_reference(found):
    vocabulary, d, inner, kv = 151936, 1536, 8960, 256
    block = 2 * d * d + d + 2 * (d * kv + kv) + 3 * d * inner + 2 * d
    adapters = 2 * 16 * (2 * (d + d) + 2 * (d + kv) + 3 * (d + inner)) / 8
    steady = found["lora"]["steady"]
    assert steady["master weights"] == 2 * (2 * vocabulary * d + d + 2 * block) / 8 + 4 * adapters
    assert steady["AdamW moments"] == 8 * adapters + 4 * 2 * 14
    assert "reference policy" not in steady


def test_a_sync_holds_one_weight_in_the_engines_precision_whatever_the_number_of_ranks(found):
    """Most with the LM head: all of it, this rank's eighth, and the norm that was there before."""
    expected = 2 * 151936 * 1536 * (1 + 1 / 8) + 2 * 1536
    assert [found[case]["peaks"]["sync"]["kinds"]["gathered weights"] for case in list(CASES)[:2]] == [expected] * 2


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_caught(fault, found):
    assert all(words in found[fault] for words in FAULTS[fault][1]), found[fault]


def test_a_batch_that_cannot_fit_is_refused_with_what_it_needs(tmp_path, capsys):
    """4.8 billion parameters on one GPU: 16 bytes each are 77 GB before the first activation."""
    (tmp_path / "config.json").write_text(json.dumps(SHAPES["32B"] | {"num_hidden_layers": 7}))
    settings = ["batch.token_budget=2048", "data.max_tokens=2048"]
    assert main(["configs/sft.yaml", "--model", str(tmp_path), "--gpus", "1", *settings]) == 1
    said = capsys.readouterr().out
    assert "update: backward needs" in said and "a GPU has 80" in said and "does not fit" in said


def test_configurations_that_ask_the_same_are_rehearsed_once(two_layers):
    paths = [f"configs/rl/{name}.yaml" for name in ("stage1", "stage2a", "stage2b", "stage3")]
    groups = prepare(paths, [], read_shape(str(two_layers)), 8)
    assert [group.configs for group in groups] == [["stage1"], ["stage2a", "stage2b", "stage3"]]


def test_more_ranks_than_an_update_has_responses_are_refused_with_a_layout(two_layers, capsys):
    """96 prompts of 7 responses in two updates are 336 responses for 1,024 ranks: 4 must share each."""
    assert main(["configs/rl/stage4.yaml", "--model", "32B", "--gpus", "1024", "sharding.reduce_once=false"]) == 2
    said = capsys.readouterr().err
    assert "688 of 1,024 ranks would train nothing: an update has 336 responses" in said
    assert "sharding.context_parallel=4" in said
    assert main(["configs/sft.yaml", "--model", "1.5B", "--gpus", "64"]) == 2
    assert "56 of 64 ranks" in (said := capsys.readouterr().err) and "set sharding.context_parallel=8" in said
    assert main(["configs/sft.yaml", "--model", "1.5B", "--gpus", "8", "--context-parallel", "3"]) == 2
    assert "sharding.context_parallel is 3; it must divide the 8 ranks" in capsys.readouterr().err
