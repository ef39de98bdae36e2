"""A job as the chat completions API writes it.

    asked = Completions(body)      what is asked, or Refused; `asked.request` is admitted as a job
    await asked.whole(job)         one chat.completion object
    asked.stream(job)              chat.completion.chunk objects, as server-sent events; those that arrived together

In a stream, a new delta carries its lane in addition to the standard fields (see `Delta`).
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator

from dccot.serve.chat import Delta, Job
from dccot.serve.request import ChatRequest, read_json


class Completions:
    def __init__(self, body: bytes):
        self.request = ChatRequest.read(read_json(body))

    async def whole(self, job: Job) -> dict:
        choices = [_choice(job, index, *texts) for index, texts in enumerate(await job.whole())]
        ids = {"prompt_token_ids": job.responses[0].prompt} if job.request.return_token_ids else {}
        return _object(job, "chat.completion", choices) | {"usage": _usage(job), **ids, **_warnings(job)}

    async def stream(self, job: Job) -> AsyncIterator[str]:
        opening = {"role": "assistant", "content": ""}
        yield _events(*(_chunk(job, index, opening) | _warnings(job) for index in range(job.request.n)))
        try:
            async for deltas in job.deltas():
                yield _events(*(_told(job, delta) for delta in deltas))
            if job.request.stream_options.include_usage:
                yield _events(_object(job, "chat.completion.chunk", []) | {"usage": _usage(job)})
        except Exception as error:
            yield _events(job.refusal(error).body)
        yield "data: [DONE]\n\n"


def _events(*objects: dict) -> str:
    texts = (json.dumps(each, ensure_ascii=False, separators=(",", ":")) for each in objects)
    return "".join(f"data: {text}\n\n" for text in texts)


def _choice(job: Job, index: int, reasoning: str, content: str) -> dict:
    ids = {"token_ids": job.responses[index].as_read} if job.request.return_token_ids else {}
    message = {"role": "assistant", "content": content, "reasoning": reasoning, "reasoning_content": reasoning}
    return {"index": index, "message": message, **_end(job, index), **ids}


def _told(job: Job, delta: Delta) -> dict:
    if delta.ends:
        return _chunk(job, delta.index, {}, **_end(job, delta.index))
    thought, said = delta.reasoning, delta.content
    text = {"reasoning": thought, "reasoning_content": thought} if thought else {}
    text |= {"content": said} if said else {}
    ids = {"token_ids": delta.ids} if job.request.return_token_ids else {}
    return _chunk(job, delta.index, text | delta.lane, **ids)


def _end(job: Job, index: int) -> dict:
    """What is known about a choice when it has ended."""
    finish, reason = job.finish(index)
    logprobs = {"content": job.logprobs(index)} if job.request.logprobs else None
    rollout = {"rollout": job.rollout(index)} if job.request.return_rollout else {}
    cut = {"cut_workers": job.sessions[index].cut} if job.sessions[index].cut else {}
    return {"logprobs": logprobs, "finish_reason": finish, "stop_reason": reason, **cut, **rollout}


def _chunk(job: Job, index: int, delta: dict, **more: object) -> dict:
    choice = {"index": index, "delta": delta, "finish_reason": None, **more}
    return _object(job, "chat.completion.chunk", [choice])


def _object(job: Job, kind: str, choices: list[dict]) -> dict:
    return {"id": job.name, "object": kind, "created": job.created, "model": job.model, "choices": choices}


def _warnings(job: Job) -> dict:
    return {"warnings": job.warnings} if job.warnings else {}


def _usage(job: Job) -> dict:
    counts = job.counts()
    prompt, sampled = counts["prompt"], counts["sampled"]
    details = {
        "reasoning_tokens": sampled - counts["answers"],
        "longest_path_tokens": counts["longest_path"],
        "rounds": counts["rounds"],
        "workers": counts["workers"],
    }
    return {
        "prompt_tokens": prompt,
        "completion_tokens": sampled,
        "total_tokens": prompt + sampled,
        "prompt_tokens_details": {"cached_tokens": counts["cached"]},
        "completion_tokens_details": details,
    }
