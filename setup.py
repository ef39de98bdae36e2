"""Installs the top-level folders as dccot.kernels, dccot.model, ... and the `dccot` command.

The folders stand at the top of the repository because they are the map of the system; they are installed below `dccot`
because bare names such as `kernels` collide with other packages.
"""
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
ROOMS = ["kernels", "model", "train", "rollout", "eval", "data", "configs"]


def pinned(name: str) -> list[str]:
    lines = (HERE / "requirements" / name).read_text().splitlines()
    return [line.strip() for line in lines if line.strip() and not line.startswith(("#", "-"))]


def packages() -> dict[str, str]:
    """Package name → folder, rooms' subfolders included."""
    found = {"dccot": "dccot"}
    for room in ROOMS:
        found[f"dccot.{room}"] = room
        found |= {f"dccot.{room}.{sub}": f"{room}/{sub.replace('.', '/')}" for sub in find_packages(room)}
    return found


setup(
    name="dccot",
    version="0.1.0",
    description="Trains, runs and measures language models that think in parallel (Divide-and-Conquer CoT)",
    long_description=(HERE / "README.md").read_text() if (HERE / "README.md").exists() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    package_dir=packages(),
    packages=list(packages()),
    package_data={"dccot": ["py.typed"], "dccot.configs": ["**/*.yaml"], "dccot.data": ["prompts/*"], "dccot.eval": ["pages/*"]},
    install_requires=pinned("common.txt"),
    extras_require={"gpu": pinned("gpu.txt"), "test": pinned("test.txt")},
    entry_points={"console_scripts": ["dccot = dccot.cli:main"]},
)
