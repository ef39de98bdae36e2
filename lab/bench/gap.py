"""How far the engine's log-probs of the tokens it sampled are from the trainer's, and how far both are from fp32.

    python -m dccot.lab.bench.gap MODEL problems.jsonl --n 16 --tokens 128 [--dtype bfloat16] [--kv-cache-dtype fp8]

Same weights, same tokens; only rounding differs. `train/objectives.py` corrects for it if rollout_ratio_cap is set.
`--out FILE` keeps the result: RL with an fp8 KV cache asks for it (engine.kv_cache_gap).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from dccot.core.command import positive, run_cleanly
from dccot.core.files import write_atomic
from dccot.data.problems import load_problems
from dccot.data.prompts import PromptConfig
from dccot.data.rollouts import missing_pairs, roll_out
from dccot.data.task import Task
from dccot.model.config import read_config
from dccot.model.folder import model_checksums
from dccot.model.sharding import DTYPES
from dccot.model.transformer import Transformer
from dccot.model.weights import load_weights
from dccot.rollout.director import RolloutConfig
from dccot.rollout.engine import EngineConfig, open_engine
from dccot.rollout.response import Response
from dccot.train.forest import Forest, pack
from dccot.train.update import compute_logprobs

TOKENS_AT_ONCE = 4096


def sampled(model: Path, problems: Path, n: int, engine: EngineConfig, rollout: RolloutConfig) -> list[Response]:
    prompt = PromptConfig("raw_sequential")
    with open_engine(model, engine) as opened:
        asked = Task(prompt).prompts(load_problems(problems)[:n], opened.tokenizer)
        rolled = roll_out(opened, asked, missing_pairs(asked, [0]), prompt, rollout, seed=(0,))
        return [each.response for each in rolled]


@torch.no_grad()
def logprobs(folder: Path, dtype: torch.dtype, forests: Sequence[Forest], temperature: float) -> Tensor:
    """Of the sampled tokens under our own model, computing in `dtype`."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = Transformer(read_config(folder)).to(device, dtype)
    load_weights(model, folder, dtype)
    return torch.cat([compute_logprobs(model, forest.to(device), temperature)[0].cpu() for forest in forests])


def difference(name: str, one: Tensor, other: Tensor) -> str:
    gap = (one - other).abs()
    return f"{name}: mean {gap.mean():.4f}, 99% below {gap.quantile(0.99):.3f}, largest {gap.max():.3f}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="|Δ log p| of engine and trainer on what the engine sampled.")
    parser.add_argument("model", type=Path, help="a Hugging Face folder")
    parser.add_argument("problems", type=Path, help="JSONL or parquet with id, question, gold")
    parser.add_argument("--n", type=positive, default=16, help="problems, one response each (default: 16)")
    parser.add_argument("--tokens", type=positive, default=128, help="of a response, at most (default: 128)")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--kv-cache-dtype", choices=("auto", "fp8"), default="auto", help="of the engine")
    parser.add_argument("--out", type=Path, help="write the gap of engine and trainer to this file")
    arguments = parser.parse_args(argv)

    def work() -> None:
        rollout = replace(RolloutConfig(), budget=arguments.tokens)
        kv_cache = arguments.kv_cache_dtype
        engine = EngineConfig(dtype=arguments.dtype, max_sequences=arguments.n, kv_cache_dtype=kv_cache)
        responses = sampled(arguments.model, arguments.problems, arguments.n, engine, rollout)
        forests = pack(responses, TOKENS_AT_ONCE).forests()
        theirs = torch.cat([forest.logprob[forest.targets] for forest in forests])
        under = lambda dtype: logprobs(arguments.model, dtype, forests, rollout.temperature)
        ours, exact = under(DTYPES[arguments.dtype]), under(torch.float32)
        print(f"|Δ log p| of {len(theirs):,} tokens at temperature {rollout.temperature}, {arguments.dtype}")
        print(difference("  engine and trainer", theirs, ours))
        print(difference("  engine and fp32", theirs, exact))
        print(difference("  trainer and fp32", ours, exact))
        if arguments.out:
            gap: dict[str, object] = {"mean_abs_logprob": float((theirs - ours).abs().mean()), "tokens": len(theirs)}
            gap |= {"kv_cache_dtype": kv_cache, "dtype": arguments.dtype, "model": model_checksums(arguments.model)}
            write_atomic(arguments.out, json.dumps(gap, indent=1) + "\n")

    return run_cleanly(work)


if __name__ == "__main__":
    sys.exit(main())
