"""Shapes of trees that kernels are measured on, and the benchmark's outputs."""

import json
import mmap

import pytest
import torch

from dccot.kernels.mask import TreeMask, validate
from dccot.kernels.tree_attention import tree_attention
from dccot.lab.bench import kernels as bench
from dccot.lab.bench import kernels_on_gpu as kernels_gpu
from dccot.lab.bench import trees
from dccot.lab.bench.__main__ import table
from dccot.lab.bench.trees import Shape, forest, paper_like


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    """Sizes are tiny here: threads would only wait for each other."""
    monkeypatch.setattr(bench, "THREADS", 1)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def test_worker_one_needs_no_branch_of_its_own():
    shape = Shape(director=(2, 1), rounds=((2, 1, 3),))
    #       S1     | W2 | W3        | W1       W2  W3          S2
    assert shape.visible_until().tolist() == [13, 13, 3, 6, 6, 6, 13, 13, 13, 13, 13, 13, 13]
    #       S1     | W1    | W2 | W3      | W1 W2 W3 S2
    assert shape.visible_until(duplicates=True).tolist() == [15, 15, 4, 4, 5, 8, 8, 8] + [15] * 7


def test_two_rounds_follow_each_other_on_the_trunk():
    shape = Shape(director=(1, 1, 1), rounds=((1, 1), (1, 2)))
    #                     S1  W2  W1  W2' S2  W2    W1 W2'   S3
    assert shape.visible_until().tolist() == [11, 2, 11, 11, 11, 7, 7, 11, 11, 11, 11]


def test_responses_are_packed_one_after_the_other():
    assert forest([Shape((2,)), Shape((1, 1), ((1, 1),))]).tolist() == [2, 2, 7, 4, 7, 7, 7]


@pytest.mark.parametrize("tokens", [500, 4096, 16384])
def test_paper_like_trees_have_the_requested_size_and_are_forests(tokens):
    for duplicates in (False, True):
        validate(forest(paper_like(tokens, seed=3), duplicates))
    assert abs(len(forest(paper_like(tokens, seed=3))) - tokens) <= 0.01 * tokens + 10


def test_responses_that_share_a_prompt_hold_it_once():
    responses = trees.shapes("shared-3x200", 0)
    shared, apart = trees.tree("shared-3x200", 0), forest(responses)
    validate(shared)
    assert (
        len(apart) - len(shared) == 2 * 200
        and shared[:200].unique().tolist() == [len(shared)]
        and shared[200] < len(shared)
    )


def segment(inserted: int, sampled: int) -> dict:
    return {"inserted": [7] * inserted, "sampled": [7] * sampled, "logprobs": [0.0] * sampled}


def test_shapes_come_from_a_rollout_file(tmp_path):
    rounds = [{"director": segment(0, 5), "workers": [segment(1, 3), segment(1, 2)]}]
    complete = {"prompt": [7] * 10, "rounds": rounds, "final": segment(2, 6), "finish": "answered"}
    out_of_budget = {"prompt": [7] * 10, "rounds": rounds, "final": None, "finish": "budget"}
    file = tmp_path / "step_000001.jsonl"
    file.write_text(
        "\n".join(json.dumps({"problem": "1", "response": response}) for response in (complete, out_of_budget)) + "\n"
    )
    assert trees.shapes(str(file), tokens=100) == [Shape((15, 8), ((4, 3),)), Shape((15, 0), ((4, 3),))]
    assert len(trees.shapes(str(file), tokens=34)) == 1
    for shape in trees.shapes(str(file), tokens=100):
        validate(forest([shape]))


def test_an_unknown_shape_is_an_error_with_the_choices(capsys):
    assert bench.main(["attention", "--tree", "bush"]) == 2
    assert (
        "no tree shape 'bush': use paper, one, shared-7x200, packs, causal or the path of a rollout JSONL"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize("arguments", [["attention", "--tokens", "300", "--heads", "2", "--key-heads", "1", "--head-dim", "16"],
                                       ["logprob", "--rows", "20", "--vocabulary", "300", "--hidden", "16"]])  # fmt: skip
def test_the_command_writes_table_json_plot_and_trace(arguments, tmp_path, capsys):
    assert bench.main([*arguments, "--profile", "--output", str(tmp_path)]) == 0
    rows = json.loads((tmp_path / f"{arguments[0]}.json").read_text())
    printed = capsys.readouterr().out
    assert all(row["name"] in printed and set(row) == {"name", "value", "unit", "target", "better"} for row in rows)
    assert (tmp_path / f"{arguments[0]}.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((tmp_path / f"{arguments[0]}.trace.json").read_text())["traceEvents"]


def test_every_promised_ratio_is_among_the_rows():
    targets = {row["target"] for row in bench.run(quick=True)}
    assert {0.85, 0.15, 20, 4, 3, 8, 1.35, 1e-5} <= targets


def test_peak_memory_sees_an_allocation_and_forgets_it_when_reset():
    before = bench.reset_peak_memory()
    with mmap.mmap(-1, 64 * 2**20) as block:  # not from the heap, which keeps what it has
        block[::4096] = bytes(64 * 2**20 // 4096)  # every page
    assert bench.peak_memory() - before > 60 * 2**20
    assert bench.reset_peak_memory() - before < 30 * 2**20


def test_a_candidate_that_fails_or_is_not_installed_leaves_its_reason_and_ends_nothing(monkeypatch):
    """The loop of the GPU benchmark, with candidates of which one is broken, one forward-only, one missing."""
    monkeypatch.setattr(kernels_gpu, "_milliseconds", lambda function: function() and 2.0)
    tokens = trees.tree("paper", 200)
    mask = TreeMask(tokens)

    def broken(q, k, v):
        raise RuntimeError("CUDA error: no kernel image\nfor this device")

    candidates = {
        "broken": lambda: broken,
        "missing": lambda: kernels_gpu.flash_attention(tokens, "flash_attention_that_nobody_installed"),
        "forward only": lambda: lambda q, k, v: (q.detach(),),
        "whole": lambda: lambda q, k, v: (tree_attention(q, k, v, mask),),
    }
    rows, speed = kernels_gpu.compared(
        candidates, bench.attention_inputs(len(tokens), 2, 1, 32), dict.fromkeys(candidates, 4e9)
    )
    assert speed == {("forward only", "forward"): 2.0, ("whole", "forward"): 2.0, ("whole", "forward + backward"): 7.0}
    reasons = {row["name"].removeprefix("attention: "): row.get("reason") for row in rows}
    assert reasons["broken, forward"] == "failed: RuntimeError: CUDA error: no kernel image"
    assert reasons["missing, forward"] == "not run: No module named 'flash_attention_that_nobody_installed'"
    assert "does not require grad" in reasons["forward only, forward + backward"]
    assert reasons["whole, forward"] is None
    printed = table(rows)
    assert "failed: RuntimeError: CUDA error" in printed and json.loads(json.dumps(rows)) == rows


def test_a_dense_mask_that_cannot_fit_is_not_tried(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (10**9, 10**9))
    with pytest.raises(kernels_gpu.DoesNotFit, match=r"takes 1.2 GB at 20,000 tokens, 1.0 GB are free"):
        kernels_gpu.dense_that_fits(torch.full((20_000,), 20_000))
