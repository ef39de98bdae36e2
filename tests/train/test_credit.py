"""Credit per worker, from a response's tree to the tokens of a forest."""

from __future__ import annotations

import pytest
import torch

from dccot.model.context import ContextGroup
from dccot.rollout.response import Response, Segment
from dccot.rollout.thread import Thread
from dccot.train.batch import credit_of
from dccot.train.forest import pack
from dccot.train.rewards import Graded


def response_of(number: int) -> Response:
    """Token ids say whose they are: 100 · number + 10 · thread; 0 and 3 are the director's texts."""
    first, one, two, last = ([100 * number + 10 * thread + place for place in range(3)] for thread in range(4))
    workers = [Thread([Segment([9], ids)]) for ids in (one, two)]
    return Response([Segment([], first), Segment([8], last)], [workers], prompt=[1, 2])


@pytest.mark.parametrize("group", [ContextGroup(), ContextGroup(0, 2), ContextGroup(1, 2)])
def test_each_sampled_token_has_the_advantage_of_its_own_worker(group):
    graded = [Graded("1", number, "?", "2", "…", response_of(number), advantage=number / 2) for number in (1, 2)]
    for number, each in enumerate(graded, start=1):
        each.worker_advantages = [3.0 * number, -3.0 * number]
    packing = pack([each.response for each in graded], 100)
    forests = [forest.shared(group) for forest in packing.forests()]
    credit = credit_of(packing, forests, 0, graded)
    found = torch.cat([each[forest.targets] for forest, each in zip(forests, credit)]).tolist()
    tokens = torch.cat([forest.tokens[forest.targets] for forest in forests]).tolist()
    of_thread = {0: 0.5, 1: 3.0, 2: -3.0, 3: 0.5}
    assert tokens and found == [token // 100 * of_thread[token // 10 % 10] for token in tokens]
    assert group.ranks == 2 or len(tokens) == 24
