"""Weights in and out: nothing is lost, nothing is guessed, nothing is half-written."""

import hashlib
import json
import math
import signal
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from dccot.core.files import BadData
from dccot.lab.model_check import main
from dccot.model.config import read_config
from dccot.model.weights import (
    INDEX_FILE,
    create_checkpoint,
    load_weights,
    open_tensors,
    read_companions,
    save_checkpoint,
)
from tests.support import programs


def weights(model) -> dict[str, torch.Tensor]:
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def assert_same_bits(first: dict, second: dict) -> None:
    assert first.keys() == second.keys()
    assert all(first[name].dtype == second[name].dtype and torch.equal(first[name], second[name]) for name in first)


def digest(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


@pytest.fixture
def first(raw_config, write_checkpoint, tmp_path) -> Path:
    """A checkpoint written by transformers."""
    write_checkpoint(tmp_path / "first", raw_config())
    return tmp_path / "first"


@pytest.mark.parametrize("max_shard_bytes", [10**9, 200_000], ids=["one file", "sharded"])
@pytest.mark.parametrize("model_type, tied", [("qwen2", False), ("qwen3", True), ("llama", False)])
def test_round_trip_through_transformers_is_bit_identical(
    raw_config, write_checkpoint, ours, tmp_path, model_type, tied, max_shard_bytes
):
    write_checkpoint(tmp_path / "first", raw_config(model_type, "yarn", "old", tied))
    model = ours(tmp_path / "first")
    save_checkpoint(model, tmp_path / "ours", max_shard_bytes=max_shard_bytes)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", dtype="auto")
    assert_same_bits(weights(model), weights(theirs))
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size=max_shard_bytes)
    assert_same_bits(weights(model), weights(ours(tmp_path / "theirs")))
    assert read_config(tmp_path / "theirs") == read_config(tmp_path / "first") == model.config


def test_files_stay_below_the_limit_and_the_index_names_each_tensor_s_file(first, ours, tmp_path):
    save_checkpoint(ours(first), tmp_path / "saved", max_shard_bytes=300_000)
    index = json.loads((tmp_path / "saved/model.safetensors.index.json").read_text())
    files = {path.name: load_file(path) for path in sorted((tmp_path / "saved").glob("*.safetensors"))}
    assert list(files) == [f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))]
    assert index["weight_map"] == {name: file for file, tensors in files.items() for name in tensors}
    sizes = [sum(tensor.nbytes for tensor in tensors.values()) for tensors in files.values()]
    assert max(sizes) <= 300_000 and index["metadata"]["total_size"] == sum(sizes)


def test_dtype_on_load_and_on_save(raw_config, write_checkpoint, ours, tmp_path):
    theirs = write_checkpoint(tmp_path / "first", raw_config(torch_dtype="float32"))
    assert all(parameter.dtype == torch.float64 for parameter in ours(tmp_path / "first", torch.float64).parameters())
    save_checkpoint(ours(tmp_path / "first"), tmp_path / "half", dtype=torch.bfloat16)
    written = json.loads((tmp_path / "half/config.json").read_text())
    assert written["dtype"] == "bfloat16" and "torch_dtype" not in written  # the older name would contradict it
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "half", dtype="auto")
    assert_same_bits(weights(theirs.bfloat16()), weights(opened))


def test_tokenizer_and_generation_config_come_along(raw_config, tokenizer, ours, tmp_path):
    create_checkpoint(raw_config("qwen3"), tmp_path / "new", tokenizer=tokenizer, seed=0)
    (tmp_path / "new" / "notes.txt").write_text("not part of a checkpoint")
    save_checkpoint(ours(tmp_path / "new"), tmp_path / "saved", source=tmp_path / "new")
    assert AutoTokenizer.from_pretrained(tmp_path / "saved").encode("w5 w300 w7") == [5, 300, 7]
    assert GenerationConfig.from_pretrained(tmp_path / "saved").eos_token_id == 1
    assert not (tmp_path / "saved" / "notes.txt").exists()


def test_a_new_checkpoint_is_decided_by_its_seed(raw_config, tokenizer, tmp_path):
    for name, seed in (("a", 7), ("b", 7), ("c", 8)):
        create_checkpoint(raw_config("llama"), tmp_path / name, tokenizer=tokenizer, seed=seed)
    assert digest(tmp_path / "a") == digest(tmp_path / "b") != digest(tmp_path / "c")
    AutoModelForCausalLM.from_pretrained(tmp_path / "a")


def test_a_checkpoint_has_its_name_when_all_its_files_and_their_names_are_on_the_disk(
    first, ours, tmp_path, monkeypatch
):
    flushed: list[str] = []
    monkeypatch.setattr("dccot.model.weights.flush_to_disk", lambda path: flushed.append(path.name))
    save_checkpoint(ours(first), tmp_path / "saved")
    files = {path.name for path in (tmp_path / "saved").iterdir()}
    assert set(flushed[:-2]) == files and flushed[-2:] == [".saved.partial", tmp_path.name]


def test_a_tokenizer_that_transformers_would_replace_is_refused(raw_config, tokenizer, tmp_path):
    with pytest.raises(ValueError, match="Qwen2Tokenizer, which splits text differently"):
        create_checkpoint(raw_config("qwen2"), tmp_path / "new", tokenizer=tokenizer, seed=0)
    assert not (tmp_path / "new").exists()


def test_every_tensor_that_does_not_fit_is_listed_and_nothing_is_overwritten(first, ours):
    model = ours(first)
    before = {name: tensor.clone() for name, tensor in weights(model).items()}
    tensors = {name: tensor + 1 for name, tensor in load_file(first / "model.safetensors").items()}
    del tensors["model.layers.1.mlp.up_proj.weight"], tensors["model.norm.weight"]
    tensors["model.layers.2.mlp.up_proj.weight"] = torch.zeros(2)
    tensors["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(191)
    tensors["model.layers.0.self_attn.k_proj.bias"] = torch.zeros(96, dtype=torch.int8)
    save_file(tensors, first / "model.safetensors")
    with pytest.raises(BadData) as error:
        load_weights(model, first)
    for line in (
        "missing: model.layers.1.mlp.up_proj.weight",
        "missing: model.norm.weight",
        "unexpected: model.layers.2.mlp.up_proj.weight",
        "model.layers.0.self_attn.q_proj.bias has shape (191,), the model needs (192,)",
        "model.layers.0.self_attn.k_proj.bias is I8",
    ):
        assert line in str(error.value)
    assert_same_bits(before, weights(model))


def test_a_tied_head_may_be_stored_but_must_equal_the_embedding(raw_config, write_checkpoint, ours, tmp_path):
    write_checkpoint(tmp_path, raw_config("llama", tied=True))
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(16)  # old llama files carry it
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, tmp_path / "model.safetensors")
    ours(tmp_path)
    tensors["lm_head.weight"][0, 0] += 1
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"unexpected: lm_head.weight"):
        ours(tmp_path)


def test_absent_files_are_named(first, ours, tmp_path):
    save_checkpoint(ours(first), tmp_path / "saved", max_shard_bytes=200_000)
    victim = sorted((tmp_path / "saved").glob("*.safetensors"))[1]
    victim.unlink()
    with pytest.raises(FileNotFoundError, match=victim.name):
        ours(tmp_path / "saved")
    (first / "model.safetensors").rename(first / "pytorch_model.bin")
    with pytest.raises(FileNotFoundError, match=r"model\.safetensors"):
        ours(first)


@pytest.mark.parametrize(
    "file, content, said",
    [
        (INDEX_FILE, "[1]", "does not say which file"),
        (INDEX_FILE, "{}", "does not say which file"),
        (INDEX_FILE, '{"weight_map": 1}', "does not say which file"),
        (INDEX_FILE, '{"weight_map": {"a": ["b"]}}', "holds no"),
        (INDEX_FILE, "{", "does not say which file"),
        (INDEX_FILE, '{"weight_map": {"a": "../secret.safetensors"}}', r"names '\.\./secret\.safetensors'"),
        ("model.safetensors", "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n", "git-LFS pointer"),
    ],
)
def test_an_index_or_a_file_that_is_none_is_refused(tmp_path, file, content, said):
    (tmp_path / file).write_text(content)
    with pytest.raises((BadData, FileNotFoundError), match=said), open_tensors(tmp_path):
        pass


def test_weights_cut_short_cost_a_command_one_line(first, capsys):
    weights = first / "model.safetensors"
    for size in (weights.stat().st_size - 1, 100, 0):
        weights.write_bytes(weights.read_bytes()[:size])
        assert main(["check", str(first), "--no-weights"]) == 2
        [said] = capsys.readouterr().err.splitlines()
        assert said.startswith("dccot: ") and said.endswith("fetch it again")
        assert "model.safetensors is damaged or cut short" in said


SAVE_AND_DIE = """
import os, signal, sys
from dccot.model import weights as checkpoint_io
from dccot.model.transformer import Transformer

folder = sys.argv[1]
model = Transformer(checkpoint_io.parse_config(checkpoint_io.json.load(open(folder + "/config.json"))))
model.init_weights(99)
write, files = checkpoint_io.save_file, []

def write_and_die(tensors, path, **rest):
    write(tensors, path, **rest)
    files.append(path)
    if len(files) == 2:
        os.kill(os.getpid(), signal.SIGKILL)

checkpoint_io.save_file = write_and_die
checkpoint_io.save_checkpoint(model, folder, max_shard_bytes=200_000)
"""


@pytest.mark.slow
def test_a_save_that_is_killed_leaves_the_old_checkpoint_whole_and_the_next_one_succeeds(first, ours, tmp_path):
    folder, before = first, digest(first)
    died = programs.run([sys.executable, "-c", SAVE_AND_DIE, str(folder)])
    assert died.returncode == -signal.SIGKILL
    assert digest(folder) == before
    model = ours(folder)
    model.init_weights(5)
    save_checkpoint(model, folder)
    assert_same_bits(weights(model), weights(ours(folder)))
    assert list(tmp_path.iterdir()) == [folder]


def test_a_save_that_fails_leaves_the_old_checkpoint_whole(first, ours, tmp_path):
    before = digest(first)
    with pytest.raises(OSError):
        save_checkpoint(ours(first), first, source={"nowhere/tokenizer.json": b"{}"})  # a file whose writing fails
    assert digest(first) == before and list(tmp_path.iterdir()) == [first]


def test_a_link_out_of_a_model_folder_is_refused_and_a_hubs_cache_is_not(tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("key")
    model = tmp_path / "model"
    model.mkdir()
    (model / "tokenizer.json").symlink_to(secret)
    with pytest.raises(ValueError, match=r"tokenizer.json is a link to .*secret, outside its model's folder"):
        read_companions(model)
    hub = tmp_path / "models--a--b"
    for folder in (hub / "blobs", hub / "snapshots" / "0123"):
        folder.mkdir(parents=True)
    (hub / "blobs" / "ab").write_text("{}")
    (hub / "snapshots" / "0123" / "tokenizer.json").symlink_to("../../blobs/ab")
    assert read_companions(hub / "snapshots" / "0123") == {"tokenizer.json": b"{}"}


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_a_weight_that_is_not_finite_is_refused_by_name(first, ours, value):
    tensors = load_file(first / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][5, 7] = value
    save_file(tensors, first / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(BadData, match=r"model\.layers\.1\.mlp\.up_proj\.weight holds values that are not finite"):
        ours(first)
