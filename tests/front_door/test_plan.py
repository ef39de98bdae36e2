"""`dccot plan` against what training steps really hold, as one rank of two (memory_program.py)."""

import json
import sys
from pathlib import Path

import pytest

from dccot.core.config import load_config
from dccot.lab.rehearsal.inputs import response_of
from dccot.memory import LargestBatch, TrainingMemory, largest_batch, parameters
from dccot.model.config import parse_config
from dccot.model.sharding import ShardingConfig
from dccot.plan import GPUS, SHAPES, checkpoint_bytes, main, make_plan, read_shape, run_bytes
from dccot.train.config import RLConfig
from dccot.train.forest import build_forest
from tests.support import programs

CASES = {
    "fp32": {"compute_dtype": "float32"},
    "fp32, reduced each": {"compute_dtype": "float32", "reduce_once": False},
    "fp32, kept": {"compute_dtype": "float32", "activation_checkpointing": False},
    "bf16": {"compute_dtype": "bfloat16"},
}
TOKENS = 384
SHAPE = SHAPES["1.5B"] | {
    "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 6, "vocab_size": 4096,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shape")
    (folder / "config.json").write_text(json.dumps(SHAPE))
    program = Path(__file__).with_name("memory_program.py")
    said = programs.finish([sys.executable, program, folder, TOKENS, json.dumps(CASES)]).stdout
    return next(json.loads(line) for line in said.splitlines() if line.startswith("{"))


def planned(sharding: dict, ranks: int = 2) -> TrainingMemory:
    rows = TOKENS - TOKENS // 8  # memory_program.py's prompts
    return TrainingMemory(parse_config(SHAPE, "small"), ShardingConfig(**sharding), ranks, TOKENS, rows, reference=True)


@pytest.mark.parametrize("case", CASES)
def test_what_is_always_there_is_exact(case, measured):
    for name, size in planned(CASES[case]).persistent.items():
        assert size == pytest.approx(measured[case][name], rel=1e-3), name


@pytest.mark.parametrize("case", CASES)
def test_gradients_are_exact_and_the_peak_of_a_step_is_met_within_15_percent(case, measured):
    memory = planned(CASES[case])
    once = CASES[case].get("reduce_once", True)
    assert memory.gradients == pytest.approx(
        measured[case]["gradients, waiting" if once else "gradients, sharded"], rel=1e-3
    )
    assert once or measured[case]["gradients, waiting"] == 0
    assert sum(memory.peak[1].values()) == pytest.approx(measured[case]["step"], rel=0.15)


@pytest.mark.parametrize(("name", "billions"), [("1.5B", 1.78), ("7B", 7.62), ("32B", 32.8)])
def test_shapes_have_the_published_number_of_parameters(name, billions):
    assert parameters(read_shape(name)) / 1e9 == pytest.approx(billions, rel=0.01)


def test_what_does_not_fit_is_said_with_what_to_change(capsys):
    assert main(["32B", "--gpus", "8"]) == 1
    assert "sharding.reduce_once=false" in capsys.readouterr().out
    assert main(["1.5b", "--gpus", "8"]) == 0
    assert "→ fits" in capsys.readouterr().out
    assert main(["1.6B"]) == 2


def test_copies_and_tensor_parallel_are_the_configurations_unless_given(tmp_path, capsys):
    """Four copies on 8 GPUs, hence two GPUs per copy: 4 bytes of 1.78 billion parameters are 3.6 GB on each."""
    path = tmp_path / "four.yaml"
    groups = "sharding: {replicate: 4}\nengine: {tensor_parallel: 2}\n"
    path.write_text(f"base: {Path('configs/rl/stage4.yaml').resolve()}\n{groups}")
    assert main(["1.5B", str(path), "--gpus", "8"]) == 0
    assert "master weights 3.6" in (said := capsys.readouterr().out) and "engine weights 1.8" in said
    assert main(["1.5B", str(path), "--gpus", "8", "--replicate", "1", "--tensor-parallel", "1"]) == 0
    assert "master weights 0.9" in (said := capsys.readouterr().out) and "engine weights 3.6" in said


def test_an_engine_that_wakes_beside_weights_and_moments_must_fit(capsys):
    """7.6 billion parameters on 8 GPUs: (4 + 8 + 2) / 8 bytes of each are 13.3 GB, CUDA and NCCL take 3.1, together a
    fifth of 80. vLLM's share does not shrink for them.
    """
    small = ["7B", "--gpus", "8", "configs/rl/stage4.yaml", "sharding.reduce_once=false"]
    assert main([*small, "engine.gpu_memory=0.85"]) == 1
    said = capsys.readouterr().out
    assert "sampling 84.4" in said and "set engine.gpu_memory=0.79 or less" in said and "→ fits" not in said
    assert main([*small, "engine.gpu_memory=0.79"]) == 0
    assert "→ fits" in capsys.readouterr().out


def test_a_copy_of_the_model_per_rank_waits_for_nothing():
    memory = planned({}, ranks=1)
    assert memory.gradients == memory.persistent["master weights"] and not memory.waits


def test_a_response_larger_than_the_token_budget_sets_the_size_of_a_micro_batch():
    """Three workers: 12,000 tokens on the longest path are nearly 60,000 in the tree, next to a prompt of 1,024."""
    free = ["model.path=x", "data.train=y", "rollout.total_tokens=null"]
    config = load_config(RLConfig, "configs/rl/stage4.yaml", free)
    largest = largest_batch(config, 131_072)
    response = response_of(largest, 0)
    forest = build_forest([[(0, response)]])
    assert (len(forest), len(forest.targets)) == (largest.tokens, largest.rows)
    assert response.longest_path <= 12_000 and 60_000 < largest.tokens <= 1024 + 5 * 12_000
    assert make_plan(read_shape("1.5B"), config, 8, GPUS["H100"]).tokens == largest.tokens


def test_short_responses_fill_the_token_budget():
    config = load_config(RLConfig, "configs/rl/dsr_hlp_12k.yaml", ["model.path=x", "data.train=y"])
    largest = largest_batch(config, 131_072)
    assert config.batch.token_budget - largest.copies < largest.tokens <= config.batch.token_budget


def test_a_response_larger_than_the_token_budget_is_said(capsys):
    assert main(["1.5B", "configs/rl/stage4.yaml", "rollout.total_tokens=null", "--gpus", "8"]) == 0
    assert "one response can be a tree of 60,960 tokens, more than batch.token_budget 32,768" in capsys.readouterr().out
    assert main(["1.5B", "configs/rl/stage4.yaml", "batch.token_budget=65536", "--gpus", "8"]) == 0
    assert "one response can be" not in capsys.readouterr().out


def test_a_cap_on_all_tokens_bounds_the_largest_tree():
    """Three workers of at most 7,000 of 21,000 tokens: worker 1 once, the others twice, and the prompt's 1,024."""
    needed = ["model.path=m", "data.train=d", "batch.token_budget=1024"]
    free = largest_batch(
        load_config(RLConfig, "configs/rl/stage4.yaml", [*needed, "rollout.total_tokens=null"]), 131_072
    )
    capped = largest_batch(load_config(RLConfig, "configs/rl/stage4.yaml", needed), 131_072)
    assert 5 * 11_900 < free.tokens <= 1024 + 5 * 12_000
    assert 5 * 6_900 < capped.tokens <= 1024 + 5 * 7_000
    assert capped.rows <= 21_000


def test_disk_space_of_a_run_by_hand():
    """100 parameters, 200 steps, two whole checkpoints of 12 bytes each; bf16 weights at 20, 40, … 180; fp32 at 200.
    And of 20 steps 96 groups of 7 responses, half of 21,000 tokens long, 13 bytes each.
    """
    config = load_config(RLConfig, "configs/rl/hlp.yaml", ["model.path=m", "data.train=d"])
    assert checkpoint_bytes(100, config) == 100 * (2 * 12 + 9 * 2 + 4)
    assert run_bytes(100, config) == checkpoint_bytes(100, config) + 20 * 96 * 7 * 10_500 * 13
    config.checkpoint.keep_hf_every = None
    assert checkpoint_bytes(100, config) == 100 * (2 * 12 + 2 + 4)


LONG = ["configs/rl/stage4.yaml", "rollout.total_tokens=null", "sharding.reduce_once=false"]


def test_a_layout_is_proposed_where_a_tree_is_too_long_for_one_gpu_and_it_fits(capsys):
    assert main(["32B", "--gpus", "64", *LONG]) == 1
    said = capsys.readouterr().out
    assert "training does not fit" in said
    layout = said.split("this would fit: ")[1].split()
    assert "sharding.context_parallel=2" in layout
    assert main(["32B", "--gpus", "64", *LONG, *layout]) == 0
    said = capsys.readouterr().out
    assert "→ fits" in said and "this would fit" not in said


def test_ranks_without_work_are_said_with_a_layout_that_feeds_them(capsys):
    assert main(["1.5B", "--gpus", "1024", *LONG]) == 0
    said = capsys.readouterr().out
    assert "688 of 1,024 ranks would train nothing: an update has 336 responses" in said
    layout = said.split("train nothing")[1].split("set ")[1].split(", or")[0].split()
    assert main(["1.5B", "--gpus", "1024", *LONG, *layout]) == 0
    assert "train nothing" not in capsys.readouterr().out


def test_two_ranks_that_share_a_forest_keep_half_of_its_activations_each():
    """Per block: input and attention of each token, 2 bytes a number, and 4 of log-sum-exp per head."""
    model, tokens = read_shape("7B"), 65_536
    one, two = (TrainingMemory(model, ShardingConfig(context_parallel=n), 8, tokens, tokens, False) for n in (1, 2))
    assert one.kept == 28 * tokens * (2 * (3584 + 3584) + 4 * 28) and two.kept == one.kept / 2
    keys_and_values = 2 * 2 * tokens * 4 * 128
    assert two.block_backward == pytest.approx((one.block_backward + 2 * 3584 * 18944 * 2) / 2 + keys_and_values)
    assert two.persistent == one.persistent


def test_a_layout_that_does_not_divide_the_gpus_is_refused(capsys):
    assert main(["1.5B", "--gpus", "8", "--context-parallel", "3"]) == 2
    assert "sharding.context_parallel is 3; it must divide the 8 ranks" in capsys.readouterr().err
    assert main(["1.5B", "--gpus", "8", "--tensor-parallel", "3"]) == 2
    assert "engine.tensor_parallel is 3; it must divide the 8 ranks" in capsys.readouterr().err


@pytest.mark.parametrize(("workers", "depth"), [(3, 1), (8, 1), (2, 2), (3, 2), (2, 3)])
def test_the_largest_tree_by_width_and_depth_is_that_of_its_forest(workers, depth):
    largest = LargestBatch(1, 5, workers, 4, 2, depth)
    forest = build_forest([[(0, response_of(largest, 7))]])
    assert (len(forest), len(forest.targets)) == (largest.tokens, largest.rows)
