"""JSON lines: every kind of bad line is named by file and line, and no crash of a writer costs a finished row."""

import gzip
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dccot.core import files
from dccot.core.files import (
    MAX_LINE_BYTES,
    BadData,
    JsonlWriter,
    change_cache,
    read_cache,
    read_jsonl,
    write_jsonl_atomic,
)


def read(path, **options):
    said = []
    reader = read_jsonl(path, report=said.append, **options)
    return list(reader), said, reader.skipped


BAD_LINES = {
    "not JSON": b'{"a": 1',
    "not UTF-8 at byte 7": b'{"a": "\xff"}',
    "found list": b"[1, 2]",
    "found int": b"3",
    "nested too deeply": b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    "not JSON (Exceeds": b'{"a": ' + b"9" * 5000 + b"}",
    "half a surrogate pair": rb'{"a": "\uD83D"}',
    "longer than 8,388,608 bytes": b'{"a": "' + b"x" * (10 << 20) + b'"}',
}


@pytest.mark.parametrize("fault", BAD_LINES)
def test_bad_line_is_reported_with_its_number_and_skipped_and_stops_a_strict_reader(tmp_path, fault):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"a": 1}\n' + BAD_LINES[fault] + b'\n{"a": 2}\n')
    rows, said, skipped = read(path)
    assert rows == [(1, {"a": 1}), (3, {"a": 2})]
    assert skipped == 1
    assert len(said) == 1 and said[0].startswith(f"{path}:2: ") and fault in said[0]
    with pytest.raises(BadData, match=r"rows\.jsonl:2: "):
        read(path, strict=True)


def test_empty_file_is_said_to_be_empty(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.touch()
    assert read(path) == ([], [f"{path}: the file is empty"], 0)
    with pytest.raises(BadData, match="empty"):
        read(path, strict=True)


def test_blank_lines_byte_order_mark_and_missing_last_newline_are_harmless(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"a": 1}\n\n  \r\n{"a": "\xc3\xa9\xe2\x80\xa8"}')
    assert read(path) == ([(1, {"a": 1}), (4, {"a": "é\u2028"})], [], 0)


def test_line_numbers_are_right_behind_an_over_long_line_and_its_bytes_are_not_kept(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"a": "' + b"x" * (8 * MAX_LINE_BYTES) + b'"}\n{"a": 2}\n')
    tracemalloc.start()
    rows, said, _ = read(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert rows == [(2, {"a": 2})] and ":1: " in said[0]
    assert peak < 5 * MAX_LINE_BYTES


def test_a_file_that_is_bad_throughout_is_counted_not_printed_line_by_line(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("nonsense\n" * 1000)
    rows, said, skipped = read(path)
    assert rows == [] and skipped == 1000 and len(said) == 4 and "1,000 bad lines" in said[-1]


@given(st.binary(max_size=200), st.integers(0, 60), st.integers(0, 255))
@settings(max_examples=300, deadline=None)
def test_reader_never_raises_on_mutated_files(tmp_path_factory, junk, at, byte):
    good = bytearray(b'{"id": "7", "question": "Was ist 2 + 2?", "gold": ["4"]}\n')
    good[at % len(good)] = byte
    path = tmp_path_factory.mktemp("fuzz") / "rows.jsonl"
    path.write_bytes(bytes(good) + junk + b"\n" + b'{"last": true}\n')
    rows, _, _ = read(path)
    assert rows[-1][1] == {"last": True}


rows_strategy = st.lists(st.dictionaries(st.text(), st.text() | st.integers() | st.none()), max_size=6)


@given(rows_strategy, st.integers(0, 10**6))
@settings(max_examples=200, deadline=None)
def test_file_cut_at_any_byte_keeps_every_finished_row_and_goes_on(tmp_path_factory, rows, cut):
    path = tmp_path_factory.mktemp("cut") / "rows.jsonl"
    with JsonlWriter(path) as out:
        for row in rows:
            out.write(row)
    whole = path.read_bytes()
    cut %= len(whole) + 1
    os.truncate(path, cut)
    finished = whole[:cut].count(b"\n") + (cut < len(whole) and whole[cut : cut + 1] == b"\n")
    with JsonlWriter(path) as out:
        assert list(out.rows()) == rows[:finished]
        out.write({"next": 1})
    assert [json.loads(line) for line in path.read_bytes().splitlines()] == [*rows[:finished], {"next": 1}]


WRITER = """
import sys
from dccot.core.files import JsonlWriter
with JsonlWriter(sys.argv[1]) as out:
    start = sum(1 for _ in out.rows())
    print("go", flush=True)
    for n in range(start, 10**9):
        out.write({"n": n, "text": "x" * (n * 7919 % 20000)})
"""


def test_killed_writer_loses_no_finished_row_and_repeats_none(tmp_path):
    path = tmp_path / "rows.jsonl"
    for pause in (0.02, 0.1, 0.05):  # wherever it is then
        child = subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE)
        child.stdout.readline()
        time.sleep(pause)
        child.send_signal(signal.SIGKILL)
        child.wait()
    with JsonlWriter(path) as out:
        numbers = [row["n"] for row in out.rows()]
    assert len(numbers) > 3 and numbers == list(range(len(numbers)))


def test_second_writer_of_the_same_file_is_refused(tmp_path):
    with JsonlWriter(tmp_path / "rows.jsonl"), pytest.raises(BadData, match="written by another process"):
        JsonlWriter(tmp_path / "rows.jsonl")


def test_a_writer_on_another_machine_is_waited_for_and_followed_when_its_lock_is_gone(tmp_path, monkeypatch, caplog):
    """Nothing but /proc/locks tells the two apart: here it is said to know of no lock."""
    path = tmp_path / "rows.jsonl"
    first = JsonlWriter(path)
    assert files.held_here(first._fd)
    monkeypatch.setattr(files, "held_here", lambda file: False)
    monkeypatch.setattr(files, "LEASE_SECONDS", 0.2)
    with pytest.raises(BadData, match="written by another process"):
        JsonlWriter(path)
    assert f"{path} is locked by another process on another machine, last written 0 s ago" in caplog.text
    monkeypatch.setattr(files, "LEASE_SECONDS", 60)
    threading.Timer(0.3, first.close).start()
    with JsonlWriter(path) as second:
        second.write({"a": 1})
    assert path.read_text() == '{"a": 1}\n'


def test_full_disk_leaves_the_file_as_it_was(tmp_path):
    path = tmp_path / "rows.jsonl"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        with JsonlWriter(path) as out:
            out.write({"a": 1})
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
            with pytest.raises(OSError):
                out.write({"a": "x" * 5000})
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
            assert path.read_bytes() == b'{"a": 1}\n'
            out.write({"a": 2})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, ignored)
    assert [row for _, row in read_jsonl(path)] == [{"a": 1}, {"a": 2}]


def test_a_compressed_file_is_read_like_any_other_and_has_the_same_bytes_each_time(tmp_path):
    rows = [{"text": "ü" * n} for n in range(50)]
    for name in ("a.jsonl", "a.jsonl.gz", "b.jsonl.gz"):
        assert write_jsonl_atomic(tmp_path / name, rows) == 50
    plain, packed = (tmp_path / "a.jsonl").read_bytes(), (tmp_path / "a.jsonl.gz").read_bytes()
    assert gzip.decompress(packed) == plain and packed == (tmp_path / "b.jsonl.gz").read_bytes()
    assert [row for _, row in read_jsonl(tmp_path / "a.jsonl.gz")] == rows
    (tmp_path / "a.jsonl.gz").write_bytes(packed[:-20])
    with pytest.raises(BadData, match="is damaged or cut short"):
        list(read_jsonl(tmp_path / "a.jsonl.gz"))


def test_a_device_or_a_pipe_is_not_replaced_by_a_file(tmp_path):
    os.mkfifo(pipe := tmp_path / "out.html")
    with pytest.raises(BadData, match="is a device or a pipe"):
        write_jsonl_atomic(pipe, [{"a": 1}])
    assert pipe.is_fifo() and os.listdir(tmp_path) == ["out.html"]


def test_atomic_write_replaces_all_or_nothing(tmp_path):
    path = tmp_path / "rows.jsonl"
    assert write_jsonl_atomic(path, [{"a": 1}, {"a": 2}]) == 2

    def failing():
        yield {"a": 3}
        raise RuntimeError("boom")

    with pytest.raises(RuntimeError):
        write_jsonl_atomic(path, failing())
    assert [row for _, row in read_jsonl(path)] == [{"a": 1}, {"a": 2}]
    assert os.listdir(tmp_path) == ["rows.jsonl"]
    with path.open() as reader:  # whoever is reading keeps the old file
        write_jsonl_atomic(path, [{"a": 3}])
        assert reader.read() == '{"a": 1}\n{"a": 2}\n'


def test_a_cache_that_is_damaged_or_cannot_be_written_costs_nothing_but_what_it_held(tmp_path, monkeypatch, caplog):
    add = lambda found: found.setdefault("key", len(found))
    monkeypatch.setenv("DCCOT_CACHE", str(tmp_path / "cache"))
    assert change_cache("x.json", add) == 0 and read_cache("x.json") == {"key": 0}
    for damaged in ("{", "[1]"):
        (tmp_path / "cache" / "x.json").write_text(damaged)
        assert read_cache("x.json") == {} and "is damaged" in caplog.text
    assert change_cache("x.json", add) == 0 and read_cache("x.json") == {"key": 0}
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DCCOT_CACHE", str(tmp_path / "file" / "cache"))
    assert change_cache("x.json", add) == 0 and read_cache("x.json") == {}
    assert "cannot be kept" in caplog.text
