"""Adapters against peft on the same weights, their files, and what sharding, precision and merging make of them."""

import json
import shutil

import peft
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from dccot.core.files import BadData, checksum
from dccot.core.run import Run
from dccot.kernels.tree_attention import TreeMask
from dccot.model.folder import model_checksums, resolve_model
from dccot.model.lora import Base, LoraConfig, adapters_off, add_adapters, init_adapters, trained, write_adapters
from dccot.model.weights import full_parameters
from dccot.train.update import OptimizerConfig, make_optimizer

LORA = LoraConfig(rank=4, alpha=10.0, targets=["q_proj", "o_proj", "gate_proj", "down_proj"])
TOKENS, MASK = torch.arange(2, 62), TreeMask.causal([60])


@pytest.fixture(params=["qwen2", "qwen3", "llama"])
def pair(request, raw_config, write_checkpoint, ours, tmp_path):
    """Our model with adapters in fp64, neither A nor B zero, and peft's of the same folder."""
    folder = tmp_path / "base"
    write_checkpoint(folder, raw_config(request.param))
    model = ours(folder, torch.float64)
    add_adapters(model, LORA, torch.float64)
    init_adapters(model, seed=1)
    with torch.no_grad():
        for _, parameter in trained(model):
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(7)))
    hf = tmp_path / "hf"
    hf.mkdir()
    write_adapters(trained(model), Base(str(folder), {}, LORA), hf)
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    for module in base.modules():  # Transformers rounds norms and angles to fp32
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = torch.nn.RMSNorm.forward.__get__(module)
            module.normalized_shape, module.eps = module.weight.shape, module.variance_epsilon
    return model, peft.PeftModel.from_pretrained(base, hf, is_trainable=True).double(), hf


def logits(model) -> torch.Tensor:
    return model(TOKENS, MASK.position, MASK)


def test_peft_reads_our_files_and_computes_the_same_outputs_and_gradients(pair):
    model, theirs, _ = pair
    expected = theirs(TOKENS[None]).logits[0]
    torch.testing.assert_close(logits(model), expected, rtol=0, atol=1e-6)
    rows = torch.arange(59)
    expected.log_softmax(-1)[rows, TOKENS[1:]].sum().backward()
    model(TOKENS, MASK.position, MASK, rows, TOKENS[1:])[0].sum().backward()
    gradients = {name: p.grad for name, p in theirs.named_parameters() if p.requires_grad}
    for name, parameter in trained(model):
        them = gradients["base_model.model." + name.replace("_A.", "_A.default.").replace("_B.", "_B.default.")]
        torch.testing.assert_close(parameter.grad, them, rtol=1e-6, atol=1e-6 * float(them.abs().max()))
    assert len(gradients) == len(list(trained(model)))


def test_merged_weights_are_those_that_peft_merges(pair):
    model, theirs, _ = pair
    merged = dict(theirs.merge_and_unload().named_parameters())
    found = dict(full_parameters(model))
    assert found.keys() == merged.keys()
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, merged[name].detach(), rtol=0, atol=1e-12)


def test_with_adapters_off_it_is_the_model_that_training_started_from(pair, ours):
    model, _, hf = pair
    start = logits(ours(hf.parent / "base", torch.float64))
    assert not torch.equal(logits(model), start)
    with adapters_off(model):
        assert torch.equal(logits(model), start)
    assert not torch.equal(logits(model), start)


def test_new_adapters_change_nothing_and_start_as_pefts_do(raw_config, write_checkpoint, ours, tmp_path):
    """A is uniform in ±1/√in: its variance is 1/(3 in)."""
    write_checkpoint(tmp_path, raw_config())
    model, plain = ours(tmp_path), ours(tmp_path)
    add_adapters(model, LoraConfig(rank=64), torch.float32)
    init_adapters(model, seed=3)
    assert torch.equal(logits(model), logits(plain))
    a = model.model.layers[0].self_attn.q_proj.lora_A.weight
    assert float(a.detach().abs().max()) <= 192**-0.5
    assert float(a.detach().var()) == pytest.approx(1 / (3 * 192), rel=0.05)


def test_only_adapters_have_gradients_and_optimizer_state(pair):
    model, _, hf = pair
    rows = torch.arange(59)
    model(TOKENS, MASK.position, MASK, rows, TOKENS[1:])[0].sum().backward()
    held = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert held == {name.removeprefix("base_model.model.") for name in load_file(hf / "adapter_model.safetensors")}
    optimizer = make_optimizer(model, OptimizerConfig())
    assert sum(map(len, (group["params"] for group in optimizer.param_groups))) == len(held)


@pytest.fixture
def run(pair, tmp_path):
    """A run whose only checkpoint holds the pair's adapters, next to the run that they were trained on."""
    model, _, hf = pair
    runs = tmp_path / "runs"
    for name, step in (("sft", 4), ("lora", 7)):
        folder = runs / name / "checkpoints" / f"step_{step:06d}"
        source = hf.parent / "base" if name == "sft" else hf
        shutil.copytree(source, folder / "hf")
        shutil.copy(hf.parent / "base" / "config.json", folder / "hf")
        if name == "lora":
            start = resolve_model(runs / "sft")
            write_adapters(trained(model), Base(str(start), model_checksums(start), LORA), folder / "hf")
        made = Run(runs / name).checkpoint_folder(step)
        made.write_manifest()
        made.run.latest.write_text(made.folder.name + "\n")
    return runs / "lora"


def test_a_run_of_adapters_is_a_plain_model_for_everybody(run, pair, ours):
    folder = resolve_model(run)
    assert folder == run / "checkpoints/step_000007/merged"
    torch.testing.assert_close(logits(ours(folder, torch.float64)), logits(pair[0]), rtol=0, atol=1e-4)  # fp32 on disk
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    torch.testing.assert_close(theirs(TOKENS[None]).logits[0], logits(pair[0]), rtol=0, atol=1e-4)


def test_adapters_that_were_copied_out_of_their_run_are_merged_next_to_them(run, tmp_path):
    shutil.copytree(run / "checkpoints/step_000007/hf", tmp_path / "mine")
    assert resolve_model(tmp_path / "mine") == tmp_path / "mine-merged"


def test_peft_opens_a_checkpoint_together_with_its_base(run, pair):
    theirs = peft.AutoPeftModelForCausalLM.from_pretrained(run / "checkpoints/step_000007/hf", dtype=torch.float64)
    torch.testing.assert_close(theirs(TOKENS[None]).logits[0], logits(pair[0]), rtol=0, atol=1e-4)


def test_a_merged_model_that_was_damaged_is_merged_again(run):
    weights = resolve_model(run) / "model.safetensors"
    expected, content = checksum(weights), bytearray(weights.read_bytes())
    content[-5] ^= 1
    weights.write_bytes(content)
    assert checksum(resolve_model(run) / "model.safetensors") == expected


def test_adapters_move_together_with_the_run_they_were_trained_on(run, tmp_path):
    moved = tmp_path / "elsewhere"
    shutil.move(run.parent, moved)
    assert resolve_model(moved / "lora").is_dir()


def test_adapters_are_never_merged_with_another_model(run):
    base = run.parent / "sft/checkpoints/step_000004"
    raw = json.loads((base / "hf/config.json").read_text())
    (base / "hf/config.json").write_text(json.dumps(raw | {"rms_norm_eps": 1e-5}))
    Run(run.parent / "sft").checkpoint_folder(4).write_manifest()
    with pytest.raises(BadData, match=r"holds adapters of .*sft.*, which has changed since: restore that model"):
        resolve_model(run)
    shutil.rmtree(run.parent / "sft")
    with pytest.raises(FileNotFoundError, match=r"holds adapters of .*sft.*, which is gone"):
        resolve_model(run)
