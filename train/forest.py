"""Responses → packed forests: the depth-first layout that makes a parallel response one integer per token.

    prompt S1 | W2 as written | W3 as written | W1 W2' W3' S2 …          query q sees key k  ⇔  k ≤ q < visible_until[k]

A branch (workers 2..K as written, with what they spawned) is visible to itself only; the trunk is visible to the end of
its response; a prompt shared by several responses is visible to the end of the last of them. Worker 1 as written and as
read are the same tokens at the same positions in the same context, so they are one. The as-read copies W2', W3' carry
no loss; where the director never continues (the budget ran out among the workers) they are never read, and are left
out. A worker that spawns workers is laid out by the same rule.

`Forest.from_rows` lays out any other set of rows that share prefixes: agents' turns, groups of samples, search trees.

`pack` fills forests up to a token budget, balances them over ranks by estimated cost, and gives every rank the same
number. Where a group of ranks works on one forest, `Forest.shared` is one rank's part of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from dccot.kernels.mask import Share, TreeMask, moved, split
from dccot.model.context import ContextGroup
from dccot.rollout.response import Response, Segment
from dccot.rollout.thread import Thread
from dccot.train.prefix_tree import prefix_tree


@dataclass(frozen=True)
class Forest:
    """One micro-batch. N tokens, M of them sampled by the policy; `build_forest` makes it.

    >>> tokens, sampled = torch.tensor([5, 6, 7]), torch.tensor([False, True, True])
    >>> causal = Forest(tokens, torch.tensor([3, 3, 3]), sampled, torch.zeros(3), torch.zeros(3))
    >>> causal.targets.tolist(), causal.mask.parent[causal.targets].tolist()  # loss tokens, the rows that predict them
    ([1, 2], [0, 1])
    """

    tokens: Tensor  # int64 [N]
    visible_until: Tensor  # int32 [N]
    sampled: Tensor  # bool [N]: the policy wrote it, it carries loss
    response: Tensor  # int32 [N]: index of the response; a shared prompt counts for its first one
    logprob: Tensor  # float32 [N]: what the engine sampled with; 0 where not sampled
    version: Tensor | None = None  # int32 [N]: of the weights that sampled it; −1, or None throughout: the step's own

    def __len__(self) -> int:
        return len(self.tokens)

    @cached_property
    def mask(self) -> TreeMask:
        return TreeMask(self.visible_until)

    @cached_property
    def targets(self) -> Tensor:
        """int64 [M]: indices of the sampled tokens; target t is predicted from token `mask.parent[t]`."""
        return self.sampled.nonzero().squeeze(1)

    def lag(self, version: int) -> Tensor:
        """int32 [M]: how many versions before this one, a step's own, each target was sampled."""
        if self.version is None:
            return torch.zeros_like(self.targets, dtype=torch.int32)
        sampled_by = self.version[self.targets]
        return torch.where(sampled_by < 0, 0, version - sampled_by)

    @cached_property
    def rows(self) -> Tensor:
        """int64 [M]: the model's row that predicts each target."""
        return self.mask.parent[self.targets]

    def shared(self, group: ContextGroup) -> Forest:
        """What one rank of the group computes: some tokens' hidden states, and the targets that these predict."""
        if group.ranks == 1:
            return self
        share = Share(split(self.visible_until, group.ranks), group.rank, group.name)
        forest, mask = replace(self), TreeMask(self.visible_until, share=share)
        rows = mask.row[self.rows]
        mine = rows >= 0
        forest.__dict__.update(mask=mask, targets=self.targets[mine], rows=rows[mine])  # where cached_property looks
        return forest

    def to(self, device: torch.device | str) -> Forest:
        """On another device, with mask and targets computed here: computing them on a GPU would make the host wait."""
        device = torch.device(device)
        if device == self.tokens.device:
            return self
        return self.mask.derive(("forest", device), lambda: self._moved(device))  # once, for all passes

    def _moved(self, device: torch.device) -> Forest:
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__}
        forest = replace(self, **{name: moved(here, device) for name, here in fields.items() if here is not None})
        placed = {"targets": moved(self.targets, device), "rows": moved(self.rows, device)}
        forest.__dict__.update(mask=self.mask.to(device), **placed)  # where cached_property looks
        return forest

    @classmethod
    def from_rows(
        cls,
        rows: Sequence[Sequence[int] | np.ndarray | Tensor],
        sampled: Sequence[Sequence[bool] | np.ndarray | Tensor] | None = None,
    ) -> tuple[Forest, list[Tensor]]:
        """Any rows of tokens as one forest that holds every shared prefix once, and where each row's tokens are in it
        (int64 per row).

        `sampled` says which tokens of each row carry loss (default: all but the first); a token that several rows share
        carries it if any of them says so. Its log-prob is computed once: `values[where[i]]` gives each row its own
        values.

        >>> forest, where = Forest.from_rows([[1, 2, 3], [1, 2, 4, 5]])
        >>> forest.tokens.tolist(), forest.visible_until.tolist(), [at.tolist() for at in where]
        ([1, 2, 3, 4, 5], [5, 5, 3, 5, 5], [[0, 1, 2], [0, 1, 3, 4]])
        """
        tree = prefix_tree(rows)
        if not len(tree.tokens):
            raise ValueError(f"{len(rows)} rows hold no token: a forest needs at least one")
        carries = np.zeros(len(tree.tokens), bool)
        for number, at in enumerate(tree.where):
            own = np.arange(len(at)) > 0 if sampled is None else np.asarray(sampled[number], bool)
            if len(own) != len(at):
                raise ValueError(f"row {number} has {len(at):,} tokens, sampled[{number}] has {len(own):,}")
            if len(own) and own[0]:
                remedy = "put a prompt before it"
                raise ValueError(
                    f"the first token of row {number} is marked as sampled, but nothing predicts it: {remedy}"
                )
            carries[at[own]] = True
        arrays = tree.tokens, tree.visible_until, carries, tree.first_row, np.zeros(len(carries), np.float32)
        return cls(*map(torch.from_numpy, arrays)), [torch.from_numpy(at) for at in tree.where]

    def without_loss(self) -> Forest:
        """The same tokens without loss: keeps an idle rank in step with the others."""
        return replace(self, sampled=torch.zeros_like(self.sampled))


Place = tuple[Segment, bool, Thread[Segment], int]  # a segment, whether as written, its branch, tokens before it


def layout(
    thread: Thread[Segment], at: int = 0, read: bool = False, branch: Thread[Segment] | None = None
) -> Iterator[Place]:
    """A response after its prompt in depth-first order. A `branch` is the response, or a worker that is not the first
    of its fork; a thread is `read` if text of its branch follows it. `at`: tokens that its first one sees.
    """
    branch = branch or thread
    for number, (segment, fork) in enumerate(thread.parts(), start=1):
        yield segment, True, branch, at
        at += len(segment)
        for worker in fork[1:]:
            yield from layout(worker, at)
        joined = read or number < len(thread.trunk)
        for worker in fork[:1]:
            yield from layout(worker, at, joined, branch)
            at += worker.total()
        for segment in (segment for worker in fork[1:] for segment in worker.segments()) if joined else ():
            yield segment, False, branch, at
            at += len(segment)


def build_forest(groups: Sequence[Sequence[tuple[int, Response]]]) -> Forest:
    """Lay out groups of (response index, response) one after another; a group shares the prompt of its first response.

    >>> workers = [Thread([Segment([i], [i + 1])]) for i in (11, 21, 31)]  # opening tag, then what was sampled
    >>> forest = build_forest([[(0, Response([Segment([], [2]), Segment([3], [4])], [workers], prompt=[1]))]])
    >>> forest.tokens.tolist()  # prompt S1 | W2 | W3 | W1 W2' W3' S2
    [1, 2, 21, 22, 31, 32, 11, 12, 21, 22, 31, 32, 3, 4]
    >>> forest.visible_until.tolist()
    [14, 14, 4, 4, 6, 6, 14, 14, 14, 14, 14, 14, 14, 14]
    >>> forest.tokens[forest.targets].tolist()  # no loss on tags that were inserted, nor on what is only read
    [2, 22, 32, 12, 4]
    """
    pieces: list[tuple[np.ndarray, ...]] = []  # the arrays of Forest, piece by piece
    at = 0

    def lay(ids: Sequence[int], index: int) -> tuple[np.ndarray, ...]:
        nonlocal at
        size, at = len(ids), at + len(ids)
        ends, sampled, owner = np.empty(size, np.int32), np.zeros(size, bool), np.full(size, index, np.int32)
        logprob, version = np.zeros(size, np.float32), np.full(size, -1, np.int32)
        pieces.append((np.asarray(ids, np.int64), ends, sampled, owner, logprob, version))
        return pieces[-1]

    for group in groups:
        if not group[0][1].prompt:
            raise ValueError(f"response {group[0][0]} has no prompt: nothing predicts its first token")
        prompt = lay(group[0][1].prompt, group[0][0])[1]
        for index, response in group:
            visible: list[tuple[np.ndarray, int]] = []  # with the branch until whose end
            ends: dict[int, int] = {}  # of each branch
            for segment, as_written, branch, _ in layout(response):
                _, until, sampled, _, logprob, version = lay(segment.tokens, index)
                visible.append((until, id(branch)))
                ends[id(branch)] = at
                if as_written:
                    sampled[len(segment.inserted) :] = True
                    if segment.logprobs:
                        logprob[len(segment.inserted) :] = segment.logprobs
                    if segment.versions:
                        version[len(segment.inserted) :] = segment.versions
            for until, of in visible:
                until[:] = ends[of]
        prompt[:] = at
    tensors = [torch.from_numpy(np.concatenate(parts)) for parts in zip(*pieces)]
    return Forest(*tensors if bool((tensors[-1] >= 0).any()) else tensors[:-1])


MicroBatch = list[list[int]]  # indices of responses; those of one group share a prompt


@dataclass(frozen=True)
class Packing:
    """The micro-batches of every rank; all ranks have the same number. One may be empty if there are few responses."""

    responses: Sequence[Response]
    ranks: list[list[MicroBatch]]

    @cached_property
    def shortest(self) -> int:
        """The response that stands in, without loss, for an empty micro-batch."""
        length = lambda index: len(self.responses[index].prompt) + self.responses[index].total_tokens
        return min(range(len(self.responses)), key=length)

    def needs(self, rank: int) -> list[int]:
        """The responses of a rank's forests; of the others, lengths are enough."""
        return [i for micro_batch in self.ranks[rank] for group in micro_batch or [[self.shortest]] for i in group]

    def forests(self, rank: int = 0) -> list[Forest]:
        """Build one rank's micro-batches."""
        built = []
        for micro_batch in self.ranks[rank]:
            if micro_batch:
                built.append(build_forest([[(i, self.responses[i]) for i in group] for group in micro_batch]))
            else:
                built.append(build_forest([[(0, self.responses[self.shortest])]]).without_loss())
        return built


@dataclass(frozen=True)
class _Item:
    """Responses that stay together because they share a prompt; or one response alone."""

    members: list[int]
    tokens: int
    pairs: int  # query–key pairs that attention computes


def _size(response: Response) -> tuple[int, int, int]:
    """(tokens after the prompt, pairs after the prompt, longest position) of a response, from lengths alone."""
    tokens = pairs = 0
    longest = len(response.prompt)
    for segment, _, _, at in layout(response, longest):
        length = len(segment)
        tokens += length
        pairs += length * at + length * (length + 1) // 2
        longest = max(longest, at + length)  # the longest worker may extend past the trunk if it is never read
    return tokens, pairs, longest


def longest_position(response: Response) -> int:
    """How many positions the model must have for this response."""
    return _size(response)[2]


def _items(
    responses: Sequence[Response], token_budget: int, ranks: int, share_prompts: bool, max_positions: int | None
) -> list[_Item]:
    """Units of packing: neighbours that share a prompt, as many as leave enough for other ranks, or single ones."""
    sizes = [_size(response) for response in responses]
    limit = min(token_budget, sum(len(r.prompt) + tokens for r, (tokens, _, _) in zip(responses, sizes)) // ranks)
    items: list[_Item] = []
    for index, (response, (tokens, pairs, positions)) in enumerate(zip(responses, sizes)):
        prompt = len(response.prompt)
        if max_positions is not None and positions > max_positions:
            most = f"the model takes {max_positions:,} (max_position_embeddings)"
            remedy = "lower the rollout budget or drop the response"
            raise ValueError(f"response {index} reaches position {positions:,}; {most}: {remedy}")
        last = items[-1] if items and share_prompts else None
        if last and last.tokens + tokens <= limit and responses[last.members[0]].prompt == response.prompt:
            items[-1] = _Item([*last.members, index], last.tokens + tokens, last.pairs + pairs)
        else:
            items.append(_Item([index], prompt + tokens, pairs + prompt * (prompt + 1) // 2))
    return items


def pack(
    responses: Sequence[Response],
    token_budget: int,
    ranks: int = 1,
    *,
    share_prompts: bool = True,
    pair_cost: float = 1e-4,
    max_positions: int | None = None,
) -> Packing:
    """Plan micro-batches within a token budget, balanced over ranks.

    The cost of a forest is tokens + pair_cost · pairs. Items go, largest first, to the cheapest forest that has room
    for them; a response larger than the budget gets its own forest. The forests are then distributed in order of cost,
    so that ranks work on forests of similar cost at the same time.
    """
    if token_budget < 1:
        raise ValueError(f"token_budget is {token_budget}; it must be at least 1")
    items = _items(responses, token_budget, ranks, share_prompts, max_positions)
    cost = np.array([item.tokens + pair_cost * item.pairs for item in items])
    needed = -(-sum(min(item.tokens, token_budget) for item in items) // token_budget)
    count = max(1, -(-needed // ranks)) * ranks
    while True:
        forests, load = _fill(items, cost, count, token_budget, ranks)
        if len(forests) == count:
            break
        count = len(forests)  # forests added for items that did not fit now start equal with the others
    by_cost = np.argsort(-load, kind="stable")
    plan = [[[item.members for item in forests[b]] for b in by_cost[rank::ranks]] for rank in range(ranks)]
    return Packing(responses, plan)


def _fill(
    items: Sequence[_Item], cost: np.ndarray, count: int, token_budget: int, ranks: int
) -> tuple[list[list[_Item]], np.ndarray]:
    """Distribute items over `count` forests, or more if needed; returns their contents and costs."""
    room, load = np.full(count, token_budget, np.int64), np.zeros(count)
    content: list[list[_Item]] = [[] for _ in range(count)]
    for number in np.argsort(-cost, kind="stable"):
        item = items[number]
        fits = (room >= item.tokens) | (room == token_budget)
        if not fits.any():
            room, load = np.append(room, [token_budget] * ranks), np.append(load, [0.0] * ranks)
            content += [[] for _ in range(ranks)]
            fits = room == token_budget
        chosen = int(np.where(fits, load, np.inf).argmin())
        content[chosen].append(item)
        room[chosen] -= item.tokens
        load[chosen] += cost[number]
    return content, load
