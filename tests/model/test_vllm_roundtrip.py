"""What the model writes opens in vLLM, and vLLM decodes what the model would."""

import json
import sys
from pathlib import Path

import pytest
import torch

from dccot.kernels.tree_attention import TreeMask
from dccot.model.config import read_config
from dccot.model.transformer import Transformer
from dccot.model.weights import create_checkpoint, load_weights, save_checkpoint
from tests.support import programs

pytestmark = pytest.mark.slow

PROGRAM = Path(__file__).with_name("vllm_program.py")
PROMPTS = [[5, 6, 7, 8], [100, 17, 250], [2] * 40]
KINDS = {
    "qwen3": ("qwen3", "default", True),
    "llama": ("llama", "llama3", False),
    "qwen2": ("qwen2", "yarn", False),
}


def greedy(model: Transformer, prompt: list[int], tokens: int = 64) -> list[int]:
    ids = torch.tensor(prompt)
    with torch.no_grad():
        for _ in range(tokens):
            logits = model(ids, torch.arange(len(ids)), TreeMask.causal([len(ids)]))
            ids = torch.cat([ids, logits[-1:].argmax(-1)])
    return ids[len(prompt) :].tolist()


@pytest.fixture(scope="module")
def folders(raw_config, write_checkpoint, tokenizer, tmp_path_factory) -> dict[str, Path]:
    """Each kind, saved by us; tokenizer and generation config included, as vLLM wants them."""
    home, saved = tmp_path_factory.mktemp("vllm"), {}
    create_checkpoint(raw_config("qwen3"), home / "source", tokenizer=tokenizer, seed=0)
    for name, (model_type, rope, tied) in KINDS.items():
        write_checkpoint(home / "first" / name, raw_config(model_type, rope, tied=tied))
        model = Transformer(read_config(home / "first" / name))
        load_weights(model, home / "first" / name)
        saved[name] = home / "saved" / name
        save_checkpoint(model, saved[name], source=home / "source", max_shard_bytes=300_000)
    return saved


@pytest.fixture(scope="module")
def decoded(folders) -> dict[str, list[list[int]]]:
    command = [sys.executable, str(PROGRAM), json.dumps(PROMPTS), *map(str, folders.values())]
    done = programs.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("kind", KINDS)
def test_vllm_decodes_the_same_64_ids_as_our_model(folders, decoded, kind):
    model = Transformer(read_config(folders[kind]))
    load_weights(model, folders[kind])
    expected = [greedy(model, prompt) for prompt in PROMPTS]
    assert len({token for ids in expected for token in ids}) > 20  # not one token over and over
    assert decoded[str(folders[kind])] == expected
