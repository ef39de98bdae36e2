"""Engine settings, separate from engine.py so that reading a configuration does not import vLLM."""

from __future__ import annotations

from dataclasses import dataclass, field

from dccot.core.config import check_address, one_of, require


@dataclass
class EngineConfig:
    dtype: str = "auto"  # "float32" matches the trainer to 1e-4 on a CPU
    context: int | None = None  # tokens per sequence; None: the model's maximum
    max_sequences: int = 256  # running concurrently
    # of one forward pass on a GPU; longer prompts are split. vLLM recommends 8,192 for an A100
    batched_tokens: int = 16_384
    tensor_parallel: int = 1
    gpu_memory: float = 0.85  # share of a GPU's memory while the engine is awake
    kv_cache_gb: float | None = None  # fixed size of the KV cache; None: gpu_memory decides on a GPU, 1 GiB on a CPU
    block_size: int | None = None  # tokens per prefix-cache block; None: vLLM decides on a GPU, 32 on a CPU
    compile: bool | None = None  # CUDA graphs and torch.compile inside the engine; None: on a GPU
    stall_seconds: float = 1800.0  # if nothing finishes for this long, an error lists the pending calls
    url: list[str] = field(default_factory=list)  # vLLM servers that sample instead of this process; not for training

    def check(self) -> None:
        one_of(self.dtype, ("auto", "bfloat16", "float16", "float32"), "engine.dtype")
        require(self.max_sequences > 0, f"engine.max_sequences is {self.max_sequences}; it must be at least 1")
        require(self.batched_tokens > 0, f"engine.batched_tokens is {self.batched_tokens}; it must be at least 1")
        require(self.tensor_parallel > 0, f"engine.tensor_parallel is {self.tensor_parallel}; it must be at least 1")
        for url in self.url:
            check_address(url, "engine.url")
        require(0 < self.gpu_memory <= 1, f"engine.gpu_memory is {self.gpu_memory}; it must be in (0, 1]")
