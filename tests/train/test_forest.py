"""The forest is the response: same log-probs and gradients as the paper's layout and as the calls that inference
made.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dccot.kernels.norm_rotate import rotate
from dccot.kernels.tree_attention import TreeMask
from dccot.model.rope import cos_sin
from dccot.rollout.response import Response, Segment
from dccot.rollout.thread import Thread
from dccot.train.forest import _size, build_forest, pack
from dccot.train.update import compute_logprobs
from tests.support.rounds import Round, flat, rounds_of

TEMPERATURE = 0.6
EXACT = {"rtol": 1e-9, "atol": 1e-9}

tokens = st.integers(2, 39)


@st.composite
def segments(draw, inserted: int) -> Segment:
    sampled = draw(st.lists(tokens, max_size=4))
    return Segment(draw(st.lists(tokens, min_size=inserted, max_size=inserted)), sampled)


@st.composite
def responses(draw, prompt: list[int]) -> Response:
    """Up to three rounds of one to five workers, any segment possibly empty; perhaps no spawn, perhaps nobody to read
    the workers.
    """
    workers = st.lists(segments(2), min_size=1, max_size=5)
    rounds = [Round(draw(segments(1 if number else 0)), draw(workers)) for number in range(draw(st.integers(0, 3)))]
    final = None if rounds and draw(st.booleans()) else draw(segments(1 if rounds else 0))
    return flat(prompt, rounds, final)


def deep_response(rng: random.Random, prompt: list[int]) -> Response:
    """Forks of one to eight workers, up to three levels deep; a thread may end while its workers write."""

    def segment(inserted: int) -> Segment:
        ids = [rng.randrange(2, 40) for _ in range(inserted + rng.randint(0, 3))]
        return Segment(ids[:inserted], ids[inserted:])

    def thread(inserted: int, levels: int) -> Thread[Segment]:
        forks = [
            [thread(2, levels - 1) for _ in range(rng.randint(1, 8 if levels == 3 else 3))]
            for _ in range(rng.choice((0, 1, 1, 2)) if levels == 3 else rng.choice((0, 0, 0, 1)) if levels else 0)
        ]
        after = [segment(1) for _ in forks]
        return Thread([segment(inserted), *after[: -1 if forks and rng.random() < 0.15 else None]], forks)

    whole = thread(0, 3)
    return Response(whole.trunk, whole.forks, prompt=prompt)


@st.composite
def groups(draw) -> list[list[Response]]:
    """One to three prompts, one to three responses each; sampled tokens are numbered in reading order where log-probs
    are. Half of the time trees without limits.
    """
    made = []
    deep = draw(st.none() | st.randoms(use_true_random=False))
    for _ in range(draw(st.integers(1, 3))):
        prompt = draw(st.lists(tokens, min_size=1, max_size=4))
        one = lambda prompt=prompt: deep_response(deep, list(prompt)) if deep else draw(responses(list(prompt)))
        made.append([one() for _ in range(draw(st.integers(1, 3)))])
    number = 0
    for group in made:
        for response in group:
            for segment in response.segments():
                segment.logprobs = [float(i) for i in range(number, number + len(segment.sampled))]
                number += len(segment.sampled)
    return made


def in_reading_order(values: Tensor, numbers: Tensor) -> Tensor:
    return torch.empty_like(values).index_copy(0, numbers.long(), values)


def with_gradients(model, compute) -> tuple[Tensor, dict[str, Tensor]]:
    """Log-probs [M] in reading order and the parameters' gradient of a sum in which every one of them has a weight of
    its own.
    """
    model.zero_grad()
    logprob = compute()
    (logprob * torch.linspace(-1.0, 2.0, len(logprob), dtype=logprob.dtype)).sum().backward()
    return logprob.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}


def of_forest(model, made: list[list[Response]]) -> Tensor:
    indexed = iter(range(sum(map(len, made))))
    forest = build_forest([[(next(indexed), response) for response in group] for group in made])
    return in_reading_order(compute_logprobs(model, forest, TEMPERATURE)[0], forest.logprob[forest.targets])


# ---- (a) the paper's layout, every worker twice, with a dense mask ----


@dataclass
class Laid:
    """One token of the paper's layout: what it is, where inference had it, and whom it sees (itself included)."""

    token: int
    position: int
    sees: set[int]
    number: float | None  # of the sampled token; None where there is no loss


def paper_layout(response: Response) -> list[Laid]:
    """prompt, S1, every worker as written, every worker as read, S2, …"""
    laid: list[Laid] = []

    def write(ids: list[int], numbers: list[float | None], context: list[int], position: int) -> list[int]:
        """Append ids after `context`; what the next token would see."""
        for token, number in zip(ids, numbers, strict=True):
            context = [*context, len(laid)]
            laid.append(Laid(token, position, set(context), number))
            position += 1
        return context

    def as_written(segment: Segment, context: list[int], position: int) -> list[int]:
        return write(segment.tokens, [None] * len(segment.inserted) + segment.logprobs, context, position)

    def walk(thread: Thread[Segment], trunk: list[int]) -> None:
        for segment, fork in thread.parts():
            trunk = as_written(segment, trunk, len(trunk))
            for worker in fork:
                walk(worker, trunk)
            for read in (read for worker in fork for read in worker.segments()):
                trunk = write(read.tokens, [None] * len(read), trunk, len(trunk))

    walk(response, write(response.prompt, [None] * len(response.prompt), [], 0))
    return laid


def dense_hidden(model, laid: list[Laid]) -> Tensor:
    """The decoder with the whole N×N attention matrix, masked by what each token sees."""
    config = model.config
    sees = torch.zeros(len(laid), len(laid), dtype=torch.bool)
    for row, token in enumerate(laid):
        sees[row, sorted(token.sees)] = True
    cos, sin = cos_sin(torch.tensor([token.position for token in laid]), config.rope, config.head_dim)
    x = model.model.embed_tokens(torch.tensor([token.token for token in laid]))
    for layer in model.model.layers:
        attention, normed = layer.self_attn, layer.input_layernorm(x)
        q, k, v = (
            p(normed).unflatten(-1, (-1, config.head_dim))
            for p in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        q, k = rotate(attention.q_norm(q), cos, sin), rotate(attention.k_norm(k), cos, sin)
        k, v = (t.repeat_interleave(config.heads // config.kv_heads, dim=1) for t in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) / config.head_dim**0.5
        weights = scores.masked_fill(~sees, -torch.inf).softmax(-1)
        x = x + attention.o_proj(torch.einsum("hqk,khd->qhd", weights, v).flatten(1))
        x = x + layer.mlp(layer.post_attention_layernorm(x))
    return model.model.norm(x)


def of_paper_layout(model, made: list[list[Response]]) -> Tensor:
    found, numbers = [], []
    for response in (response for group in made for response in group):
        laid = paper_layout(response)
        logprobs = (dense_hidden(model, laid) @ model.lm_head.weight.T / TEMPERATURE).log_softmax(-1)
        for index, token in enumerate(laid):
            if token.number is not None:
                nearest = max(token.sees - {index})
                found.append(logprobs[nearest, token.token])
                numbers.append(token.number)
    return in_reading_order(torch.stack(found), torch.tensor(numbers))


# ---- (b) one causal run per call that inference made ----


def inference_calls(response: Response) -> list[tuple[list[int], Segment]]:
    """(everything the writer had read, what it wrote), as in Algorithm 1."""

    def walk(thread: Thread[Segment], read: list[int]) -> Iterator[tuple[list[int], Segment]]:
        for segment, fork in thread.parts():
            yield read, segment
            read = read + segment.tokens
            for worker in fork:
                yield from walk(worker, read)
            read = read + [token for worker in fork for each in worker.segments() for token in each.tokens]

    return list(walk(response, response.prompt))


def of_separate_calls(model, made: list[list[Response]]) -> Tensor:
    found = []
    for response in (response for group in made for response in group):
        for context, segment in inference_calls(response):
            ids = torch.tensor(context + segment.tokens)
            mask = TreeMask.causal([len(ids)])
            logprobs = (model(ids, mask.position, mask) / TEMPERATURE).log_softmax(-1)
            first = len(context) + len(segment.inserted)
            found.append(logprobs[first - 1 : len(ids) - 1].gather(1, ids[first:, None])[:, 0])
    return torch.cat(found)


# ---- promises ----


def assert_same(left: tuple[Tensor, dict[str, Tensor]], right: tuple[Tensor, dict[str, Tensor]]) -> None:
    torch.testing.assert_close(left[0], right[0], **EXACT)
    for name, gradient in left[1].items():
        torch.testing.assert_close(
            gradient, right[1][name], **EXACT, msg=lambda message, name=name: f"{name}: {message}"
        )


@given(made=groups().filter(lambda made: any(r.sampled_tokens for group in made for r in group)))
@settings(max_examples=25, deadline=None)
@pytest.mark.slow
def test_forest_gives_logprobs_and_gradients_of_the_papers_layout_and_of_separate_calls(small_model, made):
    model = small_model(torch.float64)
    ours = with_gradients(model, lambda: of_forest(model, made))
    assert_same(ours, with_gradients(model, lambda: of_paper_layout(model, made)))
    assert_same(ours, with_gradients(model, lambda: of_separate_calls(model, made)))


def three_workers() -> Response:
    """Prompt 10 11, director 20, workers <30> 31, <32> 33 34, <35>, then </36> 37."""
    workers = [Segment([30], [31], [0.0]), Segment([32], [33, 34], [0.0] * 2), Segment([35], [])]
    return flat([10, 11], [Round(Segment([], [20], [0.0]), workers)], Segment([36], [37], [0.0]))


def test_layout_of_one_round_by_hand():
    forest = build_forest([[(0, three_workers())]])
    #                                  prompt  S1  W2           W3  W1      W2'          W3' S2
    assert forest.tokens.tolist() == [10, 11, 20, 32, 33, 34, 35, 30, 31, 32, 33, 34, 35, 36, 37]
    assert forest.visible_until.tolist() == [15, 15, 15, 6, 6, 6, 7, 15, 15, 15, 15, 15, 15, 15, 15]
    assert forest.sampled.int().tolist() == [0, 0, 1, 0, 1, 1, 0, 0, 1, 0, 0, 0, 0, 0, 1]
    assert forest.mask.position.tolist() == [0, 1, 2, 3, 4, 5, 3, 3, 4, 5, 6, 7, 8, 9, 10]
    assert forest.mask.parent[forest.targets].tolist() == [1, 3, 4, 7, 13]


def test_workers_that_nobody_reads_are_laid_out_once():
    response = three_workers()
    response.trunk.pop()
    assert build_forest([[(0, response)]]).tokens.tolist() == [10, 11, 20, 32, 33, 34, 35, 30, 31]


def test_responses_that_share_a_prompt_predict_their_first_tokens_from_the_same_row():
    group = [flat([10, 11], [], Segment([], [20 + i], [-0.5])) for i in range(3)]
    forest = build_forest([list(enumerate(group))])
    assert forest.tokens.tolist() == [10, 11, 20, 21, 22]
    assert forest.mask.parent[forest.targets].tolist() == [1, 1, 1]
    assert forest.response.tolist() == [0, 0, 0, 1, 2]
    assert forest.logprob.tolist() == [0.0, 0.0, -0.5, -0.5, -0.5]


@given(made=groups(), budget=st.integers(1, 120), ranks=st.integers(1, 4), share=st.booleans())
@settings(max_examples=60, deadline=None)
def test_outlines_are_packed_like_their_responses_and_a_rank_needs_only_its_own(made, budget, ranks, share):
    whole = [response for group in made for response in group]
    plans = [
        pack(responses, budget, ranks, share_prompts=share)
        for responses in (whole, [response.outline() for response in whole])
    ]
    assert plans[0].ranks == plans[1].ranks
    for rank in range(ranks):
        responses = [response.outline() for response in whole]
        for index in plans[1].needs(rank):
            responses[index] = whole[index]
        for ours, expected in zip(replace(plans[1], responses=responses).forests(rank), plans[0].forests(rank)):
            assert torch.equal(ours.tokens, expected.tokens) and torch.equal(ours.response, expected.response)


def test_a_forest_is_moved_once_with_what_its_passes_derive():
    forest, device = build_forest([[(0, three_workers())]]), torch.device("meta")
    moved = forest.to(device)
    assert moved.tokens.device == moved.mask.visible_until.device == device
    derived = moved.mask.derive("schedule", object)
    assert forest.to(device) is moved and forest.to(device).mask.derive("schedule", object) is derived
    assert forest.to("cpu") is forest


def test_a_token_has_the_version_of_the_weights_that_sampled_it_or_minus_one():
    response = three_workers()
    assert build_forest([[(0, response)]]).version is None
    rounds_of(response)[0].workers[1].versions = [
        4,
        5,
    ]  # W2: its inserted tag, and its copy as read, were never sampled
    assert build_forest([[(0, response)]]).version.tolist() == [-1] * 4 + [4, 5] + [-1] * 9


def test_worker_two_never_sees_worker_one(small_model):
    """Neither does worker one see worker two, and the director before the block sees neither; the director after it
    sees both.
    """
    model, response = small_model(torch.float64), three_workers()

    def logprobs(changed: int | None) -> dict[int, float]:
        """Log-prob of each sampled token, by token, with a token of worker `changed`'s text exchanged."""
        altered = three_workers()
        if changed is not None:
            rounds_of(altered)[0].workers[changed].inserted[0] = 9
        forest = build_forest([[(0, altered)]])
        return dict(
            zip(forest.tokens[forest.targets].tolist(), compute_logprobs(model, forest, 1.0)[0].tolist(), strict=True)
        )

    before, one, two = logprobs(None), logprobs(0), logprobs(1)
    assert rounds_of(response)[0].workers[0].sampled == [31]
    assert {token for token in before if one[token] != before[token]} == {31, 37}
    assert {token for token in before if two[token] != before[token]} == {33, 34, 37}


@given(made=groups(), budget=st.integers(1, 120), ranks=st.integers(1, 4), share=st.booleans())
@settings(max_examples=80, deadline=None)
def test_every_sampled_token_is_packed_exactly_once_within_the_budget_and_evenly(made, budget, ranks, share):
    flat = [response for group in made for response in group]
    plan = pack(flat, budget, ranks, share_prompts=share)
    assert len(plan.ranks) == ranks
    assert len({len(micro_batches) for micro_batches in plan.ranks}) == 1
    assert all(any(together) for together in zip(*plan.ranks)), "no micro-batch may be empty on all ranks"
    members = [index for rank in plan.ranks for groups_ in rank for group in groups_ for index in group]
    assert sorted(members) == list(range(len(flat)))
    forests = [
        (groups_, forest) for rank in range(ranks) for groups_, forest in zip(plan.ranks[rank], plan.forests(rank))
    ]
    numbers = sorted(n for _, forest in forests for n in forest.logprob[forest.targets].tolist())
    assert numbers == sorted(n for response in flat for segment in response.segments() for n in segment.logprobs)
    for groups_, forest in forests:
        assert len(forest) <= budget or sum(map(len, groups_)) <= 1, (
            "only a response larger than the budget may exceed it, alone"
        )
        assert all(flat[group[0]].prompt == flat[index].prompt for group in groups_ for index in group)


@pytest.mark.parametrize("budget", [500, 1000, 4000])
def test_ranks_wait_for_each_other_a_twentieth_of_the_time_at_most(random_responses, budget):
    responses_ = random_responses(prompts=60, samples=4, seed=3, longest=40)
    plan = pack(responses_, budget, ranks=4)
    sizes = [[len(forest) for forest in plan.forests(rank)] for rank in range(4)]
    working, present = sum(map(sum, sizes)), 4 * sum(max(together) for together in zip(*sizes, strict=True))
    assert working >= 0.95 * present


def test_a_group_is_split_where_sharing_its_prompt_would_leave_ranks_idle():
    group = [flat([2] * 10, [], Segment([], [3] * 20)) for _ in range(4)]
    assert pack(group, 1000, ranks=1).ranks == [[[[0, 1, 2, 3]]]]
    assert [len(rank[0][0]) for rank in pack(group, 1000, ranks=2).ranks] == [2, 2]


def test_a_response_past_the_models_limit_is_refused_by_name():
    fits, too_long = flat([2] * 5, [], Segment([], [3] * 5)), flat([2] * 5, [], Segment([], [3] * 6))
    pack([fits], 100, max_positions=10)
    with pytest.raises(
        ValueError, match=r"response 1 reaches position 11; the model takes 10 .*lower the rollout budget"
    ):
        pack([fits, too_long], 100, max_positions=10)


def test_the_models_limit_counts_the_longest_worker_even_if_nobody_reads_it():
    workers = [Segment([5], [6]), Segment([5], [6] * 20)]
    with pytest.raises(ValueError, match="reaches position 23"):
        pack([flat([2], [Round(Segment([], [3]), workers)], None)], 100, max_positions=10)


def test_a_response_without_a_prompt_is_refused():
    with pytest.raises(ValueError, match="response 0 has no prompt"):
        build_forest([[(0, flat([], [], Segment([], [3])))]])


def test_the_sizes_by_which_responses_are_balanced_are_those_of_their_forests(random_responses):
    """Pairs counted one by one, in the mask that attention computes with."""
    for response in random_responses(6, 3):
        forest, prompt = build_forest([[(0, response)]]), len(response.prompt)
        index = torch.arange(len(forest))
        seen = (index <= index[:, None]) & (index[:, None] < forest.visible_until)
        after = seen[prompt:].sum()
        assert _size(response) == (len(forest) - prompt, after, int(forest.mask.position.max()) + 1)


def test_layout_of_a_worker_that_spawns_by_hand():
    """Prompt 10; 20; worker 1 <30> 31, whose workers are <40> 41 and <42> 43, then 51; worker 2 <32> 33; last 37."""
    inner = [Thread([Segment([40], [41])]), Thread([Segment([42], [43])])]
    workers = [Thread([Segment([30], [31]), Segment([50], [51])], [inner]), Thread([Segment([32], [33])])]
    response = Response([Segment([], [20]), Segment([36], [37])], [workers], prompt=[10])
    forest = build_forest([[(0, response)]])
    #                                  p   S1  W2      W1      W1.2    W1.1    W1.2'   W1      W2'     S2
    assert forest.tokens.tolist() == [10, 20, 32, 33, 30, 31, 42, 43, 40, 41, 42, 43, 50, 51, 32, 33, 36, 37]
    assert forest.visible_until.tolist() == [18, 18, 4, 4, 18, 18, 8, 8, *[18] * 10]
    assert forest.tokens[forest.targets].tolist() == [20, 33, 31, 43, 41, 51, 37]
    assert forest.mask.position.tolist() == [0, 1, 2, 3, 2, 3, 4, 5, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13]
    workers[0], workers[1] = workers[1], workers[0]  # the one that spawns is now a branch, and read again in the end
    forest = build_forest([[(0, response)]])
    branch, read = [30, 31, 42, 43, 40, 41, 42, 43, 50, 51], [30, 31, 40, 41, 42, 43, 50, 51]
    assert forest.tokens.tolist() == [10, 20, *branch, 32, 33, *read, 36, 37]
    assert forest.visible_until.tolist() == [24, 24, 12, 12, 6, 6, *[12] * 6, *[24] * 12]
