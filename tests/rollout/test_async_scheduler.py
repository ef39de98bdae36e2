"""What a GPU runs and a CPU does not: vLLM's asynchronous scheduler and batch queue, driven as RL drives them.

The engine is ours, LLMEngine, EngineCore and AsyncScheduler are vLLM's own. Only the executor is a stand-in: it
computes nothing and returns random tokens of the tiny model's bigrams, a step later, from another thread. It holds vLLM
to what a worker relies on.
"""

from collections import defaultdict, deque
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.executor.abstract import Executor
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, LogprobsLists, ModelRunnerOutput
from vllm.v1.worker.worker_base import CompilationTimes

from dccot.lab.worlds import bigram
from dccot.model.tokenizer import open_tokenizer
from dccot.rollout import vllm_engine as engine_module
from dccot.rollout.director import Director, RolloutConfig
from dccot.rollout.engine import EngineConfig
from dccot.rollout.generate import Request, Watch, generate
from dccot.rollout.tags import TagIds
from dccot.rollout.vllm_engine import VllmEngine

pytestmark = pytest.mark.slow

BUDGET = 150


LAYER = FullAttentionSpec(block_size=32, num_kv_heads=1, head_size=32, dtype=torch.float32)
ANSWERS = {  # to what a worker is asked while it starts and ends
    "get_kv_cache_spec": {"layer.0": LAYER, "layer.1": LAYER},
    "get_supported_kv_cache_layouts": ["NHD"],
    "determine_available_memory": 2**24,
    "compile_or_warm_up_model": CompilationTimes(0.0, 0.0),
    "get_supported_tasks": ("generate",),
    **dict.fromkeys(["set_kv_cache_layout", "initialize_from_config", "reset_mm_cache", "reset_encoder_cache"]),
    "shutdown": None,
}


class RandomTokens(Executor):
    """One worker. `said` is what it was told to do, `sampled` what it drew for each request, in order."""

    def _init_executor(self) -> None:
        vocab = open_tokenizer(self.model_config.model).get_vocab()
        self.chances = bigram.bigrams(vocab, "spelled", bigram.Chances(), 3).double().numpy()
        self.draw = np.random.default_rng(0)
        self.driver_worker = SimpleNamespace(worker=self)
        self.said: list[str] = []
        self.known: dict[str, list[int]] = {}
        self.sampled: dict[str, list[int]] = defaultdict(list)
        self.scheduled: deque = deque()
        self.pool = ThreadPoolExecutor(1)
        self.awake, self.whole, self.in_flight, self.most_in_flight = {"weights", "kv_cache"}, True, 0, 0

    @classmethod
    def supports_async_scheduling(cls) -> bool:
        return True

    def get_model(self) -> nn.Module:
        return nn.Module()

    def check_health(self) -> None:
        pass

    def collective_rpc(self, method, timeout=None, args=(), kwargs=None, non_block=False):
        return [ANSWERS[method] if method in ANSWERS else getattr(self, f"on_{method}")(*args, **(kwargs or {}))]

    def execute_model(self, scheduler_output, non_block=False):
        assert self.awake == {"weights", "kv_cache"} and self.whole, f"a batch while only {self.awake} are awake"
        if not scheduler_output.total_num_scheduled_tokens:
            return finished(EMPTY_MODEL_RUNNER_OUTPUT)
        self.scheduled.append(scheduler_output)
        return finished(None)

    def sample_tokens(self, grammar_output, non_block=False):
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        return self.pool.submit(self.sample, self.scheduled.popleft())

    def sample(self, scheduled) -> ModelRunnerOutput:
        cached = scheduled.scheduled_cached_reqs
        computed = dict(zip(cached.req_ids, cached.num_computed_tokens))
        for new in scheduled.scheduled_new_reqs:
            self.known[new.req_id] = list(new.prompt_token_ids) + self.sampled[new.req_id]
            computed[new.req_id] = new.num_computed_tokens
        ids, tokens = list(scheduled.num_scheduled_tokens), []
        for name in ids:
            reached, exist = computed[name] + scheduled.num_scheduled_tokens[name], len(self.known[name])
            assert reached <= exist, f"{name}: {reached} tokens scheduled, {exist} exist"
            tokens.append(self.next_token(name) if reached == exist else None)
        self.in_flight -= 1
        drawn = np.array([[token or 0] for token in tokens])
        logprobs = LogprobsLists(drawn, -np.ones_like(drawn, dtype=np.float32), np.zeros(len(ids), dtype=np.int64))
        index = {name: number for number, name in enumerate(ids)}
        return ModelRunnerOutput(ids, index, [[] if token is None else [token] for token in tokens], logprobs)

    def next_token(self, name: str) -> int:
        chances = self.chances[self.known[name][-1]]
        token = int(self.draw.choice(len(chances), p=chances / chances.sum()))
        self.known[name].append(token)
        self.sampled[name].append(token)
        return token

    def on_synchronize_device(self):
        self.pool.submit(int).result()

    def on_sleep(self, level):
        assert not self.in_flight, "put to sleep under a batch"
        self.said.append(f"sleep {level}")
        self.awake.clear()
        self.whole = False

    def on_wake_up(self, tags):
        self.said.append(f"wake {', '.join(tags)}")
        self.awake.update(tags)

    def on_reload_weights(self, weights_iterator):
        assert "weights" in self.awake, "weights for memory that is not there"
        assert not self.in_flight, "weights change under a batch"
        self.said.append(f"load {len(list(weights_iterator))}")
        self.whole = True


def finished(result) -> Future:
    future: Future = Future()
    future.set_result(result)
    return future


@pytest.fixture(scope="module", params=[True, False], ids=["runner v2", "runner v1"])
def engine(request, checkpoints):
    """VllmEngine as on a GPU, on the stand-in."""

    def from_engine_args(arguments):
        config = arguments.create_engine_config()
        config.scheduler_config.async_scheduling = True  # the CPU platform turns it off
        # which wants a GPU's Triton
        patch.setattr(VllmConfig, "use_v2_model_runner", property(lambda config: request.param))
        return LLMEngine(config, executor_class=RandomTokens, log_stats=False)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(current_platform), "is_sleep_mode_available", lambda platform: True)
        patch.setattr(engine_module.LLMEngine, "from_engine_args", from_engine_args)
        patch.setattr(engine_module, "ON_GPU", True)
        config = EngineConfig(dtype="float32", max_sequences=8, kv_cache_gb=2**-6, block_size=32)
        built = VllmEngine(checkpoints["spelled"], config, sleeps=True)
        assert isinstance(built._engine.engine_core.engine_core.scheduler, AsyncScheduler)
        yield built
        built.shutdown()


def weights(engine):
    return ((name, torch.zeros(1)) for name in sorted(engine._checkpoint_names))


def requests(first: int, count: int) -> list[Request]:
    return [Request("p", sample, list(range(5, 15)) * 4) for sample in range(first, first + count)]


class Calls(Watch):
    """Every call with what it gave."""

    def __init__(self):
        self.done = {}

    def finished(self, request, call, completion):
        self.done[f"{request.problem}/{request.sample}/{call.path[0]}.{call.path[1]}"] = call, completion


def rolled_out(engine, first: int, count: int) -> Calls:
    watch = Calls()
    responses = list(generate(engine, requests(first, count), RolloutConfig(budget=BUDGET), seed=(0,), watch=watch))
    assert len(responses) == count and all(response.longest_path <= BUDGET for _, response in responses)
    assert any(response.forks for _, response in responses)
    return watch


def drawn_for(worker: RandomTokens, key: str) -> list[int]:
    """vLLM adds letters of its own to a request's name."""
    [found] = [tokens for name, tokens in worker.sampled.items() if name == key or name.startswith(f"{key}-")]
    return found


def test_rl_steps_in_their_order_on_the_asynchronous_scheduler(engine):
    """Load → roll out → sleep → wake → load, twice; every call gets the tokens drawn for it, up to its stop."""
    worker = engine._engine.model_executor
    tags, before = TagIds.of(engine.tokenizer, 3), len(worker.said)
    engine.load(weights(engine))
    for step in range(2):
        calls = rolled_out(engine, 20 * step, 12)
        for key, (call, completion) in calls.done.items():
            assert completion.ids == drawn_for(worker, key)[: len(completion.ids)]
            assert len(completion.logprobs) == len(completion.ids) <= call.max_tokens
            text = engine.tokenizer.decode(completion.ids)
            assert completion.stop.name not in ("SPAWN", "CLOSE") or call.stops[0] in text
            assert completion.stop.name != "EOS" or completion.ids[-1] == tags.eos
            assert completion.stop.name != "LENGTH" or len(completion.ids) == call.max_tokens
        assert {completion.stop.name for _, completion in calls.done.values()} >= {"SPAWN", "CLOSE", "EOS"}
        assert any(completion.cached for _, completion in calls.done.values()), "no prompt was in the prefix cache"
        engine.sleep()
        with pytest.raises(RuntimeError, match="weights are gone or mixed"):
            engine.add("early", next(iter(calls.done.values()))[0], seed=0, temperature=0.6)
        engine.wake()
        engine.load(weights(engine))
    loaded = f"load {len(engine._checkpoint_names)}"
    assert worker.said[before:] == [loaded, *(["sleep 1", "wake weights", loaded, "wake kv_cache"] * 2)]
    assert worker.most_in_flight == 2, "the scheduler was a step ahead of the worker"
    [fresh] = generate(engine, requests(99, 1), RolloutConfig(budget=40), seed=(0,), watch=(watch := Calls()))
    assert watch.done["p/99/0.0"][1].cached == 0, "what was cached before the new weights is forgotten"
    assert fresh[1].sampled_tokens > 0


def test_calls_aborted_under_way_leave_nothing_behind(engine):
    """A caller that stops early, as a filled batch does: prefix cache, sleep and the next rollout then work."""
    engine.load(weights(engine))
    loop = generate(engine, requests(40, 12), RolloutConfig(budget=BUDGET), seed=(0,))
    next(loop)
    loop.close()
    assert not engine.pending
    engine.forget_prefixes()
    engine.sleep()
    engine.wake()
    engine.load(weights(engine))
    rolled_out(engine, 60, 12)


def test_one_call_aborted_under_way_changes_no_other(engine):
    engine.load(weights(engine))
    [call] = generate_calls(engine)
    for key in ("a", "b", "c"):
        engine.add(key, call, seed=0, temperature=0.6)
    engine.step()
    engine.abort(["b"])
    engine.add("b", call, seed=0, temperature=0.6)  # the same name again, at once
    done = {}
    while engine.pending:
        done |= dict(engine.step())
    assert set(done) == {"a", "b", "c"}
    for key in ("a", "c"):
        assert done[key].ids == drawn_for(engine._engine.model_executor, key)[: len(done[key].ids)]


def generate_calls(engine):
    tags = TagIds.of(engine.tokenizer, 3)
    return Director(list(range(5, 15)), RolloutConfig(budget=60), tags, engine.context, False).start()
