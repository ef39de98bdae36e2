"""`dccot gpu-check` (= `make gpu-check`): checks a machine with GPUs; one report to paste into an issue.

    dccot gpu-check                                         about 15 minutes at most on one GPU; more checks with two
    dccot gpu-check --model MODEL                           the engine's checks on a real model instead of a tiny one
    dccot gpu-check attention lm_head                       some of the checks
    dccot gpu-check --device cpu                            the part that runs without a GPU

Each check runs in its own process (gpu_worker.py) with a time limit, so that a failure, crash or hang never hides the
next. On a CPU checks share a process until one fails. A check that cannot run here is "not run", never passed. Exits
with 1 if a check failed.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dccot import __version__
from dccot.core.command import run_cleanly
from dccot.core.config import ConfigError
from dccot.core.files import write_atomic

KERNELS, ENGINE = "dccot.lab.gpu_check.kernels", "dccot.lab.gpu_check.engine"
CPU_PATIENCE = 5  # times the limit


@dataclass(frozen=True)
class Check:
    name: str
    module: str
    what: str
    limit: int  # seconds on a GPU
    ranks: int = 1
    interpreted: bool = False  # on a CPU it needs Triton's interpreter
    cuda_only: bool = False
    diagnosis: bool = False  # runs where no GPU is found, too, and says why

    def obstacle(self, gpus: int, device: str) -> str:
        """Why it cannot run here, if it cannot."""
        if device == "cpu":
            return "no GPU" if self.cuda_only else ""
        return f"needs {self.ranks} GPUs, found {gpus}" if gpus < self.ranks and not self.diagnosis else ""


CHECKS = (
    Check("environment", KERNELS, "driver, CUDA, versions, which GPUs reach each other", 30, diagnosis=True),
    Check(
        "attention",
        KERNELS,
        "attention kernels against the fp64 oracle, and twice the same bits",
        180,
        interpreted=True,
    ),
    Check("lm_head", KERNELS, "LM head against the fp64 oracle, and twice the same bits", 40, interpreted=True),
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
    verdict: str  # "passed", "failed" or "not run"
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
        for check in left:
            for file in reports(check, folder):
                file.unlink()
        ended = run_process(left, folder, device, model)
        while left and (files := reports(left[0], folder)):
            said = [json.loads(file.read_text()) for file in files]
            # the first failure, which causes the others
            found = min(said, key=lambda each: ("error" not in each, each["seconds"]))
            verdict, text = (
                ("failed", f"{found['error']}\n{found['trace']}") if "error" in found else ("passed", found["found"])
            )
            results.append(Result(left.pop(0), verdict, text, found["seconds"]))
            if verdict == "failed":
                break
        else:
            if left:  # it left no result: a crash or a hang
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
    command = [
        sys.executable,
        *launcher,
        "-m",
        "dccot.lab.gpu_check.worker",
        str(folder),
        device,
        model,
        str(limit),
        *names,
    ]
    log = folder / f"{checks[0].name}.log"
    environment = dict(os.environ)
    if device == "cpu":
        environment |= {
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
            **({"TRITON_INTERPRET": "1"} if checks[0].interpreted else {}),
        }
    with open(log, "wb") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
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
    counts = {
        verdict: sum(result.verdict == verdict for result in results) for verdict in ("passed", "failed", "not run")
    }
    lines = [
        "# GPU check",
        "",
        f"dccot {__version__}{_commit()}, device {device}, model {model or 'a tiny one'}, {time.strftime('%Y-%m-%d %H:%M %Z')}, "
        f"{seconds:.0f} s: " + ", ".join(f"{count} {verdict}" for verdict, count in counts.items()),
        "",
        "| check | result | s | found |",
        "|---|---|---|---|",
    ]
    for result in results:
        summary = (result.found.splitlines() or [""])[0].replace("|", "\\|")[:300]
        took = f"{result.seconds:.0f}" if result.verdict != "not run" else ""
        lines.append(f"| {result.check.what} (`{result.check.name}`) | {_mark(result.verdict)} | {took} | {summary} |")
    for result in results:
        if "\n" in result.found:
            lines += ["", f"## {result.check.name}: {result.verdict}", "", "```text", *result.found.splitlines(), "```"]
    return "\n".join(lines) + "\n"


def _mark(verdict: str) -> str:
    return f"**{verdict}**" if verdict == "failed" else verdict


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
    for group in processes([check for check in checks if not check.obstacle(gpus, device)], device):
        print(f"[gpu-check] {', '.join(check.name for check in group)} …", flush=True)
        for result in run_together(group, folder, device, model):
            results[result.check.name] = result
            print(
                f"[gpu-check] {result.check.name}: {result.verdict}, {result.seconds:.0f} s: {result.found.splitlines()[0][:160]}",
                flush=True,
            )
            write_atomic(folder / "report.md", page(list(results.values()), device, model, time.perf_counter() - began))
    write_atomic(folder / "report.md", page(list(results.values()), device, model, time.perf_counter() - began))
    return list(results.values())


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description="Check a machine with GPUs: kernels, engine, training, each on its own; ends in one page.",
        epilog="example: dccot gpu-check --model runs/sft/latest/hf",
    )
    parser.add_argument(
        "checks", nargs="*", metavar="CHECK", help=f"all, or some of {', '.join(check.name for check in CHECKS)}"
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--model", default="", help="a model folder for the engine's checks (default: a tiny one is made)"
    )
    parser.add_argument(
        "--output", type=Path, default=Path("runs/gpu-check"), help="for the report and logs (default: %(default)s)"
    )
    arguments = parser.parse_args(argv)
    code = 0

    def work() -> None:
        nonlocal code
        known = {check.name: check for check in CHECKS}
        if unknown := [name for name in arguments.checks if name not in known]:
            raise ConfigError(f"no check {unknown[0]!r}; there are {', '.join(known)}")
        chosen = [known[name] for name in arguments.checks] or list(CHECKS)
        results = check_all(chosen, arguments.output.resolve(), arguments.device, arguments.model)
        print(f"[gpu-check] the page to paste into an issue: {arguments.output / 'report.md'}")
        code = int(any(result.verdict == "failed" for result in results))

    return run_cleanly(work) or code


if __name__ == "__main__":
    sys.exit(main())
