"""The choice of tiles and backend, with a stand-in clock: the fastest that agrees with the oracle, once per machine."""

import json
from dataclasses import replace

import pytest
import torch

from dccot.kernels import autotune, tuning
from dccot.kernels.autotune import Choice, keep, machine, stored, tune
from dccot.kernels.reference import dense_attention, dense_mask
from dccot.kernels.tree_attention import TreeMask, tree_attention
from dccot.kernels.tuning import CHOSEN, INTERPRETER, Tile, shape_of

TOKENS = 34
MASK = TreeMask(torch.tensor([34] * 6 + [15] * 9 + [24] * 9 + [34] * 10))
TINY, OTHER = Tile(16, 16, 1, 1), Tile(32, 32, 1, 1)


@pytest.fixture(autouse=True)
def a_machine(monkeypatch, tmp_path):
    """An empty cache, a small oracle, and three tiles to choose from."""
    monkeypatch.setenv("DCCOT_CACHE", str(tmp_path))
    monkeypatch.setattr(autotune, "SAMPLE", MASK.host)
    monkeypatch.setattr(autotune, "candidates", lambda kernel, *_: [INTERPRETER[0], TINY, OTHER])
    yield
    CHOSEN.clear()
    autotune._CHOICES.clear()


@pytest.fixture
def tensors() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(TOKENS, 1, 32, generator=generator).half() for _ in range(3)]


def clock_with(**fastest: str):
    """Every candidate takes a second, and those whose name ends like this, of a kernel or backend, half as long."""

    def clock(name, run) -> float:
        kernel, _, tile = name.partition(" ")
        return 0.5 if tile == fastest.get(kernel, "nothing") else 1.0

    return clock


def dense(q, k, v, mask, scale):
    return dense_attention(q, k, v, dense_mask(mask.visible_until), scale)


def test_each_kernel_gets_its_own_fastest_tile_and_others_the_first(tensors):
    clock, ran = clock_with(forward=str(OTHER), grad_key=str(TINY)), []
    found = tune(*tensors, MASK, 0.2, lambda name, run: (ran.append(run()), clock(name, run))[1], {})
    assert len(ran) == len(found.seconds), "every candidate can be timed"
    assert found.tiles == {"forward": OTHER, "grad_query": INTERPRETER[0], "grad_key": TINY}
    assert found.backend == "triton" and len(found.seconds) == 3 * 3 + 1
    assert CHOSEN == {}, "nothing is in force until it is used"


def test_a_backend_that_is_faster_wins(tensors):
    found = tune(*tensors, MASK, 0.2, clock_with(flash=""), {"flash": dense})
    assert found.backend == "flash" and found.seconds["flash"] == 0.5


def test_what_disagrees_with_the_oracle_is_never_used_however_fast(tensors, monkeypatch):
    wrong = lambda q, k, v, mask, scale: dense(q, k, v, mask, 1.1 * scale)
    assert tune(*tensors, MASK, 0.2, clock_with(flash=""), {"flash": wrong}).backend == "triton"
    right = autotune._ours

    def wrong_tile(q, k, v, mask, scale):
        tile = CHOSEN.get(shape_of(q, k, mask), {}).get("forward")
        return right(q, k, v, mask, 1.1 * scale if tile == OTHER else scale)

    monkeypatch.setattr(autotune, "_ours", wrong_tile)
    assert tune(*tensors, MASK, 0.2, clock_with(forward=str(OTHER)), {}).tiles["forward"] == INTERPRETER[0]


def test_a_candidate_that_does_not_run_is_left_out(tensors):
    def clock(name, run) -> float:
        if name == f"grad_query {INTERPRETER[0]}":
            raise RuntimeError("out of resource: shared memory")
        return 1.0

    found = tune(*tensors, MASK, 0.2, clock, {})
    assert found.tiles["grad_query"] == TINY and f"grad_query {INTERPRETER[0]}" not in found.seconds


def test_a_choice_is_kept_per_machine_and_shape_and_the_first_one_stays(tensors, tmp_path, monkeypatch):
    shape, device = shape_of(*tensors[:2], MASK), torch.device("cpu")
    assert stored(shape, device) is None
    first = Choice("flash", {"forward": TINY}, {"flash": 0.5})
    assert keep(shape, device, first) == first
    assert keep(shape, device, replace(first, backend="triton")) == first == stored(shape, device)
    assert list(json.loads((tmp_path / "attention.json").read_text())) == [machine(device)]
    assert stored((*shape[:-1], True), device) is None
    monkeypatch.setattr(autotune, "version", lambda package: "another")
    assert stored(shape, device) is None


def test_a_damaged_cache_is_measured_again(tensors, tmp_path):
    (tmp_path / "attention.json").write_text("{")
    assert stored(shape_of(*tensors[:2], MASK), torch.device("cpu")) is None


def test_a_stored_choice_decides_tiles_and_backend(tensors, monkeypatch):
    shape = shape_of(*tensors[:2], MASK)
    keep(shape, torch.device("cpu"), Choice("dense", {"forward": TINY}, {}))
    assert autotune.backend_for(*tensors, MASK, 0.2) == "dense"
    asked = []
    monkeypatch.setattr(tuning, "INTERPRETER", None)  # the table is not asked
    monkeypatch.setitem(CHOSEN, shape, {"forward": TINY})
    asked.append(tree_attention(*tensors, MASK, scale=0.2, backend="triton"))
    torch.testing.assert_close(asked[0], dense(*tensors, MASK, 0.2), rtol=0, atol=2e-2)
    monkeypatch.setenv("DCCOT_TUNE", "0")
    assert autotune.backend_for(*tensors, MASK, 0.2) == "triton"


def test_the_cache_is_read_once_for_a_shape_whose_forests_are_too_small_to_be_timed(tensors, monkeypatch):
    asked = []
    monkeypatch.setattr(autotune, "stored", lambda shape, device: asked.append(shape))
    assert [autotune.backend_for(*tensors, MASK, 0.2) for _ in range(3)] == ["triton"] * 3
    assert asked == [shape_of(*tensors[:2], MASK)]


def test_plain_causal_attention_is_torchs_own_and_refused_for_trees(tensors):
    causal = TreeMask.causal([TOKENS])
    out = tree_attention(*tensors, causal, scale=0.2, backend="sdpa")
    torch.testing.assert_close(out, dense(*tensors, causal, 0.2), rtol=0, atol=2e-2)
    with pytest.raises(ValueError, match="one plain causal sequence, and the mask is a tree"):
        tree_attention(*tensors, MASK, backend="sdpa")


def test_there_are_six_to_eight_tiles_on_every_gpu_the_tables_first(monkeypatch):
    monkeypatch.undo()
    for arch, dims in tuning.TABLE.items():
        for kernel in tuning.ATTENTION_KERNELS:
            for dim in dims:
                found = autotune.candidates(kernel, arch, dim, torch.bfloat16)
                assert 6 <= len(found) == len(set(found)) <= 8
                assert found[0] == tuning.tile_for(kernel, arch, dim, torch.bfloat16)
