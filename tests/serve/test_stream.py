"""Lanes and channels, however the text is cut: the same reasoning, the same answer."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dccot.rollout.response import Segment
from dccot.serve.stream import Channels, Piece, ReadingOrder, answer_tokens
from tests.support.rounds import Round, flat

TEXTS = st.lists(
    st.sampled_from(
        ["</think>", "<think>", "<answer>", "</answer>", "</thi", "<", "a", "b b", " ", "\n\n", "STOP", "ST"]
    ),
    max_size=12,
).map("".join)


def whole(text: str, stop: tuple[str, ...] = ()) -> tuple[str, str, str | None]:
    """Oracle: (reasoning, content, stopped) of a director's whole text."""
    opened = text.lstrip()
    text = opened.removeprefix("<think>").lstrip("\n") if opened.startswith("<think>") else text
    reasoning, closed, answer = text.partition("</think>")
    content, rest = "", answer
    while closed and rest:
        if not content.strip():
            content, rest = "", rest.lstrip()
        for marker in ("<answer>", "</answer>", *stop):
            if rest.startswith(marker):
                if marker in stop:
                    return reasoning, content.rstrip(), marker
                rest = rest[len(marker) :]
                break
        else:
            content, rest = content + rest[:1], rest[1:]
    return reasoning, content.rstrip(), None


def pieces(text: str, cuts: random.Random) -> list[Piece]:
    parts, at = [], 0
    while at < len(text):
        size = cuts.randint(1, 5)
        parts.append(text[at : at + size])
        at += size
    return [Piece((0, 0), part, [0]) for part in parts] + [Piece((0, 0), "", [0], ())]


@settings(max_examples=300)
@given(TEXTS, st.randoms(use_true_random=False), st.sampled_from([(), ("STOP",), ("\n\n",), ("b", "STOP")]))
def test_the_channels_do_not_depend_on_where_the_text_is_cut(text, cuts, stop):
    channels = Channels(stop)
    told = [channels.take(piece) for piece in pieces(text, cuts)]
    assert ("".join(r for r, _ in told), "".join(c for _, c in told), channels.stopped) == whole(text, stop)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("so 7</think>\n\n<answer> 7 </answer>", ("so 7", "7", None)),
        ("<think>\nso 7</think>7", ("so 7", "7", None)),
        ("never closed", ("never closed", "", None)),
        ("a</think>\n\nfirst\n\nsecond", ("a", "first", "\n\n")),
    ],
)
def test_reasoning_and_answer_worked_out_by_hand(text, expected):
    stop = ("\n\n",) if expected[2] else ()
    channels = Channels(stop)
    told = channels.take(Piece((0, 0), text, [1], ()))
    assert (*told, channels.stopped) == expected


def test_a_worker_that_closes_think_does_not_begin_the_answer():
    channels = Channels()
    assert channels.take(Piece((0, 1), "x</think>y", [1], ())) == ("x</think>y", "")
    assert channels.take(Piece((1, 0), "z", [1], ())) == ("z", "")


@given(st.permutations([worker for worker in (1, 2, 3) for _ in range(4)]), st.integers(0, 3))
def test_however_workers_take_turns_they_are_read_one_after_another(turns, rounds):
    order, read, expected = ReadingOrder(), [], []
    for round_ in range(rounds + 1):
        director = Piece((round_, 0), f"d{round_}", [0], tuple((round_, worker) for worker in (1, 2, 3)))
        read += order.take(director)
        counts = dict.fromkeys((1, 2, 3), 0)
        for worker in turns:
            counts[worker] += 1
            joined = ((round_ + 1, 0),) if sum(counts.values()) == 12 else ()
            following = joined if counts[worker] == 4 else None
            read += order.take(Piece((round_, worker), f"{round_}.{worker}.{counts[worker]}", [0], following))
        expected += [f"d{round_}"] + [f"{round_}.{worker}.{part}" for worker in (1, 2, 3) for part in range(1, 5)]
    assert [piece.text for piece in read] == expected


def test_a_worker_is_read_with_all_its_workers_before_the_next_one():
    """The second worker finishes first; the first one spawns two, of which the second finishes first."""
    order, read = ReadingOrder(), []
    for path, text, following in [
        ((0, 0), "a", ((0, 1), (0, 2))),
        ((0, 2), "g", ()),
        ((0, 1), "b", ((0, 1, 0, 1), (0, 1, 0, 2))),
        ((0, 1, 0, 2), "e", ()),
        ((0, 1, 0, 1), "c", None),
        ((0, 1, 0, 1), "d", ((0, 1, 1, 0),)),
        ((0, 1, 1, 0), "f", ((1, 0),)),
        ((1, 0), "h", ()),
    ]:
        read.append("".join(piece.text for piece in order.take(Piece(path, text, [0], following))))
    assert read == ["a", "", "b", "", "c", "de", "fg", "h"]


def test_answer_tokens_are_those_after_the_token_that_completes_think():
    spelled = {1: "so ", 2: "</th", 3: "ink>", 4: "7", 5: "!"}

    def decode(ids):
        return "".join(spelled[token] for token in ids)

    worker = Segment([], [2, 3, 4])
    response = flat([], [Round(Segment([], [1, 1]), [worker])], Segment([9], [1, 2, 3, 4, 5]))
    assert answer_tokens(response, decode) == 2
    response = flat([], [Round(Segment([], [2, 3, 4]), [worker])], Segment([9], [1, 4]))
    assert answer_tokens(response, decode) == 3
    assert answer_tokens(flat([], [], Segment([], [1, 2])), decode) == 0
