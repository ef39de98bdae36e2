"""Language models at an HTTP endpoint, through the vendors' SDKs: one coroutine from messages to text.

The SDKs retry rate limits, overload, server errors, time-outs and dropped connections (exponential backoff with jitter,
or as long as the server's retry-after says), here until `patience_seconds` have passed without an answer. Errors that
retrying cannot fix are separate: `Refused` concerns this request only, `Unusable` every request. The key comes from the
environment and is removed from every message that leaves this file.
"""

from __future__ import annotations

import asyncio
import importlib
import os
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from dccot.core.config import (
    Address,
    ConfigError,
    NonNegativeFloat,
    Positive,
    PositiveFloat,
    require,
    required,
    warn_of_plain_http,
)

CLIENTS = {"anthropic": "AsyncAnthropic", "openai": "AsyncOpenAI"}  # protocol = its SDK → the client in it
ALL_REQUESTS_FAIL = {401, 403, 404}
RETRIES = 1_000_000  # patience_seconds ends them
GARBLED_SECONDS = 1.0  # pause after an invalid reply, which the SDKs do not retry
UNREADABLE = (AttributeError, TypeError, IndexError, KeyError, ValueError)  # proxies send their own pages as status 200
SHORTEST_WAIT, LONGEST_WAIT = 0.5, 90.0  # seconds; a server's other wishes give way to the SDK's own backoff


@dataclass
class EndpointConfig:
    protocol: Literal["anthropic", "openai"] = "anthropic"  # openai: any OpenAI-compatible server
    # that rewrites
    model: Annotated[str, required("name the model that the endpoint serves")] = "claude-sonnet-4-5-20250929"
    base_url: Address | None = None  # None: the SDK's own
    # environment variable that holds the key; null or empty for a server that needs none
    key_variable: str | None = "ANTHROPIC_API_KEY"
    temperature: float | None = 0.7  # None: leave it to the server
    max_tokens: Positive = 12_000  # of one reply
    # some OpenAI models need max_completion_tokens
    max_tokens_field: Literal["max_tokens", "max_completion_tokens"] = "max_tokens"
    timeout_seconds: PositiveFloat = 600.0  # of one request
    patience_seconds: PositiveFloat = 3600.0  # for one reply, including the SDK's retries
    # US dollars per million tokens: read, read from the server's cache, written; None: only tokens are counted
    prices: Annotated[list[NonNegativeFloat], Field(min_length=3, max_length=3)] | None = None

    def key(self) -> str:
        name = self.key_variable or ""
        known, without = not name or bool(os.environ.get(name)), "a server without keys: endpoint.key_variable="
        require(
            known,
            f"the environment variable {name} (endpoint.key_variable) is not set; {without}",
        )
        return os.environ[name] if name else "none"


@dataclass(frozen=True)
class Reply:
    text: str
    cut: bool  # ended by max_tokens
    input_tokens: int
    output_tokens: int
    cached_tokens: int = 0  # of the input, read from the server's cache


class Refused(Exception):
    """The server will never answer this request."""


class Unusable(ConfigError):
    """The server will reject all our requests: wrong key, wrong model, wrong address."""


class Endpoint:
    """`await endpoint.ask(system, user)`; use as an async context manager."""

    def __init__(self, config: EndpointConfig):
        self.config, self._key = config, config.key()
        if config.base_url:
            warn_of_plain_http(config.base_url, "endpoint.base_url")
        self._sdk: Any = importlib.import_module(config.protocol)
        seconds = config.timeout_seconds
        http = self._sdk.DefaultAsyncHttpxClient(timeout=seconds, event_hooks={"response": [_drop_odd_waits]})
        client = getattr(self._sdk, CLIENTS[config.protocol])
        where = {"api_key": self._key, "base_url": config.base_url, "http_client": http}
        self._client = client(**where, max_retries=RETRIES, timeout=seconds)

    async def __aenter__(self) -> Endpoint:
        return self

    async def __aexit__(self, *_) -> None:
        await self._client.close()

    async def ask(self, system: str, user: str, shared: str = "") -> Reply:
        """The model's reply, however often the SDK has to retry. An empty `system` is omitted; the message begins
        with `shared`, which all requests have in common.
        """
        send, read = PROTOCOLS[self.config.protocol]
        try:
            async with asyncio.timeout(self.config.patience_seconds):
                while True:
                    reply = await send(self._client, self.config, system, user, shared)
                    try:
                        return read(reply)
                    except UNREADABLE:
                        await asyncio.sleep(GARBLED_SECONDS)
        except TimeoutError:
            limit = f"{self.config.patience_seconds:.0f} s (endpoint.patience_seconds)"
            raise Refused(f"no answer within {limit}") from None
        except self._sdk.APIStatusError as error:
            said = self._clean(f"HTTP {error.status_code}: {error.message}")
            if error.status_code in ALL_REQUESTS_FAIL:
                where = f"{self.config.protocol} endpoint {self.config.base_url or '(default address)'}"
                remedy = "check the key, endpoint.model and endpoint.base_url"
                raise Unusable(f"{where} rejects requests ({said}); {remedy}") from None
            raise Refused(said) from None
        except self._sdk.APIError as error:
            raise Refused(self._clean(f"{type(error).__name__}: {error}")) from None

    def _clean(self, message: str) -> str:
        """One line, not too long, without the key."""
        message = " ".join(message.split())
        return (message if self._key == "none" else message.replace(self._key, "[key]"))[:300]


async def _send_anthropic(client: Any, config: EndpointConfig, system: str, user: str, shared: str) -> Any:
    # The SDK's method no longer has a temperature, but models that accept one are still served.
    sampling = {} if config.temperature is None else {"extra_body": {"temperature": config.temperature}}

    def cached(text: str) -> dict[str, Any]:
        """The same in every request: marked, it is served from the server's cache."""
        return {"type": "text", "text": text, "cache_control": {"type": "ephemeral"}}

    before = {"system": [cached(system)]} if system else {}
    content = [cached(shared), {"type": "text", "text": user}] if shared else user
    messages = [{"role": "user", "content": content}]
    sizes = {"model": config.model, "max_tokens": config.max_tokens}
    return await client.messages.create(messages=messages, **sizes, **before, **sampling)


def _read_anthropic(reply: Any) -> Reply:
    text, usage = "".join(block.text for block in reply.content if block.type == "text"), reply.usage
    cached = usage.cache_read_input_tokens or 0
    read = usage.input_tokens + (usage.cache_creation_input_tokens or 0) + cached
    return Reply(text, reply.stop_reason == "max_tokens", int(read), int(usage.output_tokens), int(cached))


async def _send_openai(client: Any, config: EndpointConfig, system: str, user: str, shared: str) -> Any:
    sampling = {} if config.temperature is None else {"temperature": config.temperature}
    before = [{"role": "system", "content": system}] if system else []
    # servers of this protocol cache what requests begin with, unasked
    messages = [*before, {"role": "user", "content": shared + user}]
    sizes = {"model": config.model, config.max_tokens_field: config.max_tokens}
    return await client.chat.completions.create(messages=messages, **sizes, **sampling)


def _read_openai(reply: Any) -> Reply:
    choice, usage = reply.choices[0], reply.usage
    details = getattr(usage, "prompt_tokens_details", None)
    cached = (details.cached_tokens or 0) if details else 0
    counts = (usage.prompt_tokens, usage.completion_tokens, cached) if usage else (0, 0, 0)
    return Reply(choice.message.content or "", choice.finish_reason == "length", *map(int, counts))


PROTOCOLS = {"anthropic": (_send_anthropic, _read_anthropic), "openai": (_send_openai, _read_openai)}


async def _drop_odd_waits(response: Any) -> None:
    """Without a retry-after that would have the SDK hurry, wait for hours, or give up."""
    response.headers.pop("retry-after-ms", None)
    try:
        wait = float(response.headers.get("retry-after", "nan"))
    except ValueError:
        wait = float("nan")
    if not SHORTEST_WAIT <= wait <= LONGEST_WAIT:
        response.headers.pop("retry-after", None)
