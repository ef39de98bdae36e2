"""What fuzzing starts from, and every input that it found a fault with, is read or refused in one line."""

from pathlib import Path

import pytest

from tests.fuzz.targets import TARGETS, refuses

CORPUS = Path(__file__).parent / "fuzz" / "corpus"
FILES = sorted(path for path in CORPUS.rglob("*") if path.is_file())


def test_every_target_has_a_corpus():
    assert {path.parent.name for path in FILES} == set(TARGETS)
    assert sum(path.stat().st_size for path in FILES) < 500_000


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_it_is_read_or_refused_in_one_line(path):
    said = refuses(path.parent.name, path.read_bytes())
    assert said is None or "\n" not in said
