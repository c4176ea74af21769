"""docs/inspect.md names every kind of finding."""

import re
from pathlib import Path

from meshwright.proof.inspection.finding import FindingKind


def test_every_kind_of_finding_is_in_the_document():
    document = Path(__file__).parents[3] / "docs/inspect.md"
    rows = re.findall(r"^\| ([^|]+) \|", document.read_text(), re.MULTILINE)
    assert {kind.value for kind in FindingKind} <= {*rows}
