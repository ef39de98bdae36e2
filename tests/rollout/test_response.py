"""Lengths of a response worked out by hand, and nothing lost on the way through JSON."""

import json
import pickle
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dccot.lab.worlds import bigram as tiny
from dccot.rollout.response import Finish, Response, Rollout, Segment
from dccot.rollout.thread import Thread
from tests.support.rounds import Round, final_of, flat, rounds_of

ids = st.lists(st.integers(0, 2**31), max_size=6)
floats = st.floats(allow_nan=False, allow_infinity=False, max_value=0)


@st.composite
def segments(draw):
    sampled = draw(ids)
    one_each = {"min_size": len(sampled), "max_size": len(sampled)}
    versions = st.just([]) | st.lists(st.integers(0, 9), **one_each)
    return Segment(draw(ids), sampled, draw(st.lists(floats, **one_each)), draw(versions))


def trees(thread: st.SearchStrategy[Thread]) -> st.SearchStrategy[Thread]:
    """Threads that fork up to twice into the given ones; the last fork may not have been read."""
    forks = st.lists(st.lists(thread, min_size=1, max_size=4), max_size=2)
    trunk = lambda forks: st.lists(segments(), min_size=max(1, len(forks)), max_size=len(forks) + 1)
    return forks.flatmap(lambda forks: st.builds(Thread, trunk(forks), st.just(forks)))


threads = st.recursive(st.builds(Thread, st.lists(segments(), min_size=1, max_size=1)), trees, max_leaves=4)
responses = st.builds(
    lambda thread, prompt, finish: Response(thread.trunk, thread.forks, prompt=prompt, finish=finish),
    *(threads, ids, st.sampled_from(Finish)),
)
text, gold, maybe = st.text(), st.text() | st.lists(st.text()), st.none() | st.text()
step = st.none() | st.integers(0, 9)
rollouts = st.builds(Rollout, text, st.integers(0, 200), text, gold, text, responses, maybe, maybe, step)


def segment(inserted: int, sampled: int) -> Segment:
    return Segment([1] * inserted, [2] * sampled, [-0.5] * sampled)


def test_lengths_worked_out_by_hand():
    """The longest path takes each round's longest worker; total tokens all workers and tags, not the prompt."""
    first = Round(segment(0, 10), [segment(2, 5), segment(2, 9), segment(2, 1)])
    second = Round(segment(3, 4), [segment(2, 2), segment(2, 2), segment(2, 3)])
    response = flat([0] * 100, [first, second], segment(3, 7))
    assert response.longest_path == 10 + (2 + 9) + (3 + 4) + (2 + 3) + (3 + 7)
    assert response.total_tokens == 10 + 7 + 11 + 3 + 7 + 4 + 4 + 5 + 10
    assert response.sampled_tokens == 10 + 5 + 9 + 1 + 4 + 2 + 2 + 3 + 7
    assert response.parallelism == 61 / 43
    assert response.worker_lengths == [[7, 11, 3], [4, 4, 5]]
    alone = flat([0], final=segment(0, 8))
    assert (alone.longest_path, alone.total_tokens, alone.parallelism, alone.worker_lengths) == (8, 8, 1.0, [])
    cut = flat([0], [Round(segment(0, 3), [segment(1, 4), segment(1, 6)])], None, Finish.BUDGET)
    assert (cut.longest_path, cut.total_tokens) == (3 + 7, 3 + 5 + 7)


@pytest.mark.parametrize("tags", ["spelled", "single"])
@pytest.mark.parametrize("end", [tiny.EOS, tiny.USER])
def test_the_text_reads_in_order_with_tags_and_without_what_ended_its_segments(tags, end):
    """A chat model may end its text with a special token that is not the tokenizer's EOS."""
    words = tiny.tokenizer(tags)

    def write(inserted: str, sampled: str) -> Segment:
        return Segment(words.encode(inserted), words.encode(sampled))

    workers = [write("<worker_1>", "b</worker_1>\n"), write("<worker_2>", f"c{end}")]
    response = flat([1, 2], [Round(write("", "a <spawn_workers>"), workers)], write("</spawn_workers>", f"d{end}"))
    assert response.text(words) == "a <spawn_workers><worker_1>b</worker_1>\n<worker_2>c</spawn_workers>d"


@given(rollouts)
@settings(max_examples=40)
def test_json_loses_nothing_and_says_how_long_each_part_was(rollout):
    row, response = json.loads(json.dumps(rollout.to_json())), rollout.response
    assert Rollout.from_json(row) == rollout
    lengths = {"longest_path": response.longest_path, "total_tokens": response.total_tokens}
    assert row["lengths"] == lengths | {"workers": response.worker_lengths}


def test_a_file_written_before_responses_were_trees_reads_the_same():
    """Three responses as they were written then: without workers, read by the director, cut among the workers."""
    file = Path(__file__).parents[1] / "support" / "rollouts_of_rounds.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(len(row["response"]["rounds"]), row["response"]["final"] is None) for row in rows] == [
        (0, False),
        (1, False),
        (1, True),
    ]
    for row in rows:
        read, was = Rollout.from_json(row), row["response"]
        response = read.response
        assert read.to_json()["lengths"] == row["lengths"]
        assert (response.prompt, response.finish.value) == (was["prompt"], was["finish"])
        assert [(each.director.to_json(), [w.to_json() for w in each.workers]) for each in rounds_of(response)] == [
            (each["director"], each["workers"]) for each in was["rounds"]
        ]
        final = final_of(response)
        assert (final and final.to_json()) == was["final"]
        assert Rollout.from_json(json.loads(json.dumps(read.to_json()))) == read


@given(responses, responses)
def test_an_outline_has_every_length_of_its_response_and_tells_prompts_apart(response, other):
    outline = response.outline()
    facts = lambda r: (r.longest_path, r.total_tokens, r.sampled_tokens, r.worker_lengths, r.finish, len(r.prompt))
    assert facts(outline) == facts(response)
    assert (outline.prompt == other.outline().prompt) == (response.prompt == other.prompt)
    assert len(pickle.dumps(outline)) < 500 + 200 * sum(1 for _ in response.segments())


def test_versions_are_written_only_where_they_are_known_and_older_files_are_read():
    older = {"inserted": [1], "sampled": [2, 3], "logprobs": [-0.5, -1.0]}
    assert Segment(**older).to_json() == older
    assert Segment(**older, versions=[4, 5]).to_json() == older | {"versions": [4, 5]}


def test_what_forks_saved_worked_out_by_hand():
    """Two workers of 2 + 5 and 2 + 9, the second with workers of 2 + 3 and 2 + 3, after 3 for each closing tag."""
    inner = Thread([segment(2, 4), segment(3, 5)], [[Thread([segment(2, 3)]), Thread([segment(2, 3)])]])
    response = Response([segment(0, 10), segment(3, 7)], [[Thread([segment(2, 5)]), inner]])
    assert inner.path() == 6 + 5 + 8
    assert response.savings() == [5 + 17 - 19 - 3, 3 + 3 - 5 - 3]  # the inner fork cost more than it saved
    assert (response.depth, response.worker_lengths) == (2, [[7, 19], [5, 5]])
