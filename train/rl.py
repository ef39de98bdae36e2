"""Reinforcement learning, readable top to bottom as the algorithm.

    torchrun --nproc_per_node 8 -m dccot.train.rl configs/rl/stage1.yaml model.path=runs/sft      or   dccot rl …

One step: draw problems → director and workers answer each `group_size` times → grade → reward → filter the groups,
until enough are kept → advantages → pack into forests → old and reference log-probs → `optimizer_steps` updates, one
mini-batch each → weights into the engine → validate, log, checkpoint. Every rank rolls out, grades and rewards its
share; then all know every response's outline (verdict, reward, lengths), and each gets the tokens that it trains on.
What is drawn when, and what happens to responses that are not finished when the weights change, is the mode's affair
(`rollout.mode`, train/pool.py).

The reference policy is the model that the stage started from; a model with adapters (model.lora) is its own, with them
off. The first mini-batch needs no old log-probs: they are its own (train/objectives.py). `replay=FILE` trains on a
saved batch in every step, without an engine.
"""

from __future__ import annotations

import itertools
import logging
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dccot.core.command import Stopped, asked
from dccot.core.plugins import Plugin
from dccot.core.runtime import Runtime, on_rank_zero
from dccot.data.judge import Judge
from dccot.data.problems import Problem, ProblemStream
from dccot.data.prompts import Prompted
from dccot.data.rollouts import Grading, grade, rollout_of
from dccot.data.task import Task, task_of
from dccot.model.folder import model_checksums
from dccot.model.lora import adapters_off
from dccot.model.sharding import build_model
from dccot.model.weights import full_parameters
from dccot.rollout.director import RolloutConfig
from dccot.rollout.engine import Engine, TrainingEngine, open_training_engine
from dccot.rollout.generate import Request, Sampler, Watch
from dccot.rollout.response import Response, Rollout, Verdict
from dccot.train import launch
from dccot.train.batch import Batch, MiniBatch, credit_of
from dccot.train.config import RLConfig, check_kv_cache, open_model
from dccot.train.flops import pair_cost
from dccot.train.forest import Forest, pack
from dccot.train.metrics import TokenMetrics, rollout_metrics, staleness_metrics, validation_metrics
from dccot.train.objectives import ObjectiveConfig, in_mode, objective_loss, trained_on
from dccot.train.phases import Phases
from dccot.train.pool import Pool, Started, settle
from dccot.train.recorder import sample_text
from dccot.train.rewards import (
    FILTERS,
    Graded,
    Group,
    Outline,
    keeps,
    require_agreement,
    reward_of,
    set_advantages,
    worker_rewards_of,
)
from dccot.train.saver import RolloutSaver
from dccot.train.trainer import Trainer
from dccot.train.update import StepReport, compute_logprobs

log = logging.getLogger(__name__)
EQUAL_STEPS = 10  # in a row, until a warning that nothing is learnt
Question = tuple[Request, RolloutConfig, tuple[int | str, ...]]  # with settings and seed
TURN = 16  # tokens that every response may write until the ranks tell each other what is finished


def train(config: RLConfig, engine: TrainingEngine | None = None) -> None:
    """Run the stage to the end, with its own engine or a given one, whose weights are replaced and which stays up."""
    with Runtime.start(config.timeout_seconds) as runtime, ExitStack() as stack:
        rl = open_rl(config, runtime, stack, engine)
        rl.sync(rl.first_step)
        for step in rl.steps():
            metrics = rl.validate(step) if step == 0 else {}
            with rl.profiled(step):
                batch = rl.new_batch(step)
                while not batch.full:
                    batch.add(*rl.collect(batch))
                rl.report(batch)
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
                rl.sync(step + 1)
            rl.save_if_bad(step, batch, reports)
            rl.warn_of_equal_rewards(batch)
            if rl.due(step, config.validation.every):
                metrics |= rl.validate(step + 1)
            metrics |= rollout_metrics(batch.rolled_out) | policy | rl.data_metrics(batch)
            rl.log(step, metrics, rl.sample(batch) if step % 10 == 0 else None)
            rl.checkpoint(step, rl.state())


def turn(rl: RL) -> None:
    """A part of the way from problems to groups that can be trained on. The training loop takes turns until its batch
    is full; in the asynchronous mode a thread takes them all the time.
    """
    rl.draw()
    rl.roll_out()
    graded = rl.grade()
    rewarded = rl.reward(graded)
    complete = rl.pool.add(rewarded)
    groups = [each.group for each in complete]
    kept = rl.filter(groups)
    rl.advantage(kept)
    rl.agree(groups, kept)
    rl.pool.decide(complete, kept)


def open_rl(config: RLConfig, runtime: Runtime, stack: ExitStack, engine: TrainingEngine | None) -> RL:
    from dccot.train.asynchronous import AsynchronousRL  # which is an RL

    kind = AsynchronousRL if config.rollout.mode == "asynchronous" and config.replay is None else RL
    return kind(config, runtime, stack, engine)


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
            self.problems = {problem.id: problem for problem, _ in problems}
            drawn = config.batch.prompts_rolled_out
            self.stream = ProblemStream([problem for problem, _ in problems], config.seed, drawn)
            self.validation = prompted(validation_task(config), config.data.validation)[: config.validation.problems]
        super().__init__(config, runtime, path, self.stream.rows if self.stream else ())
        self.reference = self._frozen(path)
        self.engine: TrainingEngine | None = None
        self.own: dict[int, Graded] = {}  # whole responses that this rank holds, by Outline.place
        self.places, self.last = itertools.count(), Batch(0)
        self.pool = Pool(
            config.batch,
            config.rollout.staleness,
            whole=config.whole_batches,
            drained=config.rollout.mode == "synchronous",
        )
        if self.replayed is None:
            self.judge: Judge = stack.enter_context(self.task.open_judge())
            self.judge.beat = self.phases.beat
            self.engine = self.open_engine(path, stack, engine)
            if self.engine is not None:
                sampling = self.engine
                self.phases.pending = lambda: list(sampling.pending)
                self.sampler = Sampler(sampling, Heartbeat(self.phases))
                stack.callback(self.sampler.abort)
            thinking_counts = config.prompt.parallel
            self.grading = Grading(partial(grade, judge=self.judge, thinking_counts=thinking_counts, part=True))
            stack.callback(self.grading.close)
        self.saver = RolloutSaver(runtime)
        stack.callback(self.saver.close)
        self.equal_steps = 0
        state = self.resume(stack)
        if self.stream and "stream" in state:
            self.stream.restore(state["stream"])
            self.pool.drawn = state.get("drawn", 0)
            if again := state.get("unfinished"):
                log.info("%d groups that had started and were not trained on begin again", again)

    def _frozen(self, path: Path) -> nn.Module | None:
        """The policy that the KL is to: a copy of the first weights, or the model itself with its adapters off."""
        if not self.config.objective.kl_coefficient:
            return None
        if self.model.lora:
            return self.model
        dtype = self.config.sharding.compute_dtype
        frozen = replace(self.config.sharding, master_dtype=dtype, activation_checkpointing=False)
        return build_model(path, frozen, device=self.runtime.device).requires_grad_(False).eval()

    def open_engine(self, path: Path, stack: ExitStack, given: TrainingEngine | None) -> TrainingEngine | None:
        """In this process; None on a rank that samples nothing."""
        opened = open_training_engine(path, self.config.engine, given, logs=self.run.folder, sleeps=True)
        return stack.enter_context(opened)

    def new_batch(self, step: int) -> Batch:
        """An empty one to fill; in a replay, the saved one."""
        self.pool.begin(step)
        for graded in self.last.rolled_out:  # its responses are trained on, or not wanted
            if isinstance(graded, Outline) and graded.rank == self.runtime.rank:
                self.own.pop(graded.place, None)
        self.last = self.replayed or Batch(self.config.batch.prompts, own=self.own)
        return self.last

    def collect(self, batch: Batch) -> tuple[list[Group], list[Group]]:
        """The next groups in the order drawn, and those of them that the filter kept; both may be empty."""
        self.limit(batch)
        turn(self)
        return self.settled(batch, *self.pool.take())

    def settled(self, batch: Batch, groups: list[Group], kept: list[Group]) -> tuple[list[Group], list[Group]]:
        """The groups belong to this step; whoever holds a response as a whole notes that too."""
        for graded in (graded for group in groups for graded in group):
            whole = batch.whole(graded, self.runtime.rank)
            settle([graded] if whole is None else [graded, whole], self.phases.step)
        return groups, kept

    def limit(self, batch: Batch) -> None:
        """An error if the batch has had its share of problems."""
        config = self.config.batch
        if batch.considered >= config.prompts_rolled_out * config.max_rollout_batches:
            raise RuntimeError(
                f"step {self.phases.step}: {self.config.filter} kept only {batch.kept} of {config.prompts} prompts "
                f"after {config.max_rollout_batches} batches of {config.prompts_rolled_out}; accuracy "
                f"{rollout_metrics(batch.rolled_out)['reward/correct']:.1%}: choose easier or harder problems, "
                "another filter, or raise batch.max_rollout_batches"
            )

    def draw(self) -> None:
        """Start the next problems, as many as the mode allows."""
        assert self.stream is not None and self.engine is not None
        if not self.sampler:
            self.engine.forget_prefixes()  # the cache must not depend on earlier work
        pool, seen = self.pool, set()
        with pool.lock:
            for _ in range(pool.room()):
                state, problem = self.stream.state(), self.stream.next()
                if not (pool.whole and problem.id in seen):  # at the end of an epoch
                    group = pool.start((problem, self.prompts[problem.id]), state)
                    batch = (self.config.seed, pool.step, pool.batches)
                    self._begin(group, seed=batch if pool.whole else (self.config.seed, "group", group.number))
                seen.add(problem.id)
            pool.batches += bool(seen)

    def _begin(self, group: Started, seed: tuple[int | str, ...]) -> None:
        """This replica's share of a group's responses: they go round, as prompts are short and responses long."""
        assert self.engine is not None
        (problem, prompt), size = group.problem, self.config.batch.group_size
        for sample in range(size):
            if (group.number * size + sample) % self.engine.replicas == self.engine.replica:
                request = Request(problem.id, sample, prompt, self.config.prompt.parallel, group.number)
                self.sampler.start(request, self.config.rollout, seed=seed)

    def roll_out(self) -> None:
        """Sample for a turn: until all is finished where whole batches start, else a few tokens, after which the ranks
        tell each other what is finished. Until a step has changed a weight, the run can stop immediately: every rank
        comes here, and all stop if one was told to.
        """
        alone = self.config.engine.tensor_parallel == 1  # the ranks of one replica must take the same steps
        with self.phases("rollout"):
            for turn in itertools.count():
                if not self.sampler or (turn == TURN and not self.pool.whole) or (alone and asked.stop):
                    break
                self._sample()
            if self.runtime.sum(torch.tensor([asked.stop], dtype=torch.int32)).item():
                raise Stopped

    def _sample(self) -> list[tuple[Request, Response]]:
        """One step of the engine; training's responses are graded in the background, others returned."""
        others = []
        for request, response in self.sampler.step():
            if request.group is None:
                others.append((request, response))
            elif self.leads:
                problem = self.problems[request.problem]
                rollout = self._rollout(problem, request.sample, response)
                self.grading.add(request.group, rollout)
        return others

    def grade(self) -> list[tuple[int, Rollout]]:
        """This rank's rollouts that are graded by now, with the number of their group."""
        with self.phases("grade"):
            return self.runtime.guarded(lambda: self.grading.due(all=not self.sampler))

    def reward(self, rollouts: Sequence[tuple[int, Rollout]]) -> list[tuple[int, Outline]]:
        """Outlines of all ranks' responses, with the number of their group. Each response is rewarded once, by the rank
        that holds it.
        """
        return self.share(lambda: [(number, self._rewarded(rollout)) for number, rollout in rollouts])

    def _rewarded(self, rollout: Rollout) -> Outline:
        self.judge.beat()
        reward = reward_of(rollout, self.config.reward, self.config.rollout.budget, self.task.reward)
        workers, place = worker_rewards_of(rollout, self.task.worker_rewards), next(self.places)
        self.own[place] = Graded(**vars(rollout), reward=reward, worker_rewards=workers)
        return Outline.of(self.own[place], self.runtime.rank, place)

    def share(self, work: Callable[[], list[tuple[int, Outline]]]) -> list[tuple[int, Outline]]:
        """Every rank's result; one that fails ends all of them."""
        with self.phases("grade"):
            return [outline for part in self.runtime.together(work) for outline in part]

    def _outlines(self, mine: Sequence[Graded]) -> list[Outline]:
        """All ranks' responses, in an order that no speed decides."""
        outlines = [Outline.of(graded, self.runtime.rank, number) for number, graded in enumerate(mine)]
        everybody = [outline for part in self.runtime.gather(outlines) for outline in part]
        return sorted(everybody, key=lambda outline: (outline.problem, outline.sample))

    def filter(self, groups: Sequence[Group]) -> list[Group]:
        """The groups worth training on. Your own filter may read texts and tokens: rank 0 gets them, and decides."""
        if self.config.filter in FILTERS or not groups:
            return [group for group in groups if keeps(group, self.config.filter)]
        held = Batch(0, own=self.own)
        mine = [[held.whole(graded, self.runtime.rank) for graded in group] for group in groups]
        parts = self.runtime.exchange([mine, *[None] * (self.runtime.ranks - 1)])
        together = lambda *copies: next(copy for copy in copies if copy is not None)
        whole = [list(map(together, *copies)) for copies in zip(*parts)] if self.runtime.is_main else []
        decided = on_rank_zero(lambda: [keeps(group, self.config.filter) for group in whole])
        return [group for group, keep in zip(groups, decided, strict=True) if keep]

    def advantage(self, groups: Sequence[Group]) -> None:
        for group in groups:
            set_advantages(group, self.config.credit, self.config.advantage)

    def agree(self, groups: Sequence[Group], kept: Sequence[Group]) -> None:
        """End the run if ranks have decided differently: each would train on a batch of its own."""
        if not groups:
            return
        config = self.config
        names = {"filter": config.filter, "advantage": config.advantage, "credit": config.credit}
        names["reward"] = self._reward_name()
        require_agreement(groups, kept, self.runtime, names)

    def report(self, batch: Batch) -> None:
        """Let the judge look at a batch as a whole: no wrong answer, or nothing else, may be the judge's fault."""
        if self.runtime.is_main and self.replayed is None:
            verdicts = [Verdict(graded.verdict) for graded in batch.rolled_out if graded.verdict]
            Plugin("judge", self.judge.report)(verdicts, on=f"step {self.phases.step}")

    def release_engine(self) -> None:
        """Give the engine's memory to training, until the next sync."""
        if self.engine is not None:
            self.engine.sleep()

    def pack(self, batch: Batch) -> list[MiniBatch]:
        """This rank's forests and all responses' advantages, for each update. Outlines are enough to plan; then each
        rank gets the responses that it trains on.
        """
        config, device, made = self.config.batch, self.runtime.device, []
        cost, longest = pair_cost(self.model.config), self.model.config.max_position
        limits: dict[str, Any] = {"token_budget": config.token_budget, "pair_cost": cost, "max_positions": longest}
        for graded in batch.mini_batches(config.optimizer_steps):
            known = [each.response for each in graded]
            outlined = pack(known, ranks=self.groups, share_prompts=config.share_prompts, **limits)
            packing = batch.deliver(graded, outlined, self.runtime, self.group.ranks)
            forests = self.forests_of(packing)
            credit = credit_of(packing, forests, self.group.data, graded)
            advantages = torch.tensor([each.advantage for each in graded], device=device)
            made.append(MiniBatch(forests, advantages, credit and [each.to(device) for each in credit]))
        return made

    @property
    def objective(self) -> ObjectiveConfig:
        """As `rollout.mode` wants it, by whether tokens can be stale: without staleness every mode is synchronous."""
        rollout = self.config.rollout
        stale = "partial" if rollout.mode == "synchronous" else rollout.mode
        return in_mode(self.config.objective, stale if rollout.staleness else "synchronous")

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
            tokens.add(logprob, entropy, *given, forest.lag(step) if self.config.rollout.staleness else None)
            return objective_loss(config, logprob, *given)

        return self.optimizer_step(mini_batch.forests, loss, self.config.rollout.temperature)

    def sync(self, version: int) -> None:
        """Stream the weights, those after `version` steps, into the engine. Unfinished responses continue with them."""
        with self.phases("sync"):
            if self.engine is not None:
                self.engine.wake()
                self.engine.load(full_parameters(self.model, self.engine.dtype), None if self.pool.whole else version)
            self.pool.version = version

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
        if self.replayed is not None or not self.validation or not self.config.validation.every:
            return {}
        with self.phases("validate"):
            config = replace(self.config.rollout, top_p=self.config.validation.top_p)
            pairs = list(itertools.product(self.validation, range(self.config.validation.samples)))
            mine = pairs[self.engine.replica :: self.engine.replicas] if self.engine else []
            parallel, seed = self.config.prompt.parallel, (self.config.seed, step, "validation")
            asked = [Request(problem.id, sample, prompt, parallel) for (problem, prompt), sample in mine]
            found = self.answers([(request, config, seed) for request in asked])
            known = {problem.id: problem for problem, _ in self.validation}
            rollouts = [self._rollout(known[each.problem], each.sample, response) for each, response in found]
            counted = rollouts if self.leads else []
            self.runtime.guarded(lambda: grade(counted, self.judge, thinking_counts=parallel))
            return validation_metrics(self._outlines([Graded(**vars(rollout)) for rollout in counted]))

    def answers(self, questions: Sequence[Question]) -> list[tuple[Request, Response]]:
        """Responses to these, while unfinished ones of training continue."""
        assert self.engine is not None
        if not self.sampler:
            self.engine.forget_prefixes()
        for request, config, seed in questions:
            self.sampler.start(request, config, seed=seed)
        found: list[tuple[Request, Response]] = []
        while len(found) < len(questions):
            found += self._sample()
        return found

    def data_metrics(self, batch: Batch) -> dict[str, float]:
        sampled = sum(rollout.response.sampled_tokens for rollout in batch.rolled_out)
        trained = [graded for group in batch.groups for graded in group]
        stale: dict[str, float] = {}
        if not self.pool.whole:
            stale = staleness_metrics(batch.groups, self.phases.step, self.pool.max_staleness) | self.pool.metrics()
        return stale | {
            "data/rollout_batches": batch.considered / self.config.batch.prompts_rolled_out,
            "data/kept": float(batch.kept),
            "data/surplus": float(batch.kept - len(batch.groups)),
            "data/epoch": float(self.stream.epoch if self.stream else 0),
            "data/trained_reward": sum(graded.reward or 0.0 for graded in trained) / len(trained),
            "speed/rollout_tokens": sampled / seconds if (seconds := self.sampling_seconds()) else 0.0,
            **self._waits(),
        }

    def sampling_seconds(self) -> float:
        """Of the step, until now, in which the engine sampled."""
        return self.phases.seconds.get("rollout", 0.0)

    def _waits(self) -> dict[str, float]:
        """The share of the step, until now, that the engine did not sample, and that the model waited for responses."""
        sampled, elapsed = self.sampling_seconds(), time.perf_counter() - self._start
        waited = sampled + self.phases.seconds.get("grade", 0.0)
        return {"time/engines_wait": 1 - sampled / elapsed, "time/trainer_waits": waited / elapsed}

    def state(self) -> dict:
        """What a checkpoint keeps besides weights, optimizer and counters."""
        with self.pool.lock:
            return self.pool.resumes_at(self.stream.state()) if self.stream else {}

    @property
    def leads(self) -> bool:
        """The ranks of one replica hold the same responses: one of them counts."""
        return self.runtime.rank % self.config.engine.tensor_parallel == 0

    def _rollout(self, problem: Problem, sample: int, response: Response) -> Rollout:
        assert self.engine is not None
        config = self.config
        return rollout_of(problem, sample, response, self.engine, config.prompt, config.rollout, config.format.rule)

    def _reward_name(self) -> str:
        return f"{self.config.task}.reward" if self.task.reward else self.config.reward.kind


class Heartbeat(Watch):
    """Tells the watchdog that the engine makes progress."""

    def __init__(self, phases: Phases):
        self.phases = phases

    def stepped(self, engine: Engine) -> None:
        self.phases.beat()


def main(argv: Sequence[str] | None = None) -> int:
    return launch.rl(argv, train)


if __name__ == "__main__":
    sys.exit(main())
