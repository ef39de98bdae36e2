"""The miniature world on disk, and the start of its model."""

import re

import torch

from dccot.files import read_jsonl
from dccot.kernels.rowwise import rotate
from dccot.miniature.world import TinyModel, WorldConfig, make_world
from dccot.model.checkpoint_io import load_weights
from dccot.model.config import read_config
from dccot.model.rotary import cos_sin
from dccot.model.transformer import Transformer


def test_the_same_configuration_gives_the_same_bytes_and_another_seed_others(tmp_path):
    tiny = TinyModel(64, 128, 1, 2)
    for name, seed in (("one", 0), ("two", 0), ("three", 1)):
        make_world(WorldConfig(seed, base_examples=30, train=20, validation=5, test=5, larger=5, model=tiny), tmp_path / name)
    files = [sorted(p.relative_to(tmp_path / n) for p in (tmp_path / n).rglob("*") if p.is_file()) for n in ("one", "two", "three")]
    assert files[0] == files[1] == files[2]
    changed = [f.name for f in files[0] if (tmp_path / "one" / f).read_bytes() != (tmp_path / "three" / f).read_bytes()]
    assert all((tmp_path / "one" / f).read_bytes() == (tmp_path / "two" / f).read_bytes() for f in files[0])
    assert {"base.jsonl", "train.jsonl", "test.jsonl", "model.safetensors"} <= set(changed) and "tokenizer.json" not in changed
    assert len(list(read_jsonl(tmp_path / "one" / "base.jsonl"))) == 30


def test_a_fifth_of_the_demonstrations_list_the_digits_of_a_question_and_no_more(tmp_path):
    make_world(WorldConfig(base_examples=500, train=1, validation=1, test=1, larger=1, model=TinyModel(64, 128, 1, 2)), tmp_path)
    rows = [row for _, row in read_jsonl(tmp_path / "base.jsonl")]
    drills = [row for row in rows if "boxed" not in row["completion"]]
    assert 70 <= len(drills) <= 130
    for row in drills:
        asked, listed = (re.findall(r"([a-zA-Z]): (\d)", row[key]) for key in ("question", "completion"))
        assert sorted(asked) == sorted(listed) and len(asked) >= 3
    assert sum(re.findall(r"\w: \d", row["question"]) == re.findall(r"\w: \d", row["completion"]) for row in drills) < 20


def test_one_head_starts_by_looking_one_token_back(tmp_path):
    make_world(WorldConfig(base_examples=1, train=1, validation=1, test=1, larger=1), tmp_path)
    model = Transformer(read_config(tmp_path / "init"))
    load_weights(model, tmp_path / "init")
    tokens = torch.randint(200, (100,), generator=torch.Generator().manual_seed(0))
    turn = cos_sin(torch.arange(100), model.config.rope, model.config.head_dim)
    with torch.no_grad():
        first, hidden = model.model.layers[0], (100, 100)
        x, attention = first.input_layernorm(model.model.embed_tokens(tokens)), first.self_attn
        q, k = (rotate(p(x).unflatten(-1, (-1, 32)), *turn).transpose(0, 1) for p in (attention.q_proj, attention.k_proj))
        weights = (q @ k.transpose(1, 2) / 32**0.5).masked_fill(torch.ones(hidden).triu(1).bool(), float("-inf")).softmax(-1)
    assert weights[0].diagonal(-1).mean() > 0.8 and weights[1:].diagonal(-1, 1, 2).mean() < 0.2
