"""`dccot gpu-check` (= `make gpu-check`): checks a machine with GPUs; one report to paste into an issue.

    dccot gpu-check                      about 15 minutes at most on one GPU; more checks with two
    dccot gpu-check --model MODEL        the engine's checks on a real model instead of a tiny one
    dccot gpu-check attention lm_head    some of the checks
    dccot gpu-check --device cpu         the part that runs without a GPU

Each check runs in its own process (worker.py) with a time limit, so that a failure, crash or hang never hides the next.
On a CPU checks share a process until one fails. A check that cannot run here is "not run", never passed. Exits with 1
if a check failed.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dccot import __version__
from dccot.core.command import run_cleanly
from dccot.core.config import one_of
from dccot.core.files import write_atomic

KERNELS, ENGINE = "dccot.lab.gpu_check.kernels", "dccot.lab.gpu_check.engine"
CPU_PATIENCE = 5  # times the limit
VERDICTS = ("passed", "failed", "not run")


@dataclass(frozen=True)
class Check:
    name: str
    module: str
    what: str
    limit: int  # seconds on a GPU
    ranks: int = 1
    interpreted: bool = False  # on a CPU it needs Triton's interpreter
    cuda_only: bool = False
    diagnosis: bool = False  # also runs where no GPU is found, and says why

    def obstacle(self, gpus: int, device: str) -> str:
        """Why it cannot run here, if it cannot."""
        if device == "cpu":
            return "no GPU" if self.cuda_only else ""
        return f"needs {self.ranks} GPUs, found {gpus}" if gpus < self.ranks and not self.diagnosis else ""


ORACLE = "against the fp64 oracle, and twice the same bits"
CHECKS = (
    Check("environment", KERNELS, "driver, CUDA, versions, which GPUs reach each other", 30, diagnosis=True),
    Check("attention", KERNELS, f"attention kernels {ORACLE}", 180, interpreted=True),
    Check("lm_head", KERNELS, f"LM head {ORACLE}", 40, interpreted=True),
    Check("engine_start", ENGINE, "the engine starts and samples parallel responses", 100),
    Check("greedy_equality", ENGINE, "greedy ids equal transformers', fp32", 75),
    Check("in_place_sync", ENGINE, "weights streamed in place: greedy ids equal transformers' with them", 75),
    Check("sleep_and_wake", ENGINE, "sleep → train → wake → sync → the same ids", 75, cuda_only=True),
    Check("logprob_gap", ENGINE, "log-probs of the bf16 engine and the bf16 trainer", 75),
    Check("training_step", ENGINE, "FSDP step on this device equals the plain step on the CPU", 50),
    Check("mini_rl", ENGINE, "two steps of RL on a miniature task", 90),
    Check("benchmarks", KERNELS, "kernels against SDPA, FlexAttention, FlashAttention", 110, cuda_only=True),
    Check("training_step_of_two", ENGINE, "the same step on two ranks", 100, ranks=2),
    Check("tensor_parallel", ENGINE, "one engine over two ranks: greedy ids equal transformers'", 150, ranks=2),
)


@dataclass
class Result:
    check: Check
    verdict: str  # one of VERDICTS
    found: str = ""  # first line: summary
    seconds: float = 0.0


def processes(checks: Sequence[Check], device: str) -> list[list[Check]]:
    """Which checks share a process: none on a GPU; on a CPU those with the same startup."""
    if device == "cuda":
        return [[check] for check in checks]
    groups: dict[tuple[int, bool], list[Check]] = {}
    for check in checks:
        groups.setdefault((check.ranks, check.interpreted), []).append(check)
    return list(groups.values())


def run_together(checks: Sequence[Check], folder: Path, device: str, model: str) -> list[Result]:
    """Every check's result; a new process for the rest whenever one ends early."""
    results: list[Result] = []
    left = list(checks)
    while left:
        for file in [file for check in left for file in reports(check, folder)]:
            file.unlink()
        ended = run_process(left, folder, device, model)
        failed = False
        while left and not failed and (files := reports(left[0], folder)):
            said = [json.loads(file.read_text()) for file in files]
            found = min(
                said, key=lambda each: ("error" not in each, each["seconds"])
            )  # the first failure causes others
            failed = "error" in found
            text = f"{found['error']}\n{found['trace']}" if failed else found["found"]
            results.append(Result(left.pop(0), "failed" if failed else "passed", text, found["seconds"]))
        if left and not failed:  # it left no result: a crash or a hang
            results.append(Result(left.pop(0), "failed", ended))
    return results


def reports(check: Check, folder: Path) -> list[Path]:
    """A check's results: rank 0's, and those of other ranks that failed."""
    return sorted(folder.glob(f"{check.name}.json")) + sorted(folder.glob(f"{check.name}.rank*.json"))


def run_process(checks: Sequence[Check], folder: Path, device: str, model: str) -> str:
    """Start a worker, wait, kill it at its time limit; returns how it ended, with the last lines it printed."""
    ranks, limit = checks[0].ranks, sum(check.limit for check in checks) * (1 if device == "cuda" else CPU_PATIENCE)
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"] if ranks > 1 else []
    names = [f"{check.module}:{check.name}" for check in checks]
    worker = ["-m", "dccot.lab.gpu_check.worker", str(folder), device, model, str(limit), *names]
    command, log, env = [sys.executable, *launcher, *worker], folder / f"{checks[0].name}.log", dict(os.environ)
    if device == "cpu":
        env |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        env |= {"TRITON_INTERPRET": "1"} if checks[0].interpreted else {}
    with open(log, "wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=env, start_new_session=True)
        try:
            ended = f"its process ended with code {process.wait(limit)}"
        except subprocess.TimeoutExpired:
            ended = f"not finished after {limit} s"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    return "\n".join([ended, *log.read_text(errors="replace").splitlines()[-60:]])


def page(results: Sequence[Result], device: str, model: str, seconds: float) -> str:
    """Markdown: a table, then the details of each check."""
    counts = Counter(result.verdict for result in results)
    what = f"dccot {__version__}{_commit()}, device {device}, model {model or 'a tiny one'}"
    summary = ", ".join(f"{counts[verdict]} {verdict}" for verdict in VERDICTS)
    head = f"{what}, {time.strftime('%Y-%m-%d %H:%M %Z')}, {seconds:.0f} s: {summary}"
    lines = ["# GPU check", "", head, "", "| check | result | s | found |", "|---|---|---|---|"]
    for result in results:
        summary = (result.found.splitlines() or [""])[0].replace("|", "\\|")[:300]
        took = f"{result.seconds:.0f}" if result.verdict != "not run" else ""
        shown = f"**{result.verdict}**" if result.verdict == "failed" else result.verdict
        lines.append(f"| {result.check.what} (`{result.check.name}`) | {shown} | {took} | {summary} |")
    for result in results:
        if "\n" in result.found:
            lines += ["", f"## {result.check.name}: {result.verdict}", "", "```text", *result.found.splitlines(), "```"]
    return "\n".join(lines) + "\n"


def _commit() -> str:
    here = Path(__file__).resolve().parent
    done = subprocess.run(["git", "-C", str(here), "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    return f" at {done.stdout.strip()}" if done.returncode == 0 else ""


def count_gpus() -> int:
    """In a separate process: this one must not hold a GPU during the checks."""
    count = "import torch; print(torch.cuda.device_count() if torch.cuda.is_available() else 0)"
    done = subprocess.run([sys.executable, "-c", count], capture_output=True, text=True)
    return int(done.stdout.split()[-1]) if done.returncode == 0 else 0


def check_all(checks: Sequence[Check], folder: Path, device: str, model: str) -> list[Result]:
    folder.mkdir(parents=True, exist_ok=True)
    gpus, began = count_gpus() if device == "cuda" else 0, time.perf_counter()
    results = {check.name: Result(check, "not run", f"not run: {check.obstacle(gpus, device)}") for check in checks}

    def report() -> None:
        write_atomic(folder / "report.md", page(list(results.values()), device, model, time.perf_counter() - began))

    report()
    for group in processes([check for check in checks if not check.obstacle(gpus, device)], device):
        print(f"[gpu-check] {', '.join(check.name for check in group)} …", flush=True)
        for result in run_together(group, folder, device, model):
            results[result.check.name] = result
            found = result.found.splitlines()[0][:160]
            print(f"[gpu-check] {result.check.name}: {result.verdict}, {result.seconds:.0f} s: {found}", flush=True)
        report()
    return list(results.values())


def main(argv: Sequence[str] | None = None) -> int:
    known = {check.name: check for check in CHECKS}
    parser = argparse.ArgumentParser(
        description="Check a machine with GPUs: kernels, engine, training, each on its own; ends in one page.",
        epilog="example: dccot gpu-check --model runs/sft/latest/hf",
    )
    parser.add_argument("checks", nargs="*", metavar="CHECK", help=f"all, or some of {', '.join(known)}")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--model", default="", help="a model folder for the engine's checks (default: a tiny one)")
    where = "for the report and logs (default: %(default)s)"
    parser.add_argument("--output", type=Path, default=Path("runs/gpu-check"), help=where)
    arguments = parser.parse_args(argv)
    results: list[Result] = []

    def work() -> None:
        for name in arguments.checks:
            one_of(name, known, "CHECK")
        chosen = [known[name] for name in arguments.checks] or list(CHECKS)
        results.extend(check_all(chosen, arguments.output.resolve(), arguments.device, arguments.model))
        print(f"[gpu-check] the page to paste into an issue: {arguments.output / 'report.md'}")

    return run_cleanly(work) or int(any(result.verdict == "failed" for result in results))


if __name__ == "__main__":
    sys.exit(main())
