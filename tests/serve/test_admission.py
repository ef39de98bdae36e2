"""Who may start, on its own: random trees whose calls end in a random order, under an engine that is crowded at random.

The step times are those of an engine that would take `3 + 0.4 n` or `max(10, 0.4 n)` milliseconds.
"""

import random
from collections import Counter
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dccot.serve.admission import CROWDED, Admission, StepTime, place

POLICIES = ("eager", "never", "adaptive")


class Server:
    """Responses whose calls fork at random, down to two levels; `log` is what happened."""

    def __init__(self, seed: int, policies: list[str], crowded):
        self.random, self.log = random.Random(seed), []
        self.admission = Admission(crowded)
        self.policies, self.running, self.open = policies, [], {}
        for name, policy in enumerate(policies):
            self.admission.begin(name, policy)
            self.running.append((name, (0, 0)))
            self.open[name] = 0  # calls that wait

    def start(self, call):
        self.log.append(call)
        self.running.append(call)
        self.open[call[0]] -= 1

    def end_one(self):
        name, path = self.running.pop(self.random.randrange(len(self.running)))
        width = self.random.choice((0, 0, 1, 3, 5)) if len(path) < 6 else 0
        following = [(name, (*path, len(path), i)) for i in range(1, width + 1)]
        self.open[name] += width
        self.admission.ended(name, [(call[1], lambda call=call: self.start(call)) for call in following])
        return following

    def running_of(self, name):
        return sum(call[0] == name for call in self.running)


seeds = st.integers(0, 2**32)
some_policies = st.lists(st.sampled_from(POLICIES), min_size=1, max_size=5)


@given(seeds, some_policies)
def test_every_call_starts_once_and_no_response_stands_still_however_crowded_the_engine_is(seed, policies):
    coin = random.Random(seed)
    server = Server(seed, policies, lambda running: coin.random() < 0.7)
    spawned = []
    while server.running:
        following = server.end_one()
        spawned += following
        assert following[:1] == [call for call in following if call in server.log][:1]  # worker 1 starts at once
        for name in range(len(policies)):
            assert server.running_of(name) or not server.open[name]
        assert server.admission.running == len(server.running)
        assert server.admission.waiting == sum(server.open.values())
    assert Counter(server.log) == Counter(spawned)
    for name in range(len(policies)):
        server.admission.leave(name)
    assert (server.admission.running, server.admission.waiting) == (0, 0)


@given(seeds)
def test_workers_of_a_fork_start_in_order(seed):
    coin = random.Random(seed)
    server = Server(seed, ["adaptive", "never"], lambda running: coin.random() < 0.5)
    while server.running:
        server.end_one()
    for name in (0, 1):
        order = [path for call, path in server.log if call == name]
        forks = {path[:-1] for path in order}
        assert all(
            [p[-1] for p in order if p[:-1] == fork] == sorted(p[-1] for p in order if p[:-1] == fork) for fork in forks
        )


@given(seeds, st.sampled_from(("eager", "never")), st.integers(1, 4))
def test_adaptive_is_eager_on_an_idle_engine_and_one_after_another_on_a_crowded_one(seed, like, responses):
    adaptive = Server(seed, ["adaptive"] * responses, lambda running: like == "never")
    other = Server(seed, [like] * responses, lambda running: False)
    while other.running:
        assert adaptive.running == other.running
        adaptive.end_one(), other.end_one()
    assert adaptive.log == other.log


def test_one_after_another_is_one_call_of_a_response_at_a_time():
    server = Server(3, ["never"] * 4, lambda running: False)
    while server.running:
        server.end_one()
        assert all(server.running_of(name) <= 1 for name in range(4))


def test_room_goes_to_the_response_that_runs_least_and_then_to_the_oldest():
    full, started = True, []
    admission = Admission(lambda running: full or running >= 7)
    for name in "abc":
        admission.begin(name, "adaptive")
    for name, width in (("b", 4), ("a", 4), ("c", 2)):
        admission.ended(name, [((0, i), lambda call=f"{name}{i}": started.append(call)) for i in range(1, width + 1)])
    assert started == ["b1", "a1", "c1"]
    full = False
    admission.admit()
    assert started[3:] == ["a2", "b2", "c2", "a3"]


def test_what_a_cancelled_response_left_goes_to_the_others():
    started = []
    admission = Admission(lambda running: running >= 2)
    admission.begin("gone", "adaptive")
    admission.begin("here", "adaptive")
    for name in ("gone", "here"):
        admission.ended(name, [((0, i), lambda call=f"{name} {i}": started.append(call)) for i in (1, 2, 3)])
    assert started == ["gone 1", "here 1"]
    admission.leave("gone")
    assert started[2:] == ["here 2"]


def test_a_directors_next_text_goes_first_and_adaptive_workers_give_way_to_later_directors_but_not_for_ever():
    queue = [
        ("join of the newest", place(999, "adaptive", worker=False, joins=True)),
        ("eager worker", place(3, "eager", worker=True, joins=False)),
        ("director", place(4, "adaptive", worker=False, joins=False)),
        ("later director", place(60, "never", worker=False, joins=False)),
        ("adaptive worker", place(2, "adaptive", worker=True, joins=False)),
        ("much later director", place(200, "eager", worker=False, joins=False)),
    ]
    assert sorted(queue, key=lambda call: call[1]) == queue


def test_there_is_no_room_where_requests_queue_the_cache_is_nearly_full_or_one_place_is_left():
    from vllm.v1.metrics.stats import SchedulerStats

    from dccot.serve.load import EngineLoad

    load = EngineLoad(SimpleNamespace(vllm_config=SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=8))))
    assert not load.crowded(6)
    assert load.crowded(7)
    for busy in ({"num_running_reqs": 7}, {"num_waiting_reqs": 1}, {"kv_cache_usage": 0.95}):
        load.record(SchedulerStats(**busy), None)
        assert load.crowded(1), busy
        load.record(SchedulerStats(num_running_reqs=6, kv_cache_usage=0.5), None)
        assert not load.crowded(6)


def learnt(step, batches, seed=0, noise=0.03):
    rng, steps = random.Random(seed), StepTime()
    for _ in range(3000):
        batch = rng.choice(batches)
        steps.learn(batch, step(batch) * (1 + noise * rng.gauss(0, 1)))
    return steps


@pytest.mark.parametrize("batches", [range(1, 9), range(20, 60)])
def test_the_line_of_a_steps_time_is_found_in_noise(batches):
    steps = learnt(lambda n: 3 + 0.4 * n, batches)
    assert steps.per_sequence == pytest.approx(0.4, rel=0.15)
    assert steps.base + 30 * steps.per_sequence == pytest.approx(15, rel=0.1)


def test_a_larger_batch_is_worth_it_until_the_step_grows_with_it():
    flat, steep = learnt(lambda n: max(10, 0.4 * n), range(1, 25)), learnt(lambda n: max(10, 0.4 * n), range(26, 50))
    assert flat.crowding(24) < 0.2
    assert steep.crowding(40) > CROWDED
    additive = learnt(lambda n: 3 + 0.4 * n, range(1, 50))
    assert additive.crowding(8) < CROWDED < additive.crowding(60)


def test_before_anything_is_known_nothing_is_crowded():
    assert StepTime().crowding(100) == 0
    alone = StepTime()
    for _ in range(100):
        alone.learn(1, 0.01)
    assert alone.crowding(3) < CROWDED


def test_a_machine_that_becomes_slower_is_learnt_anew():
    steps = learnt(lambda n: 3 + 0.4 * n, range(1, 20))
    rng = random.Random(1)
    for _ in range(3000):
        batch = rng.randrange(1, 20)
        steps.learn(batch, 30 + 4 * batch)
    assert steps.per_sequence == pytest.approx(4, rel=0.1)
