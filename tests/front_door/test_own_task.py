"""docs/own_task.md, done: its files, its recipe from rewriting to the evaluation, on a model that learns two lists by
heart in a few seconds.
"""

import gzip
import json
import re
import sys
from pathlib import Path

import pytest

from dccot.core.files import write_jsonl_atomic
from dccot.lab.worlds import bigram
from tests.support import programs

PAGE = (Path(__file__).parents[2] / "docs/own_task.md").read_text()
ENGINE = ["dtype=float32", "kv_cache_gb=0.1", "max_sequences=8", "context=2048"]
BATCH = ["prompts_rolled_out=2", "prompts=2", "group_size=2", "token_budget=4000"]
SMALL = [
    *("model=MODEL", "without=[sequential]", "rewrite.source=solutions.jsonl"),
    *("sft.steps=60", "sft.batch.examples=2", "sft.checkpoint.every=60", "sft.sharding.compute_dtype=float32"),
    *("sft.optimizer.learning_rate=0.01", "sft.optimizer.warmup_steps=0"),
    *(
        "rl.steps=1",
        "rl.filter=none",
        "rl.prompt.max_prompt_tokens=1500",
        "rl.validation.max_prompt_tokens=1500",
        "rl.rollout.budget=150",
        "rl.reward.cutoff=50",
        "rl.validation.samples=1",
    ),
    *("rl.sharding.compute_dtype=float32", "rl.grading.workers=1", *(f"rl.batch.{each}" for each in BATCH)),
    *("result.n=1", "result.budget=150"),
    *(f"{stage}.engine.{each}" for stage in ("rl", "result") for each in ENGINE),
]

LISTS = ([3, 1, 2], [2, 3, 1])  # of one answer, which is right whichever list is remembered

pytestmark = pytest.mark.slow


def test_the_page_trains_its_task_from_rewriting_to_evaluation(tmp_path):
    files = dict(re.findall(r"```\w+\n# (\S+)\n(.*?)```", PAGE, re.DOTALL))
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    bigram.save(tmp_path / "MODEL", context=2048)
    problems = [{"id": str(i), "question": f"Sort {asked}.", "gold": "1 2 3"} for i, asked in enumerate(LISTS)]
    for name in ("train", "validation"):
        write_jsonl_atomic(tmp_path / f"{name}.jsonl", problems)
    solved = [{**each, "solution": f"</think><answer>{each['gold']}</answer>"} for each in problems]
    write_jsonl_atomic(tmp_path / "solutions.jsonl", solved)

    command = [sys.executable, "-m", "dccot.cli", "pipeline", "recipe.yaml", *SMALL]
    done = programs.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]

    run = tmp_path / "runs/sorting"
    with gzip.open(run / "rl/rollouts/step_000000.jsonl.gz", "rt") as file:
        sampled = [json.loads(line) for line in file]
    assert len(sampled) == 4 and {row["verdict"] for row in sampled} <= {"correct", "wrong", "unparsable"}
    for row in sampled:  # as the page's judge and reward decide
        block = re.search(r"<answer>(.*?)</answer>", row["text"])
        right = block is not None and re.findall(r"\d+", block[1]) == row["gold"].split()
        assert (row["verdict"] == "correct") == right and (row["reward"] > 0) == right
    assert any(row["reward"] > 0.5 and "<worker_2>" in row["text"] for row in sampled)
    [found] = json.loads((run / "result/summary.json").read_text())["benchmarks"]
    assert found["problems"] == 2 and found["measures"]["accuracy"]["value"] > 0
