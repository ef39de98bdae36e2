"""Installs the package `dccot` and its command.

The rooms (kernels, model, rollout, …) stand at the top of the repository because they are the map of the system. dccot/ links to each of
them, so that `dccot.kernels` means the same in a bare checkout, to a type checker, to an editor and when installed; bare names such as
`kernels` would collide with other packages.
"""

import re
from pathlib import Path

from setuptools import find_namespace_packages, setup

HERE = Path(__file__).parent


def listed(name: str) -> list[str]:
    lines = (HERE / "requirements" / name).read_text().splitlines()
    return [line.strip() for line in lines if line.strip() and not line.startswith(("#", "-"))]


setup(
    name="dccot",
    version=re.search(r'__version__ = "(.+)"', (HERE / "dccot/__init__.py").read_text())[1],
    description="Trains, runs and measures language models that think in parallel (Divide-and-Conquer CoT)",
    long_description=(HERE / "README.md").read_text(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_namespace_packages(include=["dccot", "dccot.*"]),
    package_data={"dccot": ["py.typed"], "dccot.configs": ["**/*.yaml"], "dccot.data": ["prompts/*"], "dccot.eval": ["pages/*"]},
    install_requires=listed("common.txt"),
    extras_require={"gpu": listed("gpu.txt"), "test": listed("test.txt")},
    entry_points={"console_scripts": ["dccot = dccot.cli:main"]},
)
