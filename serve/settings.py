"""Settings of the endpoint: `DCCOT_SERVE="rollout.budget=4000 max_n=4" VLLM_PLUGINS=dccot vllm serve MODEL`.

The plugin runs inside vLLM's server, whose command line we cannot extend, possibly in several of its processes. So its
settings come from one environment variable, as `key=value` like everywhere else; `dccot serve` fills it from its
options and the model's run.
"""

from __future__ import annotations

import os
import shlex
from dataclasses import dataclass, field

from dccot.core.config import at_least, load_config, require
from dccot.data.prompts import PromptConfig
from dccot.rollout.director import RolloutConfig

VARIABLE = "DCCOT_SERVE"


@dataclass
class ServeConfig:
    # the model's context is less
    prompt: PromptConfig = field(default_factory=lambda: PromptConfig(max_prompt_tokens=1_000_000))
    # budget: default and limit of each request
    rollout: RolloutConfig = field(default_factory=lambda: RolloutConfig(budget=12000))
    max_n: int = 16  # choices per request
    max_requests: int = 256  # choices that run at once; further requests get a 503

    def check(self) -> None:
        at_least(1, self.max_n, "max_n")
        at_least(1, self.max_requests, "max_requests")
        require(
            self.max_n <= self.max_requests,
            f"max_n is {self.max_n}; max_requests is {self.max_requests}, which must be as many",
        )


def from_environment() -> ServeConfig:
    return load_config(ServeConfig, None, shlex.split(os.environ.get(VARIABLE, "")))
