"""Every field that a client may send is honoured, or refused by its name."""

import json

import pytest
from openai.types.chat.completion_create_params import CompletionCreateParamsNonStreaming

from dccot.serve.request import NEUTRAL, WITHOUT_EFFECT, ChatRequest, Refused, read_json

QUESTION = [{"role": "user", "content": "how many"}]
OF_VLLM = (
    "top_k min_p repetition_penalty length_penalty use_beam_search stop_token_ids ignore_eos min_tokens echo best_of"
)
OF_VLLM += " prompt_logprobs bad_words allowed_token_ids documents chat_template structured_outputs priority functions"
OURS = {*ChatRequest.model_fields, *WITHOUT_EFFECT}
FIELDS = sorted({*CompletionCreateParamsNonStreaming.__annotations__, *OF_VLLM.split()} - OURS)
IMAGE = {"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}


def read(**fields) -> ChatRequest:
    return ChatRequest.read(read_json(json.dumps({"messages": QUESTION, **fields}).encode()))


@pytest.mark.parametrize("field", FIELDS)
def test_a_field_of_the_api_that_is_not_supported_is_refused_by_name(field):
    with pytest.raises(Refused, match=field) as refused:
        read(**{field: {"type": "something else"}})
    assert (refused.value.param, refused.value.status) == (field, 400)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("logprobs", 0),
        ("top_logprobs", False),
        ("top_k", -2),
        ("min_p", 2),
        ("chat_template_kwargs", {"a": [1]}),
        ("n", 0),
        ("n", True),
        ("temperature", -1),
        ("temperature", "warm"),
        ("temperature", float("nan")),
    ]
    + [("top_p", 0), ("seed", 1.5), ("seed", 1e400), ("stop", [""]), ("stop", ["a"] * 5), ("max_tokens", 0)]
    + [
        ("stream", "yes"),
        ("stream_options", {"include_usage": True}),
        ("reasoning_effort", "much"),
        ("model", "\udfff"),
    ]
    + [("messages", []), ("messages", 7), ("messages", [{"role": "tool", "content": "x"}])]
    + [
        ("messages", [{"role": "assistant", "content": "x"}]),
        ("messages", [{"role": "user", "content": "\ud800 half"}]),
    ]
    + [
        ("messages", [{"role": "user", "content": [IMAGE]}]),
        ("messages", [{"role": "user", "content": "x", "name": "y"}]),
    ],
)
def test_a_value_that_is_not_supported_is_refused_by_name(field, value):
    with pytest.raises(Refused, match=field) as refused:
        read(**{field: value})
    assert refused.value.param.split("[")[0].split(".")[0] == field


@pytest.mark.parametrize("field", NEUTRAL)
def test_the_value_that_asks_for_nothing_changes_nothing(field):
    for value in (None, *NEUTRAL[field]):
        assert read(**{field: value}) == read(user="someone") == read()


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"7",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"messages":' + b"[" * 100_000,
        b"{}",
    ]
    + [b'{"n": ' + b"1" * 5000 + b"}"],
    ids=range(9),
)
def test_a_body_that_is_no_request_is_refused(body):
    with pytest.raises(Refused) as refused:
        ChatRequest.read(read_json(body))
    assert refused.value.status == 400


def test_what_is_supported_arrives():
    found = read(n=2, seed=-1, temperature=0, top_p=1, max_tokens=5, stop="a", stream=True)
    assert (found.n, found.seed, found.temperature, found.top_p, found.budget(9)) == (2, -1, 0.0, 1.0, (5, None))
    assert (found.stop, found.stream, found.stream_options.include_usage) == (["a"], True, False)
    told = read(stream=True, stream_options={"include_usage": True, "include_obfuscation": False})
    assert told.stream_options.include_usage
    assert read(max_tokens=5, max_completion_tokens=5).budget(9) == (5, None)
    with pytest.raises(Refused, match="send one of them"):
        read(max_tokens=5, max_completion_tokens=6)
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    earlier = {"role": "assistant", "content": "1", "reasoning": "so", "tool_calls": []}
    turns = [{"role": "developer", "content": "be brief"}, *QUESTION, earlier, {"role": "user", "content": parts}]
    assert spoken(turns) == [("system", "be brief"), ("user", "how many"), ("assistant", "1"), ("user", "one\ntwo")]
    assert (read(top_k=0).filters, read(top_k=4, min_p=0.1, logprobs=True).filters) == (
        {"top_k": 0},
        {"top_k": 4, "min_p": 0.1, "logprobs": 0},
    )


def spoken(turns) -> list[tuple[str, str]]:
    return [(message.role, message.content) for message in read(messages=turns).messages]


def test_earlier_answers_are_read_without_their_thinking_and_messages_of_one_role_are_one():
    turns = [("system", "be brief"), ("developer", "and kind"), ("user", "one"), ("user", "two")]
    turns += [("assistant", "<think>\nso </think>\n\n<answer>3</answer>"), ("user", "why")]
    assert spoken([{"role": role, "content": content} for role, content in turns]) == [
        ("system", "be brief\n\nand kind"),
        ("user", "one\n\ntwo"),
        ("assistant", "3"),
        ("user", "why"),
    ]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, 800),
        ({"reasoning_effort": "minimal"}, 100),
        ({"reasoning_effort": "low"}, 200),
        ({"reasoning_effort": "medium"}, 400),
        ({"reasoning_effort": "high"}, 800),
        ({"reasoning_effort": "medium", "max_tokens": 300}, 300),
        ({"reasoning_effort": "low", "max_tokens": 300}, 200),
    ],
)
def test_effort_is_a_share_of_the_servers_budget_and_max_tokens_a_further_limit(fields, expected):
    assert read(**fields).budget(800) == (expected, None)


def test_more_tokens_than_the_budget_are_cut_to_it_and_the_client_is_told():
    budget, told = read(max_completion_tokens=4096).budget(800)
    assert budget == 800
    assert told == "max_completion_tokens is 4,096; the longest path has at most 800 tokens here"
