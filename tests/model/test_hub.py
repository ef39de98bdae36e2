"""Models by hub id, through huggingface_hub itself and a hub on loopback."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from dccot.model.hub import is_hub_id
from tests.support.hub import Hub

pytestmark = pytest.mark.slow


@pytest.fixture
def tiny(tmp_path):
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    (folder / "model.safetensors").write_bytes(bytes(range(256)) * 40)
    (folder / "code.py").write_text("raise SystemExit('never downloaded')")
    return folder


def ask(name: str, url: str, home, **more: str) -> tuple[int, str]:
    """The folder of a hub id, found in a process of its own: huggingface_hub reads its environment when imported."""
    code = (
        "import sys\nfrom dccot.model.folder import resolve_model\n"
        "try: print(resolve_model(sys.argv[1]))\nexcept ValueError as error: sys.exit(str(error))"
    )
    environment = os.environ | {"HF_ENDPOINT": url, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1"} | more
    done = subprocess.run(
        [sys.executable, "-c", code, name], env=environment, capture_output=True, text=True, timeout=900
    )
    return done.returncode, done.stdout.strip() if done.returncode == 0 else done.stderr.strip().splitlines()[-1]


def test_the_first_use_downloads_and_the_second_does_not_even_without_a_network(tiny, tmp_path):
    with Hub({"someone/tiny": tiny}) as hub:
        code, folder = ask("someone/tiny", hub.url, tmp_path / "home")
        assert code == 0, folder
        assert sorted(hub.served) == ["config.json", "model.safetensors"]  # no code
        commit = hub.commit("models", "someone/tiny")
        assert folder.endswith(commit)
        assert ask(f"someone/tiny@{commit}", hub.url, tmp_path / "home") == (0, folder)
        assert len(hub.served) == 2
    assert ask("someone/tiny", hub.url, tmp_path / "home") == (0, folder)  # the hub is gone


def test_a_download_that_breaks_off_is_not_taken_for_a_model_and_is_finished_by_the_next_use(tiny, tmp_path):
    with Hub({"someone/tiny": tiny}) as hub:
        hub.cut = "model.safetensors"
        code, message = ask("someone/tiny", hub.url, tmp_path / "home")
        assert code == 1 and "cannot be downloaded" in message and "hf download someone/tiny" in message
        code, message = ask("someone/tiny", "http://127.0.0.1:9", tmp_path / "home")
        assert code == 1 and "not in the cache" in message
        hub.cut = None
        code, folder = ask("someone/tiny", hub.url, tmp_path / "home")
        assert code == 0, folder


def test_a_file_that_changed_in_the_cache_is_refused_by_name(tiny, tmp_path):
    with Hub({"someone/tiny": tiny}) as hub:
        _, folder = ask("someone/tiny", hub.url, tmp_path / "home")
        with open(os.path.realpath(f"{folder}/model.safetensors"), "r+b") as file:
            file.write(b"x")
        code, message = ask("someone/tiny", hub.url, tmp_path / "home")
        assert code == 1 and "model.safetensors" in message and "sha256 does not match" in message


def test_an_unknown_id_and_an_unknown_revision_say_so(tiny, tmp_path):
    with Hub({"someone/tiny": tiny}) as hub:
        code, message = ask("someone/other", hub.url, tmp_path / "home")
        assert code == 1 and "neither a folder here nor a model on the hub" in message
        code, message = ask("someone/tiny@v9", hub.url, tmp_path / "home")
        assert code == 1 and "someone/tiny@v9" in message


@pytest.mark.parametrize(
    "name, expected",
    [
        ("amahanka/DC-CoT", True),
        ("amahanka/DC-CoT@main", True),
        ("runs/hlp", False),
        ("runs/hlp@180", False),
        ("./model", False),
        ("model", False),
        ("a/b/c", False),
        ("/abs/path", False),
    ],
)
def test_what_is_a_hub_id(name, expected):
    assert is_hub_id(name) is expected
