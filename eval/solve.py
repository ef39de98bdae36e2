"""One problem, live in the terminal: the director above, its workers side by side, then the answer and the speedup.

    dccot solve MODEL "What is 2 + 3?"                 dccot solve MODEL "What is 2 + 3?" --json --trace solve.json

    from dccot import solve;  solution = solve("runs/demo/stage4", "What is 2 + 3?");  solution.answer

Wall-clock is compared with what writing the same tokens one after another would have taken:

    sequential = total tokens × seconds per token decoded alone

where the second factor is measured in the same run, over the engine steps that had a single sequence in their batch
(the director writing, or the last worker of a round), prefills aside. The engine is warmed up before the clock starts.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dccot.core.command import Parser, positive, run_cleanly
from dccot.core.config import ConfigError, check
from dccot.core.progress import waiting
from dccot.data.prompts import PromptConfig
from dccot.data.task import settings_of
from dccot.eval.live import View
from dccot.eval.timeline import Timeline
from dccot.model.config import read_config
from dccot.model.folder import explain_best, find_model, resolve_model
from dccot.model.tokenizer import open_tokenizer
from dccot.rollout.director import Call, RolloutConfig
from dccot.rollout.engine import Engine, EngineConfig, open_engine
from dccot.rollout.generate import Request, generate
from dccot.rollout.response import Finish, Response
from dccot.rollout.tags import ANSWER_CLOSE, ANSWER_OPEN, flaw_of, most_workers, sequential_flaw_of

EXAMPLE = (  # of what the demo's model was trained on
    "Add a to o and keep the last digit: "
    "a: 4, b: 7, c: 5, d: 2, e: 9, f: 6, g: 3, h: 8, i: 4, j: 5, k: 7, l: 2, m: 9, n: 3, o: 6."
)
NO_LIMIT = sys.maxsize  # the model's context is the limit here, not a setting
CUT_OFF = {Finish.BUDGET: "the budget is used up; raise --budget", Finish.CONTEXT: "the model's context is full"}


@dataclass(frozen=True)
class Solution:
    """A model's solution to a problem."""

    problem: str
    answer: str | None  # the last \\boxed{…}, or else the answer block; None if there is neither
    text: str  # the whole response as the director read it, `<think>` included
    flaw: str | None  # the first format rule that the text breaks; None: well-formed
    response: Response = field(repr=False)  # token ids and log-probs
    timeline: Timeline = field(repr=False)  # who wrote when

    @property
    def seconds(self) -> float:
        """Wall-clock from the first call to the last token."""
        return self.timeline.seconds

    @property
    def sequential_seconds(self) -> float | None:
        """Time for the same tokens one after another; None if no sequence was ever decoded alone."""
        each = self.timeline.seconds_per_token_alone
        return None if each is None else each * self.response.total_tokens

    def to_json(self) -> dict:
        """Everything except the token ids."""
        response = self.response
        said = {"problem": self.problem, "answer": self.answer, "text": self.text, "flaw": self.flaw}
        lengths = {name: getattr(response, name) for name in ("longest_path", "total_tokens", "parallelism")}
        tree = {"finish": response.finish.value, **lengths, "workers": response.worker_lengths}
        alone = self.timeline.seconds_per_token_alone, self.sequential_seconds
        times = zip(("seconds", "seconds_per_token_alone", "sequential_seconds"), (self.seconds, *alone))
        return {**said, **tree, **dict(times)}


def solve(
    model: str | Path,
    problem: str,
    *,
    budget: int | None = None,
    temperature: float | None = None,
    seed: int = 0,
    sequential: bool = False,
    engine: Engine | None = None,
    show: Callable[[Timeline], None] | None = None,
) -> Solution:
    """Let a model solve one problem, its workers in parallel.

    >>> solution = solve(model, "What is 2 + 3?", budget=300, seed=1)  # model: a folder, e.g. "runs/demo/stage4"
    >>> solution.response.longest_path <= 300, solution.seconds > 0
    (True, True)

    `model` is a Hugging Face folder, or a run, whose own prompt, budget and temperature are then the defaults. `budget`
    bounds the longest path in tokens. `sequential` prompts without workers. The same `seed` gives the same tokens. A
    given `engine` is used and left running, so that several problems share one; otherwise one is started for this call.
    `show` is called with the growing timeline. Raises FileNotFoundError for a missing model and ConfigError for invalid
    input.
    """
    with nullcontext() if engine else waiting(f"reading {model}"):
        asked = _prepare(model, problem, budget, temperature, sequential)
    with _opened(asked, engine) as engine:
        return _answer(asked, seed, engine, Timeline(show))


@dataclass(frozen=True)
class _Prepared:
    """A problem that can be run: all checks have passed, and they need no engine."""

    problem: str
    model: Path
    ids: list[int]
    prompt: PromptConfig
    rollout: RolloutConfig
    context: int
    tokenizer: Any

    @property
    def widest(self) -> int:
        """Threads that write at the same time, at most."""
        return most_workers(self.rollout.workers) ** self.rollout.depth if self.prompt.parallel else 1

    def decode(self, ids: list[int]) -> str:
        eos = self.tokenizer.eos_token_id
        return self.tokenizer.decode([token for token in ids if token != eos], skip_special_tokens=False)


def _prepare(
    model: str | Path, problem: str, budget: int | None, temperature: float | None, sequential: bool
) -> _Prepared:
    folder = resolve_model(model)
    prompt, rollout = settings_of(model)
    given: dict[str, Any] = {"budget": budget, "temperature": temperature}
    rollout = replace(rollout, **{name: value for name, value in given.items() if value is not None})
    prompt = replace(prompt, max_prompt_tokens=NO_LIMIT, kind="sequential" if sequential else prompt.kind)
    check(rollout, "rollout")
    if not problem.strip():
        remedy = 'write it in quotes after the model: dccot solve MODEL "What is 2 + 3?"'
        raise ConfigError(f"the problem is empty; {remedy}")
    try:
        limit = read_config(folder).max_position
        tokenizer = open_tokenizer(folder)
        ids = prompt.ids(tokenizer, problem)
    except (ValueError, OSError) as error:  # a model of another kind, no tokenizer, a chat token in the problem
        raise ConfigError(" ".join(str(error).split())) from None
    if not any(folder.glob("*.safetensors")):
        raise ConfigError(f"{folder} holds no weights (*.safetensors); fetch or save the whole model")
    if len(ids) >= limit:
        raise ConfigError(f"the problem makes a prompt of {len(ids):,} tokens; {folder} takes {limit:,}: shorten it")
    asked = _Prepared(problem, folder, ids, prompt, rollout, limit, tokenizer)
    # a director reads at most this many times its longest path
    return replace(asked, context=min(limit, len(ids) + asked.widest * rollout.budget))


@contextmanager
def _opened(asked: _Prepared, given: Engine | None) -> Iterator[Engine]:
    config = EngineConfig(context=asked.context, max_sequences=max(8, asked.widest))
    with open_engine(asked.model, config, given) as engine:
        with waiting("warming up"):
            _warm_up(engine, asked)
        yield engine


def _answer(asked: _Prepared, seed: int, engine: Engine, timeline: Timeline) -> Solution:
    request = Request("problem", 0, asked.ids, asked.prompt.parallel)
    [(_, response)] = generate(engine, [request], asked.rollout, seed=(seed,), watch=timeline)
    text = asked.prompt.whole_text(response.text(asked.tokenizer))
    limits = asked.rollout
    flaw = flaw_of(text, limits.workers, depth=limits.depth) if asked.prompt.parallel else sequential_flaw_of(text)
    return Solution(asked.problem, answer_in(text), text, flaw, response, timeline)


def _warm_up(engine: Engine, asked: _Prepared) -> None:
    """Keep the first steps of an engine, which take seconds, out of the timing. The prompt is computed again after."""
    temperature, top_p = asked.rollout.temperature, asked.rollout.top_p
    for batch in (1, asked.widest):
        for number in range(batch):
            call = Call((), number, asked.ids, [], (), 3, Finish.BUDGET)
            engine.add(f"warm-up {number}", call, seed=number, temperature=temperature, top_p=top_p)
        while engine.pending:
            engine.step()
    engine.forget_prefixes()


def answer_in(text: str) -> str | None:
    r"""The content of the last \boxed{…} of a text, braces balanced; else of its answer block."""
    for start in [match.end() for match in re.finditer(r"\\boxed\s*\{", text)][::-1]:
        depth = 1
        for at in range(start, len(text)):
            depth += {"{": 1, "}": -1}.get(text[at], 0)
            if not depth:
                return text[start:at].strip()
    block = re.search(f"{ANSWER_OPEN}(.*?)(?:{ANSWER_CLOSE}|$)", text, re.DOTALL)
    return block[1].strip() or None if block else None


def summary(solution: Solution) -> list[tuple[str, str]]:
    """(label, text) lines with the result and the speedup from parallelism."""
    response, timeline = solution.response, solution.timeline
    lines = [("answer", solution.answer or "none: the text has neither \\boxed{…} nor an answer block")]
    if solution.flaw or response.finish is not Finish.ANSWERED:
        flaw = f"not well-formed ({solution.flaw})" if solution.flaw else None
        lines.append(("form", "; ".join(filter(None, (flaw, CUT_OFF.get(response.finish))))))
    paths = f"longest path {response.longest_path:,}, total {response.total_tokens:,}"
    lines.append(("tokens", f"{paths}: parallelism {response.parallelism:.2f}"))
    each, sequential = timeline.seconds_per_token_alone, solution.sequential_seconds
    if each is None or sequential is None or not response.forks:
        return [*lines, ("time", f"{solution.seconds:.2f} s")]
    times = f"one token after another {sequential:.2f} s: {sequential / solution.seconds:.2f}× as fast"
    alone = sum(step.tokens for step in timeline.alone)
    mean = f"the mean of the {alone:,} tokens of this run that were decoded alone"
    how = f"one after another = {response.total_tokens:,} tokens × {1e3 * each:.2f} ms, {mean}"
    return [*lines, ("time", f"{solution.seconds:.2f} s; {times}"), ("", how)]


def main(argv: Sequence[str] | None = None, engine: Engine | None = None) -> int:
    what = "Solve one problem, live: director above, workers side by side, then the answer and what parallelism bought."
    parser = Parser(what, f'dccot solve runs/demo/stage4 "{EXAMPLE}"')
    add = parser.add_argument
    add("model", help="a hub id, a Hugging Face folder, or a run (its newest checkpoint, prompted as in training)")
    add("problem", help="the problem, in quotes; - reads it from standard input")
    add("--budget", type=positive, metavar="N", help="tokens on the longest path; default: the run's own, or 7500")
    add("--temperature", type=float, metavar="T", help="0 takes the likeliest token; default: the run's own, or 0.6")
    add("--seed", type=int, default=0, help="the same seed gives the same tokens (default 0)")
    add("--sequential", action="store_true", help="ask without workers")
    add("--json", action="store_true", help="print one JSON object and nothing else")
    add("--trace", metavar="FILE", type=Path, help="write the timeline, to be opened in https://ui.perfetto.dev")
    return run_cleanly(lambda: _run(parser.read(argv), engine))


def _run(arguments: argparse.Namespace, engine: Engine | None) -> None:
    problem = sys.stdin.read() if arguments.problem == "-" else arguments.problem
    if arguments.trace and not arguments.trace.absolute().parent.is_dir():
        raise ConfigError(f"--trace {arguments.trace}: the folder {arguments.trace.parent} does not exist")
    read_config(find_model(arguments.model))
    with waiting(f"reading {arguments.model}"):
        asked = _prepare(arguments.model, problem, arguments.budget, arguments.temperature, arguments.sequential)
    if best := explain_best(arguments.model):
        print(best, file=sys.stderr)
    with _opened(asked, engine) as engine:
        if arguments.json:
            solution = _answer(asked, arguments.seed, engine, Timeline())
            print(json.dumps(solution.to_json(), ensure_ascii=False))
        else:
            with View(problem, asked.decode) as view:
                solution = _answer(asked, arguments.seed, engine, Timeline(view.show))
                view.conclude(summary(solution))
    if arguments.trace:
        solution.timeline.write(arguments.trace, {"model": arguments.model, "problem": problem, "seed": arguments.seed})


if __name__ == "__main__":
    sys.exit(main())
