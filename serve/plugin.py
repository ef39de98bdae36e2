"""The endpoint plugin of vLLM's server: `VLLM_PLUGINS=dccot vllm serve MODEL`, or `dccot serve MODEL`.

    POST /v1/chat/completions      director and workers over the server's engine (replaces vLLM's)
    GET  /v1/models                vLLM's list, with this server's settings
    GET  /                         a page to ask questions and watch the workers

Everything else is vLLM's: /v1/completions, /metrics, /health, batching, prefix cache, parallelism, TLS. An API key that
is set is required on all of its routes (gate.py).
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
from argparse import Namespace
from collections.abc import AsyncIterator
from functools import cache
from importlib.resources import files
from pathlib import Path

from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.datastructures import State
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send
from vllm.engine.protocol import EngineClient
from vllm.entrypoints.serve.utils.api_utils import listen_for_disconnect
from vllm.v1.engine.exceptions import EngineDeadError

from dccot.model.tokenizer import open_tokenizer
from dccot.rollout.tags import check_same_ids, in_words
from dccot.serve.chat import REFUSED, Chat, Job
from dccot.serve.gate import Gate
from dccot.serve.launch import from_environment
from dccot.serve.request import MAX_BODY, Refused, parse_request

log = logging.getLogger("vllm.dccot")
served: list[EngineClient] = []  # by this process


class Plugin:
    name = "dccot"
    required_tasks = ("generate",)

    def attach_router(self, app: FastAPI) -> None:
        keys = app.state.args.api_key or [os.environ.get("VLLM_API_KEY")]
        app.add_middleware(Gate, tokens=[key for key in keys if key])
        app.add_api_route("/v1/chat/completions", chat_completions, methods=["POST"], response_model=None)
        app.add_api_route("/v1/models", models, methods=["GET"], response_model=None)
        app.add_api_route("/", page, methods=["GET"], response_model=None, include_in_schema=False)

    async def init_state(self, engine_client: EngineClient, state: State, args: Namespace) -> None:
        names = args.served_model_name or [args.model]
        if Path(args.model).is_dir():
            check_same_ids(open_tokenizer(args.model), engine_client.renderer.get_tokenizer(), args.model)
        state.dccot = Chat(engine_client, from_environment(), list(names))
        served.append(engine_client)
        if getattr(args, "api_process_rank", 0) in (0, None):
            config, scheme = state.dccot.config, "https" if args.ssl_certfile else "http"
            rollout = config.rollout
            does = in_words(rollout.workers, rollout.depth) if config.prompt.parallel else "no workers"
            does += f", budget {rollout.budget:,}"
            where = f"{scheme}://{args.host or '0.0.0.0'}:{args.port}"
            print(f"dccot serves {names[0]} at {where}/v1, page at {where}/ ({does})", file=sys.stderr, flush=True)


async def chat_completions(request: Request) -> Response:
    chat: Chat = request.app.state.dccot
    try:
        with chat.arrival():
            job = await chat.admit(parse_request(await _body(request)))
    except ClientDisconnect:
        return Response(status_code=499)  # nobody reads it
    except Refused as refused:
        REFUSED.labels(str(refused.status)).inc()
        return _refusal(refused)
    return EventStream(job) if job.request.stream else await _whole(job, request)


def _refusal(refused: Refused) -> Response:
    headers = {"Retry-After": str(refused.retry_after)} if refused.retry_after is not None else None
    return JSONResponse(refused.body, refused.status, headers)


async def _body(request: Request) -> bytes:
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MAX_BODY:
            raise Refused(f"the request has more than {MAX_BODY:,} bytes")
    return bytes(body)


async def _whole(job: Job, request: Request) -> Response:
    answer, gone = asyncio.create_task(job.whole()), asyncio.create_task(listen_for_disconnect(request))
    try:
        await asyncio.wait([answer, gone], return_when=asyncio.FIRST_COMPLETED)
        if answer.done():
            return JSONResponse(answer.result())
        return Response(status_code=499)  # nobody reads it
    except Exception as error:
        return _refusal(_failure(job, error))
    finally:
        answer.cancel()
        gone.cancel()
        await job.close()


def _failure(job: Job, error: Exception) -> Refused:
    if not isinstance(error, EngineDeadError):  # of which vLLM says why, once
        log.error("request %s failed", job.name, exc_info=error)
    return job.chat.refusal(error)


class EventStream(StreamingResponse):
    """Server-sent events of a job. When they end, or the client disconnects, so does the job."""

    def __init__(self, job: Job):
        super().__init__(self._events(job), media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self._job = job

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._job.close()

    @staticmethod
    async def _events(job: Job) -> AsyncIterator[str]:
        try:
            async for chunks in job.chunks():
                texts = (json.dumps(chunk, ensure_ascii=False, separators=(",", ":")) for chunk in chunks)
                yield "".join(f"data: {text}\n\n" for text in texts)
        except Exception as error:
            yield f"data: {json.dumps(_failure(job, error).body)}\n\n"
        yield "data: [DONE]\n\n"


async def models(request: Request) -> Response:
    listed = (await request.app.state.openai_serving_models.show_available_models()).model_dump()
    about = request.app.state.dccot.about()
    return JSONResponse(listed | {"data": [card | {"dccot": about} for card in listed["data"]]})


@cache
def _page() -> str:
    pages = files("dccot.serve") / "pages"
    html, style, script = ((pages / f"serve.{kind}").read_text() for kind in ("html", "css", "js"))
    return html.replace("{{style}}", style).replace("{{script}}", script)


async def page() -> Response:
    return HTMLResponse(_page())
