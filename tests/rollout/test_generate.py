"""The real engine under the director: exact ids, exact log-probs, and the same again for the same seed."""

import itertools
import json
import random
from collections import Counter

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from dccot.lab.worlds import bigram as tiny
from dccot.rollout.director import RolloutConfig
from dccot.rollout.engine import EngineStalled
from dccot.rollout.generate import Request, Watch, generate, seed_of
from dccot.rollout.response import Finish, Response
from tests.support.rounds import final_of, rounds_of

CONFIG = RolloutConfig(budget=160)


def requests(engine, count: int, problems: int = 2, words: int = 3, parallel: bool = True) -> list[Request]:
    texts = [f"{tiny.BOS}{tiny.USER}{'abc ' * words}{p}{tiny.ASSISTANT}<think>\n" for p in range(problems)]
    prompts = [engine.tokenizer.encode(text) for text in texts]
    return [Request(f"p{i % problems}", i // problems, prompts[i % problems], parallel) for i in range(count)]


def run(engine, count=24, config=CONFIG, seed=(0, 0), **more) -> dict[tuple[str, int], Response]:
    found = generate(engine, requests(engine, count), config, seed=seed, **more)
    return {(request.problem, request.sample): response for request, response in found}


class Listener(Watch):
    """Writes down every call that the loop makes and how it ended."""

    def __init__(self):
        self.began, self.ended, self.order = [], [], []  # (request, call), (request, call, completion), what happened

    def started(self, request, call):
        self.began.append((request, call))
        self.order.append("started")

    def finished(self, request, call, completion):
        self.ended.append((request, call, completion))
        self.order.append("finished")

    def answered(self, request, response):
        self.order.append("done")


def as_read(responses: dict) -> dict:
    return {key: response.as_read for key, response in responses.items()}


@pytest.fixture(scope="module")
def heard_runs(engines) -> dict[str, tuple[dict, Listener]]:
    """One run per kind of tokenizer that several tests look at from different sides."""
    runs = {}
    for kind, engine in engines.items():
        engine.forget_prefixes()
        heard = Listener()
        runs[kind] = run(engine, watch=heard), heard
    return runs


@pytest.fixture
def responses(heard_runs, kind) -> dict[tuple[str, int], Response]:
    return heard_runs[kind][0]


@pytest.fixture
def heard(heard_runs, kind) -> Listener:
    return heard_runs[kind][1]


@pytest.fixture(scope="module")
def judges(checkpoints) -> dict:
    opened = AutoModelForCausalLM.from_pretrained
    return {kind: opened(folder, dtype=torch.float32).eval() for kind, folder in checkpoints.items()}


@torch.no_grad()
def logprobs_by(judge, prompt: list[int], ids: list[int], temperature: float) -> torch.Tensor:
    logits = judge(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
    return (logits / temperature).log_softmax(-1).gather(1, torch.tensor(ids).unsqueeze(1)).squeeze(1)


def test_every_call_was_sampled_with_the_log_probs_that_transformers_gives(responses, heard, kind, judges):
    assert {len(response.forks) for response in responses.values()} >= {0, 1, 2}
    for _, call, completion in heard.ended:
        expected = logprobs_by(judges[kind], call.prompt, completion.ids, CONFIG.temperature)
        assert len(completion.logprobs) == len(completion.ids)
        assert torch.allclose(torch.tensor(completion.logprobs), expected, atol=1e-4)


def test_responses_hold_exactly_what_was_sampled(responses, heard):
    sampled = {(r.problem, r.sample, *call.path): completion.ids for r, call, completion in heard.ended}
    kept = {}
    for (problem, sample), response in responses.items():
        for index, round_ in enumerate(rounds_of(response)):
            for i, segment in enumerate([round_.director, *round_.workers]):
                kept[problem, sample, index, i] = segment.sampled
        if final_of(response) is not None:
            kept[problem, sample, len(response.forks), 0] = final_of(response).sampled
    assert kept == sampled


def test_each_call_stops_at_its_own_tag_and_nowhere_before(engine, heard):
    ends = Counter(completion.stop for _, _, completion in heard.ended)
    assert min(ends["spawn"], ends["close"], ends["eos"], ends["length"]) > 0
    for _, call, completion in heard.ended:
        but_last, whole = engine.tokenizer.decode(completion.ids[:-1]), engine.tokenizer.decode(completion.ids)
        [stop] = call.stops
        assert stop not in but_last
        assert (stop in whole) == (completion.stop == ("close" if call.path[1] else "spawn"))
        assert (completion.ids[-1] == engine.tokenizer.eos_token_id) == (completion.stop == "eos")
        assert engine.tokenizer.eos_token_id not in completion.ids[:-1]
        assert len(completion.ids) <= call.max_tokens
        assert completion.stop != "length" or len(completion.ids) == call.max_tokens


def test_a_tag_that_runs_on_into_the_next_line_keeps_its_last_token(engines, heard_runs):
    over = engines["spelled"].tokenizer.convert_tokens_to_ids(">\n")
    heard = heard_runs["spelled"][1]
    overshot = [(request, call, completion) for request, call, completion in heard.ended if completion.ids[-1] == over]
    assert {call.path[1] > 0 for _, call, _ in overshot} == {True, False}
    for request, call, completion in overshot:
        if completion.stop == "spawn":
            workers = [c for r, c in heard.began if r is request and c.path[0] == call.path[0] and c.path[1]]
            assert all(c.prompt[: len(c.prompt) - len(c.inserted)] == call.prompt + completion.ids for c in workers)


def test_a_response_is_done_while_others_are_still_at_their_first_part(responses, heard):
    # all are begun at once
    assert [call.path for _, call in heard.began[: len(responses)]] == [(0, 0)] * len(responses)
    finished_by_then = heard.ended[: heard.order[: heard.order.index("done")].count("finished")]
    assert sum(call.path == (0, 0) for _, call, _ in finished_by_then) < len(responses)


def test_the_same_seed_gives_the_same_ids_and_log_probs_again(engine, responses):
    assert run(engine) == responses


def test_what_else_is_in_the_batch_does_not_matter_to_the_ids(engine, responses):
    for request in requests(engine, 4):
        [(_, alone)] = generate(engine, [request], CONFIG, seed=(0, 0))
        assert alone.as_read == responses[request.problem, request.sample].as_read


def test_samples_workers_rounds_problems_and_steps_all_have_seeds_of_their_own(engines, monkeypatch):
    engine, seeds, add = engines["single"], [], engines["single"].add
    monkeypatch.setattr(engine, "add", lambda *args, seed, **more: (seeds.append(seed), add(*args, seed=seed, **more)))
    for step in range(2):
        run(engine, seed=(0, step), config=RolloutConfig(budget=100))
    assert len(seeds) > 100
    assert len(set(seeds)) == len(seeds)


def test_a_seed_depends_on_every_part_of_its_key_and_on_nothing_else():
    keys = list(itertools.product((0, 1, 11), (0, 1), ("1", "11", "a/0"), (0, 1), (0, 1), (0, 3)))
    assert len({seed_of(*key) for key in keys}) == len(keys)
    assert seed_of(0, 7, "p", 3, 1, 2) == 874082733621548589  # half of: printf "(0, 7, 'p', 3, 1, 2)" | b2sum -l 64


def test_the_trainers_random_numbers_are_left_alone(engines):
    torch.manual_seed(5), np.random.seed(5), random.seed(5)
    expected = torch.rand(3), np.random.rand(), random.random()
    torch.manual_seed(5), np.random.seed(5), random.seed(5)
    run(engines["single"], count=4)
    assert torch.equal(torch.rand(3), expected[0])
    assert (np.random.rand(), random.random()) == expected[1:]


def test_prompts_that_do_not_fit_into_one_step_together_are_no_trouble(engines):
    """A CPU generator cannot be wound back, which vLLM does when it prefills a seeded prompt in chunks."""
    engine = engines["single"]
    many = requests(engine, 40, problems=40, words=75)  # 40 × 300 tokens
    assert len(list(generate(engine, many, RolloutConfig(budget=3), seed=(0,)))) == 40


def test_calls_that_had_to_make_room_go_on_with_the_same_ids(checkpoints, build_engine, heard_runs):
    """A KV cache of 2,000 tokens for 24 responses: calls are put off in the middle, computed again later, and end as
    they would have.
    """
    cramped = build_engine(checkpoints["single"], kv_cache_gb=2_000 * 1024 / 2**30)
    put_off = set()

    class Interruptions(Watch):
        def stepped(self, engine):
            waiting = engine._engine.engine_core.engine_core.scheduler.waiting
            put_off.update(call.request_id for call in waiting if call.num_output_tokens)

    responses = run(cramped, watch=Interruptions())
    assert put_off
    assert as_read(responses) == as_read(heard_runs["single"][0])


def test_greedy_sequential_decoding_is_what_transformers_decodes(engine, kind, judges):
    config = RolloutConfig(budget=40, temperature=0.0)
    for request, response in generate(engine, requests(engine, 2, parallel=False), config, seed=(0,)):
        expected = judges[kind].generate(torch.tensor([request.prompt]), max_new_tokens=40, do_sample=False)[0]
        assert request.prompt + final_of(response).sampled == expected.tolist()
        assert response.forks == []


def test_sequential_mode_runs_past_the_tags(engines):
    engine = engines["single"]
    responses = [r for _, r in generate(engine, requests(engine, 24, parallel=False), CONFIG, seed=(0, 0))]
    spawn = engine.tokenizer.convert_tokens_to_ids("<spawn_workers>")
    assert any(spawn in final_of(response).sampled[:-1] for response in responses)
    assert {response.finish for response in responses} == {Finish.ANSWERED, Finish.BUDGET}


def test_another_token_that_ends_the_models_text_is_no_tag(tmp_path, build_engine):
    folder = tiny.save(tmp_path / "tiny", "spelled", context=512)
    eos, other = tiny.tokenizer("spelled").encode(f"{tiny.EOS}e")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [eos, other]}))
    engine = build_engine(folder)
    ends = set()
    for parallel in (False, True):
        for _, response in generate(engine, requests(engine, 8, parallel=parallel), CONFIG, seed=(1,)):
            assert parallel or not response.forks
            assert all(other not in segment.sampled[:-1] for segment in response.segments())
            if response.finish is Finish.ANSWERED:
                ends.add(final_of(response).sampled[-1])
    assert other in ends
    engine.shutdown()


def test_the_context_of_the_model_is_never_exceeded(engines):
    engine, heard = engines["single"], Listener()
    long = [Request("p", i, [5] * (engine.context - 60)) for i in range(24)]
    responses = [r for _, r in generate(engine, long, RolloutConfig(budget=10_000), seed=(0,), watch=heard)]
    assert all(len(call.prompt) + len(completion.ids) <= engine.context for _, call, completion in heard.ended)
    assert Finish.CONTEXT in {response.finish for response in responses}


def test_top_p_shows_in_the_log_probs(engines, checkpoints, judges):
    """What is sampled from is the distribution cut to top_p and normalised again, and its log-probs are reported."""
    engine = engines["single"]
    heard = Listener()
    run(engine, config=RolloutConfig(budget=60, temperature=1.0, top_p=0.5), watch=heard)
    for _, call, completion in heard.ended[:10]:
        ids = completion.ids
        with torch.no_grad():
            logits = judges["single"](torch.tensor([call.prompt + ids])).logits[0, len(call.prompt) - 1 : -1]
        probability, order = logits.softmax(-1).sort(descending=True)
        kept = probability.cumsum(-1) - probability < 0.5
        expected = (probability * kept / (probability * kept).sum(-1, keepdim=True)).log()
        mine = expected.gather(1, (order == torch.tensor(ids).unsqueeze(1)).int().argmax(1, keepdim=True)).squeeze(1)
        assert torch.allclose(torch.tensor(completion.logprobs), mine, atol=1e-4)


def test_only_so_many_responses_go_on_at_once_when_asked(engines):
    class Counting(Listener):
        now = most = 0

        def started(self, request, call):
            self.now += call.path == (0, 0)
            self.most = max(self.most, self.now)

        def answered(self, request, response):
            self.now -= 1

    counting = Counting()
    assert len(run(engines["single"], count=12, concurrency=3, watch=counting)) == 12
    assert counting.most == 3


def test_a_caller_that_stops_early_leaves_the_engine_empty(engine):
    loop = generate(engine, requests(engine, 24), CONFIG, seed=(0, 0))
    next(loop)
    assert engine.pending
    with pytest.raises(RuntimeError, match=r"the prefix cache is in use by \d+ running calls: p"):
        engine.forget_prefixes()
    loop.close()
    assert not engine.pending
    assert engine.step() == []
    engine.forget_prefixes()  # would be refused if blocks were still held


def test_a_stalled_engine_names_what_it_is_waiting_for(engines, monkeypatch):
    engine = engines["single"]
    monkeypatch.setattr(engine.config, "stall_seconds", 0.0)
    message = r"no call finished for .* \(engine.stall_seconds is 0\); 2 pending: p0/0/0.0 \(\d+/160 tokens\), p1/0/0.0"
    with pytest.raises(EngineStalled, match=message):
        list(generate(engine, requests(engine, 2), CONFIG, seed=(0, 0)))
    assert not engine.pending


def test_a_live_view_sees_the_tokens_as_they_come(engine):
    seen: dict[str, list[int]] = {}

    class View(Watch):
        def stepped(self, engine):
            for key, ids in engine.written().items():
                assert ids[: len(seen.get(key, []))] == seen.get(key, [])
                seen[key] = ids

    responses = run(engine, count=6, watch=View())
    for (problem, sample), response in responses.items():
        first = rounds_of(response)[0].director if rounds_of(response) else final_of(response)
        so_far = seen.get(f"{problem}/{sample}/0.0", [])
        assert so_far == first.sampled[: len(first) - 1]  # all but the token that ended the call


def test_workers_take_their_prompt_from_the_prefix_cache(heard):
    block = 32
    workers = [(call, completion) for _, call, completion in heard.ended if call.path[1]]
    full = sum((len(call.prompt) - len(call.inserted) - 1) // block * block for call, _ in workers)
    assert full > 0
    assert sum(completion.cached for _, completion in workers) >= 0.9 * full
