"""tests/support/planted_faults.py can plant every fault: it runs for an hour, and code moves."""

from collections import Counter
from pathlib import Path

from tests.support.planted_faults import FAULTS

ROOT = Path(__file__).parent.parent


def test_every_fault_has_its_place():
    found = Counter({fault: (ROOT / fault.file).read_text().count(fault.before) for fault in FAULTS})
    assert [f"{fault.file}: {fault.before}" for fault, count in found.items() if count != 1] == []
