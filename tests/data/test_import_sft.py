"""Published SFT sets: which rows are kept, why others are not, and that what is kept is what `dccot sft` trains on."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from dccot.cli import main as dccot
from dccot.core.config import load_config
from dccot.core.files import BadData, read_jsonl
from dccot.data.import_sft import ImportConfig, import_sft, too_long
from dccot.lab.worlds import bigram
from dccot.model.tokenizer import open_tokenizer
from dccot.train.config import SFTConfig
from dccot.train.sft import load_examples
from tests.support.hub import Hub, use_here

NAME = "someone/SFT-Set"


def parallel(answer: str, words: str = "part") -> str:
    workers = "\n".join(f"<worker_{k}>{words} {k}</worker_{k}>" for k in (1, 2, 3))
    block = f"<spawn_workers>\n{workers}\n</spawn_workers>"
    return f"<think>\nplan {block}\nso</think><answer>\\boxed{{{answer}}}</answer>"


def published(problem: str, answer: str | None, completion: str) -> dict:
    """A row with the names of the release's scripts, and a sequential solution, which must not be taken."""
    gold = {"answer": answer} if answer is not None else {}
    return {"problem": problem, **gold, "parallel_rewritten_completion": completion, "completion": "sequential"}


ROWS = [
    published("What is 1 + 1?", "2", parallel("2")),
    published("What is 1 + 2?", "3", parallel("4")),  # wrong
    published("What is 1 + 3?", "4", parallel("4").replace("<worker_2>", "")),
    published("What is 1 + 4?", None, parallel("6")),  # nothing to compare with
    published("What is  1 + 1?", "2", parallel("2")),  # the first again
    published("What is 1 + 5?", "6", " "),
]


def imported(source: Path | str, tmp_path: Path, *settings: str) -> tuple[str, list[dict]]:
    output = tmp_path / "sft.jsonl"
    summary = import_sft(
        load_config(ImportConfig, None, [f"source={source}", f"output={output}", "grading.workers=1", *settings])
    )
    return str(summary), [row for _, row in read_jsonl(output)]


def save(rows: list[dict], path: Path) -> Path:
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("suffix", ["jsonl", "json", "parquet"])
def test_rows_are_kept_or_counted_by_the_reason_against_them(tmp_path, suffix):
    said, rows = imported(save(ROWS, tmp_path / f"rows.{suffix}"), tmp_path)
    assert rows == [
        {"id": "0", "question": "What is 1 + 1?", "gold": "2", "completion": parallel("2")},
        {"id": "3", "question": "What is 1 + 4?", "completion": parallel("6")},
    ]
    assert said.splitlines()[0] == "2 of 6 rows kept"
    for line in ("1 of them without a gold", "1 left out: wrong", "1 left out: repeats an earlier row"):
        assert line in said
    assert said.count("left out: ill-formed") == 1 and "no text in parallel_rewritten_completion or completion" in said


def test_a_row_without_a_gold_is_checked_against_the_problem_with_its_question(tmp_path):
    problems = save([{"id": "x", "question": "What is 1 +\n4?", "gold": "5"}], tmp_path / "problems.jsonl")
    said, rows = imported(save(ROWS, tmp_path / "rows.jsonl"), tmp_path, f"problems={problems}")
    assert [row["id"] for row in rows] == ["0"] and "2 left out: wrong" in said and "without a gold" not in said


def test_our_own_sets_are_read_as_they_are(tmp_path):
    ours = {"question": "What is 1 + 1?", "gold": ["2", "two"], "completion": parallel("2")}
    file = save([{**ours, "id": "p7", "source": "…"}, {**ours, "id": 8.0, "question": "And 1 + 1?"}], tmp_path / "ours")
    _, rows = imported(file, tmp_path)
    assert rows[0] == {"id": "p7", **ours} and rows[1]["id"] == "8.0"  # parquet stores whole numbers as floats, too


def test_a_row_is_too_long_where_training_would_leave_it_out(tmp_path):
    model = bigram.save(tmp_path / "MODEL", "spelled", context=65536)
    tokenizer = open_tokenizer(model)
    row = {"id": "0", "question": "What is 1 + 1?", "completion": parallel("2", "some words")}
    file = save([row], tmp_path / "sft.jsonl")
    config = load_config(SFTConfig, None, [f"model.path={model}", f"data.train={file}"])
    [example] = load_examples(file, config, tokenizer)
    response = example.response
    limit = len(response.prompt) + response.total_tokens + sum(map(sum, response.worker_lengths))
    assert too_long(row, ImportConfig(max_tokens=limit), tokenizer) is None
    assert too_long(row, ImportConfig(max_tokens=limit - 1), tokenizer) == f"longer than {limit - 1:,} tokens"
    for kept, data in ((1, limit), (0, limit - 1)):
        config.data.max_tokens = data
        with nullcontext() if kept else pytest.raises(BadData, match="dropped 1 over"):
            load_examples(file, config, tokenizer)


def test_a_hub_id_is_downloaded_once_without_its_scripts(tmp_path, monkeypatch, capsys):
    folder = tmp_path / "repository"
    (folder / "data").mkdir(parents=True)
    save(ROWS[:4], folder / "data/train-00000-of-00001.parquet")
    save(ROWS[:1], folder / "data/test-00000-of-00001.parquet")
    (folder / "load.py").write_text("raise SystemExit('never downloaded')")
    (folder / "dataset_infos.json").write_text("{}")
    output = tmp_path / "out/sft.jsonl"
    with Hub(datasets={NAME: folder}) as hub:
        use_here(monkeypatch, hub.url, tmp_path / "home")
        command = [
            "data",
            "import-sft",
            f"{NAME}@{hub.commit('datasets', NAME)}",
            f"output={output}",
            "grading.workers=1",
        ]
        monkeypatch.chdir(tmp_path)
        assert dccot(command) == 0
        assert "2 of 4 rows kept\n       1 of them without a gold" in capsys.readouterr().out
        assert all(name.endswith((".parquet", ".json")) for name in hub.served)
    first = output.read_bytes()
    assert dccot(command) == 0 and output.read_bytes() == first  # the hub is gone


def test_what_cannot_be_read_is_one_line_and_writes_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    use_here(monkeypatch, "http://127.0.0.1:9", tmp_path / "home")
    save(ROWS[1:2], tmp_path / "wrong.jsonl")
    said = {
        NAME: f"`hf download {NAME} --repo-type dataset`",
        "none.jsonl": "no file 'none.jsonl'",
        "wrong.jsonl": "no usable row. 0 of 1 rows kept 1 left out: wrong",
    }
    for source, words in said.items():
        assert dccot(["data", "import-sft", source, "output=out/sft.jsonl", "grading.workers=1"]) == 2
        *_, line = capsys.readouterr().err.strip().splitlines()
        assert words in line
    assert not Path("out").exists()
