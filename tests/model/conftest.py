"""Small random checkpoints of every kind the decoder reads, with transformers' own model of each as the judge."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from dccot.model.config import read_config
from dccot.model.transformer import Transformer
from dccot.model.weights import load_weights

VOCABULARY = 301  # odd, so that nothing divides evenly over ranks
YARN = {"factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0} | YARN
ROPE = {"default": {}, "linear": {"factor": 2.5}, "llama3": LLAMA3, "yarn": YARN}


@pytest.fixture(scope="session")
def raw_config():
    """The contents of a config.json; `spelling` "new" is transformers 5's rope_parameters, "old" the one before."""

    def make(model_type="qwen2", rope="default", spelling="new", tied=False, groups=2, **changes) -> dict:
        theta, scaling = 500_000.0, {"rope_type": rope, **ROPE[rope]}
        if spelling == "new":
            rotary = {"rope_parameters": {"rope_theta": theta, **scaling}}
        else:  # the oldest files say `type`
            rotary = {"rope_theta": theta, "rope_scaling": None if rope == "default" else {"type": rope, **ROPE[rope]}}
        raw = {
            "architectures": [f"{model_type.title()}ForCausalLM"],
            "model_type": model_type,
            "vocab_size": VOCABULARY,
        }
        raw |= {"hidden_size": 192, "intermediate_size": 99, "num_hidden_layers": 2, "max_position_embeddings": 256}
        raw |= {"num_attention_heads": 6, "num_key_value_heads": 6 // groups, "head_dim": 32, "hidden_act": "silu"}
        raw |= {"rms_norm_eps": 1e-6, "tie_word_embeddings": tied, "bos_token_id": 0, "eos_token_id": 1}
        if model_type == "qwen2":
            del raw["head_dim"]  # qwen2 checkpoints do not state it
        return raw | rotary | changes

    return make


@pytest.fixture(scope="session")
def write_checkpoint():
    """Writes config.json and random weights, norms and biases included, and returns transformers' model of them."""

    def write(folder: Path, raw: dict, seed: int = 0):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(raw))
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                noise = torch.randn_like(parameter)
                parameter.copy_(1 + 0.2 * noise if name.endswith("norm.weight") else 0.08 * noise)
        tied = {"lm_head.weight"} if raw["tie_word_embeddings"] else set()
        tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items() if name not in tied}
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return model

    return write


@pytest.fixture(scope="session")
def ours():
    """Our model of a checkpoint."""

    def load(folder: Path, dtype: torch.dtype | None = None) -> Transformer:
        model = Transformer(read_config(folder))
        load_weights(model, folder, dtype=dtype)
        return model

    return load


@pytest.fixture(scope="session")
def tokenizer():
    words = {"<s>": 0, "</s>": 1} | {f"w{i}": i for i in range(2, VOCABULARY)}
    plain = Tokenizer(models.WordLevel(words, unk_token="w2"))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=plain, bos_token="<s>", eos_token="</s>")
