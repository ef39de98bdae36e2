"""When workers start and how joins are prepared, on real servers: neither changes a token; and workers that are cut."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from openai import OpenAI

from dccot.rollout.director import RolloutConfig
from dccot.rollout.generate import Request, generate
from tests.serve.conftest import BUDGET, NAME, QUESTION
from tests.support.rounds import rounds_of
from tests.support.servers import KEY

SEEDS = range(1, 17)


def ask(client, seed, model=NAME, **more):
    extra = {"return_token_ids": True} | more.pop("extra", {})
    messages = [{"role": "user", "content": QUESTION}]
    return client.chat.completions.create(model=model, messages=messages, seed=seed, extra_body=extra, **more)


def lanes_of(client, seed, **extra):
    """[(round, worker) of each piece of a worker], token ids by lane, and what the last chunk says."""
    order, lanes, last = [], {}, None
    for chunk in ask(client, seed, stream=True, extra=extra):
        for choice in chunk.choices:
            last = choice if choice.finish_reason else last
            more = choice.delta.model_extra or {}
            if "worker" in more:
                order += [(more["round"], more["worker"])] if more["worker"] else []
                lanes.setdefault((more["round"], more["worker"]), []).extend(choice.token_ids)
    return order, lanes, last


@pytest.fixture(scope="module")
def spawning(solved):
    """Seeds of responses that spawn."""
    return [seed for seed in SEEDS if rounds_of(solved(seed))]


@pytest.mark.parametrize("branching", ["eager", "never", "adaptive"])
def test_when_workers_start_changes_no_token(client, solved, branching):
    with ThreadPoolExecutor(8) as pool:
        answers = pool.map(lambda seed: ask(client, seed, extra={"branching": branching}), SEEDS)
        found = [answer.choices[0].token_ids for answer in answers]
    assert found == [solved(seed).as_read for seed in SEEDS]


def test_one_after_another_no_worker_writes_before_the_one_before_has_ended(client, spawning):
    for seed in spawning[:3]:
        order, _, _ = lanes_of(client, seed, branching="never")
        assert order == sorted(order)
    assert any((order := lanes_of(client, seed)[0]) != sorted(order) for seed in spawning)


def test_what_is_read_before_a_fork_has_ended_changes_neither_tokens_nor_usage(plain, engine):
    client = OpenAI(base_url=f"{plain.address}/v1", api_key=KEY, max_retries=0)
    model = client.models.list().data[0].id
    before = plain.metric("vllm:generation_tokens_total")
    answers = {seed: ask(client, seed, model) for seed in SEEDS}
    sampled = sum(answer.usage.completion_tokens for answer in answers.values())
    assert plain.metric("vllm:generation_tokens_total") - before > sampled  # one token for each such call
    requests = [Request("problem", 0, answer.prompt_token_ids) for answer in answers.values()]
    for seed, request in zip(SEEDS, requests):
        [(_, expected)] = generate(engine, [request], RolloutConfig(budget=BUDGET), seed=(seed,))
        assert answers[seed].choices[0].token_ids == expected.as_read
        assert answers[seed].usage.completion_tokens == expected.sampled_tokens
    assert plain.metric("dccot_join_seconds_count") > 0


def test_the_step_time_that_is_learnt_is_in_the_metrics(client, server):
    ask(client, 1)
    assert 0 < server.metric("dccot_step_seconds_base") < 60
    assert server.metric("dccot_step_seconds_per_sequence") >= 0
    assert server.metric("dccot_workers_waiting") == 0


def test_a_worker_beyond_its_tokens_is_read_as_far_as_it_got_and_named(client, spawning, solved):
    cut = server_cut = 0
    for seed in spawning:
        answer = ask(client, seed, extra={"max_worker_tokens": 5}).choices[0]
        _, lanes, last = lanes_of(client, seed, max_worker_tokens=5)
        assert [token for lane in sorted(lanes) for token in lanes[lane]] == answer.token_ids
        whole = [worker.sampled for worker in rounds_of(solved(seed))[0].workers]
        inserted = [len(lanes[1, i]) - min(len(text), 5) for i, text in enumerate(whole, 1)]  # the opening tag
        assert all(lanes[1, i][inserted[i - 1] :] == text[:5] for i, text in enumerate(whole, 1))
        assert getattr(answer, "cut_workers", []) == getattr(last, "cut_workers", [])
        cut += sum(len(text) > 5 for text in whole)
        server_cut += len(getattr(answer, "cut_workers", []))
    assert server_cut >= cut > 0  # later rounds have some as well


def test_the_last_worker_is_not_waited_for_when_it_is_much_longer_than_the_others(client, spawning, solved):
    cut = 0
    for seed in spawning:
        whole = [len(worker.sampled) for worker in rounds_of(solved(seed))[0].workers]
        _, lanes, last = lanes_of(client, seed, straggler_factor=1.2)
        *_, second, longest = sorted(whole)
        tags = len(lanes[1, 1 + whole.index(second)]) - second
        written = len(lanes[1, 1 + whole.index(longest)]) - tags
        if longest + tags > 1.2 * (second + tags) + 12:  # the engine is some steps ahead of what is read
            assert written < longest
            assert f"worker {1 + whole.index(longest)}" in last.cut_workers
            cut += 1
    assert cut
