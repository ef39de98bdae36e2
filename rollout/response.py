"""Response: what director and workers wrote, with exact token ids and the log-probs they were sampled with.

    S1 (W1 … WK) S2 (W1 … WK) … S_final

A segment is one call to the engine: `inserted` ids that we prepend (the worker's opening tag, or `</spawn_workers>`
when the director continues), then the `sampled` ids, exactly as the policy wrote them. Sampled ids are never
re-tokenised.

    longest path = Σ |director segments| + Σ over rounds of the longest worker  (without prompt, with inserted tags)
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Self

from dccot.rollout.tags import TAG_PATTERN


@functools.lru_cache(maxsize=8)  # looking them up is slow in transformers
def end_tokens(tokenizer) -> frozenset[int]:
    """EOS and the other special tokens, except tags: any may end a text, as generation_config.json can name several."""
    special = {token: added.content for token, added in tokenizer.added_tokens_decoder.items() if added.special}
    return frozenset({tokenizer.eos_token_id} | {t for t, text in special.items() if not TAG_PATTERN.fullmatch(text)})


class Finish(StrEnum):
    """Why a response ended."""

    ANSWERED = "answered"  # the director wrote EOS
    BUDGET = "budget"  # the longest path reached L_max, or all segments together rollout.total_tokens
    CONTEXT = "context"  # the model's context is full
    MAX_ROUNDS = "max_rounds"  # the director spawned more often than allowed


@dataclass
class Segment:
    inserted: list[int] = field(default_factory=list)
    sampled: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)  # one per sampled id, at the sampling temperature

    @property
    def tokens(self) -> list[int]:
        return self.inserted + self.sampled

    def __len__(self) -> int:
        return len(self.inserted) + len(self.sampled)


@dataclass
class Round:
    """Director text that ends by spawning, and the workers it spawned."""

    director: Segment
    workers: list[Segment]


@dataclass
class Response:
    """One response, segment by segment.

    >>> workers = [Segment([7], [1, 2]), Segment([8], [3]), Segment([9], [4, 5, 6])]  # opening tag, sampled
    >>> response = Response([0], [Round(Segment([], [1, 2]), workers)], Segment([10], [3]))
    >>> response.longest_path, response.total_tokens  # 2 + the longest worker's 4 + 2; 2 + 3 + 2 + 4 + 2
    (8, 13)
    """

    prompt: list[int]
    rounds: list[Round] = field(default_factory=list)
    final: Segment | None = None  # None: the budget ran out among the workers of the last round
    finish: Finish = Finish.ANSWERED

    def segments(self) -> Iterator[Segment]:
        """Every segment in reading order."""
        for round_ in self.rounds:
            yield round_.director
            yield from round_.workers
        if self.final is not None:
            yield self.final

    @property
    def longest_path(self) -> int:
        rounds = sum(len(r.director) + max(map(len, r.workers), default=0) for r in self.rounds)
        return rounds + (len(self.final) if self.final is not None else 0)

    @property
    def total_tokens(self) -> int:
        return sum(map(len, self.segments()))

    @property
    def sampled_tokens(self) -> int:
        return sum(len(s.sampled) for s in self.segments())

    @property
    def parallelism(self) -> float:
        """Degree of parallelism: total tokens over longest path; 1 for a sequential response."""
        return self.total_tokens / max(1, self.longest_path)

    @property
    def worker_lengths(self) -> list[list[int]]:
        return [[len(w) for w in r.workers] for r in self.rounds]

    @property
    def as_read(self) -> list[int]:
        """The response's ids as the director reads them in the end; prompt excluded."""
        return [token for segment in self.segments() for token in segment.tokens]

    def text(self, tokenizer) -> str:
        """The response as text, tags included, without the tokens that ended its segments."""
        ends, ids = end_tokens(tokenizer), []
        for segment in self.segments():
            ids += segment.tokens[:-1] if segment.tokens[-1:] and segment.tokens[-1] in ends else segment.tokens
        return tokenizer.decode(ids, skip_special_tokens=False)

    def to_json(self) -> dict:
        rounds = [{"director": vars(r.director), "workers": [vars(w) for w in r.workers]} for r in self.rounds]
        final = vars(self.final) if self.final is not None else None
        return {"prompt": self.prompt, "rounds": rounds, "final": final, "finish": self.finish.value}

    @classmethod
    def from_json(cls, row: dict) -> Response:
        rounds = [Round(Segment(**r["director"]), [Segment(**w) for w in r["workers"]]) for r in row["rounds"]]
        final = Segment(**row["final"]) if row["final"] is not None else None
        return cls(row["prompt"], rounds, final, Finish(row["finish"]))


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
