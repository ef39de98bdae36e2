"""Reinforcement learning, readable top to bottom as the algorithm.

    torchrun --nproc_per_node 8 -m dccot.train.rl configs/rl/stage1.yaml model.path=runs/sft      or   dccot rl configs/rl/stage1.yaml …

One step: draw problems → director and workers answer each `group_size` times → grade → reward → keep the groups that
pass the filter, rolling out whole batches until there are enough → advantages (collect.py) → old and reference
log-probs → `optimizer_steps` updates, one mini-batch each → weights into the engine → validate, log, checkpoint.

The reference policy is the model that the stage started from. The first mini-batch needs no old log-probs: its ratio is
1.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from dccot.core.runtime import Runtime
from dccot.model.sharding import build_model
from dccot.model.weights import full_parameters
from dccot.rollout.engine import Engine
from dccot.rollout.response import Rollout
from dccot.train.collect import Batch, Collector, Replay, save_rollouts
from dccot.train.flops import pair_cost
from dccot.train.forest import Forest, forests_of_rank, pack
from dccot.train.metrics import rollout_metrics, sample_text
from dccot.train.objectives import objective_loss
from dccot.train.rl_config import RLConfig, check_model
from dccot.train.run import launch
from dccot.train.token_metrics import TokenMetrics
from dccot.train.trainer import Trainer
from dccot.train.update import StepReport, TokenLoss, compute_logprobs


def train(config: RLConfig, engine: Engine | None = None) -> None:
    """Run the stage to the end. A given engine is used (its weights are replaced) and left running; otherwise the stage
    starts its own.
    """
    with Runtime.start(config.timeout_seconds) as runtime, ExitStack() as stack:
        rl = RL(config, runtime, stack, engine)
        rl.sync()
        for step in rl.steps():
            metrics = rl.validate(step) if step == 0 else {}
            with rl.profiled(step):
                batch = rl.collect(step)
                reports, policy = rl.train_on(batch)
                rl.sync()
            rl.save(step, batch, reports)
            if rl.due(step, config.validation.every):
                metrics |= rl.validate(step + 1)
            metrics |= rollout_metrics(batch.rolled_out) | policy | rl.data_metrics(batch)
            rl.log(step, metrics, {"sample": sample_text(batch.groups[0][0])} if step % 10 == 0 else None)
            rl.checkpoint(step, rl.state())


class RL(Trainer[RLConfig]):
    """One stage: what it is made of, and one method per arrow of the algorithm."""

    def __init__(self, config: RLConfig, runtime: Runtime, stack: ExitStack, engine: Engine | None = None):
        path, tokenizer = check_model(config)
        prompts = config.batch.prompts
        self.rollouts = (
            Replay(config.replay, prompts) if config.replay is not None else Collector(config, runtime, tokenizer)
        )
        super().__init__(config, runtime, path, self.rollouts.rows)
        self.reference: nn.Module | None = None
        if config.objective.kl_coefficient:
            frozen = replace(
                config.sharding, master_dtype=config.sharding.compute_dtype, activation_checkpointing=False
            )
            self.reference = build_model(path, frozen, device=runtime.device).requires_grad_(False).eval()
        self.rollouts.start(path, self.phases, stack, engine)
        state = self.resume(stack)
        self.rollouts.restore(state)

    def collect(self, step: int) -> Batch:
        """Graded groups with advantages, the same on every rank."""
        return self.rollouts.collect(step)

    def train_on(self, batch: Batch) -> tuple[list[StepReport], dict[str, float]]:
        """All updates of one step, and metrics of the policy."""
        rollouts = list(batch.mini_batches(self.config.batch.optimizer_steps))
        forests = [self.forests(mini_batch) for mini_batch in rollouts]
        with self.phases("old_logprob"):
            old = [None, *(self.logprobs(self.model, mini_batch) for mini_batch in forests[1:])]
        with self.phases("reference"):
            reference = [
                self.logprobs(self.reference, mini_batch) if self.reference else None for mini_batch in forests
            ]
        tokens = TokenMetrics(self.config.objective, self.runtime)
        reports = []
        for number, mini_batch in enumerate(forests):
            advantages = torch.tensor([rollout.advantage for rollout in rollouts[number]], device=self.runtime.device)
            token_loss = self.token_loss(advantages, old[number], reference[number], tokens)
            reports.append(self.update(mini_batch, token_loss, self.config.rollout.temperature))
        trained = [forest for mini_batch in forests for forest in mini_batch]
        return reports, tokens.reduce() | self.update_metrics(reports, trained)

    def forests(self, rollouts: Sequence[Rollout]) -> list[Forest]:
        """This rank's micro-batches."""
        responses = [rollout.response for rollout in rollouts]
        plan = pack(
            responses,
            self.config.batch.token_budget,
            self.runtime.ranks,
            share_prompts=self.config.batch.share_prompts,
            pair_cost=pair_cost(self.model.config),
            max_positions=self.model.config.max_position,
        )
        return forests_of_rank(responses, plan, self.runtime.rank)

    @torch.no_grad()
    def logprobs(self, model: nn.Module, forests: Sequence[Forest]) -> list[Tensor]:
        return [
            compute_logprobs(model, forest.to(self.runtime.device), self.config.rollout.temperature)[0]
            for forest in forests
        ]

    def token_loss(
        self, advantages: Tensor, old: list[Tensor] | None, reference: list[Tensor] | None, tokens: TokenMetrics
    ) -> TokenLoss:
        def loss(number: int, forest: Forest, logprob: Tensor, entropy: Tensor) -> Tensor:
            advantage = advantages[forest.response[forest.targets].long()]
            rollout_logprob = forest.logprob[forest.targets]
            old_logprob = old[number] if old is not None else logprob.detach()
            reference_logprob = reference[number] if reference is not None else None
            tokens.add(logprob, entropy, old_logprob, advantage, rollout_logprob, reference_logprob)
            return objective_loss(
                self.config.objective, logprob, old_logprob, advantage, rollout_logprob, reference_logprob
            )

        return loss

    def sync(self) -> None:
        """Stream the weights into the engine."""
        with self.phases("sync"):
            self.rollouts.load(full_parameters(self.model))

    def save(self, step: int, batch: Batch, reports: Sequence[StepReport]) -> None:
        """Keep the step's rollouts."""

        def into(folder: Path) -> None:
            save_rollouts(folder, step, batch, self.config.keep_rollouts)

        if self.runtime.is_main and self.config.replay is None:
            into(self.run / "rollouts")
        self.note_bad(step, reports, into)

    def validate(self, step: int) -> dict[str, float]:
        return self.rollouts.validate(step) if self.config.validation.every else {}

    def data_metrics(self, batch: Batch) -> dict[str, float]:
        trained = [rollout for group in batch.groups for rollout in group]
        sampled, seconds = (
            sum(rollout.response.sampled_tokens for rollout in batch.rolled_out),
            self.phases.seconds.get("rollout"),
        )
        return {
            "data/rollout_batches": float(batch.batches),
            "data/kept": float(batch.kept),
            "data/surplus": float(batch.kept - len(batch.groups)),
            "data/epoch": float(self.rollouts.epoch),
            "data/trained_reward": sum(r.reward or 0.0 for r in trained) / len(trained),
            "speed/rollout_tokens": sampled / seconds if seconds else 0.0,
        }

    def state(self) -> dict:
        return self.rollouts.state()


def main(argv: Sequence[str] | None = None) -> int:
    example = "dccot rl configs/rl/stage1.yaml model.path=runs/sft data.train=deepscaler.jsonl"
    return launch(RLConfig, train, argv, "Reinforcement learning, one stage.", example)


if __name__ == "__main__":
    sys.exit(main())
