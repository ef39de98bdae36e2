"""A newcomer's mistakes: each ends in one line that names the remedy, before anything is loaded or written."""

from pathlib import Path

import pytest

from dccot.cli import main
from dccot.core.config import load_config, to_yaml
from dccot.core.run import Run
from dccot.lab.worlds import bigram as tiny
from dccot.train.config import RLConfig

RL, SFT = "rl configs/rl/stage1.yaml", "sft configs/sft.yaml"
ON = f"{RL} model.path=MODEL data.train=good.jsonl data.validation=null rollout.budget=3000"
MISTAKES = {  # what is typed → what the answer says, and its exit code if that is not 2
    # commands
    "train configs/sft.yaml": "no command 'train'; did you mean `dccot sft` or `dccot rl` or `dccot pipeline`?",
    "evla runs/x": "did you mean `dccot eval`?",
    "chat MODEL": "did you mean `dccot solve` or `dccot serve`?",
    "download aime24": "did you mean `dccot data fetch`?",
    "check": "did you mean `dccot pipeline RECIPE --check` or `dccot gpu-check` or `dccot model check`?",
    "rl": "arguments are required: config; for example: dccot rl configs/rl/stage1.yaml model.path=runs/sft",
    "solve MODEL": 'arguments are required: problem; for example: dccot solve runs/demo/stage4 "Add a to o',
    "serve": "arguments are required: model; for example: dccot serve runs/demo/stage4",
    "plan": "arguments are required: model; for example: dccot plan 7B --gpus 8",
    # settings
    "rl model.path=MODEL": "'model.path=MODEL' comes after the YAML file, e.g. one of configs/",
    "rl configs/rl/stage9.yaml": "no configuration file 'configs/rl/stage9.yaml'; configs/ holds the ones that",
    f"{RL} lr=1e-6": "unknown key lr; did you mean optimizer.learning_rate?",
    f"{RL} batch_size=8": "unknown key batch_size; did you mean batch.prompts?",
    f"{SFT} batch_size=8": "unknown key batch_size; did you mean batch.examples?",
    f"{RL} temperature=1": "unknown key temperature; did you mean rollout.temperature?",
    f"{RL} fields.question=problem": "unknown key fields; did you mean data.question or data.gold?",
    f"{RL} rollout.budgte=7": "unknown key rollout.budgte; did you mean 'budget'?",
    f"{RL} --steps 5": "unrecognized arguments: --steps 5; settings have no dashes: steps=5",
    f"{RL} steps=five": "steps is 'five'; it must be a whole number",
    f"{RL} model=MODEL": "model is 'MODEL'; it is a group of settings: model.path, model.lora",
    f"{RL} steps": "'steps' is not of the form key=value",
    "rl configs/paper.yaml": "is a recipe, which has several stages: run it with `dccot pipeline configs/paper.yaml`",
    "pipeline configs/rl/stage1.yaml": "holds no stages, so it is no recipe: `dccot rl` and `dccot sft` run a single",
    "pipeline configs/paper.yaml model.path=MODEL": "model is one value, without model.path: write model=…",
    "pipeline configs/paper_published_sft.yaml --quick": "has no quick version: leave out --quick",
    "pipeline configs/paper.yaml model=MODEL --until stage5": "--until is 'stage5'; it must be one of",
    "pipeline runs/mine": "model is not set; give model=… on the command line   (first)",
    # inputs
    f"{ON} model.path=runs/none": "'runs/none' is neither a Hugging Face folder",
    f"{ON} model.path=runs": "nor a hub id (owner/name); runs in it: runs/done",
    f"{ON} data.train=runs/data/deepscaler.jsonl": "`dccot data fetch deepscaler` downloads it",
    f"{ON} data.train=raw.jsonl": "no field 'question' (the row has 'problem', 'answer')); a row has question and "
    "gold, columns with other names: data.question=… data.gold=…",
    f"{ON} rollout.budget=70000": "rollout.budget is 71,024; the model's context is 65,536: lower one of them",
    f"{SFT} model.path=MODEL data.train=none.jsonl": "`dccot data rewrite` and `dccot data import-sft` write such sets",
    f"{SFT} model.path=MODEL data.train=raw.jsonl": "columns with other names: data.question=… data.completion=…",
    f"{ON} reward.kind=my_rewards:typo": "return lenght(rollout.text)",
    f"{ON} reward.kind=my_rewards:attribute": "'Graded' object has no attribute 'lenght'",
    f"{ON} filter=my_rewards:typo_of_filter": "name 'grop' is not defined",
    f"{ON} reward.kind=my_rewards:gone": "cannot be imported (AttributeError: module 'my_rewards' has no",
    f"{ON} reward.kind=correct": "it must be one of correctness_format, high_length_penalty or your own",
    f"{ON} wandb=project": "nobody is logged in to api.wandb.ai: run `wandb login`, set WANDB_API_KEY, or",
    "data rewrite configs/data/rewrite.yaml source=solved.jsonl": "(endpoint.key_variable) is not set; a server "
    "without keys: endpoint.key_variable=",
    "data rewrite configs/data/rewrite.yaml source=none.jsonl": "`dccot data sequential` writes one",
    "data rewrite configs/data/rewrite.yaml source=solved.jsonl by=me": "by is 'me'; it must be one of endpoint or",
    "data check none.jsonl": "dccot: none.jsonl: No such file or directory",
    "data problems raw.jsonl": "no field 'question' (the row has 'problem', 'answer'))",
    "data rewrite configs/data/rewrite.yaml --first 5": "--first 5; settings have no dashes: first=5",
    "data rewrite configs/data/rewrite.yaml source=x first=-5": "first is -5; it must be at least 1",
    "data fetch aime": "unknown problem set 'aime'; known are deepscaler, aime24, amc23",
    # results
    "eval MODEL": "nothing to evaluate on; name benchmarks with --bench or a file with --problems",
    "eval MODEL --bench aime": "did you mean 'aime24'?",
    "eval MODEL --bench aime24": "`dccot data fetch aime24` downloads it",
    "eval MODEL --problems good.jsonl --problems good.jsonl": "two benchmarks are called 'good'; rename one of",
    "eval MODEL --problems good.jsonl --out begun": "settings.json is damaged (Expecting value: line 1 column 11",
    "eval latency MODEL --baseline MODEL --problems none.jsonl": "no problem file 'none.jsonl'",
    "eval MODEL --benchmark aime24": "did you mean --bench?",
    "view runs": "is a folder without rollouts; name one of runs/other",
    "view none.jsonl": "none.jsonl does not exist; name a file of rollouts (.jsonl or .jsonl.gz), or a run",
    "report MODEL": "MODEL holds neither summary.json",
    "plan configs/rl/stage1.yaml": "comes after its model: `dccot plan 1.5B configs/rl/stage1.yaml`",
    "plan --gpus 8 configs/paper.yaml": "a recipe comes first: `dccot plan configs/paper.yaml …`",
    "plan 7B --gpus 0": "argument --gpus: '0' is not a whole number of at least 1",
    "plan configs/paper.yaml --assume utilisation=0": "utilisation is 0; it must be above 0",
    "plan configs/paper.yaml --from runs/none": "runs/none has no config.yaml; --from names a finished RL stage's",
    "plan 8B": "'8B' is neither one of 1.5B, 7B, 32B nor a folder with a config.json",
    "export MODEL out": "MODEL has no config.yaml",
    "export MODEL MODEL": "already exists; export writes a new folder",
}
ANSWERS = {  # what is no mistake: what the answer says, and its exit code
    f"{ON} output=runs name=done steps=4": ("runs/done is finished already: 4 steps; steps=… continues it", 0),
    "plan 7b --gpus 8 --gpu B200": ("→ fits", 0),
    "plan 7B --gpus 1": ("training does not fit", 1),
    "data problems raw.jsonl --question problem --gold answer": ("1 problems", 0),
    "data rewrite configs/data/rewrite.yaml source=x endpoint.key_variable= --print-config": ("key_variable: null", 0),
    "data rewrite configs/data/rewrite.yaml --print-config source=x first=5": ("first: 5", 0),
    "view runs/other": ("3 responses of step_000004.jsonl", 0),
}


@pytest.fixture(scope="module")
def desk(tmp_path_factory) -> Path:
    desk = tmp_path_factory.mktemp("desk")
    tiny.save(desk / "MODEL", context=65_536)
    (desk / "raw.jsonl").write_text('{"problem": "What is 1 + 1?", "answer": "2"}\n')
    (desk / "good.jsonl").write_text('{"id": "a", "question": "What is 1 + 1?", "gold": "2"}\n')
    solved = '{"id": "a", "question": "What is 1 + 1?", "gold": "2", "solution": "It is 2."}\n'
    (desk / "solved.jsonl").write_text(solved)
    (desk / "begun").mkdir()
    (desk / "begun/settings.json").write_text('{"model": ')
    own = "def typo(rollout, config, budget):\n    return lenght(rollout.text)\n"
    own += "def attribute(rollout, config, budget):\n    return rollout.lenght\n"
    own += "def typo_of_filter(group):\n    return len(grop) > 1\n"
    (desk / "my_rewards.py").write_text(own)
    done, other = Run(desk / "runs/done"), desk / "runs/other/rollouts"
    (desk / "runs/mine").mkdir(parents=True)
    (desk / "runs/mine/recipe.yaml").write_text("{train: good.jsonl, stages: {first: {run: rl}}}")
    hf = done.checkpoint_folder(4).hf
    hf.mkdir(parents=True)
    (hf / "config.json").write_text("{}")
    done.latest.write_text(hf.parent.name)
    other.mkdir(parents=True)
    rows = (Path(__file__).parents[1] / "support/rollouts_of_rounds.jsonl").read_text().splitlines()[:3]
    for step in (3, 4):
        (other / f"step_{step:06d}.jsonl").write_text("\n".join(rows) + "\n")
    return desk


@pytest.fixture
def answer(desk, monkeypatch, capsys):
    monkeypatch.chdir(desk)
    for name in ("ANTHROPIC_API_KEY", "WANDB_API_KEY", "WANDB_MODE", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(desk))

    def ask(typed: str) -> tuple[int, str]:
        try:
            code = main(typed.split())
        except SystemExit as end:
            code = end.code
        said = capsys.readouterr()
        return code, said.out + said.err

    return ask


def everything() -> set[Path]:
    return {path for path in Path().rglob("*") if "__pycache__" not in path.parts and path.name != "dccot.log"}


@pytest.mark.parametrize("typed", MISTAKES)
def test_a_mistake_is_answered_with_its_remedy(answer, typed):
    before = everything()
    code, said = answer(typed)
    assert code == 2 and MISTAKES[typed] in said, said
    assert "Traceback" not in said or "my_rewards.py" in said
    assert everything() <= before


@pytest.mark.parametrize("typed", ANSWERS)
def test_what_is_meant_is_done(answer, typed):
    code, said = answer(typed)
    assert (code, True) == (ANSWERS[typed][1], ANSWERS[typed][0] in said), said


def test_a_rejected_evaluation_leaves_nothing_that_refuses_the_next(answer):
    typed = "eval MODEL --problems good.jsonl --budget 70000 --out evaluated"
    code, said = answer(typed)
    assert code == 2 and "lower the budget" in said and not Path("evaluated").exists()


def test_an_evaluation_and_rollouts_have_the_budget_of_their_run(answer, desk):
    """Up to the context, which the run's own budget does not exceed and 12,000 would not either: the line names it."""
    given = ["model.path=MODEL", "data.train=good.jsonl", "rollout.budget=640", "reward.cutoff=100"]
    Run(desk / "runs/done").config_file.write_text(to_yaml(load_config(RLConfig, None, given)))
    for typed in ("eval runs/done --problems good.jsonl", "rollout runs/done good.jsonl"):
        _, said = answer(typed)
        assert "runs/done: parallel, at most 640 tokens on the longest path; good" in said


def test_columns_with_other_names_are_found(answer):
    code, said = answer(f"{ON} data.train=raw.jsonl data.question=problem data.gold=answer wandb=project")
    assert code == 2 and "nobody is logged in" in said  # the next thing that is wrong


def test_commands_are_shown_as_they_can_be_typed(answer, monkeypatch):
    from dccot.core import command

    monkeypatch.setenv("PATH", "/bin")
    command._program.cache_clear()
    try:
        _, said = answer("eval MODEL --bench aime24")
    finally:
        command._program.cache_clear()
    assert "/bin/dccot data fetch aime24` downloads it" in said and "`dccot data" not in said
