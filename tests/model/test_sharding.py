"""Sharded over ranks, the model is the same model: FSDP2 over gloo in real processes, against one plain process."""

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dccot.kernels.tree_attention import TreeMask
from dccot.model.config import read_config
from dccot.model.sharding import ShardingConfig, build_model
from dccot.model.transformer import Transformer
from dccot.model.weights import save_checkpoint
from tests.support import programs

pytestmark = pytest.mark.slow

PROGRAM = Path(__file__).with_name("sharded_program.py")


@pytest.fixture(scope="module", autouse=True)
def no_process_group():
    """An engine that other tests started in this process has a process group of its own; here there must be none."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.distributed, "is_initialized", lambda: False)
        yield


@pytest.fixture(scope="module")
def checkpoint(no_process_group, raw_config, write_checkpoint, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("sharding") / "checkpoint"
    write_checkpoint(folder, raw_config("qwen3", tied=True))  # tied: one weight is both embedding and head
    return folder


def launch(checkpoint: Path, ranks: int, **environment: str) -> Path:
    out = checkpoint.with_name(f"{ranks}_ranks")
    out.mkdir()
    programs.finish(programs.torchrun(ranks, PROGRAM, checkpoint, out), env=os.environ | environment)
    return out


@pytest.fixture(scope="module")
def two_ranks(checkpoint) -> Path:
    return launch(checkpoint, 2)


@pytest.fixture(scope="module")
def plain(checkpoint) -> dict[str, torch.Tensor]:
    """The same as the program computes, by a model that is not sharded."""
    model = build_model(checkpoint, ShardingConfig(compute_dtype="float32", activation_checkpointing=False))
    tokens, mask, rows = torch.arange(2, 122), TreeMask.causal([70, 50]), torch.arange(0, 69)
    logits = model(tokens, mask.position, mask)
    logprob = (logits[rows] / 0.6).log_softmax(-1)[rows, tokens[rows + 1]]
    logprob.mean().backward()
    gradients = {f"gradient/{name}": p.grad for name, p in model.named_parameters()}
    parameters = {f"parameter/{name}": p.detach() for name, p in model.named_parameters()}
    return {"logits": logits.detach()} | gradients | parameters


def assert_same_model(found: dict[str, torch.Tensor], plain: dict[str, torch.Tensor], rounding: float = 2e-6) -> None:
    assert found.keys() == plain.keys()
    for name, expected in plain.items():
        if name.startswith("parameter/"):
            assert torch.equal(found[name], expected), name
        else:
            bound = rounding * float(expected.abs().max())
            torch.testing.assert_close(found[name], expected, rtol=0, atol=bound, msg=name)


@pytest.mark.parametrize("case", ["fsdp", "hsdp", "whole"])
def test_two_ranks_compute_what_one_process_computes(two_ranks, plain, case):
    assert_same_model(load_file(two_ranks / f"{case}.safetensors"), plain)


@pytest.mark.thorough
def test_one_rank_compiled_or_not_computes_what_no_process_group_computes(checkpoint, plain, tmp_path):
    # a compiler cache of its own: the shared one does not notice when a custom operator changes
    cache = {"TORCHINDUCTOR_COMPILE_THREADS": "1", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    one_rank = launch(checkpoint, 1, **cache)
    for case, rounding in {"fsdp": 2e-6, "whole": 2e-6, "compiled": 1e-5}.items():  # the compiler sums in its own order
        assert_same_model(load_file(one_rank / f"{case}.safetensors"), plain, rounding)


def test_bf16_compute_keeps_fp32_masters_and_gradients(two_ranks, plain, checkpoint):
    found = load_file(two_ranks / "bf16, kept gathered.safetensors")
    tokens, mask = torch.arange(2, 122), TreeMask.causal([70, 50])
    rounded = build_model(checkpoint, ShardingConfig(compute_dtype="float32")).bfloat16()
    with torch.no_grad():
        expected = rounded(tokens, mask.position, mask)
    assert found["logits"].dtype == torch.bfloat16
    torch.testing.assert_close(found["logits"], expected, rtol=0.02, atol=0.02)
    for name, tensor in plain.items():
        if name.startswith("parameter/"):
            assert torch.equal(found[name], tensor), name  # not rounded to bf16
        elif name.startswith("gradient/"):
            assert found[name].dtype == torch.float32
            assert not torch.equal(found[name], found[name].bfloat16().float()), f"{name} was reduced in bf16"
            cosine = torch.nn.functional.cosine_similarity(found[name].flatten(), tensor.flatten(), dim=0)
            assert cosine > 0.99, name


def test_weights_load_straight_into_shards(two_ranks, checkpoint):
    """While two ranks build the model, no tensor larger than half of the largest parameter ever has memory."""
    with torch.device("meta"):
        sizes = [p.shape for p in Transformer(read_config(checkpoint)).parameters()]
    largest_shard = max(-(-shape[0] // 2) * shape[1:].numel() for shape in sizes)
    total = sum(shape.numel() for shape in sizes)
    facts = json.loads((two_ranks / "facts.json").read_text())
    assert facts["fsdp"]["largest"] == largest_shard
    assert total / 2 <= facts["fsdp"]["held"] < 0.52 * total
    assert facts["hsdp"]["held"] == facts["whole"]["held"] == total  # two copies over two ranks


def test_weights_for_an_engine_are_cast_before_they_are_gathered(two_ranks, plain):
    facts, half = json.loads((two_ranks / "facts.json").read_text()), load_file(two_ranks / "half.safetensors")
    assert facts["gathered for an engine in bfloat16"] == ["torch.bfloat16"]
    assert half and all(torch.equal(tensor, plain[f"parameter/{name}"].bfloat16()) for name, tensor in half.items())


def test_two_ranks_save_the_same_bytes_as_one_process(two_ranks, checkpoint, tmp_path):
    model = build_model(checkpoint, ShardingConfig(compute_dtype="float32"))
    save_checkpoint(model, tmp_path / "saved", source=checkpoint, max_shard_bytes=300_000)
    first, second = ({p.name: p.read_bytes() for p in (out / "saved").iterdir()} for out in (tmp_path, two_ranks))
    assert first == second and len(first) > 3


def test_initial_weights_do_not_depend_on_the_sharding(two_ranks, checkpoint):
    model = Transformer(read_config(checkpoint))
    model.init_weights(4)
    random = load_file(two_ranks / "random.safetensors")
    assert all(torch.equal(random[name], parameter) for name, parameter in model.named_parameters())


def test_mixed_precision_without_a_process_group_is_refused(checkpoint):
    with pytest.raises(ValueError, match="compute_dtype bfloat16 over master_dtype float32"):
        build_model(checkpoint, ShardingConfig())


def test_unknown_dtype_is_refused(checkpoint):
    with pytest.raises(ValueError, match="compute_dtype is 'bf16'"):
        build_model(checkpoint, ShardingConfig(compute_dtype="bf16"))


def test_a_word_of_the_configuration_chooses_the_attention_backend(checkpoint):
    with pytest.raises(ValueError, match=r"sharding\.attention is 'fast'; it must be one of triton, .* or null"):
        ShardingConfig(attention="fast").check()
    tokens, mask = torch.arange(9), TreeMask(torch.tensor([9, 9, 5, 5, 5, 9, 9, 9, 9]))
    logits = []
    for backend in (None, "flash", "dense"):
        model = build_model(checkpoint, ShardingConfig(compute_dtype="float32", attention=backend))
        assert all(layer.self_attn.backend == backend for layer in model.model.layers)
        with torch.no_grad():
            logits.append(model(tokens, mask.position, mask))
    assert max((other - logits[0]).abs().max() for other in logits[1:]) < 1e-4


def test_without_a_compiler_a_cpu_runs_uncompiled_and_says_so(checkpoint, monkeypatch, caplog, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    wanted = ShardingConfig(compute_dtype="float32", compile=True)
    mask = TreeMask.causal([5])
    logits = build_model(checkpoint, wanted, device="cpu")(torch.arange(5), mask.position, mask)
    assert "neither g++ nor clang++ was found" in caplog.text
    plain = build_model(checkpoint, ShardingConfig(compute_dtype="float32"), device="cpu")
    assert torch.equal(logits, plain(torch.arange(5), mask.position, mask))
