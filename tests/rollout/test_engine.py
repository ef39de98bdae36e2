"""How a call is put to vLLM and what its end means, without an engine; calls that stall."""

import pytest

from dccot.core.config import ConfigError, check
from dccot.lab.worlds import bigram as tiny
from dccot.rollout.director import Call, Stop
from dccot.rollout.engine import EngineConfig, EngineStalled, Pending, Sampling, as_flags, open_training_engine
from dccot.rollout.response import Finish

TAG = "<spawn_workers>"


def call(*stops: str) -> Call:
    return Call((), 0, [1, 2], [], stops, 9, Finish.BUDGET)


@pytest.mark.parametrize("kind", ["single", "spelled"])
def test_a_tag_stops_as_its_token_where_it_has_one_and_as_text_otherwise(kind):
    words = tiny.tokenizer(kind)
    rule = Sampling(words)
    both = call("</worker_2>", TAG)
    given = rule.parameters(both, seed=5, temperature=0.6, top_p=0.9)
    stops = [words.convert_tokens_to_ids(tag) if kind == "single" else tag for tag in both.stops]
    assert (given["stop"], given["stop_token_ids"]) == ((None, stops) if kind == "single" else (stops, None))
    assert (given["seed"], given["temperature"], given["top_p"], given["max_tokens"]) == (5, 0.6, 0.9, 9)
    assert given["include_stop_str_in_output"] and not given["skip_special_tokens"]
    alone = rule.parameters(call(), seed=5, temperature=0.6, top_p=1.0)
    assert alone["stop"] is alone["stop_token_ids"] is None
    # 7: another end of the model's
    for reason, expected in zip((*stops, None, 7), (Stop.CLOSE, Stop.SPAWN, Stop.EOS, Stop.EOS)):
        assert rule.stop_of(both, "stop", reason) is expected
        assert rule.stop_of(call(), "stop", reason) is Stop.EOS
        assert rule.stop_of(both, "length", reason) is Stop.LENGTH
    with pytest.raises(RuntimeError, match="ended with 'abort'"):
        rule.stop_of(call(), "abort", None)


def test_arguments_become_flags():
    options = {"block_size": 32, "enforce_eager": True, "enable_x": False, "hf_overrides": {"head_dtype": "float32"}}
    flags = ["--block-size", "32", "--enforce-eager", "--no-enable-x", "--hf-overrides", '{"head_dtype": "float32"}']
    assert as_flags(options) == flags


def test_calls_are_pending_until_they_finish_and_stall_when_none_does():
    pending = Pending(EngineConfig(stall_seconds=0.0))
    pending.begin("a", call())
    pending.begin("b", call())
    with pytest.raises(ValueError, match="call 'a' is already running"):
        pending.begin("a", call())
    pending.after_step(["a"], str)  # one that finishes gives the others time
    assert list(pending) == ["b"]
    with pytest.raises(EngineStalled, match=r"stall_seconds is 0\); 1 pending: all of it"):
        pending.after_step([], lambda: "all of it")


@pytest.mark.parametrize(
    ("name", "value"), [("dtype", "int8"), ("max_sequences", 0), ("tensor_parallel", 0), ("gpu_memory", 1.5)]
)
def test_impossible_settings_are_refused_by_name(name, value, tmp_path):
    with pytest.raises(ConfigError, match=f"engine.{name} is {value!r}"):
        check(EngineConfig(**{name: value}), "engine")
    with (
        pytest.raises(ConfigError, match=r"engine\.url is set"),
        open_training_engine(tmp_path, EngineConfig(url=["x"])),
    ):
        pass
