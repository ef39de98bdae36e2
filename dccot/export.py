"""Exports a trained model: its Hugging Face folder with a model card that describes its origin and results.

    dccot export runs/demo/stage4 FOLDER                        dccot export runs/hlp@180 FOLDER --push NAME/MODEL

The card is computed from the run: the stages that led to it (each run's settings name the previous one), their training
data, and every evaluation next to the run that measured it or an ancestor. The folder appears only when complete.
`--push` also uploads it to a hub (HF_TOKEN and, for another hub, HF_ENDPOINT in the environment); the repository is
private unless `--public` is given.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dccot
from dccot.core.command import Parser, conclude, run_cleanly
from dccot.core.config import ConfigError, require
from dccot.core.progress import waiting
from dccot.core.run import Run
from dccot.data.task import settings_of
from dccot.eval.results import LABELS, SUMMARY, Evaluation, shown
from dccot.model.folder import find_model, require_inside, resolve_model
from dccot.model.tokenizer import open_tokenizer
from dccot.rollout.tags import in_words

if TYPE_CHECKING:
    from huggingface_hub import ModelCard

MEASURES = ("accuracy", "maj3_accuracy", "longest_path", "total_tokens", "well_formed")
SETTINGS = {  # of a stage → its column
    "steps": "steps",
    "data.train": "trained on",
    "optimizer.learning_rate": "learning rate",
    "objective.kind": "objective",
    "filter": "filter",
    "rollout.budget": "token budget",
    "reward.length_penalty": "length penalty",
    "seed": "seed",
}
PARALLEL = "as a director it splits a problem, spawns workers that think in parallel, reads them and answers"
UNLICENSED = (
    "None was stated when the model was exported. The licences of the model that training started from, and of the "
    "data, apply."
)
TEMPLATE = """---
{{ card_data }}
---

# {{ name }}

A {{ shape.model_type }} decoder, {{ shape.num_hidden_layers }} layers, {{ shape.hidden_size }} wide, trained with
dccot {{ version }} (Divide-and-Conquer CoT): {{ way }}. Weights: {{ weights }}.

## Training

Each stage starts from the one above it.

{{ stages }}

## Results

{{ results or "None." }}

## Limits

{% for limit in limits if limit %}- {{ limit }}
{% endfor %}
## Use

Transformers and vLLM load the folder as an ordinary decoder. Workers are spawned by dccot:

    dccot solve FOLDER "a question"

    from dccot import solve
    print(solve("FOLDER", "a question").answer)

The exact prompt:

```text
{{ prompt }}
```

## Licence

{{ licence }}
"""


@dataclass(frozen=True)
class Ancestor:
    """A run that led to the model, or the model that the first of them started from."""

    name: str
    run: Run | None
    settings: dict[str, Any]

    @property
    def kind(self) -> str:
        return "start" if self.run is None else "RL" if "objective" in self.settings else "SFT"

    def setting(self, key: str) -> Any:
        value: Any = self.settings
        for part in key.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        return value


def lineage(run: Run) -> list[Ancestor]:
    """The run and what it came from, oldest first."""
    found: list[Ancestor] = []
    at: Run | None = run
    while at is not None and at.folder not in [each.run.folder for each in found if each.run]:
        found.append(Ancestor(at.name, at, at.settings()))
        start = str(found[-1].setting("model.path") or "")
        earlier = Run.parse(start)[0]  # where the settings say, or next to this run if both were moved
        places = (earlier, Run(at.folder.parent / earlier.name)) if start else ()
        at = next((place for place in places if place.config_file.is_file()), None)
        if at is None and start:
            found.append(Ancestor("/".join(Path(start).parts[-2:]), None, {}))
    return found[::-1]


def evaluations_of(run: Run, ancestors: Sequence[Ancestor], model: Path) -> list[tuple[str, Evaluation]]:
    """(model's name, evaluation) of every evaluation next to the run that measured this model or the newest weights of
    an ancestor. RUN/checkpoints/STEP identifies weights wherever their runs have been moved.
    """
    runs = [each.run for each in ancestors if each.run is not None and each.name != run.name]
    wanted = {find_model(each.folder).parts[-4:-1]: each.name for each in runs if each.latest.is_file()}
    wanted[model.parts[-4:-1]] = run.name
    found = [Evaluation.load(file.parent) for file in sorted(run.folder.parent.glob(f"*/{SUMMARY}"))]
    named = [(wanted[tail], each) for each in found if (tail := Path(each.model).parts[-4:-1]) in wanted]
    order = [each.name for each in ancestors]
    return sorted(named, key=lambda pair: (order.index(pair[0]), pair[1].name))


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in (heads, ["---"] * len(heads), *rows))


def stages_table(ancestors: Sequence[Ancestor]) -> str:
    def cell(value: Any, key: str) -> str:
        return "" if value is None else Path(value).name if key == "data.train" else str(value)

    rows = [[each.name, each.kind, *(cell(each.setting(key), key) for key in SETTINGS)] for each in ancestors]
    return table(["stage", "kind", *SETTINGS.values()], rows)


def results_table(evaluations: Sequence[tuple[str, Evaluation]]) -> str:
    rows = []
    for name, evaluation in evaluations:
        asked = f"{evaluation.method}, {evaluation.budget:,} tokens"
        for result in evaluation.results.values():
            estimates = {measure: result.estimate(measure) for measure in MEASURES}
            cells = [shown(measure, estimate) if estimate else ("", "") for measure, estimate in estimates.items()]
            found = [f"{value} ± {error}" if error else value for value, error in cells]
            rows.append([name, result.title, f"{result.problems:,} × {result.samples}", asked, *found])
    heads = ["model", "benchmark", "problems × answers", "asked", *(LABELS[measure] for measure in MEASURES)]
    return table(heads, rows) if rows else ""


def limits(newest: Ancestor, evaluations: Sequence[tuple[str, Evaluation]]) -> list[str]:
    """Empty ones do not apply."""
    own = [evaluation for name, evaluation in evaluations if name == newest.name]
    results = [result for evaluation in own for result in evaluation.results.values()]
    unjudged, titles = sum(result.unjudged for result in results), sorted({result.title for result in results})
    budget, workers = newest.setting("rollout.budget"), newest.setting("rollout.workers")
    spawned = in_words(workers, newest.setting("rollout.depth") or 1) if budget else ""
    return [
        f"Measured on {', '.join(titles)} and on nothing else."
        if results
        else "No evaluation of these weights was found next to their run.",
        "± is the standard error over problems of one training run; another seed may differ by more.",
        f"{unjudged:,} answers could not be judged; they count as wrong." if unjudged else "",
        f"Trained with {spawned} and at most {budget:,} tokens on the longest path." if budget else "",
        "It answers questions of the kind it was trained on, in the prompt format below. It is not a general "
        "assistant, and its safety was not tested.",
    ]


def card(run: Run, model: Path, licence: str | None) -> ModelCard:
    """README.md of the exported folder."""
    from huggingface_hub import ModelCard, ModelCardData

    origin = "a model card is made from a run of `dccot sft` or `dccot rl`, not from a model alone"
    require(run.config_file.is_file(), f"{run} has no config.yaml: {origin}")
    ancestors, (prompt, _) = lineage(run), settings_of(run.folder)
    evaluations = evaluations_of(run, ancestors, model)
    data = ModelCardData(
        library_name="transformers", pipeline_tag="text-generation", license=licence or "other", tags=["dccot"]
    )
    facts = {
        "name": run.name,
        "shape": json.loads((model / "config.json").read_text()),
        "version": dccot.__version__,
        "way": PARALLEL if prompt.parallel else "sequential",
        "weights": model.parent.name,
        "stages": stages_table(ancestors),
        "results": results_table(evaluations),
        "limits": limits(ancestors[-1], evaluations),
        "prompt": prompt.text("{question}", open_tokenizer(model)),
        "licence": licence or UNLICENSED,
    }
    return ModelCard.from_template(data, template_str=TEMPLATE, **facts)


def export(path: Path, folder: Path, licence: str | None = None) -> Path:
    """Write `folder`, whole or not at all; `path` may name a step as in `runs/hlp@180`."""
    model = resolve_model(path)
    if folder.exists():
        raise FileExistsError(f"{folder} already exists; export writes a new folder: remove it or choose another name")
    require_inside(model, model.rglob("*"))
    made = card(Run.parse(path)[0], model, licence)
    beside = folder.with_name(f".{folder.name}.{os.getpid()}.part")
    try:
        shutil.copytree(model, beside)
        made.save(beside / "README.md")
        beside.rename(folder)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return folder


def push(folder: Path, repository: str, public: bool) -> str:
    """Upload the folder; returns its URL. The token comes from the environment (HF_TOKEN) or from `hf auth login`."""
    from huggingface_hub import HfApi

    api = HfApi(endpoint=os.environ.get("HF_ENDPOINT"))
    try:
        address = api.create_repo(repository, private=not public, exist_ok=True)
        api.upload_folder(repo_id=repository, folder_path=folder, commit_message="Model exported by dccot")
    except Exception as error:  # of whatever HTTP client the hub library uses
        why = next(iter(str(error).splitlines()), type(error).__name__)
        again = f"log in (`hf auth login`, or HF_TOKEN) and run `hf upload {repository} {folder}`"
        raise ConfigError(f"cannot push to {repository} ({why}); {again}") from None
    return str(address)


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser("Export a trained model with a model card.", "dccot export runs/demo/stage4 FOLDER")
    parser.add_argument(
        "run", type=Path, help="a run, or one of its checkpoints: runs/hlp, runs/hlp@180, runs/hlp@best"
    )
    parser.add_argument("folder", type=Path, help="where the model goes; must not exist yet")
    parser.add_argument("--license", help="of the weights, as hubs spell it: apache-2.0, mit, …")
    parser.add_argument("--push", metavar="NAME/MODEL", help="also upload it to a hub")
    parser.add_argument("--public", action="store_true", help="with --push: make it public")
    arguments = parser.read(argv)
    if arguments.public and not arguments.push:
        parser.error("--public is for --push NAME/MODEL; add it, or leave --public out")

    def work() -> None:
        with waiting(f"exporting {arguments.run}"):
            folder = export(arguments.run, arguments.folder, arguments.license)
        conclude(f"exported to {folder}; its README.md is the model card", f"dccot serve {folder}")
        if arguments.push:
            print(f"pushed to {push(folder, arguments.push, arguments.public)}")

    return run_cleanly(work)


if __name__ == "__main__":
    sys.exit(main())
