"""`dccot export`: a folder that opens as it is, with a card computed from the run; nothing half-written; a hub gets all
of it.
"""

import base64
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from dccot.cli import main
from dccot.core.run import Checkpoint
from dccot.eval.results import BenchmarkResult, Evaluation
from dccot.lab.worlds.arithmetic import make_tokenizer
from dccot.model.weights import create_checkpoint

SHAPE = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 32, "intermediate_size": 48}
SHAPE |= {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
SHAPE |= {"max_position_embeddings": 64, "tie_word_embeddings": False}
SFT = """
model: {path: runs/old/base}
steps: 80
data: {train: private/sft.jsonl}
optimizer: {learning_rate: 0.0006}
"""
RL = """
model: {path: runs/old/sft}
steps: 3
prompt: {kind: parallel, open_think: true}
data: {train: private/train.jsonl}
objective: {kind: cispo}
optimizer: {learning_rate: 8.0e-05}
rollout: {budget: 384, workers: [2, 12], depth: 2}
"""


def write_run(folder: Path, config: str, steps=(3,)) -> Path:
    """A run as `dccot sft` and `dccot rl` leave it; `latest` is the last of `steps`."""
    tokenizer = make_tokenizer()
    for step in steps:
        checkpoint = folder / f"checkpoints/step_{step:06d}"
        shape = {**SHAPE, "vocab_size": len(tokenizer)}
        create_checkpoint(shape, checkpoint / "hf", tokenizer=tokenizer, seed=step)
        Checkpoint(checkpoint).write_manifest()
    (folder / "latest").write_text(f"step_{steps[-1]:06d}")
    (folder / "config.yaml").write_text(config)
    return folder


def evaluate(folder: Path, model: Path, right: list[float]) -> None:
    problems = {f"p{i}": share for i, share in enumerate(right)}
    measures = {"accuracy": problems, "longest_path": dict.fromkeys(problems, 98.0)}
    result = BenchmarkResult("test", "AIME of the test", 4, {"correct": 3, "timed_out": 2}, measures)
    folder.mkdir()
    Evaluation(folder.name, str(model), "parallel", 448, {"test": result}).save(folder)


@pytest.fixture
def runs(tmp_path) -> Path:
    """base → sft → stage4, moved from runs/old since they were trained; both were evaluated, stage4 at two steps."""
    runs = tmp_path / "moved"
    write_run(runs / "sft", SFT)
    write_run(runs / "stage4", RL, steps=(2, 3))
    evaluate(runs / "eval_rl", Path("runs/old/stage4/checkpoints/step_000003/hf"), [1.0, 0.5])
    evaluate(runs / "eval_sft", Path("runs/old/sft/checkpoints/step_000003/hf"), [0.25, 0.25])
    evaluate(runs / "eval_earlier", Path("runs/old/stage4/checkpoints/step_000002/hf"), [0.0, 0.0])
    return runs


def rows_of(card: str, title: str) -> list[list[str]]:
    """The table of a section without its heads."""
    section = card.split(f"## {title}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_the_folder_opens_in_transformers_with_the_run_s_weights(runs, tmp_path):
    assert main(["export", str(runs / "stage4"), str(tmp_path / "out")]) == 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    expected = load_file(runs / "stage4/checkpoints/step_000003/hf/model.safetensors")
    assert torch.equal(model.state_dict()["lm_head.weight"], expected["lm_head.weight"].to(model.dtype))
    assert AutoTokenizer.from_pretrained(tmp_path / "out")("Add a").input_ids


def test_public_without_push_is_refused_before_anything_is_written(runs, tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["export", str(runs / "stage4"), str(tmp_path / "out"), "--public"])
    assert "--push NAME/MODEL" in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_a_link_out_of_the_folder_is_not_exported(runs, tmp_path, capsys):
    """The manifest of a run from elsewhere need not list it; copied, it would go to the hub."""
    (tmp_path / "secret").write_text("secret")
    (runs / "stage4/checkpoints/step_000003/hf/notes").symlink_to(tmp_path / "secret")
    assert main(["export", str(runs / "stage4"), str(tmp_path / "out")]) == 2
    assert f"notes is a link to {tmp_path / 'secret'}, outside its model's folder" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_the_card_lists_the_stages_that_led_to_the_model_even_where_the_runs_were_moved(runs, tmp_path):
    main(["export", str(runs / "stage4"), str(tmp_path / "out")])
    card = (tmp_path / "out/README.md").read_text()
    assert [row[:5] for row in rows_of(card, "Training")] == [
        ["old/base", "start", "", "", ""],
        ["sft", "SFT", "80", "sft.jsonl", "0.0006"],
        ["stage4", "RL", "3", "train.jsonl", "8e-05"],
    ]
    assert "private" not in card  # where the data was is nobody's business


def test_results_are_those_of_these_weights_and_of_their_ancestors_with_standard_errors(runs, tmp_path):
    main(["export", str(runs / "stage4"), str(tmp_path / "out")])
    card = (tmp_path / "out/README.md").read_text()
    # by hand: mean of 1.0 and 0.5; standard error = standard deviation 0.35355 / √2
    assert [(row[0], row[4]) for row in rows_of(card, "Results")] == [
        ("sft", "25.00 ± 0.00"),
        ("stage4", "75.00 ± 25.00"),
    ]
    assert "- Measured on AIME of the test and on nothing else." in card
    assert "- 2 answers could not be judged; they count as wrong." in card
    assert "Trained with 2 to 12 workers, 2 levels deep and at most 384 tokens" in card


def test_a_checkpoint_can_be_named_by_its_step_and_has_its_own_results(runs, tmp_path):
    assert main(["export", f"{runs / 'stage4'}@2", str(tmp_path / "out")]) == 0
    expected = (runs / "stage4/checkpoints/step_000002/hf/model.safetensors").read_bytes()
    assert (tmp_path / "out/model.safetensors").read_bytes() == expected
    assert ["stage4", "0.00 ± 0.00"] in [
        [row[0], row[4]] for row in rows_of((tmp_path / "out/README.md").read_text(), "Results")
    ]


def test_without_evaluations_the_card_says_so(tmp_path):
    run = write_run(tmp_path / "alone", RL)
    main(["export", str(run), str(tmp_path / "out"), "--license", "apache-2.0"])
    card = (tmp_path / "out/README.md").read_text()
    assert "No evaluation of these weights was found" in card
    assert card.startswith("---\n") and "license: apache-2.0" in card


def test_a_folder_that_exists_is_left_alone(runs, tmp_path, capsys):
    (tmp_path / "out").mkdir()
    (tmp_path / "out/mine.txt").write_text("mine")
    assert main(["export", str(runs / "stage4"), str(tmp_path / "out")]) != 0
    assert "already exists" in capsys.readouterr().err
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["mine.txt"]


def test_a_damaged_checkpoint_is_refused_and_leaves_nothing(runs, tmp_path, capsys):
    weights = runs / "stage4/checkpoints/step_000003/hf/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + (b"\0" if weights.read_bytes()[-1] else b"\1"))
    assert main(["export", str(runs / "stage4"), str(tmp_path / "out")]) != 0
    assert "does not match the manifest" in capsys.readouterr().err
    assert {file.name for file in tmp_path.iterdir()} == {"moved"}


class Hub(BaseHTTPRequestHandler):
    """As much of a hub's API as an upload of small files uses, on loopback."""

    def do_POST(self):
        address = f"http://127.0.0.1:{self.server.server_port}/me/model"
        sent = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.tokens.append(self.headers["Authorization"])
        if self.path == "/api/repos/create":
            self.server.repository = json.loads(sent)
            answer = {"url": address}
        elif "/preupload/" in self.path:
            how = {"uploadMode": "regular", "shouldIgnore": False}
            answer = {"files": [{"path": file["path"], **how} for file in json.loads(sent)["files"]]}
        elif self.path == "/api/validate-yaml":  # the card's header
            answer = {"errors": [], "warnings": []}
        else:
            lines = [json.loads(line) for line in sent.splitlines()]
            files = [line["value"] for line in lines if line["key"] == "file"]
            self.server.files = {file["path"]: base64.b64decode(file["content"]) for file in files}
            url = f"{address}/commit/{0:040d}"
            answer = {"success": True, "commitOid": "0" * 40, "commitUrl": url, "hookOutput": ""}
        self._answer(answer)

    def do_GET(self):
        self._answer({"id": "me/model", "sha": "0" * 40, "siblings": []})

    def _answer(self, value: dict):
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def hub():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.tokens, server.repository, server.files = [], {}, {}
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def test_push_sends_every_file_to_a_private_repository_with_the_token_of_the_environment(
    runs, tmp_path, hub, monkeypatch, capsys
):
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{hub.server_port}")
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert main(["export", str(runs / "stage4"), str(tmp_path / "out"), "--push", "me/model"]) == 0
    assert hub.repository["visibility"] == "private" and set(hub.tokens) == {"Bearer hf_secret"}
    assert hub.files == {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()}
    said = capsys.readouterr()
    assert "hf_secret" not in said.out + said.err


def test_a_push_that_fails_says_how_to_do_it_again(runs, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    out = tmp_path / "out"
    assert main(["export", str(runs / "stage4"), str(out), "--push", "me/model"]) == 2
    *_, line = capsys.readouterr().err.splitlines()
    assert "cannot push to me/model (" in line and f"hf upload me/model {out}`" in line
    assert (out / "README.md").is_file()
