"""A hundred answers made to hang, starve, crash or deceive the grader: each gets its verdict, and nothing stays behind."""
from pathlib import Path

import pytest

from dccot.eval.grading import Grader, GradingConfig, Verdict

GOLD = "7919"
SECONDS, MEMORY_MB = 0.25, 128

towers = [
    "9^{9^{9^{9}}}", "10^{10^{10}}", "2^{2^{2^{2^{2^{2}}}}}", "99999!", "9999999!", "((9!)!)!", r"\binom{10^8}{10^7}",
    "x^{x^{x^{x^{x}}}}",
    "2^{-2^{9^{9}}}", r"\sqrt{2}^{\sqrt{2}^{9^{9^{9}}}}", "(1+10^{-9})^{10^{18}}", r"\frac{1}{9^{9^{9}}}",
    "e^{e^{e^{e^{9}}}}", "0.1^{-9^{9}}",
    "-9^{9^{9^{9}}}", "9**9**9**9", "(2^{64})^{(2^{64})}", "i^{i^{i^{9^{9^{9}}}}}", "3^{3^{3^{3}}} - 3^{3^{3^{3}}} + 7919",
    "10^{10^{8}} \\mod 7",
]
calculus = [
    r"\sum_{i=1}^{10^9} i^{i}", r"\prod_{k=1}^{10^8} (k^2+1)", r"\int_0^1 e^{e^{e^x}} \sin(x^x) dx", r"\lim_{n \to \infty} (n!)^{1/n^n}",
    r"\int \frac{\sqrt{\tan x}}{\ln(\sin x)^{x}} dx", r"\sum_{n=1}^{\infty} \frac{\sin(n^n)}{n!}", r"\sin(10^{10^{5}})",
    r"\log_{10^{-300}}(10^{10^{9}})",
    r"\sqrt{\sqrt{\sqrt{\sqrt{x^{64}+1}+1}+1}+1} - \sqrt{x}", "(x+y+z+w+u+v)^{90}", "(x+y+z)^{400} - (z+y+x)^{400} + 7919",
    r"\begin{pmatrix} 1 & 1 \\ 1 & 0 \end{pmatrix}^{10^{9}}",
    r"\det\begin{pmatrix} a & b & c \\ d & e & f \\ g & h & i \end{pmatrix}^{99}",
    r"\frac{d^{99}}{dx^{99}} e^{x^{x^{x}}}", r"x^{17} - 3x^{11} + \sin x = \cos^{9}(x^{x})", r"x^9 + y^9 < z^9 + \sqrt{x y z}",
]
huge = [
    "1" * 10**6, "9" * 5000, "x" * 10**6, "1+" * 40_000 + "1", "{" * 10**5, "}" * 10**5, r"\frac" * 10**5,
    r"\frac{1}{" * 2000 + "1" + "}" * 2000,
    "(" * 5000 + "1" + ")" * 5000, "[" * 10**4 + "]" * 10**4, r"\sqrt{" * 1000 + "2" + "}" * 1000, "-" * 10**5 + "1", "1," * 50_000 + "1",
    r"\{" + ",".join(map(str, range(20_000))) + r"\}", "$" * 10**6, r"\(" * 10**5, "a=" * 10**5, "1 " * 10**5, "0." + "3" * 10**5,
    r"\begin{pmatrix}" + r"1&" * 3000 + r"1\end{pmatrix}", r"\left(" * 1000 + r"\right)" * 1000, "^" * 10**5,
    "x_{" * 3000 + "1" + "}" * 3000,
    "\\" * 10**6, r"\text{" * 5000, "∑∫∞√" * 10**5, "％" * 10**5,
]
evaluated = [
    "__import__('os').system('touch OWNED')", "exec('open(\"OWNED\",\"w\")')", "open('OWNED','w')", "eval('7919')",
    "lambda: 7919", "S('7919')",
    "factorial(10**9)", "sympify('9**9**9')", "N(pi, 10**9)", r"\operatorname{exit}(0)", "quit()",
    "().__class__.__bases__", "os._exit(7)",
    r"\input{/etc/passwd}", r"\write18{touch OWNED}", "E**E**E", "I**I", "oo - oo", "zoo", "nan", "1/0", r"\frac{0}{0}",
    r"\infty - \infty",
]
bytes_ = [
    "\x00" * 1000, "\x1b[2J\x07", "7919\x00", "\ud800", "\u202e9197", "７９１９x", "\r\n" * 10**5, "\ufeff7920", "\n".join(["{}"] * 10**4),
    '"}]\n["grade"',
]
HOSTILE = (
    [rf"\boxed{{{inside}}}" for inside in towers + calculus + huge + evaluated + bytes_]
    + ["(1)" * 50_000, "final answer is " * 20_000, r"\boxed{" * 10**5, "answer: $" * 20_000]
)


def footprint(grader) -> tuple[float, int]:
    """Resident megabytes and number of the grading processes, zombies counted."""
    pids = []
    for process in grader._processes:
        pid = process._process.pid
        pids += [str(pid), *Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in pids) * 4096 / 2**20, len(pids)


@pytest.fixture(scope="module")
def ordeal():
    """Grade all of it once, with good answers in between."""
    pairs = [pair for n, text in enumerate(HOSTILE) for pair in ((text, GOLD), (rf"{n} \boxed{{{GOLD}}}", GOLD))]
    with Grader(GradingConfig(workers=2, seconds=SECONDS, memory_mb=MEMORY_MB)) as grader:
        easy = [(rf"\boxed{{{n}}}", GOLD) for n in range(50)]
        grader.grade(easy)
        before = footprint(grader)
        verdicts = grader.grade(pairs)
        grader.grade(easy)
        yield grader, verdicts[::2], verdicts[1::2], before, footprint(grader)


def test_there_are_a_hundred_of_them():
    assert len(set(HOSTILE)) == 100


def test_every_hostile_answer_gets_a_verdict_and_none_is_taken_for_correct(ordeal):
    _, hostile, *_ = ordeal
    assert len(hostile) == 100 and set(hostile) <= set(Verdict)
    # Some are right underneath, such as a tower minus itself plus the gold: saying so is fine, running out of time over it too.
    assert {HOSTILE[n] for n, verdict in enumerate(hostile) if verdict == Verdict.CORRECT} <= RIGHT_AFTER_ALL


RIGHT_AFTER_ALL = {rf"\boxed{{{text}}}" for text in (towers[18], calculus[10], "7919\x00", "eval('7919')", "S('7919')")}


def test_limits_are_what_ends_the_hostile_ones(ordeal):
    _, hostile, *_ = ordeal
    endless = [rf"\boxed{{{text}}}" for text in (towers[0], towers[1], calculus[0], calculus[1], huge[2])]
    assert [hostile[HOSTILE.index(text)] for text in endless] == [Verdict.TIMED_OUT] * 5


def test_good_answers_in_between_are_all_right(ordeal):
    _, _, good, *_ = ordeal
    assert good == [Verdict.CORRECT] * 100


def test_pool_is_whole_and_its_memory_is_back_afterwards(ordeal):
    grader, _, _, (before_mb, before_count), (after_mb, after_count) = ordeal
    assert grader.grade([(r"\boxed{1}", "1"), (r"\boxed{1}", "2")]) == [Verdict.CORRECT, Verdict.WRONG]
    assert after_count == before_count == 4
    assert after_mb < before_mb + 2 * MEMORY_MB / 4  # a worker that has grown by more than a quarter of its limit is replaced


def test_nothing_was_executed(ordeal):
    assert not Path("OWNED").exists()


def test_memory_limit_ends_an_answer_that_the_clock_would_let_go_on():
    greedy = r"\boxed{" + "1+" * 100_000 + "1}"
    with Grader(GradingConfig(workers=1, seconds=60, memory_mb=64)) as grader:
        assert grader.grade([(greedy, "1"), (r"\boxed{1}", "1")]) == [Verdict.CRASHED, Verdict.CORRECT]


def test_equivalence_classes_survive_hostile_answers():
    texts = [r"\boxed{2}", r"\boxed{9^{9^{9^{9}}}}", r"\boxed{2.0}", r"\boxed{9^{9^{9^{9}}}} again", r"\boxed{3}"]
    with Grader(GradingConfig(workers=2, seconds=SECONDS)) as grader:
        assert grader.equivalence_classes(texts) == [0, 1, 0, 1, 2]  # the same tower twice is one answer
