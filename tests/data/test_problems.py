"""Problems come out of every supported file alike; what cannot be used is named by file and row. Training draws each
once per epoch, in an order that neither stopping nor the number of ranks can change.
"""

import json
import subprocess
import sys
from dataclasses import replace

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dccot.core.files import BadData
from dccot.data import problems as module
from dccot.data.problems import PRESETS, Fields, Problem, ProblemStream, fetch, load_problems


def jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_jsonl_and_parquet_give_the_same_problems(tmp_path):
    rows = [{"id": "a", "question": "1+1?", "gold": "2"}, {"id": "b", "question": "x²=4?", "gold": "-2"}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "p.parquet")
    expected = [Problem("a", "1+1?", "2"), Problem("b", "x²=4?", "-2")]
    assert load_problems(jsonl(tmp_path / "p.jsonl", rows)) == load_problems(tmp_path / "p.parquet") == expected


def test_golds_may_be_numbers_lists_and_whole_floats(tmp_path):
    golds = [204, 27.0, 0.5, ["1", 2], "\\frac{1}{2} "]
    path = jsonl(tmp_path / "p.jsonl", [{"question": "?", "gold": gold} for gold in golds])
    assert [p.gold for p in load_problems(path)] == ["204", "27", "0.5", ["1", "2"], "\\frac{1}{2}"]


def test_made_up_ids_do_not_move_when_a_row_is_bad(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text('{"question": "a", "gold": 1}\nbroken\n{"question": "c", "gold": 3}\n')
    assert [p.id for p in load_problems(path, report=lambda _: None)] == ["0", "2"]


BAD_ROWS = {
    "no field 'question' (the row has 'gold')": {"gold": 1},
    "no field 'gold'": {"question": "?"},
    "field 'question' must be a text": {"question": ["?"], "gold": 1},
    "field 'question' must be a text that is not empty": {"question": "  ", "gold": 1},
    **{
        f"field 'gold' must be a number, a text or a list of them, found {gold!r}": {"question": "?", "gold": gold}
        for gold in (True, [], {"a": 1}, float("nan"))
    },
    "field 'id' must be a text or an integer": {"id": 1.5, "question": "?", "gold": 1},
    "id 'one' occurs twice": {"id": "one", "question": "again", "gold": 2},
}


@pytest.mark.parametrize("fault", BAD_ROWS)
def test_bad_row_is_reported_with_file_and_line(tmp_path, fault):
    good = [{"id": "one", "question": "?", "gold": 1}, {"id": 3, "question": "!", "gold": 1}]
    path = jsonl(tmp_path / "p.jsonl", [good[0], BAD_ROWS[fault], good[1]])
    said = []
    assert [p.id for p in load_problems(path, report=said.append)] == ["one", "3"]
    assert said[0].startswith(f"{path}:2: {fault}") and said[1] == f"{path}: 2 problems, 1 rows skipped"
    with pytest.raises(BadData, match=r"p\.jsonl:2: "):
        load_problems(path, strict=True)


BAD_LINES = {
    "not JSON": b'{"id": "x", \n',
    "not UTF-8": b'{"id": "\xff\xfe"}\n',
    "not an object": b"[1, 2]\n",
    "a 10 MB line": b'{"q": "' + b"x" * (10 << 20) + b'"}\n',
    "nested 100,000 deep": b'{"a":' * 100_000 + b"\n",
}


@pytest.mark.parametrize("line", BAD_LINES.values(), ids=BAD_LINES)
def test_a_line_that_is_no_row_is_reported_with_its_number(tmp_path, line):
    good, said = b'{"id": "%d", "question": "q", "gold": "1"}\n', []
    (tmp_path / "p.jsonl").write_bytes(good % 0 + line + good % 1)
    assert [p.id for p in load_problems(tmp_path / "p.jsonl", report=said.append)] == ["0", "1"]
    assert f"{tmp_path / 'p.jsonl'}:2" in said[0] and len(said[0]) < 400


def test_wrong_field_names_are_an_error_that_says_how_to_name_them(tmp_path):
    path = jsonl(tmp_path / "p.jsonl", [{"problem": "?", "answer": 1}])
    with pytest.raises(BadData, match=r"data\.question="):
        load_problems(path, report=lambda _: None)
    assert load_problems(path, fields=Fields(question="problem", gold="answer")) == [Problem("0", "?", "1")]


UNUSABLE = {
    "p.parquet": "not a parquet file",
    "empty.jsonl": "no usable row",
    "bad.jsonl": "no usable row",
    "binary.jsonl": "no usable row",
    "aime24.jsonl": "dccot data fetch aime24",
}


@pytest.mark.parametrize("name", UNUSABLE)
def test_unusable_files_are_one_clear_sentence(tmp_path, name):
    (tmp_path / "p.parquet").write_bytes(b"PAR1 this is no parquet")
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "bad.jsonl").write_bytes(b"[]\n" * 50)
    (tmp_path / "binary.jsonl").write_bytes(bytes(range(256)) * 100)
    with pytest.raises(BadData, match=UNUSABLE[name]):
        load_problems(tmp_path / name, report=lambda _: None)


# A row of each set as its card on the hub shows it (texts shortened).
HUB_ROWS = {  # and what becomes of its id and gold
    "deepscaler": ({"problem": "q", "answer": "-\\frac{2}{3}", "solution": "s"}, "0", "-\\frac{2}{3}"),
    "aime24": ({"id": 60, "problem": "q", "solution": "s", "answer": "204", "url": "u", "year": "2024"}, "60", "204"),
    "amc23": ({"id": 0, "question": "q", "answer": "27.0", "url": "u"}, "0", "27.0"),
    "hmmt25": ({"problem_idx": 1, "problem": "q", "answer": "103", "problem_type": ["NT"]}, "1", "103"),
    "math500": ({"problem": "q", "answer": "\\pi", "level": 2, "unique_id": "test/a/1.json"}, "test/a/1.json", "\\pi"),
    "minerva": ({"question": "q", "answer": "4.5e33"}, "0", "4.5e33"),
    "gsm8k": ({"question": "q", "answer": "24 * 50 = <<24*50=1200>>1,200\n#### 1,200"}, "0", "1200"),
    "olympiadbench": ({"id": 1606, "question": "q", "final_answer": ["2"], "unit": None}, "1606", ["2"]),
}


@pytest.mark.parametrize("name", PRESETS)
def test_fetch_normalises_the_hubs_rows(tmp_path, monkeypatch, name):
    row, id, gold = HUB_ROWS[name]
    raw = tmp_path / "0000.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), raw)
    monkeypatch.setattr(module, "_download", lambda *_: raw)
    assert load_problems(fetch(name, tmp_path)) == [Problem(id, "q", gold)]


@pytest.mark.parametrize(
    "count, said", [(40, []), (41, ["41 problems, amc23 usually has 40; compare results with that in mind"])]
)
def test_a_count_that_differs_from_the_presets_is_reported(tmp_path, count, said):
    path, found = jsonl(tmp_path / "p.jsonl", [{"id": n, "question": "q", "answer": "1"} for n in range(count)]), []
    assert len(load_problems(path, preset="amc23", report=found.append)) == count
    assert found == [f"{path}: {each}" for each in said]


def test_a_gsm8k_row_without_its_mark_is_skipped_and_named(tmp_path):
    said = []
    rows = [{"question": "q", "answer": answer} for answer in ("it is 4", "2 + 2\n#### 4")]
    path = jsonl(tmp_path / "p.jsonl", rows)
    assert load_problems(path, preset="gsm8k", report=said.append) == [Problem("1", "q", "4")]
    assert said[0] == f"{path}:1: field 'answer' has no '####', found 'it is 4'; row skipped"


def test_fetch_without_a_network_fails_with_one_sentence():
    code = "from dccot.data.problems import fetch\ntry: fetch('aime24')\nexcept ValueError as e: print(e)"
    offline = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": "/nonexistent"}
    done = subprocess.run([sys.executable, "-c", code], env=offline, capture_output=True, text=True, timeout=600)
    assert "cannot reach http://127.0.0.1:9 to download HuggingFaceH4/aime_2024" in done.stdout
    assert done.stdout.count("\n") == 1 and not done.stderr


@given(st.lists(st.tuples(st.integers(0, 10_000), st.binary(min_size=1, max_size=3)), max_size=12), st.booleans())
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_mutated_files_end_in_problems_or_in_one_clear_error(tmp_path, damages, strict):
    line = b'{"id": "%d", "question": "What is %d?", "gold": ["%d", 1.5]}\n'
    content = bytearray(b"".join(line % (n, n, n) for n in range(20)))
    for at, patch in damages:
        content[at % len(content) : at % len(content) + 1] = patch
    path = tmp_path / "mutated.jsonl"
    path.write_bytes(bytes(content))
    try:
        found = load_problems(path, strict=strict, report=lambda _: None)
        assert all(isinstance(p, Problem) and p.question.strip() for p in found)
    except BadData as error:
        assert str(path) in str(error)


# ---- the order in which training draws them ----


def numbered(count: int) -> list[Problem]:
    return [Problem(str(i), f"q{i}", "0") for i in range(count)]


def draw(stream: ProblemStream, batches: int) -> list[str]:
    return [p.id for _ in range(batches) for p in stream.next_batch()]


@given(count=st.integers(1, 30), batch=st.integers(1, 12), seed=st.integers(0, 99))
def test_every_epoch_is_a_permutation(count, batch, seed):
    seen = draw(ProblemStream(numbered(count), seed, batch), 3 * count)
    for start in range(0, 3 * count * batch - count + 1, count):
        assert sorted(map(int, seen[start : start + count])) == list(range(count))


@given(count=st.integers(1, 30), batch=st.integers(1, 12), before=st.integers(0, 20), seed=st.integers(0, 99))
def test_restored_stream_goes_on_exactly(count, batch, before, seed):
    stream = ProblemStream(numbered(count), seed, batch)
    draw(stream, before)
    state = json.loads(json.dumps(stream.state()))
    resumed = ProblemStream(numbered(count), seed, batch)
    resumed.restore(state)
    assert draw(resumed, 10) == draw(stream, 10)


def test_seed_and_epoch_change_the_order():
    stream = ProblemStream(numbered(50), 1, 50)
    first, second = draw(stream, 1), draw(stream, 1)
    other = draw(ProblemStream(numbered(50), 2, 50), 1)
    assert len({tuple(first), tuple(second), tuple(other), tuple(map(str, range(50)))}) == 4


def test_order_does_not_depend_on_the_batch_size():
    assert draw(ProblemStream(numbered(17), 3, 4), 15) == draw(ProblemStream(numbered(17), 3, 6), 10)


def test_order_is_the_same_in_every_process():
    # random.Random("0/0").shuffle(list(range(10))): an old checkpoint must find the same order
    assert draw(ProblemStream(numbered(10), 0, 10), 1) == list("1024938675")


def test_state_of_another_set_seed_or_content_is_refused():
    state = ProblemStream(numbered(5), 1, 2).state()
    changed = [*numbered(4), replace(numbered(5)[4], gold="another answer")]
    for name, problems, seed in (("problems", numbered(6), 1), ("seed", numbered(5), 2), ("content", changed, 1)):
        with pytest.raises(BadData, match=f"belongs to {name} .*; resume with the same problem file and seed"):
            ProblemStream(problems, seed, 2).restore(state)
    # an older checkpoint
    ProblemStream(numbered(5), 1, 2).restore({key: value for key, value in state.items() if key != "content"})
