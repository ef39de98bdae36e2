"""Exports a trained model: its Hugging Face folder with a model card that describes its origin and results.

    dccot export runs/demo/stage4 FOLDER                        dccot export runs/hlp@180 FOLDER --push NAME/MODEL

The card is computed from the run: the stages that led to it (each run's config.yaml names the previous one), their
training data, and every evaluation next to the run that measured it or an ancestor. The folder appears only when
complete. `--push` also uploads it to a hub (HF_TOKEN and, for another hub, HF_ENDPOINT in the environment); the
repository is private unless `--public` is given.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dccot
from dccot.core.command import run_cleanly
from dccot.core.files import BadData
from dccot.core.run import Run
from dccot.data.prompts import PromptConfig
from dccot.eval.results import LABELS, SUMMARY, Evaluation, shown
from dccot.model.folder import find_model, resolve_model
from dccot.model.tokenizer import open_tokenizer
from dccot.model.weights import require_inside

MEASURES = ("accuracy", "maj3_accuracy", "longest_path", "total_tokens", "well_formed")
HEADER = """---
library_name: transformers
pipeline_tag: text-generation
license: LICENSE
tags: [dccot]
---"""
USE = """Transformers and vLLM load the folder as an ordinary decoder. Workers are spawned by dccot:

    dccot solve FOLDER "a question"

    from dccot import solve
    print(solve("FOLDER", "a question").answer)

The exact prompt:

```text
PROMPT
```"""
UNLICENSED = "None was stated when the model was exported. The licences of the model that training started from, and of the data, apply."


@dataclass(frozen=True)
class Ancestor:
    """A run that led to the model, or the model that the first of them started from."""

    name: str
    run: Path | None
    config: dict[str, Any]

    @property
    def kind(self) -> str:
        return "start" if self.run is None else "RL" if "objective" in self.config else "SFT"

    def setting(self, key: str) -> Any:
        value: Any = self.config
        for part in key.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        return value


def lineage(run: Path) -> list[Ancestor]:
    """The run and what it came from, oldest first."""
    found: list[Ancestor] = []
    at: Path | None = run
    while at is not None and (settings := Run(at).settings()) and at not in [ancestor.run for ancestor in found]:
        found.append(Ancestor(at.name, at, settings))
        start = str(found[-1].setting("model.path") or "")
        at = next((place for place in _places(start, at) if Run(place).config_file.is_file()), None)
        if at is None and start:
            found.append(Ancestor("/".join(Path(start).parts[-2:]), None, {}))
    return found[::-1]


def _places(start: str, run: Path) -> Iterator[Path]:
    """Where the run that another started from may be: as its configuration says, or next to it if both were moved."""
    earlier = Run.parse(start)[0]
    yield earlier.folder
    yield run.parent / earlier.name


def evaluations_of(run: Path, ancestors: Sequence[Ancestor], model: Path) -> list[tuple[str, Evaluation]]:
    """(model's name, evaluation) of every evaluation next to the run that measured this model or the newest weights of
    an ancestor.
    """
    wanted = {
        _tail(find_model(each.run)): each.name
        for each in ancestors
        if each.run is not None and Run(each.run).latest.is_file()
    }
    wanted = {tail: name for tail, name in wanted.items() if name != run.name} | {_tail(model): run.name}
    found = [Evaluation.load(file.parent) for file in sorted(run.parent.glob(f"*/{SUMMARY}"))]
    order = [each.name for each in ancestors]
    named = [(wanted[_tail(Path(each.model))], each) for each in found if _tail(Path(each.model)) in wanted]
    return sorted(named, key=lambda pair: (order.index(pair[0]), pair[1].name))


def _tail(model: Path) -> tuple[str, ...]:
    """RUN/checkpoints/STEP/hf: what identifies weights wherever their runs have been moved."""
    return model.parts[-4:]


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def stages_table(ancestors: Sequence[Ancestor]) -> str:
    keys = (
        "steps",
        "data.train",
        "optimizer.learning_rate",
        "objective.kind",
        "filter",
        "rollout.budget",
        "reward.length_penalty",
        "seed",
    )
    heads = (
        "stage",
        "kind",
        "steps",
        "trained on",
        "learning rate",
        "objective",
        "filter",
        "token budget",
        "length penalty",
        "seed",
    )
    rows = []
    for each in ancestors:
        values = (each.setting(key) for key in keys)
        cells = (
            "" if value is None else Path(value).name if key == "data.train" else str(value)
            for key, value in zip(keys, values)
        )
        rows.append([each.name, each.kind, *cells])
    return table(heads, rows)


def results_table(evaluations: Sequence[tuple[str, Evaluation]]) -> str:
    heads = ["model", "benchmark", "problems × answers", "asked", *(LABELS[measure] for measure in MEASURES)]
    rows = []
    for name, evaluation in evaluations:
        for result in evaluation.results.values():
            cells = []
            for measure in MEASURES:
                estimate = result.estimate(measure)
                value, error = shown(measure, estimate) if estimate else ("", "")
                cells.append(f"{value} ± {error}" if error else value)
            asked = f"{evaluation.method}, {evaluation.budget:,} tokens"
            rows.append([name, result.title, f"{result.problems:,} × {result.samples}", asked, *cells])
    return table(heads, rows)


def limits(ancestors: Sequence[Ancestor], evaluations: Sequence[tuple[str, Evaluation]]) -> list[str]:
    newest = ancestors[-1]
    results = [
        result for name, evaluation in evaluations if name == newest.name for result in evaluation.results.values()
    ]
    unjudged = sum(result.unjudged for result in results)
    budget, workers = newest.setting("rollout.budget"), newest.setting("rollout.workers") or newest.setting("workers")
    benchmarks = ", ".join(sorted({result.title for result in results}))
    notes = [
        f"Measured on {benchmarks} and on nothing else."
        if results
        else "No evaluation of these weights was found beside their run.",
        "± is the standard error over problems of one training run; another seed may differ by more.",
        f"{unjudged:,} answers could not be judged and are in no accuracy." if unjudged else "",
        f"Trained with {workers} workers and at most {budget:,} tokens on the longest path." if budget else "",
        "It answers questions of the kind it was trained on, in the prompt format below. It is not a general assistant, and its safety "
        "was not tested.",
    ]
    return [note for note in notes if note]


def introduction(model: Path, parallel: bool) -> str:
    facts = json.loads((model / "config.json").read_text())
    way = (
        "as a director it splits a problem, spawns workers that think in parallel, reads them and answers"
        if parallel
        else "sequential"
    )
    shape = f"A {facts['model_type']} decoder, {facts['num_hidden_layers']} layers, {facts['hidden_size']} wide"
    return f"{shape}, trained with dccot {dccot.__version__} (Divide-and-Conquer CoT): {way}. Weights: {model.parent.name}."


def card(run: Path, model: Path, license_name: str | None) -> str:
    """README.md of the exported folder."""
    ancestors = lineage(run)
    if not ancestors:
        raise BadData(
            f"{run} has no config.yaml: a model card is made from a run of `dccot sft` or `dccot rl`, not from a model alone"
        )
    evaluations = evaluations_of(run, ancestors, model)
    prompt = PromptConfig(**(ancestors[-1].setting("prompt") or {"open_think": False}))
    sections = {
        "Training": f"Each stage starts from the one above it.\n\n{stages_table(ancestors)}",
        "Results": results_table(evaluations) if evaluations else "None.",
        "Limits": "\n".join(f"- {note}" for note in limits(ancestors, evaluations)),
        "Use": USE.replace("PROMPT", prompt.text("{question}", open_tokenizer(model))),
        "Licence": license_name or UNLICENSED,
    }
    header = HEADER.replace("LICENSE", license_name or "other")
    body = [
        f"# {run.name}",
        introduction(model, prompt.kind == "parallel"),
        *(f"## {title}\n\n{text}" for title, text in sections.items()),
    ]
    return "\n\n".join([header, *body]) + "\n"


def export(run: Path, folder: Path, license_name: str | None = None) -> Path:
    """Write `folder`, whole or not at all; `run` may name a step as in `runs/hlp@180`."""
    model = resolve_model(run)
    home = Run.parse(run)[0].folder
    if folder.exists():
        raise FileExistsError(f"{folder} already exists; export writes a new folder: remove it or choose another name")
    require_inside(model, model.rglob("*"))
    text = card(home, model, license_name)
    beside = folder.with_name(f".{folder.name}.{os.getpid()}.part")
    try:
        shutil.copytree(model, beside)
        (beside / "README.md").write_text(text)
        beside.rename(folder)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return folder


def push(folder: Path, repository: str, public: bool) -> str:
    """Upload the folder; returns its URL. The token comes from the environment (HF_TOKEN) or from `hf auth login`."""
    from huggingface_hub import HfApi

    api = HfApi(endpoint=os.environ.get("HF_ENDPOINT"))
    address = api.create_repo(repository, private=not public, exist_ok=True)
    api.upload_folder(repo_id=repository, folder_path=folder, commit_message="Model exported by dccot")
    return str(address)


def main(argv: Sequence[str] | None = None) -> int:
    example = "example: dccot export runs/demo/stage4 FOLDER"
    parser = argparse.ArgumentParser(
        prog="dccot export", description="Export a trained model with a model card.", epilog=example
    )
    parser.add_argument(
        "run", type=Path, help="a run, or one of its checkpoints: runs/hlp, runs/hlp@180, runs/hlp@best"
    )
    parser.add_argument("folder", type=Path, help="where the model goes; must not exist yet")
    parser.add_argument("--license", help="of the weights, as hubs spell it: apache-2.0, mit, …")
    parser.add_argument("--push", metavar="NAME/MODEL", help="also upload it to a hub")
    parser.add_argument("--public", action="store_true", help="with --push: make it public")
    arguments = parser.parse_args(argv)

    def work() -> None:
        folder = export(arguments.run, arguments.folder, arguments.license)
        print(f"exported to {folder}; its README.md is the model card")
        if arguments.push:
            print(f"pushed to {push(folder, arguments.push, arguments.public)}")

    return run_cleanly(work)


if __name__ == "__main__":
    sys.exit(main())
