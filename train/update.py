"""One optimizer step over a mini-batch of forests, the same for SFT and RL.

The loss is the sum of per-token losses divided by the number of sampled tokens of the whole mini-batch, over all
micro-batches and ranks; so packing, micro-batching and the number of ranks never matter. Gradients are reduced once,
with the last micro-batch, or after each (sharding.reduce_once), which needs less memory. A step whose gradient is not
finite is skipped and counted, never applied.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from dccot.core.runtime import Runtime
from dccot.train.config import OptimizerConfig
from dccot.train.forest import Forest


def make_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.AdamW:
    rate, decay, betas = config.learning_rate, config.weight_decay, (config.betas[0], config.betas[1])
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(trained, lr=rate, betas=betas, weight_decay=decay, fused=True)


def compute_logprobs(model: nn.Module, forest: Forest, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-prob and entropy [M] of the forest's sampled tokens under the model; of those that this rank predicts, if a
    group of ranks shares the forest.
    """
    targets, mask = forest.targets, forest.mask
    tokens, position = mask.own(forest.tokens), mask.own(mask.position)
    return model(tokens, position, mask, forest.rows, forest.tokens[targets], temperature)


@dataclass
class StepReport:
    """What one optimizer step did."""

    loss: float
    grad_norm: float
    applied: bool
    tokens: int  # sampled tokens over all ranks


# (micro-batch, forest, logprob [M], entropy [M]) → loss [M]
TokenLoss = Callable[[int, Forest, Tensor, Tensor], Tensor]


def accumulate(
    model: nn.Module,
    forests: Sequence[Forest],
    token_loss: TokenLoss,
    temperature: float,
    runtime: Runtime,
    reduce_once: bool = True,
) -> tuple[float, int]:
    """Gradients of the mini-batch's token mean; returns it and the number of tokens, over all ranks."""
    tokens = int(runtime.sum(torch.tensor([sum(len(f.targets) for f in forests)])))
    total = torch.zeros((), dtype=torch.float64, device=runtime.device)
    for number, forest in enumerate(forests):
        if isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(not reduce_once or number == len(forests) - 1)
        forest = forest.to(runtime.device)
        logprob, entropy = compute_logprobs(model, forest, temperature)
        losses = token_loss(number, forest, logprob, entropy)
        (losses.sum() / max(1, tokens)).backward()  # gradients are summed over ranks (model/sharding.py)
        total += losses.detach().double().sum()
    return float(runtime.sum(total)) / max(1, tokens), tokens


def apply_gradients(
    model: nn.Module, optimizer: torch.optim.Optimizer, loss: float, learning_rate: float, max_grad_norm: float
) -> tuple[float, bool]:
    """Clip and step unless loss or gradient is not finite; returns the gradient's norm and whether it stepped."""
    norm = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
    size = float(norm)
    finite = math.isfinite(size) and math.isfinite(loss)
    if finite:
        nn.utils.clip_grads_with_norm_(model.parameters(), max_grad_norm, norm)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return size, finite


def update(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    forests: Sequence[Forest],
    token_loss: TokenLoss,
    config: OptimizerConfig,
    step: int,
    temperature: float,
    runtime: Runtime,
    reduce_once: bool = True,
) -> StepReport:
    loss, tokens = accumulate(model, forests, token_loss, temperature, runtime, reduce_once)
    norm, applied = apply_gradients(model, optimizer, loss, config.rate(step), config.max_grad_norm)
    return StepReport(loss, norm, applied, tokens)
