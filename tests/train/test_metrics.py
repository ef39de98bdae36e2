"""What a run says about itself, by hand; a resumed run says nothing twice."""

import json
import math
import re
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from tensorboard.plugins.custom_scalar.layout_pb2 import Layout

from dccot.core.config import ConfigError, load_config
from dccot.core.run import Run, steps_until
from dccot.rollout.response import Finish, Response, Segment
from dccot.rollout.tags import Flaw
from dccot.train.charts import LAYOUT, MEANINGS, SFT_LAYOUT, meaning
from dccot.train.config import SFTConfig
from dccot.train.metrics import rollout_metrics, validation_metrics
from dccot.train.recorder import Recorder, console_line, sample_text
from dccot.train.rewards import Graded
from tests.support.rounds import Round, flat


def tokens(count: int) -> Segment:
    return Segment([], [5] * count)


def parallel_response() -> Response:
    """Director 4, workers 3, 5 and 2, director 6: longest path 15 of 20 tokens."""
    return flat([1], [Round(tokens(4), [tokens(3), tokens(5), tokens(2)])], tokens(6))


OVERSHOT = "<spawn_workers>\n<worker_1>a</worker_1>\n\n<worker_2>b</worker_2><worker_3>c</worker_3>The</spawn_workers>"
ROLLOUTS = [
    Graded("a", 0, "q", "2", OVERSHOT, parallel_response(), None, "correct", reward=1.0),
    Graded("a", 1, "q", "2", "t", flat([1], [], tokens(10), Finish.BUDGET), Flaw.NO_SPAWN.value, "wrong", reward=0.0),
    Graded("b", 0, "q", "2", "t", flat([1], [], tokens(5)), Flaw.NO_SPAWN.value, "timed_out", reward=None),
    Graded("b", 1, "q", "2", "t", flat([1], [], tokens(5)), Flaw.NO_THINK.value, "unparsable", reward=0.0),
]


def test_rollout_metrics_by_hand():
    expected = {
        "reward/mean": 1 / 3,  # the unjudged one has no reward
        "reward/correct": 1 / 4,
        "reward/well_formed": 1 / 4,
        "reward/unjudged": 1 / 4,
        "reward/unparsable": 1 / 4,
        "format/no_spawn": 2 / 4,
        "format/no_think": 1 / 4,
        "format/open_worker": 0.0,
        "format/overshoot_newline": 2 / 4,
        "format/overshoot_space": 0.0,
        "format/overshoot_text": 1 / 4,
        "length/longest_path": (15 + 10 + 5 + 5) / 4,
        "length/longest_path_correct": 15.0,
        "length/longest_path_incorrect": 20 / 3,
        "length/total_tokens": (20 + 10 + 5 + 5) / 4,
        "length/truncated": 1 / 4,
        "parallel/degree": (20 / 15 + 3) / 4,
        "parallel/rounds": 1 / 4,
        "parallel/spawn_rate": 1 / 4,
        "parallel/width": 3.0,
        "parallel/width_max": 3.0,
        "parallel/depth": 1 / 4,
        "parallel/paid_off": 1.0,
        "parallel/saved": 3 + 5 + 2 - 5,
        "parallel/worker_length": 10 / 3,
        "parallel/worker_length_max": 5.0,
    }
    found = rollout_metrics(ROLLOUTS)
    assert {name: found[name] for name in expected} == pytest.approx(expected)
    assert {f"format/{flaw.value}" for flaw in Flaw} <= found.keys()


def test_validation_metrics_count_problems_as_the_independent_unit():
    """Problem a: 1 of 2 correct, b: 0 of 2; mean 1/4, standard deviation of (1/2, 0) over √2 is 1/4."""
    found = validation_metrics(ROLLOUTS)
    assert found["validation/accuracy"] == 0.25
    assert found["validation/accuracy_stderr"] == pytest.approx(0.25)
    assert found["validation/longest_path"] == (12.5 + 5) / 2
    assert found["validation/longest_path_stderr"] == pytest.approx((12.5 - 5) / 2)


def resumed(folder, step: int, **more) -> Recorder:
    """As the trainer does."""
    run = Run(folder)
    run.keep_metrics_before(step)
    return Recorder(run, step, active=True, **more)


def scalars(run) -> dict[str, list[tuple[int, float]]]:
    events = EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_a_resumed_run_says_every_step_once_in_jsonl_and_tensorboard(tmp_path):
    first = Recorder(Run(tmp_path), 0, active=True)
    for step in range(5):
        first.write(step, {"reward/mean": float(step), "policy/kl": math.nan})
    first.close()
    again = resumed(tmp_path, 3)  # the newest checkpoint was that of three steps
    for step in range(3, 6):
        again.write(step, {"reward/mean": 10.0 + step})
    again.close()
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(row["step"], row["reward/mean"]) for row in rows] == [(0, 0), (1, 1), (2, 2), (3, 13), (4, 14), (5, 15)]
    assert scalars(tmp_path) == {"reward/mean": [(0, 0), (1, 1), (2, 2), (3, 13), (4, 14), (5, 15)]}


def test_a_clock_that_is_set_back_hides_no_life_of_a_run(tmp_path, monkeypatch):
    """Three starts, each an hour earlier by the clock than the one before; TensorBoard is open from the first on."""
    real, open_one, expected = time.time, None, {}
    for life, first_step in enumerate((0, 3, 4)):
        monkeypatch.setattr("time.time", lambda: real() - 3600 * life)  # noqa: B023 (used before life changes)
        recorder = resumed(tmp_path, first_step)
        for step in range(first_step, first_step + 3):
            recorder.write(step, {"reward/mean": 10.0 * life + step})
            expected[step] = 10.0 * life + step
        recorder.close()
        open_one = open_one or EventAccumulator(str(tmp_path / "tensorboard"), size_guidance={"scalars": 0})
        shown = [(event.step, event.value) for event in open_one.Reload().Scalars("reward/mean")]
        assert shown == list(expected.items()) == scalars(tmp_path)["reward/mean"]


def test_a_run_cut_off_in_the_middle_of_a_line_goes_on(tmp_path):
    recorder = Recorder(Run(tmp_path), 0, active=True)
    recorder.write(0, {"reward/mean": 1.0})
    recorder.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 1, "rew')
    again = resumed(tmp_path, 1)
    again.write(1, {"reward/mean": 2.0})
    again.close()
    assert [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [0, 1]


def test_only_the_main_rank_writes(tmp_path):
    recorder = Recorder(Run(tmp_path), 0, active=False)
    recorder.write(0, {"reward/mean": 1.0})
    recorder.close()
    assert list(tmp_path.iterdir()) == []


def test_a_curve_is_shown_under_its_name_with_its_meaning(tmp_path):
    recorder = Recorder(Run(tmp_path), 0, active=True, settings={"steps": 4, "wandb": None})
    recorder.write(0, {"reward/correct": 0.5, "gap/lag_3_kl": 0.1})
    recorder.close()
    assert list(scalars(tmp_path)) == ["reward/correct", "gap/lag_3_kl"]
    shown = {value.tag: value for value in events_of(tmp_path)}
    assert "answer is right" in shown["reward/correct"].metadata.summary_description
    [legend] = [value for tag, value in shown.items() if tag.startswith("what the curves mean")]
    assert (
        b"| gap/lag_3_kl | As above, of tokens that were sampled so many versions ago. |" in legend.tensor.string_val[0]
    )
    assert {"_hparams_/experiment", "_hparams_/session_start_info"} <= set(shown)


def test_every_line_of_the_meanings_explains_something():
    """A line that another one before it covers would never be shown."""
    for name, about in MEANINGS:
        assert meaning(name.replace("*", "x")) == about, name


def test_stages_continue_on_one_axis(tmp_path, monkeypatch):
    """SFT of 80 steps, stopped after 30; then RL of 8 and of 4 steps from its step 6: RL counts RL alone."""
    monkeypatch.chdir(tmp_path)
    for name, settings in {
        "sft": {"steps": 80, "model": {"path": "somebody/model"}, "rollout": {"workers": 3}},
        "one": {"steps": 8, "model": {"path": "runs/sft"}, "rollout": {}, "reward": {}},
        "two": {"steps": 4, "model": {"path": "runs/one@6"}, "rollout": {}, "reward": {}},
    }.items():
        Run(f"runs/{name}").folder.mkdir(parents=True)
        Run(f"runs/{name}").config_file.write_text(json.dumps(settings))  # JSON is YAML
    Run("runs/sft").latest.write_text("step_000030\n")
    ends = {model: steps_until(model) for model in ("somebody/model", "runs/sft", "runs/one", "runs/two", "runs/two@3")}
    assert ends == {"somebody/model": 0, "runs/sft": 30, "runs/one": 8, "runs/two": 10, "runs/two@3": 9}
    assert steps_until("runs/sft", rl=True) == 0
    recorder = Recorder(Run("runs/two"), 1, active=True, before=steps_until("runs/one@6", rl=True))
    recorder.write(1, {"reward/mean": 1.0})
    recorder.close()
    assert scalars(tmp_path / "runs/two") == {"reward/mean": [(7, 1.0)]}
    assert [row["step"] for row in Run("runs/two").rows()] == [1]


@pytest.mark.parametrize(("metrics", "charts"), [({"reward/mean": 1.0}, LAYOUT), ({"policy/loss": 1.0}, SFT_LAYOUT)])
def test_every_chart_names_curves_by_the_tags_they_have(tmp_path, metrics, charts):
    recorder = Recorder(Run(tmp_path), 0, active=True)
    recorder.write(0, metrics)
    recorder.close()
    [config] = [value for value in events_of(tmp_path) if value.tag == "custom_scalars__config__"]
    layout = Layout.FromString(config.tensor.string_val[0])
    assert [category.title for category in layout.category] == list(charts)
    patterns = [pattern for category in layout.category for chart in category.chart for pattern in chart.multiline.tag]
    names = [name for section in charts.values() for names in section.values() for name in names]
    assert all(re.match(pattern, name) for pattern, name in zip(patterns, names, strict=True))


def events_of(run) -> list:
    [file] = (run / "tensorboard").iterdir()
    return [value for event in EventFileLoader(str(file)).Load() for value in event.summary.value]


def test_the_console_line_shows_what_is_there_and_leaves_out_what_is_not():
    line = console_line(7, 20, {"reward/mean": 0.5, "reward/correct": 0.25, "policy/kl": math.nan, "time/step": 3.21})
    assert line == "step    7 of 20  reward 0.500  correct 25.0%  | 3.2 s"


def test_a_sample_is_shown_to_the_letter():
    rollout = Graded("a", 0, "1+1?", "2", "<think>\n*two*\n</think>", parallel_response(), None, "correct", reward=1.0)
    text = sample_text(rollout)
    assert "longest path **15** of 20 tokens" in text
    assert "    <think>\n    *two*\n    </think>" in text  # indented: TensorBoard shows it as it is and not as markdown


def offline_rows(run: Path) -> list[list[dict]]:
    """What Weights & Biases wrote, one list per start: protobuf records in LevelDB's log format, 32 KB blocks after a
    header of 7 bytes.
    """
    from wandb.proto import wandb_internal_pb2

    found = []
    for file in sorted(run.glob("wandb/offline-run-*/run-*.wandb")):
        data, at, part, rows = file.read_bytes(), 7, b"", []
        while at + 7 <= len(data):
            if 32_768 - at % 32_768 < 7:
                at += 32_768 - at % 32_768
                continue
            length, kind = struct.unpack("<HB", data[at + 4 : at + 7])
            part, at = part + data[at + 7 : at + 7 + length], at + 7 + length
            if kind in (1, 4):  # whole, or the last part
                record, part = wandb_internal_pb2.Record.FromString(part), b""
                if record.history.item:
                    rows.append(
                        {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
                    )
        found.append(rows)
    return found


@pytest.mark.slow
def test_weights_and_biases_gets_the_rows_of_metrics_jsonl_and_a_restart_continues_its_run(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")  # make setup installs it; dccot itself does without
    monkeypatch.setenv("WANDB_MODE", "offline")
    first = Recorder(Run(tmp_path), 0, active=True, wandb="project", settings={"optimizer.learning_rate": 0.5})
    for step in range(3):
        first.write(step, {"reward/mean": step / 2, "validation/accuracy": math.nan})
    first.close()
    again = resumed(tmp_path, 2, wandb="project")
    again.write(2, {"reward/mean": 7.0})
    again.close()
    wandb.teardown()  # waits for the process that writes the files
    told = [[{name: row[name] for name in ("step", "reward/mean")} for row in rows] for rows in offline_rows(tmp_path)]
    assert told == [[{"step": step, "reward/mean": step / 2} for step in range(3)], [{"step": 2, "reward/mean": 7.0}]]
    assert not any("validation/accuracy" in row for rows in offline_rows(tmp_path) for row in rows)
    assert len({file.stem for file in tmp_path.glob("wandb/offline-run-*/run-*.wandb")}) == 1  # one id


def test_without_the_setting_weights_and_biases_is_not_even_imported(tmp_path):
    program = "import sys; from dccot.core.run import Run; from dccot.train.recorder import Recorder; "
    program += "Recorder(Run(sys.argv[1]), 0, True).close()"
    subprocess.run([sys.executable, "-c", f"{program}; assert 'wandb' not in sys.modules", tmp_path], check=True)


def test_a_project_is_refused_where_weights_and_biases_is_not_installed(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="wandb is 'mine', but Weights & Biases is not installed: pip install wandb"):
        load_config(SFTConfig, None, ["wandb=mine", "data.train=x.jsonl", "model.path=x"])
