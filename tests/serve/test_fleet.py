"""Two plain vLLM servers behind the Engine protocol: the tokens of the in-process engine, also when one of them is killed."""

import os
import signal
import threading
import time
from collections import Counter

import pytest

from dccot.bench import bigram as tiny
from dccot.config import ConfigError, load_config
from dccot.rollout.director import RolloutConfig
from dccot.rollout.generate import Request, Watch, generate
from dccot.rollout.interface import open_engine
from dccot.rollout.settings import EngineConfig
from dccot.train.rl_config import RLConfig
from tests.support.servers import KEY, free_port, vllm_serve

CONFIG = RolloutConfig(budget=160)
PROCESSED = ("--logprobs-mode", "processed_logprobs")


@pytest.fixture(scope="module")
def fleet(models, tmp_path_factory):
    started = [vllm_serve(models["spelled"], tmp_path_factory.mktemp(f"fleet-{i}"), *PROCESSED) for i in range(2)]
    try:
        yield [server.ready() for server in started]
    finally:
        for server in started:
            server.stop()


@pytest.fixture
def remote(fleet, models):
    with open_engine(models["spelled"], EngineConfig(url=[server.address for server in fleet])) as engine:
        yield engine


def requests(engine, count: int, prefix: str = "p") -> list[Request]:
    prompts = [engine.tokenizer.encode(f"{tiny.BOS}{tiny.USER}{'abc ' * p}{tiny.ASSISTANT}<think>\n") for p in range(count)]
    return [Request(f"{prefix}{p}", 0, ids) for p, ids in enumerate(prompts)]


def tokens(responses) -> dict:
    return {request.problem: response.as_read for request, response in responses}


def test_a_fleet_samples_the_tokens_and_logprobs_of_the_engine_in_this_process(remote, engines):
    asked = requests(remote, 12)
    expected = {r.problem: response for r, response in generate(engines["spelled"], asked, CONFIG, seed=(1,))}
    found = {r.problem: response for r, response in generate(remote, asked, CONFIG, seed=(1,))}
    assert {p: r.as_read for p, r in found.items()} == {p: r.as_read for p, r in expected.items()}
    for problem, response in found.items():
        for ours, theirs in zip(response.segments(), expected[problem].segments(), strict=True):
            assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-4)
        assert response.finish is expected[problem].finish


def test_all_calls_of_a_response_go_to_one_server_and_both_servers_work(remote, fleet):
    homes: dict[str, set] = {}
    before = [server.metric("vllm:request_success_total") for server in fleet]

    class Where(Watch):
        def finished(self, request, call, completion) -> None:
            homes.setdefault(request.problem, set()).add(remote._home[f"{request.problem}/0"].url)

    assert len(tokens(generate(remote, requests(remote, 8), CONFIG, seed=(2,), watch=Where()))) == 8
    assert all(len(urls) == 1 for urls in homes.values())
    assert all(server.metric("vllm:request_success_total") > count for server, count in zip(fleet, before, strict=True))


def test_a_caller_that_stops_early_leaves_the_servers_idle(remote, fleet):
    responses = generate(remote, requests(remote, 8), CONFIG, seed=(3,))
    next(responses)
    responses.close()
    assert not remote.pending
    deadline = time.monotonic() + 10
    while any(server.running() for server in fleet) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(server.running() for server in fleet)


@pytest.mark.thorough
def test_a_server_killed_half_way_costs_no_response_and_one_that_returns_is_used_again(models, engines, tmp_path):
    ports = [free_port(), free_port()]
    servers = [vllm_serve(models["spelled"], tmp_path / str(i), *PROCESSED, port=port) for i, port in enumerate(ports)]
    addresses = [server.ready().address for server in servers]
    with open_engine(models["spelled"], EngineConfig(url=addresses)) as engine:
        asked = requests(engine, 40)
        expected = tokens(generate(engines["spelled"], asked, CONFIG, seed=(4,)))
        found: list = []
        for request, response in generate(engine, asked, CONFIG, seed=(4,), concurrency=8):
            found.append((request.problem, response.as_read))
            if len(found) == 10:
                os.killpg(servers[1].process.pid, signal.SIGKILL)
        assert max(Counter(problem for problem, _ in found).values()) == 1
        assert dict(found) == expected
        servers[1] = vllm_serve(models["spelled"], tmp_path / "again", *PROCESSED, port=ports[1])
        servers[1].ready()
        time.sleep(3)
        assert tokens(generate(engine, asked, CONFIG, seed=(4,))) == expected
        assert servers[1].metric("vllm:request_success_total") > 0
    for server in servers:
        server.stop()


def test_servers_that_cannot_take_part_are_refused_with_the_remedy(models, fleet, tmp_path):
    with pytest.raises(ConfigError, match="does not answer"), open_engine(models["spelled"], EngineConfig(url=["http://127.0.0.1:9"])):
        pass
    with pytest.raises(ConfigError, match="another tokenizer"), open_engine(models["single"], EngineConfig(url=[fleet[0].address])):
        pass
    assert threading.active_count() < 50


def test_our_own_servers_take_part_too_with_the_key_of_the_environment(models, servers, monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", KEY)
    with open_engine(models["spelled"], EngineConfig(url=[servers["spelled"].address])) as engine:
        assert engine.context == 512


def test_training_with_a_fleet_is_refused():
    with pytest.raises(ConfigError, match=r"engine\.url is set"):
        load_config(RLConfig, "configs/rl/stage1.yaml", ["model.path=m", "data.train=t.jsonl", "engine.url=[http://a:8000,http://b:8000]"])
