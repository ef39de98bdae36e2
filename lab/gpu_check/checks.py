"""`dccot gpu-check` (= `make gpu-check`): checks a machine with GPUs; one report to paste into an issue.

    dccot gpu-check                      about 20 minutes on one GPU; more checks with two
    dccot gpu-check --model MODEL        the engine's checks on a real model instead of a tiny one
    dccot gpu-check attention lm_head    some of the checks
    dccot gpu-check --device cpu         the part that runs without a GPU

Each check runs in its own process (worker.py), so that a failure, crash or hang never hides the next. It may take many
times as long as expected, since a cold start compiles; meanwhile the console shows the last line of its log. On a CPU
checks share a process until one fails. A check that cannot run here is "not run", never passed.

On a GPU the engine's checks run with both of vLLM's model runners. If all of them pass with one only, training uses
that one from then on (`engine.runner: auto`). The report says what a failure probably means and which switch to try,
and ends with one line to paste. Exits with 1 if a check failed.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dccot import __version__
from dccot.core.command import Parser, run_cleanly
from dccot.core.config import one_of
from dccot.core.files import write_atomic

KERNELS, ENGINE = "dccot.lab.gpu_check.kernels", "dccot.lab.gpu_check.engine"
PATIENCE = 8  # times the expected seconds
HEARTBEAT_SECONDS = 30
RUNNERS = {"v1": "0", "v2": "1"}  # value of vLLM's switch
SWITCH = "VLLM_USE_V2_MODEL_RUNNER"
VERDICTS = ("passed", "failed", "not run")


@dataclass(frozen=True)
class Check:
    name: str
    module: str
    what: str
    expected: int  # seconds on a GPU, compiled code in its caches
    ranks: int = 1
    interpreted: bool = False  # on a CPU it needs Triton's interpreter
    cuda_only: bool = False
    diagnosis: bool = False  # also runs where no GPU is found, and says why
    engine: bool = False  # depends on vLLM's model runner
    runner: str = ""

    @property
    def label(self) -> str:
        return f"{self.name}-{self.runner}" if self.runner else self.name

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
    Check("engine_start", ENGINE, "the engine starts and samples parallel responses", 100, engine=True),
    Check("greedy_equality", ENGINE, "greedy ids equal transformers', fp32", 75, engine=True),
    Check(
        "in_place_sync", ENGINE, "weights streamed in place: greedy ids equal transformers' with them", 75, engine=True
    ),
    Check("sleep_and_wake", ENGINE, "sleep → train → wake → sync → the same ids", 75, cuda_only=True, engine=True),
    Check("logprob_gap", ENGINE, "log-probs of the bf16 engine, the bf16 trainer and fp32", 75, engine=True),
    Check("training_step", ENGINE, "FSDP step on this device equals the plain step on the CPU", 50),
    Check("mini_rl", ENGINE, "two steps of RL on a miniature task", 90, engine=True),
    Check("benchmarks", KERNELS, "kernels against SDPA, FlexAttention, FlashAttention", 110, cuda_only=True),
    Check("training_step_of_two", ENGINE, "the same step on two ranks", 100, ranks=2),
    Check("tensor_parallel", ENGINE, "one engine over two ranks: greedy ids equal transformers'", 150, 2, engine=True),
)
ADVICE = {  # check → what a failure probably means, and what to try
    "environment": ("driver, CUDA and torch do not fit together", "reinstall torch for the driver's CUDA (nvidia-smi)"),
    "attention": ("a tile that this GPU's compiler handles wrongly", "DCCOT_TUNE=0, then sharding.attention=flash"),
    "lm_head": ("the Triton compiler of this version", "another triton; training does not run without this kernel"),
    "engine_start": ("vLLM's compilation, CUDA graphs or memory", "engine.compile=false, then engine.gpu_memory=0.6"),
    "greedy_equality": (
        "an attention backend or runner that rounds too much",
        "engine.runner=v1, engine.compile=false",
    ),
    "in_place_sync": ("weights repacked at loading and not again at a sync", "engine.runner=v1, engine.compile=false"),
    "sleep_and_wake": ("memory that the sleeping pool does not restore", "engine.sleep_level=1 (2 if it was 1)"),
    "logprob_gap": ("the engine computes in lower precision than bf16", "engine.runner=v1, engine.compile=false"),
    "training_step": ("TF32 products or a broken collective", "NCCL_P2P_DISABLE=1, NVIDIA_TF32_OVERRIDE=0"),
    "mini_rl": ("see the engine's checks above it", "engine.runner=v1, engine.sleep_level=2, engine.compile=false"),
    "benchmarks": ("a kernel that does not compile at full size", "DCCOT_TUNE=0, then sharding.attention=flash"),
    "training_step_of_two": ("NCCL between the GPUs", "NCCL_P2P_DISABLE=1, then NCCL_DEBUG=INFO"),
    "tensor_parallel": ("custom all-reduce or NCCL inside the engine", "engine.compile=false, NCCL_P2P_DISABLE=1"),
}


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
    groups: dict[tuple[int, bool], list[Check]] = {}  # there is one runner on a CPU
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
    return sorted(folder.glob(f"{check.label}.json")) + sorted(folder.glob(f"{check.label}.rank*.json"))


def run_process(checks: Sequence[Check], folder: Path, device: str, model: str) -> str:
    """Start a worker, wait, kill it when all patience is gone; returns how it ended, with the last lines it printed."""
    ranks, limit = checks[0].ranks, sum(check.expected for check in checks) * PATIENCE
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"] if ranks > 1 else []
    names = [f"{check.module}:{check.name}:{check.label}" for check in checks]
    worker = ["-m", "dccot.lab.gpu_check.worker", str(folder), device, model, str(limit), *names]
    command, log, env = [sys.executable, *launcher, *worker], folder / f"{checks[0].label}.log", dict(os.environ)
    if checks[0].runner:
        env[SWITCH] = RUNNERS[checks[0].runner]
    if device == "cpu":
        env |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        env |= {"TRITON_INTERPRET": "1"} if checks[0].interpreted else {}
    with open(log, "wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=env, start_new_session=True)
        try:
            ended = wait(process, limit, log)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    return "\n".join([ended, *log.read_text(errors="replace").splitlines()[-60:]])


def wait(process: subprocess.Popen, limit: float, log: Path) -> str:
    """How it ended, or that it did not; the console shows that it is alive."""
    began = time.monotonic()
    while (spent := time.monotonic() - began) < limit:
        try:
            return f"its process ended with code {process.wait(min(HEARTBEAT_SECONDS, limit - spent))}"
        except subprocess.TimeoutExpired:
            last = next(reversed(log.read_text(errors="replace").splitlines()), "nothing yet")
            print(f"[gpu-check]   {time.monotonic() - began:.0f} of {limit:.0f} s; {last[:140]}", flush=True)
    return f"not finished after {limit:.0f} s"


def with_runners(checks: Sequence[Check], device: str) -> list[Check]:
    """On a GPU the engine's checks once for each of vLLM's model runners."""
    if device == "cpu":
        return list(checks)
    return [replace(check, runner=each) for check in checks for each in (RUNNERS if check.engine else ("",))]


def only_runner(results: Sequence[Result]) -> str | None:
    """The runner with which everything that ran has passed, if it is the only one."""
    ran = [result for result in results if result.check.runner and result.verdict != "not run"]
    passed = [
        runner
        for runner in RUNNERS
        if (own := [result for result in ran if result.check.runner == runner])
        and all(result.verdict == "passed" for result in own)
    ]
    return passed[0] if len(passed) == 1 else None


def to_paste(results: Sequence[Result], device: str) -> str:
    """Everything that matters in one line."""
    counts = Counter(result.verdict for result in results)
    summary = lambda result: result.found.splitlines()[0][:120]
    failed = [f"{each.check.label} ({summary(each)})" for each in results if each.verdict == "failed"]
    environment = next((result.found.splitlines()[0] for result in results if result.check.name == "environment"), "")
    parts = [f"dccot {__version__}{_commit()}", device, environment, f"{counts['passed']} passed"]
    parts += [f"failed: {', '.join(failed)}" if failed else "0 failed", f"runner: {only_runner(results) or 'auto'}"]
    return "gpu-check | " + " | ".join(part for part in parts if part)


def page(results: Sequence[Result], device: str, model: str, seconds: float) -> str:
    """Markdown: a table, what failures mean, the details of each check, and a line to paste."""
    counts = Counter(result.verdict for result in results)
    what = f"dccot {__version__}{_commit()}, device {device}, model {model or 'a tiny one'}"
    summary = ", ".join(f"{counts[verdict]} {verdict}" for verdict in VERDICTS)
    head = f"{what}, {time.strftime('%Y-%m-%d %H:%M %Z')}, {seconds:.0f} s: {summary}"
    lines = ["# GPU check", "", head, "", "| check | result | s | found |", "|---|---|---|---|"]
    for result in results:
        summary = (result.found.splitlines() or [""])[0].replace("|", "\\|")[:300]
        took = f"{result.seconds:.0f}" if result.verdict != "not run" else ""
        shown = f"**{result.verdict}**" if result.verdict == "failed" else result.verdict
        lines.append(f"| {result.check.what} (`{result.check.label}`) | {shown} | {took} | {summary} |")
    if failed := [result.check for result in results if result.verdict == "failed"]:
        lines += ["", "| failed | probably | try |", "|---|---|---|"]
        advice = {check.label: ADVICE.get(check.name, ("unknown", "see its log below")) for check in failed}
        lines += [f"| `{label}` | {cause} | {switch} |" for label, (cause, switch) in advice.items()]
    if runner := only_runner(results):
        lines += ["", f"Only with the model runner {runner} did all checks of the engine pass: training uses it here."]
    for result in results:
        if "\n" in result.found:
            title = f"## {result.check.label}: {result.verdict}"
            lines += ["", title, "", "```text", *result.found.splitlines(), "```"]
    return "\n".join([*lines, "", to_paste(results, device)]) + "\n"


def _commit() -> str:
    command = ["git", "-C", str(Path(__file__).resolve().parent), "describe", "--always", "--dirty", "--exclude=*"]
    done = subprocess.run(command, capture_output=True, text=True)
    return f" at {done.stdout.strip()}" if done.returncode == 0 else ""


def count_gpus() -> int:
    """In a separate process: this one must not hold a GPU during the checks."""
    count = "import torch; print(torch.cuda.device_count() if torch.cuda.is_available() else 0)"
    done = subprocess.run([sys.executable, "-c", count], capture_output=True, text=True)
    return int(done.stdout.split()[-1]) if done.returncode == 0 else 0


def check_all(checks: Sequence[Check], folder: Path, device: str, model: str) -> list[Result]:
    folder.mkdir(parents=True, exist_ok=True)
    gpus, began = count_gpus() if device == "cuda" else 0, time.perf_counter()
    checks = with_runners(checks, device)
    results = {check.label: Result(check, "not run", f"not run: {check.obstacle(gpus, device)}") for check in checks}

    def report() -> None:
        write_atomic(folder / "report.md", page(list(results.values()), device, model, time.perf_counter() - began))

    report()
    for group in processes([check for check in checks if not check.obstacle(gpus, device)], device):
        print(f"[gpu-check] {', '.join(check.label for check in group)} …", flush=True)
        for result in run_together(group, folder, device, model):
            results[result.check.label] = result
            found = result.found.splitlines()[0][:160]
            print(f"[gpu-check] {result.check.label}: {result.verdict}, {result.seconds:.0f} s: {found}", flush=True)
        report()
    every = list(results.values())
    if all(any(each.check.runner == runner and each.verdict != "not run" for each in every) for runner in RUNNERS):
        remember_runner(only_runner(every))
    return every


def remember_runner(runner: str | None) -> None:
    """For training on this machine; in a separate process, which may look at the GPU."""
    said = f"from dccot.rollout import engine; engine.keep_checked_runner(engine.machine(), {runner!r})"
    subprocess.run([sys.executable, "-c", said], capture_output=True, check=False)


def main(argv: Sequence[str] | None = None) -> int:
    known = {check.name: check for check in CHECKS}
    parser = Parser(
        "Check a machine with GPUs: kernels, engine, training, each on its own; ends in one page.",
        "dccot gpu-check --model runs/sft/latest/hf",
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
        print(f"[gpu-check] the whole report: {arguments.output / 'report.md'}; the line to paste:")
        print(to_paste(results, arguments.device))

    return run_cleanly(work) or int(any(result.verdict == "failed" for result in results))


if __name__ == "__main__":
    sys.exit(main())
