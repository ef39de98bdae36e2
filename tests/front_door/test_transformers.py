"""Unchanged Transformers decoders on a forest: the log-probs and gradients of each row run alone."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from dccot.kernels.mask import TreeMask
from dccot.train.forest import Forest
from dccot.transformers import compute_logprobs, forest_inputs, to_rows

pytestmark = pytest.mark.slow

VOCABULARY, PROMPT = 60, 30
SIZES = {"vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 48, "max_position_embeddings": 256}
SIZES |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.3}
EXPERTS = {"moe_intermediate_size": 32, "num_experts": 6, "num_experts_per_tok": 2, "experts_implementation": "eager"}
HEADS = {"head_dim": 32}
OWN = {"qwen2": {}, "llama": {}, "qwen3": HEADS, "qwen3_moe": HEADS | EXPERTS, "gemma2": HEADS}


def build(family: str, dtype: torch.dtype = torch.float64, **changes):
    """A small random decoder; "lora" is a Qwen3 whose every linear layer has an adapter that is not zero."""
    torch.manual_seed(0)
    if family == "lora":
        peft = pytest.importorskip("peft")  # make setup installs it
        adapters = peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
        return peft.get_peft_model(build("qwen3", dtype), adapters).to(dtype)
    config = AutoConfig.for_model(family, **SIZES, **OWN[family], **changes)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).to(dtype)
    if dtype == torch.float64:
        for module in model.modules():  # Transformers rounds norms to fp32, which would hide mistakes below 1e-7
            if type(module).__name__.endswith("RMSNorm"):
                module.forward = torch.nn.RMSNorm.forward.__get__(module)
                module.normalized_shape, module.eps = module.weight.shape, module.variance_epsilon
    return model


@pytest.fixture(scope="module")
def rows() -> list[list[int]]:
    """Three samples of one prompt, two that go on from the first of them, and a row of its own."""
    generator = torch.Generator().manual_seed(1)
    draw = lambda length: torch.randint(0, VOCABULARY, (length,), generator=generator).tolist()
    prompt = draw(PROMPT)
    samples = [prompt + draw(length) for length in (12, 5, 17)]
    return [*samples, samples[0] + draw(9), samples[0] + draw(3), draw(PROMPT + 8)]


def weights(row: int, length: int) -> torch.Tensor:
    """Every token of every row has a weight of its own in the loss."""
    return torch.linspace(-1.0, 2.0, length, dtype=torch.float64) * (row + 1)


def gradients(model) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def run_apart(model, rows, temperature: float = 1.0):
    """Log-probs and gradients of every row alone, with SDPA and a causal mask."""
    model.set_attn_implementation("sdpa")
    model.zero_grad()
    found = []
    for number, row in enumerate(rows):
        ids = torch.tensor(row)
        logits = model(ids[None]).logits[0, PROMPT - 1 : -1] / temperature
        found.append(logits.log_softmax(-1).gather(-1, ids[PROMPT:, None])[:, 0])
        (found[-1] * weights(number, len(found[-1]))).sum().backward()
    return [logprob.detach() for logprob in found], gradients(model)


def run_forest(model, rows, temperature: float = 1.0):
    model.set_attn_implementation("dccot_tree")
    model.zero_grad()
    forest, where = Forest.from_rows(rows, [torch.arange(len(row)) >= PROMPT for row in rows])
    assert len(forest) < 0.6 * sum(map(len, rows))
    logprob = to_rows(compute_logprobs(model, forest, temperature)[0], forest, where)
    found = [values[PROMPT:] for values in logprob]
    sum((values * weights(number, len(values))).sum() for number, values in enumerate(found)).backward()
    return [values.detach() for values in found], gradients(model)


def largest_error(found, expected) -> float:
    return max((a - b).abs().max().item() / (1 + b.abs().max().item()) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("dtype, exact", [(torch.float64, 1e-9), (torch.float32, 1e-5)], ids=str)  # fp32: unchanged
@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama", "qwen3_moe", "lora"])
def test_log_probs_and_gradients_are_those_of_separate_rows(family, dtype, exact, rows):
    model = build(family, dtype)
    logprob, gradient = run_forest(model, rows, temperature=0.6)
    expected, expected_gradient = run_apart(model, rows, temperature=0.6)
    assert largest_error(logprob, expected) < exact
    assert gradient.keys() == expected_gradient.keys()
    assert (len(gradient) == len(list(model.parameters()))) == (family != "lora")  # there only the adapters
    bound = max(exact, 1e-6) if family == "qwen3_moe" else exact  # its router takes the softmax in fp32
    assert largest_error(gradient.values(), [expected_gradient[name] for name in gradient]) < bound


def test_a_causal_mask_over_the_same_tokens_is_another_model(rows):
    model = build("qwen3")
    model.set_attn_implementation("dccot_tree")
    forest, _ = Forest.from_rows(rows)
    inputs = forest_inputs(forest)
    right = model(**inputs).logits
    wrong = model(**inputs | {"tree_mask": TreeMask.causal([len(forest)])}).logits
    assert (right - wrong).abs().max() > 0.1


def test_gradient_checkpointing_changes_nothing(rows):
    model = build("llama")
    _, expected = run_forest(model, rows)
    model.gradient_checkpointing_enable()
    model.train()
    _, gradient = run_forest(model, rows)
    assert largest_error(gradient.values(), [expected[name] for name in gradient]) < 1e-12


def test_entropy_is_that_of_the_row_that_predicts_the_token(rows):
    model = build("qwen2")
    model.set_attn_implementation("dccot_tree")
    forest, where = Forest.from_rows(rows)
    entropy = to_rows(compute_logprobs(model, forest)[1], forest, where)[3]
    model.set_attn_implementation("sdpa")
    expected = torch.distributions.Categorical(logits=model(torch.tensor(rows[3])[None]).logits[0, :-1]).entropy()
    torch.testing.assert_close(entropy[1:], expected, rtol=1e-9, atol=1e-9)


def test_without_a_forest_the_model_generates_as_with_sdpa(rows):
    model = build("qwen3", torch.float32).eval()
    model.generation_config.pad_token_id = 0
    padded = torch.tensor([[0] * 5 + rows[0][:20], rows[1][:25]])
    seen = torch.tensor([[0] * 5 + [1] * 20, [1] * 25])
    made = []
    for implementation in ("sdpa", "dccot_tree"):
        model.set_attn_implementation(implementation)
        made.append(model.generate(padded, attention_mask=seen, max_new_tokens=8, do_sample=False))
    assert made[0].tolist() == made[1].tolist()


WINDOW = {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 0}


@pytest.mark.parametrize(
    "family, changes, inputs, says",
    [
        ("qwen3", WINDOW, {}, "sees the last 16 tokens only"),
        ("llama", {"attention_dropout": 0.1}, {}, "attention dropout 0.1"),
        ("gemma2", {}, {}, "uses softcap"),
        ("llama", {}, {"tree_mask": None}, "does not pass on the keyword tree_mask"),
        ("llama", {}, {"tree_mask": TreeMask.causal([5])}, "the forest has 5 tokens, LlamaAttention 0 has"),
    ],
)
def test_what_tree_attention_cannot_honour_is_refused(family, changes, inputs, says, rows):
    model = build(family, torch.float32, **changes).train()
    model.set_attn_implementation("dccot_tree")
    with pytest.raises(ValueError, match=says):
        model(**forest_inputs(Forest.from_rows(rows)[0]) | inputs)


def test_a_batch_of_two_and_a_model_with_another_attention_are_refused(rows):
    model, forest = build("llama", torch.float32), Forest.from_rows(rows)[0]
    with pytest.raises(ValueError, match="attn_implementation is 'sdpa'"):
        compute_logprobs(model, forest)
    model.set_attn_implementation("dccot_tree")
    inputs = forest_inputs(forest)
    with pytest.raises(ValueError, match="a batch of 2"):
        model(**inputs | {"input_ids": inputs["input_ids"].expand(2, -1)})
