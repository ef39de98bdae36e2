"""Context parallelism: the ranks of a group share one forest, and each holds some of its tokens.

    rows of tokens  →  every layer on the rank's own rows  →  log-probs of the targets that its rows predict
                        └ attention: own queries against the keys and values of all ranks, gathered per layer

Everything but attention works token by token, so a rank runs it on its own tokens alone. Keys and values are gathered
over the group before attention and gathered again when the backward recomputes it; their gradients, of which each rank
has a part from its own queries, are summed in fp32 or better and return to the rank that holds the token. Gradients of
parameters need nothing: FSDP sums them over all ranks anyway. Ranks of a group are neighbours, on one machine if it has
as many.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import GroupName, _resolve_process_group

from dccot.core.runtime import inherit_timeout
from dccot.kernels.mask import TreeMask, moved


@dataclass(frozen=True)
class ContextGroup:
    """This rank's place: `rank` of `ranks` that share forests, in the group's number `data` of those."""

    rank: int = 0
    ranks: int = 1
    data: int = 0
    name: str = ""

    @classmethod
    def join(cls, ranks: int, device: torch.device) -> ContextGroup:
        """Collective over all ranks of the default group; `ranks` divides them."""
        if ranks == 1:
            return cls(data=dist.get_rank() if dist.is_initialized() else 0)
        names = ("data", "context")
        mesh = init_device_mesh(device.type, (dist.get_world_size() // ranks, ranks), mesh_dim_names=names)
        inherit_timeout(mesh.get_all_groups())
        data, rank = divmod(dist.get_rank(), ranks)
        return cls(rank, ranks, data, mesh.get_group("context").group_name)


def gather_keys(k: Tensor, v: Tensor, mask: TreeMask) -> tuple[Tensor, Tensor]:
    """Keys and values [n, H, D] of this rank's tokens → those of the whole forest, [N, H, D]."""
    assert mask.share is not None and mask.order is not None, "prepare comes first"
    order, sizes = mask.order
    both = _gather(torch.cat([k, v], dim=1), order, sizes, mask.share.group)
    return both[:, : k.shape[1]], both[:, k.shape[1] :]


def prepare(mask: TreeMask) -> None:
    """Where each token is among the gathered rows, of which every rank sends as many as the largest share has; and how
    many tokens each rank has, on the CPU. Called before the layers: torch.compile should not see it computed.
    """
    if mask.share is None or mask.order is not None:
        return
    at = [np.concatenate([np.arange(*bounds) for bounds in ranges]) for ranges in mask.share.ranges]
    sizes, order = np.array([len(own) for own in at]), np.empty(len(mask), np.int64)
    for rank, own in enumerate(at):
        order[own] = rank * sizes.max() + np.arange(len(own))
    mask.order = moved(torch.from_numpy(order), mask.device), torch.from_numpy(sizes)


@torch.library.custom_op("dccot::gather_keys", mutates_args=())
def _gather(own: Tensor, order: Tensor, sizes: Tensor, group: str) -> Tensor:
    """own [n, …] → [N, …], token t from row order[t] of all ranks' rows."""
    process_group, most = _resolve_process_group(GroupName(group)), int(sizes.max())
    sent = own.new_zeros(most, *own.shape[1:])
    sent[: len(own)] = own
    everybody = own.new_empty(most * process_group.size(), *own.shape[1:])
    dist.all_gather_into_tensor(everybody, sent, group=process_group)
    return everybody.index_select(0, order)


@_gather.register_fake
def _(own, order, sizes, group):
    return own.new_empty(order.shape[0], *own.shape[1:])


@torch.library.custom_op("dccot::scatter_keys", mutates_args=())
def _scatter(grad: Tensor, order: Tensor, sizes: Tensor, rows: int, group: str) -> Tensor:
    """The gradient of `own`, [rows, …], from every rank's part of the gradient of the whole."""
    process_group, most = _resolve_process_group(GroupName(group)), int(sizes.max())
    wide = torch.promote_types(grad.dtype, torch.float32)
    sent = grad.new_zeros(most * process_group.size(), *grad.shape[1:], dtype=wide)
    sent.index_copy_(0, order, grad.to(wide))
    mine = sent.new_empty(most, *grad.shape[1:])
    dist.reduce_scatter_tensor(mine, sent, group=process_group)
    return mine[:rows].to(grad.dtype, copy=True)


@_scatter.register_fake
def _(grad, order, sizes, rows, group):
    return grad.new_empty(rows, *grad.shape[1:])


def _save(ctx, inputs, output) -> None:
    own, order, sizes, ctx.group = inputs
    ctx.rows = own.shape[0]
    ctx.save_for_backward(order, sizes)


def _gradient(ctx, grad: Tensor):
    order, sizes = ctx.saved_tensors
    return _scatter(grad.contiguous(), order, sizes, ctx.rows, ctx.group), None, None, None


_gather.register_autograd(_gradient, setup_context=_save)
