"""Rewriting against an HTTP server on loopback that speaks each protocol and misbehaves in every way that matters."""

import asyncio
import importlib
import json
import os
import re
import signal
import sys
import threading
import time
from collections import Counter
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path

import httpx2
import pytest

from dccot.core.config import ConfigError, check, load_config
from dccot.core.files import BadData, read_jsonl, write_jsonl_atomic
from dccot.data import sft_set
from dccot.data.endpoints import Endpoint, EndpointConfig, Unusable, _drop_odd_waits
from dccot.data.judge import Grader, GradingConfig
from dccot.data.problems import Problem
from dccot.data.sft_set import (
    RewriteConfig,
    SequentialConfig,
    accept,
    instruction_for,
    load_solutions,
    prompt_text,
    rewrite_attempts,
)
from dccot.rollout.tags import flaw_of, parse
from tests.support import programs
from tests.support.rounds import rounds_of

pytestmark = pytest.mark.slow

KEY = "sk-planted-4f1c"
WORKERS = "<worker_1>a</worker_1><worker_2>b</worker_2><worker_3>c</worker_3>"
WELL_FORMED = f"<think>\nSplit.<spawn_workers>{WORKERS}</spawn_workers>\nSum.</think><answer>\\boxed{{%s}}</answer>"
ALONE = "<think>alone</think><answer>\\boxed{7}</answer>"
SCRIPT = {  # what the server does with the first, second, ... request for a problem, and what the log says of attempts
    "fine": (["right"], ["accepted"]),
    "ill-formed once": (["no spawn", "right"], ["ill-formed: no_spawn", "accepted"]),
    "wrong once": (["wrong", "right"], ["wrong", "accepted"]),
    "never good": (["wrong", "no spawn", "wrong"], ["wrong", "ill-formed: no_spawn", "wrong"]),
    "rate limited": (["429", "429", "right"], ["accepted"]),
    "hurried": (["429 after 0.001", "right"], ["accepted"]),
    "server error": (["500", "529", "right"], ["accepted"]),
    "dropped": (["drop", "drop half way", "right"], ["accepted"]),
    "slow": (["hang", "right"], ["accepted"]),
    "garbled": (["html", "right"], ["accepted"]),
    "cut": (["cut", "right"], ["cut by max_tokens", "accepted"]),
    "impossible": (["400"], ["failed"]),
}
OUTCOMES = {name: outcomes for name, (_, outcomes) in SCRIPT.items()}
PROTOCOLS = ("openai", "anthropic")
TIMEOUT = 4.0
RETRY_AFTER = 2.0


class Server(ThreadingHTTPServer):
    """Answers by a script: problem → what to do with its first, second, … request; anything else is answered right."""

    daemon_threads = True

    def __init__(self, protocol: str, script: dict[str, list[str]], delay: float = 0.0):
        super().__init__(("127.0.0.1", 0), Handler)
        self.protocol, self.script, self.delay = protocol, script, delay
        self.requests: list[tuple[str, float, dict, dict]] = []  # problem, time, body, headers
        self.lock = threading.Lock()
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}" + ("/v1" if self.protocol == "openai" else "")

    def handle_error(self, request, client_address): ...  # a client that hung up is no news here


def said(body: dict) -> str:
    """The user's message, which Anthropic's protocol may have in blocks."""
    content = body["messages"][-1]["content"]
    return content if isinstance(content, str) else "".join(block["text"] for block in content)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_): ...

    def do_POST(self):
        server: Server = self.server
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        question = said(body).split("Problem:\n\n")[1].split("\n\n")[0]
        with server.lock:
            number = sum(1 for request in server.requests if request[0] == question)
            server.requests.append((question, time.monotonic(), body, dict(self.headers)))
        time.sleep(server.delay)
        script = server.script.get(question, ["right"])
        self.act(script[min(number, len(script) - 1)])

    def act(self, action: str):
        status, _, wait = action.partition(" after ")
        if status.isdecimal():
            extra = {"retry-after": wait or str(RETRY_AFTER)} if status == "429" else {}
            message = f"trouble with {self.headers.get('x-api-key') or self.headers.get('authorization')}"
            self.send(
                json.dumps({"type": "error", "error": {"type": "trouble", "message": message}}), int(status), extra
            )
        elif action in ("drop", "hang"):
            time.sleep(2 * TIMEOUT if action == "hang" else 0)
            self.close_connection = True
        elif action == "drop half way":
            self.send(self.reply(WELL_FORMED % 7, False), share=0.5)
        elif action == "html":
            self.send("<html>Please log in</html>", headers={"content-type": "text/html"})
        else:
            texts = {"right": WELL_FORMED % 7, "wrong": WELL_FORMED % 8, "no spawn": ALONE, "cut": "<think>\nSplit and"}
            self.send(self.reply(texts[action], action == "cut"))

    def reply(self, text: str, cut: bool) -> str:
        if self.server.protocol == "openai":
            message = {"role": "assistant", "content": text}
            choice = {"index": 0, "message": message, "finish_reason": "length" if cut else "stop"}
            usage = {"prompt_tokens": 100, "completion_tokens": 10, "total_tokens": 110}
            usage |= {"prompt_tokens_details": {"cached_tokens": 50}}
            head = {"id": "c", "object": "chat.completion", "created": 0, "model": "m"}
            return json.dumps({**head, "choices": [choice], "usage": usage})
        content, stop = [{"type": "text", "text": text}], "max_tokens" if cut else "end_turn"
        usage = {"input_tokens": 40, "output_tokens": 10}
        usage |= {"cache_read_input_tokens": 60, "cache_creation_input_tokens": 0}
        head = {"id": "m", "type": "message", "role": "assistant", "model": "m", "stop_sequence": None}
        return json.dumps({**head, "content": content, "stop_reason": stop, "usage": usage})

    def send(self, body: str, status: int = 200, headers: dict | None = None, share: float = 1.0):
        content = body.encode()
        self.send_response(status)
        own = {"content-type": "application/json", "content-length": str(len(content)), **(headers or {})}
        for name, value in own.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content[: int(share * len(content))])
        self.close_connection = share < 1


def source_file(folder: Path, questions) -> Path:
    shared = {"gold": "7"}
    texts = [
        {"question": each, "solution": f"<think>\nthought {n}</think>\\boxed{{7}}"} for n, each in enumerate(questions)
    ]
    write_jsonl_atomic(folder / "source.jsonl", [{"id": f"p{n}", **shared, **row} for n, row in enumerate(texts)])
    return folder / "source.jsonl"


def config_for(server: Server, folder: Path, questions, **endpoint) -> RewriteConfig:
    place = EndpointConfig(server.protocol, "the-model", server.url, "TEST_KEY", timeout_seconds=TIMEOUT, **endpoint)
    return RewriteConfig(str(source_file(folder, questions)), str(folder / "sft.jsonl"), endpoint=place, concurrency=4)


def rewrite(config: RewriteConfig):
    check(config)
    return asyncio.run(sft_set.rewrite(config))


def log_of(config: RewriteConfig) -> list[dict]:
    return [row for _, row in read_jsonl(rewrite_attempts(config.output))]


@pytest.fixture(scope="module", params=PROTOCOLS)
def troubled(request, tmp_path_factory):
    """Everything that can go wrong, once for each protocol."""
    folder = tmp_path_factory.mktemp(request.param)
    server = Server(request.param, {name: does for name, (does, _) in SCRIPT.items()})
    os.environ["TEST_KEY"] = KEY
    try:
        config = config_for(server, folder, SCRIPT)
        yield server, config, rewrite(config)
    finally:
        del os.environ["TEST_KEY"]
        server.shutdown()
        server.server_close()


def test_every_attempt_is_logged_with_its_outcome_and_transport_errors_are_none(troubled):
    _, config, _ = troubled
    seen = {name: [] for name in SCRIPT}
    for row in sorted(log_of(config), key=lambda row: row["attempt"]):
        seen[list(SCRIPT)[int(row["id"][1:])]].append(row["outcome"])
    assert seen == OUTCOMES


def test_output_holds_the_accepted_ones_in_source_order(troubled):
    _, config, _ = troubled
    rows = [row for _, row in read_jsonl(config.output)]
    good = [n for n, name in enumerate(SCRIPT) if OUTCOMES[name][-1] == "accepted"]
    assert [row["id"] for row in rows] == [f"p{n}" for n in good]
    texts = {"completion": WELL_FORMED % 7, "source": "<think>\nthought 0</think>\\boxed{7}"}
    assert rows[0] == {"id": "p0", "question": "fine", "gold": "7", **texts}


def test_summary_counts_outcomes_and_tokens(troubled):
    _, config, summary = troubled
    outcomes = Counter(outcome for outcomes in OUTCOMES.values() for outcome in outcomes)
    assert (summary.solutions, summary.accepted, summary.exhausted, summary.failed) == (12, 10, 1, 1)
    assert summary.outcomes == outcomes
    answered = sum(outcomes.values()) - outcomes["failed"]
    cached = (60 if config.endpoint.protocol == "anthropic" else 50) * answered
    assert summary.spent == {"input_tokens": 100 * answered, "cached_tokens": cached, "output_tokens": 10 * answered}
    assert f"{100 * answered:,} tokens read ({cached:,} from the cache), {10 * answered:,} written\n" in str(summary)
    assert "2 attempts ill-formed: no_spawn" in str(summary)
    assert json.loads(Path(config.output).with_suffix(".summary.json").read_text())["accepted"] == 10


def test_requests_are_as_configured_and_the_key_goes_to_the_server_alone(troubled):
    server, config, _ = troubled
    for _, _, body, headers in server.requests:
        assert (body["model"], body["temperature"], body["max_tokens"]) == ("the-model", 0.7, 12_000)
        sent = {name.lower(): value for name, value in headers.items()}
        assert KEY in (sent.get("x-api-key") or sent["authorization"])
        instruction = body["system"][0]["text"] if server.protocol == "anthropic" else body["messages"][0]["content"]
        assert instruction == prompt_text("rewrite.txt")
    for path in Path(config.output).parent.iterdir():
        assert KEY not in path.read_text()


def test_retry_after_is_waited_for_and_no_reason_to_hurry(troubled):
    """Twice as long as the SDKs' own first backoffs, which are 0.5 and 1 s; or these, less a quarter."""
    server, _, _ = troubled
    for name, count, least in (("rate limited", 3, RETRY_AFTER), ("hurried", 2, 0.3)):
        times = [at for question, at, *_ in server.requests if question == name]
        assert len(times) == count and all(later - earlier >= least for earlier, later in pairwise(times))


BACKOFF = (0.37, 8)  # the SDKs' own: half a second that doubles, less a quarter


@pytest.mark.parametrize(
    "wait, least, most",
    [
        ({"retry-after": formatdate(4_000_000_000, usegmt=True)}, *BACKOFF),
        ({"retry-after": "20"}, 20, 20),
        ({"retry-after": "86400"}, *BACKOFF),  # longer than two minutes would end openai's retries
        *(({"retry-after": wait}, *BACKOFF) for wait in ("0", "-5", "nan", "0.001", "inf", "soon")),
        ({"retry-after-ms": "many", "retry-after": "0.001"}, *BACKOFF),
        ({"retry-after-ms": "1", "retry-after": "40"}, 40, 40),
        ({"retry-after": "Mon, 99 Foo 2026 25:61:61 GMT"}, *BACKOFF),
    ],
)
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_long_or_garbled_wait_is_kept_within_reason(protocol, wait, least, most):
    """What the SDKs make of a response after our hook."""
    client = Endpoint(EndpointConfig(protocol, key_variable=""))._client
    options = importlib.import_module(f"{protocol}._models").FinalRequestOptions(method="post", url="/", max_retries=9)
    response = httpx2.Response(429, headers=wait)
    asyncio.run(_drop_odd_waits(response))
    assert client._should_retry(response)
    assert least <= client._calculate_retry_timeout(9, options, response.headers) <= most


@pytest.mark.parametrize(
    "address", ["https://me:hunter2@host/v1", "https://hunter2@host", "http://me:hunter2@127.0.0.1:1/v1"]
)
def test_a_password_in_an_address_is_refused_and_not_repeated(address):
    secret = r"holds a user or a password; keys come from the environment"
    broken = address.removeprefix("https:").removeprefix("http:")
    for kind, settings, said in (
        (RewriteConfig, ["source=s", f"endpoint.base_url={address}"], f"endpoint.base_url {secret}"),
        (SequentialConfig, ["model=m", "problems=p", f"engine.url=[{address}]"], f"engine.url.* {secret}"),
        (RewriteConfig, ["source=s", f"endpoint.base_url={{a: '{address}'}}"], "endpoint.base_url"),
        (RewriteConfig, ["source=s", f"endpoint.base_url={broken}"], "endpoint.base_url"),
    ):
        with pytest.raises(ConfigError, match=said) as caught:
            load_config(kind, None, settings)
        assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    "address, warned",
    [("http://10.1.2.3:8000/v1", True), ("http://models.example", True), ("http://127.0.0.1.example", True)]
    + [
        (each, False) for each in ("https://10.1.2.3", "http://127.0.0.1:9", "http://localhost/v1", "http://[::1]:8000")
    ],
)
def test_plain_http_to_another_machine_costs_a_warning(address, warned, caplog, monkeypatch):
    monkeypatch.setenv("TEST_KEY", KEY)
    Endpoint(EndpointConfig("openai", "m", address, "TEST_KEY"))
    assert ("is not encrypted" in caplog.text) == warned


def test_rerun_asks_again_only_for_what_failed(troubled):
    server, config, first = troubled
    before, log = len(server.requests), log_of(config)
    for _ in range(3):  # as often as there are attempts: a failure is none
        again = rewrite(config)
    assert [question for question, *_ in server.requests[before:]] == ["impossible"] * 3
    assert log_of(config)[: len(log)] == log and again.accepted == first.accepted


def test_wrong_key_stops_everything_at_once_in_one_line_without_the_key(tmp_path, monkeypatch):
    monkeypatch.setenv("TEST_KEY", KEY)
    server = Server("openai", {f"q{n}": ["401"] for n in range(50)})
    with pytest.raises(Unusable, match=r"check the key, endpoint\.model and endpoint\.base_url") as caught:
        rewrite(config_for(server, tmp_path, [f"q{n}" for n in range(50)]))
    assert KEY not in str(caught.value) and "[key]" in str(caught.value)
    assert len(server.requests) <= 8


def test_missing_key_is_said_by_the_name_of_its_variable(tmp_path, monkeypatch):
    monkeypatch.delenv("TEST_KEY", raising=False)
    with pytest.raises(ConfigError, match="environment variable TEST_KEY"):
        rewrite(config_for(Server("openai", {}), tmp_path, ["q"]))


def test_dead_server_fails_after_our_patience_not_before(tmp_path, monkeypatch):
    monkeypatch.setenv("TEST_KEY", KEY)
    server = Server("anthropic", {"q": ["500"]})
    summary = rewrite(config_for(server, tmp_path, ["q"], patience_seconds=3.0))
    assert (summary.accepted, summary.failed) == (0, 1)
    assert len(server.requests) >= 2 and "no answer within" in log_of(config_for(server, tmp_path, ["q"]))[0]["reason"]


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_killed_and_resumed_loses_nothing_repeats_nothing_and_shows_no_key(tmp_path, protocol):
    """The command itself, with the SDKs' debug logs on, killed twice on the way."""
    questions = [f"q{n}" for n in range(40)]
    server = Server(protocol, {"q3": ["wrong", "right"], "q7": ["500", "right"]}, delay=0.15)
    config = config_for(server, tmp_path, questions)
    settings = {"protocol": protocol, "base_url": server.url, "key_variable": "TEST_KEY", "model": "m"}
    overrides = [f"source={config.source}", f"output={config.output}", "concurrency=4"]
    overrides += [f"endpoint.{name}={value}" for name, value in settings.items()]
    (tmp_path / "rewrite.yaml").write_text("attempts: 3\n")
    command = [sys.executable, "-m", "dccot.data.cli", "rewrite", str(tmp_path / "rewrite.yaml"), *overrides]
    loud = {"OPENAI_LOG": "debug", "ANTHROPIC_LOG": "debug", "PYTHONASYNCIODEBUG": "1"}
    environment = {**os.environ, "TEST_KEY": KEY, **loud}
    log = rewrite_attempts(config.output)
    for enough in (8, 22, None):
        with (tmp_path / "said").open("a") as output:
            child = programs.Popen(command, env=environment, stdout=output, stderr=output)
        while enough and child.poll() is None and (log.read_bytes().count(b"\n") if log.exists() else 0) < enough:
            time.sleep(0.01)
        if enough:
            child.send_signal(signal.SIGKILL)
        child.wait(timeout=900)
    said = (tmp_path / "said").read_text()
    rows = log_of(config)
    assert child.returncode == 0 and "40 of 40 solutions accepted" in said
    assert Counter((row["id"], row["attempt"]) for row in rows).most_common(1)[0][1] == 1
    assert [row["id"] for _, row in read_jsonl(config.output)] == [f"p{n}" for n in range(40)]
    assert len(server.requests) <= 42 + 2 * 4  # what was under way at each kill is asked again, nothing else
    assert "DEBUG" in said and all(KEY not in path.read_text() for path in tmp_path.iterdir())


@pytest.fixture(scope="module")
def grader():
    with Grader(GradingConfig(workers=1)) as shared:
        yield shared


def test_acceptance_gives_the_reason(grader):
    problem = Problem("1", "?", ["7", "seven"])
    assert accept(problem, WELL_FORMED % 7, grader) is None
    assert accept(problem, WELL_FORMED % 8, grader) == "wrong"
    assert accept(problem, "<think>x</think><answer>7</answer>", grader) == "ill-formed: no_spawn"
    assert accept(problem, (WELL_FORMED % 7) + " thanks", grader) == "ill-formed: text_after_answer"
    assert accept(problem, "<think>x</think><answer>\\boxed{7}</answer>", grader, alone=True) is None
    assert accept(problem, "x</think><answer>7</answer>", grader, alone=True) == "ill-formed: no_think"


def test_rule_based_rewriting_uses_the_same_attempts_and_acceptance(grader, tmp_path):
    solutions = load_solutions(source_file(tmp_path, ["a", "b"]))
    config = RewriteConfig("unused", str(tmp_path / "sft.jsonl"), attempts=2)

    def rewrite(problem: Problem, text: str, *, attempt: int) -> str:
        return WELL_FORMED % (7 if attempt == 1 and problem.question == "b" else 8)

    summary = asyncio.run(sft_set.rewrite_all(solutions, sft_set.by_rule(rewrite), grader, config))
    assert (summary.accepted, summary.exhausted, summary.outcomes) == (1, 1, {"wrong": 3, "accepted": 1})
    assert [row["id"] for _, row in read_jsonl(config.output)] == ["p1"]


def test_source_rows_without_a_solution_are_named(tmp_path):
    write_jsonl_atomic(tmp_path / "s.jsonl", [{"id": "1", "question": "?", "gold": "2"}])
    with pytest.raises(BadData, match=r"s\.jsonl:1: no field 'solution'"):
        load_solutions(tmp_path / "s.jsonl")


@pytest.mark.parametrize(("field", "value"), [("question", ""), ("gold", {}), ("solution", None), ("id", [1])])
def test_source_rows_with_a_value_of_another_kind_are_named(tmp_path, field, value):
    row = {"id": 7, "question": "?", "gold": 2, "solution": "It is 2."}
    write_jsonl_atomic(tmp_path / "s.jsonl", [row])
    assert [solution.problem.gold for solution in load_solutions(tmp_path / "s.jsonl")] == ["2"]
    write_jsonl_atomic(tmp_path / "s.jsonl", [row | {field: value}])
    with pytest.raises(BadData, match=rf"s\.jsonl:1: field '{field}' must be"):
        load_solutions(tmp_path / "s.jsonl")


def test_the_instruction_and_acceptance_go_by_width_and_depth(grader):
    ours, asked = prompt_text("rewrite.txt"), instruction_for([1, 8], 2)
    assert instruction_for(3, 1) == ours and asked.startswith(ours)
    for words in ("from 1 to 8", "<task_1>", "up to the block", "2 levels deep"):
        assert words in asked and words not in ours
    assert "exactly workers 1 to 5" in instruction_for(5, 1) and "{{" not in asked + instruction_for(5, 3)
    deep = WELL_FORMED.replace("<spawn_workers>", "<task_1>a</task_1><spawn_workers>", 1) % 7
    one = re.sub(r"<worker_[23]>.*?</worker_[23]>", "", deep, flags=re.S)
    problem = Problem("1", "?", "7")
    assert accept(problem, one, grader, [1, 8], 2) is None
    assert accept(problem, one, grader) == "ill-formed: worker_order"
    assert accept(problem, one, grader, [2, 8]) == "ill-formed: tasks"


def test_worked_example_of_our_instruction_obeys_its_own_rules(grader):
    text = prompt_text("rewrite.txt")
    _, _, example = text.partition("# An example")
    source, _, result = example.partition("Result:\n\n")
    counted = sum(any(n % d == 0 for d in (4, 6, 9)) for n in range(1, 201))
    problem = Problem("1", source.split("Problem:\n\n")[1].split("\n\n")[0], str(counted))
    assert accept(problem, result, grader) is None
    given = source.split("Given solution:\n\n")[1]
    block = rounds_of(parse(result))[0]
    assert given.startswith("<think>\nOkay") and block.director.startswith(given[:300])
    assert all(sft_set.verbatim_share(worker, sft_set.word_runs(given)) > 0.95 for worker in block.workers)
    assert list(sft_set.leaks_in(block.workers, problem.question + block.director)) == []
    assert flaw_of(text.partition("# Who knows")[0].split("looks like\n\n")[1].split("\n\n- ")[0]) is None


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_an_instruction_with_places_for_problem_and_solution_is_one_message(tmp_path, monkeypatch, protocol):
    monkeypatch.setenv("TEST_KEY", KEY)
    template = tmp_path / "instruction.txt"
    text = "Problem:\n\n{question}\n\nIn \\boxed{{}}, {{question}}: {assistant_response} {more} {{{question}}}"
    template.write_text(text)
    server = Server(protocol, {})
    config = config_for(server, tmp_path, ["fine"])
    config.instruction = str(template)
    rewrite(config)
    solution = "<think>\nthought 0</think>\\boxed{7}"
    [(*_, body, _)] = server.requests
    expected = "Problem:\n\nfine\n\nIn \\boxed{}, {question}: " + solution + " {more} {fine}"
    assert said(body) == expected
    if protocol == "anthropic":  # what all requests begin with is marked for the server's cache
        marked = {"type": "text", "text": "Problem:\n\n", "cache_control": {"type": "ephemeral"}}
        assert body["messages"][0]["content"][0] == marked
    assert "system" not in body


def test_progress_says_what_the_tokens_cost_so_far(tmp_path, monkeypatch):
    """Of 100 tokens in, 60 come from the cache: (40 × 3 + 60 × 0.3 + 10 × 15) / 10⁶ dollars for each reply."""
    monkeypatch.setenv("TEST_KEY", KEY)
    config = config_for(Server("anthropic", {}), tmp_path, ["a", "b"], prices=[3.0, 0.3, 15.0])
    config.concurrency, told = 1, []
    summary = asyncio.run(sft_set.rewrite(config, lambda *shown: told.append(shown)))
    each = (40 * 3 + 60 * 0.3 + 10 * 15) / 1e6
    assert summary.dollars == pytest.approx(2 * each)
    assert told[0] == (1, 2, "100 tokens read (60 from the cache), 10 written, $0.00")
    assert sft_set.dollars_of({"input_tokens": 47e6, "cached_tokens": 0, "output_tokens": 31e6}, [3, 0.3, 15]) == 606


@pytest.mark.parametrize("ending", ["<think>\\n", "<think>\n", "<think>"])
def test_a_solution_that_opens_its_thinking_does_not_do_so_twice_after_the_papers_template(ending):
    """The template's own last lines, as its appendix prints them and as Python reads them."""
    template = f"Problem: {{question}}\nAlice's solution: {ending}{{assistant_response}}"
    asked = []

    class Listening:
        async def ask(self, system: str, user: str, shared: str = ""):
            asked.append(shared + user)

    rewriter = sft_set.by_endpoint(Listening(), template)
    for text in ("<think>\nOkay, so</think>45", "Okay, so</think>45"):
        asyncio.run(rewriter(sft_set.Solution(Problem("1", "What?", "45"), text), 0))
    assert asked == [f"Problem: What?\nAlice's solution: {ending}Okay, so</think>45"] * 2
