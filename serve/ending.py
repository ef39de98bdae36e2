"""How a server ends: SIGTERM or Ctrl-C lets what is being written finish, up to `--shutdown-timeout`; a second one, or
the end of that time, cuts the rest off with a 503. Meanwhile new requests get a 503 and /health says so (gate.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import threading
from typing import Any

from vllm.engine.protocol import EngineClient

from dccot.serve.chat import Chat
from dccot.serve.launch import SHUTDOWN_SECONDS
from dccot.serve.request import Refused

LOOK_SECONDS = 0.1
died: list[EngineClient] = []  # engines of this process that ended before they were told to


def finish_first(chat: Chat, engine: Any) -> None:
    """vLLM answers these signals by shutting the engine down, from a thread: what runs is finished before that."""
    shut_down, loop, here = engine.shutdown, asyncio.get_running_loop(), threading.current_thread()

    def shutdown(timeout: float | None = None) -> None:
        if engine.engine_core.resources.engine_dead and not chat.leaving:
            died.append(engine)
        if threading.current_thread() is not here and not chat.leaving:
            asyncio.run_coroutine_threadsafe(_finish(chat, timeout or 0.0), loop).result()
        chat.leaving = True
        shut_down(timeout=timeout)
        # vLLM next asks who holds its port, and fails if that is an engine that it has just killed
        for process in getattr(engine.engine_core.resources.engine_manager, "processes", ()):
            process.join(SHUTDOWN_SECONDS)

    engine.shutdown = shutdown


async def _finish(chat: Chat, limit: float) -> None:
    chat.leaving, loop, hurry = True, asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, hurry.set)
    if running := _responses(chat.running):
        _say(f"stopping: {running} may finish within {limit:g} s, new requests get a 503; again to stop now")
    end = loop.time() + limit
    while (chat.jobs or chat.arriving) and loop.time() < end and not hurry.is_set():
        await asyncio.sleep(LOOK_SECONDS)
    cut_off = f"; {_responses(chat.running)} cut off" if chat.running else ""
    for job in list(chat.jobs):
        job.cut_off(Refused("this server was stopped before the response was finished", status=503))
    _say(f"stopped{cut_off}")


def _responses(count: int) -> str:
    return f"{count} response{'s' * (count != 1)}" if count else ""


def _say(text: str) -> None:
    with contextlib.suppress(OSError):  # a closed terminal or pipe must not keep the server from ending
        print(f"\ndccot serve: {text}", file=sys.stderr, flush=True)
