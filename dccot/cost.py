"""`dccot plan RECIPE --gpus 8`: hours, GPU-hours, disk and API tokens of a recipe. A model, never a measurement.

    dccot plan configs/paper.yaml --gpus 8                           assumptions below, printed with the result
    dccot plan configs/paper.yaml --gpus 64 --assume utilisation=0.3
    dccot plan configs/paper.yaml --from runs/paper/stage1           calibrated with a finished stage's metrics.jsonl

Rollout is an event model: every engine decodes its share of the responses, each a chain of director segments with
workers in between; sequences join and leave as segments end, and one decoding step with n sequences and k cached tokens
takes

    host_step + max(weights / bandwidth, n · 2 P / FLOPs) + n · host_sequence + k · KV bytes / bandwidth

Groups pass a filter with the chance that a solve rate drawn from a beta distribution gives; whole batches are rolled
out until enough pass. Training is the FLOPs of its passes (update with recomputation, reference, old log-probs) at the
assumed utilisation. `--from` takes lengths, solve rates and the ratio of measured to modelled seconds from a run.
"""

from __future__ import annotations

import dataclasses
import heapq
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
from pydantic import Field

from dccot import plan as one_run
from dccot.core.command import Parser, positive, print_table, run_cleanly
from dccot.core.config import ConfigError, PositiveFloat, Share, find_config, load_config, read_yaml, require
from dccot.core.progress import waiting
from dccot.core.run import Run
from dccot.data.sft_set import RewriteConfig, SequentialConfig
from dccot.eval.results import BENCHMARKS
from dccot.memory import parameters, trained_parameters
from dccot.model.config import ModelConfig, block_parameters
from dccot.plan import GPUS, Gpu
from dccot.recipe import StagePlan
from dccot.rollout.tags import Width, most_workers
from dccot.stages import EvalStage, load_recipe
from dccot.train.config import RLConfig, SFTConfig

PROBLEMS = {"aime24": 30, "amc23": 40, "hmmt25": 30, "math500": 500, "minerva": 272, "olympiadbench": 674}


@dataclass(frozen=True)
class Assumptions:
    director: float = 1500  # mean tokens of a director segment
    worker: float = 700  # mean tokens of a worker
    rounds: float = 1.25  # mean number of times a response spawns
    sequential: float = 5500  # mean tokens of a sequential response
    spread: float = 0.4  # of the logarithm of lengths: once per problem, once per response
    prompt: float = 200
    solved: Annotated[float, Field(gt=0, lt=1)] = 0.6  # mean share of right answers
    alike: PositiveFloat = 1.2  # concentration of the beta distribution of solve rates: small: mostly always or never
    bandwidth_share: Share = 0.75
    decode_utilisation: Share = 0.6
    utilisation: Share = 0.35  # of training
    host_step: float = 1.5e-3  # seconds of every decoding step, and of each sequence in it
    host_sequence: float = 10e-6
    other: float = 20.0  # seconds of a step besides rollout and training: grading, weights, saving
    rewriting_prompt: float = 9000  # API tokens of one attempt, in and out
    rewriting_answer: float = 6000
    rollout_factor: float = 1.0  # measured over modelled seconds (--from)
    training_factor: float = 1.0


@dataclass
class Response:
    prompt: int
    segments: list[list[int]]  # a director's segment, a round of workers, a director's segment, …

    @property
    def sampled(self) -> int:
        return sum(map(sum, self.segments))

    @property
    def forest(self) -> int:
        """Tokens of its tree: every worker but the first twice."""
        return self.prompt + self.sampled + sum(sum(part[1:]) for part in self.segments)


def draw_response(rng: np.random.Generator, a: Assumptions, scale: float, budget: int, workers: Width) -> Response:
    """`workers` 0: sequential; a range: any number of it. Cut where the longest path reaches the budget. Workers of
    workers are not modelled: they are part of their worker's length.
    """
    prompt = max(1, int(a.prompt * rng.lognormal(-0.08, 0.4)))
    scale *= rng.lognormal(-(a.spread**2) / 2, a.spread)
    length = lambda mean: max(1, round(mean * scale * rng.lognormal(-0.045, 0.3)))
    if not workers:
        return Response(prompt, [[min(budget, length(a.sequential))]])
    rounds = int(a.rounds) + int(rng.random() < a.rounds % 1)
    segments: list[list[int]] = []
    for number in range(2 * rounds + 1):
        count = workers if isinstance(workers, int) else int(rng.integers(workers[0], workers[1] + 1))
        part = [length(a.worker) for _ in range(count)] if number % 2 else [length(a.director)]
        part = [min(budget, size) for size in part]
        budget -= max(part)
        segments.append(part)
        if budget <= 0:
            break
    return Response(prompt, segments)


@dataclass(frozen=True)
class Hardware:
    """One engine (`tensor_parallel` GPUs) and what training gets."""

    model: ModelConfig
    gpu: Gpu
    gpus: int
    tensor_parallel: int
    slots: int  # sequences at once
    cache: int  # tokens in the KV cache

    @property
    def parameters(self) -> int:
        return parameters(self.model)

    @property
    def engines(self) -> int:
        return max(1, self.gpus // self.tensor_parallel)


def decode_seconds(responses: Sequence[Response], hardware: Hardware, a: Assumptions) -> float:
    """Seconds until one engine has finished all of these responses, started at once."""
    bandwidth = hardware.gpu.bandwidth * 1e9 * a.bandwidth_share * hardware.tensor_parallel
    flops = hardware.gpu.tflops * 1e12 * a.decode_utilisation * hardware.tensor_parallel
    model = hardware.model
    weights = 2 * hardware.parameters / bandwidth
    gemm, kv = 2 * hardware.parameters / flops, 4 * model.layers * model.kv_heads * model.head_dim / bandwidth
    waiting = [
        (number, 0, size, response.prompt) for number, response in enumerate(responses) for size in response.segments[0]
    ]
    waiting.reverse()
    left = [len(response.segments[0]) for response in responses]
    running: list[tuple[int, int, int]] = []  # (decoding step at which it ends, response, segment), a heap
    now, step, cached, depth = 0.0, 0, 0.0, [response.prompt for response in responses]
    while waiting or running:
        while waiting and len(running) < hardware.slots and cached + waiting[-1][3] < hardware.cache:
            number, segment, size, behind = waiting.pop()
            heapq.heappush(running, (step + size, number, segment))
            cached += behind
        count, steps = len(running), running[0][0] - step
        one = a.host_step + max(weights, count * gemm) + count * a.host_sequence + (cached + count * steps / 2) * kv
        now, step, cached = now + steps * one, step + steps, cached + count * steps
        while running and running[0][0] == step:
            _, number, segment = heapq.heappop(running)
            left[number] -= 1
            if left[number]:
                continue
            response = responses[number]
            part = response.segments[segment]
            cached -= len(part) * depth[number] + sum(part)
            depth[number] += sum(part)
            if segment + 1 < len(response.segments):
                following = response.segments[segment + 1]
                left[number] = len(following)
                waiting += [(number, segment + 1, size, depth[number]) for size in following]
    return now * a.rollout_factor


def rollout_seconds(responses: Sequence[Response], hardware: Hardware, a: Assumptions) -> float:
    """The slowest engine's; responses are dealt to engines in turn."""
    shares = [responses[first :: hardware.engines] for first in range(hardware.engines)]
    return max(decode_seconds(share, hardware, a) for share in shares if share)


def training_seconds(
    responses: Sequence[Response], hardware: Hardware, a: Assumptions, passes: tuple[float, float]
) -> float:
    """`passes`: how often the blocks and the LM head are computed, in forward passes."""
    model = hardware.model
    tokens, rows = sum(each.forest for each in responses), sum(each.sampled for each in responses)
    pairs = sum(each.forest**2 / 2 for each in responses) * 0.6  # a tree's workers do not see each other
    blocks = model.layers * (2 * block_parameters(model) * tokens + 4 * model.heads * model.head_dim * pairs)
    head = 2 * model.hidden_size * model.vocab_size * rows
    flops = passes[0] * blocks + passes[1] * head
    return flops / (hardware.gpus * hardware.gpu.tflops * 1e12 * a.utilisation) * a.training_factor


@dataclass
class Step:
    """One RL step, in seconds."""

    rollout: float
    training: float
    batches: float

    @property
    def seconds(self) -> float:
        return self.rollout + self.training


def rl_step(config: RLConfig, hardware: Hardware, a: Assumptions, seed: int = 0, samples: int = 3) -> Step:
    """The mean of a few simulated steps, without what is neither rollout nor training."""
    rng, steps = np.random.default_rng(seed), []
    batch, workers = config.batch, config.rollout.workers if config.prompt.parallel else 0
    for _ in range(samples):
        kept: list[Response] = []
        rollout, batches, passed = 0.0, 0, 0
        while passed < batch.prompts and batches < batch.max_rollout_batches:
            everything: list[Response] = []
            for _ in range(batch.prompts_rolled_out):
                rate = rng.beta(a.solved * a.alike, (1 - a.solved) * a.alike)
                scale = rng.lognormal(-(a.spread**2) / 2, a.spread)
                group = [draw_response(rng, a, scale, config.rollout.budget, workers) for _ in range(batch.group_size)]
                right = int(rng.binomial(batch.group_size, rate))
                everything += group
                if right and (config.filter == "include_easy" or right < batch.group_size):
                    passed += 1
                    kept += group if passed <= batch.prompts else []
            rollout += rollout_seconds(everything, hardware, a)
            batches += 1
        recomputed = config.sharding.activation_checkpointing
        others = bool(config.objective.kl_coefficient) + (config.objective.old != "engine") * (
            1 - 1 / batch.optimizer_steps
        )
        backward = 1 if config.model.lora.rank else 2  # frozen weights get no gradient
        passes = (1 + backward + recomputed + others, 2 + backward + others)
        steps.append(Step(rollout, training_seconds(kept, hardware, a, passes), batches))
    mean = lambda name: float(np.mean([getattr(step, name) for step in steps]))
    return Step(mean("rollout"), mean("training"), mean("batches"))


@dataclass
class Cost:
    stage: str
    seconds: float
    disk: float = 0.0  # bytes
    api: tuple[float, float] = (0.0, 0.0)  # tokens in and out
    remark: str = ""


def hardware_of(model: ModelConfig, config: RLConfig, gpus: int, gpu: Gpu) -> Hardware:
    tokens = one_run.make_plan(model, config, gpus, gpu).kv_cache_tokens
    return Hardware(model, gpu, gpus, config.engine.tensor_parallel, config.engine.max_sequences, tokens)


def stage_cost(plan: StagePlan, hardware: Hardware, a: Assumptions) -> Cost:
    """What one stage of a recipe costs; stages that neither sample nor train cost nothing here."""
    config = plan.load()
    if isinstance(config, RLConfig):
        own = dataclasses.replace(hardware, slots=config.engine.max_sequences)
        step = rl_step(config, own, a)
        checks = config.steps // config.validation.every if config.validation.every else 0
        answers = checks * (config.validation.problems or 30) * config.validation.samples
        each = step.rollout / max(1, step.batches) / (config.batch.prompts_rolled_out * config.batch.group_size)
        seconds = config.steps * (step.seconds + a.other) + answers * each
        disk = one_run.run_bytes(trained_parameters(hardware.model, config.model.lora), config)
        remark = f"{step.rollout:.0f} s rollout, {step.training:.0f} s training per step; {step.batches:.1f} batches"
        return Cost(plan.name, seconds, disk, remark=remark)
    if isinstance(config, SFTConfig):
        rng = np.random.default_rng(0)
        batch = [draw_response(rng, a, 1.0, 10_000, 3) for _ in range(config.batch.examples)]
        one = training_seconds(batch, hardware, a, (3, 3) if config.model.lora.rank else (4, 4))
        disk = one_run.run_bytes(trained_parameters(hardware.model, config.model.lora), config)
        return Cost(plan.name, config.steps * one, disk)
    if isinstance(config, SequentialConfig):
        asked = (config.first or 15_000) * (1 + (1 - a.solved) * (config.attempts - 1) * 0.7)  # hard ones again
        return Cost(plan.name, _sampling(asked, hardware, a, 0, 24_000))
    if isinstance(config, EvalStage):
        most = config.max_problems or sum(PROBLEMS.values())
        counts = {name: min(most, PROBLEMS.get(Path(name).stem, 100)) for name in config.benchmarks}
        answers = sum(count * (config.n or _paper_n(name)) for name, count in counts.items())
        workers = config.workers if config.method == "parallel" else 0
        seconds = _sampling(answers, hardware, a, workers, config.budget)
        return Cost(plan.name, seconds, one_run.rollout_bytes(answers, config.budget, compressed=False))
    if isinstance(config, RewriteConfig):
        count = (config.first or 4000) * 1.3  # attempts per solution
        return Cost(
            plan.name, 0.0, api=(count * a.rewriting_prompt, count * a.rewriting_answer), remark="through the API"
        )
    return Cost(plan.name, 0.0)


def _paper_n(name: str) -> int:
    return BENCHMARKS[name].samples if name in BENCHMARKS else 16


def _sampling(answers: float, hardware: Hardware, a: Assumptions, workers: Width, budget: int) -> float:
    """Seconds to sample so many responses, a few engine-fulls simulated and scaled up."""
    rng, count = np.random.default_rng(0), min(int(answers), 4 * hardware.engines * hardware.slots)
    drawn = [draw_response(rng, a, rng.lognormal(-0.08, 0.4), budget, workers) for _ in range(count)]
    return rollout_seconds(drawn, hardware, a) * answers / max(1, count)


def calibrated(run: Path, config: RLConfig, hardware: Hardware, a: Assumptions) -> Assumptions:
    """Lengths, solve rates and factors from a finished stage's metrics; the first step, which warms up, is left out."""
    rows = Run(run).rows()[1:]
    if not rows:
        raise ConfigError(f"{run}/metrics.jsonl has fewer than two steps; calibrate with a run that has more")
    mean = lambda name: float(np.mean([row.get(name, 0.0) for row in rows]))
    rounds, worker = mean("parallel/rounds"), mean("parallel/worker_length")
    workers = mean("parallel/width") if "parallel/width" in rows[0] else most_workers(config.rollout.workers)
    director = (mean("length/total_tokens") - rounds * workers * worker) / (rounds + 1)
    solved = min(0.99, max(0.01, mean("reward/correct")))
    kept = mean("data/kept") / (mean("data/rollout_batches") * config.batch.prompts_rolled_out)
    a = dataclasses.replace(
        a,
        director=director,
        worker=worker or a.worker,
        rounds=rounds,
        sequential=mean("length/total_tokens"),
        solved=solved,
    )
    a = dataclasses.replace(a, alike=_concentration(kept, solved, config), rollout_factor=1.0, training_factor=1.0)
    modelled = rl_step(config, hardware, a)
    trained = mean("time/update") + mean("time/reference") + mean("time/old_logprob")
    other = mean("time/step") - mean("time/rollout") - trained
    factor = mean("time/rollout") / (modelled.rollout / modelled.batches * mean("data/rollout_batches"))
    return dataclasses.replace(a, rollout_factor=factor, training_factor=trained / modelled.training, other=other)


def _concentration(kept: float, solved: float, config: RLConfig) -> float:
    """The concentration of solve rates with which the filter keeps this share of groups."""
    rng, size = np.random.default_rng(0), config.batch.group_size

    def share(alike: float) -> float:
        right = rng.binomial(size, rng.beta(solved * alike, (1 - solved) * alike, 4000))
        return float(np.mean((right > 0) if config.filter == "include_easy" else (right > 0) & (right < size)))

    return float(min(np.geomspace(0.2, 50, 40), key=lambda alike: abs(share(alike) - kept)))


def show(costs: Sequence[Cost], gpus: int, gpu: str, a: Assumptions) -> None:
    print(f"{gpus} × {gpu}, by a model with these assumptions; not a measurement (--assume name=value changes one):")
    print("  " + ", ".join(f"{name} {value:.3g}" for name, value in dataclasses.asdict(a).items()))
    rows = [[cost.stage, f"{cost.seconds / 3600:.1f}", f"{cost.disk / 1e9:.0f}", cost.remark] for cost in costs]
    print_table("", ["stage", "hours", "disk, GB", "of which"], rows)
    hours, disk = (sum(getattr(cost, name) for cost in costs) for name in ("seconds", "disk"))
    tokens = [sum(cost.api[way] for cost in costs) / 1e6 for way in (0, 1)]
    print(f"in all: {hours / 3600:.0f} hours, {hours / 3600 * gpus:,.0f} GPU-hours, {disk / 1e9:,.0f} GB of disk")
    print(f"API: {tokens[0]:.0f}M tokens in, {tokens[1]:.0f}M out")


def costs_of(
    recipe: str, overrides: Sequence[str], model: ModelConfig, gpus: int, gpu: Gpu, a: Assumptions, run: Path | None
) -> tuple[list[Cost], Assumptions]:
    whole, plans = load_recipe(recipe, overrides)
    if whole.model is None:  # its shape is `model`; its weights are not read
        _, plans = load_recipe(recipe, ["model=MODEL", *overrides])
    # a recipe that only evaluates is planned as if its engine had a trainer next to it
    configs = [config for plan in plans if isinstance(config := plan.load(), RLConfig)] or [RLConfig()]
    if run is not None:
        require(Run(run).config_file.is_file(), f"{run} has no config.yaml; --from names a finished RL stage's folder")
        own = load_config(RLConfig, None, settings=Run(run).settings().items())
        a = calibrated(run, own, hardware_of(model, own, gpus, gpu), a)
    hardware = hardware_of(model, configs[-1], gpus, gpu)
    return [stage_cost(plan, hardware, a) for plan in plans], a


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    if not any(word.endswith(".yaml") or Run(word).recipe_file.is_file() for word in words[:1]):
        return one_run.main(words)
    parser = Parser("Hours, disk and API tokens of a recipe, by a model.", "dccot plan configs/paper.yaml --gpus 8")
    parser.add_argument("recipe")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="as for `dccot pipeline`")
    parser.add_argument(
        "--model", default="1.5B", help="its shape: a checkpoint, a run, 1.5B, 7B or 32B (default: 1.5B)"
    )
    parser.add_argument("--gpus", type=positive, default=8)
    parser.add_argument("--gpu", choices=GPUS, default="H100")
    parser.add_argument("--from", dest="run", type=Path, help="a finished RL stage whose metrics calibrate the model")
    parser.add_argument("--assume", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--json", action="store_true")
    arguments = parser.read(words)

    def work() -> None:
        single = "holds no stages; a single one of RL comes after its model: `dccot plan 1.5B configs/rl/stage1.yaml`"
        require("stages" in read_yaml(find_config(arguments.recipe)), f"{arguments.recipe} {single}")
        a = load_config(Assumptions, None, arguments.assume)
        shape = one_run.read_shape(arguments.model)
        chosen = (arguments.gpus, GPUS[arguments.gpu])
        with waiting(f"simulating {arguments.recipe}"):
            costs, a = costs_of(arguments.recipe, arguments.overrides, shape, *chosen, a, arguments.run)
        if arguments.json:
            print(
                json.dumps(
                    {"assumptions": dataclasses.asdict(a), "stages": list(map(dataclasses.asdict, costs))}, indent=1
                )
            )
        else:
            show(costs, arguments.gpus, arguments.gpu, a)

    return run_cleanly(work)


if __name__ == "__main__":
    sys.exit(main())
