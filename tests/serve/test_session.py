"""A session on an engine that writes what the test tells it to: what no seed of a real engine can be relied on for."""

import asyncio
from types import SimpleNamespace

import pytest

from dccot.data.prompts import PromptConfig
from dccot.lab.worlds import bigram as tiny
from dccot.rollout.director import Director, RolloutConfig
from dccot.rollout.response import Finish, Segment
from dccot.serve.admission import Admission
from dccot.serve.chat import Job
from dccot.serve.session import Manner, Session, Vocabulary
from dccot.serve.stream import Channels, Piece


class Scripted:
    """Its first call writes a text in one piece, up to a tag."""

    def __init__(self, vocabulary: Vocabulary, text: str):
        self.vocabulary, self.text = vocabulary, text

    async def generate(self, prompt, params, name, priority):
        ids = self.vocabulary.tokenizer.encode(self.text, add_special_tokens=False)
        result = SimpleNamespace(
            text=self.text, token_ids=ids, logprobs=None, finish_reason="stop", stop_reason=ids[-1]
        )
        yield SimpleNamespace(outputs=[result], finished=True, metrics=None, num_cached_tokens=0)


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return Vocabulary(tiny.tokenizer("single"), 3)


def test_a_stop_text_in_the_piece_that_spawns_ends_the_response_without_workers(vocabulary):
    config, channels = RolloutConfig(budget=100), Channels(["STOP"])
    director = Director([1, 2], config, vocabulary.tags, 200)
    engine = Scripted(vocabulary, "so</think>7 STOP <spawn_workers>")
    session = Session(
        engine, director, config, vocabulary, "name", 1, 0, Admission(lambda running: False), Manner("eager", 0)
    )

    def hear(piece: Piece) -> bool:
        channels.take(piece)
        return channels.stopped is not None

    asyncio.run(session.run(hear))
    response = director.response
    assert channels.stopped == "STOP"
    assert (response.forks, response.finish) == ([], Finish.ANSWERED)


@pytest.mark.parametrize(("parallel", "flaw"), [(True, "no_spawn"), (False, None)])
def test_a_run_that_is_saved_says_whether_it_is_well_formed(vocabulary, parallel, flaw):
    director = Director([1, 2], RolloutConfig(), vocabulary.tags, 200, parallel)
    text = vocabulary.tokenizer.encode("so</think><answer>7</answer>", add_special_tokens=False)
    director.response.trunk.append(Segment([], text))
    job = SimpleNamespace(
        name="name",
        responses=[director.response],
        sessions=[SimpleNamespace(director=director, config=director.config)],
        request=SimpleNamespace(messages=[SimpleNamespace(content="how many")]),
        chat=SimpleNamespace(prompt=PromptConfig(), vocabulary=vocabulary),
    )
    assert Job.rollout(job, 0)["flaw"] == flaw
