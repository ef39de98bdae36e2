"""How to prompt a model: as its own run was configured, or as in the paper."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from dccot.core.config import read_yaml, with_new_names
from dccot.data.prompts import PromptConfig
from dccot.data.task import find_task
from dccot.model.folder import run_and_checkpoint
from dccot.rollout.director import RolloutConfig


def settings_of(model: str | Path) -> tuple[PromptConfig, RolloutConfig]:
    """Prompt and rollout settings of a run, whichever checkpoint of it is meant; the defaults for a plain model
    folder.
    """
    path = run_and_checkpoint(model)[0] / "config.yaml"
    tree = with_new_names(read_yaml(path)) if path.is_file() else {}

    def own(kind: type, key: str) -> Any:
        names = {f.name for f in dataclasses.fields(kind)}
        return kind(**{name: value for name, value in (tree.get(key) or {}).items() if name in names})

    task = find_task(tree.get("task", "math"))(own(PromptConfig, "prompt"))
    return task.prompting, own(RolloutConfig, "rollout")
