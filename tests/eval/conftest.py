"""Shared by the tests of this room: a model whose answers are sometimes right, one engine on it, a browser."""

from __future__ import annotations

import json

import pytest

from dccot.lab.worlds import bigram as tiny
from dccot.rollout.engine import EngineConfig
from tests.support.browser import Browser

ENGINE = EngineConfig(dtype="float32", context=1024, max_sequences=16, kv_cache_gb=0.1)


@pytest.fixture(scope="session")
def speaker(tmp_path_factory):
    """An untrained model that spawns workers and writes the digits 1 and 2, so that some of its answers are right."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny, "LETTERS", "12" + tiny.SPACE)
        chances = tiny.Chances(spawn=1 / 40, close=1 / 12, eos=1 / 24)
        return tiny.save(tmp_path_factory.mktemp("models") / "speaker", chances=chances, context=1024)


@pytest.fixture(scope="session")
def speaker_engine(speaker):
    from dccot.rollout.vllm_engine import VllmEngine

    engine = VllmEngine(speaker, ENGINE)
    yield engine
    engine.shutdown()


@pytest.fixture(scope="session")
def sums(tmp_path_factory):
    """A file of six problems that the speaker answers rightly now and then."""
    file = tmp_path_factory.mktemp("problems") / "sums.jsonl"
    rows = [
        {"id": f"p{i}", "question": f"What is {i} + {i}?", "gold": ["1", "2", "12", "21"] if i % 2 else ["1", "22"]}
        for i in range(6)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.fixture(scope="session")
def chromium():
    opened = Browser()
    yield opened
    opened.close()
