"""GRPO in TRL with the loss computed on forests: every prompt once per group, no padding. The change to TRL is one
method.

    python examples/trl_env.py examples/trl_grpo.py --model runs/demo/base --problems train.jsonl
    python examples/trl_env.py examples/trl_grpo.py --loss padded                    unmodified TRL, to compare

Prints the time and tokens of every step as JSON. trl_env.py creates the environment; trl_compare.py measures both
losses on the same rows. Two processes: python examples/trl_env.py -m torch.distributed.run --standalone
--nproc_per_node 2 examples/trl_grpo.py
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import time
from pathlib import Path

import torch
import torch.distributed as dist
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from dccot.train.forest import Forest
from dccot.transformers import compute_logprobs, to_rows

GROUP = 7  # answers to each prompt
PROCESSES = int(os.environ.get("WORLD_SIZE", "1"))
PROMPT = "<｜begin▁of▁sentence｜><｜User｜>{} {}<｜Assistant｜><think>\n"
INSTRUCTION = r"Let's think step by step and output the final answer within \boxed{}."


class PaddedTrainer(GRPOTrainer):
    """Unmodified TRL; it only counts."""

    attention = "sdpa"
    computed_tokens = 0
    generated = (0.0, 0)  # seconds, tokens

    def _get_per_token_logps_and_entropies(self, model, input_ids, *arguments, **options):
        self.computed_tokens += input_ids.numel()
        return super()._get_per_token_logps_and_entropies(model, input_ids, *arguments, **options)

    def _generate_single_turn(self, *arguments, **options):
        start = time.perf_counter()
        completions, logprobs = super()._generate_single_turn(*arguments, **options)
        self.generated = time.perf_counter() - start, sum(map(len, completions))
        return completions, logprobs


class ForestTrainer(PaddedTrainer):
    """The same loss from log-probs that are computed on one forest per micro-batch."""

    attention = "dccot_tree"

    def _get_per_token_logps_and_entropies(
        self, model, input_ids, attention_mask, logits_to_keep, batch_size=None, compute_entropy=False, **_
    ):
        seen, completion = attention_mask.bool(), attention_mask[:, -logits_to_keep:].bool()
        rows = [ids[mask] for ids, mask in zip(input_ids, seen)]
        prompts = (seen.sum(1) - completion.sum(1)).tolist()
        forest, where = Forest.from_rows(rows, [torch.arange(len(row)) >= prompt for row, prompt in zip(rows, prompts)])
        forest = forest.to(input_ids.device)
        self.computed_tokens += len(forest)

        def padded(values):
            completions = [row[prompt:] for row, prompt in zip(to_rows(values, forest, where), prompts)]
            return values.new_zeros(completion.shape).masked_scatter(completion, torch.cat(completions))

        logprob, entropy = compute_logprobs(model, forest, self.temperature)
        return padded(logprob), padded(entropy) if compute_entropy else None, None


LOSSES = {"padded": PaddedTrainer, "forest": ForestTrainer}


def reward(completions, gold, **_) -> list[float]:
    """1 where the last \\boxed{…} holds the right answer."""
    answers = [re.findall(r"\\boxed\{([^}]*)\}", text) for text in completions]
    return [float(bool(found) and found[-1].strip() == right) for found, right in zip(answers, gold)]


def make_trainer(loss: str, model, tokenizer, problems: list[dict], prompts: int, **settings) -> PaddedTrainer:
    kind = LOSSES[loss]
    model.set_attn_implementation(kind.attention)
    common = {
        "output_dir": "runs/trl", "per_device_train_batch_size": prompts * GROUP // PROCESSES,
        "num_generations": GROUP, "temperature": 0.6,
        "loss_type": "dapo", "beta": 0.0, "learning_rate": 8e-5,
        "lr_scheduler_type": "constant", "gradient_checkpointing": False,
        "bf16": False, "use_cpu": not torch.cuda.is_available(), "report_to": "none",
        "save_strategy": "no", "logging_strategy": "no",
        "disable_tqdm": True, "seed": 0,
    }  # fmt: skip
    options = {"train_dataset": Dataset.from_list(problems), "processing_class": tokenizer}
    return kind(model, reward, args=GRPOConfig(**common | settings), **options)


class StopWatch(TrainerCallback):
    """Seconds and tokens of every step."""

    def __init__(self, trainer: PaddedTrainer):
        self.trainer, self.steps = trainer, []

    def on_step_begin(self, *_, **__):
        self.began, self.trainer.computed_tokens = time.perf_counter(), 0

    def on_step_end(self, *_, **__):
        whole, (generation, tokens) = time.perf_counter() - self.began, self.trainer.generated
        facts = {"step": whole, "generation": generation, "training": whole - generation}
        self.steps.append({**facts, "generated_tokens": tokens, "computed_tokens": self.trainer.computed_tokens})


def of_all_processes(steps: list[dict], memory: float) -> tuple[list[dict], float]:
    """All processes' tokens, the largest one's memory, the slowest one's seconds; waiting for it to generate is no
    training.
    """
    everybody = [(steps, memory)]
    if PROCESSES > 1:
        everybody *= PROCESSES
        dist.all_gather_object(everybody, (steps, memory))
    joined = [
        {name: (sum if name.endswith("tokens") else max)(step[name] for step in same) for name in same[0]}
        for same in zip(*(steps for steps, _ in everybody))
    ]
    for step in joined:
        step["training"] = step["step"] - step["generation"]
    return joined, max(memory for _, memory in everybody)


def main() -> None:
    parser = argparse.ArgumentParser(description="GRPO in TRL with the loss computed on forests.")
    parser.add_argument("--model", default="runs/demo/base", help="a Transformers folder, or a run of dccot")
    parser.add_argument(
        "--problems", default="runs/demo/world/problems/train.jsonl", help="JSON lines with question and gold"
    )
    parser.add_argument("--loss", choices=sorted(LOSSES), default="forest")
    parser.add_argument("--prompts", type=int, default=8, help="prompts per step, each answered 7 times")
    parser.add_argument("--budget", type=int, default=448, help="tokens per answer")
    parser.add_argument("--steps", type=int, default=4)
    arguments = parser.parse_args()

    start, folder = time.perf_counter(), Path(arguments.model)
    if (folder / "latest").is_file():
        folder = folder / "checkpoints" / (folder / "latest").read_text().strip() / "hf"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    problems = [json.loads(line) for line in Path(arguments.problems).read_text().splitlines()]
    rows = [{"prompt": PROMPT.format(row["question"], INSTRUCTION), "gold": row["gold"]} for row in problems]
    sizes = {"max_completion_length": arguments.budget, "max_steps": arguments.steps}
    trainer = make_trainer(
        arguments.loss, model, AutoTokenizer.from_pretrained(folder), rows, arguments.prompts, **sizes
    )
    watch = StopWatch(trainer)
    trainer.add_callback(watch)
    startup = time.perf_counter() - start
    trainer.train()
    steps, memory = of_all_processes(watch.steps, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20)
    if trainer.accelerator.is_main_process:
        print(json.dumps({"startup": startup, "memory_gb": memory, "steps": steps}))


if __name__ == "__main__":
    main()
