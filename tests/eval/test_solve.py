"""`dccot solve`: what is shown, timed and traced is what the engine wrote."""

import functools
import io
import json
import shutil
import sys

import pytest
from rich.console import Console

from dccot.data.prompts import PromptConfig
from dccot.data.task import settings_of
from dccot.eval.live import View, is_finished, parts
from dccot.eval.solve import answer_in, main, solve, summary
from dccot.eval.timeline import Lane, Step, Timeline, _arrows
from dccot.lab.worlds.bigram import save
from dccot.rollout.director import Call, Completion, RolloutConfig, Stop
from dccot.rollout.generate import Request, generate
from dccot.rollout.response import Finish
from tests.support.rounds import final_of, rounds_of

PROBLEM = "What is 1 plus 2?"
BUDGET = 200


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model for what needs no engine, and its folder without the weights next to it."""
    folder = tmp_path_factory.mktemp("models")
    save(folder / "tiny", "spelled")
    shutil.copytree(folder / "tiny", folder / "weightless", ignore=shutil.ignore_patterns("*.safetensors"))
    return folder / "tiny"


@pytest.fixture(scope="module")
def solved(speaker, speaker_engine):
    """The speaker's solution of the problem, by seed."""
    return functools.cache(lambda seed: solve(speaker, PROBLEM, budget=BUDGET, seed=seed, engine=speaker_engine))


@pytest.fixture(scope="module")
def solution(solved):
    return next(s for s in map(solved, range(100)) if len(s.response.forks) > 1 and final_of(s.response) is not None)


@pytest.fixture(scope="module")
def trace(solution):
    return solution.timeline.trace()


def complete_events(trace: dict, process: str) -> list[dict]:
    [pid] = [e["pid"] for e in trace["traceEvents"] if e["name"] == "process_name" and e["args"]["name"] == process]
    return [e for e in trace["traceEvents"] if e["ph"] == "X" and e["pid"] == pid]


def test_watching_changes_nothing(solved, speaker_engine):
    prompt = PromptConfig().ids(speaker_engine.tokenizer, PROBLEM)
    [(_, plain)] = generate(speaker_engine, [Request("problem", 0, prompt)], RolloutConfig(budget=BUDGET), seed=(7,))
    assert solved(7).response.as_read == plain.as_read


def test_the_trace_has_a_slice_for_every_segment_in_its_writers_lane(solution, trace):
    lanes = {e["tid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
    expected = []
    for number, round_ in enumerate(rounds_of(solution.response), start=1):
        expected.append(("director", f"director, part {number}", len(round_.director.sampled)))
        for i, worker in enumerate(round_.workers, start=1):
            expected.append((f"worker {i}", f"worker {i}, round {number}", len(worker.sampled)))
    expected.append(("director", f"director, part {number + 1}", len(final_of(solution.response).sampled)))
    slices = complete_events(trace, "response")
    assert sorted((lanes[e["tid"]], e["name"], e["args"]["sampled"]) for e in slices) == sorted(expected)


def test_workers_begin_when_their_director_ends_and_end_before_it_continues(solution, trace):
    slices = {e["name"]: e for e in complete_events(trace, "response")}
    for number in range(1, len(solution.response.forks) + 1):
        before, after = slices[f"director, part {number}"], slices[f"director, part {number + 1}"]
        for worker in range(1, 4):
            piece = slices[f"worker {worker}, round {number}"]
            assert before["ts"] + before["dur"] <= piece["ts"] <= piece["ts"] + piece["dur"] <= after["ts"]


def test_every_sampled_token_belongs_to_one_engine_step(solution, trace):
    steps, response = complete_events(trace, "engine"), solution.response
    assert sum(e["args"]["tokens"] for e in steps) == response.sampled_tokens
    rounds = [len(r.director.sampled) + max(len(w.sampled) for w in r.workers) for r in rounds_of(response)]
    assert len(steps) == sum(rounds) + len(final_of(response).sampled)


def test_a_steps_batch_is_the_number_of_lanes_open_during_it(trace):
    lanes = complete_events(trace, "response")
    for step in complete_events(trace, "engine"):
        middle = step["ts"] + step["dur"] / 2
        assert step["args"]["batch"] == sum(lane["ts"] <= middle <= lane["ts"] + lane["dur"] for lane in lanes)


def test_arrows_lead_from_the_director_to_its_workers_and_back(solution, trace):
    slices = complete_events(trace, "response")

    def touched(arrow: dict) -> str:
        lane = [s for s in slices if s["tid"] == arrow["tid"]]
        [name] = [s["name"] for s in lane if s["ts"] <= arrow["ts"] <= s["ts"] + s["dur"]]
        return name

    starts, ends = ({e["id"]: touched(e) for e in trace["traceEvents"] if e["ph"] == end} for end in "sf")
    expected = []
    for number in range(1, len(solution.response.forks) + 1):
        for worker in (f"worker {i}, round {number}" for i in (1, 2, 3)):
            expected += [(f"director, part {number}", worker), (worker, f"director, part {number + 1}")]
    assert sorted((starts[key], ends[key]) for key in starts) == sorted(expected)


def test_workers_of_a_worker_are_shown_with_it_and_read_by_it():
    """Worker 1 spawns two; nothing here was sampled, only the paths of the calls and why each ended."""
    one, deeper = (0, 1), [(0, 1, 0, 1), (0, 1, 0, 2)]
    stops = {((), 0): Stop.SPAWN, (one, 0): Stop.SPAWN, (deeper[0], 0): Stop.CLOSE, (deeper[1], 0): Stop.CLOSE}
    stops |= {(one, 1): Stop.CLOSE, ((0, 2), 0): Stop.CLOSE, ((), 1): Stop.EOS}
    timeline = Timeline()
    for place, stop in stops.items():
        lane = Lane(Call(*place, [], [], (), 1, Finish.BUDGET), 0.0, completion=Completion([], [], stop))
        timeline.lanes.append(lane)
    found = [[lane.call.path for lane in part] for part in parts(timeline)]
    assert found == [[(0, 0)], [(0, 1), (0, 1, 0, 1), (0, 1, 0, 2), (0, 1, 1, 0), (0, 2)], [(1, 0)]]
    assert all(map(is_finished, parts(timeline)))
    arrows = [(start.call.path, end.call.path) for start, end in _arrows(timeline.lanes)]
    inner = [(one, path) for path in deeper] + [(path, (0, 1, 1, 0)) for path in deeper]
    outer = [((0, 0), (0, 1)), ((0, 0), (0, 2)), ((0, 1, 1, 0), (1, 0)), ((0, 2), (1, 0))]
    assert sorted(arrows) == sorted(inner + outer)
    timeline.lanes = [lane for lane in timeline.lanes if lane.call.path not in ((0, 1, 1, 0), (1, 0))]
    assert [is_finished(part) for part in parts(timeline)] == [True, False]  # worker 1 has yet to continue
    writers = [lane.call.writer for lane in timeline.lanes]
    assert writers == ["director", "worker 1", "worker 1.1", "worker 1.2", "worker 2"]


def test_sequential_time_counts_only_steps_that_decoded_alone():
    timeline = Timeline()
    timeline.steps = [
        Step(0.0, 9.0, batch=1, prefills=1, tokens=1),  # prefill: not decoding
        Step(9.0, 9.25, batch=1, prefills=0, tokens=1),
        Step(9.25, 9.75, batch=1, prefills=0, tokens=1),
        Step(9.75, 20.0, batch=3, prefills=0, tokens=3),  # not alone
    ]
    assert timeline.seconds_per_token_alone == (0.25 + 0.5) / 2
    assert Timeline().seconds_per_token_alone is None


def test_json_is_one_object_with_the_responses_own_numbers(speaker, speaker_engine, solved, capsys, tmp_path):
    command = [str(speaker), PROBLEM, "--budget", str(BUDGET), "--seed", "3"]
    assert main([*command, "--json", "--trace", str(tmp_path / "t.json")], speaker_engine) == 0
    printed, same = json.loads(capsys.readouterr().out), solved(3)
    assert printed["text"] == same.text
    lengths = same.response.longest_path, same.response.total_tokens
    assert (printed["longest_path"], printed["total_tokens"]) == lengths
    assert printed["sequential_seconds"] == pytest.approx(printed["seconds_per_token_alone"] * printed["total_tokens"])
    assert json.loads((tmp_path / "t.json").read_text())["otherData"]["seed"] == 3


def test_output_that_is_no_terminal_gets_every_segment_in_reading_order(speaker, speaker_engine, solved, capsys):
    assert main([str(speaker), PROBLEM, "--budget", str(BUDGET), "--seed", "3"], speaker_engine) == 0
    printed, response = capsys.readouterr().out, solved(3).response
    headings = [line.split(" · ")[0].removeprefix("── ") for line in printed.splitlines() if line.startswith("── ")]
    expected = []
    for round_ in rounds_of(response):
        expected += ["director", *(f"worker {i}" for i in range(1, 1 + len(round_.workers)))]
    assert headings == expected + ["director"] * (final_of(response) is not None)
    assert "\x1b" not in printed
    assert f"longest path {response.longest_path}, total {response.total_tokens}" in printed


def test_sequential_asks_without_workers(speaker, speaker_engine):
    alone = solve(speaker, PROBLEM, budget=40, sequential=True, engine=speaker_engine)
    assert alone.response.forks == []
    assert alone.response.prompt == PromptConfig(kind="sequential").ids(speaker_engine.tokenizer, PROBLEM)


def on_terminal(timeline: Timeline, width: int, decode) -> str:
    """What a terminal of that width shows of a finished timeline, escape sequences left out."""
    looks = {"force_terminal": True, "color_system": None, "width": width, "height": 40, "legacy_windows": False}
    console = Console(file=io.StringIO(), **looks)
    with View(PROBLEM, decode, console) as view:
        view.show(timeline)
    return console.file.getvalue()


def test_workers_stand_side_by_side_where_columns_are_wide_enough(solution, speaker_engine):
    rounds, decode = len(solution.response.forks), speaker_engine.tokenizer.decode
    wide, narrow = (on_terminal(solution.timeline, width, decode).splitlines() for width in (120, 50))
    assert sum(all(f"worker {i} · " in line for i in (1, 2, 3)) for line in wide) == rounds
    assert not any("worker 1 · " in line and "worker 2 · " in line for line in narrow)
    assert sum("worker 3 · " in line for line in narrow) == rounds


def test_everything_written_is_on_the_terminal_in_the_end(solution):
    shown = on_terminal(solution.timeline, 120, lambda ids: " ".join(f"#{token}" for token in ids))
    assert shown.count("#") == solution.response.sampled_tokens


def test_terminal_escapes_in_a_models_text_are_not_obeyed(solution):
    shown = on_terminal(solution.timeline, 120, lambda ids: "\x1b]0;owned\x07\x1b[31m")
    assert "\x1b]0" not in shown and "\x1b[31m" not in shown


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"<answer>\boxed{\frac{1}{2}}</answer>", r"\frac{1}{2}"),
        (r"first \boxed{1}, then \boxed{2}", "2"),
        (r"\boxed{1} and cut off in \boxed{2", "1"),
        ("<think>…</think><answer> 42 </answer>", "42"),
        ("<answer>cut off", "cut off"),
        ("nothing", None),
    ],
)
def test_the_answer_is_the_last_whole_box_or_else_the_answer_block(text, answer):
    assert answer_in(text) == answer


def test_a_run_is_asked_as_it_was_trained(tmp_path):
    config = tmp_path / "config.yaml"
    config.write_text("prompt: {kind: parallel, open_think: false}\nrollout: {budget: 321, workers: 2}\nseed: 4\n")
    prompt, rollout = settings_of(tmp_path)
    assert (prompt.open_think, rollout.budget, rollout.workers, prompt.parallel) == (False, 321, 2, True)
    config.write_text("prompt: {kind: sequential}\n")
    assert not settings_of(tmp_path)[0].parallel


def test_a_plain_model_is_asked_as_in_the_paper(model):
    assert settings_of(model) == (PromptConfig(spawning=""), RolloutConfig())


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nowhere", PROBLEM], "'nowhere' is neither"),
        (["{model}", "why " * 3000], "tokens; {model} takes 4,096: shorten it"),
        (["{model}/../weightless", PROBLEM], "holds no weights"),
        (["{model}", "  "], "the problem is empty"),
        (["{model}", "<｜User｜>"], "holds the chat token"),
        (["{model}", PROBLEM, "--temperature", "-1"], "rollout.temperature is -1"),
        (["{model}", PROBLEM, "--trace", "no/such/folder/t.json"], "the folder no/such/folder does not exist"),
        (["{model}", PROBLEM, "--budget", "0"], "'0' is not a whole number of at least 1"),
        (["{model}", PROBLEM, "--temprature", "1"], "unrecognized arguments"),
        (["{model}"], "required: problem"),
    ],
)
def test_what_cannot_be_run_costs_one_line_and_no_engine(model, capsys, arguments, says):
    try:
        code = main([argument.format(model=model) for argument in arguments])
    except SystemExit as stopped:
        code = stopped.code
    printed = capsys.readouterr()
    said = [line for line in printed.err.splitlines() if not line.endswith(" …")]  # besides what it is doing
    assert (code, printed.out, len(said)) == (2, "", 1)
    assert says.format(model=model) in said[0]


def test_a_problem_may_come_from_standard_input(model, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n"))
    assert main([str(model), "-"]) == 2
    assert "empty" in capsys.readouterr().err


def test_the_summary_says_how_sequential_time_was_computed(solution):
    text = " ".join(text for _, text in summary(solution))
    alone = sum(step.tokens for step in solution.timeline.steps if step.batch == 1 and not step.prefills)
    assert f"{solution.response.total_tokens} tokens × " in text
    assert f"the {alone} tokens of this run that were decoded alone" in text
