"""A Hugging Face folder from a GGUF file, as llama.cpp writes them: qwen2, qwen3 and llama.

    import_gguf("SmolLM2-135M-Instruct.Q4_1.gguf", "smollm2")    config, weights, tokenizer and what belongs to it

Transformers and gguf read the file; quantised weights are dequantised, and the folder holds plain ones. What
transformers would silently get wrong is fixed or rejected here: a quantization_config for weights that are no longer
quantised, rope scaling that it does not read, and pre-tokenization rules that it does not know. The folder appears only
when complete.
"""

from __future__ import annotations

import importlib.util
import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from dccot.core.config import ConfigError
from dccot.core.files import BadData
from dccot.model.config import FAMILIES, OPTIONAL_SIZES, REQUIRED, ModelConfig, parse_config
from dccot.model.tokenizer import open_tokenizer
from dccot.model.transformer import Transformer
from dccot.model.weights import TOKEN_IDS, read_companions, write_folder

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

ARCHITECTURES = {"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM", "llama": "LlamaForCausalLM"}
PACKAGES = ("gguf", "accelerate")
REMEDY = "use the published safetensors"
BYTE_LEVEL = (None, "default", "gpt-2", "gpt2")  # names of the pre-tokenization that transformers uses by default


def import_gguf(file: str | Path, folder: str | Path, dtype: torch.dtype = torch.float32) -> ModelConfig:
    """Write the model of `file` to `folder`; ConfigError or BadData, and no folder, if it cannot be done faithfully."""
    file, folder = Path(file), Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} exists already and is not empty; name a new folder")
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"reading GGUF needs {' and '.join(missing)}: pip install 'dccot[gguf]'")
    metadata, tensors = _read_metadata(file)
    _refuse_unsupported(file, metadata, tensors)
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=dtype)
    raw = _config_of(loaded.config, metadata)
    config = parse_config(raw, where=str(file))
    with tempfile.TemporaryDirectory() as temporary:
        (Path(temporary) / "config.json").write_text(json.dumps(raw))  # AutoTokenizer picks its class by it
        _tokenizer(file, metadata).save_pretrained(temporary)
        tokenizer = open_tokenizer(temporary)
        ids = {key: raw.get(key) for key in TOKEN_IDS}
        if ids["eos_token_id"] is None:
            ids["eos_token_id"] = tokenizer.eos_token_id
        known = {key: value for key, value in ids.items() if value is not None}
        (Path(temporary) / "generation_config.json").write_text(json.dumps(known, indent=2) + "\n")
        companions = read_companions(temporary)
    weights = loaded.state_dict()
    with torch.device("meta"):
        shape = Transformer(config)
    for name, parameter in shape.named_parameters():  # transformers also loads tensors that do not fit
        if weights[name].shape != parameter.shape:
            has, needs = tuple(weights[name].shape), tuple(parameter.shape)
            raise BadData(f"{file}: {name} has shape {has}, its header says {needs}; {REMEDY}")
    parameters = ((name, weights[name]) for name, _ in shape.named_parameters())
    write_folder(shape, parameters, folder, source=companions, dtype=dtype)
    return config


def _config_of(config: PreTrainedConfig, metadata: dict) -> dict:
    """What differs from the defaults, and every size; transformers overlooks the size of qwen3's heads."""
    sizes = {key: getattr(config, key, None) for key in (*REQUIRED, *OPTIONAL_SIZES)}
    sizes["head_dim"] = metadata.get(f"{config.model_type}.attention.key_length", sizes["head_dim"])
    raw = config.to_diff_dict() | {key: size for key, size in sizes.items() if size is not None}
    dropped = ("quantization_config", "_model_name_or_path", "dtype")
    kept = {key: value for key, value in raw.items() if key not in dropped}
    return kept | {"architectures": [ARCHITECTURES[config.model_type]]}


def _read_metadata(file: Path) -> tuple[dict, set[str]]:
    """Keys and values of the header, without the long lists, and the names of the tensors."""
    if not file.is_file():
        raise FileNotFoundError(f"no file {str(file)!r}")
    with open(file, "rb") as stream:
        if stream.read(4) != b"GGUF":
            raise BadData(f"{file} is not a GGUF file: it does not begin with GGUF; fetch it again")
    from gguf import GGUFReader

    class Bounded(GGUFReader):
        """Its own reads past the end give nothing, 2⁶⁴ times if the header says so."""

        def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> Any:
            if offset + np.dtype(dtype).itemsize * int(count) > len(self.data):
                raise ValueError(f"byte {offset:,} is past its end")
            return super()._get(offset, dtype, count, override_order)

    try:
        reader = Bounded(file)
        short = {name: field.contents() for name, field in reader.fields.items() if len(field.data) == 1}
        return short, {tensor.name for tensor in reader.tensors}
    except (ValueError, IndexError, KeyError, OverflowError, RecursionError) as error:
        raise BadData(f"{file} is damaged or cut short ({error}); fetch it again") from None


def _refuse_unsupported(file: Path, metadata: dict, tensors: set[str]) -> None:
    family = metadata.get("general.architecture")
    if family not in FAMILIES:
        known = f"the decoder computes {', '.join(FAMILIES)}"
        raise ConfigError(f"{file} holds a model of architecture {family!r}; {known}")
    scaling = metadata.get(f"{family}.rope.scaling.type", "none")
    if scaling != "none" or "rope_freqs.weight" in tensors:
        kind = scaling if scaling != "none" else "llama3"
        raise ConfigError(f"{file} scales its rotary embedding ({kind}), which is not read from GGUF: {REMEDY}")


def _tokenizer(file: Path, metadata: dict) -> PreTrainedTokenizerBase:
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    cut = metadata.get("tokenizer.ggml.pre")
    if cut == "smollm":
        digits, bytes_ = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, bytes_])
    elif cut not in BYTE_LEVEL and cut not in GGUF_PRE_TOKENIZER_SPLITS:
        raise ConfigError(f"{file} cuts text before BPE as {cut!r}, which is not known here: {REMEDY}")
    return tokenizer
