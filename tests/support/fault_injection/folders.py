"""What a run's folder and a recipe's results are worth: deleted, littered, flipped, changed, bombed, and with the clock
set back.

Each trial is done with the commands that people type, and looked at from outside. Like those of faults.py, every
function takes a folder of its own and what to start long commands with.
"""

from __future__ import annotations

import json
import pickle
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from transformers import AutoTokenizer

from dccot.core.files import read_jsonl, write_jsonl_atomic
from dccot.core.run import Checkpoint
from dccot.lab.worlds.exact_task import make_task
from tests.support.fault_injection.compare import series
from tests.support.fault_injection.faults import Trial, run
from tests.support.fault_injection.sft_task import make_sft_task

FAKETIME = [f"/usr/lib/{machine}-linux-gnu/faketime/libfaketime.so.1" for machine in ("x86_64", "aarch64")]
AN_HOUR_AGO = """
import sys, time
now, time.time = time.time, lambda: now() - 3600
from dccot.train.sft import main
sys.exit(main(sys.argv[1:]))
"""
STRAYS = ("step_000001_keep", "step_000002.bak", "step_backup", "notes")
RECIPE = """
name: r
output: OUT
common: {sft: {steps: 2, batch: {examples: 2}, threads: 1, sharding: {compute_dtype: float32}}}
prepare:
  world: {run: "dccot.lab.worlds.stages:arithmetic", set: {base_examples: 8, train: 4, validation: 2, test: 2,
    larger: 1, model: {hidden_size: 32, intermediate_size: 32, num_hidden_layers: 1, num_attention_heads: 1}}}
stages:
  sft: {run: sft, config: mini/base.yaml, start: world/init, set: {data.train: "{run}/world/base.jsonl"}}
"""


def newest(run_folder: Path) -> Path:
    return run_folder / "checkpoints" / (run_folder / "latest").read_text().strip()


def flip_a_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def sft(out: Path, name: str, steps: int, under: Sequence[str], *settings: str, log: str = "") -> tuple[int, str]:
    command = ["-m", "dccot.train.sft", str(out / "sft.yaml"), f"name={name}", f"steps={steps}", *settings]
    return run(command, under, out / "logs" / f"{log or name}.log")


def deleted_source(out: Path, under: Sequence[str]) -> list[Trial]:
    """The model that the run started from is deleted while it trains: later checkpoints are whole, tokenizer
    included.
    """
    source = shutil.copytree(out / "model", out / "source")
    settings = ["name=orphan", "steps=40", f"model.path={source}"]
    command = [*under, sys.executable, "-m", "dccot.train.sft", str(out / "sft.yaml"), *settings]
    with (out / "orphan.log").open("w") as log:
        training = subprocess.Popen(command, stdout=log, stderr=log)
    while training.poll() is None and not (out / "orphan" / "latest").exists():
        time.sleep(0.02)
    gone_at = newest(out / "orphan").name
    shutil.rmtree(source)
    code, last = training.wait(), newest(out / "orphan")
    saved, given = (folder / "tokenizer.json" for folder in (last / "hf", out / "model"))
    same = code == 0 and saved.read_bytes() == given.read_bytes()
    good = same and Checkpoint(last).damage() is None and len(AutoTokenizer.from_pretrained(last / "hf")) > 0
    seen = f"deleted at {gone_at}; {last.name} is whole, with its tokenizer"
    return [Trial.once("source folder deleted", seen, good, f"exit code {code}, {last}")]


def stray_folders(out: Path, under: Sequence[str]) -> list[Trial]:
    """People's folders beside the checkpoints: neither read nor deleted, and saving and resuming go on."""
    sft(out, "littered", 2, under)
    checkpoints = out / "littered" / "checkpoints"
    for stray in STRAYS:
        shutil.copytree(newest(out / "littered") / "hf", checkpoints / stray)
    code, said = sft(out, "littered", 6, under, log="littered_again")
    left = [stray for stray in STRAYS if (checkpoints / stray / "config.json").is_file()]
    went_on = code == 0 and "was not written" not in said and newest(out / "littered").name == "step_000006"
    good = went_on and len(left) == len(STRAYS)
    problems = [] if good else [f"exit code {code}, left {left}: {said[-300:]}"]
    seen = "not read, not deleted; saving and resuming work"
    return [Trial("stray folder beside checkpoints", len(STRAYS), len(left), seen, problems)]


def flipped_bit(out: Path, under: Sequence[str]) -> list[Trial]:
    """Whoever would read the weights refuses them: evaluation, the next stage, rollouts, solve, export."""
    sft(out, "flipped", 2, under)
    flip_a_bit(newest(out / "flipped") / "hf" / "model.safetensors")
    (out / "problems.jsonl").write_text('{"id": "1", "question": "What is 1 + 1?", "gold": "2"}\n')
    damaged = str(out / "flipped")
    commands = {
        "eval": ["eval", damaged, "--problems", str(out / "problems.jsonl"), "--out", str(out / "evaluation")],
        "the next stage": ["sft", str(out / "sft.yaml"), "name=next", f"model.path={damaged}"],
        "rollout": ["rollout", damaged, str(out / "problems.jsonl"), "--out", str(out / "rollouts.jsonl")],
        "solve": ["solve", damaged, "What is 1 + 1?"],
        "export": ["export", damaged, str(out / "exported")],
    }
    problems = []
    for name, command in commands.items():
        code, said = run(["-m", "dccot.cli", *command], under, out / "logs" / f"flipped_{command[0]}.log")
        if code != 2 or "is damaged (the checksum of hf/model.safetensors does not match the manifest)" not in said:
            problems.append(f"{name}: exit code {code}: {said[-300:]}")
    seen = f"met by {', '.join(commands)}: refused, file named"
    return [Trial.each("flipped bit in weights", seen, len(commands), problems)]


def changed_data(out: Path, under: Sequence[str]) -> list[Trial]:
    """One character of one row differs when a run is continued: refused by SFT and by RL, which starts no engine for
    it.
    """
    sft(out, "changed", 2, under)
    rows = [row for _, row in read_jsonl(out / "train.jsonl")]
    rows[2]["question"] += "?"
    write_jsonl_atomic(out / "changed.jsonl", rows)
    problems = []
    code, said = sft(out, "changed", 4, under, f"data.train={out / 'changed.jsonl'}", log="changed_again")
    if code != 2 or "was trained on other data: row 3 " not in said:
        problems.append(f"SFT: exit code {code}: {said[-300:]}")
    rl = ["-m", "dccot.train.rl", str(make_task(out / "rl")), "name=rl", "steps=1"]
    begun, said = run(rl, under, out / "logs" / "rl.log")
    asked = (out / "rl" / "problems.jsonl").read_text()
    (out / "rl" / "problems.jsonl").write_text(asked.replace("case 6.", "case six."))
    code, again = run([*rl, "steps=2"], under, out / "logs" / "rl_again.log", VLLM_LOGGING_LEVEL="INFO")
    if begun or code != 2 or "was trained on other data: row 7 'p6' has changed" not in again or "LLM engine" in again:
        problems.append(f"RL: exit codes {begun}, {code}: {said[-200:]} {again[-300:]}")
    return [
        Trial.each("data changed before continuing", "SFT and RL: the row named, before an engine starts", 2, problems)
    ]


def changed_recipe(out: Path, under: Sequence[str]) -> list[Trial]:
    """A finished recipe given again with other settings, data or weights is refused with nothing changed; as it was, it
    is done.
    """
    recipe, folder = out / "recipe.yaml", out / "r"
    recipe.write_text(RECIPE.replace("OUT", str(out)))
    command, problems = ["-m", "dccot.pipeline", str(recipe)], []
    code, said = run(command, under, out / "logs" / "recipe.log")
    if code:
        return [Trial.once("recipe changed after it was finished", "", False, f"exit code {code}: {said[-300:]}")]
    data, weights = folder / "world" / "base.jsonl", folder / "world" / "init" / "model.safetensors"
    cases = {
        "another seed": (["seed=3"], None, "seed was"),
        "other steps": (["sft.steps=3"], None, "steps was 2 when the stage was finished and is 3 now"),
        "other data": ([], data, "data.train has changed"),
        "other weights": ([], weights, "model.path has changed since the stage was finished (model.safetensors)"),
    }
    before = (folder / "recipe.yaml").read_bytes()
    for number, (name, (settings, file, expected)) in enumerate(cases.items()):
        whole = file.read_bytes() if file else b""
        if file:
            file.write_bytes(whole[:-2] + bytes([whole[-2] ^ 1]) + whole[-1:])
        code, said = run([*command, *settings], under, out / "logs" / f"recipe_{number}.log")
        if file:
            file.write_bytes(whole)
        if code != 2 or expected not in said or (folder / "recipe.yaml").read_bytes() != before:
            problems.append(f"{name}: exit code {code}: {said[-300:]}")
    code, said = run(command, under, out / "logs" / "recipe_same.log")
    if code or said.count("done before") != 2:
        problems.append(f"as it was: exit code {code}: {said[-300:]}")
    seen = f"{', '.join(cases)}: refused, named, recipe.yaml as it was; the same recipe is passed over"
    return [Trial.each("recipe changed after it was finished", seen, len(cases) + 1, problems)]


def clock_set_back(out: Path, under: Sequence[str]) -> list[Trial]:
    """Continued an hour before it began: TensorBoard shows every step once, as metrics.jsonl has it."""
    sft(out, "clock", 3, under)
    library = next((path for path in FAKETIME if Path(path).exists()), None)
    arguments = [str(out / "sft.yaml"), "name=clock", "steps=6"]
    faked = {"LD_PRELOAD": library, "FAKETIME": "-1h", "FAKETIME_DONT_FAKE_MONOTONIC": "1"} if library else {}
    command = ["-m", "dccot.train.sft", *arguments] if library else ["-c", AN_HOUR_AGO, *arguments]
    code, said = run(command, under, out / "logs" / "clock_again.log", **faked)
    rows = [row for _, row in read_jsonl(out / "clock" / "metrics.jsonl")]
    loss = series(out / "clock").get("policy/loss", [])
    good = code == 0 and [row["step"] for row in rows] == list(range(6)) == [step for step, _ in loss]
    how = "the process's clock (libfaketime)" if library else "Python's clock"
    seen = f"{how}; TensorBoard shows both lives, every step once"
    otherwise = f"exit code {code}, TensorBoard has steps {[step for step, _ in loss]}: {said[-300:]}"
    return [Trial.once("clock set back an hour", seen, good, otherwise)]


class Bomb:
    """Unpickled, it makes a file."""

    def __init__(self, crater: Path):
        self.crater = crater

    def __reduce__(self):
        return Path.touch, (self.crater,)


def pickle_bomb(out: Path, under: Sequence[str]) -> list[Trial]:
    """A run folder from elsewhere, its manifest in order, with a bomb in torch's metadata: refused, and nothing went
    off.
    """
    sft(out, "bombed", 2, under)
    crater = out / "crater"
    for step in (out / "bombed" / "checkpoints").glob("step_*"):
        (step / "dcp" / ".metadata").write_bytes(pickle.dumps(Bomb(crater)))
        (step / "manifest.json").unlink()
        Checkpoint(step).write_manifest()
    code, said = sft(out, "bombed", 4, under, log="bombed_again")
    good = code == 2 and ".metadata is refused" in said and not crater.exists()
    otherwise = f"exit code {code}, crater {crater.exists()}: {said[-300:]}"
    return [Trial.once("pickle bomb in a run folder", "refused in one line, nothing was executed", good, otherwise)]


def damaged_files(out: Path, under: Sequence[str]) -> list[Trial]:
    """A run of two ranks whose small files were damaged is continued: one line for all ranks, with the remedy."""
    two = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "-m", "dccot.train.sft"]
    command = [*two, str(out / "sft.yaml"), "name=damaged"]
    begun, said = run([*command, "steps=1"], under, out / "logs" / "damaged.log")
    if begun:
        return [Trial.once("damaged file in a run folder", "", False, f"exit code {begun}: {said[-300:]}")]
    cases = {
        "config.yaml": (b"seed: \xff", "copy the configuration from provenance.json"),
        "provenance.json": (b'{"starts": [', "delete it: the next start writes a new one"),
        "metrics.jsonl": (None, "metrics.jsonl is a folder; move it away"),
    }
    problems = []
    for name, (content, expected) in cases.items():
        file, kept = out / "damaged" / name, out / "damaged" / f"{name}.kept"
        file.rename(kept)
        file.mkdir() if content is None else file.write_bytes(content)
        _, said = run([*command, "steps=2"], under, out / "logs" / f"damaged_{name}.log")
        lines = [line for line in said.splitlines() if line.startswith("dccot: ")]
        if len(lines) != 1 or expected not in lines[0] or "[rank" in said:
            problems.append(f"{name}: {said[:500]}")
        file.rmdir() if content is None else file.unlink()
        kept.rename(file)
    code, said = run([*command, "steps=2"], under, out / "logs" / "damaged_again.log")
    if code:
        problems.append(f"put back: exit code {code}: {said[-300:]}")
    seen = f"{', '.join(cases)}: one line for both ranks, with the remedy; put back, the run continues"
    return [Trial.each("damaged file in a run folder", seen, len(cases) + 1, problems)]


def few_descriptors(out: Path, under: Sequence[str]) -> list[Trial]:
    rl = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "-m", "dccot.train.rl"]
    config = make_task(out / "few")
    limited = ["-c", "import os, resource, sys; resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64)); "
               "os.execv(sys.argv[1], sys.argv[1:])"]  # fmt: skip
    _, said = run([*limited, *rl, str(config), "name=few", "steps=1"], under, out / "logs" / "few.log")
    lines = [line for line in said.splitlines() if line.startswith("dccot: ")]
    good = any("not enough file descriptors (ulimit -n is 64)" in line for line in lines) and "[rank0]: Tra" not in said
    return [Trial.once("64 descriptors for two ranks", "the limit named in one line, no traceback", good, said[-500:])]


TRIALS = (
    damaged_files,
    few_descriptors,
    deleted_source,
    stray_folders,
    flipped_bit,
    changed_data,
    changed_recipe,
    clock_set_back,
    pickle_bomb,
)


def folders(out: Path, under: Sequence[str]) -> list[Trial]:
    out.mkdir(parents=True)
    make_sft_task(out)
    trials: list[Trial] = []
    for trial in TRIALS:
        try:
            trials += trial(out, under)
        except (OSError, ValueError, json.JSONDecodeError) as error:  # what a failed command left out
            trials.append(Trial.once(trial.__name__.replace("_", " "), "", False, f"{type(error).__name__}: {error}"))
    return trials
