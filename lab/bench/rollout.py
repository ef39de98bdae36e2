"""The benefit of the barrier-free loop, the prefix cache and the weight sync, measured on a real engine.

    dccot bench rollout

- Barrier-free vs. round by round (all directors, then all workers, then all directors): the same calls with the same
  seeds give the same tokens in both, so only the waiting differs. Segments have geometric lengths, as widely spread as
  their mean is long.
- Our own Python: the share of the loop's time outside `engine.step()`.
- Prefix cache: the share of the workers' prompts, in full blocks, that was not recomputed.
- Sync: 100M parameters streamed into the live engine, vs. writing them to disk and building the engine from there.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from transformers import Qwen3Config

from dccot.lab.bench.harness import fastest, in_turns, row
from dccot.lab.synced import verify
from dccot.lab.worlds import bigram as tiny
from dccot.model.config import read_config
from dccot.model.transformer import Transformer
from dccot.model.weights import create_checkpoint, full_parameters, load_weights, save_checkpoint
from dccot.rollout.director import Call, Completion, Director, RolloutConfig
from dccot.rollout.engine import Engine, EngineConfig, open_engine, open_training_engine
from dccot.rollout.generate import Request, Watch, generate, seed_of
from dccot.rollout.response import Response
from dccot.rollout.tags import TagIds

BLOCK = 32
SEED = (0, 0)


class Meter(Watch):
    """Time inside the engine, and how much of the workers' prompts came from the prefix cache."""

    def __init__(self) -> None:
        self.in_step, self.cached, self.full_blocks = 0.0, 0, 0

    @contextmanager
    def timing(self, engine: Engine) -> Iterator[None]:
        step = engine.step

        def timed() -> list[tuple[str, Completion]]:
            start = time.perf_counter()
            finished = step()
            self.in_step += time.perf_counter() - start
            return finished

        with patch.object(engine, "step", timed):
            yield

    def finished(self, request: Request, call: Call, completion: Completion) -> None:
        if call.path[-1]:
            full = (len(call.prompt) - len(call.inserted)) // BLOCK * BLOCK
            self.full_blocks += full
            self.cached += min(completion.cached, full)


def barrier_free(
    engine: Engine, requests: list[Request], config: RolloutConfig, watch: Watch | None = None
) -> dict[int, Response]:
    return {r.sample: response for r, response in generate(engine, requests, config, seed=SEED, watch=watch)}


def round_by_round(engine: Engine, requests: list[Request], config: RolloutConfig) -> dict[int, Response]:
    """The same calls, but no call of the next kind starts before all of this kind are finished."""
    tags = TagIds.of(engine.tokenizer, config.workers)
    directors = {request.sample: Director(request.prompt, config, tags, engine.context) for request in requests}
    calls = [(sample, call) for sample, director in directors.items() for call in director.start()]
    while calls:
        for order, (sample, call) in enumerate(calls):
            seed = seed_of(*SEED, requests[sample].problem, sample, *call.path)
            engine.add(str(order), call, seed=seed, temperature=config.temperature, top_p=config.top_p, priority=order)
        done: dict[str, Completion] = {}
        while len(done) < len(calls):
            done.update(engine.step())
        calls = [
            (sample, following)
            for order, (sample, call) in enumerate(calls)
            for following in directors[sample].finished(call, done[str(order)])
        ]
    return {sample: director.response for sample, director in directors.items()}


def loop_rows(folder: Path, quick: bool) -> list[dict]:
    scale = 40 if quick else 200  # mean length of a segment
    chances = tiny.Chances(spawn=0.8 / scale, close=1 / scale, eos=0.2 / scale)
    model = tiny.save(folder, "spelled", chances, context=16 * scale)
    with open_engine(model, EngineConfig(dtype="float32", kv_cache_gb=2, max_sequences=256)) as engine:
        return compare_loops(engine, RolloutConfig(budget=6 * scale, max_rounds=2), quick)


def compare_loops(engine: Engine, config: RolloutConfig, quick: bool) -> list[dict]:
    prompt = engine.tokenizer.encode(f"{tiny.BOS}{tiny.USER}{'what is it ' * 8}{tiny.ASSISTANT}")
    requests = [Request("p", sample, prompt) for sample in range(32 if quick else 96)]
    barrier_free(engine, requests[:4], config)  # warms up the engine
    meters: list[Meter] = []
    found: dict[str, dict[int, Response]] = {}

    def slow() -> None:
        engine.forget_prefixes()
        found["slow"] = round_by_round(engine, requests, config)

    def fast() -> None:
        engine.forget_prefixes()
        meters.append(Meter())
        with meters[-1].timing(engine):
            found["fast"] = barrier_free(engine, requests, config, meters[-1])

    times = in_turns({"slow": slow, "fast": fast}, repeats=1 if quick else 3)
    one, other = ({sample: response.as_read for sample, response in loop.items()} for loop in found.values())
    if one != other:
        raise RuntimeError("the two loops did not do the same work: their tokens differ")
    best = min(times["fast"])
    tokens = sum(response.sampled_tokens for response in found["fast"].values())
    hits = meters[-1].cached / max(1, meters[-1].full_blocks)
    own = min(1 - meter.in_step / seconds for meter, seconds in zip(meters, times["fast"]))
    return [
        row("barrier-free over round by round", min(times["slow"]) / best, "×", 1.2, "higher"),
        row("own Python outside engine.step()", 100 * own, "%", 5.0),
        row("worker prompts from the prefix cache", 100 * hits, "% of blocks", 90.0, "higher"),
        row("tiny model, sampled", tokens / best, "tokens/s", None, "higher"),
    ]


def sync_rows(folder: Path, quick: bool) -> list[dict]:
    width, layers = (256, 4) if quick else (768, 12)
    words = tiny.tokenizer("single")
    shape: dict[str, Any] = {"hidden_size": width, "intermediate_size": 8 * width // 3, "num_hidden_layers": layers}
    shape |= {"head_dim": 64, "num_attention_heads": width // 64, "num_key_value_heads": width // 64}
    shape |= {"bos_token_id": words.bos_token_id, "eos_token_id": words.eos_token_id}
    raw = Qwen3Config(vocab_size=20_000, max_position_embeddings=2048, **shape).to_dict()
    create_checkpoint(raw | {"architectures": ["Qwen3ForCausalLM"]}, folder / "first", tokenizer=words, seed=0)
    model = Transformer(read_config(folder / "first"))
    load_weights(model, folder / "first")
    config = EngineConfig(dtype="float32", kv_cache_gb=0.5)
    from dccot.rollout.vllm_engine import VllmEngine

    with ExitStack() as stack:
        engine = stack.enter_context(open_training_engine(folder / "first", config))

        def through_disk() -> None:
            nonlocal engine
            save_checkpoint(model, folder / "second", source=folder / "first")
            stack.close()
            engine = stack.enter_context(open_training_engine(folder / "second", config))

        sync = fastest({"sync": lambda: engine.load(full_parameters(model))}, 1 if quick else 3)["sync"]
        disk = fastest({"disk": through_disk}, 1 if quick else 2)["disk"]
        assert isinstance(engine, VllmEngine)
        verify(engine, full_parameters(model))
    parameters = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    return [
        row(f"sync of {parameters:.0f}M parameters", sync, "s"),
        row("the same through disk and a new engine", disk, "s"),
        row("sync over disk", disk / sync, "×", None if quick else 5.0, "higher"),
    ]


def run(quick: bool = False) -> list[dict]:
    with tempfile.TemporaryDirectory() as folder:
        return loop_rows(Path(folder) / "tiny", quick) + sync_rows(Path(folder), quick)
