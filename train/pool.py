"""Groups between draw and update: one queue in the order drawn, three ways to run it (`rollout.mode`).

    drawn ─► started ─► responses sampled, graded ─► kept or rejected ─► taken from the front, in the order started

A batch takes groups from the front only. So what is trained on is the first `prompts` groups, in the order drawn, that
the filter keeps, however long their responses are: to take those that finish first would train on short ones. A group
that is complete waits for those before it, while the engine works on those behind it.

    mode           who advances it             a batch is taken               weights change
    synchronous    the training loop           when all started is finished   when nothing runs
    partial        the training loop           when the front has enough      under unfinished responses, which continue
    asynchronous   a thread, all the time      when the front has enough      in the servers, under running requests

**Staleness.** A token of weights v (the weights after v steps) that step t trains on is t − v old. A group that starts
under weights v, when the next batch is that of step t, has `taken` groups, and `open` groups before it that may still
be kept, is trained on in step t + (taken + open) // prompts at the latest. It starts only if that is at most v +
`max_staleness`: nothing becomes too old, so nothing has to be thrown away. With `max_staleness` 0, `prompts` groups
start, and one more for each that is rejected; all are used up when the batch is full. That is a synchronous step in
any mode, and gives its bits.

**Surplus.** `batch.surplus: drop` (the paper) starts whole batches of `prompts_rolled_out` instead, until the filter
has kept enough, and drops what is kept beyond that; only synchronous, or without staleness.

**Resuming.** Groups are taken in the order drawn, so those that are not form one stretch of the problem stream. A
checkpoint holds its beginning: after a restart these groups are drawn again and begin again with the same seeds under
the current weights. Nothing is lost and nothing counts twice.
"""

from __future__ import annotations

import functools
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

from dccot.data.prompts import Prompted
from dccot.rollout.response import Rollout
from dccot.train.config import RLBatch
from dccot.train.rewards import Graded, Group, sampled_by


@dataclass
class Started:
    """A group that has started and has not been taken."""

    number: int  # in the order drawn, over the whole run
    problem: Prompted
    drawn_at: dict[str, Any]  # the problem stream's state before it was drawn
    rollouts: dict[int, Graded] = field(default_factory=dict)  # sample → rewarded response
    group: Group = ()  # all of them in order, when it is complete
    kept: bool | None = None  # by the filter; None: not complete


F = TypeVar("F", bound=Callable[..., Any])


def locked(method: F) -> F:
    @functools.wraps(method)
    def with_lock(self: Pool, *arguments: Any) -> Any:
        with self.lock:
            return method(self, *arguments)

    return cast(F, with_lock)


class Pool:
    """Every rank holds the same one and is told the same, so all come to the same decisions.

    `whole`: whole batches, nothing is kept for later. `drained`, as with `whole`: taken only when nothing is running.
    """

    def __init__(self, config: RLBatch, max_staleness: int = 0, *, whole: bool = False, drained: bool = False):
        self.config, self.max_staleness, self.whole, self.drained = config, max_staleness, whole, drained
        self.groups: deque[Started] = deque()
        self.step = self.version = 0  # of the batch that is taken next; of the engine's weights
        self.taken = self.batches = 0  # groups that this batch has; whole batches started for it
        self.lock = threading.RLock()  # in the asynchronous mode a thread fills what the training loop takes from
        self.drawn = 0  # groups so far, over the whole run
        self.counts: Counter[str] = Counter()  # of groups since the last batch: started, too_old

    @locked
    def metrics(self) -> dict[str, float]:
        """Of the groups since the last call: started, dropped for their age; now: unfinished, complete and waiting."""
        counts, self.counts = self.counts, Counter()
        now = {"unfinished": self.unfinished, "waiting": self.waiting}
        numbers = {"started": counts["started"], "too_old": counts["too_old"], **now}
        return {f"pool/{name}": float(number) for name, number in numbers.items()}

    @property
    def unfinished(self) -> int:
        return sum(group.kept is None for group in self.groups)

    @property
    def waiting(self) -> int:
        """Groups that are complete and kept, behind one that is not."""
        return sum(group.kept is True for group in self.groups)

    @locked
    def room(self) -> int:
        """Groups that may start now."""
        config = self.config
        if self.whole:
            ready = not self.groups and self.taken < config.prompts and self.version == self.step
            return config.prompts_rolled_out if ready else 0
        open_ = sum(group.kept is not False for group in self.groups)
        allowed = (self.version + self.max_staleness + 1 - self.step) * config.prompts
        return max(0, min(allowed - self.taken - open_, config.prompts_rolled_out - self.unfinished))

    @locked
    def start(self, problem: Prompted, drawn_at: dict[str, Any]) -> Started:
        started = Started(self.drawn, problem, drawn_at)
        self.groups.append(started)
        self.drawn += 1
        self.counts["started"] += 1
        return started

    @locked
    def add(self, rollouts: Iterable[tuple[int, Graded]]) -> list[Started]:
        """Rewarded responses, each with its group's number; returns the groups that are complete now."""
        known, touched = {group.number: group for group in self.groups}, {}
        for number, rollout in rollouts:
            touched[number] = known[number]
            known[number].rollouts[rollout.sample] = rollout
        complete = [each for each in touched.values() if len(each.rollouts) == self.config.group_size]
        for each in complete:
            each.group = [each.rollouts[sample] for sample in sorted(each.rollouts)]
        return sorted(complete, key=lambda each: each.number)

    @locked
    def decide(self, complete: Iterable[Started], kept: Sequence[Group]) -> None:
        """Which of the complete groups the filter kept."""
        for each in complete:
            each.kept = any(group is each.group for group in kept)

    @locked
    def take(self) -> tuple[list[Group], list[Group]]:
        """The groups at the front that are complete, and those of them that the filter kept: at most what this batch
        still needs, unless a surplus is dropped.
        """
        groups: list[Group] = []
        kept: list[Group] = []
        if (self.whole or self.drained) and self.unfinished:
            return groups, kept
        while self.groups and self.groups[0].kept is not None:
            front = self.groups[0]
            if front.kept and not self.whole and self.taken == self.config.prompts:
                break
            self.groups.popleft()
            groups.append(front.group)
            if front.kept and self._too_old(front.group):
                self.counts["too_old"] += 1
            elif front.kept:
                kept.append(front.group)
                self.taken += 1
        return groups, kept

    def _too_old(self, group: Group) -> bool:
        """Never, unless an engine says that it sampled with weights that it should not have had."""
        return self.step - oldest(group, self.step) > self.max_staleness

    @locked
    def begin(self, step: int) -> None:
        """The batch of this step is taken next; it may have started already."""
        if step != self.step:
            self.step, self.taken, self.batches = step, 0, 0

    @locked
    def resumes_at(self, now: dict[str, Any]) -> dict[str, Any]:
        """The stream's state and the number drawn, from which everything that was not taken is drawn again."""
        first = self.groups[0] if self.groups else None
        number = first.number if first else self.drawn
        return {"stream": first.drawn_at if first else now, "drawn": number, "unfinished": self.drawn - number}


def settle(rollouts: Iterable[Rollout], step: int) -> None:
    """They belong to the step that takes them; versions are left out where all are the step's own."""
    for rollout in rollouts:
        rollout.step = step
        for segment in rollout.response.segments():
            if all(version == step for version in segment.versions):
                segment.versions = []


def oldest(group: Group, step: int) -> int:
    """The lowest version of the weights among a group's tokens."""
    return min((min(versions) for versions in map(sampled_by, group) if versions), default=step)
