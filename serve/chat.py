"""What is asked becomes a `Job` of n responses, which runs until it is done or closed.

    chat.admit(request) → Job      400, 404 and 503 happen here, before anything is sampled; the job is then running
    job.deltas()                   what is written, as it arrives; a list of what arrived together
    await job.whole()              the same at the end: (reasoning, content) of each response

How a job becomes the objects of an API is written in completions.py and responses.py. Prometheus metrics are added to
vLLM's at /metrics.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import secrets
import time
import uuid
from collections.abc import AsyncIterator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from prometheus_client import Counter, Gauge, Histogram
from vllm.engine.protocol import EngineClient
from vllm.exceptions import GracefulHTTPError
from vllm.v1.engine.exceptions import EngineDeadError

from dccot.data.prompts import PromptConfig, special_tokens
from dccot.rollout.director import Director, RolloutConfig
from dccot.rollout.response import Finish, Response, Rollout
from dccot.rollout.tags import all_tags, flaw_of, sequential_flaw_of
from dccot.serve.admission import Admission
from dccot.serve.launch import ServeConfig
from dccot.serve.load import WAITING, EngineLoad
from dccot.serve.request import ChatRequest, Refused, prompt_text
from dccot.serve.session import Manner, Session, Vocabulary
from dccot.serve.stream import Channels, Piece, ReadingOrder, answer_tokens

log = logging.getLogger("vllm.dccot")
CHARACTERS_PER_TOKEN = 32  # messages longer than this many times the model's context are rejected before tokenising

RUNNING = Gauge("dccot_responses_running", "responses that are being written", multiprocess_mode="livesum")
RESPONSES = Counter("dccot_responses", "responses by how they ended: stop, length, cancelled, error", ["finish"])
CUT = Counter("dccot_workers_cut", "workers that were not waited for: max_worker_tokens, straggler_factor")
REFUSED = Counter("dccot_requests_refused", "requests that were not run, by HTTP status", ["status"])


def _histogram(name: str, about: str, buckets: Iterable[float]) -> Histogram:
    return Histogram(f"dccot_{name}", about, buckets=tuple(buckets))


SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
ROUNDS = _histogram("rounds", "rounds of workers per response", (0, 1, 2, 3, 4, 6, 8))
WORKERS = _histogram("workers", "workers per response", (0, 2, 3, 6, 9, 12, 18, 24))
LONGEST_PATH = _histogram("longest_path_tokens", "tokens on a response's longest path", (2**p for p in range(5, 17)))
PARALLELISM = _histogram("parallelism", "tokens over those on the longest path", (1, 1.25, 1.5, 1.75, 2, 2.5, 3, 4))
FIRST_TOKEN = _histogram("time_to_first_token_seconds", "from the request to the first sampled token", SECONDS)
JOIN = _histogram("join_seconds", "from the end of a fork's last worker to the next token", SECONDS)
ANSWER = _histogram("time_to_answer_seconds", "from the request to the end of its response", SECONDS)


class Chat:
    def __init__(self, engine: EngineClient, config: ServeConfig, models: list[str]):
        self.engine, self.config, self.models = engine, config, models
        self.prompt = config.prompt.allowing(config.rollout.workers, config.rollout.depth)
        self.context: int = engine.model_config.max_model_len
        self.vocabulary = Vocabulary(engine.renderer.get_tokenizer(), config.rollout.workers)
        self.prompt.chat_format_for(self.vocabulary.tokenizer)  # raises if the model cannot be asked so
        tags = all_tags(config.rollout.workers)
        self._reserved = [token for token in special_tokens(self.vocabulary.tokenizer) if token not in tags]
        self._by_priority = engine.vllm_config.scheduler_config.policy == "priority"
        self._order = itertools.count()
        self.load = EngineLoad(engine)
        self.admission = Admission(self.load.crowded)
        self.load.changed = self._admit
        self._tokenising = ThreadPoolExecutor(1, "dccot-tokenising")
        self.arriving, self.jobs = 0, set[Job]()  # requests that are being read; those that run
        self.leaving = False  # the server is ending: nothing new is begun
        self.usual_seconds = 1.0  # that a response takes, lately

    def _admit(self) -> None:
        self.admission.admit()
        WAITING.set(self.admission.waiting)

    def about(self) -> dict:
        """What this server adds to vLLM, for /v1/models."""
        rollout = self.config.rollout
        return {
            "method": "divide-and-conquer chain of thought: a director that spawns workers and joins them",
            "prompt": self.config.prompt.kind,
            **{name: getattr(rollout, name) for name in ("workers", "depth", "budget", "temperature", "top_p")},
            "max_n": self.config.max_n,
            "branching": self.config.branching,
            "examples": self.config.examples,
        }

    @property
    def running(self) -> int:
        """Responses that are being written."""
        return sum(job.request.n for job in self.jobs)

    @contextmanager
    def arrival(self) -> Iterator[None]:
        """While a request is read and tokenised: uploads take memory as well."""
        self._refuse_if_busy(self.arriving + 1)
        self.arriving += 1
        try:
            yield
        finally:
            self.arriving -= 1

    async def admit(self, request: ChatRequest) -> Job:
        if request.model is not None and request.model not in self.models:
            known = f"this server has {', '.join(self.models)}"
            raise Refused(f"there is no model {ascii(request.model)[:60]}; {known}", "model", 404)
        rollout, prompt, warnings = self._settings(request)
        self._refuse_if_busy(request.n)
        loop = asyncio.get_running_loop()
        ids, ignored = await loop.run_in_executor(self._tokenising, self._prompt_ids, request, prompt)
        self._refuse_if_busy(request.n)  # others may have arrived meanwhile
        seed = secrets.randbits(63) if request.seed is None else request.seed
        order = next(self._order) if self._by_priority else None  # started responses go before new ones
        branching, factor = request.branching or self.config.branching, request.straggler_factor
        manner = Manner(branching, self.config.prefill_joins, request.max_worker_tokens, factor)
        name = f"chatcmpl-{uuid.uuid4().hex}"
        piecewise = request.stream or bool(request.stop) or factor is not None
        sessions = []
        for sample in range(request.n):
            director = Director(ids, rollout, self.vocabulary.tags, self.context, prompt.parallel)
            shared = (self.engine, director, rollout, self.vocabulary, name, seed, sample)
            sessions.append(Session(*shared, self.admission, manner, order, piecewise, request.filters))
        return Job(self, request, name, sessions, warnings + ignored)

    def _settings(self, request: ChatRequest) -> tuple[RolloutConfig, PromptConfig, list[str]]:
        """And what the client should know about them."""
        if request.n > self.config.max_n:
            raise Refused(f"n is {request.n}; this server answers at most {self.config.max_n} at once", "n")
        rollout, prompt = replace(self.config.rollout), self.prompt
        rollout.budget, cut = request.budget(rollout.budget)
        rollout.temperature = rollout.temperature if request.temperature is None else request.temperature
        rollout.top_p = rollout.top_p if request.top_p is None else request.top_p
        without_workers = request.reasoning_effort == "none" and prompt.parallel
        return rollout, replace(prompt, kind="sequential") if without_workers else prompt, [cut] if cut else []

    def _prompt_ids(self, request: ChatRequest, prompt: PromptConfig) -> tuple[list[int], list[str]]:
        """And a warning if something of the request makes no difference."""
        limit = min(self.context - 1, prompt.max_prompt_tokens)
        most = f"this server's prompts have at most {limit:,} tokens"
        options = request.chat_template_kwargs
        texts = [*(message.content for message in request.messages), *map(str, options.values())]
        characters = sum(map(len, texts))
        if characters > CHARACTERS_PER_TOKEN * limit:
            raise Refused(f"messages have {characters:,} characters; {most}", "messages")
        if found := next((token for token in self._reserved for text in texts if token in text), None):
            raise Refused(f"messages: one holds the special token {found!r}; remove it", "messages")
        tokenizer = self.vocabulary.tokenizer
        write = partial(prompt_text, prompt, request.messages, tokenizer, self.vocabulary.eos)
        text, ignored = write(options), list[str]()
        if options and text == write({}):
            ignored = [f"chat_template_kwargs makes no difference to this model's prompt: {', '.join(options)}"]
        ids = list(tokenizer.encode(text, add_special_tokens=prompt.wording.raw))
        if len(ids) > limit:
            raise Refused(f"messages make a prompt of {len(ids):,} tokens; {most}", "messages")
        return ids, ignored

    def _refuse_if_busy(self, n: int) -> None:
        if self.running + n > self.config.max_requests:
            busy = f"{self.running} responses are being written, {self.arriving} requests read"
            limit = f"this server takes at most {self.config.max_requests} at once"
            raise Refused(f"{busy}; {limit}: try again in {self._wait} s", None, 503, retry_after=self._wait)
        try:
            self.engine.check_admission(n)
        except GracefulHTTPError as error:
            raise self.refusal(error) from None

    def refusal(self, error: Exception) -> Refused:
        """The error a client gets when the engine fails."""
        if isinstance(error, Refused):
            return error
        if isinstance(error, GracefulHTTPError):  # vLLM's own limits, --max-num-queued-reqs and --max-num-queued-tokens
            return Refused(str(error), None, int(error.http_status), retry_after=self._wait)
        if isinstance(error, EngineDeadError):
            died = "the engine has died and this server ends: try again when it has been restarted"
            return Refused(died, None, 503, retry_after=self._wait)
        return Refused(f"the engine failed on this request ({type(error).__name__}): try again", status=500)

    @property
    def _wait(self) -> int:
        """Seconds until a slot may be free."""
        return math.ceil(min(60.0, max(1.0, self.usual_seconds)))


@dataclass(frozen=True, slots=True)
class Delta:
    """What one response says next. Its end: no lane and no text.

    `reasoning` and `content` are in reading order: worker 2's text follows once worker 1 has finished. `lane` is what
    was just written, wherever it is read: `round` (from 1), `worker` (0: the director), `text`, `tokens`; and `of`, the
    path of the worker that it belongs to, where workers spawn workers.
    """

    index: int
    reasoning: str = ""
    content: str = ""
    lane: dict[str, Any] = field(default_factory=dict)
    ids: list[int] = field(default_factory=list)

    @property
    def ends(self) -> bool:
        return not (self.lane or self.reasoning or self.content)


class Choice:
    """One response in progress: what has been sent to the client."""

    def __init__(self, index: int, stop: Iterable[str]):
        self.index, self.order, self.channels = index, ReadingOrder(), Channels(stop)

    def hear(self, piece: Piece) -> Iterator[Delta]:
        """What to send now: the piece itself, which names its lane, and what had to wait for it."""
        *above, round_, worker = piece.path
        lane = {"round": round_ + 1, "worker": worker, "text": piece.text, "tokens": len(piece.ids)}
        lane |= {"of": above} if above else {}
        ready = self.order.take(piece)
        yield Delta(self.index, *(self.channels.take(piece) if ready else ("", "")), lane, piece.ids)
        for waited in ready[1:]:
            if not (delta := Delta(self.index, *self.channels.take(waited))).ends:
                yield delta


class Job:
    """n responses to one request. It runs from the start until it is done or `close`d."""

    def __init__(self, chat: Chat, request: ChatRequest, name: str, sessions: list[Session], warnings: list[str]):
        self.chat, self.request, self.name, self.sessions, self.warnings = chat, request, name, sessions, warnings
        self.choices = [Choice(index, request.stop) for index in range(request.n)]
        self.began, self.created = time.monotonic(), int(time.time())
        self._deltas: asyncio.Queue[Delta | None] = asyncio.Queue()
        self._unfinished = request.n
        self._cut_off: Refused | None = None
        chat.jobs.add(self)
        RUNNING.inc(request.n)
        self._task = asyncio.create_task(self._run())
        self._task.add_done_callback(self._ended)

    async def _run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for choice, session in zip(self.choices, self.sessions, strict=True):
                group.create_task(self._respond(choice, session))

    async def _respond(self, choice: Choice, session: Session) -> None:
        def hear(piece: Piece) -> bool:
            for delta in choice.hear(piece):
                self._deltas.put_nowait(delta)
            return choice.channels.stopped is not None

        await session.run(hear)
        seconds = time.monotonic() - self.began
        self.chat.usual_seconds += 0.1 * (seconds - self.chat.usual_seconds)
        RESPONSES.labels(self.finish(choice.index)[0]).inc()
        _observe(session.director.response)
        for join in session.joins:
            JOIN.observe(join)
        CUT.inc(len(session.cut))
        ANSWER.observe(seconds)
        if session.first_token is not None:
            FIRST_TOKEN.observe(session.first_token)
        self._unfinished -= 1
        self._deltas.put_nowait(Delta(choice.index))

    def _ended(self, task: asyncio.Task) -> None:
        self.chat.jobs.discard(self)
        RUNNING.dec(self.request.n)
        if task.cancelled() or task.exception() is not None:
            RESPONSES.labels("cancelled" if task.cancelled() else "error").inc(self._unfinished)
        self._deltas.put_nowait(None)

    async def close(self) -> None:
        """End every call of the request that is still running."""
        self._task.cancel()
        await asyncio.wait([self._task])

    def cut_off(self, reason: Refused) -> None:
        """End it, and let the client know why."""
        self._cut_off = reason
        self._task.cancel()

    async def _done(self) -> None:
        try:
            await self._task
        except asyncio.CancelledError:
            raise self._cut_off or asyncio.CancelledError from None
        except BaseExceptionGroup as group:
            error: BaseException = group
            while isinstance(error, BaseExceptionGroup):
                error = error.exceptions[0]
            raise error from None

    async def deltas(self) -> AsyncIterator[list[Delta]]:
        """As they arrive; the workers of a round write at the same time, and theirs come together."""
        items: list[Delta | None] = []
        while not items or items[-1] is not None:
            items = [await self._deltas.get()]
            while not self._deltas.empty():
                items.append(self._deltas.get_nowait())
            yield [delta for delta in items if delta is not None]
        await self._done()

    async def whole(self) -> list[tuple[str, str]]:
        """(reasoning, content) of each response."""
        texts = [["", ""] for _ in self.choices]
        async for deltas in self.deltas():
            for delta in deltas:
                texts[delta.index][0] += delta.reasoning
                texts[delta.index][1] += delta.content
        return [(reasoning, content) for reasoning, content in texts]

    def refusal(self, error: Exception) -> Refused:
        """What the client is told of an error."""
        if not isinstance(error, (EngineDeadError, Refused)):  # of a dead engine vLLM says why, once
            log.error("request %s failed", self.name, exc_info=error)
        return self.chat.refusal(error)

    # ---- what is known of it, at the end ----

    @property
    def model(self) -> str:
        return self.request.model or self.chat.models[0]

    @property
    def responses(self) -> list[Response]:
        return [session.director.response for session in self.sessions]

    def finish(self, index: int) -> tuple[str, str | None]:
        """(finish_reason, stop_reason)"""
        stopped, finish = self.choices[index].channels.stopped, self.responses[index].finish
        if stopped is not None:
            return "stop", stopped
        return ("stop", None) if finish is Finish.ANSWERED else ("length", finish.value)

    def counts(self) -> dict[str, int]:
        """Tokens over all choices; the longest path is the longest one's."""
        responses = self.responses
        return {
            "prompt": len(responses[0].prompt),
            "cached": self.sessions[0].cached,
            "sampled": sum(response.sampled_tokens for response in responses),
            "answers": sum(answer_tokens(response, self.chat.vocabulary.decode) for response in responses),
            "longest_path": max(response.longest_path for response in responses),
            "rounds": max(len(response.forks) for response in responses),
            "workers": sum(len(list(response.threads())) for response in responses),
        }

    def logprobs(self, index: int) -> list[dict[str, Any]]:
        """Of the tokens that the director sampled after its first `</think>`, as chat completions write them."""
        response, decode = self.responses[index], self.chat.vocabulary.decode
        scored = [pair for segment in response.trunk for pair in zip(segment.sampled, segment.logprobs)]
        answer = scored[len(scored) - answer_tokens(response, decode) :]
        texts = [(decode([token]), logprob) for token, logprob in answer]
        return [{"token": t, "logprob": score, "bytes": [*t.encode()], "top_logprobs": []} for t, score in texts]

    def rollout(self, index: int) -> dict:
        """The response as a line of the file that `dccot view` opens. Nobody has judged it."""
        director, prompt, limits = self.sessions[index].director, self.chat.prompt, self.sessions[index].config
        text = prompt.whole_text(director.response.text(self.chat.vocabulary.tokenizer))
        flaw = flaw_of(text, limits.workers, depth=limits.depth) if director.parallel else sequential_flaw_of(text)
        question = self.request.messages[-1].content
        return Rollout(self.name, index, question, "", text, director.response, flaw).to_json()


def _observe(response: Response) -> None:
    ROUNDS.observe(len(response.forks))
    WORKERS.observe(len(list(response.threads())))
    LONGEST_PATH.observe(response.longest_path)
    PARALLELISM.observe(response.parallelism)
