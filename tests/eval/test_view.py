"""`dccot view`: what the page holds is what the rollouts say. How it behaves in a browser: test_view_browser.py."""

import base64
import gzip
import json
import math
import re

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from dccot.core.files import write_jsonl_atomic
from dccot.eval.entropy import Scorer
from dccot.eval.view import BLOCK, Page, Pieces, _shape, collect, cut, main, utf16_length
from dccot.lab.worlds.arithmetic import make_tokenizer
from dccot.lab.worlds.bigram import save, tokenizer
from dccot.rollout.response import Finish, Response, Segment
from dccot.rollout.tags import TagIds
from dccot.rollout.thread import Thread
from dccot.train.rewards import Graded
from tests.support.rounds import Round, final_of, flat, rounds_of

WORDS = tokenizer("spelled")
TAGS = TagIds.of(WORDS)
BYTEWISE = make_tokenizer()


def segment(text: str, inserted=(), logprob: float = -0.5, end: bool = False) -> Segment:
    ids = WORDS.encode(text, add_special_tokens=False) + ([WORDS.eos_token_id] if end else [])
    return Segment(list(inserted), ids, [logprob] * len(ids))


def response(first: str, workers: list[str], last: str | None) -> Response:
    spawned = [segment(text, tag) for text, tag in zip(workers, TAGS.worker_open)]
    final = segment(last, TAGS.spawn_close, end=True) if last is not None else None
    finish = Finish.BUDGET if last is None else Finish.ANSWERED
    return flat([0, 1], [Round(segment(first), spawned)], final, finish)


def rollout(number: int = 0, **changes) -> Graded:
    workers = ["a</worker_1>", "bb</worker_2>", "ccc</worker_3>"]
    made = response("plan<spawn_workers>", workers, "so </think><answer>\\boxed{7}</answer>")
    text = "<think>\n" + made.text(WORDS)
    whole = {"flaw": None, "verdict": "correct", "reward": 1.0, "advantage": 0.5, "step": 3}
    return Graded(f"p{number}", 0, "What?", "7", text, made, **{**whole, **changes})


def unpacked(page: str, name: str):
    content = re.search(f'<script type="text/plain" id="{name}">(.*?)</script>', page)[1]
    return json.loads(gzip.decompress(base64.b64decode(content)))


def built(tmp_path, *rollouts: Graded, pieces=None) -> str:
    page = Page(pieces)
    for one in rollouts:
        page.add(one)
    page.write(tmp_path / "page.html", "title")
    return (tmp_path / "page.html").read_text("utf-8")


# ---- texts without a tokenizer ----

SPAWN, CLOSED = "x<spawn_workers>", ["a</worker_1>", "b</worker_2>", "c</worker_3>"]
CASES = {
    "well-formed": ("think<spawn_workers>", CLOSED, "so</think>"),
    "tags that ran on into the next line": (f"{SPAWN}\n", ["a</worker_1>\n", "b</worker_2>\n", CLOSED[2]], "so"),
    "a worker that ended without its tag": (SPAWN, ["a", CLOSED[1], "c"], "so"),
    "a worker that wrote another's closing tag": (SPAWN, ["a</worker_2>a</worker_1>", *CLOSED[1:]], "so"),
    "a worker that opened the next one": (SPAWN, ["a<worker_2>a</worker_1>", *CLOSED[1:]], "so"),
    "a worker that tried to spawn": (SPAWN, ["a<spawn_workers>a</worker_1>", *CLOSED[1:]], "so"),
    "cut off after a worker that closed the block": (SPAWN, [*CLOSED[:2], "c</spawn_workers>c"], None),
    "cut off among the workers": (SPAWN, [CLOSED[0], "b", "c"], None),
}


@pytest.mark.parametrize("case", CASES)
def test_tags_tell_where_segments_begin(case):
    first, workers, last = CASES[case]
    expected = [first, *(f"<worker_{i}>{text}" for i, text in enumerate(workers, start=1))]
    expected += [f"</spawn_workers>{last}"] if last else []
    assert cut("".join(expected), response(first, workers, last)) == expected


def test_a_worker_of_a_worker_has_a_lane_inside_that_of_its_worker():
    texts = ["plan<spawn_workers>", "<worker_1>a<spawn_workers>", "<worker_1>b</worker_1>", "<worker_2>c</worker_2>"]
    texts += ["</spawn_workers>d</worker_1>", "<worker_2>e</worker_2>", "</spawn_workers>so</think>"]
    of = lambda length: Segment([], [0] * length)
    inner = Thread([of(2), of(5)], [[Thread([of(3)]), Thread([of(4)])]])
    whole = Response([of(1), of(7)], [[inner, Thread([of(6)])]], prompt=[0])
    assert cut("".join(texts), whole) == texts
    assert _shape(whole) == [1, [[2, [3, 4], 5], 6], 7]


SOME_TAGS = ["<worker_1>", "</worker_1>", "<worker_2>", "<worker_3>", "</worker_3>", "\n"]
SOME_TAGS += ["<spawn_workers>", "</spawn_workers>"]


@given(st.lists(st.sampled_from(SOME_TAGS)), st.integers(0, 3), st.booleans())
def test_no_text_is_lost_however_the_tags_stand(parts, rounds, answered):
    text = "".join(parts)
    last = Segment() if answered or not rounds else None
    shape = flat([], [Round(Segment(), [Segment(), Segment(), Segment()])] * rounds, last)
    pieces = cut(text, shape)
    assert "".join(pieces) == text
    assert len(pieces) == len(list(shape.segments()))


# ---- tokens ----


def test_pieces_of_tokens_are_the_text_and_a_split_character_belongs_to_its_last_token():
    ids = BYTEWISE.encode("a≥😀b", add_special_tokens=False)
    assert Pieces(BYTEWISE.decode)(ids) == ["a", "", "", "≥", "", "", "", "😀", "b"]


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=30))
def test_pieces_join_to_the_text(text):
    ids = BYTEWISE.encode(text, add_special_tokens=False)
    assert "".join(Pieces(BYTEWISE.decode)(ids)) == BYTEWISE.decode(ids)


def test_bytes_that_are_no_character_do_not_swallow_what_follows():
    half = BYTEWISE.encode("😀", add_special_tokens=False)[:2]
    assert Pieces(BYTEWISE.decode)([*half, *BYTEWISE.encode("ab", add_special_tokens=False)])[-1] == "b"


def test_lengths_are_counted_as_javascript_counts_them():
    assert [utf16_length(text) for text in ("ab", "≥", "😀")] == [2, 1, 2]


# ---- the page ----


def test_the_index_holds_what_the_rollouts_say(tmp_path):
    wrong, ungraded = {"verdict": "wrong", "flaw": "no_answer", "reward": 0.0}, {"verdict": None, "reward": None}
    index = unpacked(built(tmp_path, rollout(0), rollout(1, **wrong), rollout(0, **ungraded)), "index")
    assert index["problems"] == [["p0", "What?", "7"], ["p1", "What?", "7"]]
    columns, made = index["columns"], rollout().response
    assert columns["problem"] == [0, 1, 0]
    assert columns["verdict"] == ["correct", "wrong", None]
    assert columns["flaw"] == [None, "no_answer", None]
    assert columns["reward"] == [1.0, 0.0, None]
    assert columns["answer"] == ["7"] * 3
    assert (columns["longest"][0], columns["total"][0]) == (made.longest_path, made.total_tokens)
    [round_] = rounds_of(made)
    assert columns["shape"][0] == [len(round_.director), [len(w) for w in round_.workers], len(final_of(made))]
    assert columns["logprob"][0] == -0.5


def test_what_ran_on_after_a_tag_is_in_the_index_by_kind(tmp_path):
    spread = rollout(1)
    spread.text = spread.text.replace("<worker_1>", "\n<worker_1>").replace("</spawn_workers>", "The</spawn_workers>")
    columns = unpacked(built(tmp_path, rollout(0), spread), "index")["columns"]
    assert columns["overshoots"] == [{}, {"newline": 1, "text": 1}]


def test_details_hold_texts_tokens_and_logprobs_of_every_segment(tmp_path):
    [[*segments]] = unpacked(built(tmp_path, rollout(), pieces=Pieces(WORDS.decode)), "block-0")
    expected = list(rollout().response.segments())
    assert [s["text"] for s in segments] == [WORDS.decode(s.tokens) for s in expected]
    assert [len(s["lengths"]) for s in segments] == [len(s) for s in expected]
    assert [s["inserted"] for s in segments] == [len(s.inserted) for s in expected]
    assert [s["logprobs"] for s in segments] == [[50] * len(s.sampled) for s in expected]


def test_details_say_where_other_weights_began_to_write(tmp_path):
    stale = rollout()
    first, *_ = stale.response.segments()
    first.versions = [3] * (len(first.sampled) - 1) + [4]
    [[*segments]] = unpacked(built(tmp_path, stale, pieces=Pieces(WORDS.decode)), "block-0")
    assert segments[0]["changes"] == [[0, 3], [len(first.sampled) - 1, 4]]
    assert all("changes" not in segment for segment in segments[1:])


def test_every_response_is_in_its_block(tmp_path):
    page = built(tmp_path, *(rollout(number) for number in range(2 * BLOCK + 1)))
    assert [len(unpacked(page, f"block-{number}")) for number in range(3)] == [BLOCK, BLOCK, 1]
    assert len(unpacked(page, "index")["columns"]["problem"]) == 2 * BLOCK + 1


def test_numbers_that_json_cannot_hold_are_left_out(tmp_path):
    strange = rollout(reward=math.nan, advantage=math.inf)
    final_of(strange.response).logprobs = [-math.inf] * len(final_of(strange.response).sampled)
    page = built(tmp_path, strange)
    columns = unpacked(page, "index")["columns"]
    assert (columns["reward"], columns["advantage"], columns["logprob"]) == ([None], [None], [None])
    assert set(unpacked(page, "block-0")[0][-1]["logprobs"]) == {9999}


def test_nothing_in_a_rollout_or_a_file_name_becomes_markup(tmp_path):
    evil = "</script><script>alert(1)</script>{{data}}"
    one = rollout()
    one.question = one.text = evil
    page = Page()
    page.add(one)
    page.write(tmp_path / "page.html", evil)
    written = (tmp_path / "page.html").read_text("utf-8")
    assert written.count("<script>") == 1 and written.count('id="index"') == 1
    assert unpacked(written, "block-0")[0][0]["text"] == evil


def test_the_page_forbids_requests_and_names_no_address(tmp_path):
    page = built(tmp_path, rollout())
    assert "default-src 'none'" in page
    assert set(re.findall(r"https?://[^\s\"']*", page)) <= {"http://www.w3.org/2000/svg"}
    assert "{{" not in page.partition("<script>")[0]


# ---- entropy ----


@torch.no_grad()
def test_entropies_are_those_of_transformers_on_what_each_writer_had_read(tmp_path):
    folder = save(tmp_path / "tiny", "spelled")
    judge = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    one, other = rollout().response, response("y<spawn_workers>", ["a", "b", "</worker_3>"], None)

    def entropy(read: list[int], sampled: list[int]) -> list[float]:
        logits = judge(torch.tensor([read + sampled])).logits[0, len(read) - 1 : -1] / 0.6
        return torch.distributions.Categorical(logits=logits).entropy().tolist()

    scorer = Scorer(folder, 0.6)
    for made, found in zip((one, other), scorer([one, other])):
        read, expected = list(made.prompt), []
        for round_ in rounds_of(made):
            expected.append(entropy(read + round_.director.inserted, round_.director.sampled))
            read += round_.director.tokens
            expected += [entropy(read + w.inserted, w.sampled) for w in round_.workers]
            read += [token for w in round_.workers for token in w.tokens]
        if final_of(made):
            expected.append(entropy(read + final_of(made).inserted, final_of(made).sampled))
        assert [len(part) for part in found] == [len(part) for part in expected]
        for part, right in zip(found, expected):
            torch.testing.assert_close(torch.tensor(part), torch.tensor(right), atol=1e-4, rtol=1e-4)
    assert scorer.difference > 0.1  # the recorded -0.5 everywhere is not this model's


# ---- the command ----


def test_a_file_becomes_a_page_next_to_it_and_bad_lines_are_reported(tmp_path, capsys):
    path = tmp_path / "step_000010.jsonl"
    write_jsonl_atomic(path, [rollout(0).to_json(), {"problem": "half"}, rollout(1).to_json()])
    with path.open("a") as file:
        file.write('{"cut')
    assert main([str(path)]) == 0
    printed = capsys.readouterr().out
    assert f"{path}:2: not a rollout" in printed and f"{path}:4: not JSON" in printed and "2 responses" in printed
    assert unpacked((tmp_path / "step_000010.html").read_text("utf-8"), "index")["tokens"] is False


NUMBERS = [-1, 0, 10**400, 1e999, -1e999, math.nan]
JUNK = [None, True, *NUMBERS, "", "x", "\\boxed{", [], [None], ["x"], [[1]], [-1], [math.nan], {}, {"x": 1}]


def places(value, at=()):
    """The path of every value in a row, the row's own left out."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inside in inner:
        yield (*at, key)
        yield from places(inside, (*at, key))


PLACES = list(places(rollout().to_json()))


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(PLACES), st.sampled_from(JUNK), st.booleans(), st.booleans())
def test_a_malformed_row_costs_itself_alone(tmp_path, place, junk, lost, tokens):
    bad = rollout(1).to_json()
    *above, last = place
    inner = bad
    for key in above:
        inner = inner[key]
    if lost:
        del inner[last]
    else:
        inner[last] = junk
    path, said = tmp_path / "rows.jsonl", []
    path.write_text("".join(json.dumps(row) + "\n" for row in (rollout(0).to_json(), bad, rollout(2).to_json())))
    page = Page(Pieces(WORDS.decode) if tokens else None)
    collect(page, [path], said.append)
    page.write(tmp_path / "page.html", "title")
    written = (tmp_path / "page.html").read_text("utf-8")
    index = unpacked(written, "index")
    shown = [index["problems"][number][0] for number in index["columns"]["problem"]]
    assert len(shown) == len(unpacked(written, "block-0")) == len(index["columns"]["shape"]) == 3 - len(said)
    assert (shown[0], shown[-1]) == ("p0", "p2") and all(f"{path}:2: not a rollout" in line for line in said)


def test_a_row_that_the_model_cannot_compute_costs_itself_alone(tmp_path):
    rows = [rollout(number).to_json() for number in range(6)]
    for row, prompt in zip(rows[1:5], ([0, 10**6], [-1], "x", [])):
        row["response"]["prompt"] = prompt
    write_jsonl_atomic(tmp_path / "rows.jsonl", rows)
    page, said = Page(None, Scorer(save(tmp_path / "tiny", "spelled"), 0.6)), []
    collect(page, [tmp_path / "rows.jsonl"], said.append)
    page.write(tmp_path / "page.html", "title")
    first, last = unpacked((tmp_path / "page.html").read_text("utf-8"), "block-0")
    assert first[0]["entropies"] == last[0]["entropies"] != []
    assert [line.partition(": not a rollout")[0] for line in said] == [
        f"{tmp_path / 'rows.jsonl'}:{line}" for line in (2, 3, 4, 5)
    ]


def test_rollouts_of_a_run_are_split_by_its_own_tokenizer(tmp_path):
    save(tmp_path / "checkpoints" / "step_000001" / "hf", "spelled")
    (tmp_path / "latest").write_text("step_000001\n")
    write_jsonl_atomic(tmp_path / "rollouts" / "step_000001.jsonl.gz", [rollout().to_json()])
    assert (
        main([str(tmp_path / "rollouts" / "step_000001.jsonl.gz"), "--entropy", "--out", str(tmp_path / "p.html")]) == 0
    )
    page = (tmp_path / "p.html").read_text("utf-8")
    [[first, *_]] = unpacked(page, "block-0")
    assert unpacked(page, "index")["tokens"] is True
    assert len(first["entropies"]) == len(first["logprobs"]) == len(rounds_of(rollout().response)[0].director.sampled)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nothing.jsonl"], "nothing.jsonl does not exist"),
        (["{folder}"], "is a folder without rollouts; name a file of rollouts"),
        (["{folder}/empty.jsonl"], "no rollout found"),
        (["{folder}/good.jsonl", "--out", "{folder}/good.jsonl"], "cannot be written"),
        (["{folder}/good.jsonl", "--out", "no/such/folder/p.html"], "cannot be written"),
        (["{folder}/good.jsonl", "--entropy"], "name it with --model"),
        (["{folder}/good.jsonl", "--model", "nowhere"], "'nowhere' is neither"),
        (["{folder}/good.jsonl", "--colour"], "unrecognized arguments"),
    ],
)
def test_what_cannot_be_shown_costs_one_line(tmp_path, capsys, arguments, says):
    write_jsonl_atomic(tmp_path / "good.jsonl", [rollout().to_json()])
    (tmp_path / "empty.jsonl").write_text('{"a": 1}\n')
    try:
        code = main([argument.format(folder=tmp_path) for argument in arguments])
    except SystemExit as stopped:
        code = stopped.code
    error = capsys.readouterr().err
    assert (code, error.count("\n")) == (2, 1) and says in error
