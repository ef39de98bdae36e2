"""An engine looks at a model's weights before it starts vLLM: what cannot be loaded costs one line, not minutes and a
trace.
"""

import shutil

import pytest

from dccot.core.files import BadData


def test_damaged_weights_are_refused_before_vllm_starts(checkpoints, build_engine, tmp_path, monkeypatch):
    from dccot.rollout import vllm_engine as engine

    monkeypatch.setattr(engine, "LLMEngine", None)
    folder = shutil.copytree(checkpoints["spelled"], tmp_path / "model")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(BadData, match=r"model\.safetensors is damaged or cut short"):
        build_engine(folder)
    weights.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n")
    with pytest.raises(BadData, match="git-LFS pointer"):
        build_engine(folder)
