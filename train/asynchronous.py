"""RL on a fleet of `vllm serve` processes that never stop: `rollout.mode=asynchronous`.

    rank 0, a thread    draw ─► servers sample ─► grade ─► reward ─► filter ─► advantage ─► the pool's queue
    every rank          takes a batch from the front of the queue ─► updates ─► weights into the servers, in place

    dccot rl … rollout.mode=asynchronous rollout.gpus=5            servers of its own on this machine
    dccot rl … rollout.mode=asynchronous engine.url=[http://…]     servers elsewhere (examples/asynchronous.sbatch)

Everything between problems and updates is what train/rl.py does in the other modes, in the same order (`turn`). The
queue is that of train/pool.py: in the order drawn, no token older than `rollout.max_staleness` versions. Rank 0 alone
talks to the servers; a batch is sent to the others when it is taken.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import torch

from dccot.core.command import Stopped, asked
from dccot.core.runtime import Runtime
from dccot.model.weights import full_parameters
from dccot.rollout.director import Call, Completion
from dccot.rollout.engine import TrainingEngine
from dccot.rollout.generate import Request, Watch
from dccot.rollout.response import Response, Rollout
from dccot.rollout.servers import Servers
from dccot.rollout.training_fleet import TrainingFleet
from dccot.train.batch import Batch
from dccot.train.config import RLConfig
from dccot.train.rewards import Group, Outline, keeps
from dccot.train.rl import RL, Question, turn

log = logging.getLogger(__name__)
PAUSE = 0.05  # seconds between two looks at the queue
PATIENCE = 5.0  # seconds that other ranks wait in one collective for what rank 0 waits for
T = TypeVar("T")


class AsynchronousRL(RL):
    def __init__(self, config: RLConfig, runtime: Runtime, stack: ExitStack, engine: TrainingEngine | None = None):
        self._questions: deque[Question] = deque()  # of validation
        self._answers: list[tuple[Request, Response]] = []
        self._fault: BaseException | None = None
        self._closed = threading.Event()
        self._idle = 0.0  # seconds in which no server had a call, since the last step
        self._finished_work = 0  # calls and verdicts
        super().__init__(config, runtime, stack, engine)
        if self.engine is not None:
            self.sampler.watch, self.judge.beat = Finishes(self._progressed), self._progressed
            self._thread = threading.Thread(target=self._take_turns, name="rollout", daemon=True)
            stack.callback(self._close)

    def open_engine(self, path: Path, stack: ExitStack, given: TrainingEngine | None) -> TrainingEngine | None:
        """Rank 0 talks to the servers."""
        if not self.runtime.is_main:
            return None
        engine = self.config.engine
        if self.config.rollout.gpus:
            opened = stack.enter_context(Servers(path, engine, self.config.rollout.gpus, logs=self.run.folder))
            engine = replace(engine, url=opened.urls)
        fleet = TrainingFleet(path, engine, self.run.folder / "weights")
        fleet.replica, fleet.replicas = 0, 1
        stack.callback(fleet.shutdown)
        return fleet

    # ---- the thread ----

    def _take_turns(self) -> None:
        try:
            while not self._closed.is_set():
                turn(self)
        except BaseException as error:
            self._fault = error

    def roll_out(self) -> None:
        while self._questions:
            request, config, seed = self._questions.popleft()
            self.sampler.start(request, config, seed=seed)
        began, working = time.perf_counter(), bool(self.sampler)
        found = self._sample()
        self._answers += found  # to those of the validation that waits now, which may have begun meanwhile
        if not working:
            self._idle += time.perf_counter() - began

    def grade(self) -> list[tuple[int, Rollout]]:
        return self.grading.done()

    def share(self, work: Callable[[], list[tuple[int, Outline]]]) -> list[tuple[int, Outline]]:
        """The others get to know of a response when it is taken."""
        return work()

    def filter(self, groups: Sequence[Group]) -> list[Group]:
        whole = [[self.own[graded.place] for graded in group if isinstance(graded, Outline)] for group in groups]
        return [group for group, texts in zip(groups, whole) if keeps(texts, self.config.filter)]

    def agree(self, groups: Sequence[Group], kept: Sequence[Group]) -> None:
        """Rank 0 decides for all."""

    def _close(self) -> None:
        self._closed.set()
        if self._thread.ident:
            self._thread.join()

    def _progressed(self) -> None:
        self._finished_work += 1

    # ---- the training loop ----

    def collect(self, batch: Batch) -> tuple[list[Group], list[Group]]:
        """What the thread has put at the front of the queue, the same on every rank."""
        self.limit(batch)
        groups: list[Group] = []
        with self.phases("rollout"):
            while not groups:
                groups, chosen = self._seen_by_all(self._front)
                if self.runtime.sum(torch.tensor([asked.stop], dtype=torch.int32)).item():
                    raise Stopped
        return self.settled(batch, groups, [group for group, kept in zip(groups, chosen) if kept])

    def _seen_by_all(self, look: Callable[[], T]) -> T:
        """What rank 0 sees, after PATIENCE at most. To wait is no progress, unless calls or verdicts are finished."""
        before = self._finished_work
        found, progress = self.runtime.broadcast((look(), self._finished_work > before) if self.engine else None)
        if progress:
            self.phases.beat()
        return found

    def _front(self) -> tuple[list[Group], list[bool]]:
        """Groups, and whether the filter kept each."""
        deadline = time.monotonic() + PATIENCE
        groups, kept = self.pool.take()
        while not groups and not asked.stop and time.monotonic() < deadline:
            self._pause()
            groups, kept = self.pool.take()
        return groups, [any(group is other for other in kept) for group in groups]

    def _pause(self) -> None:
        if self._fault is not None:
            raise self._fault
        time.sleep(PAUSE)

    def release_engine(self) -> None:
        """The servers sample while the model trains, for the batches after this one."""
        self.pool.begin(self.phases.step + 1)

    def sync(self, version: int) -> None:
        with self.phases("sync"):
            dtype = self.runtime.broadcast(self.engine.dtype if self.engine else None)
            gathered = full_parameters(self.model, dtype)
            if self.engine is not None:
                self.engine.load(gathered, version)
            for _ in gathered:  # the other ranks help to gather
                pass
            if version == self.first_step:
                self.pool.begin(version)
            self.pool.version = version
            if self.engine is not None and not self._thread.ident:
                self._thread.start()

    def answers(self, questions: Sequence[Question]) -> list[tuple[Request, Response]]:
        """Rank 0 asks the thread; all wait, however long it takes."""
        self._answers = []
        self._questions.extend(questions)
        while not self._seen_by_all(lambda: self._answered(len(questions))):
            pass
        return self._answers

    def _answered(self, count: int) -> bool:
        deadline = time.monotonic() + PATIENCE
        while len(self._answers) < count and time.monotonic() < deadline:
            self._pause()
        return len(self._answers) >= count

    def sampling_seconds(self) -> float:
        """The servers sample all the time."""
        return time.perf_counter() - self._start

    def _waits(self) -> dict[str, float]:
        elapsed, idle = time.perf_counter() - self._start, self._idle
        self._idle = 0.0
        told = {
            "time/engines_wait": idle / elapsed,
            "time/trainer_waits": self.phases.seconds.get("rollout", 0.0) / elapsed,
        }
        if isinstance(self.engine, TrainingFleet):
            log.info("%s", self.engine.state())
            told |= self.engine.health()
        return told


class Finishes(Watch):
    """Tells that a call has finished."""

    def __init__(self, tell: Callable[[], None]):
        self.tell = tell

    def finished(self, request: Request, call: Call, completion: Completion) -> None:
        self.tell()
