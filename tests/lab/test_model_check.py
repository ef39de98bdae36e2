"""`dccot model check` says what a folder holds, and one line about the first thing that cannot be used."""

import json
import sys

import pytest
import torch

from dccot.cli import main
from dccot.lab.worlds import bigram as tiny
from dccot.model.tokenizer import open_tokenizer
from dccot.model.weights import open_tensors
from tests.support import programs


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.save(tmp_path_factory.mktemp("models") / "spelled", "spelled", context=512)


def said(capsys) -> str:
    return " ".join(capsys.readouterr().out.split())


def test_shape_tokenizer_prompt_and_tags_are_shown(folder, capsys):
    assert main(["model", "check", str(folder), "--no-weights", "--workers", "2"]) == 0
    shown, tokenizer = said(capsys), open_tokenizer(folder)
    with open_tensors(folder) as tensors:
        parameters = sum(torch.Size(tensor.get_shape()).numel() for tensor in tensors.values())
    assert f"{parameters:,}" in shown and "512 tokens" in shown and "deepseek: " in shown
    for tag in ("<spawn_workers>", "</worker_2>"):
        ids = " ".join(map(str, tokenizer.encode(tag, add_special_tokens=False)))
        assert f"{tag} {ids}" in shown
    assert "worker_3" not in shown


def test_the_decoder_is_compared_with_transformers(folder, capsys):
    assert main(["model", "check", str(folder), "--no-engine"]) == 0
    assert "vs. transformers logits of" in said(capsys)


@pytest.mark.thorough
def test_the_decoder_is_compared_with_vllm(folder):
    """In a process of its own, like every engine that is shut down."""
    done = programs.finish([sys.executable, "-m", "dccot.cli", "model", "check", folder])
    shown = " ".join(done.stdout.split())
    assert "vs. vLLM log-probs of" in shown and shown.endswith("all checks passed")


def test_logits_that_differ_are_an_error(folder, capsys, monkeypatch):
    from dccot.lab import model_check

    exact = model_check.decoder

    def wrong(folder):
        model = exact(folder)
        with torch.no_grad():
            model.model.norm.weight.mul_(1.01)
        return model

    monkeypatch.setattr(model_check, "decoder", wrong)
    assert main(["model", "check", str(folder), "--no-engine"]) == 2
    assert "away from those of transformers" in capsys.readouterr().err


def test_what_is_unsupported_is_one_line_after_what_was_found(folder, tmp_path, capsys):
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    raw = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | {"vocab_size": 5}))
    assert main(["model", "check", str(tmp_path), "--no-weights"]) == 2
    shown = capsys.readouterr()
    assert "family" in shown.out and "the model embeds 5" in shown.err and len(shown.err.splitlines()) == 1
    (tmp_path / "config.json").write_text(json.dumps(raw | {"hidden_act": "gelu"}))
    assert main(["model", "check", str(tmp_path)]) == 2
    assert "hidden_act is 'gelu'" in capsys.readouterr().err
