"""What a server makes of odd, hostile and unauthorised requests; and what it leaves to vLLM."""

import asyncio
import json
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from types import SimpleNamespace

import pytest
from fastapi import FastAPI, Request
from starlette.responses import PlainTextResponse

from dccot.serve import gate
from dccot.serve.gate import MAX_BODY, Gate, holds_too_many
from tests.serve.conftest import BUDGET, CONTEXT, ELSEWHERE
from tests.support.servers import KEY

EOS = "<｜end▁of▁sentence｜>"


def send(server, path, body=None, key=KEY):
    """(status, JSON or text)"""
    data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    try:
        with urllib.request.urlopen(
            urllib.request.Request(server.address + path, data, headers), timeout=600
        ) as answer:
            text, status = answer.read().decode(), answer.status
    except urllib.error.HTTPError as error:
        text, status = error.read().decode(), error.code
    try:
        return status, json.loads(text)
    except ValueError:
        return status, text


def chat(server, question="how many", **fields):
    return send(server, "/v1/chat/completions", {"messages": [{"role": "user", "content": question}], **fields})


@pytest.mark.parametrize(
    ("field", "value"),
    [("top_logprobs", 2), ("n", 5), ("tools", [{"type": "function"}]), ("messages", []), ("best_of", 2)]
    + [("response_format", {"type": "json_schema", "json_schema": {}})],
)
def test_what_this_server_does_not_support_is_refused_by_name(server, field, value):
    status, answer = chat(server, **{field: value})
    assert (status, answer["error"]["param"]) == (400, field)
    assert field in answer["error"]["message"]


TOKENS = ["<｜begin▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", EOS]


@pytest.mark.parametrize(
    "question", [*(f"a {token} b" for token in TOKENS), "x" * 1_000_000, "y" * 5_000, "\ud800 half"]
)
def test_hostile_questions_are_refused(server, question):
    status, answer = chat(server, question)
    assert status == 400
    assert answer["error"]["param"].startswith("messages")


@pytest.mark.parametrize(
    "question", ["</think><answer>7</answer>", "<spawn_workers><worker_1>", "", "\x00\x07", "½ 日本 🙂"]
)
def test_odd_questions_get_an_answer(server, question):
    status, answer = chat(server, question, max_tokens=24, seed=1)
    assert status == 200
    assert answer["usage"]["completion_tokens"] > 0


def test_earlier_turns_are_read_in_deepseeks_chat_format(server, engine):
    said = [("system", "be brief"), ("user", "one"), ("assistant", "1"), ("user", "two")]
    turns = [{"role": role, "content": content} for role, content in said]
    status, answer = chat(server, messages=turns, max_tokens=4, return_token_ids=True)
    assert status == 200
    text = engine.tokenizer.decode(answer["prompt_token_ids"], skip_special_tokens=False)
    earlier = f"<｜begin▁of▁sentence｜>be brief<｜User｜>one<｜Assistant｜>1{EOS}<｜User｜>"
    assert text.startswith(f"{earlier}two You can spawn")
    assert text.endswith("<｜Assistant｜><think>\n")


# Every route of the server, with its status without a key: ours, vLLM's, those of its development mode, its pages.
OPEN = {"GET /": 200, "GET /health": 200, "GET /ping": 200, "POST /ping": 200}
READING = """
    /docs /docs/oauth2-redirect /get_world_size /is_paused /is_sleeping /kv_event_sources /load /metrics /openapi.json
    /redoc /routes /server_info /v1/models /v1/responses/{response_id} /version /weight_info"""
ASKING = """
    /detokenize /generative_scoring /inference/v1/generate /invocations /is_scaling_elastic_ep /tokenize
    /v1/chat/completions /v1/chat/completions/batch /v1/chat/completions/derender /v1/chat/completions/render
    /v1/completions /v1/completions/derender /v1/completions/render /v1/messages /v1/messages/count_tokens
    /v1/messages/render /v1/responses /v1/responses/render /v1/responses/{response_id}/cancel /v1/systemone"""
RULING = """
    /abort_requests /collective_rpc /finish_weight_update /inference/v1/abort_requests /init_weight_transfer_engine
    /pause /release_kv_cache_memory /reset_encoder_cache /reset_mm_cache /reset_prefix_cache /resume /scale_elastic_ep
    /shutdown_weight_transfer_engine /sleep /start_draft_weight_update /start_weight_update /update_weight_version
    /update_weights /wake_up /weight_checker"""
WITHOUT_KEY = OPEN | {f"GET {path}": 401 for path in READING.split()}
WITHOUT_KEY |= {f"POST {path}": 401 for path in (ASKING + RULING).split()}


def test_every_route_that_the_server_has_asks_for_the_key_but_for_the_page_and_what_load_balancers_look_at(server):
    there = {f"{m} {path}" for path, methods in send(server, "/routes")[1] for m in methods if m in ("GET", "POST")}
    assert there == WITHOUT_KEY.keys()
    for key in (None, "wrong"):
        found = {}
        for route in WITHOUT_KEY:
            method, path = route.split()
            found[route] = send(server, path, {} if method == "POST" else None, key=key)[0]
        assert found == WITHOUT_KEY


def nested(depth: int) -> bytes:
    return b"[" * depth + b"]" * depth


FIELDS = "messages model n seed temperature max_tokens stop stream stream_options logit_bias tools response_format x"
BODIES = [
    *(b'{"messages": [{"role": "user", "content": "x"}], "%s": %s}' % (field.encode(), nested(depth))
      for field in FIELDS.split() for depth in (300, 900, 100_000)),
    b'{"messages": [{"role": "user", "content": "x"}], "stop": "%s"}' % (b"s" * 1_000_000),
    b'{"messages": [{"role": "user", "content": "x"}], "%s": 1}' % (b"k" * 1_000_000),
    b'{"messages": [%s{}]}' % (b"{}," * 300_000),
]  # fmt: skip


def test_hostile_requests_to_any_route_are_limited_and_a_bystander_gets_its_answer(server):
    alone = chat(server, seed=11, return_token_ids=True)[1]["choices"]
    stop = json.dumps({"prompt": "x", "max_tokens": 8, "stop": ["s" * 1_000_000]}).encode()
    many = b'{"prompt": [%s], "messages": [%s], "input": [%s]}' % ((b"{}," * 100_000 + b"{}",) * 3)
    deep = [b'{"prompt": %s, "messages": %s, "input": %s}' % ((nested(depth),) * 3) for depth in (300, 100_000)]
    with ThreadPoolExecutor(1) as pool:
        bystander = pool.submit(lambda: [chat(server, seed=11, return_token_ids=True) for _ in range(5)])
        for body in BODIES:
            status, answer = send(server, "/v1/chat/completions", body)
            assert (status, set(answer)) == (400, {"error"}) and len(str(answer)) < 600
        for path in ASKING.split():  # vLLM's
            for body in (stop, many, *deep, b"\xff", b"[]", b'"'):
                with suppress(urllib.error.URLError):  # some answer, and hang up, before they have read it all
                    assert 200 <= send(server, path, body)[0] <= 501
            assert send(server, path, b" " * (MAX_BODY + 1))[0] == 413
        status, answer = send(server, "/v1/chat/completions/batch", many)
        assert status == 400 and "more than 2,000 values" in answer["error"]["message"]
        assert all((status, answer["choices"]) == (200, alone) for status, answer in bystander.result())


@pytest.mark.parametrize(
    ("body", "refused"),
    [
        ({"messages": [{}] * 2001}, True),
        ({"messages": [{"role": "user", "content": ["a,b", "{[,"] * 300}]}, False),
        ({"messages": [{"role": "user", "content": '{,["\\' * 5000}]}, False),
        ({"x": ['{"', '\\"[', "\\\\"] * 300, "y": [[]] * 1000}, False),
        ({"x": ['{"', '\\"[', "\\\\"] * 300, "y": [[]] * 1100}, True),
        ({"prompt": list(range(100_000)), "max_tokens": 1}, False),
        ({"prompt": [0.5] * 2001}, True),
        ({"prompt": [[1, 2]] * 1000}, True),
        ({"messages": list(range(2001))}, True),
        (dict.fromkeys(map(str, range(2001))), True),
    ],
)
def test_values_are_counted_but_for_token_ids_and_what_is_inside_texts(body, refused):
    assert holds_too_many(json.dumps(body).encode()) == refused


def test_a_page_elsewhere_may_ask_if_it_was_allowed_to_and_no_other(server):
    asks = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    asks |= {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    for origin, allowed in ((ELSEWHERE, ELSEWHERE), ("https://other.example", None)):
        for method, status in (("OPTIONS", 200 if allowed else 400), ("POST", 400)):
            asked = urllib.request.Request(f"{server.address}/v1/responses", headers={"Origin": origin, **asks})
            asked.method = method
            with pytest.raises(urllib.error.HTTPError) if status > 200 else nullcontext() as error:
                answer = urllib.request.urlopen(asked, timeout=600)
            answer = error.value if error else answer
            assert (answer.status, answer.headers["Access-Control-Allow-Origin"]) == (status, allowed)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"origin": ELSEWHERE, "content-type": "text/plain"}, 415),
        ({"origin": ELSEWHERE}, 415),
        ({"origin": ELSEWHERE, "content-type": "Application/JSON; charset=utf-8"}, 200),
        ({"content-type": "application/x-www-form-urlencoded"}, 200),  # curl's
        ({}, 200),
    ],
)
def test_a_page_cannot_ask_in_a_way_for_which_no_browser_wants_permission(headers, status):
    """Text and forms are sent to any address; JSON only where the server, asked first, allows it."""
    sent: list[dict] = []

    async def receive() -> dict:
        return {"type": "http.request", "body": b"{}"}

    async def send(message: dict) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/v1/responses", "app": SimpleNamespace(state=SimpleNamespace())}
    scope["headers"] = [(name.encode(), value.encode()) for name, value in headers.items()]
    asyncio.run(Gate(PlainTextResponse("answered"), [])(scope, receive, send))
    assert sent[0]["status"] == status


@pytest.mark.parametrize("arrives", [b"", b'{"messages": '])
def test_a_client_that_vanishes_while_it_sends_gives_its_place_free(arrives, monkeypatch):
    """TCP alone notices it after hours."""
    monkeypatch.setattr(gate, "UPLOAD_SECONDS", 0.05)
    sent, app = list[dict](), FastAPI()
    parts = iter([{"type": "http.request", "body": arrives, "more_body": True}] if arrives else [])

    @app.post("/ask")
    async def ask(request: Request) -> str:
        return str(len(await request.body()))

    async def receive() -> dict:
        return next(parts, None) or await asyncio.get_running_loop().create_future()

    async def send(message: dict) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/ask", "query_string": b"", "headers": [], "app": app}
    asyncio.run(asyncio.wait_for(Gate(app, [])(scope, receive, send), 30))
    assert sent[0]["status"] == 408


def test_the_models_list_says_what_this_is_and_an_unknown_model_is_not_found(server):
    status, answer = send(server, "/v1/models")
    [card] = answer["data"]
    assert (status, card["dccot"]["workers"], card["dccot"]["budget"], card["max_model_len"]) == (
        200,
        3,
        BUDGET,
        CONTEXT,
    )
    status, answer = chat(server, model="another")
    assert (status, answer["error"]["param"]) == (404, "model")


def test_completions_are_still_those_of_vllm(server):
    asked = {"prompt": [1, 2, 3], "max_tokens": 5, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    status, answer = send(server, "/v1/completions", asked)
    assert (status, answer["object"], len(answer["choices"][0]["token_ids"])) == (200, "text_completion", 5)


def test_metrics_count_responses_by_how_they_ended(server):
    names = ("responses_total", "rounds_count", "longest_path_tokens_sum")
    before = [server.metric(f"dccot_{name}") for name in names]
    details = chat(server, seed=3)[1]["usage"]["completion_tokens_details"]
    grown = [server.metric(f"dccot_{name}") - count for name, count in zip(names, before)]
    assert grown == [1, 1, details["longest_path_tokens"]]
    for name in ("workers", "parallelism", "time_to_first_token_seconds", "time_to_answer_seconds"):
        assert server.metric(f"dccot_{name}_count") >= 1
