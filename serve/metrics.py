"""Prometheus metrics at /metrics in addition to vLLM's own."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

from dccot.rollout.response import Response

SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
TOKENS = tuple(2**power for power in range(5, 17))

RUNNING = Gauge("dccot_responses_running", "responses that are being written", multiprocess_mode="livesum")
RESPONSES = Counter("dccot_responses", "responses by how they ended: stop, length, cancelled, error", ["finish"])
REFUSED = Counter("dccot_requests_refused", "requests that were not run, by HTTP status", ["status"])
ROUNDS = Histogram("dccot_rounds", "rounds of workers per response", buckets=(0, 1, 2, 3, 4, 6, 8))
WORKERS = Histogram("dccot_workers", "workers per response", buckets=(0, 2, 3, 6, 9, 12, 18, 24))
LONGEST_PATH = Histogram("dccot_longest_path_tokens", "tokens on the longest path of a response", buckets=TOKENS)
PARALLELISM = Histogram(
    "dccot_parallelism",
    "tokens of a response over those on its longest path",
    buckets=(1, 1.25, 1.5, 1.75, 2, 2.5, 3, 4),
)
FIRST_TOKEN = Histogram(
    "dccot_time_to_first_token_seconds", "from the request to the first sampled token", buckets=SECONDS
)
ANSWER = Histogram("dccot_time_to_answer_seconds", "from the request to the end of its response", buckets=SECONDS)


def observe(response: Response, finish: str, seconds: float, first_token: float | None) -> None:
    """One completed response."""
    RESPONSES.labels(finish).inc()
    ROUNDS.observe(len(response.rounds))
    WORKERS.observe(sum(len(round_.workers) for round_ in response.rounds))
    LONGEST_PATH.observe(response.longest_path)
    PARALLELISM.observe(response.parallelism)
    ANSWER.observe(seconds)
    if first_token is not None:
        FIRST_TOKEN.observe(first_token)
