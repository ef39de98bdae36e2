"""`dccot plan` against what training steps really hold, in two processes under torchrun (memory_program.py)."""

import json
from pathlib import Path

import pytest

from dccot.config import load_config
from dccot.model.config import parse_config
from dccot.train.plan import GPUS, SHAPES, advice, main, make_plan, parameters, read_shape
from dccot.train.rl_config import RLConfig

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
def measured(tmp_path_factory, torchrun):
    folder = tmp_path_factory.mktemp("shape")
    (folder / "config.json").write_text(json.dumps(SHAPE))
    said = torchrun(2, Path(__file__).with_name("memory_program.py"), str(folder), str(TOKENS), json.dumps(CASES))
    return next(json.loads(line) for line in said.splitlines() if line.startswith("{"))


def planned(sharding: dict):
    overrides = [f"sharding.{key}={json.dumps(value)}" for key, value in sharding.items()]
    config = load_config(RLConfig, "configs/rl/stage4.yaml", ["model.path=x", "data.train=y", f"batch.token_budget={TOKENS}", *overrides])
    return make_plan(parse_config(SHAPE, "small"), config, 2, GPUS["H100"])


@pytest.mark.parametrize("case", CASES)
def test_what_is_always_there_is_exact(case, measured):
    for name, size in planned(CASES[case]).persistent.items():
        assert size == pytest.approx(measured[case][name], rel=1e-3), name


@pytest.mark.parametrize("case", CASES)
def test_gradients_are_exact_and_the_peak_of_a_step_is_met_within_20_percent(case, measured):
    plan = planned(CASES[case])
    if CASES[case].get("reduce_once", True):
        assert plan.training["gradients"] == pytest.approx(measured[case]["gradients, waiting"], rel=1e-3)
    else:
        head = 4 * SHAPE["vocab_size"] * SHAPE["hidden_size"]
        assert measured[case]["gradients, waiting"] == 0
        assert plan.training["gradients"] - head == pytest.approx(measured[case]["gradients, sharded"], rel=1e-3)
    assert sum(plan.training.values()) == pytest.approx(measured[case]["step"], rel=0.2)


@pytest.mark.parametrize(("name", "billions"), [("1.5B", 1.78), ("7B", 7.62), ("32B", 32.8)])
def test_shapes_have_the_published_number_of_parameters(name, billions):
    assert parameters(read_shape(name)) / 1e9 == pytest.approx(billions, rel=0.01)


def test_what_does_not_fit_is_said_with_what_to_change(capsys):
    assert main(["32B", "--gpus", "8"]) == 0
    assert "sharding.reduce_once=false" in capsys.readouterr().out
    assert main(["1.5B", "--gpus", "8"]) == 0
    assert capsys.readouterr().out.rstrip().endswith("fits")
    assert main(["1.6B"]) == 2


def test_a_copy_of_the_model_per_rank_waits_for_nothing():
    plan = planned({"replicate": 2})
    assert plan.training["gradients"] == 4 * plan.parameters == plan.persistent["master weights"]
    assert advice(plan, GPUS["H100"]) == ["fits"]
