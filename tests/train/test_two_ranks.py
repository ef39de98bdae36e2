"""What one run of two ranks proves (two_ranks_program.py): packing never matters, ranks measure together, traces merge,
a full disk stops nobody.
"""

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from dccot.core.run import Checkpoint, Run
from dccot.core.runtime import Runtime
from dccot.kernels.tree_attention import TreeMask
from dccot.model.config import read_config
from dccot.model.transformer import Transformer
from dccot.model.weights import load_weights
from dccot.rollout.response import Response, Segment
from dccot.train.objectives import dapo
from tests.train.test_forest import inference_calls
from tests.train.test_token_metrics import agree
from tests.train.test_trace import names, opened
from tests.train.two_ranks_program import LONELY, PACKINGS, gradients

PROGRAM = Path(__file__).with_name("two_ranks_program.py")
RESPONSES = {"prompts": 5, "samples": 4, "seed": 5, "longest": 30, "levels": 3}
PACKED = [name for name in PACKINGS if name != LONELY]


@pytest.fixture(scope="module")
def world(checkpoint, random_responses, torchrun, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("two_ranks")
    for folder in ("1", "2", "profile", "full", "spread"):
        (out / folder).mkdir()
    responses = random_responses(**RESPONSES)
    (out / "responses.json").write_text(json.dumps([response.to_json() for response in responses]))
    (out / "said.txt").write_text(torchrun(2, PROGRAM, checkpoint, out))
    with Runtime.start() as runtime:
        gradients(runtime, checkpoint, out / "responses.json", out / "1")
    return out


def facts(world: Path, ranks: int, packing: str) -> dict:
    return json.loads((world / str(ranks) / "facts.json").read_text())[packing]


def separate_calls(model: Transformer, response: Response, temperature: float) -> Iterator[tuple[Segment, Tensor]]:
    """(segment, log-probs of what it sampled), one causal run per call that inference made, none packed."""
    for context, segment in inference_calls(response):
        ids = torch.tensor(context + segment.tokens)
        mask = TreeMask.causal([len(ids)])
        logprobs = (model(ids, mask.position, mask) / temperature).log_softmax(-1)
        first = len(context) + len(segment.inserted)
        yield segment, logprobs[first - 1 : len(ids) - 1].gather(1, ids[first:, None])[:, 0]


@pytest.fixture(scope="module")
def model(checkpoint) -> Transformer:
    model = Transformer(read_config(checkpoint)).double()
    load_weights(model, checkpoint)
    return model


@pytest.fixture(scope="module")
def expected(world, model, random_responses) -> tuple[float, int, dict[str, Tensor]]:
    """Loss, tokens and gradient in fp64."""
    responses = random_responses(**RESPONSES)
    losses = []
    for response, advantage in zip(responses, torch.linspace(-1.5, 2.0, len(responses))):
        for segment, logprob in separate_calls(model, response, 0.6):
            old = torch.tensor(segment.logprobs, dtype=torch.float32).double()
            kl = torch.exp(old - logprob) - (old - logprob) - 1
            losses.append(dapo(logprob, old, advantage.double(), clip_low=0.2, clip_high=0.28) + 0.001 * kl)
    every = torch.cat(losses)
    model.zero_grad()
    every.mean().backward()
    return float(every.detach().mean()), len(every), {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_mean_of_example_means_depends_neither_on_packing_nor_on_ranks(world, model, random_responses, ranks):
    """SFT's loss and the norm of its gradient, against separate calls in fp64."""
    responses = random_responses(**RESPONSES)
    written = [torch.cat([logprob for _, logprob in separate_calls(model, one, 1.0)]) for one in responses]
    loss = sum(-logprobs.mean() for logprobs in written if len(logprobs)) / len(responses)  # one is empty
    model.zero_grad()
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    norm = float(torch.cat([gradient.flatten() for gradient in gradients]).norm())
    for packing in PACKED:
        assert facts(world, ranks, packing)["example_mean"] == pytest.approx([float(loss.detach()), norm], rel=1e-6)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("packing", PACKED)
def test_gradient_is_that_of_separate_calls_in_fp64(world, expected, packing, ranks):
    """To 1e-6 of the gradient's norm, in fp32."""
    loss, tokens, gradients = expected
    found = load_file(world / str(ranks) / f"{packing}.safetensors")
    assert facts(world, ranks, packing)["tokens"] == tokens
    assert facts(world, ranks, packing)["loss"] == pytest.approx(loss, rel=1e-6)
    whole = torch.cat([gradients[name].flatten() for name in gradients])
    ours = torch.cat([found[name].flatten().double() for name in gradients])
    assert float((ours - whole).norm() / whole.norm()) < 1e-6
    assert facts(world, ranks, packing)["norm"] == pytest.approx(float(whole.norm()), rel=1e-6)


@pytest.mark.parametrize("packing", PACKED)
def test_both_ranks_have_equally_many_micro_batches(world, packing):
    [one], [two] = facts(world, 2, packing)["targets"]
    assert len(one) == len(two)


def test_a_rank_with_nothing_to_do_keeps_in_step(world):
    """One response for two ranks: one of them has no token of its own, and the gradient is still that of one rank."""
    [[mine], [nothing]] = (rank[0] for rank in facts(world, 2, LONELY)["targets"])
    assert (mine > 0, nothing) == (True, 0)
    one, two = (load_file(world / ranks / f"{LONELY}.safetensors") for ranks in "12")
    for name in one:
        torch.testing.assert_close(one[name], two[name], rtol=1e-5, atol=1e-7)


def test_two_ranks_together_measure_what_one_does(world):
    for rank in (0, 1):
        agree(json.loads((world / f"tokens_{rank}.json").read_text()))


def test_what_rank_zero_does_alone_may_take_longer_than_a_collective(world):
    assert [(world / f"alone_{rank}.txt").read_text() for rank in (0, 1)] == ["42", "42"]


@pytest.mark.parametrize(
    ("kind", "first"),
    [
        ("None", "agreed"),
        ("reward", "reward m:r differs between ranks, problem 'b', sample 0: 0.25 on rank 0 and 1.25 on rank 1; "),
        ("filter", "filter m:f differs between ranks, problem 'b', sample 0: True on rank 0 and False on rank 1; "),
        ("advantage", "advantage m:a differs between ranks, problem 'b', sample 0: 0.25 on rank 0 and 1.25 on rank 1"),
        ("credit", "credit m:c differs between ranks, problem 'b', sample 0: [0.25] on rank 0 and [1.25] on rank 1; "),
    ],
)
def test_ranks_that_decide_differently_all_say_where(world, kind, first):
    said = [json.loads((world / f"plugins_{rank}.json").read_text())[kind] for rank in (0, 1)]
    assert said[0] == said[1] and said[0].startswith(first)


def test_a_plugin_that_fails_on_one_rank_ends_all_and_its_traceback_and_line_are_printed_once(world):
    said = (world / "said.txt").read_text()
    assert [json.loads((world / f"plugins_{rank}.json").read_text())["code"] for rank in (0, 1)] == [2, 2]
    [line] = [line for line in said.splitlines() if line.startswith("dccot: judge ")]
    assert line.endswith(
        "my_judge failed on an answer on rank 1: ZeroDivisionError: integer division or modulo by zero"
    )
    assert said.count("in my_judge") == 1


def test_a_full_disk_on_one_rank_stops_neither(world):
    """Rank 0 writes this model's only file of hf/: when it cannot, the others must not be left waiting."""
    assert json.loads((world / "full" / "saved.json").read_text()) == [[True, False, False, True]] * 2
    assert "checkpoint of step 2 was not written (rank 0" in (world / "said.txt").read_text()


def test_ranks_share_the_files_of_a_checkpoint_and_each_sums_its_own(world, checkpoint):
    saved = Checkpoint(world / "spread" / "checkpoints" / "step_000001")
    one, two = (set(json.loads((world / "spread" / f"wrote_{rank}.json").read_text())) for rank in (0, 1))
    weights = {f"hf/{path.name}" for path in saved.hf.glob("*.safetensors")}
    assert len(weights) > 2 and min(len(weights & one), len(weights & two)) >= len(weights) // 2
    assert not one & two and one | two == weights | {f"dcp/{path.name}" for path in saved.dcp.glob("*.distcp")}
    assert saved.damage() is None
    assert Run(world / "spread").latest.read_text() == "step_000001\n"
    here, before = (Transformer(read_config(folder)) for folder in (saved.hf, checkpoint))
    load_weights(here, saved.hf)
    load_weights(before, checkpoint)
    assert all(map(torch.equal, here.parameters(), before.parameters()))


def test_a_rank_that_a_checkpoint_waits_for_is_named_meanwhile(world):
    said = (world / "said.txt").read_text()
    assert "checkpoint of step 1 waits for rank 1, which has not answered for " in said
    assert (world / "missing" / "latest").read_text() == "step_000001\n"


@pytest.fixture(scope="module")
def step_folder(world):
    return world / "profile" / "step_000010"


@pytest.fixture(scope="module")
def merged(step_folder):
    return opened(step_folder / "step_000010.trace.json.gz")  # made by the ranks themselves


def test_ranks_are_named_processes_and_phases_have_a_lane_each(merged):
    assert sorted(names(merged, "process_name").values()) == ["phases", "rank 0 · CPU", "rank 1 · CPU"]
    lanes = names(merged, "thread_name")
    shown = sorted((lanes[e["tid"]], e["ts"], e["name"]) for e in merged if e.get("cat") == "phase")
    assert [(lane, name) for lane, _, name in shown] == [
        (f"rank {r}", name) for r in (0, 1) for name in ("rollout", "update")
    ]


def test_only_chosen_steps_leave_traces(step_folder):
    assert [folder.name for folder in step_folder.parent.iterdir() if folder.is_dir()] == ["step_000010"]
    assert sorted(path.name for path in step_folder.iterdir()) == [
        "rank0.pt.trace.json",
        "rank1.pt.trace.json",
        "step_000010.trace.json.gz",
    ]


def test_no_operator_is_lost(step_folder, merged):
    processes = names(merged, "process_name")
    kinds = ("cpu_op", "user_annotation")
    for rank in (0, 1):
        alone = json.loads((step_folder / f"rank{rank}.pt.trace.json").read_text())["traceEvents"]
        expected = Counter(e["name"] for e in alone if e.get("cat") in kinds)
        found = Counter(
            e["name"] for e in merged if processes[e["pid"]] == f"rank {rank} · CPU" and e.get("cat") in kinds
        )
        assert found == expected and found["aten::mm"]


def test_a_collective_runs_on_both_ranks_at_the_same_time(merged):
    [one, other] = [e for e in merged if e["name"] == "gloo:all_reduce"]
    assert one["pid"] != other["pid"]
    assert one["ts"] < other["ts"] + other["dur"] and other["ts"] < one["ts"] + one["dur"]


def test_arrows_stay_within_their_rank(merged):
    ends: dict[int, set[int]] = {}
    for event in merged:
        if event["ph"] in "sf":
            assert isinstance(event["id"], int)  # Perfetto reads nothing else, but for hexadecimal strings
            ends.setdefault(event["id"], set()).add(event["pid"])
    assert ends and all(len(pids) == 1 for pids in ends.values())
