"""A demonstration written as people and models write them, with a line break after every tag and two rounds:
well-formed, laid out as a forest in which every worker sees what it saw at inference, and accepted by the check of an
SFT set.
"""

from __future__ import annotations

from dccot.core.files import write_jsonl_atomic
from dccot.data.sft_set import check_set
from dccot.kernels.reference import dense_mask
from dccot.lab.worlds import bigram
from dccot.rollout.tags import TagIds, flaw_of
from dccot.train.forest import build_forest
from dccot.train.sft import demonstration
from tests.support.rounds import final_of, rounds_of

DEMONSTRATION = r"""<think>
Two lists must be added, then the sums multiplied. The lists do not depend on each other.

<spawn_workers>
<worker_1>
1 + 2 + 3 = 6
</worker_1>
<worker_2>
4 + 5 = 9
</worker_2>
<worker_3>
Is the question read rightly? Two sums, one product. Yes.
</worker_3>
</spawn_workers>

The sums are 6 and 9. The product can be worked out in two ways and checked.

<spawn_workers>
<worker_1>
6 * 9 = 54
</worker_1>
<worker_2>
60 - 6 = 54
</worker_2>
<worker_3>
5 * 9 + 9 = 54
</worker_3>
</spawn_workers>

All agree.
</think>

<answer>
The product is \[\boxed{54}\]
</answer>"""


def test_it_is_well_formed_and_passes_the_check_of_an_sft_set(tmp_path):
    assert flaw_of(DEMONSTRATION, 3) is None
    write_jsonl_atomic(
        tmp_path / "sft.jsonl", [{"id": "1", "question": "?", "completion": DEMONSTRATION, "source": DEMONSTRATION}]
    )
    report = check_set(tmp_path / "sft.jsonl").to_json()
    assert (report["examples"], dict(report["ill_formed"]), report["leaks"]) == (1, {}, [])


def test_its_forest_holds_every_worker_twice_but_the_first_and_hides_them_from_each_other():
    tokenizer = bigram.tokenizer("spelled")
    tags = TagIds.of(tokenizer, 3)
    response = demonstration(DEMONSTRATION, [0, 1], tokenizer, tags, parallel=True, open_think=False)
    assert len(response.forks) == 2 and final_of(response).sampled[-1] == tags.eos
    forest = build_forest([[(0, response)]])
    workers = [sum(lengths) - lengths[0] for lengths in response.worker_lengths]
    # workers 2 and 3 as written and as read
    assert len(forest) == len(response.prompt) + response.total_tokens + sum(workers)
    sees = dense_mask(forest.mask.visible_until)
    start = len(response.prompt) + len(rounds_of(response)[0].director.tokens)
    second, third = response.worker_lengths[0][1], response.worker_lengths[0][2]
    assert not sees[
        start + second : start + second + third, start : start + second
    ].any()  # worker 3 as written never sees worker 2
    assert sees[-1].sum() == len(forest) - sum(workers)  # the end sees each worker once
