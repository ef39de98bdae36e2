"""Settings of SFT and RL runs, and the checks made before any weights are loaded."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from dccot.core.config import (
    ConfigError,
    Fraction,
    NonNegative,
    NonNegativeFloat,
    Positive,
    PositiveFloat,
    Seed,
    Share,
    known,
    require,
    required,
)
from dccot.data.judge import GradingConfig
from dccot.data.problems import PRESETS, Columns
from dccot.data.prompts import PromptConfig
from dccot.data.task import TaskName
from dccot.model.config import ModelConfig, read_config
from dccot.model.folder import resolve_model
from dccot.model.settings import LoraConfig, ShardingConfig
from dccot.model.tokenizer import open_tokenizer
from dccot.rollout.director import RolloutConfig
from dccot.rollout.engine import EngineConfig
from dccot.rollout.tags import FormatConfig, TagIds, Width
from dccot.train.objectives import ObjectiveConfig, RolloutCorrection
from dccot.train.rewards import ADVANTAGES, CREDITS, FILTERS, RewardConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PROFILED = ("rollout", "grade", "old_logprob", "reference", "pack", "update", "sync")
Seconds = Annotated[float, Field(gt=0, le=1e9)]
FromRun = required("name a Hugging Face folder or an earlier run, e.g. model.path=runs/sft")
Demonstrations = required("name a JSONL file with id, question and completion")
Replayed = required("name a file that a training run wrote to its bad/ or rollouts/, or set it to null")


@dataclass
class OptimizerConfig:
    learning_rate: PositiveFloat = 2e-6  # of AdamW
    # of AdamW
    betas: Annotated[list[Fraction], Field(min_length=2, max_length=2)] = field(default_factory=lambda: [0.9, 0.999])
    weight_decay: NonNegativeFloat = 0.01  # of AdamW
    max_grad_norm: PositiveFloat = 1.0  # clip the gradient's norm over all shards to this
    warmup_steps: NonNegative = 0  # linear, then constant
    # step from which the rate falls linearly, to 0 at decay_to; None: never (the paper)
    decay_from: NonNegative | None = None
    decay_to: int | None = None  # step at which the rate is 0

    def check(self) -> None:
        first, last = self.decay_from, self.decay_to
        together = (first is None) == (last is None)
        require(together, f"optimizer.decay_from is {first} and optimizer.decay_to {last}; set both, or neither")
        falls = first is None or last is None or first < last
        require(falls, f"optimizer.decay_to is {last}; it must be above optimizer.decay_from, {first}")

    def rate(self, step: int) -> float:
        """Learning rate of step `step`, counted from 0."""
        rising, falling = (step + 1) / max(1, self.warmup_steps), 1.0
        if self.decay_from is not None and self.decay_to is not None:
            falling = (self.decay_to - step) / (self.decay_to - self.decay_from)
        return self.learning_rate * max(0.0, min(1.0, rising, falling))


@dataclass
class CheckpointConfig:
    every: Positive = 10  # steps; the last step is always saved
    # save after the next step once the last checkpoint is this old; None: by steps only
    minutes: PositiveFloat | None = None
    keep: Positive = 2  # newest complete checkpoints kept with their optimizer state
    max_failures: NonNegative = 3  # tolerated in a row; one more ends the run
    # write hf/, weights for inference, every N-th step only and keep it (and with the last); None: with each checkpoint
    keep_hf_every: Positive | None = None
    # auto: resume from the newest complete checkpoint; never: reject a folder that has one
    resume: Literal["auto", "never"] = "auto"


@dataclass
class ProfileConfig:
    steps: list[NonNegative] = field(default_factory=list)  # steps to trace, counted from 0, on every rank
    # phases to trace; a rollout produces millions of events
    phases: list[Literal[PROFILED]] = field(default_factory=lambda: ["update", "sync"])  # type: ignore[valid-type]
    shapes: bool = False  # record the shapes of tensors
    memory: bool = False  # record allocations


@dataclass
class ModelPath:
    path: Annotated[str, FromRun] = ""  # a Hugging Face folder, or a run (its newest checkpoint)
    lora: LoraConfig = field(default_factory=LoraConfig)


@dataclass
class TrainingConfig:
    """What SFT and RL have in common."""

    name: str = ""  # of the folder below `output`
    output: str = "runs"  # folder of all runs
    seed: Seed = 0  # of the order of data and of every response
    steps: Positive = 1  # to train, from the start of the run
    replay: Annotated[str, Replayed] | None = None  # train on this file of a run's bad/ or rollouts/ in every step
    max_bad_steps: NonNegative = 5  # consecutive steps that may be skipped for non-finite numbers
    timeout_seconds: Seconds = 1800.0  # of a collective
    stall_seconds: Seconds = 3600.0  # a rank without progress for this long is ended
    wandb: str | None = None  # Weights & Biases project that also gets the metrics; None: off
    task: TaskName = "math"  # or your own: my_package.my_module:MyTask
    model: ModelPath = field(default_factory=ModelPath)
    prompt: PromptConfig = field(default_factory=PromptConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    sharding: ShardingConfig = field(default_factory=ShardingConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    profile: ProfileConfig = field(default_factory=ProfileConfig)

    def check(self) -> None:
        require(bool(self.name.strip()), f"name is {self.name!r}; it names the run's folder below output")
        if self.wandb is not None and importlib.util.find_spec("wandb") is None:
            remedy = "pip install wandb, or leave wandb unset"
            raise ConfigError(f"wandb is {self.wandb!r}, but Weights & Biases is not installed: {remedy}")


@dataclass
class SFTData:
    train: Annotated[str, Demonstrations] = ""  # JSONL of examples: question, completion
    validation: str | None = None  # of the same form, for the loss
    question: str = "question"  # name of the column with the question, in both files
    completion: str = "completion"  # name of the column with the solution
    max_tokens: Positive = 10_000  # including the prompt and every duplicate; longer examples are dropped

    def named(self) -> dict[str, str]:
        return {"question": self.question, "completion": self.completion}


def lacking(row: Mapping[str, Any], columns: Mapping[str, str]) -> str | None:
    """What an SFT row does not have."""
    for name in columns.values():
        if not isinstance(row.get(name), str):
            has = f"the row has {', '.join(map(repr, row)) or 'none'}"
            return f"no text in column {name!r} ({has}); columns with other names: data.question=… data.completion=…"
    return None


@dataclass
class SFTBatch:
    examples: Positive = 8  # per step, over all ranks
    token_budget: Positive = 16_384  # of one micro-batch on one rank, or on a group of ranks that share it


@dataclass
class SFTRollout:
    workers: Width = 3  # of every block of the demonstrations; [1, 8]: as many as tasks are listed before it
    depth: Positive = 1  # levels of workers


@dataclass
class SFTValidation:
    every: NonNegative = 100  # steps, if data.validation names a file; 0: never


@dataclass
class SFTConfig(TrainingConfig):
    name: str = "sft"  # of the folder below `output`
    steps: Positive = 1800  # to train, from the start of the run
    # of what the loss is a mean: examples (each example's own token mean; the release) or tokens (long ones count more)
    loss_mean: Literal["examples", "tokens"] = "examples"
    threads: Positive | None = None  # CPU threads per rank; a tiny model is fastest with one. None: torch's choice
    data: SFTData = field(default_factory=SFTData)
    prompt: PromptConfig = field(default_factory=lambda: PromptConfig(open_think=False))
    rollout: SFTRollout = field(default_factory=SFTRollout)
    batch: SFTBatch = field(default_factory=SFTBatch)
    optimizer: OptimizerConfig = field(
        default_factory=lambda: OptimizerConfig(5e-6, weight_decay=0.0, warmup_steps=105)
    )
    validation: SFTValidation = field(default_factory=SFTValidation)
    checkpoint: CheckpointConfig = field(default_factory=lambda: CheckpointConfig(every=100))


@dataclass
class RLData(Columns):  # in both files
    train: str = ""  # JSONL or parquet of problems
    validation: str | None = None  # JSONL or parquet of problems
    preset: Literal[tuple(PRESETS)] | None = None  # type: ignore[valid-type]  # field names of a known set, e.g. deepscaler


@dataclass
class RLRollout(RolloutConfig):
    mode: Literal["synchronous", "partial", "asynchronous"] = "synchronous"  # the three ways of train/pool.py
    max_staleness: NonNegative | None = None  # versions a trained token may be old; None: 0 if synchronous, else 2
    gpus: NonNegative = 0  # asynchronous: servers started on this machine, a GPU each; without GPUs, on its processor

    @property
    def staleness(self) -> int:
        if self.max_staleness is not None:
            return self.max_staleness
        return 0 if self.mode == "synchronous" else 2


@dataclass
class RLBatch:
    prompts_rolled_out: Positive = 288  # per rollout batch; unless whole batches start, unfinished at once
    prompts: Positive = 96  # trained on per step, after filtering
    group_size: Annotated[int, Field(ge=2)] = 7  # responses per prompt; an advantage needs at least two
    optimizer_steps: Positive = 2  # mini-batches per step
    max_rollout_batches: Positive = 20  # at most this many rollout batches to find enough prompts
    # drop: whole batches start (the paper); keep: prompts start as they are needed, what is left serves the next step
    surplus: Literal["drop", "keep"] = "drop"
    token_budget: Positive = 32_768  # of one micro-batch on one rank, or on a group of ranks that share it
    share_prompts: bool = True  # responses to one prompt hold it once in a micro-batch

    def check(self) -> None:
        said, most = f"batch.prompts is {self.prompts}", self.prompts_rolled_out * self.max_rollout_batches
        divides = self.prompts % self.optimizer_steps == 0
        require(
            divides, f"{said}, which batch.optimizer_steps {self.optimizer_steps} does not divide; change one of them"
        )
        batches = f"{self.max_rollout_batches} batches of {self.prompts_rolled_out}"
        require(self.prompts <= most, f"{said}; {batches} can never give as many")


@dataclass
class RLValidation:
    every: NonNegative = 20  # steps, and once before the first; 0: never
    samples: Positive = 50  # per problem
    top_p: Share = 0.95  # of validation; training samples with rollout.top_p
    problems: Positive | None = None  # use only the first N of data.validation; None: all
    max_prompt_tokens: Positive | None = None  # None: as prompt.max_prompt_tokens


@dataclass
class RLConfig(TrainingConfig):
    name: str = "rl"  # of the folder below `output`
    steps: Positive = 200  # to train, from the start of the run
    filter: Annotated[str, known(FILTERS)] = "include_easy"  # remove_easy, none, or your own module:function
    # (R − mean) / std; mean: R − mean; or your own module:function
    advantage: Annotated[str, known(ADVANTAGES)] = "std"
    # whose advantage a worker's tokens have: the response's; worker: its own where the task judges it; or your own
    credit: Annotated[str, known(CREDITS)] = "response"
    keep_rollouts: Positive = 100  # newest steps whose rollouts are kept on disk
    data: RLData = field(default_factory=RLData)
    rollout: RLRollout = field(default_factory=RLRollout)
    engine: EngineConfig = field(default_factory=EngineConfig)
    grading: GradingConfig = field(default_factory=GradingConfig)
    format: FormatConfig = field(default_factory=FormatConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    batch: RLBatch = field(default_factory=RLBatch)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    validation: RLValidation = field(default_factory=RLValidation)

    @property
    def whole_batches(self) -> bool:
        """Whether prompts start in whole batches, whose surplus is dropped."""
        at_once = self.rollout.mode == "synchronous" or not self.rollout.staleness
        return self.batch.surplus == "drop" and at_once

    def check(self) -> None:
        super().check()
        stale = self.rollout.mode == "synchronous" and self.rollout.staleness and self.batch.surplus == "drop"
        kept = "nothing is kept for another step: set batch.surplus=keep, or leave it out"
        require(not stale, f"rollout.max_staleness is {self.rollout.max_staleness} and batch.surplus is drop; {kept}")
        require(bool(self.data.train or self.replay), "data.train is not set; name a JSONL or parquet file of problems")
        self._check_servers()
        heat, top_p = self.rollout.temperature, self.rollout.top_p
        require(heat > 0, f"rollout.temperature is {heat}; training divides logits by it: it must be positive")
        whole = "training takes log-probs of the whole distribution: it must be 1 (validation.top_p is apart)"
        require(top_p == 1, f"rollout.top_p is {top_p}; {whole}")
        cutoff, budget = self.reward.cutoff, self.rollout.budget
        below = f"which is not below rollout.budget {budget}; lower the cutoff"
        require(cutoff < budget, f"reward.cutoff is {cutoff}, {below}")
        masked, shared = self.objective.rollout_correction != RolloutCorrection(), self.sharding.context_parallel > 1
        apart = (
            "does not go with sharding.context_parallel: no rank has all tokens of a response; use rollout_ratio_cap"
        )
        require(not (masked and shared), f"objective.rollout_correction {apart}")
        plain = isinstance(self.rollout.workers, int) and self.rollout.depth == 1
        fixed = "knows a fixed number of workers on one level only: use format.rule=strict"
        require(plain or self.format.rule != "release", f"format.rule is release, which {fixed}")

    def _check_servers(self) -> None:
        url, gpus, mode = self.engine.url, self.rollout.gpus, self.rollout.mode
        if mode != "asynchronous":
            own = f"a {mode} step streams its weights into an engine of its own: leave it out"
            require(not url, f"engine.url is set; {own}, or set rollout.mode=asynchronous")
            require(not gpus, f"rollout.gpus is {gpus}; {own}, or set rollout.mode=asynchronous")
        else:
            said = f"rollout.gpus is {gpus} and engine.url is {'set' if url else 'not set'}"
            require(bool(url) != bool(gpus), f"{said}; asynchronous rollouts need servers: set one of the two")


def open_model(config: RLConfig | SFTConfig) -> tuple[Path, ModelConfig, PreTrainedTokenizerBase]:
    """Folder, configuration and tokenizer of the model a run starts from; rejected if they do not fit the settings."""
    folder = resolve_model(config.model.path)
    model, tokenizer = open_folder(folder, config.prompt, config.rollout.workers)
    if isinstance(config, RLConfig):
        check_context(config, model)
    return folder, model, tokenizer


# nats; of bf16 alone SmolLM2-135M has 0.026 (docs/troubleshooting.md)
MAX_KV_CACHE_GAP = 0.05


def check_kv_cache(engine: EngineConfig, checksums: Callable[[], dict[str, str]]) -> None:
    """Reject an fp8 KV cache unless engine and trainer agree on this model, whose files have these checksums, or the
    user accepts that nobody has looked.
    """
    if engine.kv_cache_dtype == "auto" or engine.kv_cache_gap == "accepted":
        return
    measure = "python -m dccot.lab.bench.gap MODEL PROBLEMS --kv-cache-dtype fp8 --out FILE"
    remedy = f"run `{measure}` and set engine.kv_cache_gap=FILE, or engine.kv_cache_gap=accepted"
    said = f"engine.kv_cache_dtype is fp8, and engine.kv_cache_gap {engine.kv_cache_gap!r}"
    require(engine.kv_cache_gap is not None, f"engine.kv_cache_dtype is fp8, its gap to the trainer unknown: {remedy}")
    try:
        found = json.loads(Path(str(engine.kv_cache_gap)).read_text())
        gap, measured, model = float(found["mean_abs_logprob"]), found["kv_cache_dtype"], found["model"]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ConfigError(f"{said} cannot be read ({type(error).__name__}: {error}); {remedy}") from None
    require(measured == "fp8", f"{said} was measured with {measured!r}; {remedy}")
    require(model == checksums(), f"{said} was measured on another model; {remedy}")
    most = f"at most {MAX_KV_CACHE_GAP} is allowed: use kv_cache_dtype=auto, or engine.kv_cache_gap=accepted"
    require(gap <= MAX_KV_CACHE_GAP, f"{said} says mean |Δ log p| {gap:.4f}; {most}")


def open_folder(folder: Path, prompt: PromptConfig, workers: Width) -> tuple[ModelConfig, PreTrainedTokenizerBase]:
    try:
        model, tokenizer = read_config(folder), open_tokenizer(folder)
        prompt.chat_format_for(tokenizer)
        TagIds.of(tokenizer, workers)
    except (ValueError, OSError) as error:
        raise ConfigError(f"model {folder}: {' '.join(str(error).split())}") from None
    if len(tokenizer) > model.vocab_size:
        sizes = f"has {len(tokenizer):,} tokens, the model embeds {model.vocab_size:,}"
        raise ConfigError(f"the tokenizer of {folder} {sizes}; use the tokenizer that belongs to the model")
    return model, tokenizer


def check_context(config: RLConfig, model: ModelConfig) -> None:
    """Reject a configuration whose longest response does not fit into the model's context."""
    context = config.engine.context or model.max_position
    prompts = {"prompt.max_prompt_tokens": config.prompt.max_prompt_tokens}
    if config.validation.every:
        prompts["validation.max_prompt_tokens"] = config.validation.max_prompt_tokens or 0
    raised = " or raise engine.context" if config.engine.context else ""
    limit = f"the model's context is {context:,}: lower one of them{raised}"
    for key, prompt in prompts.items():
        longest = prompt + config.rollout.budget
        require(longest <= context, f"{key} + rollout.budget is {longest:,}; {limit}")
