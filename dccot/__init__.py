"""dccot: trains, runs and measures language models that think in parallel (Divide-and-Conquer CoT).

    from dccot import Forest, TreeMask, build_forest, objectives, solve, tree_attention

Names are imported on first use: `import dccot` itself is instant and loads neither torch nor vLLM.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from dccot.eval.solve import solve
    from dccot.kernels.lm_head import linear_logprob
    from dccot.kernels.mask import TreeMask
    from dccot.kernels.tree_attention import tree_attention
    from dccot.rollout.response import Response
    from dccot.train import objectives
    from dccot.train.forest import Forest, build_forest

_HOMES = {
    "Forest": "dccot.train.forest",
    "Response": "dccot.rollout.response",
    "TreeMask": "dccot.kernels.mask",
    "build_forest": "dccot.train.forest",
    "linear_logprob": "dccot.kernels.lm_head",
    "objectives": "dccot.train.objectives",
    "solve": "dccot.eval.solve",
    "tree_attention": "dccot.kernels.tree_attention",
}
__all__ = ["Forest", "Response", "TreeMask", "build_forest", "linear_logprob", "objectives", "solve", "tree_attention"]


def __getattr__(name: str):
    if name not in _HOMES:
        raise AttributeError(f"dccot has no {name!r}; it offers {', '.join(__all__)}")
    module = importlib.import_module(_HOMES[name])
    return getattr(module, name, module)
