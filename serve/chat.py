"""Chat completions: a request becomes a `Job` of n responses, which is answered whole or as a stream of chunks.

    chat.admit(ask) → Job          400, 404 and 503 happen here, before anything is sampled; the job is running when it is returned
    await job.whole()              one chat.completion object
    job.chunks()                   chat.completion.chunk objects, as they arrive; a list of those that arrived together

In a stream, a new delta carries its lane in addition to the standard fields: `round` (from 1), `worker` (0: the
director), `text`, `tokens`. `reasoning` and `content` are in reading order: worker 2's text follows once worker 1 has
finished.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import secrets
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace

from vllm.engine.protocol import EngineClient
from vllm.exceptions import GracefulHTTPError

from dccot.data.prompts import PromptConfig, special_tokens
from dccot.rollout.director import Director, RolloutConfig
from dccot.rollout.response import Finish
from dccot.rollout.tags import all_tags
from dccot.serve import metrics
from dccot.serve.request import Ask, Refused, prompt_text
from dccot.serve.session import Thinking, Words
from dccot.serve.settings import ServeConfig
from dccot.serve.stream import Channels, Piece, ReadingOrder, answer_tokens

CHARACTERS_PER_TOKEN = 32  # messages longer than this many times the model's context are rejected before tokenising


class Chat:
    def __init__(self, engine: EngineClient, config: ServeConfig, models: list[str]):
        self.engine, self.config, self.models = engine, config, models
        self.context: int = engine.model_config.max_model_len
        self.words = Words(engine.renderer.get_tokenizer(), config.rollout.workers)
        config.prompt.chat_format_for(self.words.tokenizer)  # raises if the model cannot be asked so
        tags = all_tags(config.rollout.workers)
        self._reserved = [token for token in special_tokens(self.words.tokenizer) if token not in tags]
        self._by_priority = engine.vllm_config.scheduler_config.policy == "priority"
        self._order = itertools.count()
        self._tokenising = ThreadPoolExecutor(1, "dccot-tokenising")
        self.arriving, self.running = 0, 0  # requests that are being read; responses that are being written
        self.usual_seconds = 1.0  # that a response takes, lately

    def about(self) -> dict:
        """What this server adds to vLLM, for /v1/models."""
        rollout = self.config.rollout
        return {
            "method": "divide-and-conquer chain of thought: a director that spawns workers and joins them",
            "prompt": self.config.prompt.kind,
            "workers": rollout.workers,
            "budget": rollout.budget,
            "temperature": rollout.temperature,
            "top_p": rollout.top_p,
            "max_n": self.config.max_n,
        }

    @contextmanager
    def arrival(self) -> Iterator[None]:
        """While a request is read and tokenised: uploads take memory, too."""
        self._refuse_if_busy(self.arriving + 1)
        self.arriving += 1
        try:
            yield
        finally:
            self.arriving -= 1

    async def admit(self, ask: Ask) -> Job:
        if ask.model is not None and ask.model not in self.models:
            raise Refused(
                f"there is no model {ascii(ask.model)[:60]}; this server has {', '.join(self.models)}", "model", 404
            )
        rollout, prompt = self._settings(ask)
        self._refuse_if_busy(ask.n)
        loop = asyncio.get_running_loop()
        ids = await loop.run_in_executor(self._tokenising, self._prompt_ids, ask, prompt)
        self._refuse_if_busy(ask.n)  # others may have arrived meanwhile
        seed = secrets.randbits(63) if ask.seed is None else ask.seed
        order = next(self._order) if self._by_priority else 0  # started responses go before new ones
        name = f"chatcmpl-{uuid.uuid4().hex}"
        directors = [Director(ids, rollout, self.words.tags, self.context, prompt.parallel) for _ in range(ask.n)]
        piecewise = ask.stream or bool(ask.stop)
        thoughts = [
            Thinking(self.engine, director, rollout, self.words, name, seed, sample, order, piecewise)
            for sample, director in enumerate(directors)
        ]
        return Job(self, ask, name, thoughts)

    def _settings(self, ask: Ask) -> tuple[RolloutConfig, PromptConfig]:
        if ask.n > self.config.max_n:
            raise Refused(f"n is {ask.n}; this server answers at most {self.config.max_n} at once", "n")
        budget = ask.max_completion_tokens or self.config.rollout.budget
        if budget > self.config.rollout.budget:
            limit = f"the longest path of this server's responses has at most {self.config.rollout.budget:,} tokens"
            raise Refused(f"max_completion_tokens is {budget:,}; {limit}", "max_completion_tokens")
        rollout = replace(self.config.rollout, budget=budget)
        rollout.temperature = rollout.temperature if ask.temperature is None else ask.temperature
        rollout.top_p = rollout.top_p if ask.top_p is None else ask.top_p
        without_workers = ask.reasoning_effort == "none" and self.config.prompt.parallel
        return rollout, replace(self.config.prompt, kind="sequential") if without_workers else self.config.prompt

    def _prompt_ids(self, ask: Ask, prompt: PromptConfig) -> list[int]:
        limit = min(self.context - 1, prompt.max_prompt_tokens)
        characters = sum(len(message.content) for message in ask.messages)
        if characters > CHARACTERS_PER_TOKEN * limit:
            raise Refused(
                f"messages have {characters:,} characters; this server's prompts have at most {limit:,} tokens",
                "messages",
            )
        for at, message in enumerate(ask.messages):
            found = next((token for token in self._reserved if token in message.content), None)
            if found is not None:
                raise Refused(
                    f"messages[{at}].content holds the special token {found!r}; remove it", f"messages[{at}].content"
                )
        text = prompt_text(prompt, ask.messages, self.words.tokenizer, self.words.eos)
        ids = list(self.words.tokenizer.encode(text, add_special_tokens=prompt.wording.raw))
        if len(ids) > limit:
            raise Refused(
                f"messages make a prompt of {len(ids):,} tokens; this server's have at most {limit:,}", "messages"
            )
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
        return Refused(f"the engine failed on this request ({type(error).__name__}): try again", status=500)

    @property
    def _wait(self) -> int:
        """Seconds until a slot may be free."""
        return math.ceil(min(60.0, max(1.0, self.usual_seconds)))


class Choice:
    """One response in progress: what has been sent to the client."""

    def __init__(self, index: int, stop: tuple[str, ...]):
        self.index, self.order, self.channels = index, ReadingOrder(), Channels(stop)

    def hear(self, piece: Piece) -> Iterator[tuple[dict, list[int]]]:
        """(delta, token ids) for each piece to send now; the delta of newly written text names its lane."""
        lane = {"round": piece.path[0] + 1, "worker": piece.path[1], "text": piece.text, "tokens": len(piece.ids)}
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

    def __init__(self, chat: Chat, ask: Ask, name: str, thoughts: list[Thinking]):
        self.chat, self.ask, self.name, self.thoughts = chat, ask, name, thoughts
        self.choices = [Choice(index, ask.stop) for index in range(ask.n)]
        self.began, self.created = time.monotonic(), int(time.time())
        # an empty delta: this choice has finished
        self._deltas: asyncio.Queue[tuple[int, dict, list[int]] | None] = asyncio.Queue()
        self._unfinished = ask.n
        chat.running += ask.n
        metrics.RUNNING.inc(ask.n)
        self._task = asyncio.create_task(self._run())
        self._task.add_done_callback(self._ended)

    async def _run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for choice, thinking in zip(self.choices, self.thoughts, strict=True):
                group.create_task(self._think(choice, thinking))

    async def _think(self, choice: Choice, thinking: Thinking) -> None:
        def hear(piece: Piece) -> bool:
            for delta, ids in choice.hear(piece):
                self._deltas.put_nowait((choice.index, delta, ids))
            return choice.channels.stopped is not None

        await thinking.run(hear)
        seconds = time.monotonic() - self.began
        self.chat.usual_seconds += 0.1 * (seconds - self.chat.usual_seconds)
        metrics.observe(thinking.director.response, self._finish(choice.index)[0], seconds, thinking.first_token)
        self._unfinished -= 1
        self._deltas.put_nowait((choice.index, {}, []))

    def _ended(self, task: asyncio.Task) -> None:
        self.chat.running -= self.ask.n
        metrics.RUNNING.dec(self.ask.n)
        if task.cancelled() or task.exception() is not None:
            metrics.RESPONSES.labels("cancelled" if task.cancelled() else "error").inc(self._unfinished)
        self._deltas.put_nowait(None)

    async def close(self) -> None:
        """End every call of the request that is still running."""
        self._task.cancel()
        await asyncio.wait([self._task])

    async def _done(self) -> None:
        try:
            await self._task
        except BaseExceptionGroup as group:
            raise _first(group) from None

    def _finish(self, index: int) -> tuple[str, str | None]:
        """(finish_reason, stop_reason)"""
        stopped, finish = self.choices[index].channels.stopped, self.thoughts[index].director.response.finish
        if stopped is not None:
            return "stop", stopped
        return ("stop", None) if finish is Finish.ANSWERED else ("length", finish.value)

    async def whole(self) -> dict:
        await self._done()
        messages = [{"role": "assistant", "content": "", "reasoning": ""} for _ in self.choices]
        while (item := self._deltas.get_nowait()) is not None:
            for field in ("reasoning", "content"):
                messages[item[0]][field] += item[1].get(field, "")
        return self._object(
            "chat.completion", [self._choice(message, index) for index, message in enumerate(messages)]
        ) | {
            "usage": self._usage(),
            **({"prompt_token_ids": self.thoughts[0].director.prompt} if self.ask.return_token_ids else {}),
        }

    def _choice(self, message: dict, index: int) -> dict:
        finish, reason = self._finish(index)
        ids = {"token_ids": self.thoughts[index].director.response.as_read} if self.ask.return_token_ids else {}
        message["reasoning_content"] = message["reasoning"]
        return {
            "index": index,
            "message": message,
            "logprobs": None,
            "finish_reason": finish,
            "stop_reason": reason,
            **ids,
        }

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
        if self.ask.include_usage:
            yield [self._object("chat.completion.chunk", []) | {"usage": self._usage()}]

    def _told(self, index: int, delta: dict, ids: list[int]) -> dict:
        if delta:
            return self._chunk(index, delta, {"token_ids": ids} if self.ask.return_token_ids else {})
        finish, reason = self._finish(index)
        return self._chunk(index, {}, {"finish_reason": finish, "stop_reason": reason})

    def _chunk(self, index: int, delta: dict, more: dict | None = None) -> dict:
        return self._object(
            "chat.completion.chunk", [{"index": index, "delta": delta, "finish_reason": None, **(more or {})}]
        )

    def _object(self, kind: str, choices: list[dict]) -> dict:
        model = self.ask.model or self.chat.models[0]
        return {"id": self.name, "object": kind, "created": self.created, "model": model, "choices": choices}

    def _usage(self) -> dict:
        responses = [thinking.director.response for thinking in self.thoughts]
        decode: Callable[[list[int]], str] = self.chat.words.decode
        sampled = sum(response.sampled_tokens for response in responses)
        prompt = len(responses[0].prompt)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": sampled,
            "total_tokens": prompt + sampled,
            "completion_tokens_details": {
                "reasoning_tokens": sampled - sum(answer_tokens(response, decode) for response in responses),
                "longest_path_tokens": max(response.longest_path for response in responses),
                "rounds": max(len(response.rounds) for response in responses),
                "workers": sum(len(round_.workers) for response in responses for round_ in response.rounds),
            },
        }


def _first(group: BaseExceptionGroup) -> BaseException:
    error = group.exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error
