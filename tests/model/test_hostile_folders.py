"""A damaged or hostile model folder is refused in one line that names the value."""

import json

import pytest

from dccot.model.checkpoint_io import open_tensors
from dccot.model.config import parse_config, read_config

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
    [("hidden_size", -32), ("num_attention_heads", 0), ("num_hidden_layers", 10**7), ("rms_norm_eps", float("nan")), ("vocab_size", "64")],
)
def test_a_size_that_no_model_has_is_named(key, value):
    assert parse_config(SMALL)
    with pytest.raises(ValueError, match=f"{key} is {value!r}; it must be"):
        parse_config(SMALL | {key: value})


def test_a_config_that_is_no_object(tmp_path):
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ValueError, match="holds a list"):
        read_config(tmp_path)


def test_an_lfs_pointer_instead_of_weights(tmp_path):
    (tmp_path / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n")
    with pytest.raises(ValueError, match="git-LFS pointer"), open_tensors(tmp_path):
        pass


def test_an_index_that_points_out_of_the_folder(tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../secret.safetensors"}}))
    with pytest.raises(ValueError, match=r"names '\.\./secret\.safetensors'"), open_tensors(tmp_path):
        pass
