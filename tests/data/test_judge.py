"""The grader says what math-verify says, and what happened when math-verify could not say anything."""

import json
import logging
import os
import random
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace

import pytest

from dccot.core.config import ConfigError, check
from dccot.core.plugins import PluginError
from dccot.data.judge import Grader, GradingConfig, Judge, Verdict, open_judge, verdicts_of

C, W, U = Verdict.CORRECT, Verdict.WRONG, Verdict.UNPARSABLE

MATRIX = r"\begin{pmatrix} 1 & 2 \\ 3 & %d \end{pmatrix}"
BOXED = [  # gold, answers that are right in a box, answers that are wrong; all worked out by hand
    ("42", ["42"], ["-42"]),
    (r"\boxed{42}", ["42"], []),
    ("$42$", ["42"], ["43"]),
    ("7", ["007"], []),
    ("1234", ["1{,}234"], []),
    (r"\frac{1}{2}", ["0.5", r"\dfrac{2}{4}", "1/2"], []),
    ("0.5", [r"\frac12"], []),
    (r"\frac{1}{3}", ["0.333333"], ["0.33", r"\frac{1}{2}"]),
    (r"\sqrt{8}", [r"2\sqrt{2}"], [r"\sqrt{3}"]),
    (r"\frac{1}{\sqrt{2}}", [r"\frac{\sqrt{2}}{2}"], []),
    (r"50\%", [r"50\%"], []),
    ("(x+1)^2", ["x^2+2x+1"], ["x^2+2x+2"]),
    ("2y", [], ["2x"]),
    ("5", ["x=5", "\n5\n"], []),
    ("x=5", ["5"], []),
    ("(1,2)", ["(1,2)"], ["(2,1)"]),
    (r"\{1,2\}", [r"\{2,1\}"], [r"\{1,2,3\}"]),
    ("2,1", ["1,2"], []),
    ("[0,1)", ["[0,1)"], ["[0,1]"]),
    (r"(-\infty, 3)", [r"(-\infty,3)"], []),
    (MATRIX % 4, [MATRIX % 4], [MATRIX % 5]),
    (r"\text{Tuesday}", [r"\text{Tuesday}"], [r"\text{Monday}"]),
    (r"\frac{\pi}{4}", [r"\pi/4"], []),
    ("3+4i", ["3+4i"], ["3-4i"]),
    ("1024", ["2^{10}"], []),
    (["3", r"\frac{7}{2}"], [r"\frac{7}{2}"], ["4"]),
    (["no", "3"], ["3"], []),
    ("90", [r"90^\circ"], []),
    ("18.90", [r"\$18.90"], []),
    ("10", [r"10\text{ cm}"], []),
]
TWO_BOXES = "first \\boxed{1}" + " then something else" * 5 + "\nand \\boxed{2}"
WHOLE = [  # (response, gold, verdict), worked out by hand
    (r"The total is 1,234 apples.", "1234", C),
    (TWO_BOXES, "2", C),
    (TWO_BOXES, "1", W),
    (r"\boxed{1} and \boxed{2}", "1,2", C),  # boxes side by side are one set to math-verify
    (r"\boxed{1} and \boxed{2}", "2", W),
    (r"so the final answer is $7$", "7", C),
    ("<think>1+1</think><answer>It is \\boxed{2}.</answer>", "2", C),
    ("I do not know.", "2", U),
    ("", "2", U),
    (r"\boxed{}", "2", U),
]
BY_HAND = [
    (rf"\boxed{{{answer}}}", gold, verdict)
    for gold, right, wrong in BOXED
    for verdict, answers in ((C, right), (W, wrong))
    for answer in answers
] + WHOLE


def latex(value: Fraction) -> str:
    sign = "-" if value < 0 else ""
    return str(value) if value.denominator == 1 else rf"{sign}\frac{{{abs(value.numerator)}}}{{{value.denominator}}}"


def constructed(rng: random.Random) -> tuple[str, str, Verdict]:
    """A pair that is right or wrong by construction: exact arithmetic decides, not a parser."""
    right = rng.random() < 0.5
    a, b, c = rng.randint(-99, 99), rng.randint(1, 40), rng.randint(2, 12)
    off = 0 if right else rng.choice([-3, -1, 1, 2])
    workers = f"<worker_1>{a}</worker_1><worker_2>{b}</worker_2><worker_3>0</worker_3>"
    filler = "Let me check $x^2 = 4$ and then 17 again. " * rng.randint(1, 40)
    answer, gold = rng.choice(
        [
            (f"{a + off}", f"{a}"),
            (latex(Fraction(a, b) + off), rf"\frac{{{a * c}}}{{{b * c}}}"),
            (f"{a + off}.{b:02d}", latex(Fraction(f"{a}.{b:02d}"))),
            (f"{a + off}+{b}", f"{a + b}"),
            (f"x^2+({b + c})x+({b * c + off})", f"(x+{b})(x+{c})"),
            (rf"{c}\sqrt{{{b + off * b}}}", rf"\sqrt{{{c * c * b}}}"),
            (rf"\{{{b + c + abs(off)}, {-b}\}}", rf"\{{{-b}, {b + c}\}}"),
            (f"({a + off}, {b})", f"({a}, {b})"),
            (f"{c}^{{{4 + abs(off)}}}", f"{c**4}"),
            (f"{filler}\nSo the answer is \\(\\boxed{{{a + off}}}\\).", f"{a}"),
            (
                f"<think>s<spawn_workers>{workers}</spawn_workers></think><answer>\\boxed{{{a + b + off}}}</answer>",
                f"{a + b}",
            ),
        ]
    )
    return answer if "boxed" in answer else rf"\boxed{{{answer}}}", gold, C if right else W


def two_hundred() -> list[tuple]:
    rng = random.Random(7)
    pairs = {json.dumps(case[:2]): case for case in BY_HAND}
    while len(pairs) < 200:
        case = constructed(rng)
        pairs.setdefault(json.dumps(case[:2]), case)
    return list(pairs.values())


CLEAN = r"""
import json, sys
from math_verify import parse, verify
for text, golds in json.load(sys.stdin):
    answer = parse(text)
    print(any(verify(parse("\\boxed{%s}" % g if "boxed" not in g else g), answer) for g in golds))
"""


@pytest.fixture(scope="module")
def grader():
    with Grader(GradingConfig(workers=2, seconds=5)) as shared:
        yield shared


@pytest.mark.slow
def test_two_hundred_verdicts_are_those_worked_out_by_hand_and_by_a_clean_math_verify(grader):
    cases = two_hundred()
    verdicts = grader.grade([(text, gold) for text, gold, _ in cases])
    assert [case for case, verdict in zip(cases, verdicts) if case[2] != verdict] == []
    plain = [(text, [gold.strip("$")] if isinstance(gold, str) else gold) for text, gold, _ in cases]
    program = [sys.executable, "-c", CLEAN]
    clean = subprocess.run(program, input=json.dumps(plain), capture_output=True, text=True, check=True)
    assert [line == "True" for line in clean.stdout.split()] == [verdict == C for verdict in verdicts]


def test_order_is_kept_and_identical_pairs_are_graded_once(grader, monkeypatch):
    asked = []
    original = type(grader)._ask_all
    monkeypatch.setattr(type(grader), "_ask_all", lambda self, tasks: asked.extend(tasks) or original(self, tasks))
    pairs = [(rf"\boxed{{{n % 5}}}", str(n % 3)) for n in range(150)]
    assert grader.grade(pairs) == [C if n % 5 == n % 3 else W for n in range(150)]
    assert len(asked) == 15


def test_answer_block_alone_is_read_when_asked_for():
    text = r"<think>\boxed{1}</think><answer>\boxed{2}</answer> or rather \boxed{3}"
    with Grader(GradingConfig(workers=1, answer_block_only=True)) as strict:
        assert strict.grade([(text, "2"), (text, "3"), (r"<think>\boxed{2}", "2")]) == [C, W, U]


def test_grading_works_on_a_thread_other_than_the_main_one(grader):
    with ThreadPoolExecutor(1) as threads:
        assert threads.submit(grader.grade, [(r"\boxed{\frac{1}{2}}", "0.5"), (r"\boxed{1}", "2")]).result() == [C, W]


@pytest.mark.parametrize(
    "pairs, alarm, level",
    [
        ([("hm", "2"), ("no", "3")], "not one of 2 answers could be judged (2 unparsable)", logging.ERROR),
        ([(r"\boxed{1}", "2")], "not one of 1 answers is correct (1 wrong)", logging.WARNING),
        ([(r"\boxed{2}", "2"), (r"\boxed{1}", "2")], None, None),
    ],
)
def test_a_batch_without_a_judged_or_without_a_correct_answer_raises_an_alarm(grader, caplog, pairs, alarm, level):
    with caplog.at_level(logging.WARNING, "dccot.grading"):
        grader.grade(pairs)
    if alarm is None:
        assert grader.alarm is None and not caplog.records and grader.counts == {C: 1, W: 1}
    else:
        assert alarm in grader.alarm == caplog.records[-1].message and caplog.records[-1].levelno == level


def test_of_several_golds_any_is_right_or_as_in_the_release_only_the_first(grader):
    pairs = [(rf"\boxed{{{answer}}}", ["2", "-2"]) for answer in ("2", "-2", "3")]
    assert grader.grade(pairs) == [Verdict.CORRECT, Verdict.CORRECT, Verdict.WRONG]
    with Grader(GradingConfig(workers=1, golds="first")) as first:
        assert first.grade(pairs) == [Verdict.CORRECT, Verdict.WRONG, Verdict.WRONG]


def test_gold_that_cannot_be_parsed_is_named(grader, caplog):
    with caplog.at_level(logging.ERROR, "dccot.grading"):
        assert grader.grade([(r"\boxed{2}", " "), (r"\boxed{2}", "2")]) == [U, C]
    assert "no answer to that problem can be right" in caplog.text and grader.bad_golds == {r"\boxed{}"}


def test_every_answer_that_was_graded_is_a_sign_of_life(monkeypatch, grader):
    beats = []
    monkeypatch.setattr(grader, "beat", lambda: beats.append(1))
    grader.grade([(rf"\boxed{{{number}}}", "7") for number in range(9)])
    assert len(beats) == 9


def test_empty_batch_is_empty(grader):
    assert grader.grade([]) == [] and grader.equivalence_classes([]) == []


ENDLESS = r"\boxed{\sum_{i=1}^{1000000000} i^{i}}"


def test_killed_worker_costs_its_own_answer_only():
    with Grader(GradingConfig(workers=1, seconds=60)) as fragile:
        assert fragile.grade([(r"\boxed{1}", "1")]) == [C]
        keeper, worker = fragile.pids()
        killer = threading.Timer(0.5, os.kill, (worker, signal.SIGKILL))
        killer.start()
        assert fragile.grade([(ENDLESS, "1"), (r"\boxed{2}", "2")]) == [Verdict.CRASHED, C]
        assert fragile.pids()[0] == keeper


def test_killed_grading_process_costs_nothing():
    with Grader(GradingConfig(workers=1)) as fragile:
        assert fragile.grade([(r"\boxed{1}", "1")]) == [C]
        os.kill(fragile.pids()[0], signal.SIGKILL)
        assert fragile.grade([(r"\boxed{2}", "2"), (r"\boxed{3}", "2")]) == [C, W]


@pytest.mark.slow
def test_worker_dies_with_its_keeper_and_its_answer_is_tried_again():
    with Grader(GradingConfig(workers=1, seconds=1)) as fragile:
        fragile.grade([(r"\boxed{1}", "1")])
        keeper, worker = fragile.pids()
        threading.Timer(0.3, os.kill, (keeper, signal.SIGKILL)).start()
        assert fragile.grade([(ENDLESS, "1")]) == [Verdict.TIMED_OUT]
        assert not alive(worker)


ORPHAN = r"""
import os, sys, time
from dccot.data.judge import Grader, GradingConfig
grader = Grader(GradingConfig(workers=1, seconds=600))
grader.grade([(r"\boxed{1}", "1")])
stranger = os.fork()  # inherits the pipes to the grading process, so that these do not close when the grader dies
if stranger == 0:
    time.sleep(900)
    os._exit(0)
print(*grader.pids(), stranger, flush=True)
grader.grade([(sys.argv[1], "1")])
"""


def test_no_process_survives_a_killed_grader():
    child = subprocess.Popen([sys.executable, "-c", ORPHAN, ENDLESS], stdout=subprocess.PIPE, text=True)
    keeper, worker, stranger = map(int, child.stdout.readline().split())
    time.sleep(0.3)
    child.kill()
    child.wait()
    child.stdout.close()
    deadline = time.monotonic() + 600
    while any(map(alive, (keeper, worker))) and time.monotonic() < deadline:
        time.sleep(0.05)
    os.kill(stranger, signal.SIGKILL)
    assert not alive(keeper) and not alive(worker)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.parametrize(
    "math_verify, said",
    [
        ("raise ImportError('antlr does not fit')", "antlr does not fit"),
        (
            "parse = lambda text, **_: [text]\nverify = lambda *_, **__: False",
            "two known answers.*reinstall math-verify",
        ),
        (
            "parse = lambda text, **_: [text]\nverify = lambda *_, **__: exit(1)",
            "lack memory: ulimit -v is 1073741824;",
        ),
    ],
)
def test_grader_that_cannot_start_or_cannot_tell_right_from_wrong_says_so(monkeypatch, tmp_path, math_verify, said):
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "math_verify.py").write_text(math_verify)
    usual = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (2**40, usual[1]))
    try:
        with Grader(GradingConfig(workers=1)) as useless, pytest.raises(RuntimeError, match=said):
            useless.grade([(r"\boxed{1}", "1")])
    finally:
        resource.setrlimit(resource.RLIMIT_AS, usual)


def test_grading_processes_are_light_and_know_no_secrets(grader, monkeypatch):
    monkeypatch.setenv("PLANTED_API_KEY", "sk-planted")
    with Grader(GradingConfig(workers=1)) as fresh:
        fresh.grade([(r"\boxed{1}", "1")])
        for pid in fresh.pids():
            assert "sk-planted" not in Path(f"/proc/{pid}/environ").read_text()
            assert "torch" not in Path(f"/proc/{pid}/maps").read_text()


@pytest.mark.parametrize(
    "wrong, said",
    [
        ({"workers": 0}, "grading.workers is 0"),
        ({"seconds": 0}, "grading.seconds is 0"),
        ({"memory_mb": 0}, "grading.memory_mb is 0"),
        ({"kind": "math_verfy"}, "grading.kind is 'math_verfy'; it must be one of math_verify or your own"),
    ],
)
def test_impossible_settings_are_refused(wrong, said):
    with pytest.raises(ConfigError, match=re.escape(said)):
        check(GradingConfig(**wrong), "grading")


def test_equivalence_classes_follow_math_verify_and_unparsable_answers_stand_alone(grader):
    answers = [r"\frac{1}{2}", None, "0.5", "3", None, "1/2", "x=3", "1+x", "x+1"]
    texts = ["no answer" if answer is None else rf"so \boxed{{{answer}}}" for answer in answers]
    assert grader.equivalence_classes(texts) == [0, 1, 0, 2, 3, 0, 2, 4, 4]


@pytest.mark.parametrize("order", [1, -1])
def test_answers_are_equal_if_math_verify_takes_either_for_the_other(grader, order):
    """It takes x < 1 for (−∞, 1) where that is the gold, and not the other way round."""
    assert grader.equivalence_classes([r"\boxed{x<1}", r"\boxed{(-\infty,1)}"][::order]) == [0, 0]


def test_equivalence_classes_of_many_integers_are_their_values(grader):
    rng = random.Random(1)
    values = [rng.randint(0, 12) for _ in range(120)]
    texts = [rf"word {rng.random()} \boxed{{{value}}}" for value in values]
    first_seen = list(dict.fromkeys(values))
    assert grader.equivalence_classes(texts) == [first_seen.index(value) for value in values]


class SaysYes(Judge):
    """A judge of somebody else's: right is what spells the gold."""

    def __init__(self, config: GradingConfig):
        self.config = config

    def grade(self, pairs):
        return [Verdict.CORRECT if gold in text else Verdict.WRONG for text, gold in pairs]


def test_a_judge_of_the_users_own_is_built_from_its_name(monkeypatch):
    monkeypatch.setitem(sys.modules, "my_judges", SimpleNamespace(SaysYes=SaysYes))
    config = GradingConfig("my_judges:SaysYes", seconds=7.0)
    check(config, "grading")
    with open_judge(config) as judge:
        assert isinstance(judge, SaysYes) and judge.config is config
        assert judge.grade([("it is 7", "7"), ("it is 8", "7")]) == [Verdict.CORRECT, Verdict.WRONG]
        assert judge.judge("it is 7", "7") is Verdict.CORRECT
        texts = ["a<answer>1</answer>", "b<answer>2</answer>", "c<answer> 1 </answer>"]
        assert judge.equivalence_classes(texts) == [0, 1, 0]


class Says(Judge):
    """Whatever it is told to."""

    def __init__(self, said):
        self.said = said

    def grade(self, pairs):
        return self.said(pairs)


def exits(pairs):
    raise SystemExit(0)


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (lambda pairs: [Verdict.CORRECT], "returned .* for 2 answers .a to b.; it must return a list of 2 verdicts"),
        (lambda pairs: ["correct", "correct"], "returned 'correct' for a; it must return a Verdict"),
        (lambda pairs: None, "returned None for 2 answers .a to b.; it must return a list of 2 verdicts"),
        (lambda pairs: pairs[0][1].append("5"), "failed on 2 answers .a to b.: AttributeError"),
        (exits, "failed on 2 answers .a to b.: SystemExit: 0"),
    ],
)
def test_a_judge_that_does_not_return_a_verdict_per_answer_is_named_with_whose_answers_they_are(said, expected):
    golds = ["4"]
    with pytest.raises(PluginError, match=rf"judge {__name__}:Says.grade {expected}"):
        verdicts_of(Says(said), [("4", golds), ("5", "5")], ["a", "b"])
    assert golds == ["4"]
