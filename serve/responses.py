"""A job as the Responses API writes it: a reasoning item, then a message.

    asked = Responses(body)        what is asked, or Refused; `asked.request` is admitted as a job
    await asked.whole(job)         one response object
    asked.stream(job)              typed events, as server-sent events; those that arrived together

Nothing is stored: earlier turns are sent again in `input`, and their reasoning items are not read. In a stream, a delta
event carries its lane in addition to the standard fields (see `Delta`); its `delta` is empty while the text waits to be
read. Objects and events are vLLM's and openai's own.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import AsyncIterator
from typing import Any

from openai.types.responses import ResponseOutputItemDoneEvent
from openai.types.responses.response_output_text import Logprob
from pydantic import ValidationError
from vllm import SamplingParams
from vllm.entrypoints.generate.base.protocol import DeltaMessage
from vllm.entrypoints.openai.responses.protocol import (
    InputTokensDetails,
    OutputTokensDetails,
    ResponsesRequest,
    ResponsesResponse,
    ResponseUsage,
)
from vllm.entrypoints.openai.responses.streaming_events import SimpleStreamingEventProcessor
from vllm.entrypoints.serve.engine.protocol import OpenAIBaseModel

from dccot.serve.chat import Delta, Job
from dccot.serve.request import ChatRequest, Refused, drop_neutral, read_json, refusal, short

NEUTRAL: dict[str, tuple] = {  # fields that are not supported, with the values that ask for nothing
    **dict.fromkeys(("previous_response_id", "conversation", "prompt", "max_tool_calls"), ()),
    **dict.fromkeys(("background", "store", "stream_options.include_obfuscation"), (False,)),
    "n": (1,),
    "logprobs": (False,),  # asked for by `include`
    "truncation": ("disabled",),
    "text.format": ({"type": "text"},),
    "text.verbosity": ("medium",),
    **dict.fromkeys(("reasoning.summary", "reasoning.generate_summary"), ("auto",)),  # there are none
}
NAMES = {  # here, and in chat completions
    "max_output_tokens": "max_completion_tokens",
    "reasoning.effort": "reasoning_effort",
    "input": "messages",
}
ECHOED = ("instructions", "metadata", "reasoning", "user")
LOGPROBS, ENCRYPTED = "message.output_text.logprobs", "reasoning.encrypted_content"  # the latter is sent as it is
ABOUT_ITEM = {"type", "id", "status", "phase"}  # of an earlier message; not read


class Responses:
    def __init__(self, body: bytes):
        given = read_json(body)
        try:
            self.request = ChatRequest.read(_as_chat(given))
            self._echo = ResponsesRequest(input="", **{name: given[name] for name in ECHOED if name in given})
        except Refused as refused:
            raise Refused(_renamed(str(refused)), _renamed(refused.param or "") or None) from None
        except ValidationError as error:
            raise refusal(error.errors()[0]) from None

    async def whole(self, job: Job) -> dict:
        items = _Items()
        async for deltas in job.deltas():
            for delta in deltas:
                items.hear(delta)
        status, _ = items.end(job)
        return self._response(job, status, items).model_dump(mode="json", by_alias=True)

    async def stream(self, job: Job) -> AsyncIterator[str]:
        items, count = _Items(), itertools.count()

        def told(*events: Any) -> str:
            texts = []
            for event in events:
                event.sequence_number = next(count)
                texts.append(f"event: {event.type}\ndata: {event.model_dump_json(by_alias=True)}\n\n")
            return "".join(texts)

        started = self._response(job, "in_progress", items)
        yield told(*(_Stage(type=f"response.{stage}", response=started) for stage in ("created", "in_progress")))
        try:
            async for deltas in job.deltas():
                yield told(*(event for delta in deltas for event in items.hear(delta)))
            status, events = items.end(job)
            yield told(*events, _Stage(type=f"response.{status}", response=self._response(job, status, items)))
        except Exception as error:
            failed = self._response(job, "failed", items)
            failed.error = {"code": "server_error", "message": str(job.refusal(error))}
            yield told(_Stage(type="response.failed", response=failed))

    def _response(self, job: Job, status: Any, items: _Items) -> Any:
        config, done = job.sessions[0].config, status in ("completed", "incomplete")
        made: Any = ResponsesResponse.from_request(
            self._echo,
            SamplingParams(temperature=config.temperature, top_p=config.top_p, max_tokens=config.budget),
            model_name=job.model,
            created_time=job.created,
            output=items.finished,
            status=status,
            usage=_usage(job) if done else None,
        )
        more: dict[str, Any] = {"warnings": [_renamed(warning) for warning in job.warnings]} if job.warnings else {}
        if done:
            more["stop_reason"] = job.finish(0)[1]
            more |= {"cut_workers": job.sessions[0].cut} if job.sessions[0].cut else {}
            if self.request.return_token_ids:
                more |= {"prompt_token_ids": job.responses[0].prompt, "token_ids": job.responses[0].as_read}
            if self.request.return_rollout:
                more["rollout"] = job.rollout(0)
        for name, value in more.items():
            setattr(made, name, value)
        return made


class _Stage(OpenAIBaseModel):
    """An event about the whole response; openai's own take no extra fields."""

    type: str
    sequence_number: int = -1
    response: ResponsesResponse


class _Items:
    """The output of a response, and the events that announce it: vLLM's, with lanes."""

    def __init__(self) -> None:
        self._written = SimpleStreamingEventProcessor()
        self._now = ""  # what is being written: reasoning or content

    @property
    def finished(self) -> list:
        return self._written.output_items

    def hear(self, delta: Delta) -> list[Any]:
        if delta.ends:
            return []
        events, lane = list[Any](), delta.lane
        said = [(kind, text) for kind in ("reasoning", "content") if (text := getattr(delta, kind))]
        for kind, text in said or [(self._now or "reasoning", "")]:
            message = DeltaMessage(**{kind: text})
            if kind != self._now:
                events += self._written.close_current()
                events += self._written.open(self._written.resolve_target_state(message)[0])
                self._now = kind
            [event] = self._written.emit_delta(message, output=None)
            for name, value in lane.items():
                setattr(event, name, value)
            events, lane = [*events, event], {}
        return events

    def end(self, job: Job) -> tuple[str, list[Any]]:
        """The status of the response, and the last events."""
        if job.request.logprobs:
            self._written.state.accumulated_logprobs += [Logprob(**score) for score in job.logprobs(0)]
        events = self._written.close_current()
        status = "completed" if job.finish(0)[0] == "stop" else "incomplete"
        for event in events:
            if isinstance(event, ResponseOutputItemDoneEvent):
                item: Any = event.item
                item.status = status
        return status, events


def _usage(job: Job) -> ResponseUsage:
    counts = job.counts()
    details: Any = OutputTokensDetails(reasoning_tokens=counts["sampled"] - counts["answers"])
    details.longest_path_tokens, details.rounds, details.workers = (
        counts[name] for name in ("longest_path", "rounds", "workers")
    )
    return ResponseUsage(
        input_tokens=counts["prompt"],
        input_tokens_details=InputTokensDetails(cached_tokens=counts["cached"], cache_write_tokens=0),
        output_tokens=counts["sampled"],
        output_tokens_details=details,
        total_tokens=counts["prompt"] + counts["sampled"],
    )


def _as_chat(given: dict[str, Any]) -> dict[str, Any]:
    """The same request as a chat completion."""
    asked = dict(given)
    for name in ("text", "reasoning", "stream_options"):
        if isinstance(asked.get(name), dict):
            asked |= {f"{name}.{key}": value for key, value in asked.pop(name).items() if value is not None}
    drop_neutral(asked, NEUTRAL)
    include = asked.pop("include", [])
    if not isinstance(include, list):
        raise Refused(f"include is {short(include)}; it must be a list", "include")
    if unknown := [each for each in include if each not in (LOGPROBS, ENCRYPTED)]:
        raise Refused(f"include asks for {short(unknown[0])}, which this server does not have; leave it out", "include")
    asked["logprobs"] = LOGPROBS in include
    for here, there in NAMES.items():
        if there in asked:
            raise Refused(f"{there} is called {here} here", there)
        if here in asked:
            asked[there] = asked.pop(here)
    messages = asked.get("messages")
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    if isinstance(messages, list):
        messages = [_message(item) for item in messages if not _thought(item)]
        instructions = asked.pop("instructions", None)
        asked["messages"] = ([{"role": "system", "content": instructions}] if instructions else []) + messages
    return asked


def _thought(item: Any) -> bool:
    return isinstance(item, dict) and item.get("type") == "reasoning"


def _message(item: Any) -> Any:
    """An input item as a message; what is none is refused."""
    if not isinstance(item, dict):
        return item
    if (kind := item.get("type", "message")) != "message":
        raise Refused(f"input holds an item of type {short(kind)}, which this server does not support", "input")
    kept = {name: value for name, value in item.items() if name not in ABOUT_ITEM}
    if isinstance(parts := kept.get("content"), list):
        kept["content"] = [_part(part) for part in parts]
    return kept


def _part(part: Any) -> Any:
    if isinstance(part, dict) and part.get("type") in ("input_text", "output_text"):
        return {"type": "text", "text": part.get("text")}
    return part


def _renamed(text: str) -> str:
    """What is said about a chat completion, in the words of this API."""
    for here, there in NAMES.items():
        text = re.sub(rf"^{there}\b(\[\d+\])?", here, text)
    return text
