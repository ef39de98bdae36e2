"""Configuration of an RL stage, and the checks made before any weights are loaded."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from dccot.core.config import ConfigError, at_least, lookup, one_of, require
from dccot.data.judge import GradingConfig
from dccot.data.problems import PRESETS
from dccot.data.prompts import PromptConfig
from dccot.data.task import find_task
from dccot.model.config import ModelConfig
from dccot.model.sharding import ShardingConfig
from dccot.rollout.director import RolloutConfig
from dccot.rollout.settings import EngineConfig
from dccot.train.checkpoint import CheckpointConfig
from dccot.train.objectives import ObjectiveConfig
from dccot.train.phases import ProfileConfig
from dccot.train.rewards import ADVANTAGES, FILTERS, RewardConfig
from dccot.train.run import check_run, open_model
from dccot.train.sft import ModelPath
from dccot.train.update import OptimizerConfig


@dataclass
class RLData:
    train: str = ""  # JSONL or parquet of problems
    validation: str | None = None
    preset: str | None = None  # field names of a known set, e.g. deepscaler

    def check(self) -> None:
        if self.preset is not None:
            one_of(self.preset, PRESETS, "data.preset")


@dataclass
class BatchConfig:
    prompts_rolled_out: int = 288  # per rollout batch
    prompts: int = 96  # trained on per step, after filtering
    group_size: int = 7  # responses per prompt
    optimizer_steps: int = 2  # mini-batches per step
    max_rollout_batches: int = 20  # at most this many rollout batches to find enough prompts
    token_budget: int = 32_768  # of one micro-batch on one rank
    share_prompts: bool = True

    def check(self) -> None:
        require(
            self.group_size > 1, f"batch.group_size is {self.group_size}; an advantage within a group needs at least 2"
        )
        at_least(1, self.prompts, "batch.prompts")
        at_least(1, self.prompts_rolled_out, "batch.prompts_rolled_out")
        at_least(1, self.max_rollout_batches, "batch.max_rollout_batches")
        at_least(1, self.token_budget, "batch.token_budget")
        require(
            self.optimizer_steps > 0 and self.prompts % self.optimizer_steps == 0,
            f"batch.prompts is {self.prompts}, which batch.optimizer_steps {self.optimizer_steps} does not divide; change one of them",
        )
        require(
            self.prompts <= self.prompts_rolled_out * self.max_rollout_batches,
            f"batch.prompts is {self.prompts}; {self.max_rollout_batches} batches of {self.prompts_rolled_out} can never give as many",
        )


@dataclass
class ValidationConfig:
    every: int = 20  # steps, and once before the first; 0: never
    samples: int = 50
    top_p: float = 0.95
    problems: int | None = None  # use only the first N of data.validation; None: all

    def check(self) -> None:
        at_least(0, self.every, "validation.every")
        at_least(1, self.samples, "validation.samples")
        require(0 < self.top_p <= 1, f"validation.top_p is {self.top_p}; it must be in (0, 1]")
        if self.problems is not None:
            at_least(1, self.problems, "validation.problems")


@dataclass
class RLConfig:
    name: str = "rl"
    output: str = "runs"
    seed: int = 0
    steps: int = 200
    filter: str = "include_easy"  # remove_easy, none, or your own module:function
    advantage: str = "std"  # (R − mean) / std; mean: R − mean; or your own module:function
    replay: str | None = None  # train from this saved rollout JSONL, without an engine
    keep_rollouts: int = 100  # newest steps whose rollouts are kept on disk
    max_bad_steps: int = 5  # consecutive steps that may be skipped for non-finite numbers
    timeout_seconds: float = 1800.0  # of a collective
    # a rank without progress for this long is ended; engine.stall_seconds is for single calls
    stall_seconds: float = 3600.0
    wandb: str | None = None  # Weights & Biases project that also gets the metrics; None: off
    task: str = "math"  # or your own: my_package.my_module:MyTask
    model: ModelPath = field(default_factory=ModelPath)
    data: RLData = field(default_factory=RLData)
    prompt: PromptConfig = field(default_factory=PromptConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    grading: GradingConfig = field(default_factory=GradingConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    sharding: ShardingConfig = field(default_factory=ShardingConfig)
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    profile: ProfileConfig = field(default_factory=ProfileConfig)

    def check(self) -> None:
        lookup(FILTERS, self.filter, "filter")
        lookup(ADVANTAGES, self.advantage, "advantage")
        find_task(self.task)
        check_run(self)
        require(bool(self.data.train or self.replay), "data.train is not set; name a JSONL or parquet file of problems")
        require(
            not self.engine.url,
            "engine.url is set; training streams its weights into an engine of its own: leave engine.url out",
        )
        at_least(1, self.keep_rollouts, "keep_rollouts")
        temperature = self.rollout.temperature
        good = 0 < temperature < math.inf
        require(
            good, f"rollout.temperature is {temperature}; training divides logits by it: it must be positive and finite"
        )
        require(
            self.rollout.top_p == 1,
            f"rollout.top_p is {self.rollout.top_p}; training takes log-probs of the whole distribution: it must be 1 "
            "(validation.top_p is apart)",
        )
        cutoff, budget = self.reward.cutoff, self.rollout.budget
        require(
            cutoff < budget, f"reward.cutoff is {cutoff}, which is not below rollout.budget {budget}; lower the cutoff"
        )


def check_model(config: RLConfig) -> tuple[Path, PreTrainedTokenizerBase]:
    """The model's folder and tokenizer; rejected, before any weights are loaded, if they do not support the
    configuration.
    """
    path, model, tokenizer = open_model(config.model.path, config.prompt, config.rollout.workers)
    check_context(config, model)
    return path, tokenizer


def check_context(config: RLConfig, model: ModelConfig) -> None:
    context = config.engine.context or model.max_position
    longest = config.prompt.max_prompt_tokens + config.rollout.budget
    if longest > context:
        raise ConfigError(
            f"prompt.max_prompt_tokens + rollout.budget is {longest:,}; the model's context is {context:,}: lower one of them"
            + (" or raise engine.context" if config.engine.context else "")
        )
