"""Checkpoints of a run: written under a temporary name, renamed when complete, verified when read.

    checkpoints/step_000010/dcp/…           sharded model and optimizer (torch's), fp32; any number of ranks can resume
    checkpoints/step_000010/hf/…            weights for transformers and vLLM, in the precision they compute in; those
                                            of the last step in fp32, since the next stage continues from them
                                            with adapters, both hold the adapters alone (model/lora.py)
    checkpoints/step_000010/state.json      step, position in the data, counters
    checkpoints/step_000010/manifest.json   size and checksum of every file above; written last
    latest                                  name of the newest complete checkpoint; updated last

Training waits only while its shards are copied to memory. A thread on every rank writes the copy while training
continues, over a separate process group, so that its collectives never mix with those of training. hf/ is built from
what has just been written to dcp/, its files spread over the ranks; every rank computes the checksums of what it wrote.
Rank 0 adds what is small, the manifest and the name.

A checkpoint that does not match its manifest is reported and the previous one is used. The newest good one is never
deleted. A full disk costs the checkpoint, not the run: the next one is tried as usual, until `max_failures` have failed
in a row; the final one of a run must succeed. Ranks that do not share the folder are rejected at startup.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import time
import warnings
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.optim import Optimizer

from dccot.core.config import ConfigError
from dccot.core.files import BadData, flush_to_disk, write_atomic
from dccot.core.run import Checkpoint, Run
from dccot.core.runtime import Runtime, gathered_on_rank_zero, inherit_timeout, on_rank_zero
from dccot.model.lora import Base, trained, write_adapters
from dccot.model.sharding import meta_model
from dccot.model.transformer import Transformer
from dccot.model.weights import read_companions, weight_files, write_config, write_weights
from dccot.train.config import CheckpointConfig
from dccot.train.dcp_reader import load_shards

log = logging.getLogger(__name__)
TRAINED = StateDictOptions(ignore_frozen_params=True, strict=False)  # what is frozen stays as it was loaded
ROLL_CALL_SECONDS = 15.0  # between two signs of life of a rank whose checkpoint is not complete
# which is the intent
warnings.filterwarnings(
    "ignore", "torch.distributed is disabled, .* assuming the intent is to load in a single process"
)


class Checkpointer:
    """Saves and restores one run. Every method except `costs` is collective: all ranks call it."""

    def __init__(
        self,
        run: Run,
        config: CheckpointConfig,
        runtime: Runtime,
        source: str | Path,
        *,
        steps: int | None = None,
        dtype: torch.dtype | None = None,
        base: Base | None = None,
    ):
        """`steps`: the run's last step, whose hf/ is as exact as the model; `dtype`: of the others'. `base`: what the
        adapters of a model belong to.
        """
        self.steps, self.dtype = steps, dtype
        self.run, self.folder, self.latest = run, run.checkpoints, run.latest
        self.config, self.runtime, self.base = config, runtime, base
        # now: the source may be deleted or changed during the run
        self.companions = read_companions(source) if runtime.is_main else {}
        self._costs: dict[str, float] = {}
        self._failures = 0  # in a row
        self._group = dist.new_group(backend="gloo")
        inherit_timeout([self._group])
        self._writer = ThreadPoolExecutor(1, "checkpoint")
        self._underway: Future[list[str]] | None = None
        if runtime.is_main:
            self.folder.mkdir(parents=True, exist_ok=True)
            for leftover in run.partial_checkpoints():
                shutil.rmtree(leftover)
        runtime.barrier()

    def save(
        self, step: int, model: Transformer, optimizer: Optimizer, state: dict[str, Any], *, last: bool = False
    ) -> None:
        """Start writing the checkpoint of `step` once the previous one is done. If the disk cannot hold it, the failure
        is only logged.

        The `last` one of a run is waited for, and its failure is an error, since no later one can make up for it.
        """
        start = time.perf_counter()
        if not self.finish() and self._failures > self.config.max_failures:
            limit, why = f"checkpoint.max_failures is {self.config.max_failures}", "; ".join(self._problems())
            raise OSError(
                f"{self._failures} checkpoints in a row were not written ({limit}); the last because of {why}. "
                "Older checkpoints are intact: fix the cause and run this again"
            )
        model_state, optimizer_state = get_state_dict(model, optimizer, options=TRAINED)
        everything = {"model": model_state, "optimizer": optimizer_state}
        if problem := self._no_room(_bytes(everything) + _bytes(model_state) * self._has_weights(step)):
            self._underway = Future()
            self._underway.set_result([problem])
            self._failed(step, [problem], last)
        else:
            place = self.run.partial(step).dcp
            # returns when the copy is made
            written = dcp.async_save(everything, checkpoint_id=place, process_group=self._group)
            assert isinstance(written, Future)  # only a custom stager returns anything else
            dtype = next(parameter.dtype for _, parameter in trained(model))
            shape = meta_model(model.config, dtype, dtype, model.lora)
            made_on = {"base": asdict(self.base)} if self.base else {}
            text = json.dumps({"step": step, **made_on, **state}, indent=1)
            waited = time.perf_counter() - start
            self._underway = self._writer.submit(self._complete, step, written, shape, text, start, waited, last)
        if last and (problems := self._problems()):
            remedy = "make room and run this again"
            raise OSError(f"the last checkpoint, step {step}, was not written ({problems[0]}); {remedy}")

    def _has_weights(self, step: int) -> bool:
        every = self.config.keep_hf_every
        return self.base is not None or every is None or step % every == 0 or step == self.steps

    def finish(self) -> bool:
        """Wait for a checkpoint that is being written; False if it failed, with everything older intact."""
        return not self._problems()

    def _problems(self) -> list[str]:
        return self._underway.result() if self._underway is not None else []

    def costs(self) -> dict[str, float]:
        """Failures in a row and, if a checkpoint completed since the last call, what it took."""
        costs, self._costs = self._costs, {}
        return {"checkpoint/failures": float(self._failures), **costs}

    def close(self) -> None:
        """Finish what is being written before the process group is destroyed, even after an error."""
        if self._underway is not None and (error := self._underway.exception()):
            log.error("the checkpoint being written was lost: %s", _first_line(error))
        self._writer.shutdown()
        if dist.is_initialized():
            dist.destroy_process_group(self._group)

    def _no_room(self, needed: int) -> str | None:
        """Checked before writing: a checkpoint that fills the disk would also make metrics and rollouts fail."""
        free = self.runtime.broadcast(shutil.disk_usage(self.folder).free if self.runtime.is_main else None)
        return f"it needs {needed / 1e6:,.0f} MB and {free / 1e6:,.0f} MB are free" if needed > free else None

    def _failed(self, step: int, problems: list[str], last: bool) -> None:
        """Known to every rank, so that all of them stop after one failure too many."""
        self._failures += 1
        if self.runtime.is_main and not last:
            told, after = "; ".join(problems[:3]), "training continues, the one before it stays"
            log.error("checkpoint of step %d was not written (%s); %s", step, told, after)

    def _complete(
        self, step: int, written: Future, shape: Transformer, state: str, start: float, waited: float, last: bool
    ) -> list[str]:
        """In the background: when every rank has written its shards and its part of hf/, rank 0 adds the rest and
        renames.
        """
        partial, final = self.run.partial(step), self.run.checkpoint_folder(step)
        self._wait_for_all(step, written)
        reported = gathered_on_rank_zero(_causes(written.exception(), self.runtime.rank), self._group)
        problems = on_rank_zero(lambda: _distinct(reported), self._group)
        if not problems:
            parts = gathered_on_rank_zero(self._write_part(partial, step, shape), self._group)
            problems = on_rank_zero(lambda: self._finish_alone(partial, final, shape, state, parts), self._group)
        self._costs = {"time/checkpoint_waited": waited}
        if problems:
            # on every rank: if they do not share the disk, each has its own
            shutil.rmtree(partial.folder, ignore_errors=True)
            self._failed(step, problems, last)
        else:
            self._failures = 0
            self._costs["time/checkpoint_written"] = took = time.perf_counter() - start
            log.info("checkpoint of step %d is complete after %.1f s; training waited %.2f s", step, took, waited)
        return problems

    def _dtype(self, step: int) -> torch.dtype | None:
        """Of the weights in hf/; None: the model's own."""
        return None if step == self.steps else self.dtype

    def _write_part(self, partial: Checkpoint, step: int, shape: Transformer) -> tuple[list[str], dict[str, dict]]:
        """This rank's files of hf/; returns what went wrong, and the manifest's rows of everything that it wrote."""
        rank, ranks, dtype = self.runtime.rank, self.runtime.ranks, self._dtype(step)
        files = weight_files(shape, dtype) if self._has_weights(step) and self.base is None else {}
        apart = max(1, ranks // max(1, len(files)))  # on as many machines as there are
        own = [file for number, file in enumerate(files) if number * apart % ranks == rank]
        try:
            for file in own:
                partial.hf.mkdir(exist_ok=True)
                tensors = _read_back(partial.dcp, shape, files[file])
                write_weights({name: tensor.to(dtype=dtype) for name, tensor in tensors.items()}, partial.hf / file)
            shards = partial.dcp.glob(f"__{rank}_*")  # torch names them after their rank; rank 0 lists any others
            return [], partial.listed([*shards, *(partial.hf / file for file in own)])
        except (Exception, CheckpointException) as error:  # a full disk is any of many
            return _causes(error, rank), {}

    def _wait_for_all(self, step: int, written: Future) -> None:
        """Until the shards of all ranks are written. Each rank counts in the store meanwhile; rank 0 names
        those that do not: without them the checkpoint is lost after `timeout_seconds`.
        """
        if self.runtime.ranks == 1:
            return
        store, start = dist.distributed_c10d._get_default_store(), time.monotonic()
        counts = dict.fromkeys(range(self.runtime.ranks), b"")
        changed = dict.fromkeys(counts, start)  # when
        said, beat = start, 0
        while not wait([written], timeout=ROLL_CALL_SECONDS).done:
            now, beat = time.monotonic(), beat + 1
            store.set(f"dccot/checkpoint/{step}/{self.runtime.rank}", str(beat))
            if not self.runtime.is_main:
                continue
            for rank, before in counts.items():
                key = f"dccot/checkpoint/{step}/{rank}"
                if store.check([key]) and (count := store.get(key)) != before:
                    counts[rank], changed[rank] = count, now
            missing = [rank for rank, when in changed.items() if now - when > 4 * ROLL_CALL_SECONDS]
            if missing and now - said > 4 * ROLL_CALL_SECONDS:
                who = ", ".join(map(str, missing[:8])) + (f" and {len(missing) - 8} more" if len(missing) > 8 else "")
                words = "checkpoint of step %d waits for rank %s, which has not answered for %.0f s"
                log.warning(words, step, who, now - min(changed[rank] for rank in missing))
                said = now

    def _finish_alone(
        self, partial: Checkpoint, final: Checkpoint, shape: Transformer, state: str, parts: list[tuple]
    ) -> list[str]:
        """What rank 0 adds to the ranks' parts; returns what went wrong."""
        if problems := _distinct(problems for problems, _ in parts):
            return problems
        try:
            if self.base is not None:
                adapters = _read_back(partial.dcp, shape, [name for name, _ in trained(shape)])
                partial.hf.mkdir()
                write_adapters(adapters.items(), self.base, partial.hf)
                (partial.hf / "config.json").write_text(json.dumps(shape.config.raw, indent=2))
            elif self._has_weights(final.step):
                dtype = self._dtype(final.step)
                write_config(shape, partial.hf, weight_files(shape, dtype), dtype)
            if partial.hf.is_dir():
                for name, content in self.companions.items():
                    (partial.hf / name).write_bytes(content)
            partial.state.write_text(state)
            partial.write_manifest({name: row for _, rows in parts for name, row in rows.items()})
            if final.folder.exists():
                shutil.rmtree(final.folder)
            os.replace(partial.folder, final.folder)
            flush_to_disk(self.folder)
            write_atomic(self.latest, final.folder.name + "\n")
        except (Exception, CheckpointException) as error:
            return _causes(error, 0)
        self._retire(final.step)
        return []

    def newest(self) -> Checkpoint | None:
        """The newest checkpoint that matches its manifest; damaged ones are reported and skipped."""
        self.finish()
        there = self.runtime.broadcast(self.run.all_checkpoints() if self.runtime.is_main else [])
        # of others hf/ stayed
        whole = self.runtime.broadcast([each for each in there if each.dcp.exists()])
        found, mine = None, slice(self.runtime.rank, None, self.runtime.ranks)
        for each in reversed(whole):
            there_too = ["hf/"] if each.hf.exists() else []
            parts = [
                each.damage(part, mine) for part in ("dcp/", *there_too, "state.json")
            ]  # every rank reads its share
            damage = next((damage for parts in self.runtime.gather(parts) for damage in parts if damage), None)
            if damage is None:
                found = each
                break
            if self.runtime.is_main:
                log.error("checkpoint %s is damaged (%s); trying the one before", each.folder, damage)
        if there and found is None:
            names = ", ".join(each.folder.name for each in there)
            remedy = "remove that folder to start over, or rename the run"
            raise FileExistsError(f"no checkpoint in {self.folder} is whole ({names}); {remedy}")
        return found

    def resume(self, model: nn.Module, optimizer: Optimizer) -> dict[str, Any] | None:
        """Restore the newest good checkpoint; returns its state, or None for a new run."""
        found = self.newest()
        if found is None:
            return None
        if self.config.resume == "never":
            remedy = "choose another name or set checkpoint.resume=auto"
            raise FileExistsError(f"{found.folder} exists and checkpoint.resume is never; {remedy}")
        state = json.loads(found.state.read_text())
        self._require_same_base(state.get("base"))
        model_state, optimizer_state = get_state_dict(model, optimizer, options=TRAINED)
        load_shards({"model": model_state, "optimizer": optimizer_state}, found.dcp)
        set_state_dict(
            model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state, options=TRAINED
        )
        if self.runtime.is_main:
            # it may name a damaged one, or be outdated after a kill just before its update
            write_atomic(self.latest, found.folder.name + "\n")
        return state

    def _require_same_base(self, saved: dict[str, Any] | None) -> None:
        """Adapters mean nothing without the model and the settings that they were trained with."""
        now, remedy = asdict(self.base) if self.base else None, "continue with it, or choose another name"
        before, after = ((each or {"lora": {"rank": 0}})["lora"] for each in (saved, now))
        if before != after:
            raise ConfigError(f"{self.run} was trained with model.lora {before}, and it is {after}; {remedy}")
        if saved and now and saved["files"] != now["files"]:
            raise BadData(f"{self.run} has adapters of {saved['path']}, and {now['path']} differs; {remedy}")

    def _retire(self, newest_step: int) -> None:
        """Delete checkpoints older than the newest `keep`; where hf/ is to stay, only the rest of the checkpoint is
        deleted.

        Anything past the newest step was damaged, and the run has gone back to before it. A failed deletion is only
        logged: the new checkpoint is complete.
        """
        there = self.run.all_checkpoints()
        past = [each for each in there if each.step > newest_step]
        for old in past + there[: len(there) - len(past)][: -self.config.keep]:
            try:
                self._delete(old, old in past)
            except (OSError, ValueError) as error:
                log.warning("%s could not be deleted (%s); delete it by hand", old.folder, _first_line(error))

    def _delete(self, old: Checkpoint, damaged: bool) -> None:
        every = self.config.keep_hf_every
        if damaged or not every or old.step % every or not old.hf.exists():
            shutil.rmtree(old.folder)
        elif old.dcp.exists():
            old.keep_weights_only()


def _bytes(state: Any) -> int:
    """Of all tensors in a state dict, over all ranks."""
    if isinstance(state, Tensor):
        return state.numel() * state.element_size()
    inside = state.values() if isinstance(state, dict) else state if isinstance(state, list) else ()
    return sum(map(_bytes, inside))


def _read_back(folder: Path, shape: Transformer, names: Sequence[str]) -> dict[str, Tensor]:
    """Whole tensors of these parameters from a dcp/ folder; needs no other rank."""
    whole = {name: torch.empty_like(shape.get_parameter(name), device="cpu") for name in names}
    load_shards({"model": whole}, folder, no_dist=True)
    return whole


def _distinct(reported: Iterable[list[str]]) -> list[str]:
    return list(dict.fromkeys(problem for problems in reported for problem in problems))


def _causes(error: BaseException | None, rank: int) -> list[str]:
    """What went wrong, and where. torch wraps the exceptions of all ranks in one that starts with none of them."""
    if isinstance(error, CheckpointException) and error.failures:
        return [cause for failed, (inner, _) in error.failures.items() for cause in _causes(inner, failed)]
    while error is not None and error.__cause__ is not None:
        error = error.__cause__
    return [f"rank {rank}: {_first_line(error)}"] if error else []


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), "") or type(error).__name__
