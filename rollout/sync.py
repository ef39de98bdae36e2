"""Do the engine's weights match the trainer's? Checked through the engine's own kernels, however they repacked the
weights.

    fingerprint(W) = W · r          r: a fixed random vector, so a matrix leaves one number per row
    fingerprint(b) = b              vectors are compared as they are

The engine fuses some layers (q, k, v → qkv; gate, up → gate_up): their fingerprints are those of the parts,
concatenated.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

import torch
from torch import Tensor, nn


def probe(width: int, like: Tensor) -> Tensor:
    """The vector r for matrices of this width: always the same, with the dtype and device of `like`."""
    return torch.randn(width, generator=torch.Generator().manual_seed(width)).to(like)


@torch.no_grad()
def differing(
    model: nn.Module, parameters: Iterable[tuple[str, Tensor]], fused: dict[str, list[str]], dtype: torch.dtype
) -> list[str]:
    """Names (Hugging Face) of the parameters that differ in vLLM's `model`. `fused`: its layer → ours, in order."""
    tolerance = 1e-4 if dtype == torch.float32 else 0.03
    home = {part: (whole, index) for whole, parts in fused.items() for index, part in enumerate(parts)}
    collected: dict[tuple[str, str], dict[int, tuple[str, Tensor]]] = {}
    wrong: list[str] = []
    for name, tensor in parameters:
        layer, _, kind = name.rpartition(".")
        above, _, leaf = layer.rpartition(".")
        whole, index = home.get(leaf, (leaf, 0))
        parts = collected.setdefault((f"{above}.{whole}".lstrip("."), kind), {})
        tensor = tensor.to(dtype)
        parts[index] = (
            name,
            (tensor.float() @ probe(tensor.shape[1], tensor).float() if tensor.ndim == 2 else tensor.float()),
        )
    for (layer, kind), parts in collected.items():
        have = _fingerprint(model.get_submodule(layer), kind, dtype)
        for _, (name, expected) in sorted(parts.items()):
            mine, have = have[: len(expected)].to(expected), have[len(expected) :]
            if mine.shape != expected.shape or not torch.allclose(
                mine, expected, rtol=0, atol=tolerance * float(expected.abs().max())
            ):
                wrong.append(name)
    return wrong


def _fingerprint(layer: nn.Module, kind: str, dtype: torch.dtype) -> Tensor:
    kernel = getattr(layer, "quant_method", None)
    if kernel is None or kind == "bias":
        return getattr(layer, kind).float()
    width, device = cast(int, layer.input_size_per_partition), cast(Tensor, layer.weight).device
    vector = probe(width, torch.empty(0, dtype=dtype, device=device))
    return kernel.apply(layer, vector.unsqueeze(0)).squeeze(0).float()
