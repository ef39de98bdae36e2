"""What a step trains on: groups of graded responses that the filter kept, and the mini-batches made of them.

Groups hold outlines, the same on every rank; a response as a whole is where it was graded (`own`), and goes to the rank
that trains on it. A batch is saved in the run's rollouts/ (or bad/, if its updates were skipped; train/saver.py), and
`replay=FILE` trains on it again: then every rank has read all of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from dccot.core.files import BadData, read_jsonl
from dccot.core.runtime import Runtime
from dccot.rollout.response import Response
from dccot.train.forest import Forest, Packing, layout
from dccot.train.rewards import Graded, Group, Outline


@dataclass
class Batch:
    """Groups that a step trains on, `wanted` when full, and where they came from."""

    wanted: int
    groups: list[Group] = field(default_factory=list)  # kept by the filter
    rolled_out: list[Graded] = field(default_factory=list)  # everything, for metrics
    considered: int = 0  # groups, kept or not
    kept: int = 0  # groups that the filter kept, including surplus ones
    own: dict[int, Graded] = field(default_factory=dict)  # whole responses that this rank holds, by Outline.place

    @property
    def full(self) -> bool:
        return len(self.groups) >= self.wanted

    def add(self, groups: Sequence[Group], kept: Sequence[Group]) -> None:
        """Groups of a turn of the rollout, and those of them that the filter kept; a surplus is not trained on."""
        self.groups += kept[: self.wanted - len(self.groups)]
        self.rolled_out += [graded for group in groups for graded in group]
        self.kept += len(kept)
        self.considered += len(groups)

    def mini_batches(self, count: int) -> Iterator[list[Graded]]:
        size = len(self.groups) // count
        for start in range(0, len(self.groups), size):
            yield [graded for group in self.groups[start : start + size] for graded in group]

    def whole(self, graded: Graded, rank: int) -> Graded | None:
        """With text, tokens and advantage, if this rank holds it."""
        if not isinstance(graded, Outline):
            return graded
        if graded.rank != rank:
            return None
        found = self.own[graded.place]
        found.advantage, found.worker_advantages = graded.advantage, graded.worker_advantages
        return found

    def deliver(self, graded: Sequence[Graded], packing: Packing, runtime: Runtime, shared: int) -> Packing:
        """Send each response, known by its outline, to the ranks that train on it, of which `shared` at a time have the
        same micro-batches.
        """
        if not isinstance(graded[0], Outline):  # a replay: everything is here
            return packing

        def parcel(rank: int) -> dict[int, Response]:
            held = ((index, self.whole(graded[index], runtime.rank)) for index in packing.needs(rank // shared))
            return {index: whole.response for index, whole in held if whole is not None}

        arrived = runtime.exchange([parcel(rank) for rank in range(runtime.ranks)])
        here = {index: response for theirs in arrived for index, response in theirs.items()}
        outlines = enumerate(packing.responses)
        return replace(packing, responses=[here.get(index, outline) for index, outline in outlines])

    def trained_here(self, rank: int) -> list[Graded]:
        """The responses that the step trains on and this rank holds, in the batch's order."""
        found = (self.whole(graded, rank) for group in self.groups for graded in group)
        return [graded for graded in found if graded is not None]

    def ranks(self) -> list[int]:
        """Who holds each response that the step trains on."""
        return [graded.rank if isinstance(graded, Outline) else 0 for group in self.groups for graded in group]

    @classmethod
    def replay(cls, path: str, wanted: int) -> Batch:
        """A batch that an earlier run saved."""
        groups: list[list[Graded]] = []
        for line, row in read_jsonl(path, strict=True):
            try:
                graded = Graded.from_json(row)
            except (KeyError, TypeError, ValueError) as error:
                raise BadData(f"{path}:{line}: not a rollout ({type(error).__name__}: {error})") from None
            if graded.advantage is None:
                remedy = "replay a file that a training run wrote to its rollouts/"
                raise BadData(f"{path}:{line}: the rollout has no advantage; {remedy}")
            last = groups[-1] if groups else []
            if not last or last[-1].problem != graded.problem or last[-1].sample >= graded.sample:
                groups.append(last := [])  # a problem may be drawn again soon if there are few
            last.append(graded)
        if len(groups) < wanted:
            remedy = f"set batch.prompts={len(groups)} or less"
            raise BadData(f"{path} holds {len(groups)} prompts; batch.prompts is {wanted}: {remedy}")
        chosen = groups[:wanted]
        return cls(wanted, list(chosen), [graded for group in chosen for graded in group], kept=len(groups))


def credit_of(packing: Packing, forests: Sequence[Forest], group: int, graded: Sequence[Graded]) -> list[Tensor] | None:
    """The advantages of each forest's tokens, 0 where none was sampled; None: all have their response's."""
    if not any(each.worker_advantages for each in graded):
        return None
    found = []
    for forest, micro_batch in zip(forests, packing.ranks[group]):
        values: list[float] = []
        for each in (graded[index] for group in micro_batch for index in group):
            advantages = each.segment_advantages()
            for segment, as_written, _, _ in layout(each.response):
                values += [advantages[id(segment)]] * len(segment.sampled) if as_written else []
        found.append(torch.zeros(len(forest)).masked_scatter(forest.sampled, torch.tensor(values)))
    return found


@dataclass
class MiniBatch:
    """What one update trains on: this rank's forests, and [M] numbers of each forest's sampled tokens."""

    forests: list[Forest]
    advantages: Tensor  # of each response
    credit: list[Tensor] | None = None  # advantages of the forests' tokens, where workers have their own
    proximal: list[Tensor] | None = None  # of the step's first weights; None: those are updated, or nobody needs them
    reference: list[Tensor] | None = None  # None: no KL
