"""Plants faults in a copy of this tree, one at a time, and shows that the tests named with each catch it.

    python -m tests.support.planted_faults [WORD …]      only faults whose file, text or tests contain one of the words

A fault is one line changed: a comparison flipped, a term dropped, two arguments swapped. Its text must be found exactly
once in its file. Ends with exit code 1 if a fault survived or could not be planted.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from tests.support import programs

LEFT_OUT = shutil.ignore_patterns(".git", ".venv", "runs", "build", "dist", ".*_cache", "__pycache__", "*.egg-info")


@dataclass(frozen=True)
class Fault:
    file: str
    before: str
    after: str
    tests: str  # that must catch it


def faults(file: str, tests: str, *pairs: tuple[str, str]) -> list[Fault]:
    return [Fault(file, before, after, tests) for before, after in pairs]


FAULTS = [
    *faults(
        "rollout/director.py",
        "tests/rollout/test_director.py",
        ("(self.tags.closing if writer.path else 1)", "0"),
        ("above.left -= max(worker.path()", "above.left -= min(worker.path()"),
        ("if number == self.config.max_rounds:", "if number - 1 == self.config.max_rounds:"),
        ("if budget <= context else", "if budget >= context else"),
        ("sum(map(len, opening)) - reserve)", "sum(map(len, opening)))"),
        ("path, writer.left - reserve, share", "path, writer.left, share"),
    ),
    *faults(
        "rollout/response.py",
        "tests/rollout/test_response.py tests/rollout/test_director.py",
        ("self.total_tokens / max(1, self.longest_path)", "self.longest_path / max(1, self.total_tokens)"),
        ("for token in segment.tokens]", "for token in segment.sampled]"),
    ),
    *faults(
        "rollout/thread.py",
        "tests/rollout/test_response.py tests/rollout/test_director.py",
        ("max((t.path(size) for t in fork), default=0)", "sum(t.path(size) for t in fork)"),
    ),
    *faults(
        "rollout/tags.py",
        "tests/rollout/test_tags.py",
        ("if not thought.strip():", "if not thought:"),
        ("if between.strip() or tag != ANSWER_OPEN:", "if tag != ANSWER_OPEN:"),
        ("if not thread.forks:", "if len(thread.forks) > 9:"),
    ),
    *faults(
        "rollout/generate.py",
        "tests/rollout/test_generate.py",
        ("(*seed, request.problem, request.sample)", "(*seed, request.problem)"),
        ("seed_of(*started.seed, *call.path)", "seed_of(*started.seed, call.path[0])"),
        ("*call.path), config.temperature, config.top_p", "*call.path), 1.0, config.top_p"),
    ),
    *faults(
        "rollout/engine.py",
        "tests/rollout/test_engine.py",
        ('"include_stop_str_in_output": True', '"include_stop_str_in_output": False'),
        ("Stop.SPAWN if tag == SPAWN_OPEN else Stop.CLOSE", "Stop.CLOSE"),
    ),
    *faults(
        "train/rewards.py",
        "tests/train/test_rewards.py",
        ("max(0, longest_path - config.cutoff)", "max(0, longest_path)"),
        ("/ (budget - config.cutoff)", "/ budget"),
        ("any(graded.correct and", "all(graded.correct and"),
        (" < sum(graded.judged", " <= sum(graded.judged"),
        ("statistics.stdev(rewards) + EPSILON", "statistics.pstdev(rewards) + EPSILON"),
        ("reward for reward in rewards if reward is not None]", "reward or 0.0 for reward in rewards]"),
        ("if not rollout.judged:", "if not rollout.verdict:"),
    ),
    *faults(
        "train/objectives.py",
        "tests/train/test_objectives.py",
        ("ratio.clamp(1 - clip_low, 1 + clip_high)", "ratio.clamp(1 - clip_high, 1 + clip_low)"),
        ("torch.minimum(ratio", "torch.maximum(ratio"),
        ("ratio_of(logprob.detach(), old_logprob)", "ratio_of(logprob, old_logprob)"),
        ("(reference_logprob - logprob).clamp", "(logprob - reference_logprob).clamp"),
        ("loss = loss + config.kl_coefficient", "loss = loss - config.kl_coefficient"),
        ("ratio_of(proximal_logprob, rollout_logprob)", "ratio_of(rollout_logprob, proximal_logprob)"),
    ),
    *faults(
        "train/config.py",
        "tests/train/test_update.py",
        ("(step + 1) / max(1, self.warmup_steps)", "step / max(1, self.warmup_steps)"),
        ("(self.decay_to - step) /", "(self.decay_to - step - 1) /"),
    ),
    *faults(
        "train/update.py",
        "tests/train/test_update.py",
        ("math.isfinite(size) and math.isfinite(loss)", "math.isfinite(size) or math.isfinite(loss)"),
    ),
    *faults(
        "train/update.py", "tests/train/test_two_ranks.py",
        ("(losses.sum() / max(1, tokens)).backward()", "losses.mean().backward()"),
    ),
    *faults(
        "train/forest.py",
        "tests/train/test_forest.py",
        ("sampled[len(segment.inserted) :] = True", "sampled[:] = True"),
        ("yield from layout(worker, at)\n", "yield from layout(worker, at, False, branch)\n"),
        ("joined = read or number", "joined = True or number"),
        ("pairs += length * at + length", "pairs += length"),
        ("fits = (room >= item.tokens)", "fits = (room > 0)"),
        ("responses[last.members[0]].prompt == response.prompt", "len(response.prompt) > 0"),
    ),
    *faults(
        "train/prefix_tree.py", "tests/train/test_prefix_tree.py",
        ("open_rows.append((common, start))", "open_rows.append((common, start + 1))"),
    ),
    *faults(
        "train/batch.py", "tests/train/test_rewards.py tests/train/test_metrics.py",
        ("kept[: self.wanted - len(self.groups)]", "kept[: self.wanted]"),
    ),
    *faults(
        "train/checkpoint.py",
        "tests/train/test_checkpoint.py tests/train/test_power_cut.py",
        ("            flush_to_disk(self.folder)\n", ""),
        ("in reversed(whole):", "in whole:"),
    ),
    *faults(
        "train/rl.py",
        "tests/system/test_training_rl.py",
        ("mini_batches[1:]", "mini_batches[2:]"),
        ("forest.response[forest.targets].long()", "forest.response[: len(forest.targets)].long()"),
    ),
    *faults(
        "kernels/mask.py",
        "tests/kernels/test_mask.py",
        ("closed[: len(ends)]", "closed[1 : len(ends) + 1]"),
        ("open_runs[-1][0] <= start", "open_runs[-1][0] < start"),
        ("(index < ends)", "(index <= ends)"),
    ),
    *faults(
        "kernels/schedule.py",
        "tests/kernels/test_schedule.py",
        ("(past_query <= smallest)", "(first_query <= smallest)"),
        ("(past_key <= first_query + 1)", "(past_key <= first_query + 2)"),
    ),
    *faults(
        "kernels/lm_head.py",
        "tests/kernels/test_lm_head.py",
        ("statistics[:, rows], 1 / temperature)", "statistics[:, rows], temperature)"),
        ("factor + slope * entropy[rows]", "factor - slope * entropy[rows]"),
    ),
    *faults(
        "kernels/attention_cpu.py",
        "tests/kernels/test_tree_attention.py",
        ("torch.sigmoid(part_lse - so_far)", "torch.sigmoid(so_far - part_lse)"),
        ("ends[root:first] > first", "ends[root:first] >= first"),
    ),
    *faults(
        "kernels/mask.py",
        "tests/kernels/test_mask.py tests/kernels/test_schedule.py",
        ("np.where(rounds % 2, ranks - 1 - place, place)", "place"),
        ("starts[last] + size, tokens", "starts[first] + size, tokens"),
    ),
    *faults(
        "model/context.py",
        "tests/train/test_context.py",
        ("dist.reduce_scatter_tensor(mine, sent, group=process_group)", "mine.copy_(sent[:most])"),
    ),
    *faults(
        "train/forest.py",
        "tests/train/test_context.py",
        ("rows = mask.row[self.rows]", "rows = mask.row[self.targets]"),
    ),
    *faults(
        "kernels/attention_triton.py",
        "tests/kernels/test_interpreter.py",
        ("after.to(tl.uint32) < subtrees", "after.to(tl.uint32) <= subtrees"),
    ),
    *faults(
        "eval/majority.py",
        "tests/eval/test_majority.py",
        ("3 * (n - 1) * (count - n)", "2 * (n - 1) * (count - n)"),
        ("comb(rank, 2) * path", "comb(rank + 1, 2) * path"),
        ("2 * comb(n - 1, 2)", "2 * comb(n, 2)"),
    ),
    *faults(
        "eval/results.py",
        "tests/eval/test_report.py tests/eval/test_evaluate.py",
        ("/ (count - 1) / count)", "/ count / count)"),
        ("float(not s.answered)", "float(s.answered)"),
    ),
    *faults(
        "serve/stream.py",
        "tests/serve/test_stream.py",
        ("first is None or path <= first)", "first is None or path < first)"),
        ("self._open - {piece.path} | set(piece.following)", "self._open | set(piece.following)"),
        ("max(map(len, markers)) - 1)", "max(map(len, markers)) - 2)"),
        ("return len(ids) - needed + sum", "return len(ids) - needed - 1 + sum"),
        ("if self.stopped is not None:", "if self.stopped is None:"),
    ),
    *faults(
        "serve/request.py",
        "tests/serve/test_request.py tests/serve/test_requests.py",
        ("value == harmless and type(value) is type(harmless)", "value == harmless"),
        ('["user", "assistant"] * (len(spoken) // 2) + ["user"]', '["user", "assistant"] * (len(spoken) // 2)'),
    ),
    *faults(
        "data/prompts.py", "tests/data/test_prompts.py",
        ("len(ids) > self.max_prompt_tokens", "len(ids) >= self.max_prompt_tokens"),
    ),
    *faults(
        "data/rollouts.py",
        "tests/data/test_rollouts.py tests/train/test_rewards.py",
        ("or sample >= samples", "or sample > samples"),
        ("[] if thinking_counts else [(after_think(rollout.text)", "[(after_think(rollout.text)"),
    ),
    *faults(
        "data/problems.py",
        "tests/data/test_problems.py",
        ('f"{self.seed}/{self.epoch}"', 'f"{self.seed}"'),
        ("self.problems[self._order[self.position - 1]]", "self.problems[self.position - 1]"),
    ),
    *faults(
        "data/judge_process.py", "tests/data/test_judge.py",
        ("same(parsed(a), parsed(b)) or same(parsed(b), parsed(a))", "same(parsed(a), parsed(b))"),
        ("if any(same(gold, answer) for gold in found):", "if same(found[0], answer):"),
    ),
]  # fmt: skip


def first_failure(tree: Path, tests: str) -> str | None:
    """The test that fails first, with its reason; None: all pass."""
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:xdist", "-p", "no:cacheprovider", *tests.split()]
    environment = {**os.environ, "PYTHONPATH": str(tree), "CI": "1", "COLUMNS": "300"}
    done = programs.run(command, cwd=tree, env=environment, capture_output=True, text=True, timeout=1800)
    failures = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    if done.returncode and not failures:
        raise RuntimeError(f"pytest ended with {done.returncode}: {(done.stdout + done.stderr)[-1000:]}")
    return failures[0].split("::")[-1][:160] if failures else None


def plant(fault: Fault, tree: Path) -> str:
    """Caught, and by which test; survived; or why the fault could not be planted."""
    path = tree / fault.file
    whole = path.read_text() if path.exists() else ""
    if (found := whole.count(fault.before)) != 1:
        return f"not planted: its text is {found} times in the file"
    missing = [name for name in fault.tests.split() if not (tree / name).exists()]
    if missing:
        return f"not planted: no {', '.join(missing)}"
    path.write_text(whole.replace(fault.before, fault.after))
    try:
        failure = first_failure(tree, fault.tests)
    finally:
        path.write_text(whole)
    return f"caught by {failure}" if failure else "SURVIVED"


def main(words: list[str]) -> int:
    chosen = [fault for fault in FAULTS if not words or any(word in str(fault) for word in words)]
    bad, sound = 0, dict[str, str | None]()  # tests → what fails without any fault
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        shutil.copytree(programs.ROOT, tree, symlinks=True, ignore=LEFT_OUT)
        for number, fault in enumerate(chosen, 1):
            start = time.monotonic()
            if fault.tests not in sound:
                sound[fault.tests] = first_failure(tree, fault.tests)
            broken = sound[fault.tests]
            said = f"not planted: {broken} fails without it" if broken else plant(fault, tree)
            bad += not said.startswith("caught")
            change = f"{fault.before.strip()} → {fault.after.strip()}"
            print(f"| {number} | {fault.file} | `{change}` | {said} | {time.monotonic() - start:.0f} s |", flush=True)
    print(f"{len(chosen) - bad} of {len(chosen)} faults were caught")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
