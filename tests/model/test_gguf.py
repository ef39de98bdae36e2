"""A GGUF file becomes a folder that computes the same model; what would become another model is refused."""

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import pre_tokenizers

from dccot.core.config import ConfigError
from dccot.core.files import BadData
from dccot.kernels.mask import TreeMask
from dccot.model.gguf import import_gguf
from dccot.model.tokenizer import open_tokenizer

gguf = pytest.importorskip("gguf", reason="pip install -r requirements/test.txt")

TEMPLATE = "{{ messages[0]['content'] }}<|end|>"
SPECIAL = ["<|start|>", "<|end|>"]
MERGED = [("1", "2"), ("l", "l"), (">", "Ċ")]


def permuted(weights: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp interleaves the halves of a head that transformers' rotation keeps apart."""
    halves = weights.reshape(heads, 2, len(weights) // heads // 2, *weights.shape[1:])
    return halves.swapaxes(1, 2).reshape(weights.shape)


def write(
    file: Path, raw: dict, model=None, *, architecture=None, pre="default", scaling=None, q8=False, template=TEMPLATE
) -> Path:
    """A model as llama.cpp's converter writes it."""
    family = raw["model_type"]
    writer = gguf.GGUFWriter(file, architecture or family)
    writer.add_block_count(raw["num_hidden_layers"])
    writer.add_context_length(raw["max_position_embeddings"])
    writer.add_embedding_length(raw["hidden_size"])
    writer.add_feed_forward_length(raw["intermediate_size"])
    writer.add_head_count(raw["num_attention_heads"])
    writer.add_head_count_kv(raw["num_key_value_heads"])
    writer.add_key_length(32)
    writer.add_layer_norm_rms_eps(raw["rms_norm_eps"])
    writer.add_rope_freq_base(500_000.0)
    writer.add_vocab_size(raw["vocab_size"])
    if scaling:
        writer.add_rope_scaling_type(scaling)
    vocabulary = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(pair) for pair in MERGED)]
    vocabulary += [f"Ġunused{i}" for i in range(raw["vocab_size"] - len(vocabulary))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(vocabulary)
    writer.add_token_types([3, 3] + [1] * (len(vocabulary) - 2))
    writer.add_token_merges([" ".join(pair) for pair in MERGED])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    if template:
        writer.add_chat_template(template)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[family.upper()], raw["num_hidden_layers"])
    for name, tensor in model.state_dict().items() if model else ():
        if name == "lm_head.weight" and raw["tie_word_embeddings"]:
            continue
        weights = tensor.numpy()
        if family == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            weights = permuted(weights, raw["num_attention_heads" if "q_proj" in name else "num_key_value_heads"])
        kind = gguf.GGMLQuantizationType.Q8_0 if q8 and name.endswith("o_proj.weight") else None
        data = gguf.quantize(weights, kind) if kind else np.ascontiguousarray(weights)
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight", ".bias")), data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


@pytest.mark.parametrize("family, tied", [("llama", True), ("llama", False), ("qwen2", True), ("qwen3", False)])
def test_the_imported_model_computes_what_the_original_does(raw_config, write_checkpoint, ours, tmp_path, family, tied):
    raw = raw_config(family, tied=tied, rms_norm_eps=1e-3)  # unlike any default
    theirs = write_checkpoint(tmp_path / "original", raw)
    import_gguf(write(tmp_path / "model.gguf", raw, theirs), tmp_path / "imported")
    model = ours(tmp_path / "imported")
    tokens = torch.randint(0, raw["vocab_size"], (80,), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = theirs(input_ids=tokens[None]).logits[0]
        torch.testing.assert_close(model(tokens, torch.arange(80), TreeMask.causal([80])), expected, rtol=0, atol=1e-5)


def test_quantised_weights_come_as_plain_ones(raw_config, write_checkpoint, ours, tmp_path):
    raw = raw_config("llama", hidden_size=192)
    theirs = write_checkpoint(tmp_path / "original", raw)
    import_gguf(write(tmp_path / "model.gguf", raw, theirs, q8=True), tmp_path / "imported", torch.bfloat16)
    imported = dict(ours(tmp_path / "imported", torch.float32).named_parameters())
    for name, parameter in theirs.named_parameters():
        error = (imported[name] - parameter).abs().max() / parameter.abs().max()
        assert error < 0.01, name


@pytest.fixture
def written(raw_config, write_checkpoint, tmp_path):
    """A file of a small model with these peculiarities."""

    def make(family: str = "llama", **changes) -> Path:
        raw = raw_config(family)
        return write(tmp_path / "model.gguf", raw, write_checkpoint(tmp_path / "original", raw), **changes)

    return make


def test_tokenizer_chat_template_and_end_of_text_come_along(written, tmp_path):
    import_gguf(written("qwen2"), tmp_path / "imported")
    tokenizer = open_tokenizer(tmp_path / "imported")
    assert (tokenizer.chat_template, tokenizer.eos_token) == (TEMPLATE, "<|end|>")
    text = "Find x = 12.\n\nLet's <b>\n go"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    generation = json.loads((tmp_path / "imported" / "generation_config.json").read_text())
    assert generation == {"bos_token_id": 0, "eos_token_id": 1}


@pytest.mark.parametrize("pre, tokens", [("default", ["12"]), ("smollm", ["1", "2"]), ("qwen2", ["1", "2"])])
def test_numbers_are_cut_as_the_file_says(written, tmp_path, pre, tokens):
    import_gguf(written(pre=pre, template=None), tmp_path / "imported")
    tokenizer = open_tokenizer(tmp_path / "imported")
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("12", add_special_tokens=False)) == tokens
    assert tokenizer.chat_template is None  # as in the file


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"architecture": "gemma"}, "architecture 'gemma'; the decoder computes qwen2, qwen3, llama"),
        ({"scaling": gguf.RopeScalingType.YARN}, r"rotary embedding \(yarn\)"),
        ({"pre": "klingon"}, "cuts text before BPE as 'klingon'"),
    ],
)
def test_what_would_become_another_model_is_refused_and_leaves_nothing(written, tmp_path, changes, said):
    with pytest.raises(ConfigError, match=said):
        import_gguf(written(**changes), tmp_path / "imported")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.gguf", "original"]


def test_files_that_are_no_gguf_or_cut_short_get_one_line(written, tmp_path):
    whole = written().read_bytes()
    for size in (0, 3, 24, 3000, len(whole) - 1000):
        (tmp_path / "cut.gguf").write_bytes(whole[:size])
        with pytest.raises(BadData, match="fetch it again"):
            import_gguf(tmp_path / "cut.gguf", tmp_path / "imported")
    with pytest.raises(FileNotFoundError, match="no file"):
        import_gguf(tmp_path / "none.gguf", tmp_path / "imported")
    assert not (tmp_path / "imported").exists()


def test_a_folder_with_something_in_it_is_left_alone(tmp_path):
    (tmp_path / "mine").write_text("precious")
    with pytest.raises(ConfigError, match="not empty"):
        import_gguf(tmp_path / "model.gguf", tmp_path)


def test_a_missing_package_is_named_with_the_remedy(tmp_path, monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "gguf" else found(name, *rest))
    with pytest.raises(ConfigError, match=r"needs gguf: pip install 'dccot\[gguf\]'"):
        import_gguf(tmp_path / "model.gguf", tmp_path / "imported")
