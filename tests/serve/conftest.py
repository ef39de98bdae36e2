"""Two servers for the whole session, one per kind of tokenizer, and the in-process engine whose tokens theirs must be."""

from __future__ import annotations

import pytest

from dccot.bench import bigram as tiny
from dccot.rollout.settings import EngineConfig
from tests.support.servers import KEY, dccot_serve

KINDS = ("single", "spelled")
CONTEXT = 512
BUDGET = 160


@pytest.fixture(scope="session")
def models(tmp_path_factory) -> dict:
    """Untrained models that spawn; the one whose tags are single tokens answers, too."""
    chances = {"single": tiny.Chances(answer=1 / 40), "spelled": tiny.Chances()}
    return {kind: tiny.save(tmp_path_factory.mktemp("models") / kind, kind, chances[kind], context=CONTEXT) for kind in KINDS}


@pytest.fixture(scope="session")
def servers(models, tmp_path_factory):
    options = ("--budget", str(BUDGET), "--max-n", "4", "--max-requests", "8")
    started = {kind: dccot_serve(models[kind], tmp_path_factory.mktemp(f"server-{kind}"), *options) for kind in KINDS}
    try:
        yield {kind: server.ready() for kind, server in started.items()}
    finally:
        for server in started.values():
            server.stop()


@pytest.fixture(scope="session")
def engines(models) -> dict:
    from dccot.rollout.engine import VllmEngine

    return {kind: VllmEngine(models[kind], EngineConfig(dtype="float32", kv_cache_gb=0.125)) for kind in KINDS}


@pytest.fixture(params=KINDS)
def kind(request) -> str:
    return request.param


@pytest.fixture(scope="session")
def server(servers):
    """The server whose model also answers."""
    return servers["single"]


@pytest.fixture(scope="session")
def client(server):
    from openai import OpenAI

    return OpenAI(base_url=f"{server.address}/v1", api_key=KEY, max_retries=0)
