"""What every request passes before it reaches a route, ours or one of vLLM's: the key, and a limit on its size.

vLLM asks for the key below /v1, /v2, /inference and /cohere only: /invocations, /tokenize, /pause and others answer
without. Where a key is set, this server asks for it everywhere but on the page and where a load balancer looks.
"""

from __future__ import annotations

from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from vllm.entrypoints.serve.middleware.authenticate import AuthenticationMiddleware

from dccot.serve.request import MAX_BODY, Refused

OPEN = ("/", "/health", "/ping")


class TooLarge(Exception):
    pass


class Gate(AuthenticationMiddleware):
    def __init__(self, app: ASGIApp, tokens: Sequence[str]):
        super().__init__(app, list(tokens))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            return await self.app(scope, receive, send)
        headers, path = Headers(scope=scope), scope["path"].removeprefix(scope.get("root_path", ""))
        preflight = scope.get("method") == "OPTIONS"
        if self.api_tokens and not preflight and path not in OPEN and not self.verify_token(headers):
            return await JSONResponse({"error": "Unauthorized"}, 401)(scope, receive, send)
        sent = False

        async def noting(message: Message) -> None:
            nonlocal sent
            sent = True
            await send(message)

        try:
            if (length := headers.get("content-length", "0")).isdecimal() and int(length) > MAX_BODY:
                raise TooLarge
            await self.app(scope, _limited(receive), noting)
        except TooLarge:
            if not sent:
                await _drain(receive)
                refused = Refused(f"the request has more than {MAX_BODY:,} bytes", status=413)
                await JSONResponse(refused.body, 413, {"Connection": "close"})(scope, receive, send)


async def _drain(receive: Receive) -> None:
    """Read on for a while: a client that is still sending does not see the answer."""
    left = 4 * MAX_BODY
    while left > 0 and (message := await receive()).get("more_body"):
        left -= len(message["body"])


def _limited(receive: Receive) -> Receive:
    size = 0

    async def limited() -> Message:
        nonlocal size
        message = await receive()
        size += len(message.get("body", b""))
        if size > MAX_BODY:
            raise TooLarge
        return message

    return limited
