"""Models by hub id, through huggingface_hub itself and a hub on loopback."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from dccot.model.folder import resolve_model
from dccot.model.hub import hub_name, is_hub_id
from tests.support.hub import Hub, use_here


@pytest.fixture
def tiny(tmp_path):
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    (folder / "model.safetensors").write_bytes(bytes(range(256)) * 40)
    (folder / "code.py").write_text("raise SystemExit('never downloaded')")
    return folder


@pytest.fixture
def ask(tmp_path, monkeypatch):
    """(hub id, hub's address) → (whether it was found, the folder or the message)"""

    def asked(name: str, url: str) -> tuple[bool, str]:
        use_here(monkeypatch, url, tmp_path / "home")
        try:
            return True, str(resolve_model(name))
        except ValueError as error:
            return False, str(error)

    return asked


def test_the_first_use_downloads_and_the_second_does_not_even_without_a_network(tiny, ask):
    with Hub({"someone/tiny": tiny}) as hub:
        found, folder = ask("someone/tiny", hub.url)
        assert found, folder
        assert sorted(hub.served) == ["config.json", "model.safetensors"]  # no code
        commit = hub.commit("models", "someone/tiny")
        assert folder.endswith(commit) and hub_name(Path(folder)) == f"tiny-{commit[:7]}"
        assert ask(f"someone/tiny@{commit}", hub.url) == (True, folder)
        assert len(hub.served) == 2
    assert ask("someone/tiny", hub.url) == (True, folder)  # the hub is gone


def test_a_download_that_breaks_off_is_not_taken_for_a_model_and_is_finished_by_the_next_use(tiny, ask):
    with Hub({"someone/tiny": tiny}) as hub:
        hub.cut = "model.safetensors"
        found, message = ask("someone/tiny", hub.url)
        assert not found and "cannot be downloaded" in message and "hf download someone/tiny" in message
        found, message = ask("someone/tiny", "http://127.0.0.1:9")
        assert not found and "not in the cache" in message
        hub.cut = None
        found, folder = ask("someone/tiny", hub.url)
        assert found, folder


def test_a_file_that_changed_in_the_cache_is_refused_by_name(tiny, ask):
    with Hub({"someone/tiny": tiny}) as hub:
        _, folder = ask("someone/tiny", hub.url)
        with open(os.path.realpath(f"{folder}/model.safetensors"), "r+b") as file:
            file.write(b"x")
        found, message = ask("someone/tiny", hub.url)
        assert not found and "model.safetensors" in message and "sha256 does not match" in message


def test_an_unknown_id_and_an_unknown_revision_say_so(tiny, ask):
    with Hub({"someone/tiny": tiny}) as hub:
        found, message = ask("someone/other", hub.url)
        assert not found and "neither a folder here nor a model on the hub" in message
        found, message = ask("someone/tiny@v9", hub.url)
        assert not found and "someone/tiny@v9" in message


@pytest.mark.parametrize(
    "name, expected",
    [
        ("amahanka/DC-CoT", True),
        ("amahanka/DC-CoT@main", True),
        ("runs/hlp", False),
        ("runs/hlp@180", False),
        ("./model", False),
        ("data/sft.jsonl", False),
        ("model", False),
        ("a/b/c", False),
        ("/abs/path", False),
    ],
)
def test_what_is_a_hub_id(name, expected):
    assert is_hub_id(name) is expected
