"""`dccot eval latency`: what is measured, under which load, and what is made of it."""

import json
import time

import pytest

from dccot.data.problems import load_problems
from dccot.data.task import Task
from dccot.eval.evaluate import eval_config
from dccot.eval.latency import Timing, compare, main, measure
from dccot.rollout.director import RolloutConfig
from dccot.rollout.generate import Request, Watch, generate

pytestmark = pytest.mark.slow


@pytest.fixture(scope="session")
def asked(sums, speaker_engine):
    return Task().prompts(load_problems(sums), speaker_engine.tokenizer)


class Load(Watch):
    """How many responses are going on and how many are done, at every step of the engine."""

    def __init__(self):
        self.begun, self.ended, self.seen = set(), 0, []

    def started(self, request, call):
        self.begun.add(request.sample)

    def answered(self, request, response):
        self.ended += 1

    def stepped(self, engine):
        self.seen.append((len(self.begun) - self.ended, self.ended))


def test_each_response_that_finishes_makes_room_for_the_next_and_changes_no_other(asked, speaker_engine):
    requests = [Request("p", sample, asked[0][1]) for sample in range(9)]
    load = Load()

    def written(concurrency, watch=None):
        how = {"seed": (0,), "watch": watch, "concurrency": concurrency}
        found = generate(speaker_engine, requests, RolloutConfig(budget=60), **how)
        return {request.sample: response.as_read for request, response in found}

    in_turn = written(3, load)
    assert sorted(in_turn) == list(range(9))
    assert all(going_on == min(3, 9 - done) for going_on, done in load.seen)
    assert in_turn == written(None)


def test_every_measured_response_is_timed_once_and_fits_into_the_wall_clock(asked, speaker_engine):
    start = time.perf_counter()
    timings = measure(speaker_engine, asked, eval_config("parallel", 60), concurrency=1, samples=2)
    took = time.perf_counter() - start
    assert sorted((t.problem, t.sample) for t in timings) == [(f"p{i}", n) for i in range(6) for n in range(2)]
    assert all(t.seconds > 0 and 0 < t.longest_path <= 60 for t in timings)
    assert sum(t.seconds for t in timings) < took  # one at a time: they do not overlap
    assert not speaker_engine.pending  # the load after them is gone


def test_a_line_and_a_ratio_are_found_again():
    timings = [
        Timing(method, level, f"p{i}", 0, 0.5 + slope * level * (20 + i * length), 20 + i * length, 0)
        for level in (1, 4)
        for method, slope, length in (("parallel", 0.01, 10), ("sequential", 0.02, 30))
        for i in range(5)
    ]
    one, four = compare(timings)
    assert (one["concurrency"], four["concurrency"]) == (1, 4)
    slopes = [four[method]["seconds_per_token"] for method in ("parallel", "sequential")]
    assert slopes == pytest.approx([0.04, 0.08])
    assert one["parallel"]["intercept"] == pytest.approx(0.5) and one["parallel"]["r2"] == pytest.approx(1)
    assert one["longest_path_ratio"]["value"] == pytest.approx(40 / 80)  # means of 20 + 10 i and 20 + 30 i
    assert one["seconds_ratio"]["value"] == pytest.approx((0.5 + 0.01 * 40) / (0.5 + 0.02 * 80))
    assert one["r2"] < 1  # two lines are not one


def test_lengths_that_do_not_vary_predict_nothing():
    timings = [Timing(method, 1, f"p{i}", 0, 1.0 + i, 7, 7) for method in ("parallel", "sequential") for i in range(3)]
    [level] = compare(timings)
    assert level["r2"] is None and level["parallel"]["seconds_per_token"] is None


def test_the_command_measures_both_models_and_writes_what_it_found(speaker, sums, tmp_path, capfd):
    settings = ["engine.dtype=float32", "engine.context=1024", "engine.max_sequences=16", "engine.kv_cache_gb=0.1"]
    options = {"--baseline": speaker, "--problems": sums, "--concurrency": "1,3", "--budget": 60, "--out": tmp_path}
    options = [str(part) for option in options.items() for part in option]
    assert main([str(speaker), *settings, *options]) == 0
    found = json.loads((tmp_path / "latency.json").read_text())
    assert [level["concurrency"] for level in found["levels"]] == [1, 3]
    assert all(level[method]["responses"] == 6 for level in found["levels"] for method in ("parallel", "sequential"))
    rows = [json.loads(line) for line in (tmp_path / "timings.jsonl").read_text().splitlines()]
    assert len(rows) == 2 * 2 * 6
    assert all(row["total_tokens"] == row["longest_path"] for row in rows if row["method"] == "sequential")
    assert "Wall-clock per response" in capfd.readouterr().out


def test_a_concurrency_that_is_no_number_is_refused(capsys):
    with pytest.raises(SystemExit):
        main(["model", "--baseline", "model", "--problems", "file", "--concurrency", "1,zero"])
    assert "'zero' is not a whole number" in capsys.readouterr().err
