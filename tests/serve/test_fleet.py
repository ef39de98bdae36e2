"""Two vLLM servers behind the Engine protocol: the tokens of the in-process engine, also when one of them is killed or
returns changed.

The servers are those of the session; the last tests of this file kill the second.
"""

import json
import os
import signal
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from dccot.core.config import ConfigError
from dccot.eval.evaluate import eval_config, evaluate
from dccot.eval.evaluate import main as eval_main
from dccot.eval.results import own_benchmark
from dccot.lab.worlds import bigram as tiny
from dccot.rollout import fleet as fleet_module
from dccot.rollout.director import RolloutConfig
from dccot.rollout.engine import EngineConfig, EngineStalled, open_engine
from dccot.rollout.generate import Request, Watch, generate
from dccot.rollout.response import Rollout
from dccot.rollouts import main as rollout_main
from tests.serve.conftest import CONTEXT
from tests.support.servers import KEY, eventually, vllm_serve

CONFIG = RolloutConfig(budget=160)


@pytest.fixture
def opened(model, monkeypatch):
    """addresses → a fleet of the servers there"""
    monkeypatch.setenv("VLLM_API_KEY", KEY)
    return lambda *urls, folder=model, **more: open_engine(folder, EngineConfig(url=list(urls), **more))


@pytest.fixture
def fleet(servers, opened):
    with opened(*(server.address for server in servers)) as engine:
        yield engine


def requests(engine, count: int) -> list[Request]:
    texts = [f"{tiny.BOS}{tiny.USER}{'abc ' * p}{tiny.ASSISTANT}<think>\n" for p in range(count)]
    return [Request(f"p{p}", 0, engine.tokenizer.encode(text)) for p, text in enumerate(texts)]


def tokens(responses) -> dict:
    return {request.problem: response.as_read for request, response in responses}


def refused(opened, match: str, *urls: str, **more) -> str:
    with pytest.raises(ConfigError, match=match) as error, opened(*urls, **more):
        pass
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_fleet_samples_the_tokens_and_logprobs_of_the_engine_in_this_process(fleet, engine):
    assert fleet.context == CONTEXT
    asked = requests(fleet, 12)
    expected = {r.problem: response for r, response in generate(engine, asked, CONFIG, seed=(1,))}
    found = {r.problem: response for r, response in generate(fleet, asked, CONFIG, seed=(1,))}
    assert {p: r.as_read for p, r in found.items()} == {p: r.as_read for p, r in expected.items()}
    for problem, response in found.items():
        for ours, theirs in zip(response.segments(), expected[problem].segments(), strict=True):
            assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-4)
        assert response.finish is expected[problem].finish


def test_all_calls_of_a_response_go_to_one_server_and_both_servers_work(fleet, servers):
    homes: dict[str, set] = {}

    class Where(Watch):
        def finished(self, request, call, completion) -> None:
            homes.setdefault(request.problem, set()).add(fleet._home[f"{request.problem}/0"].url)

    before = [server.metric("vllm:request_success_total") for server in servers]
    assert len(tokens(generate(fleet, requests(fleet, 8), CONFIG, seed=(2,), watch=Where()))) == 8
    assert all(len(urls) == 1 for urls in homes.values())
    after = [server.metric("vllm:request_success_total") for server in servers]
    assert all(now > then for now, then in zip(after, before))


def test_servers_that_cannot_take_part_are_refused_with_the_remedy(opened, server, tmp_path, monkeypatch):
    refused(opened, "does not answer", "http://127.0.0.1:9")
    other = tiny.save(tmp_path / "single", "single", context=512)
    refused(opened, "tokenizer differs", server.address, folder=other)
    monkeypatch.delenv("VLLM_API_KEY")
    refused(opened, "set VLLM_API_KEY", server.address)


class Odd(BaseHTTPRequestHandler):
    """Answers everything with a page, as a proxy may."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"<html>")

    def log_message(self, *_) -> None: ...


def test_something_else_at_the_address_is_refused_in_one_line(opened):
    with ThreadingHTTPServer(("127.0.0.1", 0), Odd) as odd:
        threading.Thread(target=odd.serve_forever, daemon=True).start()
        refused(opened, "does not answer as vLLM does", f"http://127.0.0.1:{odd.server_port}")
        odd.shutdown()
    assert "fleet" not in {thread.name for thread in threading.enumerate()}


def test_a_fleet_leaves_the_servers_idle_and_nothing_open(servers, opened):
    with opened(*(server.address for server in servers)) as fleet:
        stopped = generate(fleet, requests(fleet, 8), CONFIG, seed=(3,))
        next(stopped)
        stopped.close()
        assert not fleet.pending
        assert eventually(lambda: not any(server.running() for server in servers))
        abandoned = generate(fleet, requests(fleet, 4), CONFIG, seed=(3,))
        next(abandoned)
    abandoned.close()
    assert fleet._loop.is_closed()
    assert "fleet" not in {thread.name for thread in threading.enumerate()}


def test_calls_on_a_server_that_hangs_run_elsewhere_and_it_is_used_again(engine, servers, opened, monkeypatch):
    monkeypatch.setattr(fleet_module, "PATIENCE", 3.0)
    monkeypatch.setattr(fleet_module, "PULSE", 0.5)
    hanging, found = servers[1].process.pid, []
    with opened(*(server.address for server in servers)) as fleet:
        asked = requests(fleet, 16)
        try:
            for request, response in generate(fleet, asked, CONFIG, seed=(6,), concurrency=8):
                found.append((request.problem, response.as_read))
                if len(found) == 2:
                    os.killpg(hanging, signal.SIGSTOP)  # its connections stay open
        finally:
            os.killpg(hanging, signal.SIGCONT)
        assert len(found) == len(asked)
        assert dict(found) == tokens(generate(engine, asked, CONFIG, seed=(6,)))
        assert eventually(lambda: all(server.up for server in fleet._servers))
    assert eventually(lambda: not any(server.running() for server in servers))


@pytest.mark.thorough
def test_a_server_with_other_weights_is_refused(server, opened, tmp_path):
    folder = tiny.save(tmp_path / "other", "mixed", temperature=1.2, context=CONTEXT)
    other = vllm_serve(folder, tmp_path / "server").ready()
    try:
        refused(opened, f"{other.address} serves .* with other weights", server.address, other.address)
    finally:
        other.stop()


@pytest.mark.thorough
def test_eval_and_rollout_write_with_a_fleet_what_they_write_without(engine, servers, model, tmp_path, monkeypatch):
    def lines(folder) -> list:
        texts = [line for path in folder.rglob("*.jsonl") for line in path.read_text().splitlines()]
        rows = [Rollout.from_json(json.loads(text)) for text in texts]
        return sorted((row.problem, row.sample, row.response.as_read, row.verdict) for row in rows)

    monkeypatch.setenv("VLLM_API_KEY", KEY)
    problems = tmp_path / "problems.jsonl"
    rows = [{"id": name, "question": f"why {name}", "gold": "4"} for name in "abc"]
    problems.write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = ["--n", "2", "--budget", "100", f"engine.url=[{','.join(server.address for server in servers)}]"]
    assert eval_main([str(model), "--problems", str(problems), *given, "--out", str(tmp_path / "fleet")]) == 0
    evaluate(model, [own_benchmark(problems, 2)], eval_config("parallel", 100), tmp_path / "here", engine=engine)
    assert lines(tmp_path / "fleet") == lines(tmp_path / "here") != []
    (tmp_path / "rollouts").mkdir()
    assert rollout_main([str(model), str(problems), *given, "--out", str(tmp_path / "rollouts" / "all.jsonl")]) == 0
    assert len(lines(tmp_path / "rollouts")) == 6


def killed_half_way(fleet, engine, victim) -> None:
    """Every response comes once, as in this process, although a server dies by `kill -9` after a quarter of them."""
    asked = requests(fleet, 24)
    expected, found = tokens(generate(engine, asked, CONFIG, seed=(4,))), []
    for request, response in generate(fleet, asked, CONFIG, seed=(4,), concurrency=8):
        found.append((request.problem, response.as_read))
        if len(found) == 6:
            os.killpg(victim.process.pid, signal.SIGKILL)
    assert max(Counter(problem for problem, _ in found).values()) == 1
    assert dict(found) == expected
    victim.process.wait()


@pytest.mark.thorough
def test_a_killed_server_costs_no_response_and_one_with_raw_logprobs_in_its_place_is_refused(
    fleet, engine, servers, opened, chat_model, tmp_path, capfd
):
    killed_half_way(fleet, engine, servers[1])
    raw = vllm_serve(chat_model, tmp_path, port=servers[1].port, processed=False)
    said: list[str] = []

    def complained() -> bool:
        said.append(capfd.readouterr().err)
        return "is not used" in "".join(said)

    try:
        raw.ready()
        assert eventually(complained), said
        assert "processed_logprobs" in "".join(said)
        refused(opened, "raw log-probs; start it with --logprobs-mode processed_logprobs", raw.address)
        tokens(generate(fleet, requests(fleet, 4), CONFIG, seed=(5,)))
        sampled, probes = (raw.metric(f"vllm:{name}_total") for name in ("generation_tokens", "request_success"))
        assert sampled <= probes, "it is asked now and then what it is, for one token, and samples no call"
    finally:
        raw.stop()


@pytest.mark.thorough
def test_a_server_that_returns_is_used_again(engine, server, opened, chat_model, tmp_path):
    other = vllm_serve(chat_model, tmp_path / "first").ready()
    with opened(server.address, other.address) as fleet:
        killed_half_way(fleet, engine, other)
        other = vllm_serve(chat_model, tmp_path / "again", port=other.port).ready()
        asked = requests(fleet, 24)
        assert eventually(lambda: all(one.up for one in fleet._servers))
        before = other.metric("vllm:request_success_total")
        assert tokens(generate(fleet, asked, CONFIG, seed=(4,))) == tokens(generate(engine, asked, CONFIG, seed=(4,)))
        assert other.metric("vllm:request_success_total") > before
    with opened(other.address, stall_seconds=4) as alone:
        os.killpg(other.process.pid, signal.SIGKILL)
        other.process.wait()
        with pytest.raises(EngineStalled, match=f"{other.address} \\(does not answer"):
            tokens(generate(alone, requests(alone, 4), CONFIG, seed=(4,)))
