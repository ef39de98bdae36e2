"""The gradient of one mini-batch, packed in every way of `PACKINGS`, on however many ranks there are; rank 0 writes
them to OUT.

torchrun --nproc_per_node 2 tests/train/gradient_program.py CHECKPOINT RESPONSES.json OUT
"""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from dccot.core.runtime import Runtime
from dccot.model.sharding import ShardingConfig, build_model
from dccot.rollout.response import Response
from dccot.train.forest import pack
from dccot.train.objectives import ObjectiveConfig, objective_loss
from dccot.train.update import OptimizerConfig, accumulate, apply_gradients, make_optimizer

LONELY = "a single response"  # which leaves a second rank with nothing to do
# Name → (token budget, whether prompts are shared, whether gradients are reduced with the last micro-batch only).
PACKINGS = {
    LONELY: (500, True, True),
    "one forest": (10**6, True, True),
    "one forest, prompts apart": (10**6, False, True),
    "a few": (500, True, True),
    "a few, reduced each": (500, True, False),
    "a few, prompts apart": (300, False, True),
    "one response each": (1, False, True),
}


def main(checkpoint: Path, responses_file: Path, out: Path) -> None:
    runtime = Runtime.start()
    responses = [Response.from_json(row) for row in json.loads(responses_file.read_text())]
    advantages = torch.linspace(-1.5, 2.0, len(responses))
    model = build_model(checkpoint, ShardingConfig(compute_dtype="float32"))
    optimizer = make_optimizer(model, OptimizerConfig())

    def token_loss(number, forest, logprob, entropy):
        rollout, advantage = forest.logprob[forest.targets], advantages[forest.response[forest.targets].long()]
        return objective_loss(ObjectiveConfig("dapo"), logprob, rollout, advantage, rollout, rollout)

    facts = {}
    for name, (budget, share, once) in PACKINGS.items():
        packed = responses[1:2] if name == LONELY else responses
        forests = pack(packed, budget, runtime.ranks, share_prompts=share).forests(runtime.rank)
        loss, tokens = accumulate(model, forests, token_loss, 0.6, runtime, once)
        gradients = {key: p.grad.full_tensor().clone() for key, p in model.named_parameters()}
        facts[name] = {
            "loss": loss,
            "tokens": tokens,
            "targets": runtime.gather([[len(forest.targets) for forest in forests]]),
        }
        if runtime.is_main:
            save_file(gradients, out / f"{name}.safetensors")
        # a loss that is not finite leaves the weights alone
        norm, applied = apply_gradients(model, optimizer, float("nan"), 1.0, 1.0)
        assert not applied
        facts[name]["norm"] = norm
    if runtime.is_main:
        (out / "facts.json").write_text(json.dumps(facts))
    runtime.barrier()
    runtime.stop()


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
