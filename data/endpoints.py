"""Language models at an HTTP endpoint, through the vendors' SDKs: one coroutine from messages to text.

The SDKs retry rate limits, overload, server errors, time-outs and dropped connections (exponential backoff with jitter,
or about as long as the server's retry-after says), here until `patience_seconds` have passed without an answer. Errors
that retrying cannot fix are separate: `Refused` concerns this request only, `Unusable` every request. The key comes
from the environment and is removed from every message that leaves this file.
"""

from __future__ import annotations

import asyncio
import email.utils
import importlib
import math
import os
import random
import time
from dataclasses import dataclass
from typing import Any

from dccot.core.config import ConfigError, check_address, one_of, require, warn_of_plain_http

CLIENTS = {
    "anthropic": "AsyncAnthropic",
    "openai": "AsyncOpenAI",
}  # protocol, which is the name of its SDK → the client in it
ALL_REQUESTS_FAIL = {401, 403, 404}
RETRIES = 1_000_000  # patience_seconds ends them
GARBLED_SECONDS = 1.0  # pause after an invalid reply, which the SDKs do not retry
SHORTEST_WAIT, LONGEST_WAIT = 0.5, 90.0  # seconds, limits for a server's retry-after; OpenAI's SDK gives up at 120


@dataclass
class EndpointConfig:
    protocol: str = "anthropic"  # or openai: any OpenAI-compatible server
    model: str = "claude-sonnet-4-5-20250929"
    base_url: str | None = None  # None: the SDK's own
    # environment variable that holds the key; empty for a server that needs none
    key_variable: str = "ANTHROPIC_API_KEY"
    temperature: float | None = 0.7  # None: leave it to the server
    max_tokens: int = 12_000
    max_tokens_field: str = "max_tokens"  # some OpenAI models need max_completion_tokens
    timeout_seconds: float = 600.0
    patience_seconds: float = 3600.0  # for one reply, including the SDK's retries

    def check(self) -> None:
        one_of(self.protocol, CLIENTS, "endpoint.protocol")
        one_of(self.max_tokens_field, ("max_tokens", "max_completion_tokens"), "endpoint.max_tokens_field")
        if self.base_url is not None:
            check_address(self.base_url, "endpoint.base_url")
        require(bool(self.model), "endpoint.model is not set; name the model that the endpoint serves")
        for name in ("max_tokens", "timeout_seconds", "patience_seconds"):
            require(getattr(self, name) > 0, f"endpoint.{name} is {getattr(self, name)}; it must be positive")

    def key(self) -> str:
        if not self.key_variable:
            return "none"
        require(
            bool(os.environ.get(self.key_variable)),
            f"the environment variable {self.key_variable} (endpoint.key_variable) is not set",
        )
        return os.environ[self.key_variable]


@dataclass(frozen=True)
class Reply:
    text: str
    cut: bool  # ended by max_tokens
    input_tokens: int
    output_tokens: int


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
        http = self._sdk.DefaultAsyncHttpxClient(
            timeout=config.timeout_seconds, event_hooks={"response": [_with_sensible_retry]}
        )
        options = {"api_key": self._key, "base_url": config.base_url, "http_client": http, "max_retries": RETRIES}
        options["timeout"] = config.timeout_seconds
        self._client = getattr(self._sdk, CLIENTS[config.protocol])(**options)
        self._call = self._ask_anthropic if config.protocol == "anthropic" else self._ask_openai

    async def __aenter__(self) -> Endpoint:
        return self

    async def __aexit__(self, *_) -> None:
        await self._client.close()

    async def ask(self, system: str, user: str) -> Reply:
        """The model's reply, however often the SDK has to retry. An empty `system` is omitted."""
        try:
            async with asyncio.timeout(self.config.patience_seconds):
                while True:
                    try:
                        return await self._call(system, user)
                    except _Garbled:
                        await asyncio.sleep(GARBLED_SECONDS * random.uniform(1, 1.25))
        except TimeoutError:
            raise Refused(
                f"no answer within {self.config.patience_seconds:.0f} s (endpoint.patience_seconds)"
            ) from None
        except self._sdk.APIStatusError as error:
            said = self._clean(f"HTTP {error.status_code}: {error.message}")
            if error.status_code in ALL_REQUESTS_FAIL:
                raise Unusable(
                    f"{self._where()} rejects requests ({said}); check the key, endpoint.model and endpoint.base_url"
                ) from None
            raise Refused(said) from None
        except self._sdk.APIError as error:
            raise Refused(self._clean(f"{type(error).__name__}: {error}")) from None

    async def _ask_anthropic(self, system: str, user: str) -> Reply:
        # The SDK's method no longer has a temperature, but models that accept one are still served.
        sampling = {} if self.config.temperature is None else {"extra_body": {"temperature": self.config.temperature}}
        # The instruction is the same in every request: marked, it is served from the server's cache.
        instruction = [{"type": "text", "text": system, "cache_control": {"type": "ephemeral"}}]
        reply = await self._client.messages.create(
            model=self.config.model,
            max_tokens=self.config.max_tokens,
            messages=[{"role": "user", "content": user}],
            **({"system": instruction} if system else {}),
            **sampling,
        )
        with _readable():
            text = "".join(block.text for block in reply.content if block.type == "text")
            usage = reply.usage
            read = usage.input_tokens + (usage.cache_creation_input_tokens or 0) + (usage.cache_read_input_tokens or 0)
            return Reply(text, reply.stop_reason == "max_tokens", int(read), int(usage.output_tokens))

    async def _ask_openai(self, system: str, user: str) -> Reply:
        sampling = {} if self.config.temperature is None else {"temperature": self.config.temperature}
        reply = await self._client.chat.completions.create(
            model=self.config.model,
            messages=[*([{"role": "system", "content": system}] if system else []), {"role": "user", "content": user}],
            **{self.config.max_tokens_field: self.config.max_tokens},
            **sampling,
        )
        with _readable():
            choice, usage = reply.choices[0], reply.usage
            counts = (usage.prompt_tokens, usage.completion_tokens) if usage else (0, 0)
            return Reply(choice.message.content or "", choice.finish_reason == "length", *map(int, counts))

    def _where(self) -> str:
        return f"{self.config.protocol} endpoint {self.config.base_url or '(default address)'}"

    def _clean(self, message: str) -> str:
        """One line, not too long, without the key."""
        message = " ".join(message.split())
        if self._key != "none":
            message = message.replace(self._key, "[key]")
        return message[:300]


async def _with_sensible_retry(response: Any) -> None:
    """A server's retry-after gets a floor, jitter and a limit; for an invalid one (0, negative, nan) the SDK uses its
    own backoff.
    """
    milliseconds, wait = (_seconds(response.headers.pop(name, "")) for name in ("retry-after-ms", "retry-after"))
    asked = wait if math.isnan(milliseconds) else milliseconds / 1000
    if 0 < asked < math.inf:
        response.headers["retry-after"] = (
            f"{min(max(asked, SHORTEST_WAIT), LONGEST_WAIT) * random.uniform(1, 1.25):.3f}"
        )


def _seconds(wait: str) -> float:
    """What a retry-after header says, as a number or as a date; nan for what is neither."""
    try:
        return float(wait)
    except ValueError:
        date = email.utils.parsedate_tz(wait)
    try:
        return email.utils.mktime_tz(date) - time.time() if date else math.nan
    except (ValueError, OverflowError):
        return math.nan


class _Garbled(Exception):
    """A status 200 that is not a valid reply."""


class _readable:
    """Turns anything missing from a reply into `_Garbled`: proxies return their own pages with status 200."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind, error, _) -> None:
        if kind is not None and issubclass(kind, AttributeError | TypeError | IndexError | KeyError | ValueError):
            raise _Garbled from None
