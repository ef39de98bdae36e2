"""What the model writes opens in vLLM, and vLLM decodes what the model would."""

import json
import sys
from pathlib import Path

import pytest
import torch

from dccot.kernels.tree_attention import TreeMask
from dccot.model.transformer import Transformer
from dccot.model.weights import create_checkpoint, save_checkpoint
from tests.support import programs

pytestmark = pytest.mark.slow

PROGRAM = Path(__file__).with_name("vllm_program.py")
PROMPTS = [[5, 6, 7, 8], [100, 17, 250], [2] * 40]
KINDS = {"qwen3": ("default", True), "llama": ("llama3", False), "qwen2": ("yarn", False)}


def greedy(model: Transformer, prompt: list[int], tokens: int = 64) -> list[int]:
    ids = torch.tensor(prompt)
    with torch.no_grad():
        for _ in range(tokens):
            logits = model(ids, torch.arange(len(ids)), TreeMask.causal([len(ids)]))
            ids = torch.cat([ids, logits[-1:].argmax(-1)])
    return ids[len(prompt) :].tolist()


@pytest.mark.parametrize("kinds", [["qwen3"], pytest.param(["llama", "qwen2"], marks=pytest.mark.thorough)])
def test_vllm_decodes_the_same_64_ids_as_our_model(raw_config, write_checkpoint, ours, tokenizer, tmp_path, kinds):
    """Of checkpoints that we saved, tokenizer and generation config included, as vLLM wants them."""
    create_checkpoint(raw_config("qwen3"), tmp_path / "source", tokenizer=tokenizer, seed=0)
    expected = {}
    for kind in kinds:
        rope, tied = KINDS[kind]
        write_checkpoint(tmp_path / kind, raw_config(kind, rope, tied=tied))
        model, saved = ours(tmp_path / kind), tmp_path / f"{kind}_saved"
        save_checkpoint(model, saved, source=tmp_path / "source", max_shard_bytes=300_000)
        expected[str(saved)] = [greedy(model, prompt) for prompt in PROMPTS]
        assert len({token for ids in expected[str(saved)] for token in ids}) > 20  # not one token over and over
    done = programs.finish([sys.executable, PROGRAM, json.dumps(PROMPTS), *expected])
    assert json.loads(done.stdout.splitlines()[-1]) == expected
