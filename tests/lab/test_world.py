"""The miniature world on disk, and the start of its model."""

from pathlib import Path

import torch

from dccot.core.files import read_jsonl
from dccot.kernels.mask import TreeMask
from dccot.kernels.norm_rotate import rotate
from dccot.lab.worlds.world import TinyModel, WorldConfig, make_world
from dccot.model.config import read_config
from dccot.model.rope import cos_sin
from dccot.model.transformer import Transformer
from dccot.model.weights import load_weights

SMALL = {"base_examples": 30, "train": 20, "validation": 5, "test": 5, "larger": 5}


def test_the_same_configuration_gives_the_same_bytes_and_another_seed_others(tmp_path):
    contents = []
    for name, seed in (("one", 0), ("two", 0), ("three", 1)):
        make_world(WorldConfig(seed, **SMALL, model=TinyModel(64, 128, 1, 2)), tmp_path / name)
        files = [path for path in (tmp_path / name).rglob("*") if path.is_file()]
        contents.append({str(path.relative_to(tmp_path / name)): path.read_bytes() for path in files})
    one, two, three = contents
    assert one == two and one.keys() == three.keys()
    changed = {Path(name).name for name in one if one[name] != three[name]}
    assert {"base.jsonl", "train.jsonl", "test.jsonl", "model.safetensors"} <= changed
    assert "tokenizer.json" not in changed and one["base.jsonl"].count(b"\n") == 30


def test_only_marked_solutions_have_numbered_parts(tmp_path):
    texts = {}
    for marked in (True, False):
        make_world(WorldConfig(**SMALL, marked_parts=marked), tmp_path / str(marked))
        texts[marked] = [row["completion"] for _, row in read_jsonl(tmp_path / str(marked) / "base.jsonl")]
    assert sum("\n1) " in text for text in texts[True]) > 20 and not any(") " in text for text in texts[False])


def test_two_heads_start_by_looking_one_token_back_and_then_behind_the_same_token(tmp_path):
    make_world(WorldConfig(base_examples=1, train=1, validation=1, test=1, larger=1), tmp_path)
    model = Transformer(read_config(tmp_path / "init"))
    load_weights(model, tmp_path / "init")
    once = torch.randperm(200, generator=torch.Generator().manual_seed(0))[:50]
    turn = cos_sin(torch.arange(100), model.config.rope, model.config.head_dim)

    def weights(layer, x):
        x, attention = layer.input_layernorm(x), layer.self_attn
        heads = (p(x).unflatten(-1, (-1, 32)) for p in (attention.q_proj, attention.k_proj))
        q, k = (rotate(each, *turn).transpose(0, 1) for each in heads)
        scores = q @ k.transpose(1, 2) / 32**0.5
        return scores.masked_fill(torch.ones(100, 100).triu(1).bool(), float("-inf")).softmax(-1)

    with torch.no_grad():
        x, (first, second) = model.model.embed_tokens(torch.cat([once, once])), model.model.layers
        before, again = weights(first, x), weights(second, first(x, *turn, TreeMask.causal([100])))
    assert before[0].diagonal(-1).mean() > 0.8 and before[1:].diagonal(-1, 1, 2).mean() < 0.2
    behind = again.diagonal(-49, 1, 2)[:, 1:].mean(1)  # by chance 1/75
    assert behind[0] > 3 / 75 and behind[1:].max() < 2 / 75
