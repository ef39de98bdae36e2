"""A hundred answers made to hang, starve, crash or deceive a grader, and a way to see whether it endures them.

endure(20_000, hostile_share=0.05, config=GradingConfig(seconds=1))      → what became of answers, processes and memory
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import psutil

from dccot.data.judge import Grader, GradingConfig, Verdict

GOLD = "7919"


def _listed(table: str) -> list[str]:
    return [each.strip() for each in table.split("¦")]


TOWERS = _listed(r"""
9^{9^{9^{9}}} ¦ 10^{10^{10}} ¦ 2^{2^{2^{2^{2^{2}}}}} ¦ 99999! ¦ 9999999! ¦ ((9!)!)! ¦ \binom{10^8}{10^7} ¦
x^{x^{x^{x^{x}}}} ¦ 2^{-2^{9^{9}}} ¦ \sqrt{2}^{\sqrt{2}^{9^{9^{9}}}} ¦ (1+10^{-9})^{10^{18}} ¦
\frac{1}{9^{9^{9}}} ¦ e^{e^{e^{e^{9}}}} ¦ 0.1^{-9^{9}} ¦ -9^{9^{9^{9}}} ¦ 9**9**9**9 ¦ (2^{64})^{(2^{64})} ¦
i^{i^{i^{9^{9^{9}}}}} ¦ 3^{3^{3^{3}}} - 3^{3^{3^{3}}} + 7919 ¦ 10^{10^{8}} \mod 7
""")
CALCULUS = _listed(r"""
\sum_{i=1}^{10^9} i^{i} ¦ \prod_{k=1}^{10^8} (k^2+1) ¦ \int_0^1 e^{e^{e^x}} \sin(x^x) dx ¦
\lim_{n \to \infty} (n!)^{1/n^n} ¦ \int \frac{\sqrt{\tan x}}{\ln(\sin x)^{x}} dx ¦
\sum_{n=1}^{\infty} \frac{\sin(n^n)}{n!} ¦ \sin(10^{10^{5}}) ¦ \log_{10^{-300}}(10^{10^{9}}) ¦
\sqrt{\sqrt{\sqrt{\sqrt{x^{64}+1}+1}+1}+1} - \sqrt{x} ¦ (x+y+z+w+u+v)^{90} ¦
(x+y+z)^{400} - (z+y+x)^{400} + 7919 ¦ \begin{pmatrix} 1 & 1 \\ 1 & 0 \end{pmatrix}^{10^{9}} ¦
\det\begin{pmatrix} a & b & c \\ d & e & f \\ g & h & i \end{pmatrix}^{99} ¦
\frac{d^{99}}{dx^{99}} e^{x^{x^{x}}} ¦ x^{17} - 3x^{11} + \sin x = \cos^{9}(x^{x}) ¦
x^9 + y^9 < z^9 + \sqrt{x y z}
""")
HUGE = [
    "1" * 10**6,
    "9" * 5000,
    "x" * 10**6,
    "1+" * 40_000 + "1",
    "{" * 10**5,
    "}" * 10**5,
    r"\frac" * 10**5,
    r"\frac{1}{" * 2000 + "1" + "}" * 2000,
    "(" * 5000 + "1" + ")" * 5000,
    "[" * 10**4 + "]" * 10**4,
    r"\sqrt{" * 1000 + "2" + "}" * 1000,
    "-" * 10**5 + "1",
    "1," * 50_000 + "1",
    r"\{" + ",".join(map(str, range(20_000))) + r"\}",
    "$" * 10**6,
    r"\(" * 10**5,
    "a=" * 10**5,
    "1 " * 10**5,
    "0." + "3" * 10**5,
    r"\begin{pmatrix}" + r"1&" * 3000 + r"1\end{pmatrix}",
    r"\left(" * 1000 + r"\right)" * 1000,
    "^" * 10**5,
    "x_{" * 3000 + "1" + "}" * 3000,
    "\\" * 10**6,
    r"\text{" * 5000,
    "∑∫∞√" * 10**5,
    "％" * 10**5,
]
EVALUATED = _listed(r"""
__import__('os').system('touch OWNED') ¦ exec('open("OWNED","w")') ¦ open('OWNED','w') ¦ eval('7919') ¦
lambda: 7919 ¦ S('7919') ¦ factorial(10**9) ¦ sympify('9**9**9') ¦ N(pi, 10**9) ¦ \operatorname{exit}(0) ¦
quit() ¦ ().__class__.__bases__ ¦ os._exit(7) ¦ \input{/etc/passwd} ¦ \write18{touch OWNED} ¦ E**E**E ¦ I**I ¦
oo - oo ¦ zoo ¦ nan ¦ 1/0 ¦ \frac{0}{0} ¦ \infty - \infty
""")
BYTES = [
    "\x00" * 1000,
    "\x1b[2J\x07",
    "7919\x00",
    "\ud800",
    "\u202e9197",
    "７９１９x",
    "\r\n" * 10**5,
    "\ufeff7920",
    "\n".join(["{}"] * 10**4),
    '"}]\n["grade"',
]
HOSTILE = [rf"\boxed{{{inside}}}" for inside in TOWERS + CALCULUS + HUGE + EVALUATED + BYTES]
HOSTILE += ["(1)" * 50_000, "final answer is " * 20_000, r"\boxed{" * 10**5, "answer: $" * 20_000]


@dataclass
class Endurance:
    """What the grader was before and after, and what it said."""

    hostile: dict[str, Verdict]  # one verdict per distinct hostile answer
    good: Counter  # verdicts on correct answers among them
    lost: int  # answers without a verdict
    processes: tuple[int, int]  # before, after; zombies counted
    memory_mb: tuple[float, float]

    def faults(self, config: GradingConfig) -> list[str]:
        """What went wrong; a worker may keep a quarter of its memory limit before it is replaced."""
        allowed = self.memory_mb[0] + config.workers * config.memory_mb / 4
        found = [f"{self.lost} answers without a verdict"] * bool(self.lost)
        found += [f"good answers were judged {dict(self.good)}"] * (set(self.good) != {Verdict.CORRECT})
        found += [f"{self.processes[1]} processes, {self.processes[0]} before"] * (
            self.processes[0] != self.processes[1]
        )
        found += [f"{self.memory_mb[1]:.0f} MB, {self.memory_mb[0]:.0f} MB before"] * (self.memory_mb[1] > allowed)
        return found


def endure(count: int, hostile_share: float, config: GradingConfig, seed: int = 0) -> Endurance:
    """Grade `count` answers of which a share is hostile, every hostile one at least once if there is room."""
    rng = random.Random(seed)
    hostile_count = round(count * hostile_share)
    hostile = (HOSTILE * (hostile_count // len(HOSTILE) + 1))[:hostile_count]
    # A distinct tail, so that each is graded on its own; identical pairs would be graded once.
    answers = [f"{text} {n}" if n >= len(HOSTILE) else text for n, text in enumerate(hostile)]
    kinds = dict(zip(answers, hostile))
    answers += [rf"{n} \boxed{{{GOLD}}}" for n in range(count - hostile_count)]
    rng.shuffle(answers)
    easy = [(rf"\boxed{{{n}}}", GOLD) for n in range(50)]
    with Grader(config) as grader:
        grader.grade(easy)
        before = footprint(grader)
        verdicts = grader.grade([(text, GOLD) for text in answers])
        grader.grade(easy)
        after = footprint(grader)
    said = dict(zip(answers, verdicts))
    judged = {kinds[text]: verdict for text, verdict in said.items() if text in kinds}
    good = Counter(verdict for text, verdict in said.items() if text not in kinds)
    lost = count - sum(isinstance(verdict, Verdict) for verdict in verdicts)
    return Endurance(judged, good, lost, (before[0], after[0]), (before[1], after[1]))


# exponent towers, a million digits, fractions nested ten thousand deep
MONSTERS = ("9^{" * 40 + "9" + "}" * 40, "7" * 10**6, r"\frac{1}{" * 10**4 + "2" + "}" * 10**4)


@dataclass
class Storm:
    """Monsters and good answers, graded in one batch."""

    monsters: Counter  # verdicts
    good: Counter
    peak_mb: float  # of all grading processes together
    seconds: float


def storm(monsters: int, good: int, config: GradingConfig) -> Storm:
    answers = [rf"{n} \boxed{{{MONSTERS[n % len(MONSTERS)]}}}" for n in range(monsters)]
    answers += [rf"{n} \boxed{{{GOLD}}}" for n in range(good)]
    random.Random(0).shuffle(answers)
    peak, done = [0.0], threading.Event()
    with Grader(config) as grader:
        grader.grade([(rf"\boxed{{{GOLD}}}", GOLD)])

        def watch() -> None:
            while not done.wait(0.02):
                with contextlib.suppress(OSError, psutil.Error):  # a process that has just been replaced
                    peak.append(footprint(grader)[1])

        watcher = threading.Thread(target=watch)
        watcher.start()
        began = time.monotonic()
        verdicts = dict(zip(answers, grader.grade([(text, GOLD) for text in answers])))
        seconds = time.monotonic() - began
        done.set()
        watcher.join()
    said = Counter(verdict for text, verdict in verdicts.items() if not text.endswith(rf" \boxed{{{GOLD}}}"))
    return Storm(said, Counter(verdicts.values()) - said, max(peak), seconds)


def footprint(grader: Grader) -> tuple[int, float]:
    """Number of the grading processes, zombies counted, and their resident megabytes."""
    pids = grader.pids()
    pages = sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in pids)
    return len(pids), pages * 4096 / 2**20
