"""SmolLM2-135M-Instruct through the whole system: import, parity, promise 1, SFT and RL on two ranks."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dccot.core.run import Run
from dccot.data.prompts import PromptConfig
from dccot.lab import model_check
from dccot.lab.worlds.lists import problem_stream, rewrite_parallel
from dccot.model.config import read_config
from dccot.model.tokenizer import PROBE, open_tokenizer
from dccot.model.transformer import Transformer
from dccot.model.weights import load_weights
from dccot.rollout.director import RolloutConfig
from dccot.rollout.engine import EngineConfig, open_engine
from dccot.rollout.generate import Request, generate
from dccot.train.forest import pack
from dccot.train.update import compute_logprobs

ROLLOUT = RolloutConfig(budget=96, temperature=0.6, max_rounds=1)


def test_the_imported_folder_is_the_published_model(smollm2, measured):
    config, tokenizer = read_config(smollm2), open_tokenizer(smollm2)
    assert (config.model_type, config.layers, config.hidden_size, config.vocab_size) == ("llama", 30, 576, 49_152)
    assert model_check.count_parameters(config) == 134_515_008
    assert tokenizer.decode(tokenizer.encode(PROBE)) == PROBE
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("x  12")) == ["x", "ĠĠ", "1", "2"]  # digits are cut first
    assert PromptConfig().text("Q?", tokenizer).startswith("<|im_start|>system\n")
    measured["SmolLM2: import"] = "134,515,008 parameters, chat template, digits one by one"


def test_numbers_are_those_of_transformers_and_vllm(smollm2, measured):
    found = dict(model_check.numbers_rows(smollm2, engine=True))  # raises where they are not
    assert set(found) == {"vs. transformers", "vs. vLLM"}
    for name, said in found.items():
        measured[f"SmolLM2: {name}"] = said


@pytest.mark.parametrize("dtype, count, mean, largest", [("float32", 20, 1e-5, 1e-3), ("bfloat16", 3, 0.04, 2.0)])
def test_rollout_is_training(smollm2, measured, dtype, count, mean, largest):
    """Promise 1. The prompt solves one problem, with workers, and begins the next, so that the untrained model spawns.

    A CPU without bf16 products takes minutes for each response in bfloat16.
    """
    stream = zip(problem_stream(0, "base", set()), range(9))
    solved, *asked = [problem for problem, _ in stream if "-things-" in problem.id][:4]
    shown = f"{solved.question}\n{rewrite_parallel(solved, solved.solution)}"
    with open_engine(smollm2, EngineConfig(dtype=dtype, context=2048, max_sequences=64)) as engine:
        ask = PromptConfig(max_prompt_tokens=1024)
        begun = [engine.tokenizer.encode(one.solution.split("\n")[1] + "\n") for one in asked]  # Three boxes.
        prompts = [ask.ids(engine.tokenizer, f"{shown}\n\n{one.question}") + plan for one, plan in zip(asked, begun)]
        requests = [Request(str(i), i, prompts[i % len(prompts)]) for i in range(count)]
        responses = [response for _, response in generate(engine, requests, ROLLOUT, seed=(0,))]
    model = Transformer(read_config(smollm2))
    load_weights(model, smollm2, getattr(torch, dtype))
    gaps = []
    for forest in pack(responses, 4096).forests():
        with torch.no_grad():
            logprob, _ = compute_logprobs(model, forest, ROLLOUT.temperature)
        gaps.append((logprob - forest.logprob[forest.targets]).abs())
    gap = torch.cat(gaps)
    spawned = sum(bool(response.forks) for response in responses)
    tokens = f"{len(gap):,} tokens of {len(responses)} responses, {spawned} with workers"
    found = f"mean |Δ log p| {gap.mean():.1e}, largest {gap.max():.1e}; {tokens}"
    measured[f"SmolLM2: rollout = training, {dtype}"] = found
    assert len(responses) == count and spawned > 0
    assert gap.mean() < mean and gap.max() < largest


def test_a_step_of_sft_and_one_of_rl_on_two_ranks(smollm2, tmp_path, measured):
    root = Path(__file__).parents[2]
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m", "dccot.pipeline"]
    settings = [f"model={smollm2.resolve()}", f"output={tmp_path}"]
    command = [sys.executable, *launch, str(root / "configs/real/check.yaml"), *settings]
    subprocess.run(command, check=True, cwd=tmp_path)
    sft, dapo = (Run(tmp_path / "check" / stage).rows()[-1] for stage in ("sft", "dapo"))
    assert 0.3 < sft["policy/loss"] < 4 and sft["policy/grad_norm"] > 0
    assert dapo["gap/kl"] < 1e-6  # in float32
    found = f"loss {sft['policy/loss']:.2f}, gradient norm {sft['policy/grad_norm']:.2f}"
    measured["SmolLM2: SFT on 2 ranks"] = found
    measured["SmolLM2: RL on 2 ranks"] = f"KL of trainer and rollout {dapo['gap/kl']:.1e} in float32"
