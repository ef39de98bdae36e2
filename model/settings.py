"""Settings of a model in training: its adapters, and how it is spread over ranks (lora.py, sharding.py)."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, field
from typing import Literal, get_args

from dccot.core.config import NonNegative, Positive, PositiveFloat, one_of, require

ATTENTION = ("triton", "cpu", "flash", "dense")
BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}  # dtype → size of a number
Target = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@dataclass(frozen=True)
class LoraConfig:
    rank: NonNegative = 0  # of the adapters that are trained instead of the weights; 0: none, all weights are trained
    alpha: PositiveFloat = 32.0  # the adapters' product is scaled by alpha / rank
    targets: list[Target] = field(default_factory=lambda: list(get_args(Target)))  # layers that get adapters

    def check(self) -> None:
        require(bool(self.targets), "model.lora.targets is empty; name at least one layer, e.g. [q_proj, v_proj]")

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


@dataclass
class ShardingConfig:
    replicate: Positive = 1  # copies of the model; 1 shards it over all ranks
    whole: bool = False  # every rank has a copy, in one piece instead of by block: for tiny models
    # ranks that share a micro-batch, each with some of its tokens (context.py): for trees too long for one GPU
    context_parallel: Positive = 1
    compute_dtype: str = "bfloat16"  # of weights and activations in forward and backward
    master_dtype: str = "float32"  # a frozen model needs no more than compute_dtype
    activation_checkpointing: bool = True  # recompute every block in the backward: less memory, a third more work
    reshard_after_forward: bool = True  # false saves one all-gather of weights per micro-batch at the cost of memory
    # keep gradients unsharded until the last micro-batch (4 bytes per parameter); false reduces after each
    reduce_once: bool = True
    # torch.compile of the blocks; on a CPU it needs a C++ compiler, and is left out where there is none
    compile: bool = False
    # triton, cpu or flash (torch's FlexAttention on the same tiles, FLASH where installed); None: by device
    attention: str | None = None
    lm_head: Literal["own", "liger"] = "own"  # liger: CuTe kernels on H100, if liger-kernel[cutedsl] is installed

    def check(self) -> None:
        one_of(self.compute_dtype, BYTES, "sharding.compute_dtype")
        one_of(self.master_dtype, BYTES, "sharding.master_dtype")
        if self.attention is not None:
            one_of(self.attention, ATTENTION, "sharding.attention", " or null")
        liger = self.lm_head != "liger" or importlib.util.find_spec("liger_kernel") is not None
        require(liger, "sharding.lm_head is liger, which is not installed: pip install 'liger-kernel[cutedsl]'")
        require(
            not self.whole or self.replicate == 1,
            f"sharding.replicate is {self.replicate}, and sharding.whole makes a copy per rank; choose one",
        )

    def copies(self, ranks: int) -> int:
        """Copies of the model on `ranks` ranks."""
        return ranks if self.whole else self.replicate

    def check_ranks(self, ranks: int) -> None:
        """Reject a layout that does not divide the ranks."""
        for key, value in {"replicate": self.replicate, "context_parallel": self.context_parallel}.items():
            require(ranks % value == 0, f"sharding.{key} is {value}; it must divide the {ranks:,} ranks")
