"""Every command in README.md and docs/ is run as written, in a folder like a user's; what cannot be run here has its
reason in QUICK.

    make docs-check       everything: training under torchrun, the engine, TensorBoard, the wheel
    make test             what needs neither an engine nor a compiler

A ```text block after a command says what it prints: the words of each line must be in this order in one line of the
output.
"""

import contextlib
import doctest
import importlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType

import pyarrow
import pyarrow.parquet
import pytest

import dccot
from dccot.cli import COMMANDS, command
from dccot.cli import main as front_door
from dccot.core.files import write_jsonl_atomic
from dccot.data.problems import PRESETS
from dccot.eval.solve import EXAMPLE
from dccot.lab.worlds import bigram as tiny
from dccot.lab.worlds.arithmetic import problem_stream
from dccot.rollout.response import Finish, Segment
from dccot.rollout.tags import TagIds
from dccot.train.rewards import Graded
from tests.support.hub import Hub, use_here
from tests.support.hub import environment as hub_environment
from tests.support.rounds import Round, flat
from tests.support.servers import free_port

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
PROGRAMS = ("make", "dccot", "torchrun", "srun", "tensorboard", "python", "pip")
thorough = pytest.mark.thorough


@dataclass(frozen=True)
class Command:
    page: str
    text: str
    printed: tuple[str, ...] = ()

    @property
    def words(self) -> list[str]:
        first, *rest = shlex.split(self.text)
        return [first.removeprefix(".venv/bin/"), *rest]

    def __str__(self) -> str:
        return f"{self.page}: {self.text[:70]}"


def commands_of(page: Path) -> list[Command]:
    """Code lines that begin with a program, without their explanation (two or more blanks before it) and with continued
    lines joined.
    """
    found: list[Command] = []
    fence, block = None, []
    for line in re.sub(r"\\\n\s*", "", page.read_text()).splitlines():
        if line.startswith("```"):
            if fence == "```text" and found:
                found[-1] = Command(found[-1].page, found[-1].text, (*found[-1].printed, *block))
            fence, block = (None, []) if fence else (line.strip(), [])
        elif fence == "```text":
            block.append(line)
        elif fence or line.startswith("    "):
            text = re.split(r"\s{2,}", line.strip())[0]
            if text.split(" ")[0].removeprefix(".venv/bin/") in PROGRAMS:
                found.append(Command(page.name, text))
    return found


FOUND = [command for page in PAGES for command in commands_of(page)]
ONCE = [  # what several pages have, with all that they say of it
    replace(first, printed=tuple(line for each in FOUND if each.text == first.text for line in each.printed))
    for first in {each.text: each for each in reversed(FOUND)}.values()
]


def demonstration(i: int) -> str:
    workers = "".join(f"<worker_{k}>part {k}</worker_{k}>" for k in (1, 2, 3))
    return f"<think>\nplan<spawn_workers>{workers}</spawn_workers>so</think><answer>\\boxed{{{i}}}</answer>"


def small_rollout(i: int, tokenizer) -> Graded:
    tags = TagIds.of(tokenizer)

    def segment(text: str, inserted=()) -> Segment:
        ids = tokenizer.encode(text, add_special_tokens=False)
        return Segment(list(inserted), ids, [-0.5] * len(ids))

    workers = [segment(f"part {k}</worker_{k}>", tags.worker_open[k - 1]) for k in (1, 2, 3)]
    last = segment("so</think><answer>\\boxed{3}</answer>", tags.spawn_close)
    response = flat([0, 1], [Round(segment("plan<spawn_workers>"), workers)], last, Finish.ANSWERED)
    facts = {"flaw": None, "verdict": "correct", "reward": 1.0, "advantage": 0.5, "step": 0}
    return Graded(f"p{i}", 0, "What is 1 + 2?", "3", "<think>\n" + response.text(tokenizer), response, **facts)


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("docs")
    model = tiny.save(folder / "MODEL", context=65_536)
    (folder / ".venv").symlink_to(sys.prefix)
    (folder / "examples").symlink_to(ROOT / "examples")
    (folder / "runs").mkdir()
    (folder / "runs/sft").symlink_to(model)
    problems = [{"id": f"p{i}", "question": f"What is {i} + 1?", "gold": str(i + 1)} for i in range(3)]
    for name in ("train", "deepscaler", "aime24", *(f"runs/data/{preset}" for preset in PRESETS)):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        write_jsonl_atomic(folder / f"{name}.jsonl", problems)
    examples = [{"id": str(i), "question": "Count.", "completion": demonstration(i)} for i in range(4)]
    for name in ("sft.jsonl", "runs/data/sft.jsonl"):
        write_jsonl_atomic(folder / name, examples)
    for name, text in re.findall(r"```\w+\n# (\S+)\n(.*?)```", (ROOT / "docs/own_task.md").read_text(), re.DOTALL):
        (folder / name).write_text(text)
    write_jsonl_atomic(folder / "validation.jsonl", problems)
    lists = [{"id": f"p{i}", "question": f"Sort [{i}, 1, 2].", "gold": f"1 2 {i}"} for i in (3, 4)]
    solved = [{**problem, "solution": f"</think><answer>{problem['gold']}</answer>"} for problem in lists]
    write_jsonl_atomic(folder / "solutions.jsonl", solved)
    (folder / "my_package").mkdir()
    (folder / "my_package/my_module.py").write_text("def my_reward(rollout, config, budget):\n    return 1.0\n")
    demo = ROOT / "runs/demo"
    if (demo / "stage4/latest").is_file() and (demo / "stage4/rollouts/step_000000.jsonl.gz").is_file():
        shutil.copytree(demo, folder / "runs/demo", symlinks=True)
    else:
        shutil.copytree(model, folder / "runs/demo/stage4")
        (folder / "runs/demo/stage4/config.yaml").write_text("model: {path: MODEL}\nobjective: {kind: dapo}\n")
        rollouts = [small_rollout(i, tiny.tokenizer("single")).to_json() for i in range(3)]
        write_jsonl_atomic(folder / "runs/demo/stage4/rollouts/step_000000.jsonl.gz", rollouts)
    return folder


@pytest.fixture(scope="session")
def hub(folder):
    """Stand-ins for everything that the pages fetch."""
    datasets = {}
    for name, wanted in PRESETS.items():
        datasets[wanted.repo] = folder / "hub" / name
        fields, rows = wanted.fields, [{"question": f"What is {i} + 1?", "gold": i + 1} for i in range(3)]
        mark = f"{fields.gold_after} " if fields.gold_after else ""
        renamed = [{fields.question: row["question"], fields.gold: f"{mark}{row['gold']}"} for row in rows]
        (datasets[wanted.repo] / wanted.file).parent.mkdir(parents=True)
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(renamed), datasets[wanted.repo] / wanted.file)
    datasets["amahanka/DC-CoT-SFT-Dataset"] = folder / "hub/sft"
    published = [{"problem": "What?", "parallel_rewritten_completion": demonstration(i)} for i in range(4)]
    write_jsonl_atomic(folder / "hub/sft/train.jsonl", published)
    models = ("agentica-org/DeepScaleR-1.5B-Preview", "amahanka/DC-CoT", "amahanka/DC-CoT-HLP")
    with Hub(dict.fromkeys(models, folder / "MODEL"), datasets) as opened:
        yield opened


def in_process(words: list[str], capsys) -> str:
    """`dccot X …` or `torchrun … -m dccot.X …` in this process."""
    at = words.index("-m") if "-m" in words else None
    module, arguments = (words[at + 1], words[at + 2 :]) if at else (None, words[1:])
    if module is None and arguments[0] in COMMANDS:
        run, arguments = command(arguments[0]), arguments[1:]
    else:
        run = importlib.import_module(module).main if module else front_door
    status = run(arguments)
    said = capsys.readouterr()
    assert status == 0 or (words[1], status) == ("plan", 1), said.err  # 1: what is planned does not fit
    return said.out


def resolved(words: list[str], capsys) -> str:
    """The configuration alone: files, keys and values are right."""
    return in_process([*words, "--print-config"] if "--print-config" not in words else words, capsys)


def checked(words: list[str], capsys) -> str:
    """A recipe as every start checks it: all stages, and everything that they need, which `folder` has."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ANTHROPIC_API_KEY", "planted")
        return in_process([*(word for word in words if word != "--check"), "--check"], capsys)


def unchecked(words: list[str], capsys) -> str:
    return "nothing"


def dry(words: list[str], capsys) -> str:
    return subprocess.run(["make", "-n", *words[1:]], cwd=ROOT, capture_output=True, text=True, check=True).stdout


def helped(words: list[str], capsys) -> str:
    with contextlib.suppress(SystemExit):
        return in_process(words, capsys)
    return capsys.readouterr().out


def explained(words: list[str], capsys) -> str:
    return helped([*words[: 3 if "-m" in words else 2], "--help"], capsys)


def example(words: list[str], capsys) -> str:
    run, variables = [sys.executable, *words[1:]], environment() | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(run, cwd=ROOT, env=variables, capture_output=True, text=True, check=True).stdout


def compiled(words: list[str], capsys) -> str:
    """The scripts exist and are Python."""
    return "\n".join(str(compile((ROOT / word).read_text(), word, "exec")) for word in words if word.endswith(".py"))


# pattern → what `make test` does with such a command, and why it does no more
QUICK = {
    r"dccot serve .*": (explained, "runs until it is stopped; tests/serve starts it"),
    r"dccot (eval|rollout) .* engine\.url=.*": (explained, "wants servers; tests/serve starts them"),
    r"dccot demo --recipe .*": (explained, "takes half an hour; tests/front_door loads its recipe"),
    r"make [\w-]+( (SETTINGS|ROOM|MODEL|RECIPE)=.*)?": (dry, "takes minutes or hours, or is what runs this"),
    r"(srun )?torchrun .* -m dccot\.pipeline .*": (checked, "weeks on 8 GPUs"),
    r"dccot pipeline .*": (checked, "the same"),
    r"(srun )?torchrun .* -m dccot\..*": (resolved, "wants 8 GPUs; docs-check trains with two processes"),
    r"dccot (sft|rl) .*": (resolved, "the same, or a whole training run"),
    r"dccot data (fetch|import-sft) .*": (in_process, ""),
    r"dccot data rewrite .* task=sorting:Sorting": (in_process, ""),
    r"dccot data check .*": (in_process, ""),
    r"dccot data (rewrite|sequential) .*": (resolved, "asks a paid API with a key, or generates for hours"),
    r"dccot( \w+)? --help": (helped, ""),
    r"dccot (plan|view|export) .*|dccot model check .* --no-engine": (in_process, ""),
    r"dccot model import .*": (explained, "wants a GGUF file; tests/model makes some"),
    r"python examples/tree_logprobs\.py": (example, ""),
    r"python examples/nano\.py": (compiled, "minutes; docs-check runs it"),
    r"pip install .*": (unchecked, "installs gigabytes; tests/test_packaging.py installs the wheel"),
    r"python -m dccot\.lab\.bench\.gap .*": (explained, "an engine; tests/system compares the same log-probs"),
    r"python examples/trl_env\.py .*": (compiled, "installs TRL, 1.5 GB"),
}
SMALL_RUN = "steps=1 sharding.compute_dtype=float32"
SMALL_ENGINE = "engine.dtype=float32 engine.kv_cache_gb=0.1 engine.max_sequences=8"
SMALL_RL = (
    "filter=none rollout.budget=300 reward.cutoff=200 batch.prompts_rolled_out=4 batch.prompts=2 batch.group_size=2 "
    f"batch.token_budget=4000 validation.samples=1 engine.context=2048 grading.workers=1 {SMALL_ENGINE}"
)
# pattern → what docs-check adds to make it small; these are run as written, in processes of their own
THOROUGH = {
    r"torchrun --standalone .* -m dccot\.train\.sft .*": f"{SMALL_RUN} batch.examples=2",
    r"torchrun --standalone .* -m dccot\.train\.rl .*": f"{SMALL_RUN} {SMALL_RL} name=small_rl",
    r"dccot eval (?!.*engine\.url=).*": f"{SMALL_ENGINE} engine.context=4096 --budget 300",
    r"dccot solve .*": "--budget 300",
    r"python examples/nano\.py": "--sft-steps 50 --rl-steps 5",
    r"dccot inspect.*": "",
    r"dccot rehearse .*": "",
    r"dccot gpu-check --device cpu": "",
    r"dccot bench kernels": "--quick",
    r"dccot bench attention .*": "--tokens 512",
    r"dccot bench logprob .*": "--vocabulary 2048 --hidden 32",
    r"tensorboard .*": "--port 0 --bind_all",
}


def rule_for(command: Command, rules: dict):
    text = " ".join(command.words)
    return next((rule for pattern, rule in rules.items() if re.fullmatch(pattern, text)), None)


def environment() -> dict[str, str]:
    path = f"{Path(sys.prefix) / 'bin'}:{os.environ['PATH']}"
    return os.environ | {"PATH": path, "HF_HUB_OFFLINE": "1", "COLUMNS": "200"}


def check_printed(command: Command, output: str) -> None:
    lines = [line.replace("│", " ").replace("┃", " ").split() for line in output.splitlines()]
    for wanted in filter(str.strip, command.printed):
        said = f"{command.page} says that {command.text!r} prints {wanted!r}"
        assert any(in_order(wanted.split(), line) for line in lines), said


def in_order(words: list[str], line: list[str]) -> bool:
    rest = iter(line)
    return all(word in rest for word in words)


def test_the_pages_hold_the_commands_that_they_should():
    assert len(FOUND) > 20
    assert "dccot plan 1.5B --gpus 8" in {command.text for command in FOUND}
    assert any(command.text.startswith("srun torchrun") and "dccot.train.rl" in command.text for command in FOUND)


@pytest.mark.parametrize("command", ONCE, ids=str)
@pytest.mark.slow
def test_every_command_is_run_or_has_a_reason(command, folder, hub, capsys, monkeypatch):
    rule = rule_for(command, QUICK)
    if rule is None:
        assert rule_for(command, THOROUGH) is not None, f"{command}: add a rule to {Path(__file__).name}"
        return
    monkeypatch.chdir(folder)
    use_here(monkeypatch, hub.url, folder / "home")
    output = rule[0](command.words, capsys)
    assert output.strip()
    check_printed(command, output)


@thorough
@pytest.mark.parametrize("command", [c for c in ONCE if rule_for(c, THOROUGH) is not None], ids=str)
def test_commands_that_compute_do_so(command, folder, hub):
    words = [*command.words, *shlex.split(rule_for(command, THOROUGH))]
    if "--nproc_per_node" in words:
        words[words.index("--nproc_per_node") + 1] = "2"
    if words[0] == "tensorboard":
        return look_at_tensorboard(words, folder)
    variables = environment() | hub_environment(hub.url, folder / "home") | {"HF_HUB_OFFLINE": "0"}
    done = subprocess.run(words, cwd=folder, env=variables, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert done.stdout.strip() or "torchrun" in words
    check_printed(command, done.stdout)


def look_at_tensorboard(words: list[str], folder: Path) -> None:
    port = free_port()
    words[words.index("--port") :] = ["--port", str(port)]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    server = subprocess.Popen(words, cwd=folder, env=environment(), **quiet)
    try:
        for _ in range(1200):
            with contextlib.suppress(OSError):
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/data/plugins_listing") as answer:
                    assert json.load(answer)["custom_scalars"]
                return
            time.sleep(0.5)
        raise AssertionError("TensorBoard did not answer within ten minutes")
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait()


def test_the_problem_in_the_readme_is_one_that_the_miniature_world_asks():
    readme = [command.words for command in FOUND if command.page == "README.md"]
    [question] = [words[3] for words in readme if words[:3] == ["dccot", "solve", "runs/demo/stage4"]]
    assert question == EXAMPLE  # of `dccot solve --help`
    asked = {shape_of(problem.question): problem for problem, _ in zip(problem_stream(0, "test"), range(300))}
    assert shape_of(question) in asked, f"the miniature world asks {next(iter(asked.values())).question!r}"


def shape_of(question: str) -> str:
    """A question whatever its letters, its digits and the length of its list."""
    return re.sub(r"(\bx\W+0\W+)+", "list", re.sub(r"\d", "0", re.sub(r"\b[A-Za-z]\b", "x", question)))


def anchors_of(page: Path) -> set[str]:
    """Headings as hosts turn them into anchors: lower case, blanks to hyphens, punctuation gone."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_files_pages_and_headings_that_a_page_names_exist(page):
    text = page.read_text()
    assert set(re.findall(r"`dccot ([\w-]+)", text)) <= COMMANDS.keys()
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"`make ([\w-]+)`", text)) <= targets
    named = re.findall(r"`([\w/]+/[\w.]+\.(?:py|yaml|txt|md))`", text)
    assert [name for name in named if not name.startswith("runs/") and not (ROOT / name).exists()] == []
    for link in re.findall(r"\]\(([^)]*)\)", text):
        if "://" in link:
            address = urllib.parse.urlsplit(link)
            assert address.scheme == "https" and "." in address.netloc and " " not in link, link
            continue
        file, _, anchor = link.partition("#")
        target = page.parent / file if file else page
        assert target.exists(), link
        assert not anchor or anchor in anchors_of(target), f"{link}: no such heading"


@pytest.mark.parametrize("name", sorted(set(dccot.__all__) - {"solve"}))
def test_public_names_have_examples_that_run(name):
    run_examples(name, {})


@thorough
def test_the_example_of_solve_runs(folder):
    run_examples("solve", {"model": folder / "MODEL"})


@thorough
def test_the_python_of_the_readme_runs(folder):
    [code] = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    code = code.replace('")', '", budget=60)', 1)
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, env=environment(), capture_output=True, text=True, timeout=600
    )
    assert "tokens" in done.stdout, done.stderr[-2000:]


def run_examples(name: str, names: dict) -> None:
    subject = getattr(dccot, name)
    module = subject if isinstance(subject, ModuleType) else sys.modules[subject.__module__]
    [example] = doctest.DocTestFinder(recurse=False).find(subject, name, module, extraglobs=vars(module) | names)
    assert example.examples, f"dccot.{name} has no example"
    result = doctest.DocTestRunner().run(example)
    assert result.failed == 0


@thorough
def test_the_wheel_runs_outside_the_checkout(folder, tmp_path):
    """Built from the tracked files alone, installed where nothing else is; dependencies come from here, the checkout
    does not.
    """
    source, empty = tmp_path / "source", tmp_path / "empty"
    outside = {
        name: value for name, value in environment().items() if name != "PYTHONPATH"
    }  # which leads to the checkout

    def run(*words, cwd=tmp_path) -> str:
        return subprocess.run(words, cwd=cwd, env=outside, capture_output=True, text=True, check=True).stdout

    for file in run("git", "ls-files", cwd=ROOT).splitlines():
        (source / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / file, source / file, follow_symlinks=False)
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", tmp_path / "dist", source)
    run(sys.executable, "-m", "venv", "--without-pip", empty)
    [wheel] = (tmp_path / "dist").glob("*.whl")
    pip = (sys.executable, "-m", "pip", "--python", empty / "bin/python")
    run(*pip, "install", "-q", "--no-deps", "--no-index", wheel)
    [packages] = empty.glob("lib/python*/site-packages")
    # A folder named in a .pth file is searched, but .pth files in it, such as the one that names this checkout, are not
    # read.
    (packages / "dependencies.pth").write_text(f"{Path(pytest.__file__).parents[1]}\n")
    shutil.rmtree(source)
    assert run(empty / "bin/python", "-c", "import dccot; print(dccot.__file__)").startswith(str(packages))
    ask = ("solve", folder / "MODEL", "What is 2 + 3?", "--budget", "300", "--json")
    solution = json.loads(run(empty / "bin/dccot", *ask))
    assert 0 < solution["longest_path"] <= 300
    shown = run(empty / "bin/dccot", "rl", "configs/rl/stage1.yaml", "model.path=x", "data.train=y", "--print-config")
    assert "kind: dapo" in shown
    rollouts = folder / "runs/demo/stage4/rollouts/step_000000.jsonl.gz"
    assert "responses" in run(empty / "bin/dccot", "view", rollouts, "--out", tmp_path / "page.html")
