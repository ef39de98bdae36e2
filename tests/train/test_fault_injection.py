"""Fault injection's own arithmetic: which kills there are and in what order they come."""

import pytest

from tests.support.fault_injection.rank import FILES, PHASES
from tests.support.fault_injection.run import DAMAGES, ROSTER, Trial, draw_kills, in_launches, once, open_folder, table


def test_every_phase_is_hit_on_either_rank_and_with_the_whole_job_and_every_step_of_a_checkpoint_is_hit():
    kills = draw_kills(len(ROSTER), seed=3)
    hit = {(kill.moment, kill.victim) for kill in kills}
    assert len(kills) >= 20
    assert {
        (phase, who) for phase in ("rollout", "grade", "update", "sync") for who in ("rank 0", "rank 1", "job")
    } <= hit
    assert {kill.moment for kill in kills} == {*PHASES, *FILES}
    assert all(kill.fraction == 0.0 for kill in kills if kill.moment == "moving latest")


def test_a_killed_job_ends_its_launch_and_some_ranks_are_restarted_by_torchrun():
    for seed in range(20):
        kills = draw_kills(len(ROSTER), seed)
        launches = in_launches(kills, seed)
        assert [kill for launch in launches for kill in launch] == kills
        assert all(kill.victim != "job" for launch in launches for kill in launch[:-1])
        assert any(len(launch) > 1 for launch in launches)
        assert len(launches) > len(DAMAGES), "room to damage a checkpoint in each way"


def test_a_trial_is_good_only_if_all_was_survived_and_nothing_else_was_seen():
    assert Trial("f", 2, 2, "").good
    assert not Trial("f", 2, 1, "").good
    assert not Trial("f", 2, 2, "", ["p"]).good
    assert table([Trial("f", 20_000, 1, "seen")]).splitlines()[2].split("|")[1:4] == [
        " f     ",
        " 20,000 ",
        " 1        ",
    ]


def test_only_a_folder_that_it_made_is_emptied(tmp_path):
    runs, own = tmp_path / "runs", tmp_path / "torture"
    runs.mkdir()
    (runs / "model").write_text("weeks of work")
    with pytest.raises(SystemExit, match="holds files that make torture did not write"):
        open_folder(runs, "this code")
    assert (runs / "model").read_text() == "weeks of work"
    open_folder(own, "this code")
    (own / "kills.json").write_text("[]")
    open_folder(own, "this code")
    assert (own / "kills.json").exists(), "the same code continues"
    open_folder(own, "other code")
    assert not (own / "kills.json").exists()


def test_a_trial_that_has_finished_is_not_tried_again_and_one_that_was_interrupted_starts_anew(tmp_path):
    def interrupted(folder):
        folder.mkdir()
        raise KeyboardInterrupt

    def finished(folder):
        assert not folder.exists(), "what an interrupted trial left is gone"
        return [Trial("f", 2, 2, "seen")]

    with pytest.raises(KeyboardInterrupt):
        once(tmp_path, "signals", interrupted)
    [first] = once(tmp_path, "signals", finished)
    [again] = once(tmp_path, "signals", interrupted)
    assert again == first
