"""Strict parsing of a chat completion request: unsupported fields are rejected by name, never ignored.

    read_ask(body)                         bytes → Ask, or Refused
    prompt_text(prompt, messages, …)       the messages in the model's own format: its chat template, or DeepSeek's chat tokens

A field may still be sent with a value that has no effect (`logprobs: false`, `tools: []`): clients do so by default.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from dccot.core.config import ConfigError
from dccot.data.prompts import ASSISTANT, BOS, USER, PromptConfig, UnusablePrompt

MAX_BODY = 8 * 2**20  # bytes


class Refused(Exception):
    """A request that is not run; becomes the error body of the OpenAI API."""

    def __init__(self, message: str, param: str | None = None, status: int = 400, retry_after: int | None = None):
        super().__init__(message)
        self.param, self.status, self.retry_after = param, status, retry_after

    @property
    def body(self) -> dict:
        kind = {400: "BadRequestError", 404: "NotFoundError", 503: "ServiceUnavailableError"}.get(
            self.status, "InternalServerError"
        )
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.status}}


@dataclass(frozen=True)
class Message:
    role: str  # system, user or assistant
    content: str


@dataclass(frozen=True)
class Ask:
    messages: list[Message]
    model: str | None = None
    n: int = 1
    seed: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    max_completion_tokens: int | None = None  # on the longest path
    stop: tuple[str, ...] = ()
    stream: bool = False
    include_usage: bool = False
    reasoning_effort: str | None = None  # "none": without workers
    return_token_ids: bool = False


def read_ask(body: bytes) -> Ask:
    if len(body) > MAX_BODY:
        raise Refused(f"the request has more than {MAX_BODY:,} bytes")
    try:
        tree = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise Refused(f"the request is not JSON: {type(error).__name__}") from None
    if not isinstance(tree, dict):
        raise Refused("the request is not a JSON object")
    if "messages" not in tree:
        raise Refused("messages is missing", "messages")
    given = {
        name: _read(name, value) for name, value in tree.items() if value is not None and name not in WITHOUT_EFFECT
    }
    limits = [given.pop(name) for name in ("max_tokens", "max_completion_tokens") if name in given]
    if len(set(limits)) > 1:
        raise Refused(
            f"max_tokens is {limits[0]} and max_completion_tokens is {limits[1]}; send one of them", "max_tokens"
        )
    given["include_usage"] = given.pop("stream_options", False)
    if given["include_usage"] and not given.get("stream"):
        raise Refused("stream_options is for stream: true only", "stream_options")
    known = {name: value for name, value in given.items() if name not in NEUTRAL}
    return Ask(**known, **({"max_completion_tokens": limits[0]} if limits else {}))


def _read(name: str, value: Any) -> Any:
    if name in READERS:
        return READERS[name](name, value)
    if name not in NEUTRAL:
        raise Refused(f"{_short(name)} is not a field that this server knows", name if name.isascii() else None)
    if not any(value == neutral and type(value) is type(neutral) for neutral in NEUTRAL[name]):
        raise Refused(f"{name} is {_short(value)}, which this server does not support; leave it out", name)
    return None


def _short(value: Any) -> str:
    text = ascii(value)
    return text if len(text) <= 60 else text[:57] + "…"


def _whole(least: int, most: int) -> Callable[[str, Any], int]:
    def read(name: str, value: Any) -> int:
        if type(value) is not int or not least <= value <= most:
            raise Refused(f"{name} is {_short(value)}; it must be a whole number from {least:,} to {most:,}", name)
        return value

    return read


def _number(least: float, most: float) -> Callable[[str, Any], float]:
    def read(name: str, value: Any) -> float:
        if type(value) not in (int, float) or not least <= value <= most:
            raise Refused(f"{name} is {_short(value)}; it must be a number from {least:g} to {most:g}", name)
        return float(value)

    return read


def _top_p(name: str, value: Any) -> float:
    if value == 0:
        raise Refused("top_p is 0; it must be above 0 (temperature: 0 takes the likeliest token)", name)
    return _number(0, 1)(name, value)


def _flag(name: str, value: Any) -> bool:
    if type(value) is not bool:
        raise Refused(f"{name} is {_short(value)}; it must be true or false", name)
    return value


def _text(name: str, value: Any) -> str:
    if type(value) is not str:
        raise Refused(f"{name} is {_short(value)}; it must be text", name)
    try:
        value.encode()
    except UnicodeEncodeError:
        raise Refused(f"{name} holds half of a surrogate pair, which is not valid text", name) from None
    return value


def _stop(name: str, value: Any) -> tuple[str, ...]:
    texts = [_text(name, item) for item in (value if isinstance(value, list) else [value])]
    if len(texts) > 4 or not all(texts):
        raise Refused(f"{name} must be at most four texts, none of them empty", name)
    return tuple(texts)


def _stream_options(name: str, value: Any) -> bool:
    if not isinstance(value, dict) or set(value) - {"include_usage"}:
        raise Refused(f"{name} is {_short(value)}; only include_usage is supported", name)
    return _flag(f"{name}.include_usage", value.get("include_usage", False))


def _effort(name: str, value: Any) -> str:
    if value != "none":
        raise Refused(f"{name} is {_short(value)}; only 'none' (no workers) is supported, and leaving it out", name)
    return value


def _messages(name: str, value: Any) -> list[Message]:
    if not isinstance(value, list) or not value:
        raise Refused("messages must be a list of at least one message", name)
    messages = [_message(f"messages[{at}]", item) for at, item in enumerate(value)]
    turns = messages[1:] if messages[0].role == "system" else messages
    if [message.role for message in turns] != ["user", "assistant"] * (len(turns) // 2) + ["user"]:
        raise Refused(
            "messages must be user, assistant, user, …, user, with at most one system message before them", name
        )
    return messages


def _message(where: str, item: Any) -> Message:
    if not isinstance(item, dict):
        raise Refused(f"{where} is {_short(item)}; it must be an object with role and content", where)
    role = {"developer": "system"}.get(str(item.get("role")), item.get("role"))
    if role not in ("system", "user", "assistant"):
        raise Refused(f"{where}.role is {_short(role)}; it must be system, user or assistant", f"{where}.role")
    thoughts = ("reasoning", "reasoning_content") if role == "assistant" else ()  # of earlier turns: not read again
    odd = [key for key, filled in item.items() if filled and key not in ("role", "content", *thoughts)]
    if odd:
        raise Refused(f"{where} has {_short(odd[0])}, which this server does not support", where)
    content = item.get("content")
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    if not all(
        isinstance(part, dict) and part.get("type") == "text" and set(part) == {"type", "text"} for part in parts
    ):
        raise Refused(f"{where}.content must be text, or a list of parts of type text", f"{where}.content")
    return Message(role, "\n".join(_text(f"{where}.content", part["text"]) for part in parts))


READERS: dict[str, Callable[[str, Any], Any]] = {
    "messages": _messages,
    "model": _text,
    "n": _whole(1, 2**31 - 1),
    "seed": _whole(-(2**63), 2**63 - 1),
    "temperature": _number(0, 2),
    "top_p": _top_p,
    "max_tokens": _whole(1, 2**31 - 1),
    "max_completion_tokens": _whole(1, 2**31 - 1),
    "stop": _stop,
    "stream": _flag,
    "stream_options": _stream_options,
    "reasoning_effort": _effort,
    "return_token_ids": _flag,
}
NEUTRAL: dict[str, tuple] = {
    "frequency_penalty": (0, 0.0), "presence_penalty": (0, 0.0), "repetition_penalty": (1, 1.0), "logit_bias": ({},),
    "logprobs": (False,), "top_logprobs": (0,), "top_k": (0, -1), "min_p": (0, 0.0), "tools": ([],), "tool_choice": ("none",),
    "parallel_tool_calls": (True, False), "response_format": ({"type": "text"},), "modalities": (["text"],), "store": (False,),
    "service_tier": ("auto", "default"), "ignore_eos": (False,), "include_reasoning": (True,),
}  # fmt: skip
WITHOUT_EFFECT = ("user", "safety_identifier", "metadata")  # identify the caller; do not affect the response


def prompt_text(prompt: PromptConfig, messages: list[Message], tokenizer: Any, eos: str) -> str:
    """The last question in the format the model was trained on, after the earlier turns."""
    turns = [asdict(message) for message in messages[:-1]]
    try:
        chat = prompt.chat_format_for(tokenizer) == "chat"
        last = prompt.text(messages[-1].content, tokenizer, turns if chat else ())
    except (ConfigError, UnusablePrompt) as error:  # the template rejects these turns, or changes the question
        raise Refused(f"messages: {error}", "messages") from None
    if chat or not turns:
        return last
    if not last.startswith(BOS):
        raise Refused(
            f"messages: this model is asked one question at a time (prompt.kind is {prompt.kind})", "messages"
        )
    spoken = {"system": ("", ""), "user": (USER, ""), "assistant": (ASSISTANT, eos)}
    earlier = [spoken[message.role][0] + message.content + spoken[message.role][1] for message in messages[:-1]]
    return BOS + "".join(earlier) + last.removeprefix(BOS)
