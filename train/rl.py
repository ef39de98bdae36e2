"""Reinforcement learning, readable top to bottom as the algorithm.

    torchrun --nproc_per_node 8 -m dccot.train.rl configs/rl/stage1.yaml model.path=runs/sft      or   dccot rl …

One step: draw problems → director and workers answer each `group_size` times → grade → reward → filter the groups,
until enough are kept → advantages → pack into forests → old and reference log-probs → `optimizer_steps` updates, one
mini-batch each → weights into the engine → validate, log, checkpoint. Every rank rolls out, grades and rewards its
share; then all know every response's outline (verdict, reward, lengths), and each gets the tokens that it trains on.

The reference policy is the model that the stage started from; a model with adapters (model.lora) is its own, with them
off. The first mini-batch needs no old log-probs: they are its own (train/objectives.py). `replay=FILE` trains on a
saved batch in every step, without an engine.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from dccot.core.command import Stopped, asked, launch
from dccot.core.config import lookup
from dccot.core.plugins import Plugin
from dccot.core.runtime import Runtime, on_rank_zero
from dccot.data.judge import Judge
from dccot.data.problems import ProblemStream
from dccot.data.prompts import Prompted
from dccot.data.rollouts import grade, missing_pairs, roll_out
from dccot.data.task import Task, task_of
from dccot.model.folder import model_checksums
from dccot.model.lora import adapters_off
from dccot.model.sharding import build_model
from dccot.model.weights import full_parameters
from dccot.rollout.director import RolloutConfig
from dccot.rollout.engine import Engine, TrainingEngine, open_training_engine
from dccot.rollout.generate import Watch
from dccot.rollout.response import Response, Rollout
from dccot.train.batch import Batch, MiniBatch
from dccot.train.config import RLConfig, check_kv_cache, open_model
from dccot.train.flops import pair_cost
from dccot.train.forest import Forest, Packing, layout, pack
from dccot.train.metrics import TokenMetrics, rollout_metrics, validation_metrics
from dccot.train.objectives import ObjectiveConfig, in_mode, objective_loss, trained_on
from dccot.train.phases import Phases
from dccot.train.recorder import sample_text
from dccot.train.rewards import (
    CREDITS,
    FILTERS,
    Graded,
    Group,
    Outline,
    keeps,
    require_agreement,
    reward_of,
    worker_rewards_of,
)
from dccot.train.saver import RolloutSaver
from dccot.train.trainer import Trainer
from dccot.train.update import StepReport, compute_logprobs

log = logging.getLogger(__name__)
EQUAL_STEPS = 10  # in a row, until a warning that nothing is learnt


def train(config: RLConfig, engine: TrainingEngine | None = None) -> None:
    """Run the stage to the end, with its own engine or a given one, whose weights are replaced and which stays up."""
    with Runtime.start(config.timeout_seconds) as runtime, ExitStack() as stack:
        rl = RL(config, runtime, stack, engine)
        rl.sync()
        for step in rl.steps():
            metrics = rl.validate(step) if step == 0 else {}
            with rl.profiled(step):
                batch = rl.new_batch()
                while not batch.full:
                    problems = rl.draw(batch)
                    rollouts = rl.roll_out(problems, seed=(config.seed, step, batch.rollout_batches))
                    graded = rl.grade(rollouts)
                    groups = rl.reward(graded, problems, batch)
                    kept = rl.filter(groups, batch)
                    rl.advantage(kept)
                    rl.agree(groups, kept)
                    batch.add(groups, kept)
                rl.release_engine()
                mini_batches = rl.pack(batch)
                rl.prepare(forest for mini_batch in reversed(mini_batches) for forest in mini_batch.forests)
                rl.save(step, batch)
                rl.old_logprobs(mini_batches)
                rl.reference_logprobs(mini_batches)
                tokens = TokenMetrics(rl.objective, runtime)
                reports = [rl.update(mini_batch, tokens) for mini_batch in mini_batches]
                trained = [forest for mini_batch in mini_batches for forest in mini_batch.forests]
                policy = tokens.reduce() | rl.update_metrics(reports, trained)
                rl.sync()
            rl.save_if_bad(step, batch, reports)
            rl.warn_of_equal_rewards(batch)
            if rl.due(step, config.validation.every):
                metrics |= rl.validate(step + 1)
            metrics |= rollout_metrics(batch.rolled_out) | policy | rl.data_metrics(batch)
            rl.log(step, metrics, rl.sample(batch) if step % 10 == 0 else None)
            rl.checkpoint(step, rl.state())


def validation_task(config: RLConfig) -> Task:
    """The same task with validation's own limit on prompts."""
    longest = config.validation.max_prompt_tokens or config.prompt.max_prompt_tokens
    return task_of(replace(config, prompt=replace(config.prompt, max_prompt_tokens=longest)))


class RL(Trainer[RLConfig]):
    """One stage: what it is made of, and one method per arrow of the algorithm.

    Files are read first and engine and judge started last, so that bad data is rejected before weights are loaded.
    """

    def __init__(self, config: RLConfig, runtime: Runtime, stack: ExitStack, engine: TrainingEngine | None = None):
        path, _, tokenizer = open_model(config)
        check_kv_cache(config.engine, lambda: model_checksums(path, runtime))
        self.task = task_of(config)

        def prompted(task: Task, file: str | None) -> list[Prompted]:
            report = log.warning if runtime.is_main else lambda message: None
            if not file:
                return []
            return task.prompts(task.problems(file, preset=config.data.preset, report=report), tokenizer, report=report)

        self.replayed = Batch.replay(config.replay, config.batch.prompts) if config.replay is not None else None
        self.stream: ProblemStream | None = None
        if self.replayed is None:
            problems = prompted(self.task, config.data.train)
            self.prompts = {problem.id: ids for problem, ids in problems}
            drawn = config.batch.prompts_rolled_out
            self.stream = ProblemStream([problem for problem, _ in problems], config.seed, drawn)
            self.validation = prompted(validation_task(config), config.data.validation)[: config.validation.problems]
        super().__init__(config, runtime, path, self.stream.rows if self.stream else ())
        self.reference: nn.Module | None = None
        if config.objective.kl_coefficient and self.model.lora:
            self.reference = self.model  # with its adapters off
        elif config.objective.kl_coefficient:
            dtype = config.sharding.compute_dtype
            frozen = replace(config.sharding, master_dtype=dtype, activation_checkpointing=False)
            self.reference = build_model(path, frozen, device=runtime.device).requires_grad_(False).eval()
        self.engine: TrainingEngine | None = None
        if self.replayed is None:
            self.judge: Judge = stack.enter_context(self.task.open_judge())
            self.judge.beat = self.phases.beat
            started = open_training_engine(path, config.engine, engine, logs=self.run.folder, sleeps=True)
            self.engine = sampler = stack.enter_context(started)
            self.phases.pending = lambda: list(sampler.pending)
        self.saver = RolloutSaver(runtime)
        stack.callback(self.saver.close)
        self.equal_steps = 0
        state = self.resume(stack)
        if self.stream and "stream" in state:
            self.stream.restore(state["stream"])

    def new_batch(self) -> Batch:
        """An empty one to fill; in a replay, the saved one."""
        return self.replayed or Batch(self.config.batch.prompts)

    def draw(self, batch: Batch) -> list[Prompted]:
        """The next problems, each once; an error if the batch has had its share."""
        config = self.config.batch
        if batch.rollout_batches == config.max_rollout_batches:
            raise RuntimeError(
                f"step {self.phases.step}: {self.config.filter} kept only {batch.kept} of {config.prompts} prompts "
                f"after {batch.rollout_batches} batches of {config.prompts_rolled_out}; accuracy "
                f"{rollout_metrics(batch.rolled_out)['reward/correct']:.1%}: choose easier or harder problems, "
                "another filter, or raise batch.max_rollout_batches"
            )
        assert self.stream is not None
        drawn = {problem.id: problem for problem in self.stream.next_batch()}
        return [(problem, self.prompts[problem.id]) for problem in drawn.values()]

    def roll_out(self, problems: Sequence[Prompted], seed: tuple[int | str, ...]) -> list[Rollout]:
        """This replica's share of the responses. Until a step has changed a weight, the run can stop immediately: every
        rank comes here, and all stop if one was told to.
        """
        alone = self.config.engine.tensor_parallel == 1  # the ranks of one replica must take the same steps
        samples = range(self.config.batch.group_size)
        with self.phases("rollout"):
            try:
                found = self._sample(problems, samples, self.config.rollout, seed, Heartbeat(self.phases, stops=alone))
            except CutShort:
                found = []
            if self.runtime.sum(torch.tensor([asked.stop], dtype=torch.int32)).item():
                raise Stopped
        return found

    def grade(self, rollouts: list[Rollout]) -> list[Rollout]:
        """This rank's rollouts, with their verdicts."""
        with self.phases("grade"):
            return self._judged(rollouts)

    def reward(self, rollouts: Sequence[Rollout], problems: Sequence[Prompted], batch: Batch) -> list[Group]:
        """Outlines of all ranks' responses in groups, in the order in which the problems were drawn. Each response is
        rewarded once, by the rank that holds it.
        """
        first = len(batch.own)

        def rewarded() -> list[Graded]:
            for rollout in rollouts:
                rollout.step = self.phases.step
                self.phases.beat()
                reward = reward_of(rollout, self.config.reward, self.config.rollout.budget, self.task.reward)
                workers = worker_rewards_of(rollout, self.task.worker_rewards)
                batch.own.append(Graded(**vars(rollout), reward=reward, worker_rewards=workers))
            return []

        self.runtime.together(rewarded)  # a reward that fails on one rank ends all of them
        groups: dict[str, list[Graded]] = {problem.id: [] for problem, _ in problems}
        with self.phases("grade"):
            for outline in self._outlines(batch.own[first:], first):
                groups[outline.problem].append(outline)
        return list(groups.values())

    def _outlines(self, mine: Sequence[Graded], first: int = 0) -> list[Outline]:
        """All ranks' responses, in an order that no speed decides."""
        outlines = [Outline.of(graded, self.runtime.rank, first + number) for number, graded in enumerate(mine)]
        everybody = [outline for part in self.runtime.gather(outlines) for outline in part]
        return sorted(everybody, key=lambda outline: (outline.problem, outline.sample))

    def filter(self, groups: Sequence[Group], batch: Batch) -> list[Group]:
        """The groups worth training on. Your own filter may read texts and tokens: rank 0 gets them, and decides."""
        if self.config.filter in FILTERS:
            return [group for group in groups if keeps(group, self.config.filter)]
        mine = [[batch.whole(graded, self.runtime.rank) for graded in group] for group in groups]
        parts = self.runtime.exchange([mine, *[None] * (self.runtime.ranks - 1)])
        together = lambda *copies: next(copy for copy in copies if copy is not None)
        whole = [list(map(together, *copies)) for copies in zip(*parts)] if self.runtime.is_main else []
        decided = on_rank_zero(lambda: [keeps(group, self.config.filter) for group in whole])
        return [group for group, keep in zip(groups, decided, strict=True) if keep]

    def advantage(self, groups: Sequence[Group]) -> None:
        for group in groups:
            credit = Plugin("credit", lookup(CREDITS, self.config.credit, "credit"))
            credit(group, self.config.advantage, on=f"the group of problem {group[0].problem!r}")

    def agree(self, groups: Sequence[Group], kept: Sequence[Group]) -> None:
        """End the run if ranks have decided differently: each would train on a batch of its own."""
        names = {"reward": self._reward_name(), "filter": self.config.filter, "advantage": self.config.advantage}
        require_agreement(groups, kept, self.runtime, names)

    def release_engine(self) -> None:
        """Give the engine's memory to training, until the next sync."""
        if self.engine is not None:
            self.engine.sleep()

    def pack(self, batch: Batch) -> list[MiniBatch]:
        """This rank's forests and all responses' advantages, for each update. Outlines are enough to plan; then each
        rank gets the responses that it trains on.
        """
        config, ranks, me = self.config.batch, self.runtime.ranks, self.runtime.rank
        cost, positions = pair_cost(self.model.config), self.model.config.max_position
        budget, share = config.token_budget, config.share_prompts
        updates = list(batch.mini_batches(config.optimizer_steps))
        responses = [[each.response for each in graded] for graded in updates]
        groups = self.groups
        plan = lambda known: pack(known, budget, groups, share_prompts=share, pair_cost=cost, max_positions=positions)
        packings = [plan(known) for known in responses]
        if isinstance(updates[0][0], Outline):
            parcels: list[dict[tuple[int, int], Response]] = [{} for _ in range(ranks)]
            for number, (graded, packing) in enumerate(zip(updates, packings)):
                for rank, parcel in enumerate(parcels):
                    needed = packing.needs(rank // self.group.ranks)
                    held = ((index, batch.whole(graded[index], me)) for index in needed)
                    parcel |= {(number, index): whole.response for index, whole in held if whole is not None}
            mine, parcels[me] = parcels[me], {}
            for parcel in [mine, *self.runtime.exchange(parcels)]:
                for (number, index), response in parcel.items():
                    responses[number][index] = response  # where its packing looks
        tensor = lambda graded: torch.tensor([each.advantage for each in graded], device=self.runtime.device)
        made = []
        for graded, packing in zip(updates, packings):
            forests = self.forests_of(packing)
            made.append(MiniBatch(forests, tensor(graded), self._credit(packing, forests, graded)))
        return made

    @property
    def objective(self) -> ObjectiveConfig:
        return in_mode(self.config.objective, "synchronous")

    def _credit(self, packing: Packing, forests: Sequence[Forest], graded: Sequence[Graded]) -> list[Tensor] | None:
        """The advantages of each forest's tokens, 0 where none was sampled; None: all have their response's."""
        if not any(each.worker_advantages for each in graded):
            return None
        found = []
        for forest, micro_batch in zip(forests, packing.ranks[self.group.data]):
            values: list[float] = []
            for each in (graded[index] for group in micro_batch for index in group):
                advantages = each.segment_advantages()
                for segment, as_written, _, _ in layout(each.response):
                    values += [advantages[id(segment)]] * len(segment.sampled) if as_written else []
            found.append(torch.zeros(len(forest)).masked_scatter(forest.sampled, torch.tensor(values)))
        return [advantages.to(self.runtime.device) for advantages in found]

    def old_logprobs(self, mini_batches: Sequence[MiniBatch]) -> None:
        with self.phases("old_logprob"):
            for mini_batch in mini_batches[1:] if self.objective.old == "recomputed" else ():
                mini_batch.proximal = self._logprobs(self.model, mini_batch.forests)

    def reference_logprobs(self, mini_batches: Sequence[MiniBatch]) -> None:
        with self.phases("reference"), adapters_off(self.model):
            for mini_batch in mini_batches:
                mini_batch.reference = self._logprobs(self.reference, mini_batch.forests) if self.reference else None

    @torch.no_grad()
    def _logprobs(self, model: nn.Module, forests: Sequence[Forest]) -> list[Tensor]:
        device, temperature = self.runtime.device, self.config.rollout.temperature
        return [compute_logprobs(model, forest.to(device), temperature)[0] for forest in forests]

    def update(self, mini_batch: MiniBatch, tokens: TokenMetrics) -> StepReport:
        """One optimizer step."""
        config, step = self.objective, self.phases.step

        def loss(number: int, forest: Forest, logprob: Tensor, entropy: Tensor) -> Tensor:
            response = forest.response[forest.targets].long()
            advantage = mini_batch.advantages[response]
            if mini_batch.credit is not None:
                advantage = mini_batch.credit[number][forest.targets]
            sampled = forest.logprob[forest.targets]
            proximal = mini_batch.proximal[number] if mini_batch.proximal is not None else logprob.detach()
            reference = mini_batch.reference[number] if mini_batch.reference is not None else None
            correction, responses = config.rollout_correction, len(mini_batch.advantages)
            trained = trained_on(correction, proximal - sampled, response, responses)
            given = proximal, advantage, sampled, reference, trained
            tokens.add(logprob, entropy, *given, forest.lag(step))
            return objective_loss(config, logprob, *given)

        return self.optimizer_step(mini_batch.forests, loss, self.config.rollout.temperature)

    def sync(self) -> None:
        """Stream the weights into the engine."""
        with self.phases("sync"):
            if self.engine is not None:
                self.engine.wake()
                self.engine.load(full_parameters(self.model, self.engine.dtype))

    def save(self, step: int, batch: Batch, folder: Path | None = None) -> None:
        """Keep the step's rollouts, in the run's rollouts/ or elsewhere; written while the model trains."""
        if self.replayed is None:
            self.saver.save(batch, folder or self.run.rollouts, step, self.config.keep_rollouts)

    def save_if_bad(self, step: int, batch: Batch, reports: Sequence[StepReport]) -> None:
        self.note_bad(step, reports, lambda folder: self.save(step, batch, folder))

    def flush(self) -> None:
        self.saver.wait()
        super().flush()

    def sample(self, batch: Batch) -> dict[str, str]:
        """The first response that the step trained on, for TensorBoard."""
        whole = batch.whole(batch.groups[0][0], self.runtime.rank)
        found = [part for part in self.runtime.gather([sample_text(whole)] if whole else []) if part]
        return {"sample": found[0][0]}

    def warn_of_equal_rewards(self, batch: Batch) -> None:
        """Once every EQUAL_STEPS steps in which all responses had the same reward, or none."""
        rewards = {graded.reward for graded in batch.rolled_out}
        self.equal_steps = self.equal_steps + 1 if len(rewards) == 1 else 0
        if self.equal_steps and self.equal_steps % EQUAL_STEPS == 0 and self.runtime.is_main:
            words = "in each of the last %d steps all rewards were equal (%s): nothing is learnt; check %s"
            log.warning(words, self.equal_steps, *rewards, f"the verdicts and {self._reward_name()}")

    def validate(self, step: int) -> dict[str, float]:
        """Metrics of the policy on held-out problems."""
        if self.engine is None or not self.validation or not self.config.validation.every:
            return {}
        with self.phases("validate"):
            config = replace(self.config.rollout, top_p=self.config.validation.top_p)
            samples, seed = range(self.config.validation.samples), (self.config.seed, step, "validation")
            mine = self._sample(self.validation, samples, config, seed, Heartbeat(self.phases))
            return validation_metrics(self._outlines([Graded(**vars(rollout)) for rollout in self._judged(mine)]))

    def data_metrics(self, batch: Batch) -> dict[str, float]:
        sampled = sum(rollout.response.sampled_tokens for rollout in batch.rolled_out)
        seconds = self.phases.seconds.get("rollout")
        trained = [graded for group in batch.groups for graded in group]
        return {
            "data/rollout_batches": float(batch.rollout_batches),
            "data/kept": float(batch.kept),
            "data/surplus": float(batch.kept - len(batch.groups)),
            "data/epoch": float(self.stream.epoch if self.stream else 0),
            "data/trained_reward": sum(graded.reward or 0.0 for graded in trained) / len(trained),
            "speed/rollout_tokens": sampled / seconds if seconds else 0.0,
        }

    def state(self) -> dict:
        """What a checkpoint keeps besides weights, optimizer and counters."""
        return {"stream": self.stream.state()} if self.stream else {}

    def _sample(
        self, problems: Sequence[Prompted], samples: range, config: RolloutConfig, seed: tuple, watch: Watch
    ) -> list[Rollout]:
        """This replica's share of the responses."""
        assert self.engine is not None
        mine = problems[self.engine.replica :: self.engine.replicas]
        self.engine.forget_prefixes()  # the cache must not depend on earlier work
        pairs = missing_pairs(mine, samples)
        prompt, rule = self.config.prompt, self.config.format.rule
        return list(roll_out(self.engine, mine, pairs, prompt, config, seed=seed, watch=watch, rule=rule))

    def _reward_name(self) -> str:
        return f"{self.config.task}.reward" if self.task.reward else self.config.reward.kind

    def _judged(self, mine: list[Rollout]) -> list[Rollout]:
        """Graded where they were made."""
        if self.runtime.rank % self.config.engine.tensor_parallel:
            mine = []  # the ranks of one replica hold the same responses

        def graded() -> list[Rollout]:
            grade(mine, self.judge, thinking_counts=self.config.prompt.parallel)
            return []

        self.runtime.together(graded)  # a judge that fails on one rank ends all of them
        return mine


class CutShort(Exception):
    """A rollout that is not worth finishing: its step will be restarted."""


class Heartbeat(Watch):
    """Tells the watchdog that the engine makes progress; `stops`: ends the rollout if this rank was told to stop."""

    def __init__(self, phases: Phases, stops: bool = False):
        self.phases, self.stops = phases, stops

    def stepped(self, engine: Engine) -> None:
        self.phases.beat()
        if self.stops and asked.stop:
            raise CutShort


def main(argv: Sequence[str] | None = None) -> int:
    example = "dccot rl configs/rl/stage1.yaml model.path=runs/sft data.train=deepscaler.jsonl"
    return launch(RLConfig, train, argv, "Reinforcement learning, one stage.", example)


if __name__ == "__main__":
    sys.exit(main())
