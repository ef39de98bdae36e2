"""Trees of one level in the paper's terms, as most tests have them: rounds of a director and its workers, then a final
segment. Works for responses, made of segments, and for parsed texts, made of strings.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from dccot.rollout.response import Finish, Response, Segment
from dccot.rollout.thread import Thread


class Round(NamedTuple):
    director: Any
    workers: list[Any]


def flat(
    prompt: list[int], rounds: Sequence[Round] = (), final: Segment | None = None, finish: Finish = Finish.ANSWERED
) -> Response:
    trunk = [*(each.director for each in rounds), *([final] if final is not None else [])]
    forks = [[Thread([worker]) for worker in each.workers] for each in rounds]
    return Response(trunk, forks, prompt=prompt, finish=finish)


def rounds_of(thread: Thread) -> list[Round]:
    return [Round(text, [worker.trunk[0] for worker in fork]) for text, fork in zip(thread.trunk, thread.forks)]


def final_of(thread: Thread) -> Any:
    """What follows the last round; None if nothing does."""
    return thread.trunk[-1] if len(thread.trunk) > len(thread.forks) else None
