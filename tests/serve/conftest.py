"""`dccot serve` of a hub id, vLLM's own command with our plugin, and the in-process engine whose tokens theirs must
be: one of each for the session.

Both serve the same weights. The first folder declares its tokenizer as published Llama folders do, which transformers
opens without white space unless it is repaired; the other has a chat template of its own instead of DeepSeek's chat
tokens.
"""

from __future__ import annotations

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from dccot.lab.worlds import bigram as tiny
from dccot.rollout.engine import EngineConfig
from tests.support.hub import Hub, environment
from tests.support.servers import KEY, dccot_serve, vllm_serve

CONTEXT, BUDGET = 1024, 160
NAME, QUESTION = "tiny", "how many are there"
PREFILLING = "branching=adaptive prefill_joins=1"  # the second server reads workers before their fork has ended
ELSEWHERE = "https://app.example"  # a page that may ask the first server
OTHER_EOS = "z"  # ends the model's text as well, because its folder says so
TEMPLATE = (
    "{% if tone is defined %}{{ tone }}{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def edit(path: Path, **changes) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> Path:
    """Untrained, spawns and answers. Its workers' tags are spelled with several tokens, the others are single ones."""
    chances = tiny.Chances(spawn=1 / 16, eos=1 / 20, answer=1 / 16)
    folder = tiny.save(tmp_path_factory.mktemp("models") / NAME, "mixed", chances, context=CONTEXT)
    weights = load_file(folder / "model.safetensors")
    unbiased = {name: tensor for name, tensor in weights.items() if not name.endswith(".bias")}
    save_file(unbiased, folder / "model.safetensors", metadata={"format": "pt"})
    edit(folder / "config.json", model_type="llama", architectures=["LlamaForCausalLM"])
    edit(folder / "tokenizer_config.json", tokenizer_class="LlamaTokenizerFast")
    ends = tiny.tokenizer("mixed").encode(tiny.EOS + OTHER_EOS)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    return folder


@pytest.fixture(scope="session")
def chat_model(model) -> Path:
    folder = shutil.copytree(model, model.parent / "templated")
    for path in (folder / "tokenizer.json", folder / "tokenizer_config.json"):
        path.write_text(path.read_text().replace(tiny.USER, "<|im_start|>").replace(tiny.ASSISTANT, "<|im_end|>"))
    edit(folder / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture(scope="session")
def hub(model, tmp_path_factory):
    """It has the model as someone/tiny; `hub.home` is the cache of the server that downloads it from there."""
    with Hub({f"someone/{NAME}": model}) as hub:
        hub.home = tmp_path_factory.mktemp("home")
        yield hub


@pytest.fixture(scope="session")
def servers(hub, chat_model, tmp_path_factory):
    """(`dccot serve`, vLLM's own command with our plugin); the last test of test_fleet.py kills the second."""
    folder = tmp_path_factory.mktemp("servers")
    options = f"--budget {BUDGET} --max-n 4 --max-requests 8 --allowed-origins".split() + [f'["{ELSEWHERE}"]']
    started = [dccot_serve(f"someone/{NAME}", folder / "dccot", *options, **environment(hub.url, hub.home))]
    started += [vllm_serve(chat_model, folder / "plain", plugin=f"rollout.budget={BUDGET} {PREFILLING}")]
    try:
        yield [server.ready() for server in started]
    finally:
        for server in started:
            server.stop()


@pytest.fixture(scope="session")
def server(servers):
    return servers[0]


@pytest.fixture(scope="session")
def plain(servers):
    return servers[1]


@pytest.fixture(scope="session")
def engine(model):
    from dccot.rollout.vllm_engine import VllmEngine

    return VllmEngine(model, EngineConfig(dtype="float32", kv_cache_gb=0.125))


@pytest.fixture(scope="session")
def solved(model, engine):
    """seed → what `dccot solve` writes"""
    from dccot.eval.solve import solve

    return cache(lambda seed, **more: solve(model, QUESTION, budget=BUDGET, seed=seed, engine=engine, **more).response)


@pytest.fixture(scope="session")
def client(server):
    from openai import OpenAI

    return OpenAI(base_url=f"{server.address}/v1", api_key=KEY, max_retries=0)


@pytest.fixture(scope="session")
def first(client):
    """wanted → (seed, answer), the first seed whose answer is; the server answers eight at a time."""

    def ask(seed: int):
        return client.chat.completions.create(model=NAME, messages=[{"role": "user", "content": QUESTION}], seed=seed)

    def search(wanted):
        with ThreadPoolExecutor(8) as pool:
            for start in range(1, 400, 8):
                for seed, answer in enumerate(pool.map(ask, range(start, start + 8)), start):
                    if wanted(answer):
                        return seed, answer
        raise AssertionError("no seed gives such a response")

    return search


@pytest.fixture(scope="session")
def seeds(first) -> tuple[int, ...]:
    """Some, one of them of a response that spawned."""
    return 1, 2, first(lambda answer: answer.usage.completion_tokens_details.rounds)[0]
