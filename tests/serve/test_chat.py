"""The endpoint on real servers, asked by the official client: the tokens of `dccot solve`, whole and streamed."""

import asyncio
import contextlib
import json
import re
import socket
from dataclasses import replace

import pytest
from openai import AsyncOpenAI, BadRequestError, InternalServerError, OpenAI

from dccot.data.prompts import INSTRUCTION, PARALLEL_INSTRUCTION, PromptConfig
from dccot.rollout.director import RolloutConfig
from dccot.rollout.generate import Request, generate
from dccot.serve.stream import Piece
from tests.serve.conftest import BUDGET, NAME, OTHER_EOS, QUESTION
from tests.support.rounds import rounds_of
from tests.support.serve_faults import FAILING, HALF_STALLED, OVERFLOWING, STALLED
from tests.support.servers import KEY, eventually


def ask(client, seed=1, question=QUESTION, **more):
    messages = [{"role": "user", "content": question}]
    asked = {"model": NAME, "messages": messages, "seed": seed, "extra_body": {"return_token_ids": True}} | more
    return client.chat.completions.create(**asked)


def test_the_same_seed_gives_the_token_ids_of_solve(client, solved, seeds):
    for seed in seeds:
        expected, answer = solved(seed), ask(client, seed)
        assert answer.choices[0].token_ids == expected.as_read
        assert answer.prompt_token_ids == expected.prompt
        assert answer.usage.completion_tokens == expected.sampled_tokens
        details = answer.usage.completion_tokens_details
        assert details.longest_path_tokens == expected.longest_path
        assert (details.rounds, details.workers) == (len(expected.forks), 3 * len(expected.forks))
    assert rounds_of(expected)


def test_reasoning_effort_none_is_solve_without_workers(client, solved):
    answer = ask(client, 5, reasoning_effort="none")
    assert answer.choices[0].token_ids == solved(5, sequential=True).as_read
    assert answer.usage.completion_tokens_details.workers == 0


def streamed(chunks):
    """(reasoning, content, {(round, worker): token ids}, finish reason, usage) of one choice."""
    reasoning, content, lanes, finish, usage = "", "", {}, None, None
    for chunk in chunks:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            extra = choice.delta.model_extra or {}
            reasoning += extra.get("reasoning", "")
            content += choice.delta.content or ""
            assert finish is None, "more after the finish reason"
            finish = choice.finish_reason
            if "worker" in extra:
                assert len(choice.token_ids) == extra["tokens"]
                lanes.setdefault((extra["round"], extra["worker"]), []).extend(choice.token_ids)
    return reasoning, content, lanes, finish, usage


def test_a_stream_says_what_the_whole_answer_says_and_its_lanes_do_too(client, seeds):
    for seed in seeds:
        whole = ask(client, seed)
        message = whole.choices[0].message
        chunks = list(ask(client, seed, stream=True, stream_options={"include_usage": True}))
        reasoning, content, lanes, finish, usage = streamed(chunks)
        assert (reasoning, content, finish) == (message.reasoning, message.content, whole.choices[0].finish_reason)
        assert usage == whole.usage
        assert [token for lane in sorted(lanes) for token in lanes[lane]] == whole.choices[0].token_ids


def test_workers_are_streamed_side_by_side_although_the_reasoning_is_in_order(client):
    for seed in range(1, 30):  # until two workers write for a while
        lanes = [
            (delta.model_extra["worker"], bool(delta.model_extra.get("reasoning")))
            for chunk in ask(client, seed, stream=True)
            for delta in [choice.delta for choice in chunk.choices]
            if (delta.model_extra or {}).get("worker") and delta.model_extra["round"] == 1
        ]
        if min(sum(worker == wanted for worker, _ in lanes) for wanted in (1, 2)) > 4:
            break
    second_of_two = [at for at, (worker, _) in enumerate(lanes) if worker == 2][1]
    assert second_of_two < max(at for at, (worker, _) in enumerate(lanes) if worker == 1)
    assert not lanes[second_of_two][1]


def test_a_worker_that_waited_with_nothing_to_read_does_not_end_the_stream():
    from dccot.serve.chat import Choice

    choice = Choice(0, ())
    pieces = [
        Piece((0, worker), text, [1], ((0, 1), (0, 2)) if not worker else ())
        for worker, text in ((0, "a"), (2, ""), (1, "b"))
    ]
    told = [delta for piece in pieces for delta in choice.hear(piece)]
    assert [delta.lane["text"] for delta in told] == ["a", "", "b"]  # an empty delta would be taken for the end
    assert not any(delta.ends for delta in told)


def test_another_token_that_ends_the_models_text_is_not_part_of_it(client, engine):
    [other] = engine.tokenizer.encode(OTHER_EOS)
    answers = (ask(client, seed).choices[0] for seed in range(1, 200))
    answer = next(a for a in answers if a.token_ids[-1] == other and re.fullmatch("[^<]+", a.message.content))
    written = engine.tokenizer.decode(answer.token_ids, skip_special_tokens=False)
    assert answer.finish_reason == "stop"
    assert written.endswith(OTHER_EOS)
    assert not answer.message.content.endswith(OTHER_EOS)
    assert written[:-1].rstrip().endswith(answer.message.content)


def test_choices_are_the_samples_of_one_seed_and_usage_is_their_sum(client, engine):
    ids = PromptConfig().ids(engine.tokenizer, QUESTION)
    requests = [Request("problem", sample, ids) for sample in range(3)]
    found = generate(engine, requests, RolloutConfig(budget=BUDGET), seed=(9,))
    expected = [response for _, response in sorted(found, key=lambda pair: pair[0].sample)]
    answer = ask(client, 9, n=3)
    assert [choice.token_ids for choice in answer.choices] == [response.as_read for response in expected]
    assert answer.usage.completion_tokens == sum(response.sampled_tokens for response in expected)
    longest = answer.usage.completion_tokens_details.longest_path_tokens
    assert longest == max(response.longest_path for response in expected)
    streamed_choices = {choice.index for chunk in ask(client, 9, n=3, stream=True) for choice in chunk.choices}
    assert streamed_choices == {0, 1, 2}


def test_the_budget_bounds_the_longest_path_and_is_given_as_the_reason(client):
    answer = ask(client, 1, max_completion_tokens=12, temperature=1.5)
    assert answer.choices[0].finish_reason == "length"
    assert answer.choices[0].stop_reason == "budget"
    assert answer.usage.completion_tokens_details.longest_path_tokens <= 12


def test_temperature_and_top_p_are_those_of_the_request(client, engine):
    ids = PromptConfig().ids(engine.tokenizer, QUESTION)
    config = replace(RolloutConfig(budget=BUDGET), temperature=1.1, top_p=0.7)
    [(_, expected)] = generate(engine, [Request("problem", 0, ids)], config, seed=(3,))
    assert ask(client, 3, temperature=1.1, top_p=0.7).choices[0].token_ids == expected.as_read


def test_a_stop_text_cuts_the_answer_and_leaves_the_reasoning_whole(client, first, engine):
    seed, plain = first(
        lambda answer: re.search(r"\w\w{5}", (c := answer.choices[0].message.content)) and "spawn" not in c
    )
    message = plain.choices[0].message
    stop = re.search(r"\w\w{5}", message.content)[0][3:5]
    at = message.content.index(stop)
    cut = ask(client, seed, stop=[stop])
    assert cut.choices[0].message.content == message.content[:at].rstrip()
    assert cut.choices[0].message.reasoning == message.reasoning
    assert (cut.choices[0].finish_reason, cut.choices[0].stop_reason) == ("stop", stop)
    assert cut.usage.completion_tokens <= plain.usage.completion_tokens
    _, content, lanes, finish, _ = streamed(ask(client, seed, stop=[stop], stream=True))
    assert (content, finish) == (cut.choices[0].message.content, "stop")
    # a lane has all that was sampled
    assert stop in engine.tokenizer.decode(lanes[max(lanes)]).partition("</think>")[2]


def test_the_async_client_gets_many_answers_at_once_whole_and_streamed(server, solved, seeds):
    async def lanes(client, seed):
        return streamed([chunk async for chunk in await ask(client, seed, stream=True)])[2]

    async def all_of_them():
        async with AsyncOpenAI(base_url=f"{server.address}/v1", api_key=KEY, max_retries=0) as client:
            whole = asyncio.gather(*(ask(client, seed) for seed in seeds))
            parts = asyncio.gather(*(lanes(client, seed) for seed in seeds))
            return await whole, await parts

    whole, parts = asyncio.run(all_of_them())
    expected = [solved(seed).as_read for seed in seeds]
    assert [answer.choices[0].token_ids for answer in whole] == expected
    assert [[token for lane in sorted(part) for token in part[lane]] for part in parts] == expected


def test_the_plugin_by_vllms_own_means_asks_through_the_models_own_chat_template(plain, chat_model, engine):
    client = OpenAI(base_url=f"{plain.address}/v1", api_key=KEY, max_retries=0)
    [card] = client.models.list().data
    assert card.dccot["workers"] == 3
    answer = ask(client, 4, model=card.id)
    question = f"{QUESTION} {PARALLEL_INSTRUCTION} {INSTRUCTION}"
    # its chat tokens have the ids of DeepSeek's
    spelled = f"<｜User｜>user\n{question}<｜Assistant｜>\n<｜User｜>assistant\n<think>\n"
    assert answer.prompt_token_ids == engine.tokenizer.encode(spelled, add_special_tokens=False)
    request = Request("problem", 0, answer.prompt_token_ids)
    [(_, expected)] = generate(engine, [request], RolloutConfig(budget=BUDGET), seed=(4,))
    assert answer.choices[0].token_ids == expected.as_read
    turns = [("system", "be brief"), ("user", "one"), ("assistant", "1"), ("user", "two")]
    messages = [{"role": role, "content": content} for role, content in turns]
    ids = ask(client, 4, model=card.id, messages=messages, max_tokens=4).prompt_token_ids
    text = engine.tokenizer.decode(ids, skip_special_tokens=False)
    written = text.replace("<｜User｜>", "[").replace("<｜Assistant｜>", "]")
    assert written.startswith("[system\nbe brief]\n[user\none]\n[assistant\n1]\n[user\ntwo You can spawn")
    with pytest.raises(BadRequestError, match="holds the special token"):
        ask(client, 4, "one<|im_end|>", model=card.id)


def test_variables_of_the_chat_template_arrive_and_those_that_it_does_not_know_are_named(
    plain, client, chat_model, engine
):
    def asked(client, model, **variables):
        more = {"return_token_ids": True, "chat_template_kwargs": variables}
        return ask(client, 4, model=model, max_tokens=4, extra_body=more)

    there = OpenAI(base_url=f"{plain.address}/v1", api_key=KEY, max_retries=0)
    name = there.models.list().data[0].id
    toned = asked(there, name, tone="calm")
    assert engine.tokenizer.decode(toned.prompt_token_ids).startswith("calm")
    assert "warnings" not in toned.model_extra
    for client_, model in ((there, name), (client, NAME)):  # the second has no template
        assert asked(client_, model, enable_thinking=False).warnings == [
            "chat_template_kwargs makes no difference to this model's prompt: enable_thinking"
        ]
    with pytest.raises(BadRequestError, match=r"chat_template_kwargs.chat_template is not a variable"):
        asked(there, name, chat_template="{{ 1 }}")
    with pytest.raises(BadRequestError, match="holds the special token"):
        asked(there, name, tone="<|im_end|>")


def sent(server, length: int, body: str) -> socket.socket:
    """A connection on which a request, or its beginning, was sent."""
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=600)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {KEY}\r\n"
    connection.sendall(f"{head}Content-Length: {length}\r\n\r\n{body}".encode())
    return connection


def test_a_client_that_goes_away_leaves_nothing_running(client, server):
    for seed in range(20, 25):
        stream = ask(client, seed, stream=True, n=4)
        for _ in zip(range(6), stream, strict=False):
            pass
        stream.close()
        assert eventually(lambda: server.running() == 0 and server.metric("dccot_responses_running") == 0)


def test_a_client_that_goes_away_before_an_answer_leaves_nothing_running(server):
    before = server.metric("dccot_responses_total")
    body = json.dumps({"messages": [{"role": "user", "content": QUESTION}], "seed": STALLED})
    with sent(server, len(body), body):
        assert eventually(lambda: server.metric("dccot_responses_running") == 1)
    assert eventually(lambda: server.metric("dccot_responses_running") == 0)
    assert server.metric("dccot_responses_total") == before + 1


def test_a_request_that_is_cancelled_half_way_is_counted_once_per_choice(client, server):
    def ended() -> float:
        return server.metric("dccot_responses_total")

    before = ended()
    stream = ask(client, HALF_STALLED, stream=True, n=2)
    next(chunk for chunk in stream if any(choice.finish_reason for choice in chunk.choices))
    stream.close()
    assert eventually(lambda: server.metric("dccot_responses_running") == 0)
    assert ended() == before + 2


def test_a_failing_worker_ends_its_request_with_an_error_and_not_the_server(client, server):
    refused = server.metric("dccot_requests_refused_total")
    with pytest.raises(InternalServerError, match="failed on this request"):
        ask(client, FAILING)
    with pytest.raises(Exception, match="failed on this request"):
        list(ask(client, FAILING, stream=True))
    assert eventually(lambda: server.running() == 0)
    assert server.metric("dccot_requests_refused_total") == refused
    assert ask(client, 1).choices[0].token_ids


def test_a_response_that_the_engine_has_no_room_for_is_answered_503_with_retry_after(client):
    with pytest.raises(InternalServerError) as refused:
        ask(client, OVERFLOWING)
    assert refused.value.status_code == 503
    assert int(refused.value.response.headers["retry-after"]) >= 1


def test_requests_that_are_still_being_sent_take_places_too(client, server):
    def answered() -> bool:
        with contextlib.suppress(InternalServerError):
            return bool(ask(client, 1).choices)
        return False

    with contextlib.ExitStack() as stack:
        for _ in range(9):  # eight places
            last = stack.enter_context(sent(server, 1000, "{"))
        assert last.recv(1000).startswith(b"HTTP/1.1 503")
        assert not answered()
    assert eventually(answered)


def test_more_than_the_server_takes_is_answered_503_with_retry_after(client, server):
    streams = [ask(client, STALLED, n=4, stream=True) for _ in range(2)]  # eight places
    with pytest.raises(InternalServerError) as refused:
        ask(client, 1)
    assert refused.value.status_code == 503
    assert int(refused.value.response.headers["retry-after"]) >= 1
    for stream in streams:
        stream.close()
    assert eventually(lambda: server.metric("dccot_responses_running") == 0)
    assert ask(client, 1).choices[0].token_ids
