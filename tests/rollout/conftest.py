"""One engine per kind of tokenizer for the whole session: starting one takes 15 s, the second in the same process a
second.

Engines in one process share vLLM's process groups, and the one that made them takes them with it when it is shut down.
So no test shuts one down; the tests of that run in processes of their own.
"""

from pathlib import Path

import pytest

from dccot.lab.worlds import bigram as tiny
from dccot.rollout.engine import EngineConfig

KINDS = ("single", "spelled")
CONTEXT = 512


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory) -> dict[str, Path]:
    return {kind: tiny.save(tmp_path_factory.mktemp("tiny") / kind, kind, context=CONTEXT) for kind in KINDS}


@pytest.fixture(scope="session")
def build_engine():
    from dccot.rollout.vllm_engine import VllmEngine

    def build(folder: Path, kv_cache_gb: float = 0.125, **settings) -> VllmEngine:
        return VllmEngine(folder, EngineConfig(dtype="float32", kv_cache_gb=kv_cache_gb, **settings))

    return build


@pytest.fixture(scope="session")
def engines(checkpoints, build_engine) -> dict:
    return {kind: build_engine(checkpoints[kind]) for kind in KINDS}


@pytest.fixture(params=KINDS)
def kind(request) -> str:
    return request.param


@pytest.fixture
def engine(engines, kind):
    """An engine with nothing running and nothing cached."""
    engine = engines[kind]
    engine.abort(list(engine.pending))
    engine.forget_prefixes()
    return engine
