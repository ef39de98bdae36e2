"""What config.json may say, and what is refused in one line that names the value: unsupported, damaged or hostile."""

import json
import math

import pytest
import torch

from dccot.core.files import BadData
from dccot.model.config import parameter_shapes, parse_config, read_config
from dccot.model.transformer import Transformer

LINEAR, LLAMA3 = {"rope_type": "linear", "rope_theta": 1e4}, {"rope_type": "llama3", "rope_theta": 1e4, "factor": 2.0}


@pytest.mark.parametrize("rope", ["default", "linear", "llama3", "yarn"])
def test_both_spellings_of_rope_mean_the_same(raw_config, rope):
    assert parse_config(raw_config(rope=rope, spelling="old")) == parse_config(raw_config(rope=rope, spelling="new"))


def test_deepscaler_config_is_read(tmp_path):
    published = """{"architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151646,
        "eos_token_id": 151643, "hidden_act": "silu", "hidden_size": 1536, "initializer_range": 0.02,
        "intermediate_size": 8960, "max_position_embeddings": 131072, "max_window_layers": 21, "model_type": "qwen2",
        "num_attention_heads": 12, "num_hidden_layers": 28, "num_key_value_heads": 2, "rms_norm_eps": 1e-06,
        "rope_theta": 10000, "sliding_window": 4096, "tie_word_embeddings": false, "torch_dtype": "bfloat16",
        "use_cache": true, "use_mrope": false, "use_sliding_window": false, "vocab_size": 151936}"""
    (tmp_path / "config.json").write_text(published)
    config = read_config(tmp_path)
    assert (config.layers, config.heads, config.kv_heads, config.head_dim) == (28, 12, 2, 128)
    assert config.qkv_bias and not config.output_bias and not config.qk_norm and not config.tied_embeddings
    assert (config.rope.type, config.rope.theta, config.max_position) == ("default", 10000.0, 131072)


@pytest.mark.parametrize(
    "change, complaint",
    [
        ({"model_type": "mistral"}, "model_type is 'mistral'"),
        ({"model_type": None}, "model_type is None"),
        ({"model_type": ["qwen2"]}, r"model_type is \['qwen2'\]"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"hidden_size": None, "vocab_size": None}, "vocab_size, hidden_size missing"),
        ({"hidden_size": -32}, "hidden_size is -32; it must be"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0; it must be"),
        ({"num_hidden_layers": 10**7}, "num_hidden_layers is 10000000; it must be"),
        ({"vocab_size": "64"}, "vocab_size is '64'; it must be"),
        ({"rms_norm_eps": math.nan}, "rms_norm_eps is nan; it must be"),
        ({"use_sliding_window": True, "max_window_layers": 1}, "sliding window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding window"),
        ({"layer_types": 5}, "layer_types is 5; it must be a list"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantised"),
        ({"num_key_value_heads": 4}, "6 heads cannot share 4 key-value heads"),
        ({"num_attention_heads": 193, "num_key_value_heads": None}, "head_dim 0 is odd or 0"),
        ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}, "rope type is 'longrope'"),
        ({"rope_parameters": LINEAR}, "'linear' needs factor"),
        ({"rope_parameters": LLAMA3}, "needs low_freq_factor, high_freq_factor"),
        ({"rope_parameters": {"rope_theta": 1e4, "mrope_section": [1]}}, "mrope_section"),
        ({"rope_parameters": None, "rope_theta": math.nan}, "rope_theta is nan; it must be a finite number"),
        ({"rope_scaling": [1]}, r"the rotary embedding is \[1\]; it must be an object"),
        ({"rope_scaling": {"type": "linear", "factor": "2"}}, "factor is '2'; it must be a finite number"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
    ],
)
def test_what_the_decoder_does_not_compute_is_refused_by_name(raw_config, change, complaint):
    with pytest.raises(BadData, match=complaint):
        parse_config(raw_config() | change)


def test_window_that_no_layer_uses_is_accepted(raw_config):
    assert parse_config(raw_config(use_sliding_window=True, sliding_window=4096, max_window_layers=2)).layers == 2


def test_a_folder_without_a_config_or_with_something_else_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        read_config(tmp_path / "nowhere")
    for text, said in {"[1]": "holds a list", "{": "config.json is not JSON", json.dumps("x"): "holds a str"}.items():
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(BadData, match=said):
            read_config(tmp_path)


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
@pytest.mark.parametrize("bias", [False, True])
def test_parameter_shapes_are_those_of_the_decoder(raw_config, family, bias):
    config = parse_config(raw_config(family, tied=bias, attention_bias=bias))
    with torch.device("meta"):
        built = {name: tuple(parameter.shape) for name, parameter in Transformer(config).named_parameters()}
    assert list(parameter_shapes(config).items()) == list(built.items())
