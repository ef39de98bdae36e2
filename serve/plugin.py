"""The endpoint plugin of vLLM's server: `VLLM_PLUGINS=dccot vllm serve MODEL`, or `dccot serve MODEL`.

    POST /v1/chat/completions      director and workers over the server's engine (replaces vLLM's)
    POST /v1/responses             the same as items and typed events
    GET  /v1/models                vLLM's list, with this server's settings
    GET  /                         a page to ask questions and watch the workers

Everything else is vLLM's: /v1/completions, /metrics, /health, batching, prefix cache, parallelism, TLS. An API key that
is set is required on all of its routes (gate.py).
"""

from __future__ import annotations

import asyncio
import os
import sys
from argparse import Namespace
from collections.abc import AsyncIterator, Coroutine
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.datastructures import State
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send
from vllm.engine.protocol import EngineClient
from vllm.entrypoints.serve.utils.api_utils import listen_for_disconnect

from dccot.model.tokenizer import open_tokenizer
from dccot.rollout.tags import check_same_ids, in_words
from dccot.serve import console
from dccot.serve.chat import REFUSED, Chat, Job
from dccot.serve.completions import Completions
from dccot.serve.ending import finish_first
from dccot.serve.gate import Gate
from dccot.serve.launch import from_environment
from dccot.serve.request import Refused
from dccot.serve.responses import Responses

WHEN = {"eager": "at once", "never": "one after another", "adaptive": "as the engine's load allows"}


class Plugin:
    name = "dccot"
    required_tasks = ("generate",)

    def attach_router(self, app: FastAPI) -> None:
        keys = app.state.args.api_key or [os.environ.get("VLLM_API_KEY")]
        app.add_middleware(Gate, tokens=[key for key in keys if key])
        app.add_api_route("/v1/chat/completions", chat_completions, methods=["POST"], response_model=None)
        app.add_api_route("/v1/responses", responses, methods=["POST"], response_model=None)
        app.add_api_route("/v1/models", models, methods=["GET"], response_model=None)
        app.add_api_route("/", page, methods=["GET"], response_model=None, include_in_schema=False)

    async def init_state(self, engine_client: EngineClient, state: State, args: Namespace) -> None:
        names = args.served_model_name or [args.model]
        if Path(args.model).is_dir():
            check_same_ids(open_tokenizer(args.model), engine_client.renderer.get_tokenizer(), args.model)
        state.dccot = Chat(engine_client, from_environment(), list(names))
        finish_first(state.dccot, engine_client)
        if getattr(args, "api_process_rank", 0) in (0, None):
            if console.starting:
                console.starting.end()
            print(banner(state.dccot, args), file=sys.stderr, flush=True)


def banner(chat: Chat, args: Namespace) -> str:
    rollout, scheme = chat.config.rollout, "https" if args.ssl_certfile else "http"
    host = f"[{args.host}]" if ":" in (args.host or "") else args.host or "0.0.0.0"
    where = f"{scheme}://{host}:{args.port}" if not args.uds else f"unix:{args.uds}"
    thinks = in_words(rollout.workers, rollout.depth) if chat.config.prompt.parallel else "no workers"
    keys = args.api_key or [os.environ.get("VLLM_API_KEY")]
    key = "asked for (Authorization: Bearer …)" if any(keys) else "none: anyone who reaches the address may ask"
    seconds = chat.engine.vllm_config.shutdown_timeout
    lines = {
        "thinks": f"{thinks}, at most {rollout.budget:,} tokens on the longest path, context {chat.context:,}",
        "workers": f"start {WHEN[chat.config.branching]} (--branching {chat.config.branching})",
        "API": f"{where}/v1  (chat/completions, responses)",
        "page": f"{where}/",
        "key": key,
        "stop": f"Ctrl-C or SIGTERM; responses in progress have {seconds} s to finish",
    }
    return "\n".join([f"dccot serves {chat.models[0]}", *(f"  {name:<7} {text}" for name, text in lines.items())])


async def chat_completions(request: Request) -> Response:
    return await _answer(request, Completions)


async def responses(request: Request) -> Response:
    return await _answer(request, Responses)


async def _answer(request: Request, api: type[Completions | Responses]) -> Response:
    chat: Chat = request.app.state.dccot
    try:
        with chat.arrival():
            asked = api(await request.body())
            job = await chat.admit(asked.request)
    except ClientDisconnect:
        return Response(status_code=499)  # nobody reads it
    except Refused as refused:
        REFUSED.labels(str(refused.status)).inc()
        return _refusal(refused)
    return EventStream(job, asked.stream(job)) if asked.request.stream else await _whole(job, asked.whole(job), request)


def _refusal(refused: Refused) -> Response:
    headers = {"Retry-After": str(refused.retry_after)} if refused.retry_after is not None else None
    return JSONResponse(refused.body, refused.status, headers)


async def _whole(job: Job, written: Coroutine[Any, Any, dict], request: Request) -> Response:
    answer, gone = asyncio.create_task(written), asyncio.create_task(listen_for_disconnect(request))
    try:
        await asyncio.wait([answer, gone], return_when=asyncio.FIRST_COMPLETED)
        if answer.done():
            return JSONResponse(answer.result())
        return Response(status_code=499)  # nobody reads it
    except Exception as error:
        return _refusal(job.refusal(error))
    finally:
        answer.cancel()
        gone.cancel()
        await job.close()


class EventStream(StreamingResponse):
    """Server-sent events of a job. When they end, or the client disconnects, so does the job."""

    def __init__(self, job: Job, events: AsyncIterator[str]):
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self._job = job

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._job.close()


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
