"""Two vLLM servers behind the Engine protocol: the tokens of the in-process engine, also when one of them is killed or returns changed.

The servers are those of the session; the last tests of this file kill the second.
"""

import time

import pytest

from dccot.bench import bigram as tiny
from dccot.config import ConfigError, load_config
from dccot.rollout.director import RolloutConfig
from dccot.rollout.generate import Request, Watch, generate
from dccot.rollout.interface import open_engine
from dccot.rollout.settings import EngineConfig
from dccot.train.rl_config import RLConfig
from tests.serve.conftest import CONTEXT
from tests.support.servers import KEY

CONFIG = RolloutConfig(budget=160)


@pytest.fixture
def fleet(servers, model, monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", KEY)
    with open_engine(model, EngineConfig(url=[server.address for server in servers])) as engine:
        yield engine


def requests(engine, count: int) -> list[Request]:
    prompts = [engine.tokenizer.encode(f"{tiny.BOS}{tiny.USER}{'abc ' * p}{tiny.ASSISTANT}<think>\n") for p in range(count)]
    return [Request(f"p{p}", 0, ids) for p, ids in enumerate(prompts)]


def tokens(responses) -> dict:
    return {request.problem: response.as_read for request, response in responses}


def eventually(holds, seconds=20.0) -> bool:
    deadline = time.monotonic() + seconds
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.1)
    return holds()


def test_a_fleet_samples_the_tokens_and_logprobs_of_the_engine_in_this_process(fleet, engine):
    assert fleet.context == CONTEXT
    asked = requests(fleet, 12)
    expected = {r.problem: response for r, response in generate(engine, asked, CONFIG, seed=(1,))}
    found = {r.problem: response for r, response in generate(fleet, asked, CONFIG, seed=(1,))}
    assert {p: r.as_read for p, r in found.items()} == {p: r.as_read for p, r in expected.items()}
    for problem, response in found.items():
        for ours, theirs in zip(response.segments(), expected[problem].segments(), strict=True):
            assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-4)
        assert response.finish is expected[problem].finish


def test_all_calls_of_a_response_go_to_one_server_and_both_servers_work(fleet, servers):
    homes: dict[str, set] = {}
    before = [server.metric("vllm:request_success_total") for server in servers]

    class Where(Watch):
        def finished(self, request, call, completion) -> None:
            homes.setdefault(request.problem, set()).add(fleet._home[f"{request.problem}/0"].url)

    assert len(tokens(generate(fleet, requests(fleet, 8), CONFIG, seed=(2,), watch=Where()))) == 8
    assert all(len(urls) == 1 for urls in homes.values())
    assert all(server.metric("vllm:request_success_total") > count for server, count in zip(servers, before, strict=True))


def test_a_caller_that_stops_early_leaves_the_servers_idle(fleet, servers):
    responses = generate(fleet, requests(fleet, 8), CONFIG, seed=(3,))
    next(responses)
    responses.close()
    assert not fleet.pending
    assert eventually(lambda: not any(server.running() for server in servers))


def test_servers_that_cannot_take_part_are_refused_with_the_remedy(servers, model, tmp_path, monkeypatch):
    def open_fleet(folder, address):
        with open_engine(folder, EngineConfig(url=[address])):
            pass

    monkeypatch.setenv("VLLM_API_KEY", KEY)
    with pytest.raises(ConfigError, match="does not answer"):
        open_fleet(model, "http://127.0.0.1:9")
    with pytest.raises(ConfigError, match="another tokenizer"):
        open_fleet(tiny.save(tmp_path / "single", "single", context=512), servers[0].address)
    monkeypatch.delenv("VLLM_API_KEY")
    with pytest.raises(ConfigError, match="set VLLM_API_KEY"):
        open_fleet(model, servers[0].address)


def test_training_with_a_fleet_is_refused():
    with pytest.raises(ConfigError, match=r"engine\.url is set"):
        load_config(RLConfig, "configs/rl/stage1.yaml", ["model.path=m", "data.train=t.jsonl", "engine.url=[http://a:8000,http://b:8000]"])
