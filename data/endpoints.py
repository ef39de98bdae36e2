"""Language models behind an HTTP endpoint, through their makers' SDKs: one coroutine from messages to text.

Rate limits, overload, server errors, time-outs and dropped connections are waited out (exponential backoff with jitter, or as long as
the server's retry-after says) and are nobody's fault: they end only when `patience_seconds` have passed without an answer. What
cannot get better by waiting is told apart: `Refused` concerns this request alone, `Unusable` every request. The key comes from the
environment and is cut out of every message that leaves this file.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from dataclasses import dataclass
from email.utils import parsedate_to_datetime

from dccot.config import ConfigError, one_of, require

PROTOCOLS = ("anthropic", "openai")
WAIT_AND_SEE = {408, 409, 425, 429}  # and every 5xx
ALL_REQUESTS_FAIL = {401, 403, 404}


@dataclass
class EndpointConfig:
    protocol: str = "anthropic"  # or openai: any OpenAI-compatible server
    model: str = "claude-sonnet-4-5-20250929"
    base_url: str | None = None  # None: the SDK's own
    key_variable: str = "ANTHROPIC_API_KEY"  # environment variable that holds the key; empty for a server that wants none
    temperature: float | None = 0.7  # None: leave it to the server
    max_tokens: int = 12_000
    max_tokens_field: str = "max_tokens"  # some OpenAI models want max_completion_tokens
    timeout_seconds: float = 600.0
    first_backoff_seconds: float = 1.0
    longest_backoff_seconds: float = 60.0
    patience_seconds: float = 3600.0

    def check(self) -> None:
        one_of(self.protocol, PROTOCOLS, "endpoint.protocol")
        one_of(self.max_tokens_field, ("max_tokens", "max_completion_tokens"), "endpoint.max_tokens_field")
        require(bool(self.model), "endpoint.model is not set; name the model that the endpoint serves")
        for name in ("max_tokens", "timeout_seconds", "first_backoff_seconds", "longest_backoff_seconds", "patience_seconds"):
            require(getattr(self, name) > 0, f"endpoint.{name} is {getattr(self, name)}; it must be positive")

    def key(self) -> str:
        if not self.key_variable:
            return "none"
        require(bool(os.environ.get(self.key_variable)), f"the environment variable {self.key_variable} (endpoint.key_variable) is not set")
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
    """The server will answer no request of ours: wrong key, wrong model, wrong address."""


class Endpoint:
    """`await endpoint.ask(system, user)`; use as an async context manager."""

    def __init__(self, config: EndpointConfig):
        self.config, self._key = config, config.key()
        self.waits = 0  # times a request had to wait, for the summary
        options = {"api_key": self._key, "base_url": config.base_url, "timeout": config.timeout_seconds, "max_retries": 0}
        if config.protocol == "anthropic":
            import anthropic as sdk

            self._client, self._call = sdk.AsyncAnthropic(**options), self._ask_anthropic
        else:
            import openai as sdk

            self._client, self._call = sdk.AsyncOpenAI(**options), self._ask_openai
        self._sdk = sdk

    async def __aenter__(self) -> Endpoint:
        return self

    async def __aexit__(self, *_) -> None:
        await self._client.close()

    async def ask(self, system: str, user: str) -> Reply:
        """The model's reply, however long the way to it."""
        deadline = time.monotonic() + self.config.patience_seconds
        backoff = self.config.first_backoff_seconds
        while True:
            try:
                return await self._call(system, user)
            except self._sdk.APIStatusError as error:
                status = error.status_code
                said = self._clean(f"HTTP {status}: {error.message}")
                if status in ALL_REQUESTS_FAIL:
                    raise Unusable(f"{self._where()} turns us away ({said}); check the key, endpoint.model and endpoint.base_url") from None
                if status < 500 and status not in WAIT_AND_SEE:
                    raise Refused(said) from None
                wait = retry_after(error.response.headers)
            except (self._sdk.APIError, _Garbled) as error:
                said, wait = self._clean(f"{type(error).__name__}: {error}"), None
            if wait is None:
                wait = backoff * random.uniform(0.75, 1.0)
                backoff = min(2 * backoff, self.config.longest_backoff_seconds)
            if time.monotonic() + wait > deadline:
                raise Refused(f"no answer within {self.config.patience_seconds:.0f} s; last: {said}")
            self.waits += 1
            await asyncio.sleep(wait)

    async def _ask_anthropic(self, system: str, user: str) -> Reply:
        # The SDK's method has no temperature any more, models that take one are still served.
        sampling = {} if self.config.temperature is None else {"extra_body": {"temperature": self.config.temperature}}
        # The instruction is the same in every request: marked, it is read from the server's cache.
        instruction = [{"type": "text", "text": system, "cache_control": {"type": "ephemeral"}}]
        reply = await self._client.messages.create(
            model=self.config.model,
            max_tokens=self.config.max_tokens,
            system=instruction,
            messages=[{"role": "user", "content": user}],
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
            messages=[{"role": "system", "content": system}, {"role": "user", "content": user}],
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


class _Garbled(Exception):
    """A reply with status 200 that is not one."""


class _readable:
    """Turns whatever is missing in a reply into `_Garbled`: proxies answer 200 with pages of their own."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind, error, _) -> None:
        if kind is not None and issubclass(kind, AttributeError | TypeError | IndexError | KeyError | ValueError):
            raise _Garbled(f"the reply has not the form of one ({kind.__name__})") from None


def retry_after(headers) -> float | None:
    """Seconds that the server asks us to wait; None if it does not say."""
    for name, unit in (("retry-after-ms", 0.001), ("retry-after", 1.0)):
        value = headers.get(name)
        if value is None:
            continue
        try:
            return max(0.0, float(value) * unit)
        except ValueError:
            try:
                return max(0.0, parsedate_to_datetime(value).timestamp() - time.time())
            except ValueError:
                return None
    return None
