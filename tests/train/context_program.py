"""What ranks that share forests compute, for test_context.py; rank 0 writes it to OUT.

torchrun --nproc_per_node 4 tests/train/context_program.py CHECKPOINT OUT
"""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from dccot.core.runtime import Runtime
from dccot.model.context import ContextGroup
from dccot.model.sharding import ShardingConfig, build_model
from dccot.rollout.response import Response
from dccot.train.flops import model_flops
from dccot.train.forest import Forest, pack
from dccot.train.metrics import TokenMetrics
from dccot.train.objectives import ObjectiveConfig, objective_loss
from dccot.train.update import accumulate, compute_logprobs

DOUBLE = {"compute_dtype": "float64", "master_dtype": "float64"}
# Name → (ranks, how they are laid out, token budget of a group).
CASES = {
    "2 of 2": (2, ShardingConfig(context_parallel=2, **DOUBLE), 10**6),
    "2 of 2, whole": (2, ShardingConfig(context_parallel=2, whole=True, **DOUBLE), 400),
    "4 of 4": (4, ShardingConfig(context_parallel=4, **DOUBLE), 10**6),
    "4 of 4, copies": (4, ShardingConfig(context_parallel=4, replicate=2, **DOUBLE), 400),
    "2 of 4": (4, ShardingConfig(context_parallel=2, **DOUBLE), 400),
    "2 of 4, copies": (4, ShardingConfig(context_parallel=2, replicate=2, reduce_once=False, **DOUBLE), 150),
}


def step(runtime: Runtime, model, named: dict[tuple[int, int], Forest], reduce_once: bool = True) -> dict:
    """One mini-batch as RL has it: old and reference log-probs, then the gradient and everything that is measured.
    Forests are named by the group that has them and their number.
    """
    names, forests = list(named), list(named.values())
    config, tokens, told = ObjectiveConfig("dapo"), TokenMetrics(ObjectiveConfig("dapo"), runtime), []
    with torch.no_grad():
        before = [compute_logprobs(model, forest, 0.6)[0] for forest in forests]

    def token_loss(number, forest, logprob, entropy):
        rollout, advantage = forest.logprob[forest.targets], torch.cos(forest.response[forest.targets].double())
        old, reference = before[number] - 0.1 * torch.sin(before[number]), before[number] + 0.2
        tokens.add(logprob, entropy, old, advantage, rollout, reference)
        values = logprob.tolist(), entropy.tolist(), before[number].tolist()
        told.extend(zip([[*names[number], target] for target in forest.targets.tolist()], *values, strict=True))
        return objective_loss(config, logprob, old, advantage, rollout, reference) + 0.01 * entropy

    loss, count = accumulate(model, forests, token_loss, 0.6, runtime, reduce_once)
    everybody = sorted(row for rows in runtime.gather(told) for row in rows)
    flops = sum(part for [part] in runtime.gather([model_flops(model.config, forests)]))
    return {"loss": loss, "count": count, "flops": flops, "tokens": everybody, "metrics": tokens.reduce()}


def main(checkpoint: Path, out: Path) -> None:
    responses = [Response.from_json(row) for row in json.loads((out / "responses.json").read_text())]
    with Runtime.start(900) as runtime:
        for name, (ranks, sharding, budget) in CASES.items():
            if ranks != runtime.ranks:
                continue
            model = build_model(checkpoint, sharding)
            group = ContextGroup.join(sharding.context_parallel, runtime.device)
            whole = pack(responses, budget, runtime.ranks // group.ranks).forests(group.data)
            named = {(group.data, number): forest.shared(group) for number, forest in enumerate(whole)}
            found = step(runtime, model, named, sharding.reduce_once)
            gradients = {key: p.grad.full_tensor().clone() for key, p in model.named_parameters()}
            if runtime.is_main:
                (out / f"{name}.json").write_text(json.dumps(found))
                save_file(gradients, out / f"{name}.safetensors")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
