"""Chat completions: a request becomes a `Job` of n responses, which is answered whole or as a stream of chunks.

    chat.admit(request) → Job      400, 404 and 503 happen here, before anything is sampled; the job is then running
    await job.whole()              one chat.completion object
    job.chunks()                   chat.completion.chunk objects, as they arrive; a list of those that arrived together

In a stream, a new delta carries its lane in addition to the standard fields: `round` (from 1), `worker` (0: the
director), `text`, `tokens`; and `of`, the path of the worker that it belongs to, where workers spawn workers.
`reasoning` and `content` are in reading order: worker 2's text follows once worker 1 has
finished. Prometheus metrics are added to vLLM's at /metrics.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import secrets
import time
import uuid
from collections.abc import AsyncIterator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace

from prometheus_client import Counter, Gauge, Histogram
from vllm.engine.protocol import EngineClient
from vllm.exceptions import GracefulHTTPError
from vllm.v1.engine.exceptions import EngineDeadError

from dccot.data.prompts import PromptConfig, special_tokens
from dccot.rollout.director import Director, RolloutConfig
from dccot.rollout.response import Finish, Response
from dccot.rollout.tags import all_tags
from dccot.serve.admission import Admission
from dccot.serve.launch import ServeConfig
from dccot.serve.load import WAITING, EngineLoad
from dccot.serve.request import ChatRequest, Refused, prompt_text
from dccot.serve.session import Manner, Session, Vocabulary
from dccot.serve.stream import Channels, Piece, ReadingOrder, answer_tokens

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
        self.arriving, self.running = 0, 0  # requests that are being read; responses that are being written
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
        }

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
        rollout, prompt = self._settings(request)
        self._refuse_if_busy(request.n)
        loop = asyncio.get_running_loop()
        ids = await loop.run_in_executor(self._tokenising, self._prompt_ids, request, prompt)
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
            sessions.append(
                Session(
                    *(self.engine, director, rollout, self.vocabulary, name, seed, sample),
                    *(self.admission, manner, order, piecewise),
                )
            )
        return Job(self, request, name, sessions)

    def _settings(self, request: ChatRequest) -> tuple[RolloutConfig, PromptConfig]:
        if request.n > self.config.max_n:
            raise Refused(f"n is {request.n}; this server answers at most {self.config.max_n} at once", "n")
        rollout, prompt = replace(self.config.rollout), self.prompt
        budget = request.budget or rollout.budget
        if budget > rollout.budget:
            limit = f"the longest path of this server's responses has at most {rollout.budget:,} tokens"
            raise Refused(f"max_completion_tokens is {budget:,}; {limit}", "max_completion_tokens")
        rollout.budget = budget
        rollout.temperature = rollout.temperature if request.temperature is None else request.temperature
        rollout.top_p = rollout.top_p if request.top_p is None else request.top_p
        without_workers = request.reasoning_effort == "none" and prompt.parallel
        return rollout, replace(prompt, kind="sequential") if without_workers else prompt

    def _prompt_ids(self, request: ChatRequest, prompt: PromptConfig) -> list[int]:
        limit = min(self.context - 1, prompt.max_prompt_tokens)
        most = f"this server's prompts have at most {limit:,} tokens"
        characters = sum(len(message.content) for message in request.messages)
        if characters > CHARACTERS_PER_TOKEN * limit:
            raise Refused(f"messages have {characters:,} characters; {most}", "messages")
        for at, message in enumerate(request.messages):
            if found := next((token for token in self._reserved if token in message.content), None):
                where = f"messages[{at}].content"
                raise Refused(f"{where} holds the special token {found!r}; remove it", where)
        tokenizer = self.vocabulary.tokenizer
        text = prompt_text(prompt, request.messages, tokenizer, self.vocabulary.eos)
        ids = list(tokenizer.encode(text, add_special_tokens=prompt.wording.raw))
        if len(ids) > limit:
            raise Refused(f"messages make a prompt of {len(ids):,} tokens; {most}", "messages")
        return ids

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


class Choice:
    """One response in progress: what has been sent to the client."""

    def __init__(self, index: int, stop: Iterable[str]):
        self.index, self.order, self.channels = index, ReadingOrder(), Channels(stop)

    def hear(self, piece: Piece) -> Iterator[tuple[dict, list[int]]]:
        """(delta, token ids) for each piece to send now; the delta of newly written text names its lane."""
        *above, round_, worker = piece.path
        lane = {"round": round_ + 1, "worker": worker, "text": piece.text, "tokens": len(piece.ids)}
        lane |= {"of": above} if above else {}
        ready = self.order.take(piece)
        reasoning, content = self.channels.take(piece) if ready else ("", "")
        yield _delta(reasoning, content) | lane, piece.ids
        for waited in ready[1:]:
            if delta := _delta(*self.channels.take(waited)):
                yield delta, []


def _delta(reasoning: str, content: str) -> dict:
    delta = {"reasoning": reasoning, "reasoning_content": reasoning} if reasoning else {}
    return delta | ({"content": content} if content else {})


class Job:
    """n responses to one request. It runs from the start until it is done or `close`d."""

    def __init__(self, chat: Chat, request: ChatRequest, name: str, sessions: list[Session]):
        self.chat, self.request, self.name, self.sessions = chat, request, name, sessions
        self.choices = [Choice(index, request.stop) for index in range(request.n)]
        self.began, self.created = time.monotonic(), int(time.time())
        # an empty delta: this choice has finished
        self._deltas: asyncio.Queue[tuple[int, dict, list[int]] | None] = asyncio.Queue()
        self._unfinished = request.n
        chat.running += request.n
        RUNNING.inc(request.n)
        self._task = asyncio.create_task(self._run())
        self._task.add_done_callback(self._ended)

    async def _run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for choice, session in zip(self.choices, self.sessions, strict=True):
                group.create_task(self._respond(choice, session))

    async def _respond(self, choice: Choice, session: Session) -> None:
        def hear(piece: Piece) -> bool:
            for delta, ids in choice.hear(piece):
                self._deltas.put_nowait((choice.index, delta, ids))
            return choice.channels.stopped is not None

        await session.run(hear)
        seconds = time.monotonic() - self.began
        self.chat.usual_seconds += 0.1 * (seconds - self.chat.usual_seconds)
        RESPONSES.labels(self._finish(choice.index)[0]).inc()
        _observe(session.director.response)
        for join in session.joins:
            JOIN.observe(join)
        CUT.inc(len(session.cut))
        ANSWER.observe(seconds)
        if session.first_token is not None:
            FIRST_TOKEN.observe(session.first_token)
        self._unfinished -= 1
        self._deltas.put_nowait((choice.index, {}, []))

    def _ended(self, task: asyncio.Task) -> None:
        self.chat.running -= self.request.n
        RUNNING.dec(self.request.n)
        if task.cancelled() or task.exception() is not None:
            RESPONSES.labels("cancelled" if task.cancelled() else "error").inc(self._unfinished)
        self._deltas.put_nowait(None)

    async def close(self) -> None:
        """End every call of the request that is still running."""
        self._task.cancel()
        await asyncio.wait([self._task])

    async def _done(self) -> None:
        try:
            await self._task
        except BaseExceptionGroup as group:
            error: BaseException = group
            while isinstance(error, BaseExceptionGroup):
                error = error.exceptions[0]
            raise error from None

    def _finish(self, index: int) -> tuple[str, str | None]:
        """(finish_reason, stop_reason)"""
        stopped, finish = self.choices[index].channels.stopped, self.sessions[index].director.response.finish
        if stopped is not None:
            return "stop", stopped
        return ("stop", None) if finish is Finish.ANSWERED else ("length", finish.value)

    async def whole(self) -> dict:
        await self._done()
        messages = [{"role": "assistant", "content": "", "reasoning": ""} for _ in self.choices]
        while (item := self._deltas.get_nowait()) is not None:
            for field in ("reasoning", "content"):
                messages[item[0]][field] += item[1].get(field, "")
        ids = {"prompt_token_ids": self.sessions[0].director.prompt} if self.request.return_token_ids else {}
        choices = [self._choice(message, index) for index, message in enumerate(messages)]
        return self._object("chat.completion", choices) | {"usage": self._usage(), **ids}

    def _choice(self, message: dict, index: int) -> dict:
        finish, reason = self._finish(index)
        message["reasoning_content"] = message["reasoning"]
        choice = {"index": index, "message": message, "logprobs": None, "finish_reason": finish, "stop_reason": reason}
        response, cut = self.sessions[index].director.response, self.sessions[index].cut
        choice |= {"cut_workers": cut} if cut else {}
        return choice | ({"token_ids": response.as_read} if self.request.return_token_ids else {})

    async def chunks(self) -> AsyncIterator[list[dict]]:
        """Events as they arrive; the workers of a round write at the same time, and their events are sent together."""
        yield [self._chunk(choice.index, {"role": "assistant", "content": ""}) for choice in self.choices]
        items: list[tuple[int, dict, list[int]] | None] = []
        while not items or items[-1] is not None:
            items = [await self._deltas.get()]
            while not self._deltas.empty():
                items.append(self._deltas.get_nowait())
            yield [self._told(*item) for item in items if item is not None]
        await self._done()
        if self.request.stream_options.include_usage:
            yield [self._object("chat.completion.chunk", []) | {"usage": self._usage()}]

    def _told(self, index: int, delta: dict, ids: list[int]) -> dict:
        if delta:
            return self._chunk(index, delta, **({"token_ids": ids} if self.request.return_token_ids else {}))
        finish, reason = self._finish(index)
        cut = {"cut_workers": cut} if (cut := self.sessions[index].cut) else {}
        return self._chunk(index, {}, finish_reason=finish, stop_reason=reason, **cut)

    def _chunk(self, index: int, delta: dict, **more: object) -> dict:
        choice = {"index": index, "delta": delta, "finish_reason": None, **more}
        return self._object("chat.completion.chunk", [choice])

    def _object(self, kind: str, choices: list[dict]) -> dict:
        model = self.request.model or self.chat.models[0]
        return {"id": self.name, "object": kind, "created": self.created, "model": model, "choices": choices}

    def _usage(self) -> dict:
        responses = [session.director.response for session in self.sessions]
        answers = sum(answer_tokens(response, self.chat.vocabulary.decode) for response in responses)
        sampled, prompt = sum(response.sampled_tokens for response in responses), len(responses[0].prompt)
        details = {
            "reasoning_tokens": sampled - answers,
            "longest_path_tokens": max(response.longest_path for response in responses),
            "rounds": max(len(response.forks) for response in responses),
            "workers": sum(len(list(response.threads())) for response in responses),
        }
        counts = {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}
        return counts | {"completion_tokens_details": details}


def _observe(response: Response) -> None:
    ROUNDS.observe(len(response.forks))
    WORKERS.observe(len(list(response.threads())))
    LONGEST_PATH.observe(response.longest_path)
    PARALLELISM.observe(response.parallelism)
