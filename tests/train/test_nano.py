"""examples/nano.py, the method in one file, does what the real thing does: its director asks for the same text, its
forests hold the same tokens, and its losses and gradients are the same numbers.
"""

import importlib.util
import random
import re
import sys
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import DTensor

from dccot.core.runtime import Runtime
from dccot.model.sharding import ShardingConfig, build_model
from dccot.rollout.director import Completion, Director, RolloutConfig, Stop
from dccot.rollout.response import Response, Rollout, Segment
from dccot.rollout.tags import TagIds
from dccot.rollout.thread import Thread
from dccot.train.forest import build_forest
from dccot.train.objectives import ObjectiveConfig, objective_loss
from dccot.train.rewards import RewardConfig, advantages_of, correctness_format
from dccot.train.update import accumulate

EXAMPLE = Path(__file__).parents[2] / "examples/nano.py"
PLAIN = 5  # a token that ends nothing


@pytest.fixture(scope="module")
def nano():
    spec = importlib.util.spec_from_file_location("nano", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    sys.modules["nano"] = module  # where dataclasses look
    spec.loader.exec_module(module)
    return module


class Scribe:
    """Writes at random what a model could: text that stops, ends the sequence or is cut. Remembers what was asked."""

    def __init__(self, nano, seed: int):
        self.nano, self.rng, self.turns = nano, random.Random(seed), []

    def text(self, call) -> list[int]:
        if self.rng.random() < 0.1:
            return [PLAIN] * call.max_tokens
        plain = [self.rng.randrange(10) for _ in range(self.rng.randrange(min(call.max_tokens, 7)))]
        return [*plain, self.nano.EOS if self.rng.random() < 0.2 else call.stop]

    def __call__(self, calls):
        texts = [self.text(call) for call in calls]
        self.turns.append((calls, texts))
        return texts


def real(response) -> Response:
    segment = lambda each: Segment(each.inserted, each.sampled)
    forks = [[Thread([segment(worker)]) for worker in fork] for fork in response.forks]
    return Response([segment(each) for each in response.trunk], forks, prompt=response.prompt)


@pytest.fixture(scope="module")
def groups(nano):
    """Responses to seven prompts, four each, at random, and demonstrations of both kinds."""
    rng, made = random.Random(0), []
    for seed in range(7):
        prompt = nano.Problem.draw(rng).prompt
        made.append(nano.roll_out([prompt] * 4, 60, Scribe(nano, seed)))
    shown = [nano.demonstration(nano.Problem.draw(rng), parallel=parallel) for parallel in (True, False)]
    assert {len(response.forks) for group in made for response in group} >= {0, 1, 2, 3}
    return [*made, *([each] for each in shown)]


@pytest.mark.parametrize("budget", [1, 4, 5, 9, 20, 60, 200])
def test_the_director_asks_for_what_the_real_one_asks_for(nano, budget):
    tags = TagIds(nano.WORKERS, (nano.JOIN,), tuple((token,) for token in nano.OPEN), nano.EOS, 1, None)
    stops = {nano.SPAWN: Stop.SPAWN, nano.EOS: Stop.EOS, **dict.fromkeys(nano.CLOSE, Stop.CLOSE)}
    for seed in range(30):
        prompt, scribe = nano.Problem.draw(random.Random(seed)).prompt, Scribe(nano, seed)
        [response] = nano.roll_out([prompt], budget, scribe)
        machine = Director(prompt, RolloutConfig(workers=nano.WORKERS, budget=budget), tags, context=10**9)
        calls = machine.start()
        for asked, texts in scribe.turns:
            wanted = [(call.prompt, call.max_tokens) for call in calls]
            assert [(call.prompt, call.max_tokens) for call in asked] == wanted
            following = []
            for call, text in zip(calls, texts):
                stop = stops.get(text[-1], Stop.LENGTH)
                following += machine.finished(call, Completion(text, [0.0] * len(text), stop))
            calls = following
        assert machine.done and not calls
        assert real(response).as_read == machine.response.as_read
        assert response.longest_path == machine.response.longest_path <= budget


def test_the_forest_is_the_real_one(nano, groups):
    mine = nano.Forest.of(groups)
    index = iter(range(1000))
    forest = build_forest([[(next(index), real(response)) for response in group] for group in groups])
    for name in ("tokens", "visible_until", "sampled", "response"):
        assert getattr(mine, name).tolist() == getattr(forest, name).tolist(), name
    assert torch.equal(mine.position, forest.mask.position.long())
    assert torch.equal(mine.parent[mine.sampled], forest.rows)


def whole_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """A shard of a group of one, if a test before this one has formed it, is the whole."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@pytest.mark.parametrize("objective", ["dapo", "cispo"])
def test_loss_and_gradients_are_the_real_ones(nano, groups, objective, tmp_path):
    plain = nano.tiny_model()
    plain.save_pretrained(tmp_path)
    whole = build_model(tmp_path, ShardingConfig(compute_dtype="float32", activation_checkpointing=False))
    forests = [groups[:3], groups[3:]]
    mine = [nano.Forest.of(part) for part in forests]
    theirs = [build_forest([[(0, real(response)) for response in group] for group in part]) for part in forests]
    torch.manual_seed(1)
    for forest in mine:
        near = forest.logprobs(plain).detach()
        forest.advantage, shifts = torch.randn(len(near)), 0.3 * torch.randn(2, len(near))
        forest.old, forest.reference = near + shifts
    config = ObjectiveConfig(kind=objective, kl_coefficient=0.1)

    def real_loss(number, forest, logprob, entropy):
        known = mine[number]
        return objective_loss(config, logprob, known.old, known.advantage, known.old, known.reference)

    policy = nano.RL(objective=getattr(nano, objective), kl_coefficient=0.1)
    total = nano.mean_loss(mine, lambda forest: policy.loss(forest, plain))
    with Runtime.start(60) as runtime:
        wanted, count = accumulate(whole, theirs, real_loss, 1.0, runtime)
        assert count == sum(len(forest.advantage) for forest in mine) and total == pytest.approx(wanted, abs=1e-6)
        gradients = {name: whole_tensor(parameter.grad) for name, parameter in whole.named_parameters()}
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-4, atol=1e-6, msg=name)


def test_rewards_and_advantages_are_the_real_ones(nano, groups):
    problem, config = nano.Problem.draw(random.Random(3)), RewardConfig(length_penalty=0.5, cutoff=12)
    shown = [nano.demonstration(problem, parallel) for parallel in (True, False)]
    wrong = nano.demonstration(nano.Problem(((1,) * 5,) * 3), True)
    assert problem.gold != 15
    rewards = []
    for response, verdict, flaw in (
        (shown[0], "correct", None),
        (shown[1], "correct", "no_spawn"),
        (wrong, "wrong", None),
    ):
        rollout = Rollout("p", 0, "", "", "", real(response), flaw, verdict)
        rewards.append(nano.reward(response, problem, 30))
        assert rewards[-1] == pytest.approx(correctness_format(rollout, config, 30))
    assert nano.advantages(rewards).tolist() == pytest.approx(advantages_of(rewards), rel=1e-5)


def test_it_is_one_file_that_can_be_read():
    text = EXAMPLE.read_text()
    assert text.count("\n") <= 500 and "dccot" not in "".join(line for line in text.splitlines() if "import " in line)


@pytest.mark.thorough
def test_rl_learns_to_spawn_and_to_answer(nano, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["nano.py"])
    nano.main()
    before, after = re.findall(r"after \w+ +correct +(\d+)%  with workers +(\d+)%", capsys.readouterr().out)
    assert int(after[0]) > int(before[0]) and int(after[1]) > 90 > int(before[1])
