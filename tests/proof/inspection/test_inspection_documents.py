"""docs/findings.md has a section for every finding."""

import re
from pathlib import Path

import meshwright.proof.inspection.run_checks  # noqa: F401, which imports every check
from meshwright.proof.inspection.finding import Finding


def test_every_finding_has_a_section_with_its_kind():
    document = Path(__file__).parents[3] / "docs/findings.md"
    sections = dict(re.findall(r"^### (\S+)\n\n\*([^*]+)\.\*", document.read_text(), re.MULTILINE))
    assert sections == {found.id: str(found.kind) for found in Finding.__subclasses__()}
