"""Weights streamed into the live engine: afterwards it is the engine that would have been built from them."""

import weakref

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from dccot.lab.synced import verify
from dccot.rollout.director import RolloutConfig
from dccot.rollout.engine import EngineConfig, open_engine
from dccot.rollout.generate import Request, generate
from dccot.rollout.vllm_engine import VllmEngine

pytestmark = pytest.mark.slow

GREEDY = RolloutConfig(budget=80, temperature=0.0)


def greedy(engine) -> list[list[int]]:
    prompts = [engine.tokenizer.encode(text) for text in ("abc", "what is love", "x" * 70)]
    done = generate(engine, [Request("p", i, prompt) for i, prompt in enumerate(prompts)], GREEDY, seed=(0,))
    return [response.as_read for _, response in sorted(done, key=lambda pair: pair[0].sample)]


def perturbed(folder, seed: int, scale: float = 0.3):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    noise = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(scale * parameter.std() * torch.randn(parameter.shape, generator=noise))
    return model


@pytest.fixture(scope="module")
def engine(checkpoints, build_engine):
    """An engine of its own: these tests change its weights."""
    return build_engine(checkpoints["single"])


def reloads(engine, model) -> None:
    engine.load(model.named_parameters())
    verify(engine, model.named_parameters())


def test_after_a_sync_greedy_output_equals_a_fresh_engines(engine, checkpoints, build_engine, tmp_path):
    before = greedy(engine)
    model = perturbed(checkpoints["single"], seed=1)
    engine.load(model.named_parameters())
    model.save_pretrained(tmp_path / "new")
    AutoTokenizer.from_pretrained(checkpoints["single"]).save_pretrained(tmp_path / "new")
    after = greedy(engine)
    assert after == greedy(build_engine(tmp_path / "new"))
    assert after != before


def test_blocks_cached_under_the_old_weights_are_forgotten(engine, checkpoints):
    engine.load(perturbed(checkpoints["single"], seed=2).named_parameters())
    first = greedy(engine)
    engine.load(perturbed(checkpoints["single"], seed=3).named_parameters())
    greedy(engine)
    engine.load(perturbed(checkpoints["single"], seed=2).named_parameters())
    assert greedy(engine) == first


def test_weights_are_taken_one_at_a_time(engine, checkpoints):
    """Each is gathered when it is asked for, and freed when its layer is complete (at most q, k, v with biases)."""
    model, given, most = perturbed(checkpoints["single"], seed=4), [], 0

    def gathered():
        nonlocal most
        for name, parameter in model.named_parameters():
            most = max(most, sum(tensor() is not None for tensor in given))
            tensor = parameter.detach().clone()
            given.append(weakref.ref(tensor))
            yield name, tensor
            del tensor

    engine.load(gathered())
    assert most <= 6 < len(given)


def test_verify_finds_the_one_value_that_differs(engine, checkpoints):
    model = perturbed(checkpoints["single"], seed=5)
    reloads(engine, model)
    for name, parameter in model.named_parameters():
        with torch.no_grad():
            place = tuple(size // 2 for size in parameter.shape)
            old = parameter[place].item()
            parameter[place] += 1.0
            with pytest.raises(ValueError, match=f"weights differ from the given ones: {name};"):
                verify(engine, model.named_parameters())
            parameter[place] = old


def test_weights_are_cast_to_the_engines_precision(checkpoints):
    engine = VllmEngine(checkpoints["single"], EngineConfig(dtype="bfloat16", kv_cache_gb=0.125))
    model = perturbed(checkpoints["single"], seed=10)
    with pytest.raises(ValueError, match="weights differ from the given ones"):
        verify(engine, model.named_parameters())
    reloads(engine, model)


def test_a_missing_weight_is_named_and_stops_the_engine_until_all_are_there(engine, checkpoints):
    model = perturbed(checkpoints["single"], seed=6)
    lost = "model.layers.1.self_attn.k_proj.weight"
    with pytest.raises(ValueError, match=f"1 weights of .* were not given: {lost}"):
        engine.load((name, tensor) for name, tensor in model.named_parameters() if name != lost)
    with pytest.raises(RuntimeError, match="weights are gone or mixed"):
        greedy(engine)
    reloads(engine, model)
    assert greedy(engine)


def test_a_weight_that_is_not_finite_is_named_and_the_engine_can_load_again(engine, checkpoints):
    model = perturbed(checkpoints["single"], seed=7)
    parameters = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
    parameters["model.layers.0.mlp.up_proj.weight"][3, 4:6] = float("nan")
    with pytest.raises(ValueError, match=r"model.layers.0.mlp.up_proj.weight holds 2 values that are not finite"):
        engine.load(parameters.items())
    reloads(engine, model)


def test_an_error_while_gathering_comes_out_and_the_engine_can_load_again(engine, checkpoints):
    model = perturbed(checkpoints["single"], seed=8)

    def gathered():
        for number, item in enumerate(model.named_parameters()):
            if number == 11:
                raise ConnectionError("a rank is gone")
            yield item

    with pytest.raises(ConnectionError, match="a rank is gone"):
        engine.load(gathered())
    reloads(engine, model)


def test_weights_do_not_change_under_running_calls(engine, checkpoints):
    model = perturbed(checkpoints["single"], seed=9)
    asked = [Request("p", i, [5] * 9, parallel=False) for i in range(3)]
    loop = generate(engine, asked, RolloutConfig(budget=300), seed=(0,))
    next(loop)
    with pytest.raises(RuntimeError, match=r"weights cannot change under \d running calls; finish or abort p/"):
        engine.load(model.named_parameters())
    loop.close()


@pytest.mark.parametrize("holds_the_head", [True, False])
def test_a_tied_head_follows_the_embedding(checkpoints, build_engine, tmp_path, holds_the_head):
    """Some checkpoints hold the head although it is tied; the trainer has no such parameter either way."""
    model = AutoModelForCausalLM.from_pretrained(checkpoints["single"], dtype=torch.float32)
    model.config.tie_word_embeddings = True
    model.tie_weights()
    model.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(checkpoints["single"]).save_pretrained(tmp_path)
    if holds_the_head:
        tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    engine = build_engine(tmp_path)
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(0.5).add_(0.1)
    weights = [(name, tensor) for name, tensor in model.named_parameters() if name != "lm_head.weight"]
    engine.load(weights)
    verify(engine, weights)
    for ids in greedy(engine):
        assert ids  # nothing was left on the meta device


def test_an_engine_that_is_given_is_used_and_left_running(engines, checkpoints):
    with open_engine(checkpoints["single"], EngineConfig(), engines["single"]) as engine:
        assert engine is engines["single"]
    [(_, response)] = generate(engine, [Request("p", 0, [5] * 9)], RolloutConfig(budget=20), seed=(0,))
    assert response.sampled_tokens > 0


def tensors_of(network) -> dict[int, str]:
    """Storage → where it was found, of every tensor that the modules of a network hold in any other way than as
    parameters and buffers; the KV cache is made later.
    """
    known = {x.untyped_storage().data_ptr() for x in [*network.parameters(), *network.buffers()]}
    found: dict[int, str] = {}
    for name, module in network.named_modules():
        waiting = [(f"{name}.{key}", value) for key, value in vars(module).items() if key not in SKIPPED]
        seen: set[int] = set()
        while waiting:
            where, value = waiting.pop()
            if id(value) in seen or isinstance(value, (type, str, int, float, torch.nn.Module)):
                continue
            seen.add(id(value))
            if isinstance(value, torch.Tensor):
                if value.numel() and value.untyped_storage().data_ptr() not in known:
                    found[value.untyped_storage().data_ptr()] = where
            elif isinstance(value, dict):
                waiting += [(f"{where}[{key}]", inside) for key, inside in value.items()]
            elif isinstance(value, (list, tuple, set)):
                waiting += [(where, inside) for inside in value]
            elif callable(value) or type(value).__module__.startswith("vllm."):
                inside = [*vars(value).items()] if hasattr(value, "__dict__") else []
                inside += [(cell, getattr(value, cell)) for cell in ("args", "keywords") if hasattr(value, cell)]
                closure = getattr(value, "__closure__", None) or ()
                waiting += [(f"{where}.{key}", each) for key, each in inside]
                waiting += [(where, cell.cell_contents) for cell in closure]
    return found


SKIPPED = {"_parameters", "_buffers", "_modules", "kv_cache"}


def test_loading_a_model_makes_nothing_outside_its_parameters_and_buffers(engine):
    """Sleep at level 2 saves buffers, `load` gives parameters: anything else would be lost on a GPU. What is on the
    host stays: copies of scales, and here the weights that vLLM repacks for its CPU kernels.
    """
    on_host = ("_scale_cpu", "_scale_cpu_cache", ".cpu_linear.handler_tensor")
    assert [where for where in tensors_of(engine.network).values() if not where.endswith(on_host)] == []
