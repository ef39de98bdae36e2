"""The state machine alone: a scripted sampler takes the place of the engine, so that every way a call can end is met.

Tags here are made of ids above 900; a sampler writes ids below 100. Context of a call and longest path are worked out
again from what the sampler was asked and what it wrote, not from the response's own arithmetic.
"""

import random
import re
from dataclasses import dataclass

import pytest

from dccot.core.config import ConfigError, check
from dccot.rollout.director import Call, Completion, Director, RolloutConfig, Stop
from dccot.rollout.response import Finish, Segment
from dccot.rollout.tags import TagIds
from dccot.rollout.thread import Thread
from tests.support.rounds import Round, final_of, flat, rounds_of

EOS = 0
CLOSE = (901, 902)
NO_LIMIT = 10**9


TASKS = 200  # TASKS + m: a list of m tasks


def spelled(ids: list[int]) -> str:
    listed = [range(1, token - TASKS + 1) for token in ids if token >= TASKS]
    return "".join(f"<task_{i}>x</task_{i}>" for numbers in listed for i in numbers)


def tags(workers: int | list[int], length: int = 3, closing: int = 1) -> TagIds:
    most = workers if isinstance(workers, int) else workers[1]
    opening = [tuple(1000 + 10 * i + j for j in range(length)) for i in range(1, most + 1)]
    return TagIds(workers, CLOSE, tuple(opening), EOS, closing, None if isinstance(workers, int) else spelled)


def director(
    prompt=(7, 8, 9), context=NO_LIMIT, workers=3, tag_length=3, closing=1, parallel=True, **settings
) -> Director:
    config = RolloutConfig(workers=workers, **settings)
    return Director(list(prompt), config, tags(workers, tag_length, closing), context, parallel)


def written(count: int, stop: Stop, last: int | None = None) -> Completion:
    ids = [random.randrange(1, 100) for _ in range(count)]
    if stop is Stop.EOS or last is not None:
        ids[-1] = EOS if last is None else last
    return Completion(ids, [-0.1] * count, stop)


def only(calls: list[Call]) -> Call:
    assert len(calls) == 1
    return calls[0]


def spawn(machine: Director, count: int = 5) -> list[Call]:
    return machine.finished(only(machine.start()), written(count, Stop.SPAWN))


def end(machine: Director) -> tuple[Finish, int, bool]:
    """(why, rounds, with a final segment) of a response that is done."""
    assert machine.done
    return machine.response.finish, len(machine.response.forks), final_of(machine.response) is not None


# ---- the paper's algorithm, step by step ----


def test_the_director_continues_with_all_workers_read_between_its_tags():
    machine = director(prompt=[1, 2], budget=100)
    first = only(machine.start())
    assert (first.path, first.prompt, first.inserted, first.stops) == ((0, 0), [1, 2], [], ("<spawn_workers>",))
    workers = machine.finished(first, Completion([11, 12], [0.0, 0.0], Stop.SPAWN))
    opens = [list(ids) for ids in tags(3).worker_open]
    assert [call.path for call in workers] == [(0, 1), (0, 2), (0, 3)]
    assert [call.prompt for call in workers] == [[1, 2, 11, 12, *tag] for tag in opens]
    assert [call.inserted for call in workers] == opens
    assert [call.stops for call in workers] == [("</worker_1>",), ("</worker_2>",), ("</worker_3>",)]
    assert machine.finished(workers[2], Completion([33], [0.0], Stop.CLOSE)) == []
    assert machine.finished(workers[0], Completion([31], [0.0], Stop.CLOSE)) == []
    second = only(machine.finished(workers[1], Completion([32, 32], [0.0, 0.0], Stop.CLOSE)))
    read = [*opens[0], 31, *opens[1], 32, 32, *opens[2], 33]
    assert (second.path, second.prompt, second.inserted) == ((1, 0), [1, 2, 11, 12, *read, *CLOSE], list(CLOSE))
    assert not machine.done
    assert machine.finished(second, Completion([13, EOS], [-1.0, -2.0], Stop.EOS)) == []
    assert machine.done
    texts = [Segment(tag, ids, [0.0] * len(ids)) for tag, ids in zip(opens, ([31], [32, 32], [33]))]
    final = Segment(list(CLOSE), [13, EOS], [-1.0, -2.0])
    rounds = [Round(Segment([], [11, 12], [0.0, 0.0]), texts)]
    assert machine.response == flat([1, 2], rounds, final, Finish.ANSWERED)


def test_a_director_that_never_spawns_answers_alone():
    machine = director(budget=10)
    machine.finished(only(machine.start()), written(4, Stop.EOS))
    assert (*end(machine), machine.response.longest_path) == (Finish.ANSWERED, 0, True, 4)


def test_sequential_mode_is_one_call_without_a_stop():
    machine = director(budget=10, parallel=False)
    call = only(machine.start())
    assert (call.stops, call.max_tokens) == ((), 10)
    machine.finished(call, written(10, Stop.LENGTH))
    assert machine.response.finish is Finish.BUDGET


# ---- a fork while it is being written ----


def test_what_is_read_so_far_of_a_fork_begins_what_the_director_reads():
    machine = director(prompt=[1, 2], budget=1000)
    first, second, third = spawn(machine)
    assert machine.read_so_far(second, [51, 52]) == [first.prompt[:-3]]  # the first worker is not finished
    machine.finished(third, written(6, Stop.CLOSE))
    machine.finished(first, written(4, Stop.CLOSE))
    early = machine.read_so_far(second, [51, 52])
    assert [len(text) for text in early] == [len(first.prompt) - 3, 3 + 4, 3 + 2]
    ended = Completion([51, 52, 53], [-0.1] * 3, Stop.CLOSE)
    [join] = machine.finished(second, ended)
    assert join.prompt[: sum(map(len, early))] == [token for text in early for token in text]
    assert machine.read_so_far(second, []) == []
    assert machine.read_so_far(join, []) == []


def test_a_worker_is_overdue_when_it_is_the_last_and_so_many_times_longer():
    machine = director(budget=1000)
    first, second, third = spawn(machine)
    machine.finished(first, written(17, Stop.CLOSE))  # with its tag of three 20 tokens
    assert not machine.overdue(third, 500, 2.0)
    machine.finished(second, written(7, Stop.CLOSE))
    assert not machine.overdue(third, 37, 2.0)
    assert machine.overdue(third, 38, 2.0)


def test_the_only_worker_of_a_fork_and_the_director_are_never_overdue():
    machine = director(workers=1, budget=1000)
    assert not machine.overdue(only(machine.start()), 900, 1.1)
    assert not machine.overdue(only(spawn(machine)), 900, 1.1)


# ---- the budget ----


def test_tags_are_charged_to_the_budget_and_room_to_close_is_reserved():
    machine = director(budget=100)
    assert only(machine.start()).max_tokens == 100
    workers = machine.finished(machine.start()[0], written(40, Stop.SPAWN))
    assert [call.max_tokens for call in workers] == [100 - 40 - 3 - (2 + 1)] * 3
    for call, count in zip(workers, (5, 20, 10)):
        following = machine.finished(call, written(count, Stop.CLOSE))
    assert only(following).max_tokens == 100 - 40 - (3 + 20) - 2


def test_a_worker_that_closes_with_its_last_token_is_still_read():
    machine = director(budget=30)
    workers = spawn(machine, 10)
    following = []
    for call in workers:
        following = machine.finished(call, written(call.max_tokens, Stop.CLOSE))
    last = only(following)
    assert last.max_tokens == 1
    machine.finished(last, written(1, Stop.LENGTH))
    assert (machine.response.longest_path, machine.response.finish) == (30, Finish.BUDGET)


def test_a_worker_that_writes_eos_keeps_it_and_no_closing_tag_is_forced():
    machine = director(budget=100)
    workers = spawn(machine)
    machine.finished(workers[0], Completion([21, EOS], [0.0, 0.0], Stop.EOS))
    machine.finished(workers[1], written(3, Stop.CLOSE))
    call = only(machine.finished(workers[2], written(3, Stop.CLOSE)))
    assert rounds_of(machine.response)[0].workers[0].sampled == [21, EOS]
    opening, second = tags(3).worker_open[:2]
    assert call.prompt[3 + 5 :][: 3 + 2 + 3] == [*opening, 21, EOS, *second]


def test_a_worker_that_uses_up_the_budget_ends_the_response_after_its_round():
    machine = director(budget=100)
    workers = spawn(machine)
    assert machine.finished(workers[1], written(workers[1].max_tokens, Stop.LENGTH)) == []
    assert not machine.done  # the others are still writing
    machine.finished(workers[0], written(3, Stop.CLOSE))
    assert machine.finished(workers[2], written(4, Stop.CLOSE)) == []
    assert end(machine) == (Finish.BUDGET, 1, False)
    assert [len(w.sampled) for w in rounds_of(machine.response)[0].workers] == [3, workers[1].max_tokens, 4]


@pytest.mark.parametrize(("left", "spawns"), [(7, True), (6, False), (1, False), (0, False)])
def test_a_director_that_spawns_with_too_little_left_ends_with_its_own_text(left, spawns):
    """A worker needs its opening tag (3) and a token, and after it </spawn_workers> (2) and a token must fit."""
    machine = director(budget=20 + left)
    calls = spawn(machine, 20)
    assert len(calls) == (3 if spawns else 0)
    if not spawns:
        assert (*end(machine), len(final_of(machine.response).sampled)) == (Finish.BUDGET, 0, True, 20)


def test_an_overshooting_stop_keeps_its_ids_and_is_charged():
    machine = director(budget=100)
    call = only(machine.start())
    # 99: the end of the tag and some more
    workers = machine.finished(call, Completion([11, 12, 99], [0.0] * 3, Stop.SPAWN))
    assert workers[0].prompt == [*call.prompt, 11, 12, 99, *tags(3).worker_open[0]]
    assert workers[0].max_tokens == 100 - 3 - 3 - 3


def test_the_round_after_the_last_allowed_one_ends_the_response():
    machine = director(budget=1000, max_rounds=1)
    following = []
    for call in spawn(machine):
        following = machine.finished(call, written(4, Stop.CLOSE))
    assert machine.finished(only(following), written(6, Stop.SPAWN)) == []
    assert (*end(machine), len(final_of(machine.response).sampled)) == (Finish.MAX_ROUNDS, 1, True, 6)
    machine = director(budget=1000, max_rounds=0)
    assert spawn(machine) == []
    assert end(machine) == (Finish.MAX_ROUNDS, 0, True)


# ---- the model's context ----


@pytest.mark.parametrize(("budget", "finish"), [(100, Finish.CONTEXT), (20, Finish.BUDGET)])
def test_a_director_stops_where_the_context_ends_and_the_budget_goes_first(budget, finish):
    machine = director(prompt=[1] * 10, budget=budget, context=30)
    call = only(machine.start())
    assert call.max_tokens == 20
    machine.finished(call, written(20, Stop.LENGTH))
    assert end(machine) == (finish, 0, True)


def test_a_worker_cut_by_the_context_ends_the_response():
    machine = director(prompt=[1] * 10, budget=100, context=40)
    workers = spawn(machine, 10)
    assert [call.max_tokens for call in workers] == [40 - 10 - 10 - 3] * 3
    for call in workers:
        machine.finished(call, written(call.max_tokens, Stop.LENGTH))
    assert end(machine) == (Finish.CONTEXT, 1, False)


def test_workers_that_together_fill_the_context_are_not_read():
    machine = director(prompt=[1] * 10, budget=100, context=60)
    for call in spawn(machine, 10):  # 20 in, then three times 3 + 10 leaves 1: too little for </spawn_workers>
        following = machine.finished(call, written(10, Stop.CLOSE))
    assert following == []
    assert end(machine) == (Finish.CONTEXT, 1, False)


def test_a_director_that_spawns_at_the_end_of_the_context_ends_with_its_own_text():
    machine = director(prompt=[1] * 10, budget=100, context=23)
    assert spawn(machine, 10) == []
    assert end(machine) == (Finish.CONTEXT, 0, True)


def test_a_prompt_that_fills_the_context_is_refused():
    with pytest.raises(ValueError, match=r"prompt has 1,200 tokens; engine.context is 1,200"):
        director(prompt=[1] * 1200, context=1200)


# ---- other limits: how many workers, how deep ----


@pytest.mark.parametrize(("listed", "started"), [(1, 0), (2, 2), (4, 4), (5, 0), (0, 0)])
def test_as_many_workers_start_as_tasks_were_listed_and_none_outside_the_range(listed, started):
    machine = director(budget=100, workers=[2, 4])
    calls = machine.finished(only(machine.start()), written(6, Stop.SPAWN, TASKS + listed))
    assert [call.path for call in calls] == [(0, i) for i in range(1, started + 1)]
    if not started:
        assert end(machine) == (Finish.WIDTH, 0, True)


def test_only_the_tasks_of_the_last_segment_count():
    machine = director(budget=200, workers=[1, 4])
    for call in machine.finished(only(machine.start()), written(6, Stop.SPAWN, TASKS + 4)):
        following = machine.finished(call, written(3, Stop.CLOSE))
    assert len(machine.finished(only(following), written(6, Stop.SPAWN, TASKS + 2))) == 2


def test_a_worker_that_spawns_reads_its_workers_before_the_director_reads_it():
    machine = director(prompt=[1, 2], budget=200, workers=2, depth=2, closing=4)
    one, two = tags(2).worker_open
    first = only(machine.start())
    assert first.stops == ("<spawn_workers>",)
    calls = machine.finished(first, Completion([11], [0.0], Stop.SPAWN))
    assert [call.stops for call in calls] == [(f"</worker_{i}>", "<spawn_workers>") for i in (1, 2)]
    inner = machine.finished(calls[0], Completion([12], [0.0], Stop.SPAWN))
    assert [call.path for call in inner] == [(0, 1, 0, 1), (0, 1, 0, 2)]
    assert [call.thread for call in inner] == [(0, 1, 0, 1), (0, 1, 0, 2)]
    assert [call.prompt for call in inner] == [[1, 2, 11, *one, 12, *tag] for tag in (one, two)]
    assert [call.stops for call in inner] == [("</worker_1>",), ("</worker_2>",)]
    # 200 − 1 − (2 + 1) of the director, − 3 − 1 − (2 + 4) of the worker, − 3 of the tag
    assert [call.max_tokens for call in inner] == [200 - 1 - 3 - 4 - 6 - 3] * 2
    assert machine.finished(inner[1], Completion([22], [0.0], Stop.CLOSE)) == []
    assert machine.finished(calls[1], Completion([14], [0.0], Stop.CLOSE)) == []
    after = only(machine.finished(inner[0], Completion([21, 21], [0.0] * 2, Stop.CLOSE)))
    nested = [*one, 12, *one, 21, 21, *two, 22, *CLOSE]
    assert (after.path, after.thread, after.prompt) == ((0, 1, 1, 0), (0, 1), [1, 2, 11, *nested])
    assert after.max_tokens == 200 - 1 - 3 - (3 + 1) - (3 + 2) - 2
    last = only(machine.finished(after, Completion([13], [0.0], Stop.CLOSE)))
    assert (last.path, last.prompt) == ((1, 0), [1, 2, 11, *nested, 13, *two, 14, *CLOSE])
    machine.finished(last, Completion([15, EOS], [0.0] * 2, Stop.EOS))
    # director 1, worker 1: 3 + 1, its longer worker 3 + 2, then 2 + 1, director 2 + 2
    assert (machine.response.longest_path, machine.response.finish) == (1 + 4 + 5 + 3 + 4, Finish.ANSWERED)
    assert machine.response.as_read == [11, *nested, 13, *two, 14, *CLOSE, 15, EOS]


def test_a_worker_of_a_worker_that_closes_with_its_last_token_is_read_by_every_level():
    machine = director(budget=40, workers=1, depth=2, tag_length=1, closing=3)
    [worker] = machine.finished(only(machine.start()), written(5, Stop.SPAWN))
    [inner] = machine.finished(worker, written(6, Stop.SPAWN))
    after = only(machine.finished(inner, written(inner.max_tokens, Stop.CLOSE)))
    assert after.max_tokens == 3  # </worker_1>
    last = only(machine.finished(after, written(3, Stop.CLOSE)))
    assert last.max_tokens == 1
    machine.finished(last, written(1, Stop.LENGTH))
    assert machine.response.longest_path == 40


def test_what_cuts_a_worker_of_a_worker_ends_the_response_once_all_others_have_finished():
    machine = director(budget=60, workers=2, depth=2)
    one, two = machine.finished(only(machine.start()), written(5, Stop.SPAWN))
    inner = machine.finished(one, written(4, Stop.SPAWN))
    machine.finished(inner[0], written(inner[0].max_tokens, Stop.LENGTH))
    assert machine.finished(inner[1], written(2, Stop.CLOSE)) == [] and not machine.done
    assert machine.finished(two, written(2, Stop.CLOSE)) == []
    assert end(machine) == (Finish.BUDGET, 1, False)
    [[cut, whole]] = machine.response.forks
    assert (len(cut.trunk), len(cut.forks), len(whole.trunk), whole.forks) == (1, 1, 1, [])


def test_workers_of_a_worker_share_what_it_has_left_of_all_tokens():
    """48 for three as below, 16 + 3 each; of those 3 + 4 written, 9 for tags, 3 to close: 0 for three."""
    machine = director(budget=90, total_tokens=100, depth=2)
    workers = machine.finished(only(machine.start()), written(40, Stop.SPAWN))
    assert machine.finished(workers[0], written(4, Stop.SPAWN)) == []
    machine = director(budget=190, total_tokens=200, depth=2)
    workers = machine.finished(only(machine.start()), written(40, Stop.SPAWN))
    assert {call.max_tokens for call in workers} == {(200 - 40 - 9 - 3) // 3}
    inner = machine.finished(workers[0], written(4, Stop.SPAWN))
    assert {call.max_tokens for call in inner} == {(49 - 4 - 9 - 3) // 3}


# ---- properties over random responses ----


@dataclass
class Asked:
    """One call as the sampler saw it, with what it wrote."""

    call: Call
    ids: list[int]
    stop: Stop


def adversarial(rng: random.Random, call: Call) -> Completion:
    """Stops everywhere, and most often where limits are: at the first token, at the last one, and just before it."""
    most = call.max_tokens
    assert most >= 1
    count = min(rng.choice([1, 2, rng.randint(1, most), most - 1, most]) or 1, most)
    stops = [Stop.EOS] + [Stop.LENGTH] * (count == most)
    for tag in call.stops:
        stops += [Stop.SPAWN if tag == "<spawn_workers>" else Stop.CLOSE] * 4
    stop = rng.choice(stops)
    ids = [rng.randrange(1, 100) for _ in range(count)]
    ids[-1] = EOS if stop is Stop.EOS else TASKS + rng.choice([0, 1, 2, 3, 8, 9, *range(1, 9)])
    return Completion(ids, [-rng.random() for _ in ids], stop)


def drawn(rng: random.Random, depth: int = 1) -> tuple[Director, list[Asked]]:
    machine = director(
        prompt=[5] * rng.randint(1, 9),
        workers=rng.choice([rng.randint(1, 5), [rng.randint(1, 3), rng.randint(3, 8)]])
        if depth > 1
        else rng.randint(1, 5),
        depth=depth,
        closing=rng.randint(1, 5),
        tag_length=rng.randint(1, 7),
        budget=rng.choice([rng.randint(1, 12), rng.randint(1, 60), rng.randint(1, 400)]),
        context=rng.choice([NO_LIMIT, rng.randint(10, 300)]),
        max_rounds=rng.choice([None, None, 0, 1, 2]),
        total_tokens=rng.choice([None, None, rng.randint(1, 60), rng.randint(1, 400)]),
        parallel=rng.random() < 0.95,
    )
    asked, running = [], machine.start()
    while running:
        call = running.pop(rng.randrange(len(running)))  # calls finish in any order
        completion = adversarial(rng, call)
        asked.append(Asked(call, completion.ids, completion.stop))
        running += machine.finished(call, completion)
    return machine, asked


def longest_path_of(asked: list[Asked]) -> int:
    """A thread's calls one after another, of each fork's threads the longest; from the paths of the calls alone."""
    paths: dict[tuple[int, ...], int] = {}  # of every thread, with all that it spawned
    for one in asked:
        thread = one.call.path[:-2] if one.call.path[-1] == 0 else one.call.path
        paths[thread] = paths.get(thread, 0) + len(one.call.inserted) + len(one.ids)
    for depth in sorted({len(thread) for thread in paths if thread}, reverse=True):
        forks: dict[tuple[int, ...], int] = {}
        for thread in [thread for thread in paths if len(thread) == depth]:
            forks[thread[:-1]] = max(forks.get(thread[:-1], 0), paths.pop(thread))
        for fork, longest in forks.items():
            paths[fork[:-1]] += longest
    return paths[()]


def test_longest_path_and_total_tokens_never_exceed_their_limits_in_ten_thousand_random_responses():
    met, reached, rounds = set(), 0, set()
    for number in range(10_000):
        machine, asked = drawn(random.Random(number))
        response, config = machine.response, machine.config
        assert machine.done, number
        assert longest_path_of(asked) == response.longest_path <= config.budget, number
        assert all(len(one.call.prompt) + len(one.ids) <= machine.context for one in asked), number
        met.add((response.finish, final_of(response) is None, min(len(response.forks), 2)))
        total = sum(len(one.call.inserted) + len(one.ids) for one in asked)
        assert total == response.total_tokens, number
        if config.total_tokens is not None:
            assert total <= config.total_tokens, number
            reached += total == config.total_tokens
            rounds.add(min(len(response.forks), 2))
    assert {finish for finish, _, _ in met} == set(Finish) - {Finish.WIDTH}  # one level, a fixed number
    assert len(met) >= 10  # the draw reaches every end, with and without a final part, after none, one and more rounds
    assert reached > 100 and rounds == {0, 1, 2}


def test_workers_share_what_is_left_of_all_tokens():
    """100 − 40 of the director − 3 tags of 3 − room for </spawn_workers> (2) and a token: 48 for three."""
    machine = director(budget=90, total_tokens=100)
    workers = machine.finished(only(machine.start()), written(40, Stop.SPAWN))
    assert [call.max_tokens for call in workers] == [16] * 3
    for call in workers:
        following = machine.finished(call, written(16, Stop.CLOSE))
    assert only(following).max_tokens == 100 - 40 - 3 * (3 + 16) - 2


def closed_or_accounted_for(machine: Director, asked: list[Asked], stops: dict[tuple[int, ...], Stop]) -> None:
    """What was sampled is in the tree, at its place; an answered response has read every thread, and any other one was
    cut where a thread ran out, or spawned where it must not.
    """
    kept: dict[tuple[int, ...], list[int]] = {}

    def walk(thread: Thread[Segment], path: tuple[int, ...]) -> bool:
        """Whether it, and all that it spawned, came to its end by itself."""
        assert len(thread.trunk) - len(thread.forks) in (0, 1) and thread.trunk
        for number, segment in enumerate(thread.trunk):
            kept[path if path and not number else (*path, number, 0)] = segment.sampled
        inner = [walk(t, (*path, n, i)) for n, fork in enumerate(thread.forks) for i, t in enumerate(fork, start=1)]
        last = path if path and len(thread.trunk) == 1 else (*path, len(thread.trunk) - 1, 0)
        ends = (Stop.EOS, Stop.CLOSE)
        return all(inner) and len(thread.trunk) > len(thread.forks) and stops[last] in ends

    whole = walk(machine.response, ())
    assert kept == {one.call.path: one.ids for one in asked}
    assert whole == (machine.response.finish is Finish.ANSWERED)


def test_the_budget_holds_and_every_thread_is_accounted_for_in_twenty_thousand_runs_three_levels_deep():
    depths, widths, finishes = set(), set(), set()
    for number in range(20_000):
        machine, asked = drawn(random.Random(f"deep {number}"), depth=3)
        stops = {one.call.path: one.stop for one in asked}
        response, config = machine.response, machine.config
        assert machine.done, number
        assert longest_path_of(asked) == response.longest_path <= config.budget, number
        assert all(len(one.call.prompt) + len(one.ids) <= machine.context for one in asked), number
        assert response.total_tokens <= (config.total_tokens or NO_LIMIT), number
        closed_or_accounted_for(machine, asked, stops)
        depths.add(response.depth)
        widths |= {len(fork) for fork in response.all_forks()}
        finishes.add(response.finish)
    assert (depths, widths, finishes) == ({0, 1, 2, 3}, set(range(1, 9)), set(Finish))


def test_every_call_reads_what_algorithm_1_says_and_every_sampled_id_is_kept():
    for number in range(2_000):
        machine, asked = drawn(random.Random(number))
        response, names = machine.response, machine.tags
        by_path = {one.call.path: one for one in asked}
        assert len(by_path) == len(asked), number
        context, kept = list(response.prompt), []
        for index, round_ in enumerate(rounds_of(response)):
            director_call = by_path[index, 0]
            assert director_call.call.prompt == context + round_.director.inserted, number
            assert round_.director.inserted == (list(CLOSE) if index else []), number
            context += round_.director.tokens
            assert len(round_.workers) == names.workers, number
            for i, worker in enumerate(round_.workers, start=1):
                assert worker.inserted == list(names.worker_open[i - 1]), number
                assert by_path[index, i].call.prompt == context + worker.inserted, number
            context += [token for worker in round_.workers for token in worker.tokens]
            kept += [((index, 0), round_.director), *(((index, i), w) for i, w in enumerate(round_.workers, start=1))]
        if final_of(response) is not None:
            last = len(response.forks)
            assert by_path[last, 0].call.prompt == context + final_of(response).inserted, number
            kept.append(((last, 0), final_of(response)))
        assert {path: segment.sampled for path, segment in kept} == {p: one.ids for p, one in by_path.items()}, number


@pytest.mark.parametrize(
    ("name", "value"),
    [*dict.fromkeys(("workers", "depth", "budget", "total_tokens", "top_p"), 0).items(), ("max_rounds", -1)]
    + [("temperature", -0.1), ("top_p", 1.5), ("workers", [0, 3]), ("workers", [3, 2]), ("workers", True)],
)
def test_impossible_settings_are_refused_by_name(name, value):
    with pytest.raises(ConfigError, match=re.escape(f"rollout.{name} is {value}")):
        check(RolloutConfig(**{name: value}), "rollout")
