"""Two ranks save; then rank 0's disk is full for the files that only rank 0 writes, then for all; then there is room
again.

torchrun --nproc_per_node 2 tests/train/checkpoint_program.py CHECKPOINT RUN
"""

import json
import resource
import sys
from pathlib import Path

import torch

from dccot.core.run import Run
from dccot.core.runtime import Runtime
from dccot.model.sharding import ShardingConfig, build_model
from dccot.train.checkpoint import CheckpointConfig, Checkpointer


def main(model_folder: Path, run: Path) -> None:
    runtime = Runtime.start(timeout_seconds=900)
    model = build_model(model_folder, ShardingConfig(compute_dtype="float32"))
    # no state of its own, so that a rank's part in dcp/ is smaller than hf/
    optimizer = torch.optim.SGD(model.parameters())
    checkpointer = Checkpointer(Run(run), CheckpointConfig(), runtime, source=model_folder)
    saved = []

    def save(step: int) -> None:
        checkpointer.save(step, model, optimizer, {})
        saved.append(checkpointer.finish())

    save(1)
    dcp, hf = (
        max(path.stat().st_size for path in (run / "checkpoints" / "step_000001" / folder).iterdir())
        for folder in ("dcp", "hf")
    )
    assert dcp < hf, "the limit below must stop hf/ and not dcp/"
    for step, limit in ((2, hf - 1), (3, 1000), (4, resource.RLIM_INFINITY)):
        if runtime.is_main:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        save(step)
    answers = runtime.gather(saved)
    if runtime.is_main:
        (run / "saved.json").write_text(json.dumps(answers))
    checkpointer.close()
    runtime.stop()


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
