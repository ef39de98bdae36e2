"""What a server makes of odd, hostile and unauthorised requests; and what it leaves to vLLM."""

import json
import urllib.error
import urllib.request

import pytest

from tests.serve.conftest import BUDGET, CONTEXT
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
    [("logprobs", True), ("n", 5), ("max_completion_tokens", BUDGET + 1), ("messages", []), ("best_of", 2)],
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


def test_the_key_is_checked_on_every_route_but_the_page(server):
    assert send(server, "/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}, key=None)[0] == 401
    assert send(server, "/v1/models", key="wrong")[0] == 401
    assert send(server, "/", key=None)[0] == 200


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
