"""Checks of `dccot gpu-check`: engine, trainer, and both together, on the given model or a tiny one."""

from __future__ import annotations

import functools
import json
import random
import shutil
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from dccot.core.config import load_config
from dccot.core.files import read_jsonl
from dccot.core.run import Run
from dccot.core.runtime import Runtime, on_rank_zero
from dccot.lab.bench import gap
from dccot.lab.gpu_check.worker import Context
from dccot.lab.synced import verify
from dccot.lab.worlds import bigram
from dccot.lab.worlds.exact_task import make_task
from dccot.model.config import read_config
from dccot.model.sharding import ShardingConfig, build_model
from dccot.model.transformer import Transformer
from dccot.model.weights import full_parameters, load_weights
from dccot.rollout.director import RolloutConfig
from dccot.rollout.engine import EngineConfig
from dccot.rollout.generate import Request, generate
from dccot.rollout.response import Response, Segment
from dccot.rollout.thread import Thread
from dccot.train.config import RLConfig
from dccot.train.forest import pack
from dccot.train.rewards import Graded
from dccot.train.rl import train
from dccot.train.sft import negative_logprob
from dccot.train.update import OptimizerConfig, accumulate, apply_gradients, compute_logprobs, make_optimizer, update

GREEDY_TOKENS = 48
# how much further from fp32 than the bf16 trainer the engine may be, also where the trainer happens to be exact
FACTOR, SLACK, LARGEST_SLACK = 2.0, 1e-3, 0.05


def model_folder(context: Context) -> Path:
    """The given model, or a tiny one that follows the protocol."""
    if context.model:
        return Path(context.model)
    folder = context.folder / "tiny"
    on_rank_zero(lambda: (folder / "tokenizer.json").is_file() or bigram.save(folder, "spelled", context=1024))
    return folder


@functools.cache
def engine_of(context: Context, dtype: str, sleeps: bool = False) -> Any:
    """Built as training builds it: after the process group."""
    from dccot.rollout.vllm_engine import VllmEngine

    Runtime.start()
    return VllmEngine(model_folder(context), engine_settings(context, dtype), sleeps=sleeps)


def engine_settings(context: Context, dtype: Any, **others: Any) -> EngineConfig:
    cache = 1.0 if context.cuda else 0.125
    return EngineConfig(dtype=dtype, context=1024, max_sequences=64, gpu_memory=0.5, kv_cache_gb=cache, **others)


def prompts(tokenizer: Any) -> list[list[int]]:
    return [tokenizer.encode(text, add_special_tokens=False) for text in ("abc", "what is love", "why not " * 9)]


def rollouts(engine: Any, samples: int = 1, **settings: Any) -> list[Any]:
    """Responses to every prompt; sequential and greedy by default."""
    config = RolloutConfig(**{"budget": GREEDY_TOKENS, "temperature": 0.0} | settings)
    parallel = config.temperature > 0
    asked = enumerate(prompts(engine.tokenizer))
    requests = [Request(f"p{i}", s, ids, parallel=parallel) for i, ids in asked for s in range(samples)]
    done = {(each.problem, each.sample): response for each, response in generate(engine, requests, config, seed=(0,))}
    return [done[request.problem, request.sample] for request in requests]


def greedy(engine: Any) -> list[list[int]]:
    return [response.trunk[-1].sampled for response in rollouts(engine)]


def greedy_of_transformers(model: Any, tokenizer: Any) -> list[list[int]]:
    end, found = tokenizer.eos_token_id, []
    for ids in prompts(tokenizer):
        given = torch.tensor([ids], device=model.device)
        options = {"max_new_tokens": GREEDY_TOKENS, "do_sample": False, "eos_token_id": end, "pad_token_id": end}
        out = model.generate(given, attention_mask=torch.ones_like(given), **options)
        found.append(out[0, len(ids) :].tolist())
    return found


def transformers_model(context: Context) -> Any:
    from transformers import AutoModelForCausalLM

    model: nn.Module = AutoModelForCausalLM.from_pretrained(model_folder(context), dtype=torch.float32)
    return model.to(context.device)


def same_ids(have: list[list[int]], expected: list[list[int]], what: str) -> str:
    for number, (mine, theirs) in enumerate(zip(have, expected, strict=True)):
        first = next((i for i, pair in enumerate(zip(mine, theirs)) if pair[0] != pair[1]), min(len(mine), len(theirs)))
        differ = f"{mine[first : first + 5]}, {what} {theirs[first : first + 5]}"
        assert mine == theirs, f"prompt {number} differs from token {first} on: {differ}"
    return f"{sum(map(len, have))} ids of {len(have)} prompts, {what}"


def engine_start(context: Context) -> str:
    began = time.perf_counter()
    engine = engine_of(context, "bfloat16")
    took = time.perf_counter() - began
    responses = rollouts(engine, samples=16, budget=200, temperature=0.6)
    assert any(response.forks for response in responses) or context.model, "no response spawned workers"
    core = engine._engine.engine_core.engine_core
    runner, scheduler = core.model_executor.driver_worker.worker.model_runner, core.scheduler
    blocks = core.vllm_config.cache_config.num_gpu_blocks
    tokens = f"{sum(r.sampled_tokens for r in responses):,} tokens of {len(responses)} responses sampled"
    kind = f"{type(runner).__module__}.{type(runner).__name__}, {type(scheduler).__name__}"
    return f"up in {took:.0f} s, {tokens}\n{kind}, {blocks:,} KV-cache blocks"


def greedy_equality(context: Context) -> str:
    engine = engine_of(context, "float32")
    expected = greedy_of_transformers(transformers_model(context), engine.tokenizer)
    return same_ids(greedy(engine), expected, "the same as transformers")


def in_place_sync(context: Context) -> str:
    engine, model = engine_of(context, "float32"), transformers_model(context)
    original = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    before, noise = greedy(engine), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * parameter.std() * torch.randn(parameter.shape, generator=noise).to(parameter))
    try:
        engine.load(model.named_parameters())
        verify(engine, model.named_parameters())
        after = greedy(engine)
        assert after != before, "other weights gave the same ids"
        expected = greedy_of_transformers(model, engine.tokenizer)
        return same_ids(after, expected, "the same as transformers with the new weights")
    finally:
        engine.load(original.items())


def trainer(context: Context, compute_dtype: str) -> tuple[Any, Any]:
    """The model as training holds it: sharded, fp32 masters."""
    runtime, sharding = Runtime.start(), ShardingConfig(compute_dtype=compute_dtype)
    return build_model(model_folder(context), sharding, device=runtime.device), runtime


def sleep_and_wake(context: Context) -> str:
    """With a learning rate of 0: the weights must come back unchanged."""
    engine = engine_of(context, "bfloat16", sleeps=True)
    expected, responses = greedy(engine), rollouts(engine, samples=4, budget=100, temperature=0.6)
    awake = torch.cuda.mem_get_info()[0]
    engine.sleep()
    asleep = torch.cuda.mem_get_info()[0]
    model, runtime = trainer(context, "bfloat16")
    config = OptimizerConfig(learning_rate=0.0, weight_decay=0.0)
    optimizer, forests = make_optimizer(model, config), pack(responses, 4096).forests()
    report = update(model, optimizer, forests, negative_logprob, config, 0, 0.6, runtime)
    assert report.applied and report.grad_norm > 0, report
    engine.wake()
    engine.load(full_parameters(model))
    verify(engine, full_parameters(model))
    released = f"{(asleep - awake) / 1e9:.2f} GB"
    assert asleep > awake + 5e8, f"asleep, the engine released {released}; its KV cache alone has 1 GiB"
    return f"{released} released; " + same_ids(greedy(engine), expected, "the same as before")


def logprob_gap(context: Context) -> str:
    """A bf16 engine against fp32 at temperature 0.6: what bf16 costs is what it costs the trainer on this machine."""
    responses = rollouts(engine_of(context, "bfloat16"), samples=16, budget=200, temperature=0.6)
    return within_rounding(responses, model_folder(context))


def within_rounding(responses: list[Response], model: Path) -> str:
    """The log-probs that an engine sampled with, at most FACTOR times as far from fp32 as the bf16 trainer's."""
    forests = pack(responses, gap.TOKENS_AT_ONCE).forests()
    sampled = torch.cat([forest.logprob[forest.targets] for forest in forests])
    exact, rounded = (gap.logprobs(model, dtype, forests, 0.6) for dtype in (torch.float32, torch.bfloat16))
    theirs, ours = (sampled - exact).abs(), (rounded - exact).abs()
    limits = FACTOR * ours.mean() + SLACK, 2 * FACTOR * ours.max() + LARGEST_SLACK
    of_engine = f"engine {theirs.mean():.2g}, largest {theirs.max():.2g}"
    of_trainer = f"bf16 trainer {ours.mean():.2g}, {ours.max():.2g}"
    found = f"|Δ log p| to fp32 of {len(ours):,} tokens: {of_engine}; {of_trainer}"
    assert theirs.mean() <= limits[0], f"{found}; the mean may be {limits[0]:.2g}"
    assert theirs.max() <= limits[1], f"{found}; the largest may be {limits[1]:.2g}"
    return found


def training_step(context: Context) -> str:
    """FSDP on this device and these ranks, in fp32, against the plain model on the CPU: loss, gradients, AdamW."""
    model, runtime = trainer(context, "float32")
    plain = Transformer(read_config(model_folder(context)))
    load_weights(plain, model_folder(context), torch.float32)
    responses = made_up_responses(plain.config.vocab_size)
    config = OptimizerConfig(learning_rate=0.01, max_grad_norm=1e6)
    mine = pack(responses, 200, runtime.ranks).forests(runtime.rank)
    whole = pack(responses, 10**6).forests()
    loss, tokens = accumulate(model, mine, negative_logprob, 0.6, runtime)
    expected = torch.cat([-compute_logprobs(plain, forest, 0.6)[0] for forest in whole]).mean()
    expected.backward()
    exact_loss = expected.item()
    assert abs(loss - exact_loss) < 1e-4 * exact_loss, f"loss {loss}, on the CPU {exact_loss}"
    worst = 0.0
    for (name, sharded), parameter in zip(model.named_parameters(), plain.parameters(), strict=True):
        gradient = sharded.grad.full_tensor().cpu()
        assert parameter.grad is not None
        error = float((gradient - parameter.grad).norm() / parameter.grad.norm().clamp(min=1e-6))
        assert error < 1e-3, f"gradient of {name} is off by {error:.1e}"
        worst, parameter.grad = max(worst, error), gradient
    reference = torch.optim.AdamW(plain.parameters(), lr=0.01, betas=(0.9, 0.999), weight_decay=config.weight_decay)
    norm, applied = apply_gradients(model, make_optimizer(model, config), loss, 0.01, config.max_grad_norm)
    exact = float(nn.utils.get_total_norm([p.grad for p in plain.parameters() if p.grad is not None]))
    assert applied and abs(norm - exact) < 1e-4 * norm, f"gradient norm {norm}, on the CPU {exact}"
    reference.step()
    for (name, sharded), parameter in zip(model.named_parameters(), plain.parameters(), strict=True):
        whole_parameter, differs = sharded.full_tensor().cpu(), f"{name} after AdamW differs"
        torch.testing.assert_close(whole_parameter, parameter, rtol=1e-4, atol=1e-5, msg=differs)
    where = f"{runtime.ranks} rank(s) over {dist.get_backend()}"
    return f"{where}: loss {loss:.4f}, {tokens} tokens; gradients within {worst:.1e} of the CPU's"


training_step_of_two = training_step


def made_up_responses(vocab: int) -> list[Any]:
    rng = random.Random(0)
    ids = lambda count: [rng.randrange(vocab) for _ in range(count)]
    workers = lambda n: [Thread([Segment(ids(2), ids(5 + 3 * n + i))]) for i in range(3)]
    director = lambda n: [Segment([], ids(8 + n)), Segment(ids(2), ids(6))]
    return [Response(director(n), [workers(n)], prompt=ids(9)) for n in range(6)]


def tensor_parallel(context: Context) -> str:
    """Two ranks, one engine between them: weights from the sharded trainer, the same ids as transformers on both."""
    from dccot.rollout.vllm_engine import VllmEngine

    model, runtime = trainer(context, "float32")
    engine = VllmEngine(model_folder(context), engine_settings(context, "float32", tensor_parallel=2))
    engine.load(full_parameters(model))
    ids = greedy(engine)
    engine.shutdown()
    assert len({json.dumps(each) for each in runtime.gather(ids)}) == 1, "two ranks of one engine have different ids"
    expected = greedy_of_transformers(transformers_model(context), engine.tokenizer)
    return same_ids(ids, expected, "the same as transformers")


def mini_rl(context: Context) -> str:
    """Two steps of RL on a task with a known start: rollouts, grading, updates, sync, and on a GPU sleep and wake."""
    out = context.folder / "rl"
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    dtype = "bfloat16" if context.cuda else "float32"
    settings = [f"engine.dtype={dtype}", f"sharding.compute_dtype={dtype}", "engine.gpu_memory=0.5", "profile.steps=[]"]
    train(load_config(RLConfig, make_task(out), ["name=run", "steps=2", *settings]))
    first, second = Run(out / "run").rows()
    for metrics in (first, second):
        assert metrics["policy/skipped_updates"] == 0 and 0 < metrics["policy/grad_norm"] < 1e6, metrics
        assert context.cuda or metrics["gap/max_abs_logprob"] < 1e-4, metrics["gap/max_abs_logprob"]
    first_rollouts = [
        Graded.from_json(row).response for _, row in read_jsonl(Run(out / "run").rollouts / "step_000000.jsonl.gz")
    ]
    rounding = within_rounding(first_rollouts, out / "model")
    shown = {"reward/mean": "reward", "policy/grad_norm": "gradient norm"}
    shown |= {"gap/max_abs_logprob": "largest log-prob gap", "time/step": "seconds"}
    return "; ".join(f"{what} {first[name]:.3g} → {second[name]:.3g}" for name, what in shown.items()) + f"\n{rounding}"
