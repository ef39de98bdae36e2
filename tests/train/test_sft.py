"""Demonstrations become the responses that inference would have given, and training on them can be stopped anywhere."""

import pytest
import torch

from dccot.core.config import load_config
from dccot.core.files import BadData
from dccot.lab.worlds.arithmetic import make_tokenizer
from dccot.rollout.response import Segment
from dccot.rollout.tags import IllFormed, TagIds
from dccot.train.config import SFTConfig
from dccot.train.forest import build_forest, pack
from dccot.train.sft import demonstration, load_examples, sft_loss
from tests.support.rounds import final_of, flat, rounds_of

TEXT = """<think>
abc<spawn_workers> <worker_1>x</worker_1>
<worker_2>yy</worker_2><worker_3></worker_3>
</spawn_workers>d</think>
<answer>7</answer>
"""


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


def test_segments_and_loss_mask_by_hand(tokenizer):
    """White space between tags of a block is gone; opening worker tags and </spawn_workers> are inserted; EOS ends it
    all.
    """
    response = demonstration(TEXT, [1, 2], tokenizer, TagIds.of(tokenizer), parallel=True, open_think=False)
    [round_] = rounds_of(response)

    def ids(*pieces: str) -> list[int]:
        return [token for piece in pieces for token in tokenizer.convert_tokens_to_ids([piece])]

    def text(segment) -> tuple[str, str]:
        return tokenizer.decode(segment.inserted), tokenizer.decode(segment.sampled)

    assert text(round_.director) == ("", "<think>\nabc<spawn_workers>")
    assert [text(worker) for worker in round_.workers] == [
        ("<worker_1>", "x</worker_1>"),
        ("<worker_2>", "yy</worker_2>"),
        ("<worker_3>", "</worker_3>"),
    ]
    assert text(final_of(response)) == ("</spawn_workers>", "d</think>\n<answer>7</answer>" + tokenizer.eos_token)
    forest = build_forest([[(0, response)]])
    carries_loss = [tokenizer.decode([token]) for token in forest.tokens[forest.sampled].tolist()]
    director = ["<think>", "\n", "a", "b", "c", "<spawn_workers>"]
    workers = ["y", "y", "</worker_2>", "</worker_3>", "x", "</worker_1>"]
    final = ["d", "</think>", "\n", "<answer>", "7", "</answer>", tokenizer.eos_token]
    assert carries_loss == director + workers + final
    assert ids("<worker_1>") == round_.workers[0].inserted


def test_a_prompt_that_opens_think_takes_it_from_the_demonstration(tokenizer):
    response = demonstration(TEXT, [1], tokenizer, TagIds.of(tokenizer), parallel=True, open_think=True)
    assert tokenizer.decode(rounds_of(response)[0].director.sampled) == "abc<spawn_workers>"


def test_a_second_round_begins_with_the_inserted_closing_tag(tokenizer):
    block = "<spawn_workers><worker_1>x</worker_1><worker_2>y</worker_2><worker_3>z</worker_3></spawn_workers>"
    text = f"<think>a{block}b{block}c</think><answer>1</answer>"
    response = demonstration(text, [1], tokenizer, TagIds.of(tokenizer), parallel=True, open_think=False)
    second = rounds_of(response)[1].director
    assert (tokenizer.decode(second.inserted), tokenizer.decode(second.sampled)) == (
        "</spawn_workers>",
        "b<spawn_workers>",
    )


def test_a_sequential_demonstration_is_one_segment(tokenizer):
    response = demonstration(
        " <think>a</think>7\n", [1], tokenizer, TagIds.of(tokenizer), parallel=False, open_think=False
    )
    assert response.forks == []
    assert tokenizer.decode(final_of(response).sampled) == "<think>a</think>7" + tokenizer.eos_token


def test_an_ill_formed_demonstration_is_refused(tokenizer):
    with pytest.raises(IllFormed):
        demonstration(
            "<think>a</think><answer>7</answer>", [1], tokenizer, TagIds.of(tokenizer), parallel=True, open_think=False
        )


def config(path, **changes) -> SFTConfig:
    return load_config(
        SFTConfig, None, ["model.path=m", f"data.train={path}", *(f"{k}={v}" for k, v in changes.items())]
    )


def test_the_length_rule_counts_the_prompt_and_every_duplicate(tokenizer, write_rows, caplog):
    path = write_rows("one.jsonl", [{"id": "a", "question": "Add a: 1, b: 2.", "completion": TEXT}])
    [example] = load_examples(path, config(path), tokenizer)
    # <think> \n a b c <spawn_workers> | <worker_1> x </worker_1>, … twice | </spawn_workers> d </think> \n <answer> 7
    # </answer> EOS
    length = len(example.response.prompt) + 6 + 2 * (3 + 4 + 2) + 8
    assert len(load_examples(path, config(path, **{"data.max_tokens": length}), tokenizer)) == 1
    with pytest.raises(BadData, match=rf"no usable example \(dropped 1 over {length - 1} tokens"):
        load_examples(path, config(path, **{"data.max_tokens": length - 1}), tokenizer)


def test_what_is_left_out_is_counted_and_said(tokenizer, write_rows, caplog):
    caplog.set_level("INFO")
    rows = [
        {"id": "good", "question": "q", "completion": TEXT},
        {"id": "ill", "question": "q", "completion": "<think>no</think>"},
        {"id": "long", "question": "q", "completion": TEXT.replace("abc", "a" * 12_000)},
        {"id": "long prompt", "question": "q" * 2000, "completion": TEXT},
    ]
    path = write_rows("rows.jsonl", rows)
    assert [example.id for example in load_examples(path, config(path), tokenizer)] == ["good"]
    assert "1 examples; dropped 1 over 10000 tokens, 1 ill-formed, 1 with a prompt that cannot be used" in caplog.text
    assert f"{path}:4 left out: prompt has 2,0" in caplog.text


@pytest.mark.parametrize(("task", "kept"), [("math", ["good"]), ("dccot.data.countdown:Countdown", ["good", "alone"])])
def test_a_solution_without_workers_is_trained_on_where_the_task_leaves_it_a_choice(tokenizer, write_rows, task, kept):
    alone = {"id": "alone", "question": "q", "completion": "<think>a</think><answer>7</answer>"}
    path = write_rows("rows.jsonl", [{"id": "good", "question": "q", "completion": TEXT}, alone])
    examples = load_examples(path, config(path, task=task), tokenizer)
    assert [example.id for example in examples] == kept
    assert all(len(example.response.forks) == (example.id == "good") for example in examples)


def test_the_loss_is_the_mean_of_example_means_or_of_all_tokens():
    """One example of a single token and one of three: (2 + (1 + 3 + 8) / 3) / 2 = 3, or (2 + 1 + 3 + 8) / 4 = 3.5."""
    responses = [flat([1], [], Segment([], [5] * count)) for count in (1, 3)]
    [forest] = pack(responses, 100, share_prompts=False).forests()
    own = {0: [2.0], 1: [1.0, 3.0, 8.0]}
    logprob = -torch.tensor([own[int(each)].pop(0) for each in forest.response[forest.targets]])
    found = {mean: sft_loss(responses, mean)(0, forest, logprob, logprob).mean() for mean in ("examples", "tokens")}
    assert found == {"examples": 3.0, "tokens": 3.5}


def test_a_row_without_a_completion_is_named(tokenizer, write_rows):
    path = write_rows("rows.jsonl", [{"id": "a", "question": "q"}])
    with pytest.raises(BadData, match=r"rows.jsonl:1: no text in column 'completion'"):
        load_examples(path, config(path), tokenizer)


def test_an_example_past_the_models_positions_is_named_before_training(tokenizer, write_rows):
    path = write_rows("rows.jsonl", [{"id": "a", "question": "q", "completion": TEXT}])
    with pytest.raises(BadData, match=r"rows.jsonl:1: the example reaches position \d+; the model takes 20"):
        load_examples(path, config(path), tokenizer, max_positions=20)
