"""Tree attention for Transformers: any decoder that uses its attention interface runs on a forest, unchanged.

    import dccot.transformers                              registers the name "dccot_tree"
    model = AutoModelForCausalLM.from_pretrained(FOLDER, attn_implementation="dccot_tree")
    forest, where = Forest.from_rows(rows)                 rows of token ids; every shared prefix is stored once
    logprob, entropy = compute_logprobs(model, forest)     [M] of forest.targets
    rows_logprob = to_rows(logprob, forest, where)         each row's log-probs, token by token

A forest is one packed sequence: the mask reaches the attention layers as the keyword `tree_mask`, and as the 4D
attention mask that keeps Transformers from building an N×N one. Calls without a forest (`generate`, evaluation) are
plain SDPA. What tree attention does not support (sliding windows, soft caps, attention sinks, dropout, caches) is
rejected, not ignored.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from dccot.kernels.mask import TreeMask
from dccot.kernels.tree_attention import tree_attention
from dccot.train.forest import Forest

NAME = "dccot_tree"


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    tree_mask: TreeMask | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Transformers' attention function: query, key and value [1, H, N, D] → [1, N, H, D]."""
    if tree_mask is None:
        if attention_mask is not None and attention_mask.dtype == torch.int32:
            name = type(module).__name__
            raise ValueError(f"{name} does not pass on the keyword tree_mask: this model cannot run on a forest")
        plain = {"dropout": dropout, "scaling": scaling, **options}
        return sdpa_attention_forward(module, query, key, value, attention_mask, **plain)
    _refuse(module, query, key, tree_mask, dropout, options)
    q, k, v = (x[0].transpose(0, 1).contiguous() for x in (query, key, value))
    return tree_attention(q, k, v, tree_mask, scale=scaling)[None], None


def _refuse(
    module: nn.Module, query: Tensor, key: Tensor, mask: TreeMask, dropout: float, options: dict[str, Any]
) -> None:
    """Raises for anything that would silently change the model."""
    layer = f"{type(module).__name__} {getattr(module, 'layer_idx', '')}".strip()
    window = options.get("sliding_window")
    longest = int(mask.position.max()) if window is not None else 0  # a GPU is waited for
    unlike = [name for name in ("softcap", "s_aux") if options.get(name) is not None]
    keys = f"{layer} has {key.shape[2]:,} keys: call the model with use_cache=False"
    last = f"{layer} sees the last {window} tokens only and the forest is {longest + 1:,} deep: shorten the rows"
    none = f"{layer} has attention dropout {dropout}; tree attention has none: set attention_dropout to 0"
    for wrong, message in (
        (len(query) != 1, f"a forest is a batch of one packed sequence, got a batch of {len(query)}"),
        (key.shape[2] != len(mask), f"the forest has {len(mask):,} tokens, {keys}"),
        (dropout, none),
        (window is not None and window <= longest, last),
        (unlike, f"{layer} uses {', '.join(unlike)}, which tree attention does not have"),
    ):
        if wrong:
            raise ValueError(message)


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, sdpa_mask)


def forest_inputs(forest: Forest) -> dict[str, Any]:
    """A Transformers decoder's inputs for running on a forest: `model(**forest_inputs(forest))`."""
    mask = forest.mask
    return {
        "input_ids": forest.tokens[None],
        "position_ids": mask.position[None],
        "attention_mask": mask.visible_until[None, None, None],
        "tree_mask": mask,
        "use_cache": False,
    }


def compute_logprobs(model: nn.Module, forest: Forest, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Log-prob and entropy [M] of the forest's sampled tokens; the LM head runs only on the rows that predict them."""
    used = getattr(getattr(model, "config", None), "_attn_implementation", NAME)
    if used != NAME:
        remedy = f"call model.set_attn_implementation({NAME!r}) first"
        raise ValueError(f"the model's attn_implementation is {used!r}: {remedy}")
    rows, chosen = forest.mask.parent[forest.targets].unique(return_inverse=True)
    logits = model(**forest_inputs(forest), logits_to_keep=rows).logits[0] / temperature
    log_softmax = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
    entropy = -(log_softmax.exp() * log_softmax).sum(-1)
    return log_softmax[chosen, forest.tokens[forest.targets]], entropy[chosen]


def to_rows(values: Tensor, forest: Forest, where: Sequence[Tensor]) -> list[Tensor]:
    """Values [M] of the forest's targets as one tensor per row, 0 where a token is not one; gradients flow back."""
    everywhere = values.new_zeros(len(forest)).index_copy(0, forest.targets, values)
    return list(everywhere[torch.cat(list(where)).to(values.device)].split([len(at) for at in where]))
