"""A damaged or hostile model folder is refused in one line that names the value."""

import json

import pytest

from dccot.core.files import BadData
from dccot.lab.model_check import main
from dccot.model.config import parse_config, read_config
from dccot.model.weights import open_tensors

SMALL = {
    "model_type": "qwen2",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}


@pytest.mark.parametrize(
    "key, value",
    [
        ("hidden_size", -32),
        ("num_attention_heads", 0),
        ("num_hidden_layers", 10**7),
        ("rms_norm_eps", float("nan")),
        ("vocab_size", "64"),
    ],
)
def test_a_size_that_no_model_has_is_named(key, value):
    assert parse_config(SMALL)
    with pytest.raises(BadData, match=f"{key} is {value!r}; it must be"):
        parse_config(SMALL | {key: value})


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"num_attention_heads": 64}, "head_dim 0 is odd or 0"),
        ({"model_type": ["qwen2"]}, r"model_type is \['qwen2'\]"),
        ({"layer_types": 5}, "layer_types is 5; it must be a list"),
        ({"rope_theta": float("nan")}, "rope_theta is nan; it must be a finite number"),
        ({"rope_scaling": [1]}, r"the rotary embedding is \[1\]; it must be an object"),
        ({"rope_scaling": {"type": "linear", "factor": "2"}}, "factor is '2'; it must be a finite number"),
    ],
)
def test_settings_of_the_wrong_kind_are_named(changes, said):
    with pytest.raises(BadData, match=said):
        parse_config(SMALL | changes)


@pytest.mark.parametrize("text, said", [("[1]", "holds a list"), ("{", "config.json is not JSON")])
def test_a_config_that_is_no_object(tmp_path, text, said):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(BadData, match=said):
        read_config(tmp_path)


def test_weights_cut_short_cost_a_command_one_line(raw_config, write_checkpoint, tmp_path, capsys):
    write_checkpoint(tmp_path, raw_config())
    weights = tmp_path / "model.safetensors"
    for size in (weights.stat().st_size - 1, 100, 0):
        weights.write_bytes(weights.read_bytes()[:size])
        assert main(["check", str(tmp_path), "--no-weights"]) == 2
        [said] = capsys.readouterr().err.splitlines()
        assert (
            said.startswith("dccot: ")
            and "model.safetensors is damaged or cut short" in said
            and said.endswith("fetch it again")
        )


@pytest.mark.parametrize("index", ["[1]", "{}", '{"weight_map": 1}', '{"weight_map": {"a": ["b"]}}', "{"])
def test_an_index_that_is_none(tmp_path, index):
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with (
        pytest.raises((BadData, FileNotFoundError), match=r"index\.json does not say which file|holds no"),
        open_tensors(tmp_path),
    ):
        pass


def test_an_lfs_pointer_instead_of_weights(tmp_path):
    (tmp_path / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n")
    with pytest.raises(BadData, match="git-LFS pointer"), open_tensors(tmp_path):
        pass


def test_an_index_that_points_out_of_the_folder(tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../secret.safetensors"}}))
    with pytest.raises(BadData, match=r"names '\.\./secret\.safetensors'"), open_tensors(tmp_path):
        pass
