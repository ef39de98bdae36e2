"""The miniature world on disk, and the start of its model."""

import torch

from dccot.core.files import read_jsonl
from dccot.kernels.mask import TreeMask
from dccot.kernels.norm_rotate import rotate
from dccot.lab.worlds.world import TinyModel, WorldConfig, make_world
from dccot.model.config import read_config
from dccot.model.rope import cos_sin
from dccot.model.transformer import Transformer
from dccot.model.weights import load_weights


def test_the_same_configuration_gives_the_same_bytes_and_another_seed_others(tmp_path):
    tiny = TinyModel(64, 128, 1, 2)
    for name, seed in (("one", 0), ("two", 0), ("three", 1)):
        make_world(
            WorldConfig(seed, base_examples=30, train=20, validation=5, test=5, larger=5, model=tiny), tmp_path / name
        )
    files = [
        sorted(p.relative_to(tmp_path / n) for p in (tmp_path / n).rglob("*") if p.is_file())
        for n in ("one", "two", "three")
    ]
    assert files[0] == files[1] == files[2]
    changed = [f.name for f in files[0] if (tmp_path / "one" / f).read_bytes() != (tmp_path / "three" / f).read_bytes()]
    assert all((tmp_path / "one" / f).read_bytes() == (tmp_path / "two" / f).read_bytes() for f in files[0])
    assert {"base.jsonl", "train.jsonl", "test.jsonl", "model.safetensors"} <= set(
        changed
    ) and "tokenizer.json" not in changed
    assert len(list(read_jsonl(tmp_path / "one" / "base.jsonl"))) == 30


def test_only_marked_solutions_have_numbered_parts(tmp_path):
    for marked in (True, False):
        make_world(
            WorldConfig(base_examples=30, train=1, validation=1, test=1, larger=1, marked_parts=marked),
            tmp_path / str(marked),
        )
    marked, unmarked = (
        [row["completion"] for _, row in read_jsonl(tmp_path / str(kind) / "base.jsonl")] for kind in (True, False)
    )
    assert sum("\n1) " in text for text in marked) > 20 and not any(") " in text for text in unmarked)


def test_two_heads_start_by_looking_one_token_back_and_then_behind_the_same_token(tmp_path):
    make_world(WorldConfig(base_examples=1, train=1, validation=1, test=1, larger=1), tmp_path)
    model = Transformer(read_config(tmp_path / "init"))
    load_weights(model, tmp_path / "init")
    once = torch.randperm(200, generator=torch.Generator().manual_seed(0))[:50]
    turn = cos_sin(torch.arange(100), model.config.rope, model.config.head_dim)

    def weights(layer, x):
        x, attention = layer.input_layernorm(x), layer.self_attn
        q, k = (
            rotate(p(x).unflatten(-1, (-1, 32)), *turn).transpose(0, 1) for p in (attention.q_proj, attention.k_proj)
        )
        return (
            (q @ k.transpose(1, 2) / 32**0.5)
            .masked_fill(torch.ones(100, 100).triu(1).bool(), float("-inf"))
            .softmax(-1)
        )

    with torch.no_grad():
        x, (first, second) = model.model.embed_tokens(torch.cat([once, once])), model.model.layers
        before, again = weights(first, x), weights(second, first(x, *turn, TreeMask.causal([100])))
    assert before[0].diagonal(-1).mean() > 0.8 and before[1:].diagonal(-1, 1, 2).mean() < 0.2
    behind = again.diagonal(-49, 1, 2)[:, 1:].mean(1)  # by chance 1/75
    assert behind[0] > 3 / 75 and behind[1:].max() < 2 / 75
