"""Problems in, graded rollouts out: what training, validation and evaluation have in common.

    for rollout in graded_rollouts(engine, grader, asked, prompt, config, samples=7, seed=(run_seed, step)): …

Responses are graded in batches while others are still being generated, and come out in the order in which they are graded.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from dccot.data.grading import Grader
from dccot.data.problems import Problem
from dccot.data.prompting import PromptConfig
from dccot.rollout.director import RolloutConfig
from dccot.rollout.generate import Request, Watch, generate
from dccot.rollout.protocol import flaw_of, sequential_flaw_of
from dccot.rollout.response import Response, Rollout

Asked = tuple[Problem, list[int]]  # a problem and the ids of its prompt


def rollout_of(problem: Problem, sample: int, response: Response, tokenizer, prompt: PromptConfig, workers: int) -> Rollout:
    """A response as an ungraded rollout, with its form judged by the rules of its kind of prompt."""
    text = prompt.whole_text(response.text(tokenizer))
    flaw = flaw_of(text, workers) if prompt.kind == "parallel" else sequential_flaw_of(text)
    return Rollout(problem.id, sample, problem.question, problem.gold, text, response, flaw)


def roll_out(
    engine,
    asked: Sequence[Asked],
    prompt: PromptConfig,
    config: RolloutConfig,
    *,
    samples: Iterable[int],
    seed: tuple[int | str, ...],
    watch: Watch | None = None,
) -> Iterator[Rollout]:
    """Every sample of every problem, ungraded, each as soon as it is finished."""
    by_id = {problem.id: problem for problem, _ in asked}
    samples = list(samples)
    requests = [Request(problem.id, sample, ids) for problem, ids in asked for sample in samples]
    for request, response in generate(engine, requests, config, seed=seed, watch=watch):
        yield rollout_of(by_id[request.problem], request.sample, response, engine.tokenizer, prompt, config.workers)


def grade(rollouts: Sequence[Rollout], grader: Grader) -> None:
    """Fill in the verdicts."""
    for rollout, verdict in zip(rollouts, grader.grade([(r.text, r.gold) for r in rollouts])):
        rollout.verdict = verdict.value
