"""What a result was made of is written next to it: whole, without secrets, and only if all ranks agree."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dccot.core.files import checksum
from dccot.core.provenance import code_version, differences, provenance, read_starts, record
from dccot.core.runtime import Runtime
from tests.support import programs

pytestmark = pytest.mark.slow

PROGRAM = """
import json, os, sys
from pathlib import Path
from dccot.core.files import checksum
from dccot.core.provenance import record
from dccot.core.runtime import Runtime

said = {}
with Runtime.start() as runtime:
    for case, other in {"agree": {}, "settings": {"seed": 1}, "data": {"row": "b"}}.items():
        place = Path(sys.argv[1], str(runtime.rank), case)
        place.mkdir(parents=True)
        mine = {"seed": 0, "row": "a"} | (other if runtime.rank else {})
        (place / "train.jsonl").write_text(mine["row"])
        try:
            inputs = {"data.train": {"train.jsonl": checksum(place / "train.jsonl")}}
            record(place, {"steps": 3, "seed": mine["seed"]}, inputs, runtime)
        except ValueError as error:
            said[case] = str(error)
    Path(sys.argv[1], f"{runtime.rank}.json").write_text(json.dumps(said))
"""


def test_ranks_that_see_other_settings_or_other_data_are_refused(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    programs.finish(programs.torchrun(2, tmp_path / "program.py", tmp_path))
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    assert first == second and set(first) == {"settings", "data"}  # both ranks stop, with the same words
    assert first["settings"].startswith("ranks disagree: configuration.seed is 1 on rank 1 and 0 on rank 0")
    assert first["data"].startswith("ranks disagree: inputs.data.train.train.jsonl is '")
    assert [path.parent for path in tmp_path.rglob("provenance.json")] == [tmp_path / "0" / "agree"]


def test_a_start_like_the_one_before_is_not_repeated_and_another_is_added(tmp_path):
    for seed in (1, 1, 2):
        record(tmp_path, {"seed": seed}, {}, Runtime.alone())
    assert [start["configuration"] for start in read_starts(tmp_path / "provenance.json")] == [{"seed": 1}, {"seed": 2}]


def test_a_single_file_has_its_provenance_beside_it(tmp_path):
    (tmp_path / "rollouts.jsonl").touch()
    record(tmp_path / "rollouts.jsonl", {}, {}, Runtime.alone())
    assert (tmp_path / "rollouts.provenance.json").is_file()


def test_no_secret_is_written(monkeypatch):
    monkeypatch.setenv("SOME_API_KEY", "sk-planted-1234")
    given = ["dccot", "--key=sk-planted-1234", "endpoint.base_url=https://user:hunter2@host/v1"]
    monkeypatch.setattr(sys, "argv", given)
    text = json.dumps(provenance({"url": "http://me:hunter2@host", "note": "a sk-planted-1234 b"}, {}))
    assert "sk-planted-1234" not in text and "hunter2" not in text and "user:" not in text
    assert "[SOME_API_KEY]" in text and "@host/v1" in text


def test_the_checksum_of_the_code_is_that_of_the_files_that_run(tmp_path):
    """A copy of the package with one more comment is other code; the same copy is the same, with or without git."""
    root = Path(__file__).parents[2]
    subprocess.run(f"cp -rL {root}/dccot {tmp_path}/dccot", shell=True, check=True)
    ask = "from dccot.core.provenance import code_version; import json; print(json.dumps(code_version()))"

    def asked() -> dict:
        environment = {**os.environ, "PYTHONPATH": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}
        options = {"env": environment, "cwd": tmp_path, "capture_output": True, "text": True}
        return json.loads(programs.run([sys.executable, "-c", ask], **options).stdout)

    same = asked()
    assert (same["sha256"], same["commit"], same["dirty"]) == (code_version()["sha256"], None, None)
    with (tmp_path / "dccot" / "train" / "rl.py").open("a") as file:
        file.write("# other\n")
    assert asked()["sha256"] != same["sha256"]


def test_differences_are_named_by_their_dotted_key():
    before, after = {"a": {"b": 1, "c": [1]}, "d": 1}, {"a": {"b": 2, "c": [1]}, "e": 1}
    assert list(differences(before, after)) == [("a.b", 1, 2), ("d", 1, None), ("e", None, 1)]


def test_a_checksum_is_sha256(tmp_path):
    (tmp_path / "abc").write_text("abc")
    # FIPS 180-2, example B.1
    assert checksum(tmp_path / "abc") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
