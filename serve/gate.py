"""What every request passes before it reaches a route, ours or one of vLLM's: the key, limits on its size, whether the
server is about to end, and whether a web page may send it.

A browser sends text and forms of any page to any address, and asks first (CORS) before it sends JSON: from a page
nothing else is taken.

vLLM asks for the key below /v1, /v2, /inference and /cohere only: /invocations, /tokenize, /pause and others answer
without. Where a key is set, this server asks for it everywhere but on the page and where a load balancer looks.

Values are counted because vLLM tries each message as everything that a message may be, and reports all that is wrong
with it: a body of 1 MB that holds `{}` 350,000 times took 23 seconds and 8 GB, while every other request waited.
"""

from __future__ import annotations

import asyncio
import json
import math
from typing import Any

from fastapi import HTTPException
from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import Message, Receive, Scope, Send
from vllm.entrypoints.serve.middleware.authenticate import AuthenticationMiddleware

from dccot.serve.request import Refused

OPEN = ("/", "/health", "/ping")
MAX_BODY = 2**20  # bytes; the text of 131,072 tokens has about 0.5 MB
MAX_VALUES = 2000  # in the JSON of a request; six hundred turns of a conversation
UPLOAD_SECONDS = 60  # from the request's first line to the end of its body
IDS = ("prompt", "tokens", "token_ids")  # fields whose integers are not counted
TOO_LARGE = f"the request has more than {MAX_BODY:,} bytes"
TOO_SLOW = f"the request's body did not arrive within {UPLOAD_SECONDS} seconds"
TOO_MANY = f"the request holds more than {MAX_VALUES:,} values (keys, and items of lists): send less at once"
OF_A_PAGE = Refused("a web page must send this as Content-Type: application/json", status=415)
LEAVING = Refused("this server is shutting down: ask another one, or this one when it has been restarted", status=503)


class Gate(AuthenticationMiddleware):
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            return await self.app(scope, receive, send)
        headers, path = Headers(scope=scope), scope["path"].removeprefix(scope.get("root_path", ""))
        preflight = scope.get("method") == "OPTIONS"
        if self.api_tokens and not preflight and path not in OPEN and not self.verify_token(headers):
            return await JSONResponse({"error": "Unauthorized"}, 401)(scope, receive, send)
        chat = getattr(scope["app"].state, "dccot", None)
        if chat and chat.leaving and (scope.get("method") == "POST" or path in OPEN[1:]):
            return await JSONResponse(LEAVING.body, 503)(scope, receive, send)
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if "origin" in headers and scope.get("method") == "POST" and kind != "application/json":
            return await JSONResponse(OF_A_PAGE.body, OF_A_PAGE.status)(scope, receive, send)
        if (length := headers.get("content-length", "0")).isdecimal() and int(length) > MAX_BODY:
            await _drain(receive)
            refused = Refused(TOO_LARGE, status=413)
            return await JSONResponse(refused.body, 413, {"Connection": "close"})(scope, receive, send)
        await self.app(scope, _limited(receive), send)


async def _drain(receive: Receive) -> None:
    """Read on for a while: a client that is still sending does not see the answer."""
    left = 8 * MAX_BODY
    while left > 0 and (message := await receive()).get("more_body"):
        left -= len(message["body"])


def _limited(receive: Receive) -> Receive:
    body, ends = bytearray(), asyncio.get_running_loop().time() + UPLOAD_SECONDS

    async def limited() -> Message:
        nonlocal ends
        try:
            async with asyncio.timeout_at(ends):
                message = await receive()
        except TimeoutError:
            raise HTTPException(408, TOO_SLOW, {"Connection": "close"}) from None
        if message["type"] == "http.request":
            body.extend(message.get("body", b""))
            if len(body) > MAX_BODY:
                raise HTTPException(413, TOO_LARGE)
            if not message.get("more_body"):
                ends = math.inf  # what comes next is the client's going away
                if holds_too_many(body):
                    raise HTTPException(400, TOO_MANY)
        return message

    return limited


def holds_too_many(body: bytes | bytearray) -> bool:
    """Whether a JSON text has more than MAX_VALUES values; one that cannot be read is left to who reads it next."""
    if body.count(b",") + body.count(b"[") + body.count(b"{") < MAX_VALUES:
        return False
    outside = b"".join(body.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')[::2])  # of texts and keys
    if outside.count(b"[") + outside.count(b"{") > MAX_VALUES:  # not even read: a million lists take a second
        return True
    try:
        left: list[Any] = [json.loads(body)]
    except (ValueError, RecursionError):
        return False
    count = 0
    while left and count <= MAX_VALUES:
        each = left.pop()
        if isinstance(each, dict):
            count += len(each)
            left += [value for key, value in each.items() if not (key in IDS and _are_ids(value))]
        elif isinstance(each, list) and (count := count + len(each)) <= MAX_VALUES:
            left += each
    return count > MAX_VALUES


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(each) is int for each in value)
