"""Shapes of trees that kernels are measured on, and the benchmarks' outputs."""

import json
import mmap

import pytest
import torch

from dccot.kernels.mask import TreeMask, validate
from dccot.kernels.tree_attention import tree_attention
from dccot.lab.bench import harness, kernels_on_gpu, trees
from dccot.lab.bench import kernels as bench
from dccot.lab.bench.step import paper_layout
from dccot.lab.bench.trees import Shape, forest, paper_like
from dccot.rollout.response import Segment
from tests.support.rounds import Round, flat


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    """Sizes are tiny here: threads would only wait for each other."""
    monkeypatch.setattr(bench, "THREADS", 1)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize(
    ("shape", "duplicates", "expected"),
    [
        #                                          S1  | W2 | W3  | W1, W2, W3 as read, S2
        (Shape((2, 1), ((2, 1, 3),)), False, [13] * 2 + [3] + [6] * 3 + [13] * 7),
        #                                          S1  | W1 | W2 | W3 | W1, W2, W3 as read, S2
        (Shape((2, 1), ((2, 1, 3),)), True, [15] * 2 + [4] * 2 + [5] + [8] * 3 + [15] * 7),
        #                                          S1  | W2 | W1, W2 as read, S2 | W2 | W1, W2 as read, S3
        (Shape((1, 1, 1), ((1, 1), (1, 2))), False, [11] + [2] + [11] * 3 + [7] * 2 + [11] * 4),
    ],
)
def test_worker_one_needs_no_branch_of_its_own(shape, duplicates, expected):
    assert shape.visible_until(duplicates).tolist() == expected


def test_responses_are_packed_one_after_the_other():
    assert forest([Shape((2,)), Shape((1, 1), ((1, 1),))]).tolist() == [2, 2, 7, 4, 7, 7, 7]


@pytest.mark.parametrize("tokens", [500, 4096, 16384])
def test_paper_like_trees_have_the_requested_size_and_are_forests(tokens):
    for duplicates in (False, True):
        validate(forest(paper_like(tokens, seed=3), duplicates))
    assert abs(len(forest(paper_like(tokens, seed=3))) - tokens) <= 0.01 * tokens + 10


def test_responses_that_share_a_prompt_hold_it_once():
    shared, apart = trees.tree("shared-3x200", 0), forest(trees.shapes("shared-3x200", 0))
    validate(shared)
    assert len(apart) - len(shared) == 2 * 200
    assert shared[:200].unique().tolist() == [len(shared)] and shared[200] < len(shared)


def test_shapes_come_from_a_rollout_file(tmp_path):
    segment = lambda inserted, sampled: {"inserted": [7] * inserted, "sampled": [7] * sampled}
    rounds = [{"director": segment(0, 5), "workers": [segment(1, 3), segment(1, 2)]}]
    whole = {"prompt": [7] * 10, "rounds": rounds, "finish": "answered"}
    responses = [whole | {"final": final} for final in (segment(2, 6), None)]
    file = tmp_path / "step_000001.jsonl"
    file.write_text("".join(json.dumps({"problem": "1", "response": response}) + "\n" for response in responses))
    assert trees.shapes(str(file), tokens=100) == [Shape((15, 8), ((4, 3),)), Shape((15, 0), ((4, 3),))]
    assert len(trees.shapes(str(file), tokens=34)) == 1


def test_the_reference_holds_every_worker_twice():
    """By hand: prompt 2, director 1 | worker 1: tag, word | worker 2: tag, two words | both as read, final 1."""
    workers = [Segment([8], [1], [0.0]), Segment([9], [2, 3], [0.0] * 2)]
    response = flat([5, 6], [Round(Segment([], [7], [0.0]), workers)], Segment([4], [0], [0.0]))
    tokens, visible_until, targets = paper_layout(response)
    assert tokens.tolist() == [5, 6, 7, 8, 1, 9, 2, 3, 8, 1, 9, 2, 3, 4, 0]
    assert visible_until.tolist() == [15] * 3 + [5] * 2 + [8] * 3 + [15] * 7
    assert targets.tolist() == [2, 4, 6, 7, 14]


def test_an_unknown_shape_is_an_error_with_the_choices(capsys):
    assert bench.main(["attention", "--tree", "bush"]) == 2
    choices = "use paper, one, shared-7x200, packs, causal or the path of a rollout JSONL"
    assert f"no tree shape 'bush': {choices}" in capsys.readouterr().err


ATTENTION = "attention --tokens 300 --heads 2 --key-heads 1 --head-dim 16"
LOGPROB = "logprob --rows 20 --vocabulary 300 --hidden 16"


@pytest.mark.parametrize("command", [ATTENTION, LOGPROB])
def test_the_command_writes_table_json_and_trace(command, tmp_path, capsys):
    name, *options = command.split()
    assert bench.main([name, *options, "--profile", "--output", str(tmp_path)]) == 0
    rows, printed = json.loads((tmp_path / f"{name}.json").read_text()), capsys.readouterr().out
    keys = {"name", "value", "unit", "target", "better"}
    assert all(row["name"] in printed and set(row) - {"reason"} == keys for row in rows)
    events = json.loads((tmp_path / f"{name}.trace.json").read_text())["traceEvents"]
    assert {f"{name} forward", f"{name} backward"} <= {event.get("name") for event in events}


def test_attention_has_speeds_of_either_pass_and_claims_no_peak_of_a_cpu():
    """Twelve tokens, all of one sequence: 78 pairs, 4 flops for each of 2 × 16 numbers, 2.5 times as many backward."""
    rows = {row["name"]: row for row in bench.attention_rows("causal", 12, 2, 1, 16)}
    for what, work in (("forward", 78 * 4 * 2 * 16), ("backward", 2.5 * 78 * 4 * 2 * 16)):
        speed = next(row["value"] for name, row in rows.items() if row["unit"] == "TFLOP/s" and f", {what}, " in name)
        assert speed * 1e12 == pytest.approx(work / (rows[f"attention: cpu, {what}"]["value"] / 1e3))
    peak = rows["attention: cpu, share of peak"]
    assert peak["value"] is None and peak["reason"] == "no peak is known for a CPU"


def test_every_promised_ratio_is_among_the_rows():
    targets = {(row["target"], row["better"]) for row in bench.run(quick=True)}
    at_least, at_most = (0.85, 20, 3, 8), (0.15, 4, 1.35, 1e-5)
    assert {*((target, "higher") for target in at_least), *((target, "lower") for target in at_most)} <= targets


def test_a_row_is_short_on_the_wrong_side_of_its_target():
    missed = [harness.row("a", 2.0, "×", 3, "higher"), harness.row("b", 2.0, "s", 1.0), harness.row("c", 2.0, "s", 3.0)]
    assert [harness.falls_short(row) for row in missed] == [True, True, False]
    assert [line.split()[-1] for line in harness.table(missed).splitlines()[1:]] == ["short", "short", "3"]


def test_small_sizes_are_judged_by_targets_of_their_own():
    rows = [harness.row("work: share", 0.8, "share", 0.85, "higher"), harness.row("loss", 1e-3, "relative", 1e-5)]
    rows.append(harness.row("times faster", 0.7, "×", 3, "higher"))
    judged = harness.judged_quick(rows, {"work": 0.75})
    assert [row["target"] for row in judged] == [0.75, 1e-5, None]
    assert [harness.falls_short(row) for row in judged] == [False, True, False]


def test_peak_memory_sees_an_allocation_and_forgets_it_when_reset():
    with harness.peak_memory() as first, mmap.mmap(-1, 64 * 2**20) as block:  # not from the heap, which keeps its own
        block[::4096] = bytes(64 * 2**20 // 4096)  # every page
    with harness.peak_memory() as second:
        pass
    assert first.most - first.before > 60 * 2**20 and second.most - first.before < 30 * 2**20


def test_a_candidate_that_fails_or_is_not_installed_leaves_its_reason_and_ends_nothing(monkeypatch):
    """The loop of the GPU benchmark, with candidates of which one is broken, one forward-only, one missing; it takes
    2 ms forward, where one tensor comes back, and 6 with the backward, where three do.
    """
    monkeypatch.setattr(kernels_on_gpu, "_milliseconds", lambda function: 2.0 * len(function()))
    tokens = trees.tree("paper", 200)
    mask = TreeMask(tokens)

    def broken(q, k, v):
        raise RuntimeError("CUDA error: no kernel image\nfor this device")

    candidates = {
        "broken": lambda: broken,
        "missing": lambda: kernels_on_gpu.flash_attention(tokens, "flash_attention_that_nobody_installed"),
        "forward only": lambda: lambda q, k, v: (q.detach(),),
        "whole": lambda: lambda q, k, v: (tree_attention(q, k, v, mask),),
    }
    inputs = bench.attention_inputs(len(tokens), 2, 1, 32)
    rows, speed = kernels_on_gpu.compared(candidates, inputs, dict.fromkeys(candidates, 4e9))
    whole = {"forward": 4 / 2, "backward": 2.5 * 4 / 4, "forward + backward": 3.5 * 4 / 6}
    assert speed == {("forward only", "forward"): 2.0} | {("whole", what): value for what, value in whole.items()}
    reasons = {row["name"].removeprefix("attention: "): row.get("reason") for row in rows}
    assert reasons["broken, forward"] == "failed: RuntimeError: CUDA error: no kernel image"
    assert reasons["missing, forward"] == "not run: No module named 'flash_attention_that_nobody_installed'"
    assert "does not require grad" in reasons["forward only, forward + backward"]
    assert reasons["whole, forward"] is None and "failed: RuntimeError: CUDA error" in harness.table(rows)


def test_a_dense_mask_that_cannot_fit_is_not_tried(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (10**9, 10**9))
    with pytest.raises(kernels_on_gpu.DoesNotFit, match=r"takes 1.2 GB at 20,000 tokens, 1.0 GB are free"):
        kernels_on_gpu.dense_that_fits(torch.full((20_000,), 20_000))
