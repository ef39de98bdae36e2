"""The load of vLLM's engine as it reports it after every step, for admission.py and for /metrics.

Steps are timed by the engine: the time between two tokens of a sequence. Only those without a prompt are learnt from.
With several engines (data parallelism) the mean counts; with several API servers each of them sees its own calls.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from prometheus_client import Gauge
from vllm.engine.protocol import EngineClient
from vllm.v1.metrics.loggers import AggregateStatLoggerBase
from vllm.v1.metrics.stats import IterationStats, SchedulerStats

from dccot.serve.admission import CROWDED, FULL, SPARE, StepTime

BASE = Gauge("dccot_step_seconds_base", "learnt: of an engine step, without its sequences", multiprocess_mode="max")
EACH = Gauge("dccot_step_seconds_per_sequence", "learnt: what a sequence adds to a step", multiprocess_mode="max")
CROWDING = Gauge(
    "dccot_crowding", "what the others lose of what one more sequence gains, 0 to 1", multiprocess_mode="max"
)
WAITING = Gauge("dccot_workers_waiting", "workers that wait for room in the batch", multiprocess_mode="livesum")


class EngineLoad(AggregateStatLoggerBase):
    def __init__(self, engine: EngineClient):
        self.steps = StepTime()
        self.most = engine.vllm_config.scheduler_config.max_num_seqs
        self.changed: Callable[[], object] = lambda: None
        self._engines: dict[int, SchedulerStats] = {}
        if (manager := getattr(engine, "logger_manager", None)) is not None:
            manager.stat_loggers.append(self)

    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: IterationStats | None,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        if scheduler_stats is None:
            return
        self._engines[engine_idx] = scheduler_stats
        gaps = iteration_stats.inter_token_latencies_iter if iteration_stats is not None else []
        if iteration_stats is not None and gaps and not iteration_stats.time_to_first_tokens_iter:
            self.steps.learn(max(len(gaps), scheduler_stats.num_running_reqs), min(gaps))
            BASE.set(self.steps.base)
            EACH.set(self.steps.per_sequence)
        CROWDING.set(self.steps.crowding(scheduler_stats.num_running_reqs))
        self.changed()

    def log_engine_initialized(self) -> None: ...

    def crowded(self, running: int) -> bool:
        """Whether one more call would bring less than it costs the others; `running` are those of this server."""
        engines = self._engines.values()
        if any(engine.num_waiting_reqs or engine.kv_cache_usage > FULL for engine in engines):
            return True
        each = max(running, sum(engine.num_running_reqs for engine in engines)) / max(1, len(engines))
        return each >= self.most - SPARE or self.steps.crowding(each) > CROWDED
