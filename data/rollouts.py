"""Problems in, rollouts out: what training, validation, evaluation, `dccot rollout` and `dccot data sequential` have in
common.

    have = {(row["problem"], row["sample"]) for row in …}                     what a file or folder already holds
    for rollout in roll_out(engine, asked, missing_pairs(asked, range(7), have), prompt, config, seed=(run_seed,)):
        writer.write(rollout.to_json())                                       each one as soon as it is finished

A response depends on its seed, (seed, problem, sample), not on what else is generated: an interrupted run is completed
by generating the missing pairs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import closing
from itertools import islice

from dccot.data.judge import Judge
from dccot.data.prompts import PromptConfig, Prompted
from dccot.rollout.director import RolloutConfig
from dccot.rollout.engine import Engine
from dccot.rollout.generate import Request, Watch, generate
from dccot.rollout.response import Rollout
from dccot.rollout.tags import after_think, flaw_of, sequential_flaw_of

Pair = tuple[str, int]  # problem id, sample
GRADED_TOGETHER = 64


def missing_pairs(asked: Iterable[Prompted], samples: Iterable[int], have: Collection[Pair] = ()) -> list[Pair]:
    """Every missing sample of every problem, in the order of the problems."""
    samples = list(samples)
    return [(problem.id, sample) for problem, _ in asked for sample in samples if (problem.id, sample) not in have]


def roll_out(
    engine: Engine,
    asked: Iterable[Prompted],
    pairs: Iterable[Pair],
    prompt: PromptConfig,
    config: RolloutConfig,
    *,
    seed: tuple[int | str, ...],
    watch: Watch | None = None,
) -> Iterator[Rollout]:
    """These samples of these problems, ungraded, each as soon as it is finished, with its format checked by the rules
    of its prompt.
    """
    known = {problem.id: (problem, ids) for problem, ids in asked}
    requests = [Request(problem, sample, known[problem][1], prompt.parallel) for problem, sample in pairs]
    with closing(generate(engine, requests, config, seed=seed, watch=watch)) as responses:
        for request, response in responses:
            problem, _ = known[request.problem]
            text = prompt.whole_text(response.text(engine.tokenizer))
            flaw = flaw_of(text, config.workers) if prompt.parallel else sequential_flaw_of(text)
            yield Rollout(problem.id, request.sample, problem.question, problem.gold, text, response, flaw)


def grade(rollouts: Sequence[Rollout], judge: Judge, *, thinking_counts: bool = True) -> None:
    """Fill in the verdicts: on whole responses, or only on what follows their thinking (DeepScaleR's rule)."""
    texts = [rollout.text if thinking_counts else after_think(rollout.text) for rollout in rollouts]
    for rollout, verdict in zip(
        rollouts, judge.grade([(text, rollout.gold) for text, rollout in zip(texts, rollouts)])
    ):
        rollout.verdict = verdict.value


def graded(rollouts: Iterable[Rollout], judge: Judge) -> Iterator[Rollout]:
    """Rollouts with their verdicts, graded in batches while others are still being generated."""
    rollouts = iter(rollouts)
    while batch := list(islice(rollouts, GRADED_TOGETHER)):
        grade(batch, judge)
        yield from batch
