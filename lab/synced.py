"""Does the co-located engine have the trainer's weights? Compared through its own kernels: vLLM repacks what it loads.

fingerprint(W) = W · r for a fixed random vector r, one number per row; vectors are compared as they are. The engine
fuses some layers (q, k, v → qkv; gate, up → gate_up): its fingerprints are those of the parts in a row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from dccot.rollout.engine import Parameters
    from dccot.rollout.vllm_engine import VllmEngine


def verify(engine: VllmEngine, parameters: Parameters) -> None:
    """An error that names the weights which differ."""
    if (split := engine.config.tensor_parallel) > 1:
        raise ValueError(f"verify compares whole weights; engine.tensor_parallel is {split}, which splits them")
    network = engine.network
    whole = engine.with_head(parameters, wanted=True)
    if wrong := differing(network, whole, network.packed_modules_mapping, engine.dtype):
        raise ValueError(f"the engine's weights differ from the given ones: {', '.join(wrong[:20])}; load them again")


def probe(width: int, like: Tensor) -> Tensor:
    """The vector r for matrices of this width: always the same, with the dtype and device of `like`."""
    return torch.randn(width, generator=torch.Generator().manual_seed(width)).to(like)


@torch.no_grad()
def differing(model: nn.Module, parameters: Parameters, fused: dict[str, list[str]], dtype: torch.dtype) -> list[str]:
    """Names (Hugging Face) of the parameters that differ in vLLM's `model`. `fused`: its layer → ours, in order."""
    tolerance = 1e-4 if dtype == torch.float32 else 0.03
    home = {part: (whole, index) for whole, parts in fused.items() for index, part in enumerate(parts)}
    collected: dict[tuple[str, str], dict[int, tuple[str, Tensor]]] = {}
    wrong: list[str] = []
    for name, tensor in parameters:
        layer, _, kind = name.rpartition(".")
        above, _, leaf = layer.rpartition(".")
        whole, index = home.get(leaf, (leaf, 0))
        tensor = tensor.to(dtype)
        value = tensor.float() @ probe(tensor.shape[1], tensor).float() if tensor.ndim == 2 else tensor.float()
        collected.setdefault((f"{above}.{whole}".lstrip("."), kind), {})[index] = name, value
    for (layer, kind), parts in collected.items():
        have = _fingerprint(model.get_submodule(layer), kind, dtype)
        for _, (name, expected) in sorted(parts.items()):
            mine, have = have[: len(expected)].to(expected), have[len(expected) :]
            limit = tolerance * float(expected.abs().max())
            if mine.shape != expected.shape or not torch.allclose(mine, expected, rtol=0, atol=limit):
                wrong.append(name)
    return wrong


def _fingerprint(layer: nn.Module, kind: str, dtype: torch.dtype) -> Tensor:
    kernel = getattr(layer, "quant_method", None)
    if kernel is None or kind == "bias":
        return getattr(layer, kind).float()
    width, device = cast(int, layer.input_size_per_partition), cast(Tensor, layer.weight).device
    vector = probe(width, torch.empty(0, dtype=dtype, device=device))
    return kernel.apply(layer, vector.unsqueeze(0)).squeeze(0).float()
