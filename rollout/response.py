"""Response: what director and workers wrote, with exact token ids and the log-probs they were sampled with.

A response is a thread of segments: the director's text, and at every fork the workers that it spawned. A segment is one
call to the engine: `inserted` ids that we prepend (the worker's opening tag, or `</spawn_workers>` when a thread
continues after its workers), then the `sampled` ids, exactly as the policy wrote them. Sampled ids are never
re-tokenised. Lengths are without the prompt and with inserted tags.
"""

from __future__ import annotations

import functools
from array import array
from dataclasses import dataclass, field
from enum import StrEnum
from hashlib import blake2b
from typing import Any, Self

from dccot.rollout.tags import TAG_PATTERN, TASK_PATTERN
from dccot.rollout.thread import Thread


@functools.lru_cache(maxsize=8)  # looking them up is slow in transformers
def end_tokens(tokenizer) -> frozenset[int]:
    """EOS and the other special tokens, except tags: any may end a text, as generation_config.json can name several."""
    special = {token: added.content for token, added in tokenizer.added_tokens_decoder.items() if added.special}
    return frozenset(
        {tokenizer.eos_token_id}
        | {t for t, text in special.items() if not (TAG_PATTERN.fullmatch(text) or TASK_PATTERN.fullmatch(text))}
    )


class Finish(StrEnum):
    """Why a response ended."""

    ANSWERED = "answered"  # the director wrote EOS
    BUDGET = "budget"  # the longest path reached L_max, or all segments together rollout.total_tokens
    CONTEXT = "context"  # the model's context is full
    MAX_ROUNDS = "max_rounds"  # a thread spawned more often than allowed
    WIDTH = "width"  # a thread spawned without listing as many tasks as allowed


@dataclass
class Segment:
    inserted: list[int] = field(default_factory=list)
    sampled: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)  # one per sampled id, at the sampling temperature
    # one per sampled id: steps trained before the weights that sampled it; empty: those of the rollout's own step
    versions: list[int] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        return self.inserted + self.sampled

    def __len__(self) -> int:
        return len(self.inserted) + len(self.sampled)

    def to_json(self) -> dict:
        return {name: values for name, values in vars(self).items() if values or name != "versions"}


def tokens_of(thread: Thread[Segment]) -> list[int]:
    """As the thread above reads it."""
    return [token for segment in thread.segments() for token in segment.tokens]


@dataclass
class Response(Thread[Segment]):
    """
    >>> workers = [Thread([Segment([7], [1, 2])]), Thread([Segment([8], [3])])]  # opening tag, sampled
    >>> response = Response([Segment([], [1, 2]), Segment([10], [3])], [workers], prompt=[0])
    >>> response.longest_path, response.total_tokens  # 2 + the longest worker's 3 + 2; 2 + 3 + 2 + 2
    (7, 9)
    """

    prompt: list[int] = field(default_factory=list, kw_only=True)
    finish: Finish = field(default=Finish.ANSWERED, kw_only=True)

    @property
    def longest_path(self) -> int:
        return self.path()

    @property
    def total_tokens(self) -> int:
        return self.total()

    @property
    def sampled_tokens(self) -> int:
        return sum(len(s.sampled) for s in self.segments())

    @property
    def parallelism(self) -> float:
        """Degree of parallelism: total tokens over longest path; 1 for a sequential response."""
        return self.total_tokens / max(1, self.longest_path)

    @property
    def worker_lengths(self) -> list[list[int]]:
        """Of each fork at any depth, the longest path of each of its workers."""
        return [[worker.path() for worker in fork] for fork in self.all_forks()]

    def savings(self) -> list[int]:
        """Tokens that each fork took off the longest path: its workers' texts one after another, less the longest
        worker and the tags that only parallel writing needs. Below 0, the fork did not pay off.
        """
        found = []
        for thread in (self, *self.threads()):
            for fork, after in zip(thread.forks, [*thread.trunk[1:], Segment()]):
                one_by_one = sum(worker.path() - len(worker.trunk[0].inserted) for worker in fork)
                found.append(one_by_one - max(worker.path() for worker in fork) - len(after.inserted))
        return found

    @property
    def as_read(self) -> list[int]:
        """The response's ids as the director reads them in the end; prompt excluded."""
        return tokens_of(self)

    def text(self, tokenizer) -> str:
        """The response as text, tags included, without the tokens that ended its segments."""
        ends, ids = end_tokens(tokenizer), []
        for segment in self.segments():
            ids += segment.tokens[:-1] if segment.tokens[-1:] and segment.tokens[-1] in ends else segment.tokens
        return tokenizer.decode(ids, skip_special_tokens=False)

    def outline(self) -> Response:
        """A response of the same shape without its tokens: every list is a range of the same length, and the prompt's
        starts at a checksum, so that it equals no other prompt's. A few hundred bytes, whatever the length.
        """
        count: Any = lambda ids: range(len(ids))
        shape = self.map(lambda segment: Segment(count(segment.inserted), count(segment.sampled)))
        first = int.from_bytes(blake2b(array("q", self.prompt).tobytes(), digest_size=8).digest())
        prompt: Any = range(first, first + len(self.prompt))
        return Response(shape.trunk, shape.forks, prompt=prompt, finish=self.finish)

    def to_json(self) -> dict:
        return {"prompt": self.prompt, **_to_json(self), "finish": self.finish.value}

    @classmethod
    def from_json(cls, row: dict) -> Response:
        thread = _from_json(row if "trunk" in row else _from_rounds(row))
        return cls(thread.trunk, thread.forks, prompt=row["prompt"], finish=Finish(row["finish"]))


def _to_json(thread: Thread[Segment]) -> dict:
    forks = [[_to_json(worker) for worker in fork] for fork in thread.forks]
    return {"trunk": [segment.to_json() for segment in thread.trunk]} | ({"forks": forks} if forks else {})


def _from_json(row: dict) -> Thread[Segment]:
    forks = [[_from_json(worker) for worker in fork] for fork in row.get("forks", ())]
    return Thread([Segment(**segment) for segment in row["trunk"]], forks)


def _from_rounds(row: dict) -> dict:
    """How responses were written before they were trees: rounds of a director and its workers, and a final segment."""
    trunk = [*(each["director"] for each in row["rounds"]), *([row["final"]] if row["final"] is not None else [])]
    return {"trunk": trunk, "forks": [[{"trunk": [worker]} for worker in each["workers"]] for each in row["rounds"]]}


class Verdict(StrEnum):
    """What a judge says of an answer."""

    CORRECT = "correct"
    WRONG = "wrong"
    UNPARSABLE = "unparsable"  # no expression found in the answer
    TIMED_OUT = "timed_out"
    CRASHED = "crashed"  # the judge's process died or exceeded its memory limit


UNJUDGED = (Verdict.TIMED_OUT, Verdict.CRASHED)  # neither right nor wrong


@dataclass
class Rollout:
    """One response to one problem with everything known about it: one line of any rollout JSONL."""

    problem: str  # id
    sample: int
    question: str
    gold: str | list[str]
    text: str  # includes <think> when the prompt opened it
    response: Response
    flaw: str | None = None  # None: well-formed
    verdict: str | None = None  # a Verdict; None: not graded
    step: int | None = None
    answer_verdict: str | None = None  # on what follows the thinking, if the reward looks at that alone

    @property
    def correct(self) -> bool:
        return self.verdict == Verdict.CORRECT

    @property
    def judged(self) -> bool:
        return self.verdict is not None and self.verdict not in UNJUDGED

    @property
    def well_formed(self) -> bool:
        return self.flaw is None

    def to_json(self) -> dict:
        response = self.response
        lengths = {
            "longest_path": response.longest_path,
            "total_tokens": response.total_tokens,
            "workers": response.worker_lengths,
        }
        training = {"reward": None, "advantage": None}  # a training run fills them in (train/rewards.py)
        return {**training, **self.__dict__, "response": response.to_json(), "lengths": lengths}

    @classmethod
    def from_json(cls, row: dict) -> Self:
        fields = {name: row[name] for name in cls.__dataclass_fields__ if name in row}
        return cls(**{**fields, "response": Response.from_json(row["response"])})
