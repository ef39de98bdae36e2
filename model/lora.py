"""Low-rank adapters (LoRA): the model's own weights stay as they are, and each target gets a small trained product.

    y = W x + b + scale · B (A x)        A [rank, in] random and B [out, rank] 0 at the start; scale = alpha / rank

W is frozen: it has neither gradient nor optimizer state, and is held in compute precision. A and B are trained, in
master precision; FSDP shards all three. With the adapters off the model is the one that training started from, which
makes it its own reference policy. The engine gets W + scale · B A, one weight at a time (`weights.full_parameters`).

On disk adapters are a folder as peft writes and reads it, with what they were trained on in base.json:

    hf/adapter_model.safetensors  adapter_config.json  base.json  config.json  tokenizer…
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dccot.core.files import BadData
from dccot.model.folder import ADAPTER_CONFIG
from dccot.model.settings import LoraConfig
from dccot.model.transformer import Transformer, fill

ADAPTERS, BASE = "adapter_model.safetensors", "base.json"
PREFIX = "base_model.model."  # of a tensor's name in peft's files


@dataclass(frozen=True)
class Base:
    """What adapters belong to: the model, its files' checksums, and their settings."""

    path: str
    files: dict[str, str]
    lora: LoraConfig


class LoraLinear(nn.Linear):
    def __init__(self, base: nn.Linear, lora: LoraConfig, dtype: torch.dtype):
        super().__init__(base.in_features, base.out_features, base.bias is not None, "meta")
        self.weight, self.bias, self.scale, self.active = base.weight, base.bias, lora.scale, True
        own: dict[str, Any] = {"bias": False, "device": base.weight.device, "dtype": dtype}
        self.lora_A = nn.Linear(base.in_features, lora.rank, **own)
        self.lora_B = nn.Linear(lora.rank, base.out_features, **own)

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(x, self.weight, self.bias)
        return y + self.scale * self.lora_B(self.lora_A(x)) if self.active else y

    def merge(self, weight: Tensor) -> Tensor:
        """W + scale · B A of the whole weight, in its dtype. Collective if the adapters are sharded."""
        return merge(weight, whole(self.lora_A.weight), whole(self.lora_B.weight), self.scale)


def merge(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    wide = torch.promote_types(weight.dtype, torch.float32)
    return torch.addmm(weight.to(wide), b.to(wide), a.to(wide), alpha=scale).to(weight.dtype)


def whole(parameter: Tensor) -> Tensor:
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter.detach()


def add_adapters(model: Transformer, lora: LoraConfig, dtype: torch.dtype) -> None:
    """Freezes the model and gives its targets adapters, whose memory is not initialised."""
    model.requires_grad_(False)
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if name in lora.targets and isinstance(child, nn.Linear):
                setattr(parent, name, LoraLinear(child, lora, dtype))
    model.lora = lora


@torch.no_grad()
def init_adapters(model: Transformer, seed: int) -> None:
    """A uniform in ±1/√in, as peft starts it, and B 0: the same bits for a seed, however they are sharded."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in trained(model):
        full = torch.zeros(parameter.shape)
        if name.endswith("lora_A.weight"):
            bound = 1 / math.sqrt(parameter.shape[1])
            full.uniform_(-bound, bound, generator=generator)
        fill(parameter, full)


def trained(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """What the optimizer changes: adapters, or every parameter of a model without."""
    return ((name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad)


def own_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters of the model itself, by Hugging Face's names, without adapters."""
    return ((name, each) for name, each in model.named_parameters() if ".lora_" not in name)


@contextlib.contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """The model that training started from."""
    layers = [module for module in model.modules() if isinstance(module, LoraLinear)]
    for layer in layers:
        layer.active = False
    try:
        yield
    finally:
        for layer in layers:
            layer.active = True


# ---- files ----


def write_adapters(adapters: Iterable[tuple[str, Tensor]], base: Base, folder: Path) -> None:
    save_file({PREFIX + name: tensor.contiguous() for name, tensor in adapters}, folder / ADAPTERS, {"format": "pt"})
    lora = base.lora
    settings: dict[str, Any] = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base.path}
    settings |= {"r": lora.rank, "lora_alpha": lora.alpha, "target_modules": lora.targets}
    settings |= {"lora_dropout": 0.0, "bias": "none", "inference_mode": True}
    (folder / ADAPTER_CONFIG).write_text(json.dumps(settings, indent=2) + "\n")
    (folder / BASE).write_text(json.dumps(asdict(base), indent=1) + "\n")


def read_base(folder: Path) -> Base:
    try:
        found = json.loads((folder / BASE).read_text())
        return Base(found["path"], found["files"], LoraConfig(**found["lora"]))
    except (OSError, ValueError, LookupError, TypeError) as error:
        remedy = "adapters from elsewhere are merged by peft (merge_and_unload)"
        raise BadData(f"{folder} holds adapters, but {BASE} does not say of which model ({error}); {remedy}") from None


def merged_parameters(
    parameters: Iterable[tuple[str, Tensor]], folder: Path, lora: LoraConfig
) -> Iterator[tuple[str, Tensor]]:
    """`parameters` of the base with the adapters in `folder` added, one at a time."""
    with safe_open(folder / ADAPTERS, framework="pt", device="cpu") as stored:
        names = set(stored.keys())
        for name, weight in parameters:
            layer = PREFIX + name.removesuffix(".weight")
            if f"{layer}.lora_A.weight" in names:
                a, b = (stored.get_tensor(f"{layer}.lora_{part}.weight") for part in "AB")
                weight = merge(weight, a, b, lora.scale)
            yield name, weight
