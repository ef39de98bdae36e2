"""The Responses API on a real server, asked by the official client: what chat completions say, as items and events."""

import json

import pytest
from openai import APIError, BadRequestError, InternalServerError
from openai.types.responses.response_create_params import ResponseCreateParamsNonStreaming

from dccot.eval.view import main as view
from dccot.rollout.response import Rollout
from dccot.serve.request import WITHOUT_EFFECT, Refused
from dccot.serve.responses import NAMES, NEUTRAL, Responses
from tests.serve.conftest import BUDGET, NAME, QUESTION
from tests.serve.test_chat import ask
from tests.support.serve_faults import FAILING

HONOURED = {*NAMES, "model", "instructions", "stream", "temperature", "top_p", "include", "reasoning", "text"}


def respond(client, seed, create=None, **more):
    asked = {"model": NAME, "input": QUESTION, "extra_body": {"seed": seed, "return_token_ids": True}} | more
    return (create or client.responses.create)(**asked)


def test_a_response_says_what_the_chat_completion_of_its_seed_says(client, seeds):
    for seed in seeds:
        chat, found = ask(client, seed), respond(client, seed)
        message, details = chat.choices[0].message, chat.usage.completion_tokens_details
        assert found.token_ids == chat.choices[0].token_ids
        assert found.output_text == message.content
        assert "".join(part.text for item in found.output if item.type == "reasoning" for part in item.content) == (
            message.reasoning
        )
        assert found.status == ("completed" if chat.choices[0].finish_reason == "stop" else "incomplete")
        assert found.usage.output_tokens == chat.usage.completion_tokens
        assert found.usage.output_tokens_details.longest_path_tokens == details.longest_path_tokens
        assert found.usage.output_tokens_details.reasoning_tokens == details.reasoning_tokens


def test_the_clients_stream_helper_ends_with_the_whole_response_and_its_events_carry_lanes(client, first):
    def wanted(answer) -> bool:
        spawned = answer.usage.completion_tokens_details.rounds
        content = answer.choices[0].message.content
        return bool(spawned and content and "spawn" not in content and answer.choices[0].finish_reason == "stop")

    seed, chat = first(wanted)
    with respond(client, seed, client.responses.stream) as stream:
        events = list(stream)
        final = stream.get_final_response()
    whole = respond(client, seed)
    assert final.output_text == whole.output_text == chat.choices[0].message.content
    assert final.usage == whole.usage
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    assert [kind for at, kind in enumerate(kinds) if kind != kinds[at - 1]] == [
        *("created", "in_progress"),
        *("output_item.added", "content_part.added", "reasoning_text.delta"),
        *("reasoning_text.done", "content_part.done", "output_item.done"),
        *("output_item.added", "content_part.added", "output_text.delta"),
        *("output_text.done", "content_part.done", "output_item.done"),
        "completed",
    ]
    lanes = {}
    for event in events:
        if getattr(event, "text", None) is not None and event.type.endswith(".delta"):
            lanes.setdefault((event.round, event.worker), []).append(event.text)
    assert {worker for _, worker in lanes} == {0, 1, 2, 3}
    read = "".join("".join(lanes[lane]) for lane in sorted(lanes))
    assert read.startswith("".join(event.delta for event in events if event.type == "response.reasoning_text.delta"))


def test_a_response_that_the_budget_ended_is_incomplete(client):
    found = respond(client, 1, max_output_tokens=12, temperature=1.5)
    assert (found.status, found.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert found.max_output_tokens == 12
    last = list(respond(client, 1, max_output_tokens=12, temperature=1.5, stream=True))[-1]
    assert (last.type, last.response.status) == ("response.incomplete", "incomplete")


def test_more_than_the_budget_is_cut_to_it_and_said_in_both_apis(client):
    told = f"tokens is {BUDGET + 1}; the longest path has at most {BUDGET} tokens here"
    found, chat = respond(client, 1, max_output_tokens=BUDGET + 1), ask(client, 1, max_tokens=BUDGET + 1)
    assert found.max_output_tokens == BUDGET
    assert (found.warnings, chat.warnings) == ([f"max_output_{told}"], [f"max_{told}"])
    assert chat.choices[0].token_ids == found.token_ids == ask(client, 1).choices[0].token_ids
    assert next(iter(ask(client, 1, max_tokens=BUDGET + 1, stream=True))).warnings == chat.warnings


def test_earlier_turns_are_read_without_their_reasoning_and_instructions_come_first(client, engine):
    earlier = respond(client, 3, max_output_tokens=BUDGET).output
    items = [{"role": "user", "content": "one"}, *(item.model_dump() for item in earlier if item.type == "reasoning")]
    items += [{"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "1"}]}]
    items += [{"role": "user", "content": [{"type": "input_text", "text": "two"}]}]
    found = respond(client, 3, input=items, instructions="be brief", max_output_tokens=4)
    turns = [("system", "be brief"), ("user", "one"), ("assistant", "1"), ("user", "two")]
    chat = ask(client, 3, messages=[{"role": role, "content": text} for role, text in turns], max_tokens=4)
    assert found.prompt_token_ids == chat.prompt_token_ids
    assert found.instructions == "be brief"


def test_logprobs_are_those_of_the_tokens_after_the_thinking(client, first, solved, engine):
    seed, chat = first(lambda answer: len(answer.choices[0].message.content or "") > 8)
    scored = ask(client, seed, logprobs=True).choices[0]
    scores = [score for segment in solved(seed).trunk for score in segment.logprobs]
    told = [token.logprob for token in scored.logprobs.content]
    assert told == pytest.approx(scores[len(scores) - len(told) :], abs=1e-4)
    text = "".join(token.token for token in scored.logprobs.content)
    assert chat.choices[0].message.content[:4] in text
    streamed = [choice for chunk in ask(client, seed, logprobs=True, stream=True) for choice in chunk.choices]
    assert [token for choice in streamed if choice.logprobs for token in choice.logprobs.content] == (
        scored.logprobs.content
    )
    [part] = respond(client, seed, include=["message.output_text.logprobs"]).output[-1].content
    assert [token.logprob for token in part.logprobs] == told


def test_a_rollout_is_a_line_that_dccot_view_opens(client, solved, tmp_path):
    asked = {"return_rollout": True, "seed": 2}
    whole = ask(client, 2, extra_body=asked).choices[0].rollout
    streamed = [choice for chunk in ask(client, 2, extra_body=asked, stream=True) for choice in chunk.choices][
        -1
    ].rollout
    for rollout in (whole, streamed, respond(client, 2, extra_body=asked).rollout):
        read = Rollout.from_json(rollout)
        assert read.response.as_read == solved(2).as_read
        assert read.response.trunk[0].logprobs == pytest.approx(solved(2).trunk[0].logprobs, abs=1e-4)
        assert read.question == QUESTION
    (tmp_path / "run.jsonl").write_text(json.dumps(whole) + "\n")
    assert view([str(tmp_path / "run.jsonl")]) == 0
    assert (tmp_path / "run.html").is_file()


def test_a_failing_worker_is_one_event_and_an_error_without_a_stream(client):
    events = list(respond(client, FAILING, stream=True))
    assert events[-1].type == "response.failed"
    assert "failed on this request" in events[-1].response.error.message
    with pytest.raises(InternalServerError, match="failed on this request"):
        respond(client, FAILING)


def test_what_would_be_dishonest_is_refused_by_name(client):
    schema = {"format": {"type": "json_schema", "name": "x", "schema": {}}}
    tool = {"type": "function", "name": "f", "parameters": {}, "strict": False}
    for name, value in {"text": schema, "tools": [tool], "previous_response_id": "resp_1", "background": True}.items():
        with pytest.raises(BadRequestError) as refused:
            respond(client, 1, **{name: value})
        assert refused.value.param.split(".")[0] == name
    assert issubclass(BadRequestError, APIError)


FIELDS = sorted({*ResponseCreateParamsNonStreaming.__annotations__} - HONOURED - {*WITHOUT_EFFECT})
UNSUPPORTED = {field: {"type": "something else"} for field in FIELDS}
UNSUPPORTED |= {"n": 2, "logprobs": True}  # of chat completions: two answers would be mixed; `include` asks for scores


@pytest.mark.parametrize(("field", "value"), UNSUPPORTED.items())
def test_a_field_that_is_not_supported_is_refused_by_name(field, value):
    with pytest.raises(Refused, match=field.split(".")[0]) as refused:
        Responses(json.dumps({"input": QUESTION, field: value}).encode())
    assert refused.value.status == 400


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"input": []},
        {"input": 7},
        {"input": "x", "messages": []},
        {"input": [{"type": "item_reference", "id": "x"}]},
    ],
)
def test_input_that_is_no_conversation_is_refused_in_the_words_of_this_api(body):
    with pytest.raises(Refused, match=r"^(input|messages is called input)"):
        Responses(json.dumps(body).encode())


def test_the_values_that_ask_for_nothing_are_accepted():
    asked = {
        "store": False,
        "tools": [],
        "tool_choice": "auto",
        "text": {"format": {"type": "text"}},
        "top_logprobs": 0,
    }
    asked |= {"reasoning": {"effort": None, "summary": "auto"}, "include": ["reasoning.encrypted_content"]}
    plain = Responses(json.dumps({"input": QUESTION}).encode())
    assert Responses(json.dumps({"input": QUESTION, **asked}).encode()).request == plain.request
    assert {name.split(".")[0] for name in NEUTRAL} >= {"text", "store"}
