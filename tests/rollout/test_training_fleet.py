"""A training fleet by itself, on servers in memory: who may sample when others die for good or answer nonsense.

tests/train/test_asynchronous.py trains with such servers.
"""

import math
from collections.abc import Callable

import httpx
import pytest

from dccot.model.tokenizer import open_tokenizer
from dccot.model.weights import open_tensors
from dccot.rollout import fleet as fleet_module
from dccot.rollout.director import RolloutConfig
from dccot.rollout.engine import EngineConfig
from dccot.rollout.generate import Request, Sampler
from dccot.rollout.training_fleet import TrainingFleet
from tests.support.servers import eventually
from tests.support.stub_servers import stub_servers


@pytest.fixture
def stubs(checkpoints):
    with stub_servers(0, 2, open_tokenizer(checkpoints["single"]), faults=0.0) as stubs:
        yield stubs


@pytest.fixture
def fleet(checkpoints, stubs, tmp_path):
    opened = TrainingFleet(checkpoints["single"], EngineConfig(url=[stub.url for stub in stubs]), tmp_path)
    yield opened
    opened.shutdown()


@pytest.fixture
def load(checkpoints, fleet) -> Callable[[int], None]:
    with open_tensors(checkpoints["single"]) as tensors:
        weights = {name: tensors[name][:] for name in set(tensors)}
    return lambda version: fleet.load(weights.items(), version)


def up(fleet) -> list[bool]:
    return [server.up for server in fleet._servers]


def test_a_server_that_returns_is_not_compared_with_one_that_is_gone_for_good(fleet, stubs, load):
    load(0)
    stubs[0].dead_until = math.inf
    assert eventually(lambda: up(fleet) == [False, True], 10)
    stubs[1].start()
    stubs[1].dead_until = fleet._loop.time() + 0.3
    assert eventually(lambda: up(fleet) == [False, False], 10)
    assert eventually(lambda: up(fleet) == [False, True], 10)
    assert (stubs[1].label, stubs[1].violations) == ("0", [])


def test_a_server_that_answers_nonsense_about_its_weights_is_left_until_it_makes_sense(fleet, stubs, load):
    sensible = stubs[1].on_weight_info

    async def odd(body: dict) -> httpx.Response:
        return httpx.Response(200, json=[])

    stubs[1].on_weight_info = odd
    load(0)
    assert up(fleet) == [True, False]
    stubs[1].on_weight_info = sensible
    assert eventually(lambda: up(fleet) == [True, True], 10)


def test_a_server_that_answers_nonsense_about_itself_when_it_returns_is_asked_again(fleet, stubs, load):
    load(0)
    sensible = stubs[1].on_v1_completions

    async def odd(body: dict) -> httpx.Response:
        return httpx.Response(200, json={"choices": [{"logprobs": {"top_logprobs": [["a"]]}}]})

    stubs[1].on_v1_completions = odd
    stubs[1].dead_until = fleet._loop.time() + 0.3
    assert eventually(lambda: up(fleet) == [True, False], 10)
    assert eventually(lambda: fleet._loop.time() > stubs[1].dead_until + 0.3)
    assert up(fleet) == [True, False]
    stubs[1].on_v1_completions = sensible
    assert eventually(lambda: up(fleet) == [True, True], 10)


def test_where_responses_ran_is_forgotten_although_others_always_run(fleet, load, monkeypatch):
    monkeypatch.setattr(fleet_module, "HOMES", 10)
    load(0)
    sampler, begun, done = Sampler(fleet), 0, 0
    while done < 40:
        while len(sampler) < 4:
            sampler.start(Request(f"p{begun}", 0, [5, 5, 5]), RolloutConfig(budget=60), seed=(0,))
            begun += 1
        done += len(sampler.step())
        assert len(fleet._home) <= 10
    sampler.abort()
