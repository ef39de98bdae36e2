"""Asynchronous RL on servers that die, hang, answer nonsense and come back: the whole training loop, servers in memory.

tests/system/test_asynchronous.py does it with real ones.
"""

import threading
import time
from collections import Counter, deque
from types import SimpleNamespace

import pytest

from dccot.core.config import ConfigError, load_config
from dccot.core.runtime import Runtime
from dccot.lab.worlds.exact_task import make_task, write_problems
from dccot.model.tokenizer import open_tokenizer
from dccot.rollout.director import RolloutConfig
from dccot.rollout.generate import Request
from dccot.train.asynchronous import AsynchronousRL
from dccot.train.config import RLConfig
from dccot.train.rl import Question, train
from tests.support.spans import metrics, responses_in, trained_in
from tests.support.stub_servers import stub_servers

pytestmark = pytest.mark.slow

STEPS, STALENESS = 5, 2
SMALL = (
    "batch.prompts=4",
    "batch.prompts_rolled_out=9",
    "checkpoint.every=2",
    "profile.steps=[]",
    "batch.token_budget=2000",
)


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    out = tmp_path_factory.mktemp("stubs")
    make_task(out)
    write_problems(out / "problems.jsonl", 200)
    return out


def settings(task, name: str, stubs, *more: str) -> RLConfig:
    urls = ",".join(stub.url for stub in stubs)
    given = [f"name={name}", f"steps={STEPS}", "rollout.mode=asynchronous", f"engine.url=[{urls}]", *SMALL, *more]
    return load_config(RLConfig, task / "rl.yaml", given)


@pytest.fixture(scope="module")
def undisturbed(task):
    """The run on one server without faults."""
    with stub_servers(0, 1, open_tokenizer(task / "model"), faults=0.0) as quiet:
        train(settings(task, "undisturbed", quiet))
    return task / "undisturbed"


def groups_of(run) -> list[list[str]]:
    """The problems of each step, in order."""
    rows = [trained_in(run, step) for step in range(STEPS)]
    assert all(max(Counter((row["problem"], row["sample"]) for row in step).values()) == 1 for step in rows)
    return [list(dict.fromkeys(row["problem"] for row in step)) for step in rows]


@pytest.mark.parametrize("seed", range(3))
def test_whatever_servers_do_nothing_is_lost_nothing_counts_twice_and_no_token_is_too_old(task, undisturbed, seed):
    """Each step trains on the next prompts in the order drawn, all their responses once; no server ever samples with
    weights that it was not given as a whole.
    """
    with stub_servers(seed, 3, open_tokenizer(task / "model")) as stubs:
        train(settings(task, f"faults_{seed}", stubs))
    run = task / f"faults_{seed}"
    assert [stub.violations for stub in stubs] == [[], [], []]
    happened = Counter(each.split(" ")[0] for stub in stubs for each in stub.happened)
    assert {"dies", "fails", "hangs", "nonsense"} <= set(happened)
    assert groups_of(run) == groups_of(undisturbed)
    ages = {step - v for step, response in responses_in(run) for s in response.segments() for v in s.versions}
    assert ages <= set(range(STALENESS + 1))
    assert len(ages) > 1
    assert [(row["step"], row["pool/too_old"]) for row in metrics(run)] == [(step, 0) for step in range(STEPS)]


def test_every_trained_token_counts_at_its_own_age(undisturbed):
    for row in metrics(undisturbed):
        shares = {age: row.get(f"gap/lag_{age}_tokens", 0.0) for age in range(STALENESS + 1)}
        assert shares == pytest.approx({age: row[f"staleness/tokens_{age}_old"] for age in shares})


def test_servers_sample_while_the_model_trains_and_no_faster_than_they_do(undisturbed):
    """The rate goes by the whole step, not by the seconds in which the trainer waited."""
    for row in metrics(undisturbed):
        groups = row["data/rollout_batches"] * 9
        tokens = row["length/total_tokens"] * groups * 4  # inserted ones included
        assert row["speed/rollout_tokens"] * row["time/step"] < 1.5 * tokens


def test_without_staleness_nothing_is_sampled_while_the_model_trains(task):
    with stub_servers(0, 2, open_tokenizer(task / "model"), faults=0.0) as stubs:
        train(settings(task, "fresh", stubs, "rollout.max_staleness=0", "batch.surplus=keep"))
    assert {step - v for step, r in responses_in(task / "fresh") for s in r.segments() for v in s.versions} == {0}


def test_a_server_whose_engine_hangs_is_left_although_it_says_that_it_is_healthy(task):
    with stub_servers(0, 2, open_tokenizer(task / "model"), faults=0.0) as stubs:
        stubs[1].engine_hangs_after = 30
        train(settings(task, "hanging", stubs))
    assert stubs[1].sampled >= 30
    assert stubs[0].label == str(STEPS)
    assert [len(step) for step in groups_of(task / "hanging")] == [4] * STEPS


def test_a_server_whose_weights_differ_from_anothers_never_samples_and_is_said_not_to(task, caplog):
    with stub_servers(0, 2, open_tokenizer(task / "model"), faults=0.0) as stubs, caplog.at_level("INFO"):
        stubs[1].damage = "one bit"
        train(settings(task, "differing", stubs, "steps=1"))
    assert stubs[1].sampled == 0 < stubs[0].sampled
    assert "http://stub1:8000 did not take the weights of version 0: ValueError: 1 weights differ" in caplog.text
    assert "http://stub0:8000 version 1, " in caplog.text and "http://stub1:8000 version ?, not used" in caplog.text
    [row] = metrics(task / "differing")
    assert [row[f"server_{number}/up"] for number in range(2)] == [1, 0]


def test_a_trainer_that_starts_again_gives_every_server_its_weights_first_and_loses_nothing(task, undisturbed):
    """The servers are as the first trainer left them, one of them in the middle of an update."""
    with stub_servers(7, 2, open_tokenizer(task / "model"), faults=0.0) as stubs:
        train(settings(task, "again", stubs, "steps=2"))
        stubs[1].label, stubs[1].weights, stubs[1].paused, stubs[1].updating = "9", "mixture", True, True
        train(settings(task, "again", stubs))
    assert [stub.violations for stub in stubs] == [[], []]
    assert [stub.label for stub in stubs] == [str(STEPS)] * 2
    assert len({stub.weights for stub in stubs}) == 1
    drawn = [problem for step in groups_of(task / "again") for problem in step]
    assert drawn == [problem for step in groups_of(undisturbed) for problem in step]


class Slow:
    """A sampler that finishes in a step what has started before it."""

    def __init__(self):
        self.running: list[Request] = []

    def __len__(self) -> int:
        return len(self.running)

    def start(self, request: Request, config, seed) -> None:
        self.running.append(request)

    def step(self) -> list:
        finished, self.running = self.running, []
        time.sleep(0.02)
        return [(request, "response") for request in finished]


@pytest.fixture
def validating():
    """A training loop that only validates, while its thread takes turns."""
    rl, closed = object.__new__(AsynchronousRL), threading.Event()
    rl._questions, rl._answers, rl._fault, rl._idle, rl._finished_work = deque(), [], None, 0.0, 0
    rl.engine, rl.sampler, rl.runtime = "there is one", Slow(), Runtime.alone()
    rl.phases = SimpleNamespace(beat=lambda: None)
    thread = threading.Thread(target=lambda: [rl.roll_out() for _ in iter(closed.is_set, True)])
    thread.start()
    yield rl
    closed.set()
    thread.join()


def questions(name: str) -> list[Question]:
    return [(Request(f"{name}/{number}", 0, [1]), RolloutConfig(), ()) for number in range(3)]


def test_a_validation_that_begins_in_the_middle_of_a_turn_gets_its_own_answers_and_no_earlier_ones(validating):
    for name in "abcd":
        asked = questions(name)
        assert [request for request, _ in validating.answers(asked)] == [request for request, *_ in asked]


def test_other_ranks_wait_for_a_long_validation_in_short_collectives(validating, monkeypatch):
    told: list[bool] = []
    monkeypatch.setattr("dccot.train.asynchronous.PATIENCE", 0.0)
    validating.runtime = SimpleNamespace(broadcast=lambda seen: (told.append(seen[0]), time.sleep(0.005), seen)[-1])
    assert len(validating.answers(questions("a"))) == 3
    assert told[0] is False and told[-1] is True


awaited = threading.Event()


def hanging(rollout, config, budget) -> float:
    awaited.wait(30)
    return 1.0


def test_a_reward_that_hangs_ends_the_run_and_its_line_is_said(task, monkeypatch, capfd):
    """It hangs in the thread, while the training loop waits for groups. Here it goes on when the process would end."""
    monkeypatch.setattr("os._exit", lambda code: awaited.set())
    monkeypatch.setattr("logging.shutdown", lambda: None)
    with stub_servers(0, 1, open_tokenizer(task / "model"), faults=0.0) as stubs:
        train(settings(task, "stuck", stubs, "steps=1", "stall_seconds=3", f"reward.kind={__name__}:hanging"))
    assert awaited.is_set()
    assert "in hanging" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["rollout.mode=asynchronous"], "rollout.gpus is 0 and engine.url is not set; .* set one of the two"),
        (["rollout.gpus=2"], "rollout.gpus is 2; a synchronous step .* or set rollout.mode=asynchronous"),
        (["engine.url=[http://a:1]", "rollout.mode=partial"], "engine.url is set; a partial step"),
    ],
)
def test_servers_belong_to_the_asynchronous_mode(given, said):
    with pytest.raises(ConfigError, match=said):
        load_config(RLConfig, "configs/rl/stage1.yaml", ["model.path=m", "data.train=t.jsonl", *given])
