"""Help, configurations, plans, the page of rollouts and rejections do without what takes seconds to import."""

import json
import subprocess
import sys
from pathlib import Path

from dccot.lab.worlds import bigram

HEAVY = ("torch", "transformers", "vllm", "matplotlib", "math_verify", "fastapi", "triton")
COMMANDS = [
    *([name, "--help"] for name in ("rl", "sft", "pipeline", "eval", "solve", "view", "report", "export", "rollout")),
    *([name, "--help"] for name in ("plan", "demo", "data")),
    ["plan", "7B", "--gpus", "8"],
    ["rl", "configs/rl/stage1.yaml", "model.path=x", "data.train=y", "--print-config"],
    ["rl", "configs/rl/stage1.yaml", "lr=1"],
    ["rl", "configs/rl/stage1.yaml", "model.path=runs/none", "data.train=none.jsonl"],
    ["sft", "configs/sft.yaml", "model.path=runs/none", "data.train=none.jsonl"],
    ["pipeline", "configs/paper.yaml", "model=runs/none", "train=x", "--check"],
    ["pipeline", "configs/mini/demo.yaml", "--check"],
    ["eval", "runs/none", "--bench", "aime24"],
    ["solve", "runs/none", "What?"],
    ["model", "check", "runs/none"],
    ["rehearse", "--help"],
    ["export", "runs/none", "exported"],
    ["view", "rollouts.jsonl"],
    ["view", "rollouts.jsonl", "--model", "model", "--out", "tokens.html"],
]
PROGRAM = """
import contextlib, io, json, sys
from dccot.cli import main
commands, heavy = map(json.loads, sys.argv[1:])
found = {}
for words in commands:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        with contextlib.suppress(SystemExit):
            main(words)
    found[" ".join(words)] = [name for name in heavy if name in sys.modules]
print(json.dumps(found))
"""


def test_help_configurations_plans_pages_and_rejections_import_nothing_heavy(tmp_path):
    rollouts = Path(__file__).parents[1] / "support/rollouts_of_rounds.jsonl"
    (tmp_path / "rollouts.jsonl").write_bytes(rollouts.read_bytes())
    bigram.save(tmp_path / "model")
    command = [sys.executable, "-c", PROGRAM, json.dumps(COMMANDS), json.dumps(HEAVY)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(found) == len(COMMANDS) and not any(found.values()), found
    assert (tmp_path / "rollouts.html").is_file()
