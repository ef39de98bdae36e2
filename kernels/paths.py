"""Tree attention on a CPU at speed: the forest is cut into strips, and each strip is ordinary attention.

Tokens with equal `visible_until` form one strip: a chain of last children, i.e. a branch with everything the trunk goes on with.

    prompt S1 | W2 | W3 | W1 W2' W3' S2      strips:  prompt S1 W1 W2' W3' S2  (prefix: nothing)
                                                      W2                       (prefix: prompt S1)
                                                      W3                       (prefix: prompt S1)

Every strip needs one causal call over itself and, if it has a prefix, one full call of its rows against the prefix; the two halves are
put together by their log-sum-exps. Strips with the same prefix share the second call. No pair of tokens is computed in vain.
Where the prefix is short, calls cost more than arithmetic: there the strip's causal call simply starts at the root, and the rows of the
prefix are thrown away. Causal calls of similar length are batched, padded on the right, where causality hides the padding.

In the backward each call gets the final output and log-sum-exp of its rows, so that the pieces' gradients simply add up.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

# A prefix whose recomputation adds fewer query-key pairs than this is cheaper to recompute than to give a call of its own.
SHORT_PREFIX_PAIRS = 32_768
# Causal calls are batched when their lengths differ by less than this factor.
PADDING_FACTOR = 1.25

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


@dataclass(frozen=True)
class CausalCall:
    """A batch of B chains of L tokens; the entries `slots` of the flattened batch are the rows `rows` of the result."""

    tokens: Tensor  # [B, L], padded with the chain's last token
    slots: Tensor
    rows: Tensor


@dataclass(frozen=True)
class PrefixCall:
    """Every row of `rows` sees every token of `prefix`."""

    rows: Tensor
    prefix: Tensor


@dataclass(frozen=True)
class Paths:
    causal: list[CausalCall]
    prefixed: list[PrefixCall]


def cut(visible_until: Tensor) -> Paths:
    """The calls that together compute attention over the forest; every token is a row of exactly one causal call."""
    ends = visible_until.cpu().numpy()
    index = np.arange(len(ends))
    order = np.argsort(ends, kind="stable")
    strips = np.split(order, np.flatnonzero(np.diff(ends[order])) + 1) if len(ends) else []
    roots = np.maximum.accumulate(np.where(_is_root(ends), index, 0))
    siblings: dict[int, list[np.ndarray]] = {}
    chains: list[tuple[np.ndarray, int]] = []  # tokens, how many of the first are there only to be seen
    for strip in strips:
        first, root = strip[0], roots[strip[0]]
        if first == root:
            chains.append((strip, 0))
        else:
            seen = np.flatnonzero(ends[root:first] > first)
            siblings.setdefault(int(root + seen[-1]), []).append(strip)
    prefixed = []
    for parent, branches in siblings.items():
        root = roots[parent]
        prefix = root + np.flatnonzero(ends[root : parent + 1] > parent)
        if len(branches) * len(prefix) ** 2 < 2 * SHORT_PREFIX_PAIRS:
            chains += [(np.concatenate([prefix, strip]), len(prefix)) for strip in branches]
        else:
            chains += [(strip, 0) for strip in branches]
            prefixed.append(PrefixCall(_tensor(np.concatenate(branches)), _tensor(prefix)))
    return Paths(_batch(chains), prefixed)


def _is_root(ends: np.ndarray) -> np.ndarray:
    """A root begins where everything before has ended."""
    reach = np.maximum.accumulate(ends)
    return np.concatenate([[True], reach[:-1] <= np.arange(1, len(ends))])[: len(ends)]


def _batch(chains: list[tuple[np.ndarray, int]]) -> list[CausalCall]:
    calls, batch = [], []
    for tokens, hidden in sorted(chains, key=lambda chain: -len(chain[0])):
        if batch and len(batch[0][0]) > PADDING_FACTOR * len(tokens):
            calls.append(_causal_call(batch))
            batch = []
        batch.append((tokens, hidden))
    return calls + [_causal_call(batch)] if batch else calls


def _causal_call(batch: list[tuple[np.ndarray, int]]) -> CausalCall:
    longest = len(batch[0][0])
    padded = np.stack([np.pad(tokens, (0, longest - len(tokens)), mode="edge") for tokens, _ in batch])
    slots = [b * longest + np.arange(hidden, len(tokens)) for b, (tokens, hidden) in enumerate(batch)]
    rows = [tokens[hidden:] for tokens, hidden in batch]
    return CausalCall(_tensor(padded), _tensor(np.concatenate(slots)), _tensor(np.concatenate(rows)))


def _tensor(array: np.ndarray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array, dtype=np.int64))


def _gather(x: Tensor, tokens: Tensor) -> Tensor:
    """x [N, H, D] → [B, H, L, D] for tokens [B, L]."""
    return x.index_select(0, tokens.reshape(-1)).unflatten(0, (-1, tokens.shape[-1])).transpose(1, 2)


def _rows(x: Tensor) -> Tensor:
    """[B, H, L, …] → [B·L, H, …], the inverse of _gather."""
    return x.transpose(1, 2).flatten(0, 1)


def forward(q: Tensor, k: Tensor, v: Tensor, paths: Paths, scale: float) -> tuple[Tensor, Tensor]:
    """q [N, Hq, D], k and v [N, Hk, D] → output [N, Hq, D] and log-sum-exp [N, Hq]."""
    out = torch.empty_like(q)
    lse = q.new_empty(q.shape[:2], dtype=torch.promote_types(q.dtype, torch.float32))
    for call in paths.causal:
        part, part_lse = _flash(*(_gather(x, call.tokens) for x in (q, k, v)), 0.0, True, scale=scale)
        out.index_copy_(0, call.rows, _rows(part).index_select(0, call.slots))
        lse.index_copy_(0, call.rows, _rows(part_lse).index_select(0, call.slots))
    for call in paths.prefixed:
        queries, prefix = call.rows[None], call.prefix[None]
        part, part_lse = _flash(_gather(q, queries), _gather(k, prefix), _gather(v, prefix), 0.0, False, scale=scale)
        own, own_lse, part, part_lse = out[call.rows], lse[call.rows], _rows(part), _rows(part_lse)
        both = torch.logaddexp(own_lse, part_lse)
        merged = own * (own_lse - both).exp()[..., None] + part * (part_lse - both).exp()[..., None]
        out.index_copy_(0, call.rows, merged.to(out.dtype))
        lse.index_copy_(0, call.rows, both)
    return out, lse


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, paths: Paths, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, summed over the calls in fp32 or better."""
    dq, dk, dv = (torch.zeros(x.shape, dtype=lse.dtype) for x in (q, k, v))

    def add(queries: Tensor, keys: Tensor, upstream: Tensor, causal: bool) -> None:
        parts = _flash_backward(
            upstream, _gather(q, queries), _gather(k, keys), _gather(v, keys), _gather(out, queries), _gather(lse, queries),
            0.0, causal, scale=scale,
        )  # fmt: skip
        for total, part, tokens in zip((dq, dk, dv), parts, (queries, keys, keys), strict=True):
            total.index_add_(0, tokens.reshape(-1), _rows(part).to(total.dtype))

    for call in paths.causal:
        # Rows that are only there to be seen, and padding, have no gradient of their own.
        upstream = grad.new_zeros(call.tokens.numel(), *grad.shape[1:]).index_copy_(0, call.slots, grad.index_select(0, call.rows))
        add(call.tokens, call.tokens, upstream.unflatten(0, call.tokens.shape).transpose(1, 2), causal=True)
    for call in paths.prefixed:
        add(call.rows[None], call.prefix[None], _gather(grad, call.rows[None]), causal=False)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)
