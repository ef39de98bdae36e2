"""Strict parsing of a chat completion request: unsupported fields are rejected by name, never ignored.

    ChatRequest.read(read_json(body))      bytes → ChatRequest, or Refused
    prompt_text(prompt, messages, …)       in the model's own format: its chat template, or DeepSeek's chat tokens

A field may still be sent with a value that has no effect (`store: false`, `tools: []`): clients do so by default.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from itertools import groupby
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from transformers import PreTrainedTokenizerBase

from dccot.core.config import ConfigError
from dccot.data.prompts import ASSISTANT, BOS, USER, PromptConfig, UnusablePrompt
from dccot.rollout.tags import THINK_CLOSE
from dccot.serve.admission import Branching
from dccot.serve.stream import Channels, Piece

MAX_STOP = 1000  # characters of a stop string, which is looked for after every token
KINDS = dict.fromkeys((400, 413, 415), "BadRequestError") | {404: "NotFoundError", 503: "ServiceUnavailableError"}
NEUTRAL: dict[str, tuple] = {  # fields that are not supported, with the values that ask for nothing
    **dict.fromkeys(("frequency_penalty", "presence_penalty"), (0, 0.0)),
    **dict.fromkeys(("store", "ignore_eos"), (False,)),
    "repetition_penalty": (1, 1.0),
    "logit_bias": ({},),
    "top_logprobs": (0,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "service_tier": ("auto", "default"),
    "include_reasoning": (True,),
}
# they identify the caller, or allow to cache; the response is the same
WITHOUT_EFFECT = ("user", "safety_identifier", "metadata", "prompt_cache_key")
# share of the server's budget; the model does not know it, it is a limit
EFFORTS = {"minimal": 0.125, "low": 0.25, "medium": 0.5, "high": 1.0, "xhigh": 1.0, "max": 1.0}


class Refused(Exception):
    """A request that is not run; becomes the error body of the OpenAI API."""

    def __init__(self, message: str, param: str | None = None, status: int = 400, retry_after: int | None = None):
        super().__init__(message)
        self.param, self.status, self.retry_after = param, status, retry_after

    @property
    def body(self) -> dict:
        kind = KINDS.get(self.status, "InternalServerError")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.status}}


def _whole(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("it holds half of a surrogate pair, which is not valid text") from None
    return text


Text = Annotated[str, AfterValidator(_whole)]
Count = Annotated[int, Field(ge=1, le=2**31 - 1)]


class Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")


class Message(Strict):
    role: Literal["system", "user", "assistant"]
    content: Text

    @model_validator(mode="before")
    @classmethod
    def _simplify(cls, item: Any) -> Any:
        """Parts of type text are joined; what an assistant thought in earlier turns is not read again."""
        if not isinstance(item, dict):
            return item
        skipped = ("reasoning", "reasoning_content") if item.get("role") == "assistant" else ()
        odd = {key: value for key, value in item.items() if value and key not in skipped}
        kept = odd | {key: item[key] for key in ("role", "content") if key in item}
        if kept.get("role") == "developer":
            kept["role"] = "system"
        parts = kept.get("content")
        if isinstance(parts, list) and all(_is_text(part) for part in parts):
            kept["content"] = "\n".join(part["text"] for part in parts)
        if kept.get("role") == "assistant" and THINK_CLOSE in str(text := kept.get("content")):
            kept["content"] = Channels().take(Piece((0, 0), str(text), [], ()))[1]
        return kept


def _is_text(part: Any) -> bool:
    named = isinstance(part, dict) and set(part) == {"type", "text"} and part["type"] == "text"
    return named and isinstance(part["text"], str)


class StreamOptions(Strict):
    include_usage: bool = False
    include_obfuscation: Literal[False] = False


class ChatRequest(Strict):
    messages: list[Message] = Field(min_length=1)
    model: Text | None = None
    n: Count = 1
    seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    max_completion_tokens: Count | None = None  # on the longest path
    max_tokens: Count | None = None  # its former name
    top_k: int | None = Field(None, ge=-1, le=2**31 - 1)
    min_p: float | None = Field(None, ge=0, le=1)
    stop: list[Annotated[Text, Field(min_length=1, max_length=MAX_STOP)]] = Field([], max_length=4)
    logprobs: bool = False  # of the tokens that were sampled for the answer
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    # "none": without workers; otherwise see EFFORTS
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    chat_template_kwargs: dict[Text, bool | int | float | Text | None] = Field({}, max_length=16)
    return_token_ids: bool = False
    branching: Branching | None = None  # when workers start
    max_worker_tokens: Count | None = None  # what a worker writes beyond is not waited for
    straggler_factor: float | None = Field(None, gt=1)  # nor the last one, once so many times longer than the others
    return_rollout: bool = False  # the whole tree, as `dccot view` reads it

    @field_validator("stop", mode="before")
    @classmethod
    def _listed(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    @field_validator("messages")
    @classmethod
    def _alternate(cls, messages: list[Message]) -> list[Message]:
        """Messages of one role that follow each other are one message."""
        turns = [(role, [each.content for each in turn]) for role, turn in groupby(messages, lambda each: each.role)]
        messages = [Message(role=role, content="\n\n".join(contents)) for role, contents in turns]
        spoken = messages[1:] if messages[0].role == "system" else messages
        if [message.role for message in spoken] != ["user", "assistant"] * (len(spoken) // 2) + ["user"]:
            raise ValueError("they must be user, assistant, user, …, user, with system messages only before them")
        return messages

    @model_validator(mode="after")
    def _agree(self) -> Self:
        new, old = self.max_completion_tokens, self.max_tokens
        if None not in (new, old) and new != old:
            raise Refused(f"max_tokens is {old} and max_completion_tokens is {new}; send one of them", "max_tokens")
        if self.stream_options.include_usage and not self.stream:
            raise Refused("stream_options is for stream: true only", "stream_options")
        return self

    @classmethod
    def read(cls, fields: dict[str, Any]) -> Self:
        given = {name: value for name, value in fields.items() if name not in WITHOUT_EFFECT}
        drop_neutral(given, NEUTRAL)
        try:
            return cls.model_validate(given)
        except ValidationError as error:
            raise refusal(error.errors()[0]) from None

    def budget(self, limit: int) -> tuple[int, str | None]:
        """Of the longest path, at most `limit`; and what to tell the client if that is less than it wants."""
        wanted = self.max_completion_tokens or self.max_tokens or limit
        name = "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"
        cut = f"{name} is {wanted:,}; the longest path has at most {limit:,} tokens here" if wanted > limit else None
        return min(wanted, max(1, round(limit * EFFORTS.get(self.reasoning_effort or "", 1.0)))), cut

    @property
    def filters(self) -> dict[str, Any]:
        """What is asked of sampling beside temperature and top_p, by vLLM's names."""
        scored = self.logprobs or self.return_rollout
        given = {"top_k": self.top_k, "min_p": self.min_p, "logprobs": 0 if scored else None}
        return {name: value for name, value in given.items() if value is not None}


def read_json(body: bytes) -> dict[str, Any]:
    """The fields that were given a value."""
    try:
        tree = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise Refused(f"the request is not JSON: {type(error).__name__}") from None
    if not isinstance(tree, dict):
        raise Refused("the request is not a JSON object")
    return {name: value for name, value in tree.items() if value is not None}


def drop_neutral(given: dict[str, Any], neutral: Mapping[str, tuple]) -> None:
    """Remove fields that are not supported, but ask for nothing."""
    for name in neutral.keys() & given.keys():
        value = given.pop(name)
        if not any(value == harmless and type(value) is type(harmless) for harmless in neutral[name]):
            raise Refused(f"{name} is {short(value)}, which this server does not support; leave it out", name)


def refusal(error: Any) -> Refused:
    name = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in error["loc"]).removeprefix(".")
    if error["type"] == "missing":
        message = f"{name} is missing"
    elif error["type"] == "extra_forbidden":
        message = f"{short(name)} is not a field that this server knows"
    else:
        message = f"{name} is {short(error['input'])}; {error['msg'].removeprefix('Value error, ')}"
    return Refused(message, name if name.isascii() and len(name) <= 100 else None)


def short(value: Any) -> str:
    try:
        text = ascii(value)
    except RecursionError:
        text = f"a deeply nested {type(value).__name__}"
    return text if len(text) <= 60 else text[:57] + "…"


def prompt_text(prompt: PromptConfig, messages: list[Message], tokenizer: Any, eos: str, options: dict) -> str:
    """The last message in the format the model was trained on, after earlier turns; a chat template gets `options`."""
    if taken := sorted(options.keys() & inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters):
        name = f"chat_template_kwargs.{taken[0]}"
        raise Refused(f"{name} is not a variable of the chat template; leave it out", name)
    turns = [message.model_dump() for message in messages[:-1]]
    try:
        chat = prompt.chat_format_for(tokenizer) == "chat"
        last = prompt.text(messages[-1].content, tokenizer, turns if chat else (), options)
    except (ConfigError, UnusablePrompt) as error:  # the template rejects these turns, or changes the question
        raise Refused(f"messages: {error}", "messages") from None
    if chat or not turns:
        return last
    if not last.startswith(BOS):
        remedy = f"this model is asked one question at a time (prompt.kind is {prompt.kind})"
        raise Refused(f"messages: {remedy}", "messages")
    spoken = {"system": ("", ""), "user": (USER, ""), "assistant": (ASSISTANT, eos)}
    earlier = [spoken[message.role][0] + message.content + spoken[message.role][1] for message in messages[:-1]]
    return BOS + "".join(earlier) + last.removeprefix(BOS)
