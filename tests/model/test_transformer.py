"""The decoder against transformers: same weights, same tokens, same numbers."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from dccot.kernels.norm_rotate import rotate
from dccot.kernels.tree_attention import TreeMask
from dccot.model.config import RopeConfig, parse_config, read_config
from dccot.model.rope import cos_sin, inverse_frequencies
from dccot.model.transformer import Transformer

VOCABULARY = 301


@pytest.mark.parametrize("groups, tied, spelling", [(1, False, "old"), (2, True, "new"), (6, False, "new")])
@pytest.mark.parametrize("rope", ["default", "linear", "llama3", "yarn"])
@pytest.mark.parametrize("model_type", ["qwen2", "qwen3", "llama"])
def test_logits_are_those_of_transformers(
    raw_config, write_checkpoint, ours, tmp_path, model_type, rope, spelling, tied, groups
):
    theirs = write_checkpoint(tmp_path, raw_config(model_type, rope, spelling, tied, groups))
    model = ours(tmp_path)
    generator = torch.Generator().manual_seed(1)
    lengths = [150, 37]
    tokens = torch.randint(0, VOCABULARY, (sum(lengths),), generator=generator)
    # the first sequence runs past the original length of 64, the second stands far beyond everything
    position = torch.cat([torch.arange(150), 31_000 + torch.arange(37)])
    with torch.no_grad():
        found = model(tokens, position, TreeMask.causal(lengths)).split(lengths)
        for logits, ids, places in zip(found, tokens.split(lengths), position.split(lengths)):
            expected = theirs(input_ids=ids[None], position_ids=places[None]).logits[0]
            assert expected.std() > 0.5  # the comparison below means something
            torch.testing.assert_close(logits, expected, rtol=0, atol=2e-5)


COMMON = [{"attention_bias": True}, {"head_dim": 64}, {"rope_theta": 3e5}, {"rms_norm_eps": 1e-3}]
YARN = [{"attention_factor": 0.7}, {"beta_fast": 16.0, "beta_slow": 2.0}, {"truncate": False}, {"factor": 8.0}]
YARN += [{"mscale": 0.9, "mscale_all_dim": 0.6}, {"original_max_position_embeddings": 5}]


@pytest.mark.parametrize(
    "model_type, rope, change",
    [(kind, "default", change) for kind in ("qwen3", "llama") for change in COMMON]
    + [("qwen3", "yarn", change) for change in YARN],
    ids=str,
)
def test_less_common_settings_agree_with_transformers(
    raw_config, write_checkpoint, ours, tmp_path, model_type, rope, change
):
    raw = raw_config(model_type, rope, "new" if rope == "yarn" else "old")
    (raw["rope_parameters"] if rope == "yarn" else raw).update(change)
    theirs = write_checkpoint(tmp_path, raw)
    tokens = torch.arange(200)
    with torch.no_grad():
        expected = theirs(input_ids=tokens[None]).logits[0]
        torch.testing.assert_close(ours(tmp_path)(tokens, tokens, TreeMask.causal([200])), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_logprob_entropy_and_gradients_are_those_of_transformers(raw_config, write_checkpoint, ours, tmp_path, tied):
    theirs = write_checkpoint(tmp_path, raw_config("qwen2", tied=tied))
    model = ours(tmp_path)
    tokens = torch.arange(3, 63)
    rows = torch.tensor([5, 9, 9, 30, 58])  # a row may predict several tokens: responses that share a prompt
    targets = torch.tensor([7, 11, 200, 0, 300])

    logprob, entropy = model(tokens, torch.arange(60), TreeMask.causal([60]), rows, targets, temperature=0.6)
    expected = (theirs(input_ids=tokens[None]).logits[0, rows] / 0.6).log_softmax(-1)
    torch.testing.assert_close(logprob, expected[torch.arange(5), targets], rtol=0, atol=1e-5)
    torch.testing.assert_close(entropy, -(expected.exp() * expected).sum(-1), rtol=0, atol=1e-5)

    logprob.sum().backward()
    expected[torch.arange(5), targets].sum().backward()
    their_gradients = dict(theirs.named_parameters())
    for name, parameter in model.named_parameters():
        reference = their_gradients[name].grad
        torch.testing.assert_close(parameter.grad, reference, rtol=0, atol=1e-5 * float(reference.abs().max()) + 1e-7)


def test_parameter_names_are_hugging_face_s(raw_config, write_checkpoint, tmp_path):
    for model_type in ("qwen2", "qwen3", "llama"):
        theirs = write_checkpoint(tmp_path / model_type, raw_config(model_type))
        names = {name: p.shape for name, p in Transformer(read_config(tmp_path / model_type)).named_parameters()}
        assert names == {name: p.shape for name, p in theirs.named_parameters()}


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3"])
def test_fp64_is_fp64_throughout(raw_config, model_type):
    """Finite differences find the gradient to six digits; one rounding to fp32 in the forward would leave none."""
    model = Transformer(parse_config(raw_config(model_type))).double()
    model.init_weights(0)
    tokens, rows, mask = torch.arange(60), torch.arange(40), TreeMask.causal([60])

    def loss():
        logprob, entropy = model(tokens, tokens, mask, rows, tokens[rows + 1], temperature=0.6)
        return logprob.sum() + entropy.sum()

    loss().backward()
    generator = torch.Generator().manual_seed(0)
    directions = [torch.randn(p.shape, generator=generator, dtype=torch.float64) for p in model.parameters()]
    expected = sum(float((p.grad * d).sum()) for p, d in zip(model.parameters(), directions))
    step, values = 1e-7, []
    with torch.no_grad():
        for sign in (1, -2):
            for p, d in zip(model.parameters(), directions):
                p.add_(sign * step * d)
            values.append(float(loss()))
    assert (values[0] - values[1]) / (2 * step) == pytest.approx(expected, rel=1e-6)


def test_rotation_of_bf16_rounds_once():
    rope = RopeConfig(theta=10_000.0)
    position = torch.arange(30_000, 30_050)
    x = torch.randn(50, 3, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    angle = position[:, None, None].double() * inverse_frequencies(rope, 64, position.device).double()
    left, right = x.double().chunk(2, dim=-1)
    exact = torch.cat([left * angle.cos() - right * angle.sin(), right * angle.cos() + left * angle.sin()], dim=-1)
    error = (rotate(x, *cos_sin(position, rope, 64)).double() - exact).abs()
    # half a unit in the last place; fp32 angles at 30,000 are good to 0.002
    assert (error <= exact.abs() * 2**-8 + 0.01).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_cos_and_sin_have_the_values_that_transformers_uses(dtype):
    """In its precision, and vLLM's; what is computed with them is fp32."""
    rope = {"rope_type": "default", "rope_theta": 10_000.0}
    config = LlamaConfig(hidden_size=128, num_attention_heads=2, rope_parameters=rope)
    position = torch.arange(30_000, 30_050)
    theirs = LlamaRotaryEmbedding(config)(torch.zeros(1, dtype=dtype), position[None])
    for ours, expected in zip(cos_sin(position, RopeConfig(theta=10_000.0), 64, dtype), theirs, strict=True):
        assert ours.dtype == torch.float32
        assert torch.equal(ours[:, 0], expected[0, :, :32].float())


def test_rotation_stays_fp32_in_a_bf16_model(raw_config, write_checkpoint, ours, tmp_path):
    """bf16 has 8 bits: at position 31,000 it cannot tell neighbours apart, and a shift would change everything."""
    write_checkpoint(tmp_path, raw_config("llama"))
    model = ours(tmp_path).bfloat16()
    tokens, here = torch.arange(50), torch.arange(50)
    with torch.no_grad():
        near, far = (model(tokens, position, TreeMask.causal([50])).float() for position in (here, 31_000 + here))
    assert (near - far).abs().max() < 0.1 < near.std()


class CountAttention(TorchDispatchMode):
    calls = 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        self.calls += op is torch.ops.dccot.tree_attention.default
        return op(*args, **(kwargs or {}))


def test_recomputation_gives_the_same_gradients_and_spares_the_attention(raw_config):
    gradients = []
    tokens = torch.arange(70)
    for recompute in (False, True):
        model = Transformer(parse_config(raw_config("qwen3")))
        model.init_weights(3)
        for block in model.model.layers:
            block.recompute = recompute
        with CountAttention() as counter:
            model(tokens, tokens, TreeMask.causal([70]), tokens[:-1], tokens[1:])[0].sum().backward()
        assert counter.calls == len(model.model.layers)
        gradients.append([p.grad for p in model.parameters()])
    assert all(torch.equal(plain, recomputed) for plain, recomputed in zip(*gradients))


def test_initial_weights_are_normal_with_unit_norms_and_no_bias(raw_config):
    model = Transformer(parse_config(raw_config("qwen2", initializer_range=0.05)))
    model.init_weights(0)
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            assert (parameter == 1).all()
        elif name.endswith("bias"):
            assert (parameter == 0).all()
        else:
            assert abs(parameter.detach().std() - 0.05) < 0.002 and abs(parameter.detach().mean()) < 0.002
