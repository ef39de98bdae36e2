"""Which groups start, and which a step trains on: the bound of staleness, no preference for short responses, nothing
lost. Sampling is simulated here: every response takes as long as it is told to, in any order.
"""

import random
from collections import Counter
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dccot.core.config import ConfigError, load_config
from dccot.data.problems import Problem
from dccot.rollout.response import Response, Rollout, Segment
from dccot.train.config import RLBatch, RLConfig
from dccot.train.pool import Pool, Started, settle
from dccot.train.rl import RL

GROUP = 2


@dataclass
class World:
    """Engines that finish responses in a random order, weights that change, a filter whose verdict on a group is fixed.

    `overlap`: sampling goes on while the model trains, as in the asynchronous mode.
    """

    chance: random.Random
    pool: Pool
    kept: list[bool]  # by the number of the group; beyond the list, kept
    overlap: bool = False
    running: list[list] = field(default_factory=list)  # [group, sample, versions of its tokens]
    trained: list[list[int]] = field(default_factory=list)  # numbers of the groups, by step
    position: int = 0  # in the problem stream

    def draw(self) -> None:
        for _ in range(self.pool.room()):
            group = self.pool.start((Problem(str(self.position), "", ""), []), {"position": self.position})
            self.position += 1
            self.running += [[group, sample, []] for sample in range(GROUP)]

    def sample(self) -> None:
        """Each writes a token, some finish."""
        finished = []
        for each in list(self.running):
            each[2].append(self.pool.version)
            if self.chance.random() < 0.3:
                self.running.remove(each)
                group, sample, versions = each
                text = Response([Segment([], [1] * len(versions), [0.0] * len(versions), versions)], prompt=[0])
                finished.append((group.number, Rollout(group.problem[0].id, sample, "", "", "", text)))
        complete = self.pool.add(finished)
        good = [each.group for each in complete if each.number >= len(self.kept) or self.kept[each.number]]
        self.pool.decide(complete, good)

    def step(self, step: int) -> None:
        self.pool.begin(step)
        batch: list = []
        while len(batch) < self.pool.config.prompts:
            self.draw()
            self.sample()
            _, kept = self.pool.take()
            batch += kept
        self.pool.begin(step + 1)
        for _ in range(self.chance.randrange(4) if self.overlap else 0):  # while the model trains
            self.draw()
            self.sample()
        for group in batch:
            ages = [
                step - version for each in group for segment in each.response.segments() for version in segment.versions
            ]
            assert all(0 <= age <= self.pool.max_staleness for age in ages)
        self.trained.append([int(group[0].problem) for group in batch])
        self.pool.version = step + 1

    def restart(self) -> None:
        """Killed after a checkpoint: what ran is gone."""
        state = self.pool.resumes_at({"position": self.position})
        begun = Pool(self.pool.config, self.pool.max_staleness, whole=self.pool.whole, drained=self.pool.drained)
        begun.version, begun.drawn, self.position = self.pool.version, state["drawn"], state["stream"]["position"]
        self.pool, self.running = begun, []


def world(seed: int, kept: list[bool], staleness: int, mode: str, rolled_out: int = 1000) -> World:
    config = RLBatch(prompts_rolled_out=rolled_out, prompts=3, group_size=GROUP)
    pool = Pool(config, staleness, drained=mode == "synchronous")
    return World(random.Random(seed), pool, kept, overlap=mode == "asynchronous")


worlds = st.builds(
    world,
    st.integers(0, 10**6),
    st.lists(st.booleans(), max_size=60),
    st.integers(0, 3),
    st.sampled_from(["synchronous", "partial", "asynchronous"]),
    st.sampled_from([1, 4, 1000]),
)


@given(worlds, st.sets(st.integers(0, 7)))
def test_what_is_trained_on_does_not_depend_on_lengths_nor_on_restarts_and_is_never_too_old(made, restarts):
    """In every mode: the groups that the filter keeps, in the order drawn, each once."""
    for step in range(8):
        made.step(step)
        if step in restarts:
            made.restart()
    good = (number for number in range(10**6) if number >= len(made.kept) or made.kept[number])
    assert made.trained == [[next(good) for _ in range(3)] for _ in range(8)]
    assert made.pool.counts["too_old"] == 0


@given(st.integers(0, 10**6), st.lists(st.booleans(), max_size=60), st.sampled_from(["partial", "asynchronous"]))
def test_without_staleness_nothing_is_left_when_a_batch_is_full(seed, kept, mode):
    made = world(seed, kept, 0, mode)
    for step in range(5):
        made.step(step)
        assert not made.pool.groups


def test_unfinished_responses_are_carried_over_and_continue_under_new_weights():
    made = world(0, [], 2, "partial")
    crossed = 0
    for step in range(20):
        made.step(step)
        crossed += sum(len(set(versions)) > 0 for _, _, versions in made.running)
    assert crossed > 20


def test_more_start_only_as_groups_are_rejected():
    made = world(0, [True, False, True, False], 0, "synchronous")
    made.draw()
    assert made.pool.drawn == 3
    while made.running:
        made.sample()
    made.pool.take()
    made.draw()
    assert made.pool.drawn == 4


def test_whole_batches_start_and_their_surplus_is_dropped():
    made = world(0, [], 0, "synchronous", rolled_out=5)
    made.pool.whole = True
    made.step(0)
    assert (made.pool.drawn, len(made.pool.groups)) == (5, 0)
    made.step(1)
    assert made.pool.drawn == 10


def test_whole_batches_leave_nothing_for_the_next_step_even_if_an_engine_works_on():
    """Without staleness the asynchronous mode takes what the synchronous one does: all of a batch at once."""
    made = world(0, [], 0, "asynchronous", rolled_out=5)
    made.pool.whole = True
    for step in range(6):
        made.step(step)
        assert (made.pool.drawn, len(made.pool.groups)) == (5 * (step + 1), 0)
    assert [step[:3] for step in made.trained] == [[5 * step + number for number in range(3)] for step in range(6)]
    assert made.pool.counts["too_old"] == 0


def test_a_batch_that_has_started_when_its_step_begins_still_counts_as_its_first():
    """The asynchronous mode starts it as soon as the weights are there; seeds of the next one depend on the number."""
    made = world(0, [], 0, "asynchronous")
    made.pool.begin(1)
    made.pool.batches += 1
    made.pool.begin(1)
    assert made.pool.batches == 1


def test_a_group_of_weights_that_an_engine_should_not_have_had_is_dropped_and_counted():
    made = world(0, [], 1, "partial")
    made.pool.begin(5)
    made.pool.version = 5
    made.draw()
    made.running[0][2].append(2)  # three versions old
    while made.running:
        made.sample()
    groups, kept = made.pool.take()
    assert (len(groups) - len(kept), made.pool.counts["too_old"]) == (1, 1)


def test_a_response_that_one_version_sampled_does_not_repeat_it_for_every_token():
    made = world(0, [], 1, "partial")
    made.draw()
    while made.running:
        made.sample()
    (first, second, *_), _ = made.pool.take()
    settle(first, 0)
    settle(second, 1)
    assert [segment.versions for segment in first[0].response.segments()] == [[]]
    assert {version for segment in second[0].response.segments() for version in segment.versions} == {0}
    assert (first[0].step, second[0].step) == (0, 1)


def test_a_groups_responses_go_round_the_ranks():
    """Each once, and no rank has more than one more than another, over a group and over all."""
    config = load_config(RLConfig, "configs/rl/stage1.yaml", ["model.path=m", "data.train=t.jsonl"])
    homes: dict[tuple[int, int], int] = {}
    for rank in range(3):
        rl = object.__new__(RL)
        rl.config, rl.engine = config, SimpleNamespace(replica=rank, replicas=3)
        begin = lambda request, rollout, seed, rank=rank: homes.setdefault((request.group, request.sample), rank)
        rl.sampler = SimpleNamespace(start=begin)
        for number in range(5):
            rl._begin(Started(number, (Problem("p", "", ""), [1]), {}), seed=(0,))
    assert sorted(homes) == [(number, sample) for number in range(5) for sample in range(7)]
    for counted in (homes.values(), *([homes[n, sample] for sample in range(7)] for n in range(5))):
        shares = Counter(counted)
        assert max(shares.values()) - min(shares.values()) <= 1


def test_staleness_without_a_surplus_to_keep_is_refused():
    given = ["model.path=m", "data.train=t.jsonl", "rollout.max_staleness=1"]
    with pytest.raises(
        ConfigError, match=r"rollout.max_staleness is 1 and batch.surplus is drop; .* batch.surplus=keep"
    ):
        load_config(RLConfig, "configs/rl/stage1.yaml", given)
    assert load_config(RLConfig, "configs/rl/stage1.yaml", [*given, "rollout.mode=partial"]).rollout.staleness == 1
    assert load_config(RLConfig, "configs/rl/stage1.yaml", [*given[:2], "rollout.mode=partial"]).rollout.staleness == 2
