"""The stream shows every problem once per epoch, in an order that neither stopping nor the number of ranks can
change.
"""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dccot.core.files import BadData
from dccot.data.problems import Problem, ProblemStream


def problems(count: int) -> list[Problem]:
    return [Problem(str(i), f"q{i}", "0") for i in range(count)]


def draw(stream: ProblemStream, batches: int) -> list[str]:
    return [p.id for _ in range(batches) for p in stream.next_batch()]


@given(count=st.integers(1, 30), batch=st.integers(1, 12), seed=st.integers(0, 99))
def test_every_epoch_is_a_permutation(count, batch, seed):
    seen = draw(ProblemStream(problems(count), seed, batch), 3 * count)
    for start in range(0, 3 * count * batch - count + 1, count):
        assert sorted(map(int, seen[start : start + count])) == list(range(count))


@given(count=st.integers(1, 30), batch=st.integers(1, 12), before=st.integers(0, 20), seed=st.integers(0, 99))
def test_restored_stream_goes_on_exactly(count, batch, before, seed):
    stream = ProblemStream(problems(count), seed, batch)
    draw(stream, before)
    state = json.loads(json.dumps(stream.state()))
    resumed = ProblemStream(problems(count), seed, batch)
    resumed.restore(state)
    assert draw(resumed, 10) == draw(stream, 10)


def test_seed_and_epoch_change_the_order():
    stream = ProblemStream(problems(50), 1, 50)
    first, second = draw(stream, 1), draw(stream, 1)
    other = draw(ProblemStream(problems(50), 2, 50), 1)
    assert len({tuple(first), tuple(second), tuple(other), tuple(map(str, range(50)))}) == 4


def test_order_does_not_depend_on_the_batch_size():
    assert draw(ProblemStream(problems(17), 3, 4), 15) == draw(ProblemStream(problems(17), 3, 6), 10)


def test_state_of_another_set_or_seed_is_refused():
    state = ProblemStream(problems(5), 1, 2).state()
    for other in (ProblemStream(problems(6), 1, 2), ProblemStream(problems(5), 2, 2)):
        with pytest.raises(BadData, match="resume with the same problem file and seed"):
            other.restore(state)


def test_order_is_the_same_in_every_process():
    # random.Random("0/0").shuffle(list(range(10))): an old checkpoint must find the same order
    assert draw(ProblemStream(problems(10), 0, 10), 1) == list("1024938675")


def test_state_of_the_same_ids_with_other_content_is_refused():
    state = ProblemStream(problems(5), 1, 2).state()
    changed = [*problems(4), replace(problems(5)[4], gold="another answer")]
    with pytest.raises(BadData, match=r"belongs to content .*; resume with the same problem file and seed"):
        ProblemStream(changed, 1, 2).restore(state)
    # an older checkpoint
    ProblemStream(problems(5), 1, 2).restore({key: value for key, value in state.items() if key != "content"})
