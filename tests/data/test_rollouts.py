"""What an interrupted file or folder holds and lacks, and how it is filled."""

from threading import Event
from types import SimpleNamespace

import pytest

from dccot.core.files import BadData, JsonlWriter, read_jsonl
from dccot.core.plugins import PluginError
from dccot.data.judge import Judge, Verdict
from dccot.data.problems import Problem
from dccot.data.prompts import PromptConfig
from dccot.data.rollouts import Grading, missing_in, missing_pairs, rollout_of, sample_to_file, saved_rows
from dccot.lab.worlds import bigram as tiny
from dccot.rollout.director import RolloutConfig
from dccot.rollout.response import Finish, Rollout, Segment
from tests.support.rounds import flat

PROMPTED = [(Problem(name, "?", "1"), [5]) for name in "ba"]


def rollout(problem: str, sample: int, **changes) -> Rollout:
    response = flat(changes.pop("prompt", [5]), [], Segment([], [7], [-0.5]), Finish.ANSWERED)
    return Rollout(problem, sample, **{"question": "?", "gold": "1", "text": "1", "response": response} | changes)


def test_what_is_missing_comes_in_the_order_of_the_problems_and_nothing_twice():
    assert missing_pairs(PROMPTED, range(2)) == [("b", 0), ("b", 1), ("a", 0), ("a", 1)]
    assert missing_pairs(PROMPTED, iter(range(2)), {("b", 1), ("a", 0), ("c", 0)}) == [("b", 0), ("a", 1)]
    assert missing_pairs(PROMPTED, [0], {("a", 0), ("b", 0)}) == []


def test_rows_of_other_ranks_count_once_and_only_as_many_as_are_wanted(tmp_path):
    files = [tmp_path / f"rank{rank}.jsonl" for rank in range(3)]
    for file, rollouts in zip(files, ([("a", 0), ("c", 0)], [("a", 0), ("b", 1), ("a", 2), ("a", 7)], [])):
        with JsonlWriter(file) as writer:
            assert len(list(sample_to_file(writer, (rollout(*pair) for pair in rollouts)))) == len(rollouts)
    assert [(row["problem"], row["sample"]) for row in saved_rows(files, PROMPTED, 2)] == [("a", 0), ("b", 1)]
    assert missing_in(files, PROMPTED, 2) == [("b", 0), ("a", 1)]


@pytest.mark.parametrize("change", [{"question": "!"}, {"gold": "2"}, {"prompt": [6]}])
def test_a_response_to_what_has_changed_since_is_refused(tmp_path, change):
    with JsonlWriter(tmp_path / "r.jsonl") as writer:
        list(sample_to_file(writer, [rollout("a", 0, **change)]))
    with pytest.raises(BadData, match="of problem 'a' has changed since"):
        missing_in([tmp_path / "r.jsonl"], PROMPTED, 1)


def test_a_file_of_something_else_is_not_continued(tmp_path):
    (tmp_path / "r.jsonl").write_text('{"id": "a", "question": "?", "gold": "1"}\n')
    with pytest.raises(BadData, match=r"r\.jsonl:1: not a rollout; move the file away, or choose another --out"):
        missing_in([tmp_path / "r.jsonl"], PROMPTED, 1)


class Spelled(Judge):
    def grade(self, pairs):
        return [Verdict.CORRECT if text == gold else Verdict.WRONG for text, gold in pairs]


def test_responses_are_graded_while_others_are_sampled_and_come_back_by_turns_not_by_the_judges_speed():
    ready = Event()

    def grade(rollouts: list[Rollout]) -> None:
        assert ready.wait(60)
        for each in rollouts:
            each.verdict = "correct"

    grading = Grading(grade)
    grading.add(7, rollout("a", 0))
    assert grading.done() == grading.due(all=False) == []  # nobody waits for the judge
    grading.add(8, rollout("a", 1))
    ready.set()
    assert [(label, each.sample, each.verdict) for label, each in grading.due(all=False)] == [(7, 0, "correct")]
    assert [(label, each.sample, each.verdict) for label, each in grading.due(all=True)] == [(8, 1, "correct")]
    grading.close()


def test_with_a_judge_each_line_is_written_with_its_verdict_before_it_is_passed_on(tmp_path):
    with JsonlWriter(tmp_path / "r.jsonl") as writer:
        rollouts = (rollout("a", sample, text=str(sample)) for sample in range(130))
        for number, each in enumerate(sample_to_file(writer, rollouts, judge=Spelled())):
            assert each.sample == number and len(list(writer.rows())) == number + 1
    assert [row["sample"] for _, row in read_jsonl(tmp_path / "r.jsonl") if row["verdict"] == "correct"] == [1]


def undecided(text, workers):
    return not text


def failing(text, workers):
    return text[99]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("undecided", "returned False for problem 'a', sample 3; it must return a Flaw"),
        ("failing", "failed on problem 'a', sample 3: IndexError"),
    ],
)
def test_a_format_rule_of_ones_own_that_does_not_decide_is_named(name, said):
    tokens = SimpleNamespace(tokenizer=tiny.tokenizer("mixed"))
    with pytest.raises(PluginError, match=f"format rule {__name__}:{name} {said}"):
        rollout_of(
            PROMPTED[1][0], 3, rollout("a", 3).response, tokens, PromptConfig(), RolloutConfig(), f"{__name__}:{name}"
        )
