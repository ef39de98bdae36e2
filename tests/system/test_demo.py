"""`dccot demo` as its users run it: two ranks started by itself, stopped by Ctrl-C, run again to the end. Few steps of
a tiny model.
"""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from dccot.core.command import CONTINUE
from dccot.train.charts import meaning
from tests.support import programs

pytestmark = pytest.mark.slow

# Every kind of stage that a model without skill can pass; what needs right answers is tested with models that give
# them.
RECIPE = """
name: r
output: OUT
model: "{run}/base"
train: "{run}/world/problems/train.jsonl"
benchmarks: ["{run}/world/problems/test.jsonl"]
common:
  eval: {budget: 24, max_prompt_tokens: 256, n: 3, grading: {workers: 1},
    engine: {dtype: float32, context: 512, max_sequences: 8, kv_cache_gb: 0.1}}
prepare:
  world: {run: "dccot.lab.worlds.stages:arithmetic", set: {
    base_examples: 40, train: 8, validation: 2, test: 3, larger: 1,
    model: {hidden_size: 32, intermediate_size: 32, num_hidden_layers: 1, num_attention_heads: 1}}}
  base: {run: sft, config: mini/base.yaml, start: world/init, set: {
    steps: 80, checkpoint.every: 5, data.train: "{run}/world/base.jsonl"}}
stages:
  stage1: {run: rl, config: rl/stage1.yaml, set: {steps: 1, filter: none,
    batch: {prompts_rolled_out: 2, prompts: 2}, rollout.budget: 24,
    sharding: {compute_dtype: float32, activation_checkpointing: false}, prompt.max_prompt_tokens: 256,
    reward.cutoff: 8, validation.every: 0, grading: {workers: 1},
    engine: {dtype: float32, context: 512, max_sequences: 8, kv_cache_gb: 0.1}}}
  eval_base: {run: eval, set: {model: base, method: sequential}}
  eval_stage1: {run: eval, set: {model: stage1@1}}
  eval_sft: {run: eval, set: {model: stage1}}
  report:
    run: report
    set:
      title: small
      rows: {eval_base: Base, eval_sft: SFT, eval_stage1: DC-CoT}
      baselines: {DC-CoT: Base}
"""


@pytest.fixture
def start(tmp_path):
    """Starts the demo in a process group of its own, as a terminal would."""
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE.replace("OUT", str(tmp_path)))

    def start(*settings: str) -> subprocess.Popen:
        command = [sys.executable, "-m", "dccot.cli", "demo", "--processes", "2", "--recipe", str(recipe), *settings]
        return programs.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=tmp_path, start_new_session=True
        )

    return start


def test_it_is_stopped_and_goes_on_to_its_table(start, tmp_path):
    first = start()
    metrics = tmp_path / "r" / "base" / "metrics.jsonl"
    while not (metrics.is_file() and metrics.read_text().count("\n") > 20):
        assert first.poll() is None, first.communicate()[0]
        time.sleep(0.1)
    os.killpg(first.pid, signal.SIGINT)
    said = first.communicate(timeout=900)[0]
    assert first.returncode == CONTINUE and said.rstrip().endswith("rerun the same command to resume")
    assert "Traceback" not in said and "[2/7] base:" not in said

    again = start()
    said = again.communicate(timeout=900)[0]
    assert again.returncode == 0, said
    assert "[1/7] world: done before" in said and "[7/7] report: " in said
    steps = [json.loads(line)["step"] for line in metrics.read_text().splitlines()]
    assert steps == list(range(80))  # none lost, none twice
    assert said.count("test split, mean") == 1 and "longest path is" in said and "minutes" in said  # by one rank
    assert (tmp_path / "r" / "report" / "report.html").is_file()
    curves = {
        name for file in tmp_path.glob("r/*/metrics.jsonl") for row in map(json.loads, file.open()) for name in row
    }
    assert len(curves) > 60 and {name for name in curves if meaning(name) is None} == {"step"}
    assert list(tmp_path.glob("r/eval_stage1/tensorboard/events*"))


def test_a_wrong_setting_costs_one_line(start):
    done = start("seeed=1")
    assert done.communicate(timeout=900)[0].splitlines() == ["dccot: unknown key seeed; did you mean 'seed'?"]
    assert done.returncode == 2
