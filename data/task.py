"""A task: one kind of question, with its problems, its prompt and its judge.

    task = task_of(config)                                    # config.task with config.prompt and config.grading
    prompted = task.prompts(task.problems("train.jsonl"), tokenizer)
    with task.open_judge() as judge:
        verdicts = judge.grade([(text, gold), …])

`task: math`, the default, is the class `Task` itself. Your own is one file, with a subclass that overrides what
differs, and one line of configuration, `task: my_package.my_module:Sorting`; the SFT set, SFT, RL, evaluation and
serving all follow it:

    class Sorting(Task):
        instruction = "Write the sorted words within <answer></answer>."

        def open_judge(self) -> Judge:
            return SameWords()
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator

from dccot.core.config import lookup, require
from dccot.core.run import trained_by
from dccot.data.judge import GradingConfig, Judge, open_judge
from dccot.data.problems import Columns, Problem, load_problems
from dccot.data.prompts import PromptConfig, Prompted, UnusablePrompt
from dccot.rollout.director import RolloutConfig

Report = Callable[[str], None]


class Task:
    """Mathematics. Every attribute and method may be overridden."""

    # what every prompt asks of the answer, after the question; None: the final answer in \boxed{}
    instruction: str | None = None
    # (rollout, reward configuration, budget) → reward of a judged rollout; None: what `reward.kind` names
    reward: Callable[..., float] | None = None
    # (rollout) → the reward of each of its workers, in the order of `rollout.response.threads()`, None for one that
    # cannot be judged for itself; used with `credit: worker`. None: workers are not judged
    worker_rewards: Callable[..., list[float | None]] | None = None
    # (problem, solution, attempt=…) → the solution in the parallel format; None: a stronger model rewrites it
    rewrite: Callable[..., str] | None = None
    # a solution without workers belongs into the SFT set, too: spawning is a decision
    may_work_alone: bool = False

    columns: Mapping[str, str] = {}  # question, gold → their names in a file of problems (`data.question`, `data.gold`)

    def __init__(self, prompt: PromptConfig | None = None, grading: GradingConfig | None = None):
        prompt = prompt or PromptConfig()
        self.prompting = replace(prompt, instruction=prompt.instruction or self.instruction)
        self.grading = grading or GradingConfig()

    def problems(
        self, path: str | Path, *, preset: str | None = None, strict: bool = False, report: Report = print
    ) -> list[Problem]:
        """The problems of a file. Bad rows are reported and skipped; `strict` raises."""
        return load_problems(path, preset=preset, columns=self.columns, strict=strict, report=report)

    def prompts(
        self, problems: Iterable[Problem], tokenizer: Any, *, strict: bool = False, report: Report = print
    ) -> list[Prompted]:
        """Every problem with its prompt ids. Those that cannot be asked are reported and left out; `strict` raises."""
        self.prompting.chat_format_for(tokenizer)
        kept, left_out = list[Prompted](), 0
        for problem in problems:
            try:
                kept.append((problem, self.prompting.ids(tokenizer, problem.question)))
            except UnusablePrompt as error:
                if strict:
                    raise UnusablePrompt(f"{error} (problem id {problem.id})") from None
                left_out += 1
                if left_out <= 20:
                    report(f"{error} (problem id {problem.id}); problem left out")
        if left_out:
            report(f"{left_out:,} of {left_out + len(kept):,} problems left out: their prompts cannot be used")
        if not kept:
            unusable = f"no problem is left: all {left_out:,} prompts are unusable"
            raise UnusablePrompt(f"{unusable}; raise prompt.max_prompt_tokens")
        return kept

    def open_judge(self) -> Judge:
        """The judge of the answers; use as a context manager."""
        return open_judge(self.grading)


TASKS: dict[str, type[Task]] = {"math": Task}


def find_task(name: str, key: str = "task") -> type[Task]:
    found = lookup(TASKS, name, key)
    is_task = isinstance(found, type) and issubclass(found, Task)
    require(is_task, f"{key} is {name!r}, which is not a class that inherits from dccot.data.task.Task")
    return found


def _known_task(name: str) -> str:
    find_task(name, "")
    return name


TaskName = Annotated[str, AfterValidator(_known_task)]


def task_of(config: Any) -> Task:
    """The task that a configuration names, with its `prompt`, `rollout` limits, `grading` and the names of its `data`
    where it has them.
    """
    prompt, limits = getattr(config, "prompt", None) or PromptConfig(), getattr(config, "rollout", None)
    prompt = prompt.allowing(limits.workers, limits.depth) if limits else prompt
    task = find_task(config.task)(prompt, getattr(config, "grading", None))
    data = getattr(config, "data", None)
    task.columns = data.named() if isinstance(data, Columns) else {}
    return task


def own_settings(model: str | Path) -> dict[str, Any]:
    """What a model's run is asked with unless something else is given: its task, kind of prompt, budget and workers, as
    dotted keys. Empty for a model without a run.
    """
    own = trained_by(model)[0].settings()
    prompt, rollout = own.get("prompt") or {}, own.get("rollout") or {}
    found = {f"rollout.{key}": rollout[key] for key in ("budget", "workers", "depth") if key in rollout}
    found |= {"prompt.kind": prompt["kind"]} if prompt.get("kind") in ("parallel", "sequential") else {}
    return found | ({"task": own["task"]} if own.get("task") else {})


def settings_of(model: str | Path) -> tuple[PromptConfig, RolloutConfig]:
    """How to prompt a model and sample from it: as its run did, whichever checkpoint it is; or the defaults."""
    run, _ = trained_by(model)
    task = find_task(run.settings().get("task", "math"))(run.group(PromptConfig, "prompt"))
    rollout = run.group(RolloutConfig, "rollout")
    return task.prompting.allowing(rollout.workers, rollout.depth), rollout
