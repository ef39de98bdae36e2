"""The report on an SFT set measures what it says it measures."""

import json

import pytest

from dccot.core.files import BadData, write_jsonl_atomic
from dccot.data.cli import main
from dccot.data.sft_set import check_set, leaks_in, verbatim_share, word_runs

BLOCK = "<spawn_workers>\n<worker_1>{}</worker_1>\n<worker_2>{}</worker_2>\n<worker_3>{}</worker_3>\n</spawn_workers>"
SOURCE = "<think>\none two three four five six seven eight nine ten eleven twelve</think>"


def completion(*blocks: tuple[str, str, str]) -> str:
    rounds = "".join("\nlet us split" + BLOCK.format(*block) for block in blocks)
    return f"<think>{rounds}\nso</think><answer>\\boxed{{1}}</answer>"


def sft_file(folder, rows):
    write_jsonl_atomic(folder / "sft.jsonl", rows)
    return folder / "sft.jsonl"


def test_lengths_rounds_and_balance_by_hand(tmp_path):
    one = {"id": "a", "question": "q", "completion": completion(("a b", "a b c d", "a"))}
    two = {"id": "b", "question": "q", "completion": completion(("a", "a", "a"), ("a b", "a b", "a b"))}
    bad = {"id": "c", "question": "q", "completion": "<think>alone</think><answer>1</answer>"}
    report = check_set(sft_file(tmp_path, [one, two, bad]))
    assert (report.examples, report.ill_formed, report.rounds) == (3, {"no_spawn": 1}, {1: 1, 2: 1})
    assert report.measures["balance"] == [1 / 4, 1.0, 1.0]
    # Words, inserted tags left out: "<think>\nlet us split<spawn_workers>" 4, "\nlet us split<spawn_workers>" 3,
    # "\nso</think>…" 1.
    director, later, end = 4, 3, 1
    assert report.measures["total"] == [director + 7 + end, director + 3 + later + 6 + end]
    assert report.measures["longest_path"] == [director + 4 + end, director + 1 + later + 2 + end]


INNER = "<spawn_workers><worker_1>three four</worker_1></spawn_workers>"
CHOSEN = f"<worker_1>one</worker_1><worker_2>x <task_1>c</task_1>{INNER}y</worker_2>"
DEEP = (
    f"<think>do <task_1>a</task_1><task_2>b</task_2><spawn_workers>{CHOSEN}</spawn_workers>so</think><answer>1</answer>"
)


@pytest.mark.parametrize(
    ("workers", "depth", "ill_formed", "widths", "depths"),
    [
        ([1, 8], 2, {}, {2: 1, 1: 1}, {2: 1}),
        ([1, 8], 1, {"tag_in_worker": 1}, {}, {}),
        ([2, 8], 2, {"tasks": 1}, {}, {}),
    ],
)
def test_width_and_depth_are_read(tmp_path, workers, depth, ill_formed, widths, depths):
    row = {"id": "a", "question": "q", "completion": DEEP}
    report = check_set(sft_file(tmp_path, [row]), workers=workers, depth=depth)
    assert (report.ill_formed, report.widths, report.depths) == (ill_formed, widths, depths)


@pytest.mark.parametrize(
    "text, share",
    [
        ("two three four five six", 1.0),
        ("two three four five six and then", 5 / 7),
        ("one two three four 5 six seven eight nine ten", 5 / 10),
        ("ten nine eight seven six", 0.0),
        ("hm", 1.0),
    ],
)
def test_verbatim_share_counts_words_in_copied_runs(text, share):
    assert verbatim_share(f"<worker_1>{text}</worker_1>", word_runs(SOURCE)) == pytest.approx(share)


@pytest.mark.parametrize(
    "workers, expected",
    [
        (["x = 5", "y = 3", "z = 1"], []),
        (["so x = 5.", "since x=5 we get y = 10", "z = 1"], [(2, "states 'x=5', which worker 1 reached")]),
        (["a = 2", "b", "as a = 2"], []),  # known from the director's text below
        ([r"$a_{1} = -3/4$", r"b", r"take $a_{1}=-3/4$"], [(3, "states 'a_{1}=-3/4', which worker 1 reached")]),
        (["f(2) = 9", "b", "f(2)=9"], [(3, "states 'f(2)=9', which worker 1 reached")]),
        (
            ["I am worker 1", "as Worker 1 found", "the other workers know"],
            [(2, "names 'Worker 1'"), (3, "names 'the other workers'")],
        ),
        (["2 + 3 = 5", "2 + 3 = 5", "5"], []),
    ],
)
def test_leaks_are_what_a_worker_cannot_know(workers, expected):
    assert list(leaks_in(workers, "Suppose $a = 2$.")) == expected


def test_later_rounds_know_the_earlier_ones(tmp_path):
    row = {"id": "a", "question": "q", "completion": completion(("x = 5", "b", "c"), ("b", "with x = 5", "x = 5"))}
    assert check_set(sft_file(tmp_path, [row])).leaks == []


def test_command_prints_the_report_for_people_and_for_programs(tmp_path, capsys):
    row = {"id": "a", "question": "q", "source": SOURCE}
    row["completion"] = completion(("two three four five six", "b", "as worker 1 says"))
    path = sft_file(tmp_path, [row])
    assert main(["check", str(path)]) == 0
    assert "leaks               1\n  a, round 1, worker 3: names 'worker 1'" in capsys.readouterr().out
    assert main(["check", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["verbatim"]["max"] == 1.0


def test_unusable_files_are_one_line_for_people(tmp_path, capsys):
    path = sft_file(tmp_path, [{"id": "a", "question": "q"}])
    with pytest.raises(BadData, match=r"sft\.jsonl:1: no field 'completion'"):
        check_set(path)
    sft_file(tmp_path, [{"id": "a", "question": "q", "completion": None}])
    with pytest.raises(BadData, match=r"sft\.jsonl:1: field 'completion' must be a text, found None"):
        check_set(path)
    assert main(["check", str(path)]) == 2 and main(["check", str(tmp_path / "missing.jsonl")]) == 2
    assert main(["problems", str(path)]) == 2
    said = capsys.readouterr().err
    assert said.count("dccot: ") == 3 and "Traceback" not in said
