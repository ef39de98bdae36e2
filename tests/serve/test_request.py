"""Every field that a client may send is honoured, or refused by its name."""

import json

import pytest
from openai.types.chat.completion_create_params import CompletionCreateParamsNonStreaming

from dccot.serve.request import NEUTRAL, WITHOUT_EFFECT, ChatRequest, Refused, parse_request

QUESTION = [{"role": "user", "content": "how many"}]
OF_VLLM = ("top_k", "min_p", "repetition_penalty", "length_penalty", "use_beam_search", "stop_token_ids", "ignore_eos", "min_tokens",
           "echo", "prompt_logprobs", "bad_words", "allowed_token_ids", "documents",
           "chat_template", "structured_outputs", "priority")  # fmt: skip
FIELDS = sorted(
    {*CompletionCreateParamsNonStreaming.__annotations__, *OF_VLLM}
    - set(ChatRequest.model_fields)
    - set(WITHOUT_EFFECT)
)


def read(**fields) -> ChatRequest:
    return parse_request(json.dumps({"messages": QUESTION, **fields}).encode())


@pytest.mark.parametrize("field", FIELDS)
def test_a_field_of_the_api_that_is_not_supported_is_refused_by_name(field):
    with pytest.raises(Refused, match=field) as refused:
        read(**{field: {"type": "something else"}})
    assert (refused.value.param, refused.value.status) == (field, 400)


@pytest.mark.parametrize("field", NEUTRAL)
def test_the_value_that_asks_for_nothing_changes_nothing(field):
    for value in (None, *NEUTRAL[field]):
        assert read(**{field: value}) == read()


def test_what_is_supported_arrives():
    found = read(n=2, seed=-1, temperature=0, top_p=1, max_tokens=5, stop="a", stream=True)
    assert (found.n, found.seed, found.temperature, found.top_p, found.budget) == (2, -1, 0.0, 1.0, 5)
    assert (found.stop, found.stream, found.stream_options.include_usage) == (["a"], True, False)
    assert read(stream=True, stream_options={"include_usage": True}).stream_options.include_usage
    assert read(max_tokens=5, max_completion_tokens=5).budget == 5
    with pytest.raises(Refused, match="send one of them"):
        read(max_tokens=5, max_completion_tokens=6)
